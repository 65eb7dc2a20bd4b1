"""Requests whose waiter gives up: what comes then is closed and undone."""

from __future__ import annotations

import os
import socket
import threading
from typing import TYPE_CHECKING, Any

import pytest
from open_files import open_files

from miniray.wire.io_loop import IOLoop
from miniray.wire.node_link import NodeLink, NodeLostError, _Answer

if TYPE_CHECKING:
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
