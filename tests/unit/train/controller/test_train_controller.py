"""The controller: reports, ends of ranks, and how a run ends. Ranks are coroutines here."""

from __future__ import annotations

import asyncio
import dataclasses
import pickle
import types

from controller_helpers import run

from miniray.exceptions import ActorDiedError, DeathCause
from miniray.train.base.policies import RunState
from miniray.train.base.reports import Report
from miniray.train.controller import controller as controller_module
from miniray.train.controller.attempt import Attempt
from miniray.train.controller.waits import BlockingWork
from miniray.train.progress.feed import Seen
from miniray.train.storage.storage import RunStorage


def test_a_run_returns_the_metrics_and_the_value_of_rank_0(start):
    async def loop(rank):
        await rank.report({"rank": rank.rank, "epoch": 0})
        await rank.report({"rank": rank.rank, "epoch": 1})
        return f"value of {rank.rank}"

    controller = start()
    outcome = run(controller, loop)
    assert outcome.state is RunState.FINISHED
    assert outcome.metrics == {"rank": 0, "epoch": 1}
    assert pickle.loads(outcome.return_value) == "value of 0"
    assert [group.stopped for group in controller.groups] == [True]


def test_an_exception_on_a_rank_ends_the_run_and_names_the_rank(start):
    async def loop(rank):
        if rank.rank == 1:
            raise ValueError("out of data")
        await asyncio.Event().wait()

    controller = start()
    outcome = run(controller, loop)
    assert outcome.state is RunState.ERRORED
    assert list(outcome.worker_failures) == [1]
    assert "[Rank 1] ValueError: out of data" in outcome.message
    assert isinstance(outcome.worker_failures[1].exception(), ValueError)
    assert [group.stopped for group in controller.groups] == [False]


def test_a_rank_that_dies_is_named_beside_the_rank_that_missed_it(start):
    async def loop(rank):
        if rank.rank == 1:
            await asyncio.sleep(0)
            raise ActorDiedError(DeathCause.EXITED, exit_code=-9)
        raise ConnectionError("peer is gone")

    outcome = run(start(), loop)
    assert sorted(outcome.worker_failures) == [0, 1]
    assert "SIGKILL" in outcome.message


def test_a_rank_that_returns_while_others_report_a_checkpoint_is_named(start):
    async def loop(rank):
        await rank.report({})
        if rank.rank == 0:
            await rank.report({}, {"model": "x"})
            await asyncio.Event().wait()

    outcome = run(start(), loop)
    assert outcome.state is RunState.ERRORED
    assert "Rank 1 returned after 1 reports, while rank 0 reported a checkpoint" in outcome.message
    assert "rank 0 was in its train loop" in outcome.message


def test_ranks_may_report_metrics_alone_a_different_number_of_times(start):
    async def loop(rank):
        if rank.rank == 0:
            for epoch in range(5):
                await rank.report({"epoch": epoch})

    async def scenario():
        controller = start()
        outcome = await controller.run(controller, [loop])
        return outcome, await controller.progress(Seen())

    outcome, progress = asyncio.run(scenario())
    assert outcome.state is RunState.FINISHED
    assert outcome.metrics == {"epoch": 4}
    assert [note for note in progress.notes if "do not report equally often" in note]
    assert len(progress.rows) == 5


def test_that_ranks_do_not_report_equally_often_is_told_once():
    async def scenario():
        recorder = types.SimpleNamespace(next_number=0)
        attempt = Attempt(1, 2, recorder, BlockingWork(), asyncio.Queue(), told.append)
        attempt.finish(1, b"")
        for index in range(5):
            await attempt.report(0, index, Report({}))

    told = []
    asyncio.run(scenario())
    assert len(told) == 1


def test_an_error_tells_what_the_other_ranks_did(start):
    async def loop(rank):
        if rank.rank == 0:
            await rank.report({})
            reported.set()
            await rank.call("join", 0, "barrier()", b"")
        elif rank.rank == 1:
            await rank.call("begin_upload", 0, "epoch_0", False)
            await asyncio.Event().wait()
        await reported.wait()
        raise ValueError("out of data")

    async def scenario():
        nonlocal reported
        reported = asyncio.Event()
        controller = start(workers=3)
        return await controller.run(controller, [loop])

    reported = None
    message = asyncio.run(scenario()).message
    assert "[Ranks 0 and 2] ValueError: out of data" in message
    assert "rank 1 uploaded the checkpoint 'epoch_0'" in message


def test_a_rank_that_returns_ends_the_barrier_of_the_others(start):
    async def loop(rank):
        if rank.rank == 0:
            raise (await rank.call("join", 0, "barrier()", b"")).error

    outcome = run(start(), loop)
    assert "Rank 1 returned from its train loop, while rank 0 waited for it in barrier()" in (
        outcome.message
    )


def test_an_aborted_run_ends_its_workers(start):
    async def loop(rank):
        running.set()
        await asyncio.Event().wait()

    async def scenario():
        nonlocal running
        running = asyncio.Event()
        controller = start()
        ended = asyncio.ensure_future(controller.run(controller, [loop]))
        await running.wait()
        await controller.abort()
        return controller, await ended

    running = None
    controller, outcome = asyncio.run(scenario())
    assert outcome.state is RunState.ABORTED
    assert controller.groups[0].stopped is False


def test_the_driver_is_told_of_states_and_rows(start):
    async def loop(rank):
        for epoch in range(3):
            await rank.report({"epoch": epoch})

    async def scenario():
        controller = start()
        ended = asyncio.ensure_future(controller.run(controller, [loop]))
        news, seen = [], Seen()
        while not news or not news[-1].state.terminal:
            news.append(await controller.progress(seen))
            seen = news[-1].seen
        await ended
        return news

    news = asyncio.run(scenario())
    assert [row.metrics["epoch"] for progress in news for row in progress.rows] == [0, 1, 2]
    assert news[-1].state is RunState.FINISHED


def test_the_folder_of_a_run_tells_its_end(start, tmp_path):
    async def loop(rank):
        await rank.report({"loss": 0.5, "eval": {"accuracy": 1}})

    run(start(), loop)
    storage = RunStorage(tmp_path, "run")
    assert storage.run_facts()["state"] == "FINISHED"
    header, row = storage.read_text("metrics.csv").splitlines()
    assert header == "number,time,checkpoint,loss,eval/accuracy"
    assert row.endswith(",0.5,1")


def test_the_folder_of_a_run_tells_that_it_runs(start, tmp_path):
    async def loop(rank):
        states.append(rank.setup.storage.run_facts()["state"])

    states = []
    run(start(workers=1), loop)
    assert states == ["RUNNING"]


def test_a_run_that_is_stopped_before_it_has_begun_is_aborted(start):
    async def scenario():
        controller = start()
        await controller.abort()
        return await controller.run(controller, [None])

    assert asyncio.run(scenario()).state is RunState.ABORTED


def test_the_process_of_a_rank_ends_some_time_after_its_loop_while_others_run(start, monkeypatch):
    monkeypatch.setattr(controller_module, "RETURN_GRACE", 0.01)

    async def loop(rank):
        if rank.rank == 0:
            while not controller.groups[0].ended:
                await asyncio.sleep(0.01)

    controller = start()
    assert run(controller, loop).state is RunState.FINISHED
    assert controller.groups[0].ended == [1]


def test_a_rank_that_waits_for_a_key_that_none_is_left_to_set_is_told_so(start, monkeypatch):
    monkeypatch.setattr("miniray.train.controller.attempt.KEYS_PATIENCE", 0.01)

    async def loop(rank):
        if rank.rank == 0:
            await rank.call("use_keys", "get", ["key"], 600)

    message = run(start(), loop).message
    assert "Rank 1 has returned from the train loop, while rank 0 waited" in message
    assert "the same number of steps" in message


def test_a_rank_that_was_replaced_is_turned_away(start):
    async def loop(rank):
        rank.setup = dataclasses.replace(rank.setup, attempt=7)
        await rank.report({})

    outcome = run(start(workers=1), loop)
    assert "Rank 0 of attempt 7 was replaced" in outcome.message
