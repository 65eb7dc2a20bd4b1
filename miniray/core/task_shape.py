"""Which tasks can share a lease, and what the head is told about them."""

from __future__ import annotations

import dataclasses
import json
from typing import TYPE_CHECKING, Any

from miniray.core.runtime import BundleAffinity, NodeAffinity, Placement, Spread

if TYPE_CHECKING:
    from miniray.core.runtime import Exported, TaskOptions
    from miniray.core.runtime_parts import RuntimeParts

#: Resources whose workers end after one task, so that device memory is released.
_SCALARS = frozenset({"CPU", "memory"})

#: shape by id of the options, which RemoteFunction keeps; the options are held so ids stay valid
_shapes: dict[tuple[int, bytes], tuple[TaskOptions, Any]] = {}
_SHAPES_LIMIT = 4096


def shape_of(options: TaskOptions, function: Exported) -> Any:
    """A key that is equal for tasks that can run on the same lease."""
    known = _shapes.get((id(options), function.key))
    if known is not None:
        return known[1]
    limited = (
        function.key if options.max_calls or not _SCALARS.issuperset(options.resources) else None
    )
    shape = (
        tuple(sorted(options.resources.items())),
        options.placement,
        json.dumps(options.runtime_env, sort_keys=True, default=repr)
        if options.runtime_env
        else None,
        tuple(sorted(options.label_selector.items())) if options.label_selector else None,
        tuple(tuple(sorted(each.items())) for each in options.fallback_selectors),
        _max_calls(options),
        limited,
    )
    if len(_shapes) >= _SHAPES_LIMIT:
        _shapes.clear()
    _shapes[(id(options), function.key)] = (options, shape)
    return shape


def placement_data(placement: Placement) -> tuple[Any, ...] | None:
    """A placement as plain data for the head."""
    if isinstance(placement, NodeAffinity):
        return ("node", bytes.fromhex(placement.node_id), placement.soft)
    if isinstance(placement, BundleAffinity):
        return (
            "bundle",
            placement.placement_group_id,
            placement.bundle_index,
            placement.capture_child_tasks,
        )
    if isinstance(placement, Spread):
        return ("spread",)
    return None


def placement_from_data(data: tuple[Any, ...] | None) -> Placement:
    """The head's side of ``placement_data``."""
    if data is None:
        return None
    if data[0] == "node":
        return NodeAffinity(data[1].hex(), data[2])
    if data[0] == "bundle":
        return BundleAffinity(data[1], data[2], data[3])
    return Spread()


def effective_placement(placement: Placement, runtime: RuntimeParts) -> Placement:
    """The placement with what a capturing placement group of the caller adds."""
    facts = runtime.facts
    captures = bool(facts.capture_child_tasks and facts.placement_group_id is not None)
    if placement is None and captures:
        assert facts.placement_group_id is not None
        return BundleAffinity(facts.placement_group_id, -1, capture_child_tasks=True)
    if isinstance(placement, BundleAffinity) and placement.capture_child_tasks is None:
        return dataclasses.replace(placement, capture_child_tasks=captures)
    return placement


def _max_calls(options: TaskOptions) -> int | None:
    """None: 1 where a lease holds devices, no limit where it does not."""
    return options.max_calls if options.max_calls_given else None


def task_spec(options: TaskOptions, function: Exported, runtime: RuntimeParts) -> dict[str, Any]:
    """What the head needs to know to grant leases of this shape."""
    return {
        "resources": dict(options.resources),
        "placement": placement_data(effective_placement(options.placement, runtime)),
        "runtime_env": runtime.runtime_env_for(options.runtime_env),
        "labels": dict(options.label_selector) if options.label_selector else None,
        "fallback_labels": [dict(each) for each in options.fallback_selectors],
        "max_calls": _max_calls(options),
        "name": options.name or function.name,
    }
