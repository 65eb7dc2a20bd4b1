"""miniray: an actor runtime for Python with Ray's public API.

This module only re-exports: every name has one home, and subpackages that few
programs need are loaded when they are first used.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from miniray import exceptions
from miniray.actor import ActorClass, ActorHandle, ActorMethod, method
from miniray.api import (
    available_resources,
    cancel,
    cluster_resources,
    get,
    get_actor,
    get_gpu_ids,
    init,
    is_initialized,
    kill,
    nodes,
    put,
    shutdown,
    wait,
)
from miniray.common.absent import lazy
from miniray.common.object_ref import ObjectRef
from miniray.decorator import remote
from miniray.runtime_context import get_runtime_context
from miniray.version import VERSION as __version__  # noqa: N811 -- the usual name

if TYPE_CHECKING:
    from miniray import actor, cloudpickle, data, runtime_env, train, util
    from miniray.objects.object_ref_generator import ObjectRefGenerator
    from miniray.profiling.timeline import timeline

__all__ = [
    "ActorClass",
    "ActorHandle",
    "ActorMethod",
    "ObjectRef",
    "ObjectRefGenerator",
    "__version__",
    "actor",
    "available_resources",
    "cancel",
    "cloudpickle",
    "cluster_resources",
    "data",
    "exceptions",
    "get",
    "get_actor",
    "get_gpu_ids",
    "get_runtime_context",
    "init",
    "is_initialized",
    "kill",
    "method",
    "nodes",
    "put",
    "remote",
    "runtime_env",
    "shutdown",
    "timeline",
    "train",
    "util",
    "wait",
]

_MODULES = frozenset(
    {"cloudpickle", "dag", "data", "experimental", "job_config", "runtime_env", "train", "util"}
)

#: Names that few programs need, and where they are.
_HOMES = {
    "DynamicObjectRefGenerator": "miniray.objects.object_ref_generator",
    "ObjectRefGenerator": "miniray.objects.object_ref_generator",
    "timeline": "miniray.profiling.timeline",
}

_IDS = ("ActorID", "JobID", "NodeID", "ObjectID", "PlacementGroupID", "TaskID", "WorkerID")
_MODES = ("LOCAL_MODE", "SCRIPT_MODE", "WORKER_MODE")

#: Names of Ray that are not here, and what to do instead.
_ABSENT = {
    **dict.fromkeys(_IDS, "ids are hex strings; miniray.get_runtime_context() has them"),
    **dict.fromkeys(_MODES, "miniray.get_runtime_context().get_task_id() is None in a driver"),
    "ClientBuilder": "miniray.init('HOST:PORT') attaches from any machine",
    "Language": "tasks and actors are Python",
    "LoggingConfig": "leave it out; miniray.train has one for training runs",
    "air": "miniray.train has what trainers take and return",
    "autoscaler": "start and stop nodes with `miniray start` and `miniray stop`",
    "client": "miniray.init('HOST:PORT') attaches from any machine",
    "dashboard": "`miniray status` and miniray.util.state tell what there is",
    "rllib": "train in actors, or with miniray.train",
    "serve": "start a web server in an actor",
    "tune": "start one training run per configuration in tasks",
    "workflow": "call tasks with the refs of others",
}

if not TYPE_CHECKING:  # else a type checker takes any name for one that is there
    __getattr__, __dir__ = lazy(__name__, _HOMES, _MODULES, _ABSENT)
