"""The public modules beside the core API: placement groups, scheduling strategies, pools, queue.

Names that Ray has in ``ray.util`` itself are here too, loaded on first use.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from miniray.api import list_named_actors
    from miniray.util.actor_pool import ActorPool
    from miniray.util.placement_group import (
        get_current_placement_group,
        get_placement_group,
        placement_group,
        placement_group_table,
        remove_placement_group,
    )

_HOMES = {
    "ActorPool": "miniray.util.actor_pool",
    "get_current_placement_group": "miniray.util.placement_group",
    "get_placement_group": "miniray.util.placement_group",
    "list_named_actors": "miniray.api",
    "placement_group": "miniray.util.placement_group",
    "placement_group_table": "miniray.util.placement_group",
    "remove_placement_group": "miniray.util.placement_group",
}

__all__ = [
    "ActorPool",
    "get_current_placement_group",
    "get_placement_group",
    "list_named_actors",
    "placement_group",
    "placement_group_table",
    "remove_placement_group",
]


def __getattr__(name: str) -> Any:
    home = _HOMES.get(name)
    if home is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(home), name)
    globals()[name] = value
    return value
