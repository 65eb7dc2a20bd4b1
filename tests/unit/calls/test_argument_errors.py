"""Calls that did not run for the error of an argument have a TaskError that is of its class too."""

from __future__ import annotations

import pickle
from typing import Any

import pytest

from miniray.calls.call import error_of_call
from miniray.common.task_error import text_only
from miniray.exceptions import (
    ActorDiedError,
    DeathCause,
    MinirayError,
    ObjectLostError,
    OwnerDiedError,
    TaskCancelledError,
    TaskError,
)
from miniray.messages.value import error_value


class OwnError(MinirayError):
    """One of the user's."""


class Bomb(Exception):
    """Unpickling it runs the user's code."""

    def __reduce__(self) -> Any:
        return _explode, ()


def _explode() -> None:
    raise AssertionError("user code ran")


@pytest.mark.parametrize(
    "error",
    [
        ObjectLostError("ab", "its node died"),
        OwnerDiedError("ab", "worker 12"),
        ActorDiedError(DeathCause.KILLED, actor_id="ab", class_name="Cat"),
        TaskCancelledError("f"),
    ],
    ids=lambda error: type(error).__name__,
)
def test_the_error_is_a_task_error_too_and_names_the_call(error: MinirayError) -> None:
    found = pickle.loads(error_of_call(error_value(error), "main.<locals>.g", 1)[1])
    assert isinstance(found, TaskError)
    raised = found.as_instanceof_cause()
    assert isinstance(raised, type(error))
    assert str(raised) == (
        f"main.<locals>.g() failed\n{error}\ng() did not run: this is the error of its argument 2."
    )
    assert type(found.cause) is type(error)
    assert found.cause.__dict__ == error.__dict__


def test_an_argument_that_has_a_name_is_called_so() -> None:
    value = error_of_call(error_value(ObjectLostError("ab")), "Cat.eat", "mouse")
    told = str(pickle.loads(value[1])).splitlines()[-1]
    assert told == "Cat.eat() did not run: this is the error of its argument 'mouse'."


@pytest.mark.parametrize(
    "error",
    [TaskError("f", "its traceback", Bomb()), OwnError("x"), ValueError("x")],
    ids=lambda error: type(error).__name__,
)
def test_an_error_that_user_code_has_raised_is_passed_on_unread(error: Exception) -> None:
    value = error_value(error)
    assert error_of_call(value, "g", 0) is value


def test_what_user_code_has_raised_in_a_constructor_is_passed_on_unread() -> None:
    failed = TaskError("Cat.__init__", "its traceback", Bomb())
    value = error_value(ActorDiedError(DeathCause.CREATION_FAILED, creation_error=failed))
    told = error_of_call(value, "g", 0)
    assert value[1] in told[1]  # the same bytes
    assert text_only(told[1]).splitlines()[-2:] == [
        "its traceback",
        "g() did not run: this is the error of its argument 1.",
    ]


def test_a_chain_of_calls_has_the_error_of_the_first_that_did_not_run() -> None:
    first = error_of_call(error_value(ObjectLostError("ab")), "f", 0)
    assert error_of_call(first, "g", 0) is first


def test_why_an_actor_died_is_known_of_such_an_error_too() -> None:
    for cause, failed, lost in (
        (DeathCause.CREATION_FAILED, True, False),
        (DeathCause.NODE_LOST, False, True),
    ):
        value = error_of_call(error_value(ActorDiedError(cause)), "g", 0)
        error = pickle.loads(value[1]).as_instanceof_cause()
        assert isinstance(error, ActorDiedError)
        assert (error.actor_init_failed, error.preempted) == (failed, lost)
        assert error.cause.cause is cause  # type: ignore[attr-defined]
