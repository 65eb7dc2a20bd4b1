"""The controller over failures, restarts, resumed runs and other world sizes."""

from __future__ import annotations

import asyncio
import logging

import pytest
from controller_helpers import FakeGroup, return_at_once, run

from miniray.exceptions import ActorDiedError, DeathCause
from miniray.train import Callback
from miniray.train.base.exceptions import (
    AttemptOverError,
    GroupStartError,
    RunTakenOverError,
    WorkerFailure,
)
from miniray.train.base.states import RunState
from miniray.train.storage.metrics_log import read_rows
from miniray.train.storage.storage import RunStorage


def test_a_resumed_run_that_reports_nothing_has_the_metrics_of_before(start):
    async def loop(rank):
        await rank.report({"loss": 0.5})

    async def silent(rank):
        pass

    run(start(), loop)
    assert run(start(), silent).metrics == {"loss": 0.5}


def test_the_log_of_a_controller_says_how_each_attempt_ended(start, caplog):
    caplog.set_level(logging.INFO, "miniray.train.controller.controller")

    async def loop(rank):
        if len(controller.groups) == 1:
            raise ValueError("spoilt")

    controller = start(max_failures=1)
    run(controller, loop)
    first, failed, second, finished = caplog.messages
    assert first.startswith("attempt 1 of run run has started: workers 2")
    assert failed == "the attempt has ended: FAILED. [Ranks 0 and 1] ValueError: spoilt"
    assert second.startswith("attempt 2 ")
    assert finished == "the attempt has ended: FINISHED"


def test_metrics_that_only_rank_0_has_reported_outlast_a_failure(start, tmp_path):
    async def loop(rank):
        if rank.rank == 1:
            await asyncio.Event().wait()
        for index in range(2):
            await rank.report({"i": index})
        await rank.report({"lost": True}, {"model": "x"})
        raise ValueError("spoilt")

    told = []

    class Listener(Callback):
        def after_report(self, run_context, metrics, checkpoint):
            told.append((run_context.report_number, metrics))

    outcome = run(start(max_failures=1, callbacks=[Listener()]), loop)
    assert outcome.state is RunState.ERRORED
    assert outcome.metrics == {"i": 1}
    rows = read_rows(RunStorage(tmp_path, "run"))
    by_number = [(0, 0), (1, 1), (3, 0), (4, 1)]
    assert [(row["number"], row["metrics"]["i"]) for row in rows] == by_number
    assert told == [(number, [{"i": i}, {}]) for number, i in by_number]


def test_a_second_driver_of_the_same_name_ends_the_first(start, tmp_path):
    async def first(rank):
        started.set()
        await other_over.wait()
        await rank.report({}, {"model": "x"})
        await asyncio.Event().wait()

    async def second(rank):
        await rank.report({"second": True}, {"model": "y"})

    async def scenario():
        nonlocal started, other_over
        started, other_over = asyncio.Event(), asyncio.Event()
        one, two = start(), start()
        ended = asyncio.ensure_future(one.run(one, [first]))
        await started.wait()
        outcome = await two.run(two, [second])
        other_over.set()
        return await ended, outcome

    started = other_over = None
    one, two = asyncio.run(scenario())
    assert isinstance(one.controller_failure.exception(), RunTakenOverError)
    assert two.state is RunState.FINISHED
    storage = RunStorage(tmp_path, "run")
    assert storage.run_facts()["state"] == "FINISHED"
    assert [record.metrics for record in storage.records()] == [{"second": True}]


def test_a_run_that_another_driver_has_taken_over_deletes_nothing_when_its_workers_fail(
    start, tmp_path
):
    async def first(rank):
        started.set()
        await other_uploads.wait()
        raise ValueError("boom")

    async def second(rank):
        folder = tmp_path / "run" / "checkpoint_000000"
        folder.mkdir()
        (folder / "uploaded").write_text("")
        other_uploads.set()
        await one_over.wait()
        assert (folder / "uploaded").exists()

    async def scenario():
        nonlocal started, other_uploads, one_over
        started, other_uploads, one_over = asyncio.Event(), asyncio.Event(), asyncio.Event()
        one, two = start(workers=1, max_failures=3), start(workers=1)
        first_ends = asyncio.ensure_future(one.run(one, [first]))
        await started.wait()
        second_ends = asyncio.ensure_future(two.run(two, [second]))
        outcome = await first_ends
        one_over.set()
        return outcome, await second_ends

    started = other_uploads = one_over = None
    one, two = asyncio.run(scenario())
    assert isinstance(one.controller_failure.exception(), RunTakenOverError)
    assert two.state is RunState.FINISHED, two.message


def test_workers_that_can_not_be_started_end_the_run(start):
    groups = []

    def make_group(_, decision):
        group = FakeGroup(decision.num_workers, groups)
        group.start_error = GroupStartError({1: WorkerFailure("no module named torch")})
        return group

    outcome = run(start(make_group=make_group), None)
    assert outcome.state is RunState.ERRORED
    assert "[Rank 1] no module named torch" in outcome.message
    assert groups[0].stopped is False


def lost_start(starts, groups):
    """Makes groups of which the first so many lose a process while they start."""

    def make_group(_, decision):
        group = FakeGroup(decision.num_workers, groups)
        if len(groups) <= starts:
            died = WorkerFailure.of(ActorDiedError(DeathCause.NODE_LOST, node_id="ab"))
            group.start_error = GroupStartError({0: died})
        return group

    return make_group


def test_a_lost_start_does_not_count_as_a_failure_of_the_workers(start):
    groups = []
    outcome = run(start(make_group=lost_start(2, groups)), return_at_once)
    assert outcome.state is RunState.FINISHED
    assert len(groups) == 3


def test_lost_starts_end_the_run_when_their_limit_is_passed(start):
    groups = []
    make_group = lost_start(5, groups)
    controller = start(max_failures=9, controller_failure_limit=1, make_group=make_group)
    outcome = run(controller, return_at_once)
    assert outcome.state is RunState.ERRORED
    assert "was lost" in outcome.message
    assert len(groups) == 2


class FakeReservation:
    """A place for one worker more; only that for the first is there."""

    def __init__(self, number, log):
        self._number = number
        self._log = log

    async def ready(self):
        if self._number:
            await asyncio.Event().wait()
        self._log.append("kept")

    def remove(self):
        self._log.append(f"gave {self._number} back")


def test_a_group_grows_at_a_checkpoint_and_its_failures_are_not_counted(start):
    class Elastic(FakeGroup):
        async def place(self):
            self.size = 2 if len(groups) == 1 else self.size

        def reserve_beside(self, number):
            return FakeReservation(number, log)

    async def loop(rank):
        size = len(groups[-1:]) and groups[-1].size
        sizes.append((rank.setup.attempt, size, rank.setup.checkpoint is not None))
        while groups[-1].size < 4:
            await rank.report({}, {f"rank{rank.rank}": "x"})
            await asyncio.sleep(0)

    groups, log, sizes = [], [], []
    make_group = lambda _, decision: Elastic(decision.num_workers, groups)  # noqa: E731
    outcome = run(start(workers=(2, 4), make_group=make_group), loop)
    assert outcome.state is RunState.FINISHED
    assert [group.size for group in groups] == [2, 3, 4]
    assert [group.stopped for group in groups] == [False, False, True]
    assert sorted(set(sizes)) == [(1, 2, False), (2, 3, True), (3, 4, True)]
    assert log == ["kept", "gave 0 back", "gave 1 back", "kept", "gave 0 back"]


def test_reports_of_an_ended_attempt_are_refused(start):
    async def loop(rank):
        if rank.setup.attempt == 1:
            stale.append(rank)
            raise RuntimeError("boom")
        with pytest.raises(AttemptOverError):
            await stale[0].report({"stale": True})
        await rank.report({"stale": False})

    stale = []
    assert run(start(workers=1, max_failures=1), loop).metrics == {"stale": False}


def test_reports_are_numbered_on_over_restarts_and_resumed_runs(start):
    class Listener(Callback):
        def after_report(self, run_context, metrics, checkpoint):
            numbers.append(run_context.report_number)

        def on_end(self, run_context, state, error):
            numbers.append(state.value)

    async def loop(rank):
        await rank.report({}, {"model": "x"})
        if rank.setup.attempt == 1:
            raise RuntimeError("boom")

    numbers = []
    for _ in range(2):
        run(start(workers=1, max_failures=1, callbacks=[Listener()]), loop)
    assert numbers == [0, 1, "FINISHED", 2, 3, "FINISHED"]


def test_a_run_that_was_taken_over_while_it_started_stops(start, tmp_path):
    class Taken(FakeGroup):
        async def start(self, carrier, attempt):
            RunStorage(tmp_path, "run").write_run_facts({"token": "another"})

    groups = []
    controller = start(make_group=lambda _, decision: Taken(decision.num_workers, groups))
    outcome = run(controller, None)
    assert isinstance(outcome.controller_failure.exception(), RunTakenOverError)
    assert RunStorage(tmp_path, "run").run_facts() == {"token": "another"}
