"""What a node's store holds, in numbers and piece by piece, for `miniray memory`.

Pure: reads the store's public attributes, tells nobody.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from miniray.common.first import First
from miniray.common.ids import owner_of
from miniray.common.memory_types import order
from miniray.messages import protocol as p
from miniray.node.store.kept_arguments import id_of_arguments, keepers_by_object

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from miniray.common.memory_types import (
        Hold,
        NodeMemory,
        ObjectRow,
        ObjectsHeld,
        ProcessTotals,
        SegmentRow,
        SegmentState,
        StoreTotals,
    )
    from miniray.node.store.kept_arguments import KeptArguments
    from miniray.node.store.segment import Segment
    from miniray.node.store.segments import SegmentStore
    from miniray.objects.objects import Value

    #: Id, value, borrowers, and how many other adopted objects contain it.
    Adopted = tuple[bytes, Value, list[bytes], int]

#: Processes that tell of one object, beyond which the others are only named by its owner.
_TOLD = 10


def is_spilled(segment: Segment) -> bool:
    """Whether a segment's bytes are on disk, and not in memory."""
    return not segment.in_memory


def state_of(segment: Segment) -> SegmentState:
    """What a segment waits for, if anything."""
    if segment.freed:
        return "FREED"
    return "WRITING" if segment.creator is not None else "HELD"


class StoreReport:
    """The segments of a store, added in as many steps as one likes."""

    def __init__(
        self, node_id: bytes, limit: int, source_of: Callable[[int], tuple[bytes, int] | None]
    ) -> None:
        """Begin with none.

        Args:
            node_id: Of this node.
            limit: How many segments are told one by one: the largest.
            source_of: Of which node and segment there a segment here is a copy, if it is one.
        """
        self._source_of = source_of
        self._node_id = node_id
        self._largest: First[Segment] = First(limit)
        self._freed = self._writing = self._spilled = 0
        self._freed_by: dict[bytes, int] = {}

    def add(self, segments: Iterable[Segment]) -> None:
        """Some more."""
        for segment in segments:
            size = segment.capacity
            node, number = self._source_of(segment.number) or (self._node_id, segment.number)
            self._largest.add(order(segment.size, number, node), segment)
            state = state_of(segment)
            if is_spilled(segment):
                self._spilled += segment.size
            elif state == "FREED":
                self._freed += size
                for process in segment.mappers:
                    self._freed_by[process] = self._freed_by.get(process, 0) + size
            elif state == "WRITING":
                self._writing += size

    def totals(self, store: SegmentStore) -> StoreTotals:
        """All of it in numbers."""
        return {
            "capacity": store.capacity,
            "used": store.used,
            "pooled": store.memories.pooled,
            "freed": self._freed,
            "writing": self._writing,
            "spilled": self._spilled,
            "segments": len(store),
            "freed_by": self._freed_by,
        }

    def rows(self) -> list[SegmentRow]:
        """The largest."""
        return [self._row(segment) for segment in self._largest.items()]

    def _row(self, segment: Segment) -> SegmentRow:
        source_node, source = self._source_of(segment.number) or (b"", 0)
        return {
            "number": segment.number,
            "size": segment.size,
            "allocated": segment.capacity,
            "owner": segment.owner,
            "writer": segment.writer,
            "state": state_of(segment),
            "call_site": segment.made,
            "mappers": list(segment.mappers),
            "source_node": source_node,
            "source": source,
            "spilled": is_spilled(segment),
        }


def silent(node_id: bytes, reason: str) -> NodeMemory:
    """In place of what a node did not tell."""
    nothing: StoreTotals = {
        "capacity": 0,
        "used": 0,
        "pooled": 0,
        "freed": 0,
        "writing": 0,
        "spilled": 0,
        "segments": 0,
        "freed_by": {},
    }
    return {
        "node": node_id,
        "reason": reason,
        "totals": nothing,
        "processes": [],
        "segments": [],
        "objects": [],
    }


def adopted_report(
    node_id: bytes,
    adopted: Iterable[Adopted],
    kept: Iterable[KeptArguments],
    limit: int,
    *,
    detail: bool,
) -> ObjectsHeld:
    """What a daemon tells, as if it were a process, of objects that it answers for.

    Args:
        node_id: Of its node.
        adopted: Objects whose owners have ended, and what is kept for detached actors.
        kept: For which actors, and with which objects inside.
        limit: How many objects are told one by one: the largest.
        detail: Whether small ones are among them.
    """
    keepers = keepers_by_object(node_id, kept)
    largest: First[ObjectRow] = First(limit)
    totals: ProcessTotals = {
        "shared": 0,
        "shared_bytes": 0,
        "inline": 0,
        "inline_bytes": 0,
        "pending": 0,
        "borrowed": 0,
    }
    for id, value, borrowers, outer in adopted:
        actors = keepers.get(id, [])
        own = (each for each in actors if id_of_arguments(node_id, each.actor_id) == id)
        arguments = next(own, None)  # they are no object, and who has borrowed them is no process
        node, segment, size = b"", 0, 0
        if value[0] == p.VALUE_SHARED:
            node, segment, size = value[1]
            totals["shared"] += 1
            totals["shared_bytes"] += size
        else:
            size = len(value[1])
            totals["inline"] += 1
            totals["inline_bytes"] += size
            if not detail or arguments is not None:  # small ones are with the head
                continue
        row: ObjectRow = {
            "id": b"" if arguments else id,
            "owner": owner_of(id),
            "process": node_id,
            "size": size,
            "node": node,
            "segment": segment,
            "status": "NIL",
            "call_site": arguments.call_site if arguments else "",
            "holds": _holds(actors, outer),
            "borrowers": [] if arguments else borrowers,
        }
        largest.add(order_of(row), row)
    return {"totals": totals, "objects": largest.items()}


def _holds(actors: Iterable[KeptArguments], outer: int) -> list[Hold]:
    """Why a daemon holds an object: for these actors, and as so many other objects contain it."""
    holds: list[Hold] = [
        {"kind": "USED_BY_PENDING_TASK", "count": 1, "names": [actor.holder]} for actor in actors
    ]
    if outer:
        holds.append({"kind": "CAPTURED_IN_OBJECT", "count": outer, "names": []})
    return holds


def order_of(row: ObjectRow) -> tuple[int, int, bytes]:
    """The place of an object among others."""
    return order(row["size"], row["segment"], row["node"] or row["id"])


def chosen(rows: Iterable[ObjectRow], limit: int) -> list[ObjectRow]:
    """The rows of the largest objects: of each what its owner tells, and a few others."""
    of_each: dict[tuple[int, int, bytes], list[ObjectRow]] = {}
    for row in rows:
        of_each.setdefault(order_of(row), []).append(row)
    found = []
    for key in sorted(of_each)[:limit]:
        owner_first = sorted(of_each[key], key=lambda row: row["process"] != row["owner"])
        found += owner_first[:_TOLD]
    return found
