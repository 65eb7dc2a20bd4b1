"""What the controller tells callbacks, and what becomes of their exceptions."""

from __future__ import annotations

import asyncio
import shutil
import threading

import pytest
from controller_helpers import FakeGroup, run

from miniray.train import Callback, CallbackError
from miniray.train.base.states import RunState
from miniray.train.storage.storage import RunStorage


def test_callbacks_see_states_reports_and_failures(start):
    class Listener(Callback):
        def on_state_change(self, run_context, old, new):
            events.append((old.value, new.value))

        def on_start(self, run_context):
            events.append("start")

        def after_report(self, run_context, metrics, checkpoint):
            number = run_context.report_number
            events.append((number, metrics, checkpoint and checkpoint.path[-17:]))

        def after_checkpoint(self, run_context, checkpoint, metrics):
            events.append((run_context.report_number, metrics, checkpoint.path[-17:]))

        def after_exception(self, run_context, worker_exceptions):
            events.append({rank: str(error) for rank, error in worker_exceptions.items()})

        def on_end(self, run_context, state, error):
            events.append((state.value, error.splitlines()[0]))

    async def loop(rank):
        await rank.report({"r": rank.rank}, {"model": "x"})
        if rank.rank == 1:
            raise RuntimeError("boom")

    events = []
    run(start(callbacks=[Listener()]), loop)
    assert events == [
        "start",
        ("INITIALIZING", "SCHEDULING"),
        ("SCHEDULING", "RUNNING"),
        (0, {"r": 0}, "checkpoint_000000"),
        (0, [{"r": 0}, {"r": 1}], "checkpoint_000000"),
        {1: "boom"},
        ("RUNNING", "ERRORED"),
        ("ERRORED", "[Rank 1] RuntimeError: boom"),
    ]


def test_callbacks_are_told_which_run_it_is_and_what_its_loop_is_called_with(start):
    class Listener(Callback):
        def on_start(self, run_context):
            told.append((run_context.run_id, run_context.train_loop_config))

    async def loop(rank):
        pass

    told = []
    config = {"train_loop_config": {"lr": 0.1}}
    run(start(callbacks=[Listener()], run_id="abc", configuration=config), loop)
    assert told == [("abc", {"lr": 0.1})]


def test_callbacks_are_told_of_another_world_size(start):
    class Listener(Callback):
        def after_resize(self, run_context, old_size, new_size):
            sizes.append((old_size, new_size))

    async def loop(rank):
        if rank.setup.attempt < 3:
            raise RuntimeError("boom")

    sizes, room = [], iter([3, 3, 2])
    controller = start(
        workers=(2, 3),
        max_failures=2,
        callbacks=[Listener()],
        make_group=lambda *_: FakeGroup(next(room), []),
    )
    assert run(controller, loop).state is RunState.FINISHED
    assert sizes == [(3, 2)]


HOOKS = ["on_start", "on_state_change", "after_checkpoint", "after_report", "on_end"]


@pytest.mark.parametrize("hook", HOOKS)
def test_an_exception_in_any_hook_names_it_and_all_callbacks_hear_of_the_end(start, hook):
    class Listener(Callback):
        def on_end(self, run_context, state, error):
            ended.append(state)

    def fail(self, *arguments):
        raise OSError("no route to host")

    async def loop(rank):
        await rank.report({}, {"model": "x"})

    ended = []
    broken = type("Broken", (Callback,), {hook: fail})()
    outcome = run(start(callbacks=[Listener(), broken]), loop)
    assert outcome.state is RunState.ERRORED
    assert f"Broken failed in {hook}(): OSError" in outcome.controller_failure.summary
    assert f"Broken failed in {hook}(): OSError" in outcome.message
    assert ended == [RunState.FINISHED if hook == "on_end" else RunState.ERRORED]


def test_an_aborted_run_tells_callbacks_of_its_end_also_if_one_fails_at_it(start):
    class Listener(Callback):
        def on_state_change(self, run_context, old, new):
            if new is RunState.ABORTED:
                raise OSError("no route to host")

        def on_end(self, run_context, state, error):
            ended.append(state)

    async def loop(rank):
        running.set()
        await asyncio.Event().wait()

    async def scenario():
        nonlocal running
        running = asyncio.Event()
        controller = start(callbacks=[Listener()])
        result = asyncio.ensure_future(controller.run(controller, [loop]))
        await running.wait()
        await controller.abort()
        return await result

    running, ended = None, []
    outcome = asyncio.run(scenario())
    assert "no route to host" in outcome.message
    assert ended == [RunState.ERRORED]


@pytest.mark.parametrize("state", [RunState.FINISHED, RunState.ERRORED])
def test_a_run_that_is_stopped_while_callbacks_learn_how_it_ended_has_ended_so(
    start, tmp_path, state
):
    class Slow(Callback):
        def on_state_change(self, run_context, old, new):
            if new is state:
                learning.set()
                assert stopped.wait(20)

        def on_end(self, run_context, state, error):
            ended.append(state)

    async def loop(rank):
        if state is RunState.ERRORED:
            raise ValueError("boom")

    async def scenario():
        controller = start(callbacks=[Slow()])
        result = asyncio.ensure_future(controller.run(controller, [loop]))
        assert await asyncio.to_thread(learning.wait, 20)
        await controller.abort()
        stopped.set()
        return await result

    ended, learning, stopped = [], threading.Event(), threading.Event()
    assert asyncio.run(scenario()).state is state
    assert ended == [state]
    assert RunStorage(tmp_path, "run").run_facts()["state"] == state.value


def test_an_exception_in_a_callback_ends_the_run_as_the_controllers(start):
    class Broken(Callback):
        def after_report(self, run_context, metrics, checkpoint):
            raise ZeroDivisionError("in a callback")

    async def loop(rank):
        await rank.report({})
        await asyncio.Event().wait()

    controller = start(callbacks=[Broken()])
    outcome = run(controller, loop)
    assert outcome.state is RunState.ERRORED
    error = outcome.controller_failure.exception()
    assert isinstance(error, CallbackError)
    assert isinstance(error.cause, ZeroDivisionError)
    assert (error.callback.rpartition(".")[2], error.hook) == ("Broken", "after_report")
    assert "Broken failed in after_report(): ZeroDivisionError: in a callback" in outcome.message
    assert outcome.worker_failures == {}
    assert controller.groups[0].stopped is False


@pytest.mark.parametrize("what", ["storage", "callback"])
def test_what_fails_at_the_end_does_not_hide_why_ranks_have_failed(start, tmp_path, caplog, what):
    class AtTheEnd(Callback):
        def on_end(self, run_context, state, error):
            raise ValueError("no end")

    async def loop(rank):
        if rank.rank == 1:
            if what == "storage":
                shutil.rmtree(tmp_path / "run")
                (tmp_path / "run").write_text("no folder")
            raise ValueError("the disk is gone")
        await asyncio.sleep(60)

    outcome = run(start(callbacks=[AtTheEnd()] if what == "callback" else []), loop)
    assert outcome.state is RunState.ERRORED
    assert outcome.message.startswith("[Rank 1] ValueError: the disk is gone")
    assert list(outcome.worker_failures) == [1]
    assert outcome.controller_failure is None
    cause = "NotADirectoryError" if what == "storage" else "failed in on_end()"
    assert "Run run has failed, and could not be ended as it should:" in caplog.text
    assert cause in caplog.text
