"""What the cluster's list of runs is told, and when."""

from __future__ import annotations

import asyncio
import json
from types import SimpleNamespace

import pytest
from passing_time import time_passes

from miniray.train.base.states import RunState
from miniray.train.controller import board


@pytest.fixture
def rows(monkeypatch):
    """The rows that the head was told."""
    told = []
    names = ("node_id", "worker_id", "actor_id", "job_id")
    runtime = SimpleNamespace(
        context=lambda: SimpleNamespace(**dict.fromkeys(names, "00")),
        answer=lambda _question, _answer: None,
        head=SimpleNamespace(tell=lambda *message: told.append(json.loads(message[-1]))),
        tell_counts=lambda: None,
    )
    monkeypatch.setattr(board, "runtime_or_none", lambda: runtime)
    monkeypatch.setattr(board, "LIST_INTERVAL", 0.01)
    return told


def test_a_run_that_has_ended_tells_the_list_nothing_more(rows, start, monkeypatch):
    runs = start()._run_board

    async def live():
        runs.open()
        runs.write(RunState.RUNNING, "")
        runs.reported()
        await asyncio.to_thread(runs.write, RunState.FINISHED, "")
        runs.reported()
        runs.close()
        told = len(rows)
        await time_passes(monkeypatch, 1000)
        assert len(rows) == told

    asyncio.run(live())
    assert rows[-1]["state"] == "FINISHED"
