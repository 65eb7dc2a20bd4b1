"""``cancel`` of tasks: waiting, running, by force, with children."""

from __future__ import annotations

import asyncio
import os
import threading
import time
from typing import TYPE_CHECKING, Any

import pytest
from cluster_helpers import is_alive, wait_for_file, wait_for_text, wait_until

import miniray
from miniray.exceptions import RayTaskError, TaskCancelledError, WorkerCrashedError

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = pytest.mark.usefixtures("cluster")

CLUSTER = {"num_cpus": 2}


@miniray.remote(max_retries=0)
def run(started: Path, go: Path) -> int:
    started.write_text(str(os.getpid()))
    wait_for_file(go)
    return os.getpid()


@miniray.remote
def identity(value: Any) -> Any:
    return value


@miniray.remote(max_retries=0)
def run_until_interrupted(started: Path, interrupted: Path) -> None:
    try:
        started.touch()
        while True:  # not in one wait, which Ray cannot interrupt
            time.sleep(0.01)
    except KeyboardInterrupt:
        interrupted.touch()
        raise


def test_a_running_task_is_interrupted(tmp_path: Path) -> None:
    ref = run.remote(tmp_path / "started", tmp_path / "go")
    wait_for_file(tmp_path / "started")
    miniray.cancel(ref)
    with pytest.raises(TaskCancelledError):
        miniray.get(ref, timeout=30)


def test_what_was_cancelled_while_it_ran_is_the_error_of_a_task_too(tmp_path: Path) -> None:
    @miniray.remote
    class Plain:
        def run(self, started: Path, _go: Path) -> None:
            started.touch()
            wait_until(miniray.get_runtime_context().is_canceled)

    @miniray.remote
    class Async:
        async def run(self, started: Path, _go: Path) -> None:
            started.touch()
            await asyncio.Event().wait()

        async def clean_up(self, started: Path, _go: Path) -> None:
            try:
                await self.run(started, _go)
            except asyncio.CancelledError:
                raise ValueError("in the clean-up") from None

    behind = Plain.remote()
    served = Async.remote()
    methods = (
        run,
        behind.run,
        Plain.options(max_concurrency=2).remote().run,
        served.run,
        served.clean_up,
    )
    refs = []
    for number, method in enumerate(methods):
        refs.append(method.remote(tmp_path / f"{number}", tmp_path / "go"))
        wait_for_file(tmp_path / f"{number}")
    queued = behind.run.remote(tmp_path / "queued", tmp_path / "go")
    for ref in (queued, *refs):
        miniray.cancel(ref)
    for ref in refs:
        with pytest.raises(RayTaskError) as info:
            miniray.get(ref, timeout=30)
        assert isinstance(info.value, TaskCancelledError)
        assert isinstance(info.value.cause, TaskCancelledError)
        assert "was cancelled." in str(info.value)
    with pytest.raises(TaskCancelledError) as never:  # as in Ray
        miniray.get(queued, timeout=30)
    assert not isinstance(never.value, RayTaskError)


def test_a_cancelled_task_sees_a_keyboard_interrupt(tmp_path: Path) -> None:
    @miniray.remote
    def careful(started: Path, cleaned: Path) -> None:
        try:
            started.touch()
            while True:
                time.sleep(0.01)
        except KeyboardInterrupt:
            cleaned.touch()
            raise

    ref = careful.remote(tmp_path / "started", tmp_path / "cleaned")
    wait_for_file(tmp_path / "started")
    miniray.cancel(ref)
    with pytest.raises(TaskCancelledError):
        miniray.get(ref, timeout=30)
    wait_for_file(tmp_path / "cleaned")


def test_a_task_that_waits_for_resources_never_runs(tmp_path: Path) -> None:
    running = [run.remote(tmp_path / f"started{n}", tmp_path / "go") for n in range(2)]
    for n in range(2):
        wait_for_file(tmp_path / f"started{n}")
    waiting = run.remote(tmp_path / "started-late", tmp_path / "go")
    miniray.cancel(waiting)
    with pytest.raises(TaskCancelledError):
        miniray.get(waiting, timeout=30)
    (tmp_path / "go").touch()
    miniray.get(running)
    assert miniray.get(identity.remote(1)) == 1
    assert not (tmp_path / "started-late").exists()


def test_a_task_that_waits_for_an_argument_never_runs(tmp_path: Path) -> None:
    first = run.remote(tmp_path / "started", tmp_path / "go")
    second = identity.remote(first)
    wait_for_file(tmp_path / "started")
    miniray.cancel(second)
    with pytest.raises(TaskCancelledError):
        miniray.get(second, timeout=30)
    (tmp_path / "go").touch()
    assert miniray.get(first) > 0


def test_a_task_that_depends_on_a_cancelled_one_fails_with_it(tmp_path: Path) -> None:
    first = run.remote(tmp_path / "started", tmp_path / "never")
    second = identity.remote(first)
    wait_for_file(tmp_path / "started")
    miniray.cancel(first)
    with pytest.raises(TaskCancelledError):
        miniray.get(second, timeout=30)


def test_force_ends_the_process(tmp_path: Path) -> None:
    ref = run.remote(tmp_path / "started", tmp_path / "never")
    wait_until(lambda: (tmp_path / "started").exists() and (tmp_path / "started").read_text())
    pid = int((tmp_path / "started").read_text())
    miniray.cancel(ref, force=True)
    with pytest.raises((TaskCancelledError, WorkerCrashedError)):
        miniray.get(ref, timeout=30)
    wait_until(lambda: not is_alive(pid))


def test_cancelling_a_finished_task_changes_nothing() -> None:
    ref = identity.remote(3)
    assert miniray.get(ref) == 3
    miniray.cancel(ref)
    assert miniray.get(ref) == 3


def test_a_worker_in_which_an_import_was_cut_off_runs_nothing_more(tmp_path: Path) -> None:
    package = tmp_path / "half_there"
    package.mkdir()
    (package / "__init__.py").write_text("from half_there import first, second\n")
    (package / "first.py").write_text("")
    (package / "second.py").write_text(
        "import os, pathlib, threading\n"
        f"pathlib.Path({str(tmp_path / 'pid')!r}).write_text(str(os.getpid()))\n"
        "threading.Event().wait()\n"
    )

    @miniray.remote(num_cpus=2)
    def load(folder: Path) -> None:
        import sys

        sys.path.insert(0, str(folder))
        import half_there  # type: ignore[import-not-found]  # noqa: F401

    @miniray.remote(num_cpus=2)
    def loaded() -> list[str]:
        import sys

        return [name for name in sys.modules if name.startswith("half_there")]

    loading = load.remote(tmp_path)
    pid = int(wait_for_text(tmp_path / "pid"))
    waiting = [loaded.remote() for _ in range(3)]
    miniray.cancel(loading)
    with pytest.raises(TaskCancelledError):
        miniray.get(loading, timeout=30)
    assert miniray.get(waiting, timeout=30) == [[], [], []]
    wait_until(lambda: not is_alive(pid))


def test_a_cancelled_task_is_not_retried(tmp_path: Path) -> None:
    ref = run.options(max_retries=5).remote(tmp_path / "started", tmp_path / "never")
    wait_for_file(tmp_path / "started")
    miniray.cancel(ref, force=True)
    with pytest.raises((TaskCancelledError, WorkerCrashedError)):
        miniray.get(ref, timeout=30)


def test_cancel_reaches_the_tasks_that_a_task_started(tmp_path: Path) -> None:
    @miniray.remote
    def parent(started: Path, never: Path) -> Any:
        return miniray.get(run.remote(started, never))

    ref = parent.remote(tmp_path / "started", tmp_path / "never")
    wait_until(lambda: (tmp_path / "started").exists() and (tmp_path / "started").read_text())
    miniray.cancel(ref, recursive=True)
    with pytest.raises(TaskCancelledError):
        miniray.get(ref, timeout=30)
    # Both CPUs are free again only if the child has ended too.
    (tmp_path / "go").touch()
    again = [run.remote(tmp_path / f"again{n}", tmp_path / "go") for n in range(2)]
    miniray.get(again, timeout=30)


def test_cancel_reaches_what_a_method_in_a_thread_started(tmp_path: Path) -> None:
    @miniray.remote(max_concurrency=2)
    class Parent:
        def run(self, started: Path, interrupted: Path) -> Any:
            return miniray.get(run_until_interrupted.remote(started, interrupted))

    parent = Parent.remote()
    ref = parent.run.remote(tmp_path / "started", tmp_path / "interrupted")
    wait_for_file(tmp_path / "started")
    miniray.cancel(ref)
    with pytest.raises(TaskCancelledError):
        miniray.get(ref, timeout=30)
    wait_for_file(tmp_path / "interrupted")


def test_cancel_reaches_what_a_coroutine_started(tmp_path: Path) -> None:
    @miniray.remote
    class Parent:
        async def run(self, started: Path, interrupted: Path) -> Any:
            return await run_until_interrupted.remote(started, interrupted)

    parent = Parent.remote()
    ref = parent.run.remote(tmp_path / "started", tmp_path / "interrupted")
    wait_for_file(tmp_path / "started")
    miniray.cancel(ref)
    with pytest.raises(TaskCancelledError):
        miniray.get(ref, timeout=30)
    wait_for_file(tmp_path / "interrupted")


def test_a_cancel_that_is_not_recursive_leaves_what_a_method_started(tmp_path: Path) -> None:
    @miniray.remote
    class Parent:
        async def run(self, started: Path, go: Path) -> Any:
            self.child = run.remote(started, go)
            return await self.child

        async def result(self) -> int:
            return await self.child

    parent = Parent.remote()
    ref = parent.run.remote(tmp_path / "started", tmp_path / "go")
    wait_for_file(tmp_path / "started")
    miniray.cancel(ref, recursive=False)
    with pytest.raises(TaskCancelledError):
        miniray.get(ref, timeout=30)
    (tmp_path / "go").touch()
    assert miniray.get(parent.result.remote(), timeout=30) > 0


@miniray.remote(num_cpus=0)
def touch(path: Path) -> None:
    path.touch()


@miniray.remote(num_cpus=0, max_retries=0)
def clean_up_as_a_task(folder: Path) -> None:
    try:  # a cancel may come as soon as the child has started, before the call of it returns
        miniray.get(run_until_interrupted.remote(folder / "started", folder / "interrupted"))
    finally:
        touch.remote(folder / "cleaned")


class CleansUp:
    def method(self, folder: Path) -> None:
        try:
            miniray.get(run_until_interrupted.remote(folder / "started", folder / "interrupted"))
        finally:
            touch.remote(folder / "cleaned")


class CleansUpAsynchronously:
    async def method(self, folder: Path) -> None:
        try:
            self.child = run_until_interrupted.remote(folder / "started", folder / "interrupted")
            await asyncio.Event().wait()
        finally:
            touch.remote(folder / "cleaned")


@pytest.mark.parametrize("kind", ["task", "method", "thread", "coroutine"])
def test_what_a_cancelled_call_starts_to_clean_up_is_not_cancelled(
    kind: str, tmp_path: Path
) -> None:
    if kind == "task":
        call: Any = clean_up_as_a_task
    else:
        cls = CleansUpAsynchronously if kind == "coroutine" else CleansUp
        threads = {"method": 1, "thread": 2, "coroutine": 10}[kind]
        actor: Any = miniray.remote(cls).options(max_concurrency=threads).remote()
        call = actor.method
    for turn in range(5):
        folder = tmp_path / str(turn)
        folder.mkdir()
        ref = call.remote(folder)
        wait_for_file(folder / "started")
        miniray.cancel(ref)
        with pytest.raises(TaskCancelledError):
            miniray.get(ref, timeout=30)
        wait_for_file(folder / "interrupted")
        wait_for_file(folder / "cleaned")


def test_the_process_of_an_interrupted_task_runs_other_tasks(tmp_path: Path) -> None:
    for n in range(3):
        ref = run.remote(tmp_path / f"started{n}", tmp_path / "never")
        wait_for_file(tmp_path / f"started{n}")
        miniray.cancel(ref)
        with pytest.raises(TaskCancelledError):
            miniray.get(ref, timeout=30)
    assert miniray.get([identity.remote(n) for n in range(20)], timeout=30) == list(range(20))


@pytest.mark.parametrize("threads", [1, 2])
def test_a_call_that_waits_at_an_actor_is_cancelled_before_its_turn(
    threads: int, tmp_path: Path
) -> None:
    @miniray.remote(max_concurrency=threads)
    class Worker:
        def run(self, started: Path, go: Path) -> str:
            started.touch()
            wait_for_file(go)
            return "ran"

    actor = Worker.remote()
    running = [actor.run.remote(tmp_path / str(n), tmp_path / "go") for n in range(threads)]
    for n in range(threads):
        wait_for_file(tmp_path / str(n))
    waiting = actor.run.remote(tmp_path / "waiting", tmp_path / "go")
    last = actor.run.remote(tmp_path / "last", tmp_path / "go")
    miniray.cancel(waiting)
    with pytest.raises(TaskCancelledError):
        miniray.get(waiting, timeout=30)
    (tmp_path / "go").touch()
    assert miniray.get([*running, last], timeout=30) == ["ran"] * (threads + 1)
    assert not (tmp_path / "waiting").exists()


def test_a_call_of_an_actor_cannot_be_cancelled_by_force(tmp_path: Path) -> None:
    @miniray.remote
    class Worker:
        def run(self, go: Path) -> None:
            wait_for_file(go)

    actor = Worker.remote()
    ref = actor.run.remote(tmp_path / "go")
    with pytest.raises(ValueError, match="force"):
        miniray.cancel(ref, force=True)
    (tmp_path / "go").touch()
    miniray.get(ref)


def test_a_call_can_be_cancelled_where_its_ref_was_passed_to(tmp_path: Path) -> None:
    @miniray.remote(num_cpus=0)
    def cancel_it(refs: list[Any]) -> None:
        miniray.cancel(refs[0])

    ref = run.remote(tmp_path / "started", tmp_path / "never")
    wait_for_file(tmp_path / "started")
    miniray.get(cancel_it.remote([ref]))
    with pytest.raises(TaskCancelledError):
        miniray.get(ref, timeout=30)
    assert miniray.get(cancel_it.remote([identity.remote(1)])) is None  # it may have finished


@pytest.mark.parametrize("threads", [1, 2])
def test_a_method_hears_of_a_cancel_if_it_asks(threads: int, tmp_path: Path) -> None:
    @miniray.remote(max_concurrency=threads)
    class Worker:
        def run(self, started: Path) -> str:
            context = miniray.get_runtime_context()
            assert not context.is_canceled()
            started.touch()
            wait_until(context.is_canceled)
            self.state = "whole"
            return self.state

        def look(self) -> str:
            return self.state

    actor = Worker.remote()
    ref = actor.run.remote(tmp_path / "started")
    wait_for_file(tmp_path / "started")
    miniray.cancel(ref)
    with pytest.raises(TaskCancelledError, match=r"Worker\.run"):  # whatever it returns
        miniray.get(ref, timeout=30)
    assert miniray.get(actor.look.remote(), timeout=30) == "whole"
    with pytest.raises(RuntimeError, match="not a driver"):
        miniray.get_runtime_context().is_canceled()


def test_a_running_method_of_a_plain_actor_is_not_interrupted(tmp_path: Path) -> None:
    @miniray.remote
    class Worker:
        def run(self, started: Path, go: Path) -> None:
            self.state = "half"
            started.touch()
            wait_for_file(go)
            self.state = "whole"

        def wait_for_a_task(self, started: Path, interrupted: Path) -> None:
            miniray.get(run_until_interrupted.remote(started, interrupted))

        def items(self, taken: Path) -> Any:
            for number in range(1000):
                yield number
                wait_for_file(taken)

        def look(self) -> str:
            return self.state

    actor = Worker.remote()
    ref = actor.run.remote(tmp_path / "started", tmp_path / "go")
    wait_for_file(tmp_path / "started")
    miniray.cancel(ref)
    assert miniray.wait([ref], timeout=0.1)[0] == []
    (tmp_path / "go").touch()
    with pytest.raises(TaskCancelledError):
        miniray.get(ref, timeout=30)
    assert miniray.get(actor.look.remote(), timeout=30) == "whole"
    waits = actor.wait_for_a_task.remote(tmp_path / "begun", tmp_path / "interrupted")
    wait_for_file(tmp_path / "begun")
    miniray.cancel(waits)  # it is told of what it waits for
    with pytest.raises(TaskCancelledError):
        miniray.get(waits, timeout=30)
    wait_for_file(tmp_path / "interrupted")
    stream = actor.items.remote(tmp_path / "taken")
    assert miniray.get(next(stream)) == 0
    miniray.cancel(stream)
    (tmp_path / "taken").touch()
    *_, last = stream  # it goes on to its next item at most
    with pytest.raises(TaskCancelledError):
        miniray.get(last)


def test_a_task_that_returns_after_it_was_cancelled_was_cancelled(tmp_path: Path) -> None:
    @miniray.remote
    def stubborn(started: Path) -> str:
        try:
            started.touch()
            threading.Event().wait()
        except KeyboardInterrupt:
            assert miniray.get_runtime_context().is_canceled()
        return "done"

    ref = stubborn.remote(tmp_path / "started")
    wait_for_file(tmp_path / "started")
    miniray.cancel(ref)
    with pytest.raises(TaskCancelledError):
        miniray.get(ref, timeout=30)


def test_only_refs_can_be_cancelled() -> None:
    with pytest.raises(TypeError):
        miniray.cancel("ref")


@pytest.mark.engine("miniray")
def test_a_long_task_remembers_only_calls_that_have_not_ended(tmp_path: Path) -> None:
    @miniray.remote(num_cpus=0)
    def nothing() -> None:
        """Has ended as soon as it has begun."""

    @miniray.remote(num_cpus=0)
    def items() -> Any:
        yield 1

    @miniray.remote(num_cpus=0)
    def many(started: Path, go: Path) -> int:
        from miniray.calls import context

        nothing.options(num_returns=0).remote()
        for _ in range(20):
            miniray.get(nothing.remote())
        miniray.get(list(items.remote()))
        waiting = run.options(num_cpus=0).remote(started, go)
        running = context.execution.get()
        assert running is not None
        wait_until(lambda: len(running.children) == 1)
        go.touch()
        miniray.get(waiting)
        return len(running.children)

    assert miniray.get(many.remote(tmp_path / "started", tmp_path / "go")) == 0


@pytest.mark.engine("miniray")
def test_a_cancel_that_comes_again_while_python_ignores_it_is_not_lost(tmp_path: Path) -> None:
    @miniray.remote(max_retries=0)
    def work(started: Path) -> str:
        import signal
        import sys

        executor: Any = sys.unraisablehook.__self__.executor  # type: ignore[attr-defined]
        loop = executor._runtime.loop
        later = type(loop).call_later

        def in_the_hook(self: Any, delay: float, callback: Any) -> Any:
            if threading.current_thread() is threading.main_thread():  # the hook, and none else
                signal.raise_signal(signal.SIGUSR1)
            return later(self, delay, callback)

        type(loop).call_later = in_the_hook

        class Slow:
            def __del__(self) -> None:
                started.touch()
                time.sleep(100)  # what interrupts it goes nowhere

        try:
            slow = Slow()
            del slow
            time.sleep(100)
        finally:
            type(loop).call_later = later
        return "nobody has cancelled it"

    ref = work.remote(tmp_path / "started")
    wait_for_file(tmp_path / "started")
    miniray.cancel(ref)
    with pytest.raises(TaskCancelledError):
        miniray.get(ref, timeout=30)
