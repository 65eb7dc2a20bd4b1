"""Calls that did not run for the error of an argument are named in that."""

from __future__ import annotations

import pickle
from typing import Any

import pytest

from miniray.core.argument_errors import error_of_call
from miniray.core.borrowing import error_value
from miniray.exceptions import (
    ActorDiedError,
    DeathCause,
    MinirayError,
    ObjectLostError,
    OwnerDiedError,
    TaskCancelledError,
    TaskError,
)


class OwnError(MinirayError):
    """One of the user's."""


class Bomb(Exception):
    """Unpickling it runs the user's code."""

    def __reduce__(self) -> Any:
        return _explode, ()


def _explode() -> None:
    raise AssertionError("user code ran")


def notes_of(error: BaseException) -> list[str]:
    return error.__dict__.get("__notes__", [])


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
def test_the_error_stays_what_it_is_and_names_the_call(error: MinirayError) -> None:
    found = pickle.loads(error_of_call(error_value(error), "main.<locals>.g", 1)[1])
    assert type(found) is type(error)
    assert str(found) == str(error)
    assert notes_of(found) == ["g() did not run: this is the error of its argument 2."]
    del found.__dict__["__notes__"]
    assert found.__dict__ == error.__dict__


def test_an_argument_that_has_a_name_is_called_so() -> None:
    value = error_of_call(error_value(ObjectLostError("ab")), "Cat.eat", "mouse")
    (note,) = notes_of(pickle.loads(value[1]))
    assert note == "Cat.eat() did not run: this is the error of its argument 'mouse'."


@pytest.mark.parametrize(
    "error",
    [
        TaskError("f", "its traceback", Bomb()),
        ActorDiedError(creation_error=TaskError("f", "its traceback", Bomb())),
        OwnError("x"),
        ValueError("x"),
    ],
    ids=lambda error: type(error).__name__,
)
def test_an_error_with_something_of_the_users_is_passed_on_unread(error: Exception) -> None:
    value = error_value(error)
    assert error_of_call(value, "g", 0) is value


def test_of_a_long_chain_of_calls_the_first_and_the_last_are_named() -> None:
    value = error_value(ObjectLostError("ab"))
    sizes = []
    for number in range(1000):
        value = error_of_call(value, f"f{number}", 0)
        sizes.append(len(value[1]))
    notes = notes_of(pickle.loads(value[1]))
    assert [note.partition("()")[0] for note in notes] == [*(f"f{n}" for n in range(7)), "f999"]
    assert max(sizes) < 2000
