"""Attaches a driver to a Ray cluster."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

import cloudpickle
import ray

from miniray.engines.ray.runtime import RayRuntime

if TYPE_CHECKING:
    from miniray.common.runtime import Runtime


#: Arguments of ``init()`` that Ray calls otherwise.
_THEIRS = {"memory": "_memory", "temp_dir": "_temp_dir"}


def connect_to_ray(options: Any) -> tuple[Runtime, dict[str, Any]]:
    """Attach this process to the cluster at the address, or start one of this machine.

    Never to one that Ray finds by itself, unless address is "auto": it may be another user's.

    Raises:
        ConnectionError: There is no cluster at the address.
    """
    address = options.address or os.environ.get("RAY_ADDRESS") or "local"
    env = dict(options.runtime_env or {})
    if address == "local":
        node = {"include_dashboard": False, **options.node}
        node.pop("gpu_family", None)  # Ray finds it
        size = {_THEIRS.get(name, name): value for name, value in node.items()}
    else:  # its workers need no installation of miniray
        size = {}
        own = [str(Path(__file__).parents[2]), str(Path(cloudpickle.__file__).parent)]
        env["py_modules"] = [*env.get("py_modules", ()), *own]
    if not address.startswith("ray://"):  # Ray Client takes no more than what is below
        size["log_to_driver"] = options.log_to_driver
        size["job_config"] = ray.job_config.JobConfig(
            metadata=dict(options.metadata), default_actor_lifetime=options.default_actor_lifetime
        )
    ray.init(address, namespace=options.namespace, runtime_env=env or None, **size)
    runtime = RayRuntime(options.runtime_env)
    now = runtime.context()
    return runtime, {
        "node_id": now.node_id,
        "address": now.address or address,
        "session_dir": now.session_dir,
        "namespace": now.namespace,
        "job_id": now.job_id,
        "webui_url": None,
    }
