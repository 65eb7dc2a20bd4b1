"""The controller: reports, ends of ranks, and how a run ends. Ranks are coroutines here."""

from __future__ import annotations

import asyncio
import dataclasses
import types

from controller_helpers import run

from miniray.train.base.reports import Report
from miniray.train.base.states import RunState
from miniray.train.controller import controller as controller_module
from miniray.train.controller.attempt import Attempt
from miniray.train.controller.feed import Seen
from miniray.train.controller.waits import BlockingWork


def test_that_ranks_do_not_report_equally_often_is_told_once():
    async def scenario():
        recorder = types.SimpleNamespace(next_number=0)
        attempt = Attempt(
            1, 2, recorder, BlockingWork("runs/run", told.append), asyncio.Queue(), told.append
        )
        attempt.finish(1, b"")
        for index in range(5):
            await attempt.report(0, index, Report({}))

    told = []
    asyncio.run(scenario())
    assert len(told) == 1


def test_who_does_not_wait_for_reports_gets_the_checkpoints_that_there_are():
    async def scenario():
        recorder = types.SimpleNamespace(next_number=0, checkpoints=["one"])
        attempt = Attempt(1, 2, recorder, BlockingWork("runs/run", print), asyncio.Queue(), print)
        await attempt.report(0, 0, Report({}))
        return await asyncio.wait_for(attempt.reported_checkpoints(0, 1, 0), 20)

    assert asyncio.run(scenario()) == (["one"], [1])


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
