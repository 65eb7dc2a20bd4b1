"""Local mode: the controller in a thread, of a run whose one rank is the test; and another rank."""

from __future__ import annotations

import functools
from concurrent.futures import Future
from types import SimpleNamespace
from typing import Any

import pytest

from miniray.train import Backend, RunConfig, ScalingConfig
from miniray.train.base.exceptions import ControllerLostError, StorageNotSharedError
from miniray.train.base.ranks import Ranks
from miniray.train.base.reports import Report
from miniray.train.base.states import RunState
from miniray.train.controller.feed import Seen
from miniray.train.controller.run_spec import RunSpec
from miniray.train.run import local
from miniray.train.run.local import ControllerThread
from miniray.train.storage.storage import RunStorage
from miniray.train.worker.controller_client import rank_calls
from miniray.train.worker.worker import WorkerOutcome


@pytest.fixture
def run(tmp_path):
    """A run whose rank does nothing until ``finish`` is called."""
    config, scaling = RunConfig(), ScalingConfig()
    spec = RunSpec(
        storage=RunStorage(tmp_path, "run"),
        run_config=config,
        scaling_config=scaling,
        backend=Backend(),
        failures=config.failure_config,
        group=scaling.group,
    )
    thread = ControllerThread(spec, 1, None)
    thread.begin(None)
    ask = functools.partial(thread.ask, 0)
    assert ask("setup").result(30).token
    yield SimpleNamespace(
        thread=thread, ask=ask, finish=lambda: ask("end", WorkerOutcome()).result(30)
    )
    thread.abort()


def test_calls_from_other_threads_reach_the_controller(run):
    run.ask("call", "report", 1, 0, 0, Report({"n": 1})).result(30)
    run.finish()
    assert run.thread.outcome().metrics == {"n": 1}


def test_a_run_that_has_ended_takes_no_calls(run):
    run.finish()
    assert run.thread.outcome().state is RunState.FINISHED
    with pytest.raises(ControllerLostError, match="run has ended"):
        run.ask("call", "report", 1, 0, 0, Report({}))


def test_a_call_that_waits_when_the_run_ends_is_answered(run):
    seen = run.ask("progress", Seen()).result(30).seen
    news = run.ask("progress", seen._replace(version=1000))
    run.finish()
    assert run.thread.outcome().state is RunState.FINISHED
    with pytest.raises(ControllerLostError, match="run has ended"):
        rank_calls(lambda *_: news, 1, 0).report(0, Report({}))()


def test_a_run_can_be_stopped_from_another_thread(run):
    run.thread.abort()
    assert run.thread.outcome().state is RunState.ABORTED


def test_ranks_that_do_not_come_are_named(run, monkeypatch):
    monkeypatch.setattr(local, "FAILURE_TIMEOUT", 0.01)
    spec = run.thread._controller._spec
    link = SimpleNamespace(timeout=0.01, serve=lambda *_: None, close=lambda: None)
    thread = ControllerThread(spec, 3, link)
    thread.begin(None)
    thread.ask(0, "setup")
    failure = thread.outcome().controller_failure
    assert failure is not None
    assert "Ranks 1 and 2 did not connect with rank 0 in 0.01 s" in failure.summary


def test_a_rank_whose_own_failure_comes_after_the_end_of_rank_0_raises_its_own() -> None:
    storage = SimpleNamespace(run_facts=dict, storage_fs_path="/elsewhere")

    def ask(kind: str, *_: object) -> Future[Any]:
        if kind != "setup":
            raise ControllerLostError("rank 0 is gone")
        answer: Future[Any] = Future()
        answer.set_result(SimpleNamespace(storage=storage, token="other"))
        return answer

    backend, config = SimpleNamespace(), SimpleNamespace(logging_config=None)
    spec: Any = SimpleNamespace(storage=storage, backend=backend, run_config=config)
    place: Any = SimpleNamespace(ranks=Ranks(1, 2, 1, 2, 0))
    link: Any = SimpleNamespace(ask=ask)
    ended = local._follow(spec, lambda: None, place, link)  # type: ignore[arg-type]
    assert isinstance(ended.error, StorageNotSharedError)
