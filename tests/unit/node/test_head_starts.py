"""Starts of heads that follow one that ended."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import TYPE_CHECKING

import pytest

from miniray.node import head_process
from miniray.system.boot_options import BootError

if TYPE_CHECKING:
    from pathlib import Path


@pytest.fixture
def starts(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """The times at which heads were started, on a clock that only pauses move."""
    times: list[float] = []
    now = 0.0

    async def sleep(seconds: float) -> None:
        nonlocal now
        now += seconds

    monkeypatch.setattr(asyncio, "sleep", sleep)
    monkeypatch.setattr(head_process, "time", SimpleNamespace(monotonic=lambda: now))
    process = head_process.HeadProcess
    monkeypatch.setattr(process, "_spawn", lambda _self: times.append(now))
    monkeypatch.setattr(process, "end", lambda _self, _grace: None)
    return times


def test_heads_that_cannot_serve_start_ever_further_apart_and_the_reason_is_told(
    starts: list[float], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    async def ready(_self: object) -> None:
        raise BootError("database or disk is full")

    monkeypatch.setattr(head_process.HeadProcess, "ready", ready)
    with pytest.raises(BootError, match="disk is full"):
        asyncio.run(head_process.HeadProcess({}, tmp_path).restart())
    assert starts == [0, 1, 4, 13, 40]


def test_heads_that_served_are_followed_at_once_but_not_for_ever(
    starts: list[float], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    async def ready(_self: object) -> None:
        """Serve."""

    monkeypatch.setattr(head_process.HeadProcess, "ready", ready)
    process = head_process.HeadProcess({}, tmp_path)
    for _ in range(5):
        asyncio.run(process.restart())
    assert starts == [0] * 5
    with pytest.raises(BootError, match="5 heads have ended within 60 s"):
        asyncio.run(process.restart())


def test_a_head_that_is_reaped_is_not_signalled_when_its_number_may_be_anothers(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    reaped: list[int] = []
    monkeypatch.setattr(head_process, "reap", lambda pid, _timeout: reaped.append(pid) or True)
    process = head_process.HeadProcess({}, tmp_path)
    process.pid = 7
    process.end(0)
    process.end(0)
    assert reaped == [7]
