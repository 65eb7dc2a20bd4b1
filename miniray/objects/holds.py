"""Rows of a report on the objects of a process, or of a daemon: the largest, and why each is held.

A ref is one Python object: user code, a call in flight and a value that contains it may all hold
the same one. A ref that a call or a value is seen to hold is counted as theirs alone.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from miniray.common.state_types import PICKLED, order
from miniray.messages import protocol as p

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable

    from miniray.common.object_ref import ObjectRef
    from miniray.common.state_types import Hold, ObjectRow, ReferenceType
    from miniray.objects.objects import Entry, Value

#: Names that are listed for one reason.
_MAX_NAMES = 3


class Holds:
    """What holds the objects of these ids in this process."""

    def __init__(self, ids: Collection[bytes]) -> None:
        self._reasons: dict[bytes, dict[ReferenceType, Hold]] = {id: {} for id in ids}
        #: By object: which refs something was seen to hold.
        self._seen: dict[bytes, set[int]] = {id: set() for id in ids}

    def see(self, kind: ReferenceType, name: str, refs: Iterable[ObjectRef[Any]]) -> None:
        """Note that something holds these refs.

        Args:
            kind: Call or value, in Ray's words.
            name: Of the call, or the id of the value.
            refs: What it holds.
        """
        for ref in refs:
            reasons = self._reasons.get(ref.binary())
            if reasons is None:
                continue
            self._seen[ref.binary()].add(id(ref))
            reason = reasons.setdefault(kind, {"kind": kind, "count": 0, "names": []})
            reason["count"] += 1
            if name not in reason["names"] and len(reason["names"]) < _MAX_NAMES:
                reason["names"].append(name)

    def of(self, entry: Entry, pickled: int) -> list[Hold]:
        """Return all reasons for an object; refs that nothing was seen to hold are user code's.

        Args:
            entry: Of the object.
            pickled: How many copies of its refs were pickled by the user.
        """
        local = entry.local - pickled - len(self._seen[entry.id])
        holds: list[Hold] = []
        if local > 0:
            holds.append({"kind": "LOCAL_REFERENCE", "count": local, "names": []})
        if pickled:
            holds.append({"kind": "LOCAL_REFERENCE", "count": pickled, "names": [PICKLED]})
        return [*holds, *self._reasons[entry.id].values()]


def is_shared(value: Value | None) -> bool:
    """Whether a value is in shared memory."""
    return value is not None and value[0] == p.VALUE_SHARED


def place_of(value: Value | None) -> tuple[bytes, int, int]:
    """Node, segment and size of a value; no node and segment 0 if it is not in shared memory."""
    if value is None:
        return b"", 0, 0
    if value[0] == p.VALUE_SHARED:
        node, segment, size = value[1]
        return node, segment, size
    return b"", 0, len(value[1])


def order_of(value: Value | None, id: bytes) -> tuple[int, int, bytes]:
    """Return the place of a value among others; see ``order``."""
    node, segment, size = place_of(value)
    return order(size, segment, node or id)


def object_row(
    id: bytes,
    owner: bytes,
    process: bytes,
    value: Value | None,
    *,
    status: str,
    call_site: str,
    holds: list[Hold],
    borrowers: list[bytes],
) -> ObjectRow:
    """Return an object as a process knows it; the fields are those of ``ObjectRow``."""
    node, segment, size = place_of(value)
    return {
        "id": id,
        "owner": owner,
        "process": process,
        "size": size,
        "node": node,
        "segment": segment,
        "status": status,
        "call_site": call_site,
        "holds": holds,
        "borrowers": borrowers,
    }
