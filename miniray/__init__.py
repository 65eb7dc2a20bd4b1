"""miniray: an actor runtime for Python with Ray's public API.

This module only re-exports: every name has one home, which is loaded when the name is first
used. So a command, a node and its head load of the package what they need.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from miniray.common.absent import lazy
from miniray.common.first_use import start_with
from miniray.version import VERSION as __version__  # noqa: N811 -- the usual name

if TYPE_CHECKING:
    from miniray import actor, cloudpickle, data, exceptions, runtime_env, train, util
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
    from miniray.common.object_ref import ObjectRef
    from miniray.decorator import remote
    from miniray.objects.object_ref_generator import ObjectRefGenerator
    from miniray.profiling.timeline import timeline
    from miniray.runtime_context import get_runtime_context

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
    {
        "actor",
        "cloudpickle",
        "dag",
        "data",
        "exceptions",
        "experimental",
        "job_config",
        "runtime_context",
        "runtime_env",
        "train",
        "util",
    }
)

_OF_API = [
    "available_resources",
    "cancel",
    "cluster_resources",
    "get",
    "get_actor",
    "get_gpu_ids",
    "init",
    "is_initialized",
    "kill",
    "nodes",
    "put",
    "shutdown",
    "wait",
]
#: Where each name is.
_HOMES = {
    **dict.fromkeys(("ActorClass", "ActorHandle", "ActorMethod", "method"), "miniray.actor"),
    **dict.fromkeys(_OF_API, "miniray.api"),
    "DynamicObjectRefGenerator": "miniray.objects.object_ref_generator",
    "ObjectRef": "miniray.common.object_ref",
    "ObjectRefGenerator": "miniray.objects.object_ref_generator",
    "get_runtime_context": "miniray.runtime_context",
    "remote": "miniray.decorator",
    "timeline": "miniray.profiling.timeline",
}

_IDS = ("ActorID", "JobID", "NodeID", "ObjectID", "PlacementGroupID", "TaskID", "WorkerID")
_LANGUAGES = ("Language", "cpp_function", "cross_language", "java_actor_class", "java_function")
_MODES = ("LOCAL_MODE", "SCRIPT_MODE", "WORKER_MODE")

#: Names of Ray that are not here, and what to do instead.
_ABSENT = {
    **dict.fromkeys(_IDS, "ids are hex strings; miniray.get_runtime_context() has them"),
    **dict.fromkeys(_MODES, "miniray.get_runtime_context().get_task_id() is None in a driver"),
    **dict.fromkeys(_LANGUAGES, "tasks and actors are Python"),
    "ClientBuilder": "miniray.init('HOST:PORT') attaches from any machine",
    "LoggingConfig": "leave it out; miniray.train has one for training runs",
    "_private": "it is private to Ray; miniray.util and miniray.util.state are public",
    "air": "miniray.train has what trainers take and return",
    "autoscaler": "start and stop nodes with `miniray start` and `miniray stop`",
    "client": "miniray.init('HOST:PORT') attaches from any machine",
    "dashboard": "`miniray status` and miniray.util.state show the cluster",
    "internal": "values go with their last ref",
    "llm": "call the model in actors, or in a class given to Dataset.map_batches()",
    "remote_function": "miniray.remote() makes remote functions",
    "rllib": "train in actors, or with miniray.train",
    "serve": "start a web server in an actor",
    "tune": "start one training run per configuration in tasks",
    "types": "import ObjectRef and ObjectRefGenerator from miniray",
    "workflow": "call tasks with the refs of others",
}


def _init() -> None:
    from miniray.api import init

    init(ignore_reinit_error=True)


start_with(_init)
if not TYPE_CHECKING:  # else a type checker takes any name for one that is there
    __getattr__, __dir__ = lazy(__name__, _HOMES, _MODULES, _ABSENT)
