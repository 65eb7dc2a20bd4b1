"""Requests whose waiter gives up: what comes then is closed and undone."""

from __future__ import annotations

import os
import threading
from typing import Any

from open_files import open_files

from miniray.wire.node_link import _Answer


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
