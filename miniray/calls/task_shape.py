"""Which tasks can share a lease: those of one shape."""

from __future__ import annotations

import dataclasses
import json
from typing import TYPE_CHECKING, NamedTuple

from miniray.common.specs import Anywhere, BundleAffinity, LeaseSpec, Placement

if TYPE_CHECKING:
    from miniray.calls.context import ProcessFacts
    from miniray.common.runtime import Exported
    from miniray.common.specs import TaskOptions

#: Resources whose workers end after one task, so that device memory is released.
_SCALARS = frozenset({"CPU", "memory"})


class Shape(NamedTuple):
    """What tasks have in common that can run on the same lease."""

    #: Equal for tasks of one shape.
    key: str
    #: What the head is told of them, without the runtime environment.
    spec: LeaseSpec


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
    spec = LeaseSpec.of(
        options,
        name=options.name or function.name,
        placement=effective_placement(options.placement, group),
        runtime_env="",
    )
    # The worker of a function whose calls are limited runs no other one.
    limited = options.max_calls or not _SCALARS.issuperset(options.resources)
    parts = (
        dataclasses.replace(spec, name="").to_wire(),
        options.runtime_env or None,
        function.key if limited else None,
    )
    shape = Shape(json.dumps(parts, sort_keys=True, default=repr), spec)
    if len(_shapes) >= _SHAPES_LIMIT:
        _shapes.clear()
    _shapes[key] = (options, shape)
    return shape


def capturing_group(facts: ProcessFacts) -> bytes | None:
    """The placement group that the children of the running code belong to."""
    return facts.placement_group_id if facts.capture_child_tasks else None


def effective_placement(placement: Placement, group: bytes | None) -> Placement:
    """The placement with what a capturing placement group of the caller adds."""
    if isinstance(placement, Anywhere):
        return None
    if placement is None and group is not None:
        return BundleAffinity(group, -1, capture_child_tasks=True)
    if isinstance(placement, BundleAffinity) and placement.capture_child_tasks is None:
        return dataclasses.replace(placement, capture_child_tasks=group is not None)
    return placement
