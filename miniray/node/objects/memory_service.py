"""The report of the cluster's object store: from every node, and there from every process.

Responsible for this node's report on its own store; ``node/relay/questions.py`` sends the
questions, and handles missing answers.
"""

from __future__ import annotations

import asyncio
import dataclasses
import heapq
import os
from typing import TYPE_CHECKING

from miniray.common.names import format_bytes
from miniray.common.object_ref import owner_of, short_id
from miniray.common.state_types import MAX_OBJECTS, order
from miniray.messages.value import is_shared, place_of, size_of

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping

    from miniray.common.state_types import (
        Hold,
        NodeMemory,
        ObjectRow,
        ObjectsHeld,
        OwnMemory,
        ProcessRow,
        ProcessType,
        SegmentRow,
        SegmentState,
        StoreTotals,
    )
    from miniray.messages.value import Value
    from miniray.node.base.clients import Client, ClientServer
    from miniray.node.objects.adopted import AdoptedObjects
    from miniray.node.relay.questions import Questions
    from miniray.node.store.segments import Segment, SegmentStore
    from miniray.node.workers.process_names import ProcessNames

    Adopted = tuple[bytes, Value, list[bytes], int]

#: Processes whose rows of one object are reported; the owner's row names the others.
_ROWS = 10
#: Holders that a sentence names; the others are summed up.
_NAMED = 3


def state_of(segment: Segment) -> SegmentState:
    if segment.freed:
        return "FREED"
    return "HELD" if segment.sealed else "WRITING"


def store_totals(store: SegmentStore, segments: Iterable[Segment]) -> StoreTotals:
    """Sum a store up; ``segments`` are all of its segments."""
    freed = writing = spilled = 0
    freed_by: dict[bytes, int] = {}
    for segment in segments:
        state = state_of(segment)
        if not segment.in_memory:
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


def segment_rows(node_id: bytes, segments: Iterable[Segment], limit: int) -> list[SegmentRow]:
    """Describe the largest segments of a node's store."""

    def place(segment: Segment) -> tuple[int, int, bytes]:
        node, number, _ = segment.copy_of or (node_id, segment.number, b"")
        return order(segment.size, number, node)

    return [_row(each) for each in heapq.nsmallest(limit, segments, key=place)]


def _row(segment: Segment) -> SegmentRow:
    source_node, source, _ = segment.copy_of or (b"", 0, b"")
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
        "spilled": not segment.in_memory,
    }


def adopted_report(
    node_id: bytes, adopted: Iterable[Adopted], limit: int, *, detail: bool
) -> ObjectsHeld:
    """Report, as a process does, the objects that a daemon answers for.

    Their owners have ended, or they are the arguments of detached actors, under the daemon's own
    id. The ``limit`` largest have rows, small ones among them with ``detail``.
    """
    inline = inline_bytes = 0
    rows = []
    for id, value, borrowers, outer in adopted:
        actor = id.removeprefix(node_id) if owner_of(id) == node_id else b""
        if not is_shared(value):
            inline += 1
            inline_bytes += size_of(value)
            if not detail or actor:  # small arguments are with the head
                continue
        node, segment, size = place_of(value)
        holds: list[Hold] = []
        if actor:
            name = f"the detached actor {short_id(actor.hex())}"
            holds.append({"kind": "USED_BY_PENDING_TASK", "count": 1, "names": [name]})
        if outer := outer + borrowers.count(node_id):  # the latter: in arguments that are kept
            holds.append({"kind": "CAPTURED_IN_OBJECT", "count": outer, "names": []})
        row: ObjectRow = {
            "id": b"" if actor else id,
            "owner": owner_of(id),
            "process": node_id,
            "size": size,
            "node": node,
            "segment": segment,
            "status": "NIL",
            "call_site": "",
            "holds": holds,
            "borrowers": [] if actor else borrowers,  # an actor that has borrowed is no process
        }
        rows.append(row)
    largest = heapq.nsmallest(limit, rows, key=_order_of)
    return {"inline": inline, "inline_bytes": inline_bytes, "objects": largest}


def _order_of(row: ObjectRow) -> tuple[int, int, bytes]:
    return order(row["size"], row["segment"], row["node"] or row["id"])


def chosen(rows: Iterable[ObjectRow], limit: int) -> list[ObjectRow]:
    """Choose the rows of the largest objects: each owner's, and a few others."""
    of_each: dict[tuple[int, int, bytes], list[ObjectRow]] = {}
    for row in rows:
        of_each.setdefault(_order_of(row), []).append(row)
    found = []
    for key in sorted(of_each)[:limit]:
        owner_first = sorted(of_each[key], key=lambda row: row["process"] != row["owner"])
        found += owner_first[:_ROWS]
    return found


# --- holders, in words ---------------------------------------------------------------------------
def describe_holders(segments: Iterable[Segment], name_of: Callable[[bytes], str]) -> str:
    """Describe how much of a store each process owns, and has mapped.

    ``600 MiB by driver (pid 7), 200 MiB by Keeper (pid 8); mapped, so that it cannot leave
    memory: 100 MiB by driver (pid 7); freed but still mapped: 100 MiB by Reader (pid 9); on
    disk: 2 GiB by driver (pid 7)``; empty if the store is. What several processes have
    mapped counts for each of them, what is in memory and on disk counts twice.
    """
    owned: dict[bytes, int] = {}
    mapped: dict[bytes, int] = {}
    freed: dict[bytes, int] = {}
    on_disk: dict[bytes, int] = {}
    for segment in segments:
        if segment.place is not None:
            on_disk[segment.owner] = on_disk.get(segment.owner, 0) + segment.size
        if not segment.in_memory:
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
    largest = sorted(sizes, key=lambda who: (-sizes[who], who))
    texts = [f"{format_bytes(sizes[who])} by {name_of(who)}" for who in largest[:_NAMED]]
    rest = largest[_NAMED:]
    if rest:
        others = f"{len(rest)} other{'s' if len(rest) > 1 else ''}"
        texts.append(f"{format_bytes(sum(sizes[who] for who in rest))} by {others}")
    return ", ".join(texts)


@dataclasses.dataclass(eq=False, repr=False)
class MemoryService:
    """Collects reports, and answers other daemons."""

    node_id: bytes
    store: SegmentStore
    #: The objects that owners left to this daemon.
    adopted: AdoptedObjects
    clients: ClientServer
    questions: Questions
    names: ProcessNames
    #: Returns how many entries each table for objects has; all are empty when no value is in use.
    table_sizes: Callable[[], dict[str, int]]

    def __post_init__(self) -> None:
        self.clients.requests["own_memory"] = lambda _client: (self.own(), -1)
        self.questions.answers["memory"] = self.report

    async def report(self, seconds: float, limit: int, detail: bool) -> NodeMemory:
        """Return this node's values, and its processes' records of them."""
        clients = [each for each in self.clients.clients.values() if not each.is_command]
        told = await self.questions.ask_processes(clients, "objects", (limit, detail), seconds)
        held = {process: answer for process, answer, why in told if not why}
        store = self.store
        segments = list(store)

        def look() -> tuple[StoreTotals, list[SegmentRow]]:
            return store_totals(store, segments), segment_rows(self.node_id, segments, limit)

        totals, rows = await asyncio.to_thread(look)
        own = self._own_objects(limit, detail=detail)
        rows_told = (row for each in (own, *held.values()) for row in each["objects"])
        return {
            "node": self.node_id,
            "reason": "",
            "totals": totals,
            "processes": self._processes(clients, held, own),
            "segments": rows,
            "objects": chosen(rows_told, limit),
        }

    def own(self) -> OwnMemory:
        """Return this daemon's rows, without those of its processes."""
        return {
            "pid": os.getpid(),
            "segments": segment_rows(self.node_id, self.store, MAX_OBJECTS),
            "adopted": self._own_objects(MAX_OBJECTS, detail=True)["objects"],
            "tables": self.table_sizes(),
        }

    def _own_objects(self, limit: int, *, detail: bool) -> ObjectsHeld:
        """Return the objects that this daemon holds in place of owners that have ended."""
        return adopted_report(self.node_id, self.adopted.held(), limit, detail=detail)

    def _processes(
        self, asked: list[Client], held: dict[bytes, ObjectsHeld], own: ObjectsHeld
    ) -> list[ProcessRow]:
        """Return the rows of this process, and of requested processes that still live."""
        rows = [_process(self.node_id, os.getpid(), "NODE", "", own)]
        for client in asked:
            if client.process_id in self.clients.clients:
                kind: ProcessType = "DRIVER" if client.is_driver else "WORKER"
                name = self.names.work_of(client.process_id)
                answer = held.get(client.process_id)
                rows.append(_process(client.process_id, client.pid, kind, name, answer))
        return rows


def _process(
    id: bytes, pid: int, kind: ProcessType, name: str, answer: ObjectsHeld | None
) -> ProcessRow:
    return {
        "process": id,
        "pid": pid,
        "type": kind,
        "name": name,
        "answered": answer is not None,
        "inline": answer["inline"] if answer is not None else 0,
        "inline_bytes": answer["inline_bytes"] if answer is not None else 0,
    }
