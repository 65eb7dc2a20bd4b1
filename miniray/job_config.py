"""``JobConfig``: what ``init(job_config=...)`` takes.

Checks what is given, as soon as it is given; how a job is started with it is ``init``'s business.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from miniray.system import option_checks as check

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = ["JobConfig"]

_lifetime = check.one_of("detached", "non_detached")

#: Arguments of Ray's that would mean something else here, and what to do instead.
_REFUSED = {
    "jvm_options": "miniray runs Python only",
    "code_search_path": "bring the code along with runtime_env={'py_modules': [...]}",
    "_client_job": "miniray.init('HOST:PORT') attaches from any machine",
    "_disable_job_level_lineage_reconstruction": "give tasks max_retries=0",
    "_py_driver_sys_path": "bring the code along with runtime_env={'py_modules': [...]}",
}
#: Their names in the JSON of ``from_json``.
_IN_JSON = {name: name.lstrip("_") for name in _REFUSED}


class JobConfig:
    """The configuration of a job.

    Args:
        jvm_options: Refused.
        code_search_path: Refused.
        runtime_env: Environment of the job's tasks and actors; that of ``init`` goes before.
        _client_job: Refused.
        metadata: Strings by name, shown by ``miniray.util.state.list_jobs``.
        ray_namespace: Where names are looked up; the namespace of ``init`` goes before.
        default_actor_lifetime: Of the job's actors that do not say theirs: "non_detached" or
            "detached".
        _disable_job_level_lineage_reconstruction: Refused.
        _py_driver_sys_path: Refused.

    Raises:
        TypeError: A value is of a wrong type, or asks for a feature that miniray lacks.
        ValueError: ``default_actor_lifetime`` is neither of the two.

    Examples:
        >>> JobConfig(metadata={"team": "vision"}).metadata
        {'team': 'vision'}
    """

    def __init__(
        self,
        jvm_options: Sequence[str] | None = None,
        code_search_path: Sequence[str] | None = None,
        runtime_env: Mapping[str, Any] | None = None,
        _client_job: bool = False,
        metadata: Mapping[str, str] | None = None,
        ray_namespace: str | None = None,
        default_actor_lifetime: str = "non_detached",
        _disable_job_level_lineage_reconstruction: bool = False,
        _py_driver_sys_path: Sequence[str] | None = None,
    ) -> None:
        given = (
            jvm_options,
            code_search_path,
            _client_job,
            _disable_job_level_lineage_reconstruction,
            _py_driver_sys_path,
        )
        for (name, instead), value in zip(_REFUSED.items(), given, strict=True):
            if value:
                raise TypeError(f"JobConfig does not support {name} in miniray: {instead}.")
        self.metadata: dict[str, str] = {}
        if metadata is not None and not isinstance(metadata, Mapping):
            raise check.wrong_type("metadata", metadata, "a dict of strings")
        for key, text in (metadata or {}).items():
            self.set_metadata(key, text)
        self.ray_namespace: str | None = None
        if ray_namespace is not None:
            self.set_ray_namespace(ray_namespace)
        self.set_runtime_env(runtime_env)
        self.set_default_actor_lifetime(default_actor_lifetime)

    def set_metadata(self, key: str, value: str) -> None:
        """Add to the metadata; a key that is there gets the new value."""
        self.metadata[check.text("metadata", key)] = check.text(f"metadata[{key!r}]", value)

    def set_runtime_env(
        self, runtime_env: Mapping[str, Any] | None, validate: bool = False
    ) -> None:
        """Set the runtime environment in place of an earlier one.

        Args:
            runtime_env: As ``init`` takes it; None is none.
            validate: Without effect: it is always checked.
        """
        del validate
        self.runtime_env: Mapping[str, Any] = (
            {} if runtime_env is None else check.runtime_env("runtime_env", runtime_env)
        )

    def set_ray_namespace(self, ray_namespace: str) -> None:
        """Set where names of actors and placement groups are looked up."""
        self.ray_namespace = check.text("ray_namespace", ray_namespace)

    def set_default_actor_lifetime(self, default_actor_lifetime: str) -> None:
        """Set the lifetime of actors that do not say theirs: "non_detached" or "detached"."""
        self.default_actor_lifetime: str = _lifetime(
            "default_actor_lifetime", default_actor_lifetime
        )

    def set_py_logging_config(self, logging_config: Any = None) -> None:
        """Refuse anything but None."""
        if logging_config is not None:
            raise TypeError(
                "JobConfig has no logging configuration in miniray: configure logging in the tasks "
                "and actors, or with the worker_runtime_env and LoggingConfig of miniray.train."
            )

    ensure_logging_config = set_py_logging_config

    @classmethod
    def from_json(cls, job_config_json: Mapping[str, Any]) -> JobConfig:
        """Make one of a dict with the names of the arguments.

        Raises:
            TypeError: It has another name, or a value is refused.
        """
        arguments = {theirs: name for name, theirs in _IN_JSON.items()}
        known = ["runtime_env", "metadata", "ray_namespace", "default_actor_lifetime"]
        for name in job_config_json:
            if name not in arguments and name not in known:
                hint = check.suggestion(name, {*arguments, *known})
                raise TypeError(f"JobConfig.from_json() has no field {name!r}.{hint}")
        return cls(**{arguments.get(name, name): job_config_json[name] for name in job_config_json})
