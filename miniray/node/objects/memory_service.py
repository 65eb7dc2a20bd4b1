"""The report of the cluster's object store: asked of every node, and there of every process.

Responsible for what this node tells of its own store; who is asked, and who did not answer in time,
is ``node/relay/questions.py``'s business.
"""

from __future__ import annotations

import asyncio
import os
from typing import TYPE_CHECKING, Protocol

from miniray.common.state_types import MAX_OBJECTS
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
    from miniray.node.relay.questions import Questions
    from miniray.node.workers.process_names import ProcessNames


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
        questions: Questions,
        names: ProcessNames,
        tables: Iterable[HasTables],
    ) -> None:
        """Register what it answers.

        Args:
            node_id: Of this node.
            objects: Its store.
            adopted: What owners that ended left to this daemon.
            clients: The processes of this node.
            questions: Asks the nodes and the processes.
            names: What processes are called.
            tables: The parts of this daemon that keep something for objects.
        """
        self._node_id = node_id
        self._objects = objects
        self._adopted = adopted
        self._clients = clients
        self._questions = questions
        self._names = names
        self._tables = tuple(tables)
        clients.requests["memory_report"] = self._cluster
        clients.requests["own_memory"] = lambda _client: (self.own(), -1)
        questions.answers["memory"] = self.report

    # --- all nodes ---------------------------------------------------------------
    async def _cluster(
        self, _client: Client, limit: int, detail: bool, seconds: float
    ) -> tuple[list[NodeMemory], int]:
        """What every node tells; processes have so many seconds to answer."""
        question = (min(limit, MAX_OBJECTS), detail)
        told = await self._questions.ask_nodes("memory", question, seconds)
        return [silent(node, why) if why else report for node, report, why in told], -1

    # --- this node ---------------------------------------------------------------
    async def report(self, seconds: float, limit: int, detail: bool) -> NodeMemory:
        """What this node has, and what its processes know of it."""
        clients = [each for each in self._clients.clients.values() if not each.is_command]
        told = await self._questions.ask_processes(clients, "objects", (limit, detail), seconds)
        held = {process: answer for process, answer, why in told if not why}
        store, source_of = self._objects.store, self._objects.source_of
        segments = list(store)

        def look() -> tuple[StoreTotals, list[SegmentRow]]:
            rows = segment_rows(self._node_id, segments, limit, source_of)
            return store_totals(store, segments), rows

        totals, rows = await asyncio.to_thread(look)
        own = self._own_objects(limit, detail=detail)
        rows_told = (row for each in (own, *held.values()) for row in each["objects"])
        return {
            "node": self._node_id,
            "reason": "",
            "totals": totals,
            "processes": self._processes(clients, held, own),
            "segments": rows,
            "objects": chosen(rows_told, limit),
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
