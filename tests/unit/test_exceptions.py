"""Errors keep their facts on the way between processes, and user errors keep their class."""

from __future__ import annotations

import asyncio
import builtins
import dataclasses
import logging
import pickle
import signal
import sys
from typing import Any

import cloudpickle
import pytest

from miniray import exceptions
from miniray.common import exception_transport
from miniray.exceptions import (
    ActorAlreadyExistsError,
    ActorDiedError,
    ActorError,
    ActorUnavailableError,
    DeathCause,
    GetTimeoutError,
    MinirayError,
    NodeDiedError,
    NotInitializedError,
    ObjectLostError,
    ObjectStoreFullError,
    OwnerDiedError,
    PendingCallsLimitExceeded,
    PendingCallsLimitExceededError,
    PlacementGroupRemovedError,
    RayActorError,
    TaskCancelledError,
    TaskError,
    TaskPlacementGroupRemoved,
    VersionMismatchError,
    WorkerCrashedError,
)


class WithTwoArguments(Exception):
    def __init__(self, code: int, text: str) -> None:
        super().__init__(f"{code}: {text}")
        self.code = code


class WithNew(Exception):
    def __new__(cls, code: int, text: str) -> WithNew:
        return super().__new__(cls, code)

    def __init__(self, code: int, text: str) -> None:
        self.code = code


class WithArgsProperty(Exception):
    code = 7

    @property
    def args(self) -> tuple[Any, ...]:  # type: ignore[override]
        return ("mine",)


class WithSlots(Exception):
    __slots__ = ("code",)

    def __init__(self, code: int) -> None:
        self.code = code


@dataclasses.dataclass(frozen=True)
class Frozen(Exception):
    code: int


class WithOwnSetattr(Exception):
    def __init__(self, code: int) -> None:
        vars(self)["code"] = code

    def __setattr__(self, name: str, value: object) -> None:
        raise AttributeError(f"{name} cannot be set")


class WithOwnTraceback(Exception):
    __traceback__ = property(lambda self: None)  # type: ignore[assignment]

    def __init__(self, code: int) -> None:
        self.code = code

    def with_traceback(self, tb: Any) -> WithOwnTraceback:
        raise NotImplementedError


class WithoutText(Exception):
    def __init__(self, code: int) -> None:
        self.code = code

    def __str__(self) -> str:
        raise SystemExit(3)

    __repr__ = __str__


class WithFailingRepr(Exception):
    def __repr__(self) -> str:
        raise RuntimeError("no text")

    __str__ = __repr__


class WithFailingPickle(Exception):
    def __init__(self, code: int) -> None:
        self.code = code

    def __reduce__(self) -> tuple[Any, ...]:
        raise SystemExit(3)


class WithOwnCause(Exception):
    def __init__(self) -> None:
        self.cause = "the user's"


class Final(Exception):
    def __init_subclass__(cls) -> None:
        raise TypeError("no subclasses")


def failed(error: BaseException) -> TaskError:
    """What a worker makes of an exception that a task raised."""
    try:
        raise error
    except BaseException as caught:
        return TaskError.from_exception(caught, "work", pid=12, ip="10.0.0.1")


def sent(error: BaseException) -> Any:
    """The error after its way to another process."""
    return cloudpickle.loads(cloudpickle.dumps(error))


@pytest.mark.parametrize(
    "error",
    [
        WithTwoArguments(7, "x"),
        WithNew(7, "x"),
        WithArgsProperty(),
        WithSlots(7),
        Frozen(7),
        WithOwnSetattr(7),
        WithOwnTraceback(7),
        WithoutText(7),
        WithFailingPickle(7),
    ],
    ids=lambda error: type(error).__name__,
)
def test_an_error_of_any_class_arrives_as_that_class_with_its_attributes(
    error: BaseException,
) -> None:
    arrived = sent(failed(error)).as_instanceof_cause()

    assert isinstance(arrived, type(error))
    assert isinstance(arrived, TaskError)
    assert arrived.code == 7  # type: ignore[attr-defined]
    assert type(arrived.cause) is type(error)


@pytest.mark.parametrize("error", [Frozen(7), WithOwnSetattr(7), WithOwnTraceback(7)])
def test_the_frames_of_any_error_can_be_dropped(error: BaseException) -> None:
    with pytest.raises(type(error)) as caught:
        raise error
    exception_transport.forget_traceback(caught.value)
    assert exception_transport.traceback_of(caught.value) is None


@pytest.mark.parametrize("error", [Frozen(7), WithOwnSetattr(7), WithOwnTraceback(7)])
def test_an_error_of_any_class_is_raised_without_the_frames_of_get(error: BaseException) -> None:
    arrived = sent(failed(error)).as_instanceof_cause()
    assert arrived.with_traceback(None) is arrived


def test_an_error_whose_cause_has_no_text_can_be_printed() -> None:
    arrived = sent(failed(WithFailingRepr()))
    assert "WithFailingRepr" in repr(arrived)
    assert "WithFailingRepr" in str(arrived)


def test_an_error_that_is_too_large_for_a_message_comes_as_its_text(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(exception_transport, "LARGEST", 10_000)
    error = ValueError("bad batch")
    error.batch = bytes(20_000)  # type: ignore[attr-defined]
    arrived = sent(failed(error)).as_instanceof_cause()

    assert "ValueError: bad batch" in str(arrived)
    assert "ValueError, which takes 19.6 KiB" in str(arrived.cause)
    assert "may take 9.8 KiB" in str(arrived.cause)


def test_an_error_that_is_sent_on_keeps_both_classes() -> None:
    arrived = sent(sent(failed(WithTwoArguments(7, "x"))).as_instanceof_cause())

    assert isinstance(arrived, WithTwoArguments)
    assert isinstance(arrived, TaskError)
    assert arrived.code == 7


@pytest.mark.parametrize(
    ("error", "attributes"),
    [
        (OSError(2, "gone", "f.txt"), {"errno": 2, "strerror": "gone", "filename": "f.txt"}),
        (UnicodeDecodeError("utf-8", b"\xff", 0, 1, "bad"), {"object": b"\xff", "end": 1}),
        (KeyError("k"), {"args": ("k",)}),
        (ImportError("no", name="m"), {"name": "m"}),
    ],
)
def test_errors_of_python_keep_what_they_hold_outside_of_their_dict(
    error: BaseException, attributes: dict[str, Any]
) -> None:
    arrived = sent(failed(error)).as_instanceof_cause()

    assert isinstance(arrived, type(error))
    assert {name: getattr(arrived, name) for name in attributes} == attributes


@pytest.mark.parametrize(
    "cls",
    [
        cls
        for cls in vars(builtins).values()
        if isinstance(cls, type)
        and issubclass(cls, Exception)
        and not issubclass(cls, StopIteration | StopAsyncIteration | UnicodeError)
        and not cls.__name__.endswith("Group")  # these cannot be made without arguments
    ],
    ids=lambda cls: cls.__name__,
)
def test_an_error_of_every_built_in_class_is_raised_as_that_class(cls: type[Exception]) -> None:
    arrived = sent(failed(cls("why"))).as_instanceof_cause()

    assert isinstance(arrived, cls)
    assert arrived.cause.args == ("why",)


@pytest.mark.skipif(sys.version_info < (3, 11), reason="Python 3.10 has no exception groups")
def test_an_exception_group_keeps_its_exceptions() -> None:
    group = ExceptionGroup("two", [ValueError(1), KeyError(2)])  # noqa: F821

    arrived = sent(failed(group)).as_instanceof_cause()

    assert isinstance(arrived, ExceptionGroup)  # noqa: F821
    assert [type(error) for error in arrived.exceptions] == [ValueError, KeyError]


def test_an_error_whose_class_is_missing_here_arrives_as_a_task_error_that_names_it() -> None:
    blob = cloudpickle.dumps(failed(WithTwoArguments(7, "x")))
    gone = blob.replace(b"WithTwoArguments", b"WithTwoArgumentz")

    arrived = pickle.loads(gone)

    assert type(arrived.as_instanceof_cause()) is TaskError
    assert "WithTwoArgument" in str(arrived.cause)


def test_an_error_of_a_final_class_is_raised_as_a_task_error(
    caplog: pytest.LogCaptureFixture,
) -> None:
    error = failed(Final("x"))

    with caplog.at_level(logging.WARNING):
        raised = error.as_instanceof_cause()

    assert raised is error
    assert isinstance(raised.cause, Final)


@pytest.mark.parametrize(
    "error",
    [
        SystemExit(3),
        KeyboardInterrupt(),
        GeneratorExit(),
        StopIteration(5),
        StopAsyncIteration(5),
        asyncio.CancelledError(),
    ],
    ids=lambda error: type(error).__name__,
)
def test_what_ends_a_process_or_a_loop_does_not_do_so_where_the_result_is_got(
    error: BaseException,
) -> None:
    arrived = sent(failed(error)).as_instanceof_cause()

    assert not isinstance(arrived, type(error))
    assert type(arrived.cause) is type(error)


def test_attributes_of_the_error_win_over_equal_names_of_the_user() -> None:
    raised = failed(WithOwnCause()).as_instanceof_cause()

    assert isinstance(raised.cause, WithOwnCause)
    assert raised.cause.cause == "the user's"


@pytest.mark.parametrize(
    "error",
    [
        ActorDiedError(
            DeathCause.EXITED, actor_id="3f", class_name="C", exit_code=-9, pid=4, node_id="n1"
        ),
        ActorDiedError(DeathCause.CREATION_FAILED, creation_error=failed(ValueError("in init"))),
        ActorUnavailableError("it restarts", actor_id="3f"),
        ActorAlreadyExistsError("name", "space"),
        GetTimeoutError(),
        NodeDiedError("n1", "no heartbeat for 15 s"),
        NotInitializedError("There is no runtime."),
        ObjectLostError("ab", "its node died"),
        ObjectStoreFullError(needed=10, used=95, capacity=100, node_id="n1"),
        OwnerDiedError("ab", "worker 12"),
        PendingCallsLimitExceededError(limit=5, class_name="C"),
        PlacementGroupRemovedError("ab"),
        TaskCancelledError("work"),
        VersionMismatchError("miniray", "1", "2"),
        WorkerCrashedError("work", pid=4, code=1),
    ],
    ids=lambda error: type(error).__name__,
)
def test_every_error_survives_pickling_with_its_fields(error: MinirayError) -> None:
    copy = pickle.loads(pickle.dumps(error))

    assert type(copy) is type(error)
    assert str(copy) == str(error)
    assert {name: str(value) for name, value in vars(copy).items()} == {
        name: str(value) for name, value in vars(error).items()
    }


@pytest.mark.parametrize(
    "error",
    [RayActorError, PendingCallsLimitExceeded, ObjectStoreFullError, TaskPlacementGroupRemoved],
)
def test_errors_that_user_code_raises_itself_need_no_argument(error: type[MinirayError]) -> None:
    assert str(error())
    if error is not TaskPlacementGroupRemoved:
        assert str(error("the words of the user")) == "the words of the user"


def test_a_killed_process_is_described_by_the_name_of_its_signal() -> None:
    error = ActorDiedError(DeathCause.EXITED, class_name="C", exit_code=-signal.SIGSEGV)

    assert "signal 11 (SIGSEGV)" in str(error)


@pytest.mark.parametrize(
    ("error", "base"),
    [
        (GetTimeoutError, TimeoutError),
        (ActorAlreadyExistsError, ValueError),
        (ActorDiedError, ActorError),
        (ActorUnavailableError, ActorError),
        (OwnerDiedError, ObjectLostError),
    ],
)
def test_errors_are_caught_by_the_classes_that_ray_users_catch(error: type, base: type) -> None:
    assert issubclass(error, base)
    assert issubclass(error, MinirayError)


def test_ray_s_names_are_the_same_classes() -> None:
    assert exceptions.RayError is MinirayError
    assert exceptions.RayTaskError is TaskError
    assert exceptions.RayActorError is ActorError
    assert exceptions.PendingCallsLimitExceeded is PendingCallsLimitExceededError
    assert exceptions.TaskPlacementGroupRemoved is PlacementGroupRemovedError
    assert exceptions.ActorPlacementGroupRemoved is PlacementGroupRemovedError


def test_a_task_error_shows_both_ends_of_a_long_traceback_and_says_what_is_left_out() -> None:
    try:
        raise ValueError("begin " + "x" * 1_000_000 + " end")
    except ValueError as error:
        failed = TaskError.from_exception(error, "work")
    assert len(str(failed)) < 300_000
    assert "ValueError: begin" in str(failed)
    assert "end" in str(failed)[-100:]
    assert "characters are left out" in str(failed)
    assert len(str(failed.cause)) > 1_000_000


def test_the_error_of_an_owner_that_died_says_that_put_values_cannot_be_made_again() -> None:
    assert str(OwnerDiedError("ab", "driver (pid 7)")) == (
        "The value of ObjectRef(ab) is lost: the process that created the ref (driver (pid 7)) "
        "failed, and only it could recreate the value (values of put() and of actors cannot be "
        "recreated)."
    )


def test_a_class_s_name_in_an_error_cannot_steer_a_terminal() -> None:
    name = "Evil\x1b[2J"
    for error in (
        ActorDiedError(DeathCause.EXITED, class_name=name, actor_id="ab"),
        exceptions.ActorUnavailableError("it restarts", class_name=name),
        exceptions.PendingCallsLimitExceededError(limit=1, class_name=name),
    ):
        assert r"The actor Evil\x1b[2J" in str(error)
        assert error.class_name == name
