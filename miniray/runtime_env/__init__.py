"""Runtime environments: packages of user code, virtual environments, variables.

This module holds the two classes that users write, ``RuntimeEnv`` and
``RuntimeEnvConfig``. What a key may hold is checked by ``validate``, how a job's and
a task's environments combine by ``merge``; a driver uploads local files with
``packages``, and a node builds what workers need with ``install``.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import os
    import types
    from collections.abc import Mapping, Sequence

__all__ = ["RuntimeEnv", "RuntimeEnvConfig"]


class RuntimeEnvConfig(dict[str, Any]):
    """How a runtime environment is set up; it is not part of the environment's identity.

    Args:
        setup_timeout_seconds: Seconds that setting up the environment on a node may take;
            -1 is no limit.
        eager_install: Set the environment up when the job starts, before it is first needed.

    Raises:
        TypeError, ValueError: A value is of the wrong type or out of range.
    """

    def __init__(self, setup_timeout_seconds: int = 600, eager_install: bool = True) -> None:
        from miniray.runtime_env.validate import validate_config

        super().__init__(
            validate_config(
                {"setup_timeout_seconds": setup_timeout_seconds, "eager_install": eager_install}
            )
        )

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self["setup_timeout_seconds"], self["eager_install"])


class RuntimeEnv(dict[str, Any]):
    """What a job, task or actor needs around its code; a plain dict works as well.

    Keys are checked, and local paths made absolute, when they are set.

    Args:
        env_vars: Environment variables. ``${NAME}`` in a value stands for the node's
            own variable.
        working_dir: A local folder or .zip file that becomes the working directory.
        py_modules: Local folders, .py, .whl or .zip files, or imported modules to import from.
        pip: Requirements, the path of a requirements file, or a dict with ``packages``
            and optionally ``pip_check``, ``pip_version`` and ``pip_install_options``.
        config: A ``RuntimeEnvConfig`` or a dict like it.
        excludes: Patterns as in a .gitignore file; matching files are not packed.
        _validate: False takes the values as they are; they have been checked before.
        **kwargs: Any other key is refused with the reason.

    Raises:
        TypeError, ValueError: A key is not supported or its value can't be used.

    Examples:
        >>> RuntimeEnv(env_vars={"LANGUAGE": "en"})
        {'env_vars': {'LANGUAGE': 'en'}}
    """

    def __init__(
        self,
        *,
        env_vars: Mapping[str, str] | None = None,
        working_dir: str | os.PathLike[str] | None = None,
        py_modules: Sequence[str | os.PathLike[str] | types.ModuleType] | None = None,
        pip: str | Sequence[str] | Mapping[str, Any] | None = None,
        config: Mapping[str, Any] | None = None,
        excludes: Sequence[str] | None = None,
        _validate: bool = True,
        **kwargs: Any,
    ) -> None:
        given = {
            "env_vars": env_vars,
            "working_dir": working_dir,
            "py_modules": py_modules,
            "pip": pip,
            "config": config,
            "excludes": excludes,
            **kwargs,
        }
        if _validate:
            from miniray.runtime_env.validate import validate

            super().__init__(validate(given))
        else:
            super().__init__({key: value for key, value in given.items() if value is not None})

    def __setitem__(self, key: str, value: Any) -> None:
        from miniray.runtime_env.validate import validate

        checked = validate({key: value})
        if checked:
            super().__setitem__(key, checked[key])
        else:
            self.pop(key, None)

    def __reduce__(self) -> tuple[Any, ...]:
        # The paths were checked where they exist; another machine need not have them.
        return _restore, (type(self), dict(self))

    def set(self, name: str, value: Any) -> None:
        """Set a key, checked."""
        self[name] = value

    def to_dict(self) -> dict[str, Any]:
        """Return a plain dict with the same content."""
        import copy

        return copy.deepcopy(dict(self))


def _restore(cls: type[RuntimeEnv], values: dict[str, Any]) -> RuntimeEnv:
    return cls(_validate=False, **values)
