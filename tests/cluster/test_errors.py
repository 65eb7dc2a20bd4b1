"""Errors of user code, and how they reach the caller."""

from __future__ import annotations

import dataclasses
import linecache
import os
import pickle
import sys
import threading
from typing import TYPE_CHECKING, Any

import pytest
from cluster_helpers import wait_for_file, wait_until

import miniray
from miniray import exceptions
from miniray.exceptions import (
    GetTimeoutError,
    RayActorError,
    RayError,
    RayTaskError,
    TaskCancelledError,
    WorkerCrashedError,
)

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Iterator
    from pathlib import Path

pytestmark = pytest.mark.usefixtures("cluster")


class QuotaError(Exception):
    """An exception with a constructor and attributes of its own."""

    def __init__(self, user: str, limit: int) -> None:
        super().__init__(f"{user} is over {limit}")
        self.user = user
        self.limit = limit

    def __reduce__(self) -> tuple[type[QuotaError], tuple[str, int]]:
        return QuotaError, (self.user, self.limit)


class LopsidedError(Exception):
    """An exception that pickles but can't be unpickled: its constructor needs another argument."""

    def __init__(self, code: int, message: str) -> None:
        super().__init__(message)
        self.code = code


class LockedError(Exception):
    """An exception that can't be pickled."""

    def __init__(self, message: str) -> None:
        super().__init__(message)
        self.lock = threading.Lock()


@dataclasses.dataclass(frozen=True)
class FrozenError(Exception):
    """An exception that refuses to be changed."""

    key: str


class ClosedError(Exception):
    """An exception of which nothing can be read."""

    def __getattribute__(self, name: str) -> Any:
        raise PermissionError(name)


class OwnRayError(RayError):
    """An exception of the user's that is derived from one of the API."""


class UnsentError(GetTimeoutError):
    """An exception that raises what ends a process when it is pickled."""

    def __reduce__(self) -> tuple[Any, ...]:
        raise KeyboardInterrupt


ODD = {
    "frozen": lambda: FrozenError("k"),
    "closed": ClosedError,
    "own": lambda: OwnRayError("k"),
    "unsent": UnsentError,
}


def odd(kind: str) -> None:
    make = ODD[kind]
    raise make()


class Odd:
    def fail(self, kind: str) -> None:
        odd(kind)

    def stream(self, kind: str) -> Iterator[int]:
        yield 1
        odd(kind)

    def fine(self) -> str:
        return "fine"


class AsyncOdd:
    async def fail(self, kind: str) -> None:
        odd(kind)

    async def stream(self, kind: str) -> AsyncIterator[int]:
        yield 1
        odd(kind)

    async def fine(self) -> str:
        return "fine"


@miniray.remote
class OddFromTheStart:
    def __init__(self, kind: str) -> None:
        odd(kind)

    def fine(self) -> str:
        return "fine"


@pytest.mark.parametrize("kind", ODD)
def test_an_exception_of_a_constructor_is_named_whatever_its_class_is_like(kind: str) -> None:
    actor = OddFromTheStart.remote(kind)
    with pytest.raises(RayActorError, match=type(ODD[kind]()).__name__):
        miniray.get(actor.fine.remote(), timeout=30)


@miniray.remote
def over_quota() -> None:
    raise QuotaError("ann", 3)


@miniray.remote
def divide(a: int, b: int) -> float:
    return a / b


@miniray.remote
class Thrower:
    def throw(self, message: str) -> None:
        raise ValueError(message)

    def fine(self) -> str:
        return "fine"


def test_the_error_is_an_instance_of_the_users_class_and_of_the_task_error() -> None:
    with pytest.raises(ZeroDivisionError) as info:
        miniray.get(divide.remote(1, 0))
    assert isinstance(info.value, RayTaskError)
    assert isinstance(info.value, RayError)


def test_the_text_shows_the_remote_traceback() -> None:
    with pytest.raises(RayTaskError) as info:
        miniray.get(divide.remote(1, 0))
    text = str(info.value)
    assert "return a / b" in text
    assert "divide" in text
    assert "ZeroDivisionError" in text


def test_names_of_calls_and_resources_cannot_steer_the_terminal_that_an_error_is_shown_on() -> None:
    named = divide.options(name="ev\x1b[2Jil")
    waits = named.options(resources={"x\x1b[2Jy": 1}).remote(1, 1)

    def told(ref: Any, timeout: float | None) -> str:
        with pytest.raises((ZeroDivisionError, GetTimeoutError)) as info:
            miniray.get(ref, timeout=timeout)
        assert "\x1b" not in str(info.value)
        assert r"ev\x1b[2Jil" in str(info.value)
        return str(info.value)

    told(named.remote(1, 0), None)
    # A head that is too busy to say in time what it needs is not waited for.
    wait_until(lambda: r"needs x\x1b[2Jy 1" in told(waits, 0.6))
    miniray.cancel(waits)


def test_the_text_shows_lines_of_code_that_only_the_driver_has(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    name, code = "/tmp/ipykernel_1/2.py", "def cell(divisor):\n    return 1 / divisor\n"
    monkeypatch.setitem(
        linecache.cache, name, (len(code), None, code.splitlines(keepends=True), name)
    )
    namespace: dict[str, Any] = {"__name__": "__main__"}
    exec(compile(code, name, "exec"), namespace)
    with pytest.raises(ZeroDivisionError) as caught:
        miniray.get(miniray.remote(namespace["cell"]).remote(0))
    frame = f'  File "{name}", line 2, in cell\n    return 1 / divisor\n'
    assert str(caught.value).count(frame) == 1
    assert str(caught.value).count("return 1 / divisor") == 1


def test_the_cause_is_the_users_exception_with_its_attributes() -> None:
    with pytest.raises(QuotaError) as info:
        miniray.get(over_quota.remote())
    cause = info.value.cause
    assert type(cause) is QuotaError
    assert (cause.user, cause.limit) == ("ann", 3)


def test_an_error_of_a_nested_task_reaches_the_outermost_caller() -> None:
    @miniray.remote
    def outer() -> Any:
        return miniray.get(divide.remote(1, 0))

    with pytest.raises(ZeroDivisionError) as info:
        miniray.get(outer.remote())
    assert "divide" in str(info.value)
    assert "outer" in str(info.value)


def test_an_error_passes_through_a_chain_of_arguments() -> None:
    @miniray.remote
    def forward(value: Any) -> Any:
        return value

    with pytest.raises(QuotaError):
        miniray.get(forward.remote(forward.remote(over_quota.remote())))


def test_an_exception_that_cannot_be_pickled_is_named_with_its_text() -> None:
    @miniray.remote
    def locked() -> None:
        raise LockedError("shut for good")

    with pytest.raises(RayError) as info:
        miniray.get(locked.remote())
    assert "LockedError" in str(info.value)
    assert "shut for good" in str(info.value)


def test_an_exception_that_cannot_be_unpickled_is_named_with_its_text() -> None:
    @miniray.remote
    def lopsided() -> None:
        raise LopsidedError(3, "leans to one side")

    with pytest.raises(RayError) as info:
        miniray.get(lopsided.remote())
    assert "LopsidedError" in str(info.value)
    assert "leans to one side" in str(info.value)


@pytest.mark.parametrize(
    ("cls", "options"),
    [
        (Odd, {}),
        (Odd, {"max_concurrency": 2}),
        (Odd, {"concurrency_groups": {"io": 1}}),
        (AsyncOdd, {}),
        (AsyncOdd, {"concurrency_groups": {"io": 1}}),
    ],
    ids=["plain", "threads", "groups", "asyncio", "asyncio with groups"],
)
def test_a_call_is_answered_whatever_class_its_error_has(
    cls: type, options: dict[str, Any]
) -> None:
    actor: Any = (miniray.remote(**options)(cls) if options else miniray.remote(cls)).remote()
    for kind, expected in (
        ("frozen", FrozenError),
        ("closed", RayTaskError),
        ("own", OwnRayError),
        ("unsent", RayTaskError),
    ):
        with pytest.raises(expected) as info:
            miniray.get(actor.fail.remote(kind), timeout=60)
        assert isinstance(info.value, RayTaskError)
        assert kind.capitalize() in str(info.value)
        items = actor.stream.options(num_returns="streaming").remote(kind)
        assert miniray.get(next(items), timeout=60) == 1
        with pytest.raises(expected):
            miniray.get(next(items), timeout=60)
    assert miniray.get(actor.fine.remote(), timeout=60) == "fine"


@pytest.mark.parametrize("kind", list(ODD))
def test_a_task_is_answered_whatever_class_its_error_has(kind: str) -> None:
    with pytest.raises(RayTaskError, match=kind.capitalize()):
        miniray.get(miniray.remote(odd).remote(kind), timeout=60)


def test_the_first_error_of_a_list_of_refs_is_raised() -> None:
    with pytest.raises(ZeroDivisionError):
        miniray.get([divide.remote(1, 1), divide.remote(1, 0), divide.remote(4, 2)])


def test_an_actor_lives_on_after_a_method_failed() -> None:
    actor = Thrower.remote()
    with pytest.raises(ValueError, match="first") as info:
        miniray.get(actor.throw.remote("first"))
    assert isinstance(info.value, RayTaskError)
    assert "Thrower.throw" in str(info.value)
    assert miniray.get(actor.fine.remote()) == "fine"


def test_an_unknown_method_is_an_attribute_error_at_once() -> None:
    actor = Thrower.remote()
    with pytest.raises(AttributeError, match="missing"):
        actor.missing.remote()


def test_a_method_cannot_be_called_directly() -> None:
    actor = Thrower.remote()
    with pytest.raises(TypeError, match="remote"):
        actor.fine()


def test_a_class_made_remote_cannot_be_instantiated_directly() -> None:
    with pytest.raises(TypeError, match="remote"):
        Thrower()


def test_a_task_that_ends_its_process_is_a_crash() -> None:
    @miniray.remote(max_retries=0)
    def leave() -> None:
        os._exit(3)

    with pytest.raises(WorkerCrashedError):
        miniray.get(leave.remote())


def test_sys_exit_in_a_task_fails_the_task_only() -> None:
    @miniray.remote(max_retries=0)
    def leave() -> None:
        sys.exit(0)

    with pytest.raises(RayError):
        miniray.get(leave.remote())
    assert miniray.get(divide.remote(4, 2)) == 2


def test_an_error_can_be_pickled_and_raised_elsewhere() -> None:
    with pytest.raises(RayTaskError) as info:
        miniray.get(divide.remote(1, 0))
    copy = pickle.loads(pickle.dumps(info.value))
    assert isinstance(copy, RayTaskError)
    assert "ZeroDivisionError" in str(copy)


def test_a_task_may_catch_the_error_of_a_task() -> None:
    @miniray.remote
    def careful() -> str:
        try:
            miniray.get(over_quota.remote())
        except QuotaError as error:
            return f"caught: {error.cause.user}"
        return "nothing"

    assert miniray.get(careful.remote()) == "caught: ann"


def test_a_task_that_interrupts_itself_was_cancelled() -> None:
    def interrupted() -> None:
        raise KeyboardInterrupt("enough")

    with pytest.raises(TaskCancelledError) as info:
        miniray.get(miniray.remote(interrupted).remote(), timeout=60)
    assert isinstance(info.value, RayTaskError)
    assert "KeyboardInterrupt: enough" in str(info.value)


def test_an_error_that_is_no_exception_is_raised_as_its_class_too() -> None:
    class Abort(BaseException):
        """Of user code that lets nobody catch it by accident."""

    class Aborter:
        async def abort(self) -> None:
            raise Abort("now")

    def abort() -> None:
        raise Abort("now")

    actor: Any = miniray.remote(Aborter).remote()
    for ref in (miniray.remote(abort).remote(), actor.abort.remote()):
        with pytest.raises(RayTaskError) as info:
            miniray.get(ref, timeout=60)
        assert "Abort" in {cls.__name__ for cls in type(info.value).__mro__}


def test_a_stop_iteration_does_not_end_a_loop_of_the_caller() -> None:
    @miniray.remote
    def stop() -> None:
        raise StopIteration("over")

    with pytest.raises(RayTaskError):
        miniray.get(stop.remote())


def test_exceptions_form_the_families_that_callers_catch() -> None:
    assert issubclass(exceptions.GetTimeoutError, TimeoutError)
    assert issubclass(exceptions.ActorDiedError, RayActorError)
    assert issubclass(exceptions.ActorUnavailableError, RayActorError)
    assert issubclass(exceptions.ActorAlreadyExistsError, ValueError)
    assert issubclass(exceptions.OwnerDiedError, exceptions.ObjectLostError)
    for name in (
        "ActorPlacementGroupRemoved",
        "ActorUnschedulableError",
        "AuthenticationError",
        "NodeDiedError",
        "ObjectStoreFullError",
        "PendingCallsLimitExceeded",
        "RuntimeEnvSetupError",
        "TaskCancelledError",
        "TaskPlacementGroupRemoved",
        "TaskUnschedulableError",
    ):
        assert issubclass(getattr(exceptions, name), RayError)


def test_a_runtime_env_that_cannot_be_made_is_said_so() -> None:
    def divide_nowhere() -> None:
        task = divide.options(runtime_env={"working_dir": "/nonexistent/folder"})
        miniray.get(task.remote(1, 1))

    with pytest.raises((ValueError, exceptions.RuntimeEnvSetupError), match="/nonexistent/folder"):
        divide_nowhere()


def test_an_environment_that_cannot_be_made_fails_calls_of_its_actor_as_such() -> None:
    quick = {"setup_timeout_seconds": 1}  # making it takes longer, and fails too

    @miniray.remote(runtime_env={"pip": ["/nowhere/absent.whl"], "config": quick})
    class Actor:
        def method(self) -> None:
            pass

    with pytest.raises(exceptions.RuntimeEnvSetupError, match=r"absent\.whl|after 1 seconds"):
        miniray.get(Actor.remote().method.remote(), timeout=60)


def test_an_error_of_miniray_that_leaves_a_task_says_where_it_was_raised() -> None:
    @miniray.remote
    class Crashing:
        def crash(self) -> None:
            os._exit(1)

    @miniray.remote
    def inner(actor: Any) -> None:
        miniray.get(actor.crash.remote())

    @miniray.remote
    def outer(actor: Any) -> None:
        miniray.get(inner.remote(actor))

    with pytest.raises(exceptions.ActorDiedError) as caught:
        miniray.get(outer.remote(Crashing.remote()))
    assert isinstance(caught.value, RayTaskError)
    told = str(caught.value)
    assert "outer() failed (pid=" in told
    assert "inner.remote(actor)" in told
    assert "inner() failed (pid=" in told
    assert "actor.crash.remote()" in told
    assert caught.value.cause.cause is exceptions.DeathCause.EXITED


def test_an_argument_that_has_crashed_is_the_error_of_a_task_too() -> None:
    @miniray.remote(max_retries=0)
    def crash() -> None:
        os._exit(3)

    @miniray.remote
    class Taker:
        def take(self, _value: Any) -> None:
            pass

    @miniray.remote
    def take(_value: Any) -> None:
        pass

    crashed = crash.remote()
    for ref in (
        take.remote(crashed),
        take.remote(take.remote(crashed)),
        Taker.remote().take.remote(crashed),
    ):
        with pytest.raises(
            RayTaskError, match="did not run: this is the error of its argument 1"
        ) as info:
            miniray.get(ref, timeout=60)
        assert isinstance(info.value, WorkerCrashedError)
        assert isinstance(info.value.cause, WorkerCrashedError)
        assert info.value.cause.exit_code == 3
    with pytest.raises(WorkerCrashedError) as own:  # nothing of it was raised by its code
        miniray.get(crashed)
    assert not isinstance(own.value, RayTaskError)


def test_a_task_is_tried_again_for_an_error_of_miniray_that_it_raises() -> None:
    @miniray.remote
    class Victim:
        def crash(self) -> None:
            os._exit(1)

    @miniray.remote
    class Counter:
        def __init__(self) -> None:
            self.count = 0

        def up(self) -> int:
            self.count += 1
            return self.count

    @miniray.remote(max_retries=2, retry_exceptions=[exceptions.ActorDiedError])
    def ask(victim: Any, counter: Any) -> int:
        count: int = miniray.get(counter.up.remote())
        if count < 2:
            miniray.get(victim.crash.remote())
        return count

    assert miniray.get(ask.remote(Victim.remote(), Counter.remote()), timeout=60) == 2


def test_workers_that_end_before_they_are_ready_fail_their_tasks_with_how() -> None:
    @miniray.remote(runtime_env={"env_vars": {"PYTHONHOME": "/nowhere"}})
    def never() -> None:
        pass

    with pytest.raises(WorkerCrashedError, match=r"exited with code 1 before it was ready"):
        miniray.get(never.remote(), timeout=30)


def test_the_traceback_of_get_shows_where_it_was_called_and_nothing_below() -> None:
    @miniray.remote
    def fail() -> None:
        raise QuotaError("ann", 3)

    for refs in (fail.remote(), [miniray.put(1), fail.remote()]):
        with pytest.raises(QuotaError) as caught:
            miniray.get(refs)  # type: ignore[call-overload]
        assert [entry.name for entry in caught.traceback] == [
            "test_the_traceback_of_get_shows_where_it_was_called_and_nothing_below",
            "get",
        ]
        assert "ann is over 3" in str(caught.value)


def test_an_actor_whose_argument_failed_with_much_data_ends_with_the_reason() -> None:
    @miniray.remote
    def fail() -> None:
        error = ValueError("bad batch")
        error.data = bytes(64 << 20)  # type: ignore[attr-defined]
        raise error

    @miniray.remote
    class Actor:
        def __init__(self, value: Any) -> None:
            self.value = value

        def get(self) -> Any:
            return self.value

    actor = Actor.remote(fail.remote())
    with pytest.raises(RayActorError, match="has failed, with an error of"):
        miniray.get(actor.get.remote(), timeout=30)


def test_the_error_of_a_method_shows_the_actor_if_its_class_says_how() -> None:
    @miniray.remote
    class Shard:
        def __repr__(self) -> str:
            return "Shard-7"

        def fail(self) -> None:
            raise ValueError("no")

    with pytest.raises(ValueError, match="repr=Shard-7"):
        miniray.get(Shard.remote().fail.remote())


# --- errors that nobody asks for ----------------------------------------------------------------


@pytest.fixture
def unhandled(caplog: pytest.LogCaptureFixture) -> Callable[[str], int]:
    """How many of the messages of this process about such errors have these words."""

    def count(words: str) -> int:
        told = [message for message in caplog.messages if message.startswith("Unhandled error")]
        return sum(words in message for message in told)

    return count


def test_an_error_whose_ref_was_dropped_is_told(unhandled: Callable[[str], int]) -> None:
    @miniray.remote
    def fails_early() -> None:
        raise ValueError("nobody looks")

    @miniray.remote
    def fails_late() -> None:
        raise ValueError("nobody looked")

    fails_early.remote()
    wait_until(lambda: unhandled("nobody looks") == 1)
    ref = fails_late.remote()
    miniray.wait([ref])
    assert not unhandled("nobody looked")
    del ref
    wait_until(lambda: unhandled("nobody looked") == 1)


def test_an_error_after_a_get_that_ran_out_of_time_is_told(
    unhandled: Callable[[str], int], tmp_path: Path
) -> None:
    @miniray.remote
    def fails(go: Path) -> None:
        wait_for_file(go)
        raise ValueError("nobody waited so long")

    refs = [fails.remote(tmp_path / "go")]
    with pytest.raises(exceptions.GetTimeoutError):
        miniray.get(refs, timeout=0.1)
    (tmp_path / "go").touch()
    miniray.wait(refs)
    refs.clear()
    wait_until(lambda: unhandled("nobody waited so long") == 1)


def test_an_error_that_somebody_got_is_not_told(unhandled: Callable[[str], int]) -> None:
    @miniray.remote
    def fails(_argument: object = None) -> None:
        raise ValueError("somebody looks")

    @miniray.remote
    def other() -> None:
        raise TypeError("somebody looks at the one beside it")

    @miniray.remote
    def takes(_argument: object) -> None:
        pass

    @miniray.remote
    def looks(refs: list[miniray.ObjectRef[None]]) -> str:
        with pytest.raises(ValueError, match="somebody looks"):
            miniray.get(refs[0])
        return "looked"

    @miniray.remote
    def marker() -> None:
        raise KeyError("the last one")

    refs = [fails.remote() for _ in range(3)]
    with pytest.raises(ValueError, match="somebody looks"):
        miniray.get(refs)
    both = [fails.remote(), other.remote()]
    miniray.wait(both, num_returns=2)
    with pytest.raises(ValueError, match="somebody looks"):
        miniray.get(both)
    with pytest.raises(ValueError, match="somebody looks"):
        miniray.get(takes.remote(fails.remote()))
    assert miniray.get(looks.remote([fails.remote()])) == "looked"
    del refs, both
    marker.remote()
    wait_until(lambda: unhandled("the last one") == 1)
    assert not unhandled("somebody looks")
