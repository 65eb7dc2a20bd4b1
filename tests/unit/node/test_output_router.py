"""What a daemon does with lines of workers whose driver is on a node that takes no more."""

from __future__ import annotations

from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest

from miniray.common.config import config
from miniray.common.log_lines import LogLine
from miniray.node.output_router import OutputRouter

if TYPE_CHECKING:
    from miniray.node.relay.relayed import Relayed

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
