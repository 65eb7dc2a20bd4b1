"""Which tasks can share a lease, and what the head is told about them."""

from __future__ import annotations

import dataclasses
import json
from typing import TYPE_CHECKING, Any, NamedTuple

from miniray.common.runtime import BundleAffinity, NodeAffinity, Placement, Spread

if TYPE_CHECKING:
    from miniray.calls.context import ProcessFacts
    from miniray.common.runtime import Exported, TaskOptions

#: Resources whose workers end after one task, so that device memory is released.
_SCALARS = frozenset({"CPU", "memory"})


class Shape(NamedTuple):
    """What tasks have in common that can run on the same lease."""

    resources: tuple[tuple[str, float], ...]
    #: Where they run, with what a capturing placement group of their caller adds.
    placement: Placement
    runtime_env: str | None
    label_selector: tuple[tuple[str, Any], ...] | None
    fallback_selectors: tuple[tuple[tuple[str, Any], ...], ...]
    #: None: 1 where a lease holds devices, no limit where it does not.
    max_calls: int | None
    #: The function, where its worker ends after a number of its calls.
    function: bytes | None


#: shape by id of the options, which RemoteFunction keeps, function and capturing placement group;
#: the options are held so ids stay valid
_shapes: dict[tuple[int, bytes, bytes | None], tuple[TaskOptions, Shape]] = {}
_SHAPES_LIMIT = 4096


def shape_of(options: TaskOptions, function: Exported, facts: ProcessFacts) -> Shape:
    """The shape of a task that this process calls now: a worker's group changes with its lease."""
    group = capturing_group(facts)
    key = (id(options), function.key, group)
    known = _shapes.get(key)
    if known is not None:
        return known[1]
    limited = (
        function.key if options.max_calls or not _SCALARS.issuperset(options.resources) else None
    )
    shape = Shape(
        tuple(sorted(options.resources.items())),
        effective_placement(options.placement, group),
        json.dumps(options.runtime_env, sort_keys=True, default=repr)
        if options.runtime_env
        else None,
        tuple(sorted(options.label_selector.items())) if options.label_selector else None,
        tuple(tuple(sorted(each.items())) for each in options.fallback_selectors),
        options.max_calls if options.max_calls_given else None,
        limited,
    )
    if len(_shapes) >= _SHAPES_LIMIT:
        _shapes.clear()
    _shapes[key] = (options, shape)
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


def capturing_group(facts: ProcessFacts) -> bytes | None:
    """The placement group that the children of the running code belong to."""
    return facts.placement_group_id if facts.capture_child_tasks else None


def effective_placement(placement: Placement, group: bytes | None) -> Placement:
    """The placement with what a capturing placement group of the caller adds."""
    if placement is None and group is not None:
        return BundleAffinity(group, -1, capture_child_tasks=True)
    if isinstance(placement, BundleAffinity) and placement.capture_child_tasks is None:
        return dataclasses.replace(placement, capture_child_tasks=group is not None)
    return placement


def task_spec(
    options: TaskOptions, function: Exported, shape: Shape, runtime_env: str
) -> dict[str, Any]:
    """What the head needs to know to grant leases of a shape."""
    return {
        "resources": dict(options.resources),
        "placement": placement_data(shape.placement),
        "runtime_env": runtime_env,
        "labels": dict(options.label_selector) if options.label_selector else None,
        "fallback_labels": [dict(each) for each in options.fallback_selectors],
        "max_calls": shape.max_calls,
        "name": options.name or function.name,
    }
