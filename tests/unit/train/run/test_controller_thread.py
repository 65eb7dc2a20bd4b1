"""The controller in a thread, with a worker group that does nothing."""

from __future__ import annotations

import asyncio
import concurrent.futures
import threading
import types

import pytest

from miniray.train import Backend, ControllerLostError, RunConfig, ScalingConfig
from miniray.train.base.policies import RunState
from miniray.train.base.reports import Report
from miniray.train.config.rules import LimitedRetries, default_scaling
from miniray.train.controller.run_spec import RunSpec
from miniray.train.progress.feed import Seen
from miniray.train.run.controller_thread import ControllerThread
from miniray.train.storage.storage import RunStorage
from miniray.train.worker.controller_client import rank_calls
from miniray.train.worker.worker import WorkerOutcome


class Group:
    """One rank, whose outcome the test decides."""

    def __init__(self):
        self.size = 1
        self.infos = []
        self.begun = concurrent.futures.Future()

    def serve(self, controller):
        pass

    async def part(self, outcome):
        pass

    async def place(self):
        pass

    async def start(self, carrier, attempt):
        pass

    async def storage_problems(self, storage, token):
        return {}

    def run(self, loop, setup, carrier):
        machine = asyncio.get_running_loop()
        outcome = machine.create_future()

        def finish():
            machine.call_soon_threadsafe(outcome.set_result, WorkerOutcome())

        self.begun.set_result((carrier, finish))
        return [outcome]

    async def stop(self, *, graceful):
        pass


@pytest.fixture
def run(tmp_path):
    """A run whose rank does nothing until ``finish`` is called."""
    config, scaling, group = RunConfig(), ScalingConfig(), Group()
    spec = RunSpec(
        name="run",
        storage=RunStorage(tmp_path, "run"),
        run_config=config,
        scaling_config=scaling,
        backend=Backend(),
        failure_policy=LimitedRetries(config.failure_config),
        scaling_policy=default_scaling(scaling),
    )
    thread, over = ControllerThread(spec, group), threading.Event()
    thread.start(None, over.set)
    carrier, finish = group.begun.result(30)
    yield types.SimpleNamespace(
        thread=thread, carrier=carrier, finish=finish, wait=lambda: over.wait(30)
    )
    thread.abort()


def test_calls_from_other_threads_reach_the_controller(run):
    run.carrier("report", 1, 0, 0, Report({"n": 1})).result(30)
    run.finish()
    assert run.thread.outcome().metrics == {"n": 1}
    assert run.wait()


def test_a_run_that_has_ended_takes_no_calls(run):
    run.finish()
    assert run.wait()
    with pytest.raises(ControllerLostError, match="run has ended"):
        run.carrier("report", 1, 0, 0, Report({}))


def test_a_call_that_waits_when_the_run_ends_is_answered(run):
    seen = run.thread.call("progress", Seen()).result(30).seen
    news = run.thread.call("progress", seen._replace(version=1000))
    run.finish()
    assert run.wait()
    with pytest.raises(ControllerLostError, match="run has ended"):
        rank_calls(lambda *_: news, 1, 0).report(0, Report({}))()


def test_a_run_can_be_stopped_from_another_thread(run):
    run.thread.abort()
    assert run.thread.outcome().state is RunState.ABORTED
    assert run.wait()
