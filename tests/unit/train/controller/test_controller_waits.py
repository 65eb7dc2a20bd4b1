"""What the controller waits for: each wait ends, and says why it lasts."""

from __future__ import annotations

import asyncio
import re
import threading
import time
import types

import pytest
from controller_helpers import FakeGroup, run
from passing_time import time_passes

from miniray.train.base.exceptions import (
    StorageNotSharedError,
    StorageUnusableError,
)
from miniray.train.base.ranks import WorkerInfo
from miniray.train.base.states import RunState
from miniray.train.controller.feed import ProgressFeed, Seen
from miniray.train.storage.filesystem import Store
from miniray.train.storage.storage import RunStorage


@pytest.mark.parametrize(
    ("problem", "kind", "message"),
    [
        ("not shared", StorageNotSharedError, "rank 1 on 10.0.0.1 did not find"),
        ("OSError: disk", StorageUnusableError, "Rank 1 on 10.0.0.1 got OSError: disk"),
    ],
)
def test_a_storage_that_a_rank_can_not_use_ends_the_run_at_once_and_is_named(
    start, tmp_path, problem, kind, message
):
    class Apart(FakeGroup):
        async def storage_problems(self, storage, token):
            self.infos = [WorkerInfo("ab", f"10.0.0.{rank}", 1, 1, {}) for rank in range(2)]
            return {1: problem}

        async def stop(self, *, graceful):
            self.infos = []  # nothing ran there, so there is no output

    groups = []
    controller = start(
        max_failures=5, make_group=lambda _, decision: Apart(decision.num_workers, groups)
    )
    outcome = run(controller, None)
    assert len(groups) == 1
    error = outcome.controller_failure.exception()
    assert isinstance(error, kind)
    assert message in str(error)
    assert str(tmp_path) in str(error)
    assert list(tmp_path.glob("run/.probe-*")) == []


def test_progress_of_one_rank_is_progress(start, monkeypatch):
    looked = []

    async def loop(rank):
        if rank.rank == 0:
            for _ in range(3):
                await time_passes(monkeypatch, 400)
                await rank.report({})
            over.set()
        await over.wait()

    async def scenario():
        nonlocal over
        over = asyncio.Event()
        running = asyncio.get_running_loop()
        clock = types.SimpleNamespace(time=time.time, monotonic=lambda: running.time())
        monkeypatch.setattr("miniray.train.controller.attempt.time", clock)
        controller = start(hang_timeout=600)
        return await controller.run(controller, [loop])

    over = None
    monkeypatch.setattr(FakeGroup, "stacks", lambda _, ranks: looked.append(ranks) or {})
    assert asyncio.run(scenario()).state is RunState.FINISHED
    assert looked == []


def test_stacks_that_can_not_be_written_are_in_the_error_all_the_same(start, monkeypatch):
    def fail(self, name, text):
        if name.startswith("stacks"):
            raise OSError("disk full")
        write(self, name, text)

    async def loop(rank):
        await asyncio.Event().wait()

    write = Store.write
    monkeypatch.setattr(Store, "write", fail)
    outcome = run(start(hang_timeout=0.05), loop)
    assert outcome.state is RunState.ERRORED
    assert "could not be written" in outcome.message
    assert "disk full" in outcome.message


def test_that_a_checkpoint_waits_for_ranks_is_told_once(start, monkeypatch):
    monkeypatch.setattr("miniray.train.controller.attempt.NOTE_AFTER", 0.05)
    notes = []

    async def loop(rank):
        if rank.rank == 0:
            await rank.report({}, {"model": "weights"})
            await rank.report({}, {"model": "weights"})
        while not notes:
            notes.extend(
                n for n in (await rank.controller.progress(Seen())).notes if "not com" in n
            )
            await asyncio.sleep(0.01)
        await time_passes(monkeypatch, 1000)
        if rank.rank == 1:
            await rank.report({})
            await rank.report({})
        return "done"

    controller = start()
    outcome = run(controller, loop)
    assert outcome.state is RunState.FINISHED
    notes = asyncio.run(controller.progress(Seen())).notes
    [told] = [note for note in notes if "is not complete" in note]
    assert "'checkpoint_000000' is not complete: for 0.05 s it has waited for rank 1" in told


def test_a_checkpoint_that_becomes_complete_in_time_is_not_told_of(start, monkeypatch):
    reported = []

    async def loop(rank):
        await rank.report({}, {"model": "weights"})
        reported.append(rank.rank)
        while len(reported) < 2:
            await asyncio.sleep(0)
        await time_passes(monkeypatch, 1000)

    controller = start()
    run(controller, loop)
    notes = asyncio.run(controller.progress(Seen())).notes
    assert not any("is not complete" in note for note in notes)


@pytest.mark.parametrize("what", ["commit", "write_run_facts"])
def test_the_user_is_told_that_a_run_waits_for_its_storage(start, monkeypatch, what):
    store = getattr(RunStorage, what)
    told = threading.Event()

    def slow(storage, *args):
        assert told.wait(20)
        return store(storage, *args)

    async def loop(rank):
        await rank.report({}, {"model": "weights"})

    monkeypatch.setattr("miniray.train.controller.waits.SLOW_WORK", 0.01)
    monkeypatch.setattr(RunStorage, what, slow)
    notes = []
    monkeypatch.setattr(ProgressFeed, "note", lambda _, text: (notes.append(text), told.set()))
    assert run(start(), loop).state is RunState.FINISHED
    expected = r"The run waits for its storage .*/run, or for a callback: .* has not returned for "
    assert re.match(expected, notes[0])
