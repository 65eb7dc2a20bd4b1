"""What a daemon is told of an actor that it is to start."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from miniray.head.directories.actor import Actor


def daemon_spec(actor: Actor) -> bytes:
    """The ``spec`` of StartActor, as JSON."""
    spec = actor.spec
    job = actor.job
    placement = spec["placement"]
    in_group = placement is not None and placement[0] == "bundle"
    return json.dumps(
        {
            "name": spec["name"],
            "class_key": spec["class_key"].hex(),
            "class_name": spec["class_name"],
            "info": spec["info"].hex(),
            # Of the job, as in Ray: the actor's own namespace is only where its name is.
            "namespace": job.namespace if job is not None else spec["namespace"],
            "runtime_env": spec["runtime_env"],
            "max_concurrency": spec["max_concurrency"],
            "concurrency_groups": spec["concurrency_groups"],
            "is_async": spec["is_async"],
            "preload": spec.get("preload", []),
            "preload_later": spec.get("preload_later", []),
            "detached": spec["detached"],
            "restarts": actor.restarts,
            "owner": actor.owner.hex(),
            "owner_node": spec["owner_node"].hex(),
            "job_id": actor.job_id.hex(),
            "placement_group": placement[1].hex() if in_group else None,
            "capture_child_tasks": bool(in_group and placement[3]),
            "job": job.environment if job is not None else None,
        }
    ).encode()
