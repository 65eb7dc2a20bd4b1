"""Bundles that have to be on nodes with one value of a label: on one TPU slice, in one rack.

Responsible for which bundles belong together, and which value each such set gets; placing
the bundles of a set is planning, in ``bundles.py``.
"""

from __future__ import annotations

import collections
from typing import TYPE_CHECKING

from miniray.common.labels import set_name

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from miniray.head.scheduling.bundles import GroupPlacement


def candidates(
    group: GroupPlacement, values: Mapping[str, str], has_room: Callable[[str, str], bool]
) -> dict[str, list[str]]:
    """For each set with missing bundles, the values whose nodes have room for all of them.

    A set keeps the value that the nodes of its placed bundles have, and no other set gets it.

    Args:
        group: The group.
        values: The label's value of each node; empty where it has none.
        has_room: Whether the missing bundles of a set fit on the nodes with a value.
    """
    names = {set_name(spec.selector) for spec in group.bundles}
    fixed = {
        name: values.get(node_id, "") for name in names for node_id in group.places(name).values()
    }
    free = sorted(set(values.values()) - set(fixed.values()) - {""})
    known: dict[tuple[object, str], bool] = {}  # equal sets have room on the same values
    found: dict[str, list[str]] = {}
    for name, specs in group.missing_sets.items():
        shape = tuple(
            (spec.needs, tuple(each for each in spec.selector if not each.same))
            for spec in specs.values()
        )
        found[name] = []
        for value in [fixed[name]] if name in fixed else free:
            if (shape, value) not in known:
                known[shape, value] = has_room(name, value)
            if known[shape, value]:
                found[name].append(value)
    return found


def match(candidates: Mapping[str, Sequence[str]]) -> dict[str, str] | None:
    """Give each set a value of its own, by augmenting paths.

    Args:
        candidates: For each set, the values whose nodes have room for it, best first.

    Returns:
        The value of each set; None if they can't all have one.
    """
    set_with: dict[str, str] = {}  # value -> set
    for start in candidates:
        reached: dict[str, str] = {}  # value -> set that it was reached from
        frontier = collections.deque([start])
        free: str | None = None
        while frontier and free is None:
            name = frontier.popleft()
            for value in candidates[name]:
                if value in reached:
                    continue
                reached[value] = name
                if value not in set_with:
                    free = value
                    break
                frontier.append(set_with[value])
        if free is None:
            return None
        _shift(free, start, reached, set_with)
    return {name: value for value, name in set_with.items()}


def _shift(free: str, start: str, reached: dict[str, str], set_with: dict[str, str]) -> None:
    """Move the sets on the way to a free value on by one, so that the first one gets a value."""
    value_of = {name: value for value, name in set_with.items()}
    value: str | None = free
    while value is not None:
        name = reached[value]
        left = None if name == start else value_of[name]
        set_with[value] = name
        value = left
