"""The link to the daemon: waiters that give up, and what comes before the runtime is ready."""

from __future__ import annotations

import os
import socket
import threading
from typing import TYPE_CHECKING, Any

import pytest
from open_files import open_files
from process_doubles import eventually
from wire_ends import KEY, End

from miniray.messages import protocol as p
from miniray.wire.io_loop import IOLoop
from miniray.wire.node_link import NodeLink, NodeLostError, _Answer

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path


def descriptor() -> int:
    return os.memfd_create("test")


def test_an_answer_that_comes_after_its_waiter_left_is_undone() -> None:
    before = open_files()
    undone: list[Any] = []
    answer = _Answer(lambda: None, undone.append)
    answer.abandon()
    answer.came(None, "result", descriptor())
    assert undone == ["result"]
    assert not open_files() - before


def test_an_answer_that_came_just_before_is_undone_too_and_once() -> None:
    before = open_files()
    undone: list[Any] = []
    answer = _Answer(lambda: None, undone.append)
    answer.came(None, "result", descriptor())
    answer.abandon()
    assert undone == ["result"]
    assert not open_files() - before


def test_an_error_leaves_nothing_to_undo() -> None:
    undone: list[Any] = []
    answer = _Answer(lambda: None, undone.append)
    answer.abandon()
    answer.came(OSError("no"), None, -1)
    assert undone == []


def test_whichever_is_first_the_result_is_undone_exactly_once() -> None:
    for _ in range(200):
        undone: list[Any] = []
        answer = _Answer(lambda: None, undone.append)
        together = threading.Barrier(2)

        def come(answer: _Answer = answer, together: threading.Barrier = together) -> None:
            together.wait(10)
            answer.came(None, 1, -1)

        thread = threading.Thread(target=come)
        thread.start()
        together.wait(10)
        answer.abandon()
        thread.join(10)
        assert undone == [1]


def test_a_daemon_that_stands_still_is_told_with_what_ends_it(tmp_path: Path) -> None:
    loop = IOLoop()
    loop.start()
    with socket.socket(socket.AF_UNIX) as daemon:
        daemon.bind(str(tmp_path / "node.sock"))
        daemon.listen()
        link = NodeLink(
            str(tmp_path / "node.sock"),
            loop,
            b"key",
            (b"process_", "driver", os.getpid(), b"", {}),
        )
        with pytest.raises(NodeLostError, match=r"within 0\.05 s: it stands still. `miniray stop`"):
            link.wait_welcome(0.05)
    loop.stop()


class Daemon:
    """The other end of a link, and what the link hands on, in order."""

    def __init__(self, path: str, loop: IOLoop) -> None:
        self.seen: list[Any] = []
        hello = (b"process_", "driver", os.getpid(), b"", {})
        with socket.socket(socket.AF_UNIX) as listener:
            listener.bind(path)
            listener.listen()
            self.link = NodeLink(path, loop, KEY, hello, on_lost=lambda: self.seen.append("gone"))
            self.conn = End(listener.accept()[0], loop, server=True).conn

    def begin(self) -> None:
        self.link.loop.call_soon(
            lambda: self.link.begin(
                lambda topic, _body: self.seen.append(topic),
                lambda _node, _process, messages: self.seen.extend(messages),
                lambda: self.seen.append("lost"),
            )
        )


@pytest.fixture
def daemon(loop: IOLoop, tmp_path: Path) -> Iterator[Daemon]:
    daemon = Daemon(str(tmp_path / "node.sock"), loop)
    yield daemon
    daemon.conn.close()
    daemon.link.close()


def test_what_comes_before_the_runtime_is_ready_waits_for_it(daemon: Daemon) -> None:
    daemon.conn.send((p.NODE_PUSH, "first", ()))
    daemon.conn.send((p.NODE_RELAYED, b"node0001", b"process1", [b"second"]))
    daemon.conn.send((p.NODE_WELCOME, {}))
    assert daemon.link.wait_welcome(10) == {}
    assert daemon.seen == []
    daemon.begin()
    eventually(lambda: daemon.seen == ["first", b"second"])
    daemon.conn.send((p.NODE_PUSH, "third", ()))
    eventually(lambda: daemon.seen == ["first", b"second", "third"])


def test_the_end_of_the_daemon_is_noticed_at_once_and_by_the_runtime_once_it_is_ready(
    daemon: Daemon,
) -> None:
    daemon.conn.send((p.NODE_PUSH, "first", ()))
    daemon.conn.send((p.NODE_WELCOME, {}))
    daemon.link.wait_welcome(10)
    daemon.conn.close()
    eventually(lambda: daemon.seen == ["gone"])
    daemon.begin()
    eventually(lambda: daemon.seen == ["gone", "first", "lost"])
