"""How much a part of miniray keeps, whatever its tables are called."""

from __future__ import annotations

import collections
from typing import Any

_TABLES = (dict, list, set, collections.deque)


def kept(*parts: object) -> int:
    """Return how many items the tables of parts hold, with those of miniray's objects in them.

    A part that forgets what has ended keeps as much afterwards as before.
    """
    seen: set[int] = set()
    count = 0
    waiting: list[Any] = list(parts)
    while waiting:
        each = waiting.pop()
        if id(each) in seen:
            continue
        seen.add(id(each))
        if type(each).__name__ == "EventLog":  # what has happened is not forgotten
            continue
        if isinstance(each, _TABLES):
            count += len(each)
            waiting += [*each.keys(), *each.values()] if isinstance(each, dict) else each
        elif isinstance(each, tuple):
            waiting += each
        elif type(each).__module__.startswith("miniray."):
            slots = [name for cls in type(each).__mro__ for name in _slots(cls)]
            waiting += [getattr(each, name) for name in slots if hasattr(each, name)]
            waiting += vars(each).values() if hasattr(each, "__dict__") else ()
    return count


def _slots(cls: type) -> tuple[str, ...]:
    slots = cls.__dict__.get("__slots__", ())
    return (slots,) if isinstance(slots, str) else tuple(slots)
