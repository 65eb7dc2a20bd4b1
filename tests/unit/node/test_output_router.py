"""What a daemon does with lines of workers whose driver is on a node that takes no more."""

from __future__ import annotations

import asyncio
import logging
from types import SimpleNamespace
from typing import Any

import pytest

from miniray.common.config import config
from miniray.common.log_lines import LogLine
from miniray.node.relay import relayed as r
from miniray.node.relay.questions import Told
from miniray.node.relay.relayed import Relayed
from miniray.node.traffic import OutputRouter

NODE, FAR, JOB = b"node-one", b"node-far", b"a-driver"


class Clients:
    """Nobody is connected here."""

    def __init__(self) -> None:
        self.clients: dict[bytes, Any] = {}
        self.requests: dict[str, Any] = {}

    def push(self, *_what: object) -> bool:
        return False


class Relay:
    def __init__(self) -> None:
        self.notices: dict[str, Any] = {}
        self.waiting = 0
        self.sent: list[tuple[Any, ...]] = []

    def connected(self) -> list[bytes]:
        return [FAR, b"node-two"]

    def backlog(self, _node: bytes) -> int:
        return self.waiting

    def send(self, _node: bytes, message: Relayed) -> bool:
        self.sent.append(message.items)
        return True


@pytest.fixture(name="relay")
def _relay() -> Relay:
    return Relay()


@pytest.fixture(name="prints")
def _prints(relay: Relay) -> Any:
    clients: Any = Clients()
    questions: Any = SimpleNamespace(answers={})
    read: Any = None
    router = OutputRouter(NODE, clients, relay, questions, read)
    worker: Any = SimpleNamespace(
        pid=7, lease=None, job_id=JOB, driver_node=FAR, log_path=lambda _: "/logs/f"
    )

    def prints(*texts: str) -> None:
        router.send(worker, False, [LogLine("f", text) for text in texts])

    return prints


def test_lines_for_a_node_that_takes_no_more_are_counted_and_told_when_it_does(
    relay: Relay, prints: Any
) -> None:
    prints("first")
    relay.waiting = config().unread_output + 1
    prints("second", "third")
    prints("fourth")
    relay.waiting = config().unread_output // 2  # not yet: else every other line would be missing
    prints("fifth")
    relay.waiting = 0
    prints("sixth")
    node = NODE.hex()[:8]
    assert relay.sent == [
        ("log", (7, node, False, "/logs/f", [("f", "first")])),
        ("output_left_out", (((node, "/logs/f", 4),),)),
        ("log", (7, node, False, "/logs/f", [("f", "sixth")])),
    ]


def test_a_push_that_is_no_output_does_not_begin_the_lines_of_a_driver_again(relay: Relay) -> None:
    clients: Any = Clients()
    pushed: list[str] = []
    waiting = [0]
    conn = SimpleNamespace(backlog=lambda: waiting[0], when_drained=lambda _tell: None)
    clients.clients[JOB] = SimpleNamespace(conn=conn)
    clients.push = lambda _to, topic, _body: pushed.append(topic) or True
    parts: Any = (clients, relay, SimpleNamespace(answers={}), None)
    OutputRouter(NODE, *parts)

    def comes(topic: str, *body: Any) -> None:
        relay.notices[r.PUSH](FAR, Relayed(to=JOB, notice=r.PUSH, items=(topic, body)))

    log = (7, "far", False, "/logs/f", [("f", "text")])
    waiting[0] = config().unread_output + 1
    comes("log", *log)
    waiting[0] = config().unread_output // 2
    comes("process_unreachable", b"a process")
    comes("log", *log)
    assert pushed == ["process_unreachable"]
    waiting[0] = 0
    comes("log", *log)
    assert pushed == ["process_unreachable", "output_left_out", "log"]


class Questions:
    """One node answers; the other one could not write its log."""

    def __init__(self) -> None:
        self.answers: dict[str, Any] = {}

    async def ask_nodes(self, what: str, arguments: Any, _: float, nodes: Any) -> list[Told]:
        assert (what, arguments) == ("output", (JOB, NODE))
        return [Told(node, None, "OSError: disk" if node == FAR else "") for node in nodes]


def test_a_node_that_cannot_send_the_last_output_is_named_in_the_log(
    relay: Relay, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    parts: Any = (Clients(), relay, Questions(), lambda _job: None)
    driver: Any = SimpleNamespace(job_id=JOB)
    assert asyncio.run(OutputRouter(NODE, *parts).flush(driver)) == (None, -1)
    [said] = [record.getMessage() for record in caplog.records if record.name.startswith("miniray")]
    assert FAR.hex() in said
    assert "OSError: disk" in said
