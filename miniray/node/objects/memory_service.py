"""The report of the cluster's object store: asked of every node, and there of every process.

Nobody is waited for longer than the report may take: user code may keep a process busy for
minutes, and a node may be out of reach. What is missing is named.
"""

from __future__ import annotations

import asyncio
import itertools
import os
import time
from typing import TYPE_CHECKING, Any, Protocol

from miniray.common.state_types import MAX_OBJECTS
from miniray.node.base.question import Question
from miniray.node.relay import relayed as r
from miniray.node.relay.relayed import Relayed
from miniray.node.store.memory_report import (
    adopted_report,
    chosen,
    segment_rows,
    silent,
    store_totals,
)

if TYPE_CHECKING:
    from collections.abc import Iterable

    from miniray.common.state_types import (
        NodeMemory,
        ObjectsHeld,
        OwnMemory,
        ProcessRow,
        ProcessType,
        SegmentRow,
        StoreTotals,
    )
    from miniray.node.base.clients import Client, ClientServer
    from miniray.node.objects.adopted_service import AdoptedService
    from miniray.node.objects.objects import NodeObjects
    from miniray.node.relay.relay import RelayHub
    from miniray.node.workers.process_names import ProcessNames

#: Seconds that a node's answer may take beyond what its processes may.
_ON_THE_WAY = 1.0


class HasTables(Protocol):
    """A part of the daemon that keeps something for objects."""

    def table_sizes(self) -> dict[str, int]:
        """How many entries each table has; all are empty when no value is in use."""


class MemoryService:
    """Asks, and answers other daemons."""

    def __init__(
        self,
        node_id: bytes,
        objects: NodeObjects,
        adopted: AdoptedService,
        clients: ClientServer,
        relay: RelayHub,
        names: ProcessNames,
        tables: Iterable[HasTables],
    ) -> None:
        """Register what it answers.

        Args:
            node_id: Of this node.
            objects: Its store.
            adopted: What owners that ended left to this daemon.
            clients: The processes of this node.
            relay: The way to other nodes.
            names: What processes are called.
            tables: The parts of this daemon that keep something for objects.
        """
        self._node_id = node_id
        self._objects = objects
        self._adopted = adopted
        self._clients = clients
        self._relay = relay
        self._names = names
        self._tables = tuple(tables)
        self._numbers = itertools.count(1).__next__
        self._questions: dict[int, Question] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        clients.requests["memory_report"] = self._cluster
        clients.requests["own_memory"] = lambda _client: (self.own(), -1)
        clients.notices["objects_held"] = lambda client, number, held: self._answered(
            number, client.process_id, held
        )
        relay.notices[r.MEMORY_ASKED] = self._asked
        relay.notices[r.MEMORY_TOLD] = lambda node, message: self._answered(
            message.items[0], node, message.items[1]
        )

    # --- what happens meanwhile --------------------------------------------------------
    def _answered(self, number: int, who: bytes, answer: Any) -> None:
        question = self._questions.get(number)
        if question is not None:  # else it came too late
            question.answered(who, answer)

    def ended(self, who: bytes) -> None:
        """A process of this node, or another node, is gone."""
        for question in self._questions.values():
            question.ended(who)

    # --- all nodes ---------------------------------------------------------------
    async def _cluster(
        self, _client: Client, limit: int, detail: bool, seconds: float
    ) -> tuple[list[NodeMemory], int]:
        """What every node tells; processes have so many seconds to answer."""
        limit = min(limit, MAX_OBJECTS)
        others = self._relay.nodes()
        number = self._numbers()
        question = self._questions[number] = Question(others)
        asked = Relayed(notice=r.MEMORY_ASKED, items=(number, limit, detail, seconds))
        unreachable = {node for node in others if not self._relay.send(node, asked)}
        for node in unreachable:
            question.ended(node)
        try:
            own = await self.report(limit, detail, seconds)
            await question.wait(_ON_THE_WAY + seconds)
        finally:
            del self._questions[number]
        reports = [own]
        for node in others:
            report = question.answers.get(node)
            if report is None:
                if node in unreachable:
                    why = "there is no way to it from the node that asked"
                else:
                    why = "it is gone" if node in question.gone else "it did not answer in time"
                report = silent(node, why)
            reports.append(report)
        return reports, -1

    def _asked(self, node_id: bytes, message: Relayed) -> None:
        """Another daemon asks."""
        number, limit, detail, seconds = message.items
        task = asyncio.get_running_loop().create_task(
            self._tell(node_id, number, limit, detail, seconds)
        )
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _tell(
        self, node_id: bytes, number: int, limit: int, detail: bool, seconds: float
    ) -> None:
        report = await self.report(limit, detail, seconds)
        self._relay.send(node_id, Relayed(notice=r.MEMORY_TOLD, items=(number, report)))

    # --- this node ---------------------------------------------------------------
    async def report(self, limit: int, detail: bool, seconds: float) -> NodeMemory:
        """What this node has, and what its processes know of it."""
        clients = [each for each in self._clients.clients.values() if not each.is_command]
        held = await self._ask(clients, limit, detail, seconds)
        store, source_of = self._objects.store, self._objects.source_of
        segments = list(store)

        def look() -> tuple[StoreTotals, list[SegmentRow]]:
            rows = segment_rows(self._node_id, segments, limit, source_of)
            return store_totals(store, segments), rows

        totals, rows = await asyncio.to_thread(look)
        own = self._own_objects(limit, detail=detail)
        told = (row for each in (own, *held.values()) for row in each["objects"])
        return {
            "node": self._node_id,
            "reason": "",
            "totals": totals,
            "processes": self._processes(clients, held, own),
            "segments": rows,
            "objects": chosen(told, limit),
        }

    def own(self) -> OwnMemory:
        """What this daemon keeps, without what processes know of it."""
        tables: dict[str, int] = {}
        for part in self._tables:
            tables.update(part.table_sizes())
        return {
            "pid": os.getpid(),
            "segments": segment_rows(
                self._node_id, self._objects.store, MAX_OBJECTS, self._objects.source_of
            ),
            "adopted": self._own_objects(MAX_OBJECTS, detail=True)["objects"],
            "tables": tables,
        }

    def _own_objects(self, limit: int, *, detail: bool) -> ObjectsHeld:
        """What this daemon holds in place of others."""
        held, kept = self._adopted.held(), self._adopted.kept()
        return adopted_report(self._node_id, held, kept, limit, detail=detail)

    async def _ask(
        self, clients: list[Client], limit: int, detail: bool, seconds: float
    ) -> dict[bytes, ObjectsHeld]:
        """What processes of this node tell, those that answer in time."""
        number = self._numbers()
        question = self._questions[number] = Question(client.process_id for client in clients)
        deadline = time.monotonic() + seconds
        for client in clients:
            body = (number, limit, detail, deadline)
            self._clients.push(client.process_id, "report_objects", body)
        try:
            await question.wait(seconds)
        finally:
            del self._questions[number]
        return question.answers

    def _processes(
        self, asked: list[Client], held: dict[bytes, ObjectsHeld], own: ObjectsHeld
    ) -> list[ProcessRow]:
        """This process, and those that were asked and live."""
        rows = [_process(self._node_id, os.getpid(), "NODE", "", own)]
        for client in asked:
            if client.process_id in self._clients.clients:
                kind: ProcessType = "DRIVER" if client.is_driver else "WORKER"
                name = self._names.work_of(client.process_id)
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
