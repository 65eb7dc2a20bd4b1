"""How actors end, and how they start again."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import threading
from typing import TYPE_CHECKING, cast

import pytest
from cluster_helpers import count_up, is_alive, wait_for_file, wait_until

import miniray
from miniray.common.runtime import current_runtime
from miniray.exceptions import (
    ActorDiedError,
    ActorUnavailableError,
    RayActorError,
)

if TYPE_CHECKING:
    from pathlib import Path

    from miniray.client.cluster_runtime import ClusterRuntime

pytestmark = pytest.mark.usefixtures("cluster")


@miniray.remote
class Counter:
    """Counts."""

    def __init__(self, start: int = 0, step: int = 1) -> None:
        self.value = start
        self.step = step

    def add(self, n: int | None = None) -> int:
        self.value += self.step if n is None else n
        return self.value

    def pid(self) -> int:
        return os.getpid()

    def crash(self) -> None:
        os.kill(os.getpid(), signal.SIGKILL)

    def wait_for(self, path: Path) -> int:
        wait_for_file(path)
        return self.value

    def leave(self) -> None:
        miniray.actor.exit_actor()


def test_an_actor_ends_when_its_last_handle_goes() -> None:
    counter = Counter.remote()
    pid = miniray.get(counter.pid.remote())
    copy = miniray.get(miniray.put(counter))
    del counter
    assert miniray.get(copy.pid.remote()) == pid
    del copy
    wait_until(lambda: not is_alive(pid))


def test_calls_sent_before_the_last_handle_goes_still_run(tmp_path: Path) -> None:
    ref = Counter.remote(4).wait_for.remote(tmp_path / "go")
    (tmp_path / "go").touch()
    assert miniray.get(ref) == 4


def test_so_do_those_through_a_handle_that_was_found_by_name(tmp_path: Path) -> None:
    counter = Counter.options(name="soon gone").remote(4)
    ref = miniray.get_actor("soon gone").wait_for.remote(tmp_path / "go")
    del counter
    (tmp_path / "go").touch()
    assert miniray.get(ref, timeout=30) == 4


def test_kill_ends_the_process_and_fails_the_calls(tmp_path: Path) -> None:
    counter = Counter.remote()
    pid = miniray.get(counter.pid.remote())
    pending = counter.wait_for.remote(tmp_path / "never")
    miniray.kill(counter)
    with pytest.raises(RayActorError):
        miniray.get(pending)
    with pytest.raises(ActorDiedError):
        miniray.get(counter.add.remote())
    wait_until(lambda: not is_alive(pid))


def test_kill_takes_handles_only() -> None:
    with pytest.raises(ValueError, match="actor"):
        miniray.kill(miniray.put(1))


def test_exit_actor_ends_the_actor_after_the_call() -> None:
    counter = Counter.remote()
    pid = miniray.get(counter.pid.remote())
    with pytest.raises(RayActorError):
        miniray.get(counter.leave.remote())
    wait_until(lambda: not is_alive(pid))
    with pytest.raises(ActorDiedError):
        miniray.get(counter.add.remote())


class Leaving:
    """Ends itself in many ways. Its methods come in three kinds of actors."""

    def __init__(self) -> None:
        self.calls = 0

    def pid(self) -> int:
        return os.getpid()

    def leave_after(self, path: Path) -> None:
        wait_for_file(path)
        miniray.actor.exit_actor()

    def leave_quietly(self) -> str:
        with contextlib.suppress(BaseException):
            miniray.actor.exit_actor()
        return "still here"

    def leave_with_another_error(self) -> None:
        try:
            miniray.actor.exit_actor()
        except BaseException as error:
            raise ValueError("still here") from error

    def leave_in_a_thread(self) -> None:
        threading.Thread(target=miniray.actor.exit_actor).start()

    def touch(self, path: Path) -> None:
        path.touch()


@pytest.mark.parametrize("threads", [1, 2])
def test_calls_queued_behind_exit_actor_do_not_run(threads: int, tmp_path: Path) -> None:
    actor = miniray.remote(Leaving).options(max_concurrency=threads).remote()
    leaving = [actor.leave_after.remote(tmp_path / "go") for _ in range(threads)]
    behind = [actor.touch.remote(tmp_path / "touched") for _ in range(3)]
    (tmp_path / "go").touch()
    for ref in (*leaving, *behind):
        with pytest.raises(ActorDiedError, match="exit_actor"):
            miniray.get(ref, timeout=30)
    assert not (tmp_path / "touched").exists()


def test_calls_behind_one_that_exits_are_repeated_behind_it(tmp_path: Path) -> None:
    @miniray.remote(max_restarts=1, max_task_retries=1)
    class Forgetful:
        def __init__(self) -> None:
            self.seen: list[int] = []

        def exit_once(self, exited: Path, go: Path) -> list[int]:
            wait_for_file(go)
            if not exited.exists():
                exited.touch()
                sys.exit(1)
            return self.note(0)

        def note(self, number: int) -> list[int]:
            self.seen.append(number)
            return self.seen

    actor = Forgetful.remote()
    refs = [actor.exit_once.remote(tmp_path / "exited", tmp_path / "go")]
    refs += [actor.note.remote(number) for number in (1, 2)]
    (tmp_path / "go").touch()
    assert miniray.get(refs, timeout=30) == [[0], [0, 1], [0, 1, 2]]


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("how", ["leave_quietly", "leave_with_another_error"])
def test_an_actor_that_catches_its_exit_ends_nevertheless(threads: int, how: str) -> None:
    actor = miniray.remote(Leaving).options(max_concurrency=threads).remote()
    pid = miniray.get(actor.pid.remote())
    with pytest.raises(ActorDiedError, match="exit_actor"):
        miniray.get(getattr(actor, how).remote(), timeout=30)
    wait_until(lambda: not is_alive(pid))


def test_exit_actor_in_a_thread_of_the_actor_ends_it() -> None:
    actor = miniray.remote(Leaving).remote()
    pid = miniray.get(actor.pid.remote())
    actor.leave_in_a_thread.remote()
    wait_until(lambda: not is_alive(pid))
    with pytest.raises(ActorDiedError, match="exit_actor"):
        miniray.get(actor.pid.remote(), timeout=30)


def test_a_constructor_that_catches_its_exit_ends_its_actor() -> None:
    @miniray.remote
    class Stillborn:
        def __init__(self) -> None:
            with contextlib.suppress(BaseException):
                miniray.actor.exit_actor()

        def pid(self) -> int:
            return os.getpid()

    with pytest.raises(ActorDiedError, match="exit_actor"):
        miniray.get(Stillborn.remote().pid.remote(), timeout=30)


def test_an_actor_that_keeps_its_own_handle_ends_with_the_others() -> None:
    @miniray.remote
    class Selfish:
        def keep(self) -> int:
            self.me = miniray.get_runtime_context().current_actor
            return os.getpid()

    actor = Selfish.remote()
    pid = miniray.get(actor.keep.remote())
    del actor
    wait_until(lambda: not is_alive(pid))


def test_exit_actor_outside_of_an_actor_is_an_error() -> None:
    with pytest.raises(TypeError):
        miniray.actor.exit_actor()


def test_exit_handlers_run_when_an_actor_leaves(tmp_path: Path) -> None:
    @miniray.remote
    class Tidy:
        def register(self, path: Path) -> None:
            import atexit

            atexit.register(path.touch)

        def leave(self) -> None:
            miniray.actor.exit_actor()

    actor = Tidy.remote()
    miniray.get(actor.register.remote(tmp_path / "tidied"))
    actor.leave.remote()
    wait_until((tmp_path / "tidied").exists)


@pytest.mark.parametrize("how", ["handle", "terminate", "exit_actor", "kill"])
def test_an_actor_that_ends_by_rule_runs_its_shutdown_method(how: str, tmp_path: Path) -> None:
    @miniray.remote
    class Closing:
        def __init__(self) -> None:
            self.peer = Counter.remote(4)

        def pid(self) -> int:
            return os.getpid()

        def leave(self) -> None:
            miniray.actor.exit_actor()

        def __ray_shutdown__(self) -> None:
            (tmp_path / "closed").write_text(str(miniray.get(self.peer.add.remote())))

    actor = Closing.remote()
    pid = miniray.get(actor.pid.remote())
    if how == "handle":
        del actor
    elif how == "terminate":
        actor.__ray_terminate__.remote()
    elif how == "exit_actor":
        actor.leave.remote()
    else:
        miniray.kill(actor)
    wait_until(lambda: not is_alive(pid))
    assert (tmp_path / "closed").exists() == (how != "kill")


@pytest.mark.parametrize("name", ["__miniray_shutdown__", "__ray_shutdown__"])
def test_the_shutdown_method_has_either_name(name: str, tmp_path: Path) -> None:
    class Closing:
        pass

    setattr(Closing, name, lambda self: (tmp_path / "closed").touch())
    actor = miniray.remote(Closing).remote()
    actor.__ray_terminate__.remote()
    wait_until((tmp_path / "closed").exists)


@pytest.mark.parametrize(
    ("ready", "call", "terminate"),
    [
        ("__miniray_ready__", "__miniray_call__", "__miniray_terminate__"),
        ("__ray_ready__", "__ray_call__", "__ray_terminate__"),
    ],
)
def test_some_methods_are_those_of_every_actor(ready: str, call: str, terminate: str) -> None:
    counter = Counter.remote(3)
    miniray.get(getattr(counter, ready).remote())
    pid = miniray.get(counter.pid.remote())
    assert miniray.get(
        getattr(counter, call).remote(lambda it, n: (it.add(n), os.getpid()), 4)
    ) == (
        7,
        pid,
    )
    getattr(counter, terminate).remote()
    wait_until(lambda: not is_alive(pid))
    with pytest.raises(ActorDiedError):
        miniray.get(counter.add.remote())


def test_terminate_lets_the_calls_before_it_finish(tmp_path: Path) -> None:
    counter = Counter.remote(2)
    before = counter.wait_for.remote(tmp_path / "go")
    counter.__ray_terminate__.remote()
    (tmp_path / "go").touch()
    assert miniray.get(before) == 2


@pytest.mark.parametrize("end", ["forget", "kill", "__ray_terminate__"])
def test_nothing_of_an_actor_that_has_ended_stays_in_its_callers_tables(end: str) -> None:
    actors = cast("ClusterRuntime", current_runtime()).actors
    before = {*actors._at, *actors._clients}
    counter = Counter.remote()
    pid = miniray.get(counter.pid.remote())
    if end == "kill":
        miniray.kill(counter)
    elif end != "forget":
        getattr(counter, end).remote()
    del counter
    wait_until(lambda: not is_alive(pid))
    wait_until(lambda: {*actors._at, *actors._clients} <= before)


def test_a_crashed_actor_fails_its_calls() -> None:
    counter = Counter.remote()
    with pytest.raises(RayActorError):
        miniray.get(counter.crash.remote())
    with pytest.raises(ActorDiedError):
        miniray.get(counter.add.remote())


def test_max_restarts_starts_a_crashed_actor_anew() -> None:
    counter = Counter.options(max_restarts=1, max_task_retries=-1).remote(10)
    assert miniray.get(counter.add.remote()) == 11
    os.kill(miniray.get(counter.pid.remote()), signal.SIGKILL)
    assert miniray.get(counter.add.remote()) == 11
    os.kill(miniray.get(counter.pid.remote()), signal.SIGKILL)
    with pytest.raises(ActorDiedError):
        miniray.get(counter.add.remote())


def test_kill_with_no_restart_false_restarts_the_actor() -> None:
    counter = Counter.options(max_restarts=1, max_task_retries=-1).remote()
    pid = miniray.get(counter.pid.remote())
    miniray.kill(counter, no_restart=False)
    wait_until(lambda: not is_alive(pid))
    assert miniray.get(counter.pid.remote()) != pid


def test_an_actor_knows_that_it_was_restarted() -> None:
    @miniray.remote(max_restarts=1, max_task_retries=1)
    class Twice:
        def state(self) -> tuple[bool, int]:
            context = miniray.get_runtime_context()
            return context.was_current_actor_reconstructed, os.getpid()

    actor = Twice.remote()
    restarted, pid = miniray.get(actor.state.remote())
    assert not restarted
    os.kill(pid, signal.SIGKILL)
    assert miniray.get(actor.state.remote())[0]


def test_max_task_retries_runs_a_lost_call_again(tmp_path: Path) -> None:
    @miniray.remote(max_restarts=-1, max_task_retries=2)
    class Fragile:
        def run(self, path: Path) -> int:
            runs = count_up(path)
            if runs < 3:
                os.kill(os.getpid(), signal.SIGKILL)
            return runs

    assert miniray.get(Fragile.remote().run.remote(tmp_path / "runs")) == 3


def test_without_max_task_retries_a_lost_call_fails_though_the_actor_restarts(
    tmp_path: Path,
) -> None:
    counter = Counter.options(max_restarts=1).remote()
    miniray.get(counter.add.remote())
    told = r"was ended by signal 9 .* while Counter.crash was in flight.*restarts"
    with pytest.raises(ActorUnavailableError, match=told):
        miniray.get(counter.crash.remote())

    def answers() -> bool:
        try:
            return miniray.get(counter.add.remote()) > 0
        except RayActorError:
            return False

    wait_until(answers)


def test_a_method_may_ask_for_retries_of_its_errors(tmp_path: Path) -> None:
    @miniray.remote(max_task_retries=0)
    class Moody:
        @miniray.method(max_task_retries=2, retry_exceptions=True)
        def run(self, path: Path) -> int:
            runs = count_up(path)
            if runs < 3:
                raise ValueError("not now")
            return runs

    assert miniray.get(Moody.remote().run.remote(tmp_path / "runs")) == 3
