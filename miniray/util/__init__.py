"""The public modules beside the core API: placement groups, scheduling strategies, pools, queue.

Names that Ray has in ``ray.util`` itself are here too, loaded on first use; but ``placement_group``
is the name of a module and of a function in it, and has to be the function whatever is imported.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from miniray.common.absent import lazy
from miniray.util.placement_group import (
    get_current_placement_group,
    get_placement_group,
    placement_group,
    placement_group_table,
    remove_placement_group,
)

if TYPE_CHECKING:
    from miniray.api import list_named_actors
    from miniray.util.actor_pool import ActorPool
    from miniray.util.helpers import (
        as_completed,
        get_node_ip_address,
        inspect_serializability,
        map_unordered,
    )
    from miniray.util.serialization import deregister_serializer, register_serializer

_HOMES = {
    "ActorPool": "miniray.util.actor_pool",
    "as_completed": "miniray.util.helpers",
    "deregister_serializer": "miniray.util.serialization",
    "get_node_ip_address": "miniray.util.helpers",
    "inspect_serializability": "miniray.util.helpers",
    "list_named_actors": "miniray.api",
    "map_unordered": "miniray.util.helpers",
    "register_serializer": "miniray.util.serialization",
}

__all__ = [
    "ActorPool",
    "as_completed",
    "deregister_serializer",
    "get_current_placement_group",
    "get_node_ip_address",
    "get_placement_group",
    "inspect_serializability",
    "list_named_actors",
    "map_unordered",
    "placement_group",
    "placement_group_table",
    "register_serializer",
    "remove_placement_group",
]

#: Modules that are loaded when they are first used.
_MODULES = frozenset(
    {
        "accelerators",
        "debug",
        "joblib",
        "metrics",
        "multiprocessing",
        "queue",
        "scheduling_strategies",
        "state",
        "tpu",
    }
)

#: Names of Ray that are not here, and what to do instead.
_ABSENT = {
    "annotations": "leave them out",
    "check_serialize": "inspect_serializability is in miniray.util",
    "client": "miniray.init('HOST:PORT') attaches from any machine",
    "collective": "use torch.distributed, which TorchTrainer sets up",
    "dask": "call functions as tasks, with the refs of others",
    "iter": "use generators, or miniray.util.map_unordered",
    **dict.fromkeys(("pdb", "rpdb"), "breakpoint() in a worker waits for `miniray debug`"),
    "spark": "write Parquet files with Spark, and read these with miniray.data",
}

if not TYPE_CHECKING:  # else a type checker takes any name for one that is there
    __getattr__, __dir__ = lazy(__name__, _HOMES, _MODULES, _ABSENT)
