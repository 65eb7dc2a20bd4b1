"""What a node's store holds, in numbers and piece by piece, for `miniray memory`.

Pure: reads the store's public attributes, tells nobody.
"""

from __future__ import annotations

import heapq
from typing import TYPE_CHECKING

from miniray.common.ids import owner_of
from miniray.common.memory_types import order
from miniray.node.store.kept_arguments import id_of_arguments, keepers_by_object
from miniray.objects.holds import is_shared, object_row

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from miniray.common.memory_types import (
        Hold,
        NodeMemory,
        ObjectRow,
        ObjectsHeld,
        SegmentRow,
        SegmentState,
        StoreTotals,
    )
    from miniray.node.store.kept_arguments import KeptArguments
    from miniray.node.store.segment import Segment
    from miniray.node.store.segments import SegmentStore
    from miniray.objects.objects import Value

    #: Of which node and segment there a segment here is a copy, if it is one.
    SourceOf = Callable[[int], tuple[bytes, int] | None]
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


def store_totals(store: SegmentStore, segments: Iterable[Segment]) -> StoreTotals:
    """Sum a store up.

    Args:
        store: Which one.
        segments: All that are in it.
    """
    freed = writing = spilled = 0
    freed_by: dict[bytes, int] = {}
    for segment in segments:
        state = state_of(segment)
        if is_spilled(segment):
            spilled += segment.size
        elif state == "FREED":
            freed += segment.capacity
            for process in list(segment.mappers):
                freed_by[process] = freed_by.get(process, 0) + segment.capacity
        elif state == "WRITING":
            writing += segment.capacity
    return {
        "capacity": store.capacity,
        "used": store.used,
        "pooled": store.memories.pooled,
        "freed": freed,
        "writing": writing,
        "spilled": spilled,
        "segments": len(store),
        "freed_by": freed_by,
    }


def segment_rows(
    node_id: bytes, segments: Iterable[Segment], limit: int, source_of: SourceOf
) -> list[SegmentRow]:
    """Describe the largest segments of a node's store."""

    def place(segment: Segment) -> tuple[int, int, bytes]:
        node, number = source_of(segment.number) or (node_id, segment.number)
        return order(segment.size, number, node)

    return [_row(each, source_of) for each in heapq.nsmallest(limit, segments, key=place)]


def _row(segment: Segment, source_of: SourceOf) -> SegmentRow:
    source_node, source = source_of(segment.number) or (b"", 0)
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
    """Return what stands for a node that did not answer."""
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
    """Report, as a process does, the objects that a daemon answers for.

    Args:
        node_id: Of its node.
        adopted: Objects whose owners have ended, and what is kept for detached actors.
        kept: For which actors, and with which objects inside.
        limit: How many objects are told one by one: the largest.
        detail: Whether small ones are among them.
    """
    keepers = keepers_by_object(node_id, kept)
    inline = inline_bytes = 0
    rows = []
    for id, value, borrowers, outer in adopted:
        actors = keepers.get(id, [])
        own = (each for each in actors if id_of_arguments(node_id, each.actor_id) == id)
        arguments = next(own, None)  # they are no object, and who has borrowed them is no process
        if not is_shared(value):
            inline += 1
            inline_bytes += len(value[1])
            if not detail or arguments is not None:  # small ones are with the head
                continue
        row = object_row(
            b"" if arguments else id,
            owner_of(id),
            node_id,
            value,
            status="NIL",
            call_site=arguments.call_site if arguments else "",
            holds=_holds(actors, outer),
            borrowers=[] if arguments else borrowers,
        )
        rows.append(row)
    largest = heapq.nsmallest(limit, rows, key=_order_of)
    return {"inline": inline, "inline_bytes": inline_bytes, "objects": largest}


def _holds(actors: Iterable[KeptArguments], outer: int) -> list[Hold]:
    """Why a daemon holds an object: for these actors, and as so many other objects contain it."""
    holds: list[Hold] = [
        {"kind": "USED_BY_PENDING_TASK", "count": 1, "names": [actor.holder]} for actor in actors
    ]
    if outer:
        holds.append({"kind": "CAPTURED_IN_OBJECT", "count": outer, "names": []})
    return holds


def _order_of(row: ObjectRow) -> tuple[int, int, bytes]:
    return order(row["size"], row["segment"], row["node"] or row["id"])


def chosen(rows: Iterable[ObjectRow], limit: int) -> list[ObjectRow]:
    """The rows of the largest objects: of each what its owner tells, and a few others."""
    of_each: dict[tuple[int, int, bytes], list[ObjectRow]] = {}
    for row in rows:
        of_each.setdefault(_order_of(row), []).append(row)
    found = []
    for key in sorted(of_each)[:limit]:
        owner_first = sorted(of_each[key], key=lambda row: row["process"] != row["owner"])
        found += owner_first[:_TOLD]
    return found
