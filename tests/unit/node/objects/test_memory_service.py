"""The report of the object store, between doubles of clients and other daemons."""

from __future__ import annotations

import asyncio
import time
from typing import TYPE_CHECKING, Any

import pytest
from stores import new_store

from miniray.node.base.clients import Client
from miniray.node.objects.memory_service import MemoryService
from miniray.node.relay import relayed as r
from miniray.node.relay.questions import Questions
from miniray.node.relay.relay import NodeRequests
from miniray.node.relay.relayed import Relayed

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from miniray.common.state_types import NodeMemory

NODE, FAR, LOST = b"node-one", b"node-two", b"node-off"
DRIVER, WORKER, COMMAND = b"driver00", b"worker00", b"command0"
HELD = {"inline": 0, "inline_bytes": 0, "objects": []}
#: Far more than a test takes: what waits for this would not end in time.
LONG = 50.0


class Clients:
    """Processes that are asked, and answer when the test says so."""

    def __init__(self) -> None:
        self.requests: dict[str, Any] = {}
        self.notices: dict[str, Any] = {}
        self.clients: dict[bytes, Client] = {}
        self.asked: list[tuple[bytes, tuple[Any, ...]]] = []

    def connect(self, process: bytes, role: str) -> None:
        self.clients[process] = Client(
            None,  # type: ignore[arg-type]
            process,
            role=role,
            pid=len(self.clients),
            job_id=b"",
            details={},
        )

    def push(self, process: bytes, topic: str, body: tuple[Any, ...]) -> bool:
        number, what, question, deadline = body
        assert (topic, what) == ("asked", "objects")
        self.asked.append((process, (number, *question, deadline)))
        return True

    def answer(self, process: bytes, number: int) -> None:
        self.notices["answer"](self.clients[process], number, (HELD, ""))


class Relay:
    def __init__(self) -> None:
        self.notices: dict[str, Any] = {}
        self.others: list[bytes] = []
        self.sent: list[tuple[bytes, Relayed]] = []

    def nodes(self) -> list[bytes]:
        return self.others

    def knows(self, node: bytes) -> bool:
        return node in self.others

    def send(self, node: bytes, message: Relayed) -> bool:
        self.sent.append((node, message))
        return node != LOST


class Adopted:
    def held(self) -> list[Any]:
        return []

    def kept(self) -> list[Any]:
        return []


class Names:
    def work_of(self, process: bytes) -> str:
        return process.decode()


class Parts:
    def __init__(self) -> None:
        self.clients, self.relay = Clients(), Relay()
        self.store = new_store(1 << 20)
        self.names = Names()
        self.requests = NodeRequests(self.relay)  # type: ignore[arg-type]
        self.questions = Questions(
            NODE,
            self.clients,  # type: ignore[arg-type]
            self.relay,  # type: ignore[arg-type]
            self.requests,
        )
        self.service = MemoryService(
            NODE,
            self.store,
            Adopted(),  # type: ignore[arg-type]
            self.clients,  # type: ignore[arg-type]
            self.questions,
            self.names,  # type: ignore[arg-type]
            dict,
        )

    async def cluster(self, seconds: float) -> dict[bytes, str]:
        """Ask all nodes, and return why they do not answer."""
        told = await self.questions.ask_nodes("memory", (10, False), seconds)
        return {node: why for node, _, why in told}


@pytest.fixture
def parts() -> Iterator[Parts]:
    parts = Parts()
    yield parts
    parts.store.close()


def answered(report: NodeMemory) -> dict[bytes, bool]:
    return {row["process"]: row["answered"] for row in report["processes"]}


async def until(condition: Callable[[], object]) -> None:
    deadline = time.monotonic() + 20
    while not condition():
        assert time.monotonic() < deadline
        await asyncio.sleep(0.001)


def test_processes_are_asked_and_commands_are_not(parts: Parts) -> None:
    for process, role in ((DRIVER, "driver"), (WORKER, "worker"), (COMMAND, "command")):
        parts.clients.connect(process, role)

    async def report() -> NodeMemory:
        asking = asyncio.ensure_future(parts.service.report(LONG, 10, True))
        await until(lambda: parts.clients.asked)
        for process, (number, limit, detail, deadline) in parts.clients.asked:
            assert (limit, detail) == (10, True)
            assert 0 < deadline - time.monotonic() <= LONG
            parts.clients.answer(process, number)
        return await asking

    found = asyncio.run(report())
    assert answered(found) == {NODE: True, DRIVER: True, WORKER: True}
    assert [row["type"] for row in found["processes"]] == ["NODE", "DRIVER", "WORKER"]
    assert found["processes"][2]["name"] == WORKER.decode()


def test_a_process_that_is_late_is_listed_without_an_answer(parts: Parts) -> None:
    parts.clients.connect(WORKER, "worker")
    found = asyncio.run(parts.service.report(0.01, 10, False))
    assert answered(found) == {NODE: True, WORKER: False}
    [(_, (number, *_rest))] = parts.clients.asked
    parts.clients.answer(WORKER, number)  # nobody waits for it any more


def test_a_process_that_ends_is_not_waited_for(parts: Parts) -> None:
    parts.clients.connect(WORKER, "worker")

    async def report() -> NodeMemory:
        asking = asyncio.ensure_future(parts.service.report(LONG, 10, False))
        await until(lambda: parts.clients.asked)
        del parts.clients.clients[WORKER]
        parts.questions.ended(WORKER)
        return await asking

    assert answered(asyncio.run(report())) == {NODE: True}


def test_other_nodes_are_asked_and_those_that_cannot_answer_named(parts: Parts) -> None:
    parts.relay.others = [FAR, LOST]

    async def report() -> dict[bytes, str]:
        asking = asyncio.ensure_future(parts.cluster(LONG))
        await until(lambda: len(parts.relay.sent) == 2)
        node, message = parts.relay.sent[0]
        assert (node, message.notice) == (FAR, r.REQUEST)
        number = message.items[0]
        told = {**await parts.service.report(LONG, 10, False), "node": FAR}
        answer = Relayed(notice=r.ANSWER, items=(number, "", (told, "")))
        parts.relay.notices[r.ANSWER](FAR, answer)
        return await asking

    lost = "neither of the two nodes can dial the other"
    assert asyncio.run(report()) == {NODE: "", FAR: "", LOST: lost}


def test_a_node_that_dies_is_not_waited_for(parts: Parts) -> None:
    parts.relay.others = [FAR]

    async def report() -> dict[bytes, str]:
        asking = asyncio.ensure_future(parts.cluster(LONG))
        await until(lambda: parts.relay.sent)
        parts.relay.others.clear()
        parts.requests.node_unreachable(FAR)
        return await asking

    assert asyncio.run(report())[FAR] == "it is gone"


def test_a_daemon_answers_another_one(parts: Parts) -> None:
    async def ask() -> Relayed:
        asked = Relayed(notice=r.REQUEST, items=(5, "question", "memory", (10, False), LONG))
        parts.relay.notices[r.REQUEST](FAR, asked)
        await until(lambda: parts.relay.sent)
        [(node, message)] = parts.relay.sent
        assert node == FAR
        return message

    told = asyncio.run(ask())
    assert told.notice == r.ANSWER
    number, why, (report, missing) = told.items
    assert (number, why, report["node"], missing) == (5, "", NODE, "")
