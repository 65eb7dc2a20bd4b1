"""Messages for a process of another node: what it has room for, and what waits here."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Any

import pytest
from process_doubles import eventually

from miniray.common.config import config
from miniray.messages import plain
from miniray.wire.peers import RelaySender

if TYPE_CHECKING:
    from collections.abc import Callable

NODE, PROCESS = b"node0000", b"process0"


class Link:
    """A daemon that takes everything."""

    def __init__(self) -> None:
        self.bodies: list[bytes] = []
        self.loop = Loop()

    def relay(self, _node: bytes, _process: bytes, bodies: list[bytes]) -> None:
        self.bodies += bodies


class Loop:
    """Sockets that another thread serves."""

    def __init__(self) -> None:
        self.due: list[Any] = []

    def flush_soon(self, sender: Any) -> None:
        self.due.append(sender)

    def serve(self, *_args: object, **_kwargs: object) -> bool:
        return False

    def nudge(self) -> None:
        """Nobody serves."""


@pytest.fixture
def link() -> Link:
    return Link()


@pytest.fixture
def sender(link: Link) -> RelaySender:
    return RelaySender(link, NODE, PROCESS)  # type: ignore[arg-type]


def in_thread(work: Callable[[], object]) -> threading.Thread:
    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    return thread


def overflow(sender: RelaySender) -> list[bytes]:
    """Send as much as there is room for, and as much again; returns what was sent."""
    size = config().relay_window // 8
    messages = [(number, bytes(size)) for number in range(16)]
    for message in messages:
        sender.send(message)
    return [plain.dumps(message) for message in messages]


def test_what_a_receiver_has_no_room_for_waits_for_its_credits(
    sender: RelaySender, link: Link
) -> None:
    bodies = overflow(sender)
    sender.flush_posted()
    assert link.bodies == bodies[:8]
    sender.credit(3 * len(bodies[0]))
    assert link.bodies == bodies[:11]
    sender.credit(config().relay_window)
    assert link.bodies == bodies


def test_a_flush_waits_until_there_is_room_for_everything(sender: RelaySender, link: Link) -> None:
    bodies = overflow(sender)
    flushing = in_thread(lambda: sender.flush_blocking(None))
    eventually(lambda: sender._on_written)
    sender.credit(3 * len(bodies[0]))
    assert flushing.is_alive()
    sender.credit(config().relay_window)
    flushing.join(10)
    assert not flushing.is_alive()
    assert link.bodies == bodies
    sender.flush_blocking(None)  # nothing waits


def test_a_flush_does_not_wait_for_a_receiver_that_is_gone(sender: RelaySender, link: Link) -> None:
    overflow(sender)
    flushing = in_thread(lambda: sender.flush_blocking(None))
    eventually(lambda: sender._on_written)
    sender.close()
    flushing.join(10)
    assert not flushing.is_alive()
    sender.send((1, bytes(10)))
    sender.flush_blocking(None)
    assert len(link.bodies) == 8


def test_its_backlog_is_what_the_receiver_has_no_room_for(sender: RelaySender, link: Link) -> None:
    drained: list[int] = []
    sender.when_drained(lambda: drained.append(sender.backlog()))
    assert drained == [0]  # nothing waits
    bodies = overflow(sender)
    size = len(bodies[0])
    sender.flush_posted()
    assert sender.backlog() == 8 * size
    sender.when_drained(lambda: drained.append(sender.backlog()))
    sender.credit(3 * size)
    assert sender.backlog() == 5 * size
    assert drained == [0]
    sender.credit(config().relay_window)
    assert drained == [0, 0]
