"""Which worker a process descends from."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from miniray.node.workers import origins
from miniray.node.workers.origins import WORKER_VARIABLE, read_apart, worker_of

if TYPE_CHECKING:
    import pytest


def _between_programs(pid: int, name: str) -> str | None:
    raise BlockingIOError(pid)


def _gone(pid: int, name: str) -> str | None:
    raise ProcessLookupError(pid)


def test_a_process_tells_its_worker_or_hides_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(origins, "variable_of", lambda pid, name: {WORKER_VARIABLE: "w1"}[name])
    assert worker_of(os.getpid()) == "w1"
    monkeypatch.setattr(origins, "variable_of", lambda pid, name: None)
    assert worker_of(os.getpid()) == ""
    monkeypatch.setattr(origins, "variable_of", _gone)
    assert worker_of(os.getpid()) == ""


def test_a_process_between_two_programs_may_be_anybodys(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(origins, "variable_of", _between_programs)
    assert worker_of(os.getpid()) is None
    worker, reader = read_apart(os.getpid())
    os.waitpid(reader, 0)
    assert worker is None
