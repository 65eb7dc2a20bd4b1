"""The arguments of ``init()``, checked; how to get there is ``bootstrap.py``'s business."""

from __future__ import annotations

import dataclasses
import json
import os
import warnings
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from miniray.common.host_port import full_address
from miniray.common.names import user_stacklevel
from miniray.engines import engine_of
from miniray.system import option_checks as check

if TYPE_CHECKING:
    from collections.abc import Callable

    from miniray.job_config import JobConfig

#: Environment variable that says which cluster to attach to, where ``address`` does not.
ADDRESS_VARIABLE = "MINIRAY_ADDRESS"
#: Variables of the drivers in a submitted job: its id, and its ``JobConfig`` as JSON.
JOB_ID_VARIABLE = "MINIRAY_JOB_ID"
JOB_CONFIG_VARIABLE = "MINIRAY_JOB_CONFIG"

#: Arguments of Ray that miniray accepts without an effect: they tune parts of Ray only.
_NO_EFFECT = frozenset(
    {
        "configure_logging",
        "logging_config",
        "logging_format",
        "_driver_object_store_memory",
        "_enable_object_reconstruction",
        "_metrics_export_port",
        "_node_name",
        "_plasma_directory",
        "_redis_password",
        "_redis_username",
        "_skip_env_hook",
        "_system_config",
        "_tracing_startup_hook",
    }
)

#: Arguments of Ray that would mean something else here, and what to do instead.
_REFUSED = {
    "local_mode": "run with num_cpus=1, or call the plain functions (f.__wrapped__)",
    "enable_resource_isolation": "set limits for the cgroup that the node runs in",
    "cgroup_path": "set limits for the cgroup that the node runs in",
    "system_reserved_cpu": "give num_cpus",
    "system_reserved_memory": "give _memory",
    "proxy_server_url": "start a web server in an actor",
    "_object_spilling_directory": "set the variable MINIRAY_SPILL_FOLDER",
    "_node_ip_address": "start the cluster with `miniray start --head`",
    "storage": "give RunConfig(storage_path=...) to the trainer",
}


#: Arguments that ``init`` does not name.
_ALSO_TAKEN = (
    "_memory",
    "_temp_dir",
    "logging_level",
    "include_dashboard",
    "dashboard_host",
    "dashboard_port",
)
#: Arguments that are fields of ``BootOptions``.
_OF_NODE = (
    "num_cpus",
    "num_gpus",
    "gpu_family",
    "resources",
    "labels",
    "object_store_memory",
    "memory",
    "temp_dir",
    "include_dashboard",
    "dashboard_host",
    "dashboard_port",
)


@dataclasses.dataclass
class InitOptions:
    """Checked arguments of ``init()``. None means: as the cluster or the machine has it."""

    #: "local" (start an embedded cluster), "auto" (find a running one), "host:port", or
    #: None: find a running one, else start an embedded one.
    address: str | None = None
    engine: str = "miniray"
    #: Fields of ``BootOptions`` for a new cluster, those that were given.
    node: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    namespace: str | None = None  # None: one of its own
    runtime_env: Mapping[str, Any] | None = None
    log_to_driver: bool = True
    logging_level: int | str | None = None  # of miniray's loggers
    default_actor_lifetime: str = "non_detached"
    metadata: Mapping[str, str] = dataclasses.field(default_factory=dict)


def check_init(
    others: Mapping[str, Any], job_config: JobConfig | None = None, **given: Any
) -> InitOptions:
    """Check the arguments of ``init()``.

    Raises:
        TypeError: There is no such argument, or a value is of a wrong type.
        ValueError: A value is not allowed, or the arguments don't go together.
    """
    others = dict(others)
    given |= {name.lstrip("_"): others.pop(name, None) for name in _ALSO_TAKEN}
    _check_others(
        others, {*given, *_ALSO_TAKEN, "job_config", *_NO_EFFECT} - {"memory", "temp_dir"}
    )
    checks: dict[str, Callable[[str, Any], Any]] = {
        "address": _check_address,
        "engine": check.text,
        "num_cpus": check.whole(0),
        "num_gpus": check.whole(0),
        "gpu_family": _gpu_family,
        "resources": _node_resources,
        "labels": check.labels,
        "namespace": check.text,
        "runtime_env": check.runtime_env,
        "log_to_driver": check.boolean,
        "object_store_memory": check.size(1),
        "memory": check.size(0),
        "temp_dir": check.text,
        "logging_level": _logging_level,
        "include_dashboard": check.boolean,
        "dashboard_host": check.text,
        "dashboard_port": check.whole(0),
    }
    values = {name: checks[name](name, value) for name, value in given.items() if value is not None}
    from_variable = os.environ.get(ADDRESS_VARIABLE)
    if values.get("address", "auto") == "auto" and from_variable:
        values["address"] = _check_address(ADDRESS_VARIABLE, from_variable)
    values["engine"] = engine_of(values.get("engine"), values.get("address"))
    configured = _configured(job_config)
    if values.get("address") in ("auto", from_variable):
        configured = _of_submitted_job(configured, values)
    node = {name: values.pop(name) for name in _OF_NODE if name in values}
    options = InitOptions(**(configured | values), node=node)
    if options.address not in (None, "local"):
        refuse_node_arguments(options, options.address)
    return options


def _configured(job_config: JobConfig | None) -> dict[str, Any]:
    """Return the options that a ``JobConfig`` sets."""
    if job_config is None:
        return {}
    from miniray.job_config import JobConfig

    if not isinstance(job_config, JobConfig):
        raise check.wrong_type("job_config", job_config, "a miniray.job_config.JobConfig")
    return {
        "namespace": job_config.ray_namespace,
        "runtime_env": job_config.runtime_env,
        "default_actor_lifetime": job_config.default_actor_lifetime,
        "metadata": dict(job_config.metadata),
    }


def _of_submitted_job(configured: dict[str, Any], values: dict[str, Any]) -> dict[str, Any]:
    """Return options within those of the submitted job that this driver is part of, if any."""
    text = os.environ.get(JOB_CONFIG_VARIABLE)
    if not text:
        return configured
    from miniray.job_config import JobConfig
    from miniray.runtime_env.validate import merge

    job = _configured(JobConfig.from_json(json.loads(text)))
    own = merge(configured.get("runtime_env"), values.get("runtime_env"))
    values["runtime_env"] = merge(job["runtime_env"], own)
    metadata = {**configured.get("metadata", {}), **job["metadata"]}
    return job | configured | {"metadata": metadata}


def _logging_level(name: str, value: Any) -> int | str:
    names = ["CRITICAL", "ERROR", "WARNING", "INFO", "DEBUG", "NOTSET"]
    if isinstance(value, bool) or not isinstance(value, int | str):
        raise check.wrong_type(name, value, f"a number or one of {', '.join(names)}")
    if isinstance(value, str) and value.upper() not in names:
        raise ValueError(f"{name} must be a number or one of {', '.join(names)}, not {value!r}.")
    return value if isinstance(value, int) else value.upper()


def _gpu_family(name: str, value: Any) -> str:
    from miniray.accelerators.registry import GPU_FAMILIES, family_named

    return family_named(check.text(name, value), GPU_FAMILIES).name


def _node_resources(name: str, value: Any) -> dict[str, Any]:
    """Accept the resources of a node: amounts, or declarations of custom devices."""
    from miniray.system.boot_options import check_resources

    if not isinstance(value, Mapping):
        raise check.wrong_type(name, value, "a dict of resource name to amount")
    check_resources(value)
    return dict(value)


def _check_others(others: Mapping[str, Any], known: set[str]) -> None:
    for name in others:
        if name in _NO_EFFECT:
            continue
        if name in _REFUSED:
            if not others[name]:
                continue  # what miniray does anyway
            raise TypeError(f"init() does not support {name} in miniray: {_REFUSED[name]}.")
        raise TypeError(f"init() has no argument {name!r}.{check.suggestion(name, known)}")
    ignored = sorted(name for name in others if name in _NO_EFFECT and others[name])
    if ignored:
        warnings.warn(
            f"These arguments of init() have no effect in miniray: {', '.join(ignored)}.",
            UserWarning,
            stacklevel=user_stacklevel(),
        )


def _check_address(name: str, given: Any) -> str:
    if not isinstance(given, str):
        raise check.wrong_type(name, given, '"local", "auto" or "host:port"')
    value = check.plain_text(given)
    if value in ("local", "auto") or value.startswith("ray://"):
        return value
    if value.startswith("unix:"):
        if value == os.environ.get(ADDRESS_VARIABLE):  # `miniray run` sets it for its program
            return value
        raise ValueError(
            f"{name}={value!r} is the address of a cluster that belongs to a program, whose init() "
            "or `miniray run` has started it: it ends with that, and other programs do not attach "
            "to it. Start one with `miniray start --head`."
        )
    try:
        return full_address(value)
    except ValueError as error:
        raise ValueError(f'{name} must be "local", "auto" or an address. {error}') from None


def refuse_node_arguments(options: InitOptions, address: str | None) -> None:
    """Raise ValueError for arguments that only a new cluster could heed."""
    given = [
        name
        for name, value in options.node.items()
        if name not in ("temp_dir", *_ALSO_TAKEN) and value != {}
    ]
    if given:
        raise ValueError(
            f"{', '.join(given)} can't be given when attaching to a running cluster "
            f"(address={address!r}): its nodes have their own. Leave them out, or give "
            f'address="local" to start a cluster.'
        )
