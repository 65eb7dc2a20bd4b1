"""What a node's store holds: for `miniray memory`, and for the error of a put that does not fit.

Pure: reads the store's public attributes, asks no other process.
"""

from __future__ import annotations

import heapq
from typing import TYPE_CHECKING

from miniray.common.ids import owner_of
from miniray.common.names import format_bytes
from miniray.common.state_types import order
from miniray.messages.value import is_shared, place_of, size_of
from miniray.node.store.adopted import id_of_arguments, keepers_by_object

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping

    from miniray.common.state_types import (
        Hold,
        NodeMemory,
        ObjectRow,
        ObjectsHeld,
        SegmentRow,
        SegmentState,
        StoreTotals,
    )
    from miniray.messages.value import Value
    from miniray.node.store.adopted import KeptArguments
    from miniray.node.store.segments import Segment, SegmentStore

    #: Of which node and segment there a segment here is a copy, if it is one.
    SourceOf = Callable[[int], tuple[bytes, int] | None]
    #: Id, value, borrowers, and how many other adopted objects contain it.
    Adopted = tuple[bytes, Value, list[bytes], int]

#: Processes whose rows of one object are reported; the owner's row names the others.
_ROWS = 10
#: Holders that a sentence names; the others are summed up.
_NAMED = 3


def is_spilled(segment: Segment) -> bool:
    return not segment.in_memory


def state_of(segment: Segment) -> SegmentState:
    if segment.freed:
        return "FREED"
    return "HELD" if segment.sealed else "WRITING"


def store_totals(store: SegmentStore, segments: Iterable[Segment]) -> StoreTotals:
    """Sum a store up, of which ``segments`` are all segments."""
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

    ``adopted`` are objects whose owners have ended, ``kept`` the arguments of detached actors. The
    ``limit`` largest have rows, small ones among them with ``detail``.
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
            inline_bytes += size_of(value)
            if not detail or arguments is not None:  # small ones are with the head
                continue
        node, segment, size = place_of(value)
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
        rows.append(row)
    largest = heapq.nsmallest(limit, rows, key=_order_of)
    return {"inline": inline, "inline_bytes": inline_bytes, "objects": largest}


def _holds(actors: Iterable[KeptArguments], outer: int) -> list[Hold]:
    """Return why a daemon holds an object: for actors, and for others that contain it."""
    holds: list[Hold] = [
        {"kind": "USED_BY_PENDING_TASK", "count": 1, "names": [actor.holder]} for actor in actors
    ]
    if outer:
        holds.append({"kind": "CAPTURED_IN_OBJECT", "count": outer, "names": []})
    return holds


def _order_of(row: ObjectRow) -> tuple[int, int, bytes]:
    return order(row["size"], row["segment"], row["node"] or row["id"])


def chosen(rows: Iterable[ObjectRow], limit: int) -> list[ObjectRow]:
    """Choose the rows of the largest objects: of each the owner's, and a few others."""
    of_each: dict[tuple[int, int, bytes], list[ObjectRow]] = {}
    for row in rows:
        of_each.setdefault(_order_of(row), []).append(row)
    found = []
    for key in sorted(of_each)[:limit]:
        owner_first = sorted(of_each[key], key=lambda row: row["process"] != row["owner"])
        found += owner_first[:_ROWS]
    return found


# --- who holds it, in words ----------------------------------------------------------------------
def describe_holders(segments: Iterable[Segment], name_of: Callable[[bytes], str]) -> str:
    """Say which processes own how much of a store, and have how much of it mapped.

    ``600 MiB by driver (pid 7), 200 MiB by Keeper (pid 8); mapped, so that it cannot leave
    memory: 100 MiB by driver (pid 7); freed but still mapped: 100 MiB by Reader (pid 9); on
    disk: 2 GiB by driver (pid 7)``; empty if nothing is held. What several processes have
    mapped counts for each of them, what is in memory and on disk counts twice.
    """
    owned: dict[bytes, int] = {}
    mapped: dict[bytes, int] = {}
    freed: dict[bytes, int] = {}
    on_disk: dict[bytes, int] = {}
    for segment in segments:
        if segment.place is not None:
            on_disk[segment.owner] = on_disk.get(segment.owner, 0) + segment.size
        if is_spilled(segment):
            continue
        size = segment.capacity
        mappers = freed if state_of(segment) == "FREED" else mapped
        if mappers is mapped:
            owned[segment.owner] = owned.get(segment.owner, 0) + size
        for process in segment.mappers:
            mappers[process] = mappers.get(process, 0) + size
    parts = []
    if owned:
        parts.append(_sums(owned, name_of))
    if mapped:
        parts.append(f"mapped, so that it cannot leave memory: {_sums(mapped, name_of)}")
    if freed:
        parts.append(f"freed but still mapped: {_sums(freed, name_of)}")
    if on_disk:
        parts.append(f"on disk: {_sums(on_disk, name_of)}")
    return "; ".join(parts)


def _sums(sizes: Mapping[bytes, int], name_of: Callable[[bytes], str]) -> str:
    largest = sorted(sizes.items(), key=lambda item: (-item[1], item[0]))
    texts = [f"{format_bytes(size)} by {name_of(who)}" for who, size in largest[:_NAMED]]
    rest = largest[_NAMED:]
    if rest:
        others = f"{len(rest)} other{'s' if len(rest) > 1 else ''}"
        texts.append(f"{format_bytes(sum(size for _, size in rest))} by {others}")
    return ", ".join(texts)
