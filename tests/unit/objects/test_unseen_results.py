"""Which errors are told that nobody asked for, and how often."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any

import pytest
from process_doubles import Caller, packed

from miniray.common.object_ref import hooks
from miniray.exceptions import ActorDiedError, DeathCause, TaskCancelledError, TaskError
from miniray.messages.value import error_value
from miniray.objects.unseen_results import MOST_WAITING, WINDOW, UnseenErrors

if TYPE_CHECKING:
    from collections.abc import Callable


def failure(name: str = "f", cause: Exception | None = None) -> TaskError:
    return TaskError(name, "Traceback: here", cause or ValueError("wrong"))


class Told:
    def __init__(self) -> None:
        self.now = 100.0
        self.later: list[Callable[[], None]] = []
        self.errors = UnseenErrors(self.later.append, lambda: self.now)

    def drop(self, *errors: BaseException) -> None:
        for error in errors:
            self.errors.dropped(error_value(error))

    def run(self) -> None:
        while self.later:
            self.later.pop(0)()


@pytest.fixture
def told() -> Told:
    return Told()


def test_an_error_is_told_with_what_failed_and_its_traceback(
    told: Told, caplog: pytest.LogCaptureFixture
) -> None:
    told.drop(failure("train"))
    assert not caplog.messages  # unpickling it is user code
    told.run()
    (message,) = caplog.messages
    assert "the result of train" in message
    assert "Traceback: here" in message
    assert caplog.records[0].levelno == logging.ERROR


def test_of_one_kind_one_is_told_in_a_while(told: Told, caplog: pytest.LogCaptureFixture) -> None:
    told.drop(failure(), failure(), failure(cause=KeyError("other")), failure("g"))
    told.run()
    assert len(caplog.messages) == 3
    told.now += WINDOW
    told.drop(failure())
    told.run()
    assert len(caplog.messages) == 4


def test_what_user_code_got_is_not_told_again(told: Told, caplog: pytest.LogCaptureFixture) -> None:
    told.errors.raised(failure().as_instanceof_cause())
    told.drop(failure())
    told.run()
    assert not caplog.messages


@pytest.mark.parametrize(
    "error", [TaskCancelledError("f"), ActorDiedError(DeathCause.KILLED), RuntimeError("shutdown")]
)
def test_an_end_that_was_asked_for_is_not_told(
    told: Told, error: Exception, caplog: pytest.LogCaptureFixture
) -> None:
    told.drop(error)
    told.run()
    assert not caplog.messages


def test_of_very_many_most_are_only_counted(told: Told, caplog: pytest.LogCaptureFixture) -> None:
    told.drop(*[failure(f"f{n}") for n in range(MOST_WAITING + 7)])
    assert len(told.later) == MOST_WAITING
    told.run()
    assert "7 others were not looked at" in caplog.messages[0]


def test_they_can_be_hidden(
    told: Told, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    from miniray.common import config

    hidden = config.Config(ignore_unhandled_errors=True)
    monkeypatch.setattr("miniray.objects.unseen_results.config", lambda: hidden)
    told.drop(failure())
    told.run()
    assert not caplog.messages


# --- which errors nobody has seen ------------------------------------------------------------


def dropped(me: Caller, ref: Any) -> list[Any]:
    id = ref.binary()
    del ref
    hooks.dropped.clear()
    me.table.drop([id])
    return me.outside.unseen


def test_the_table_tells_of_an_error_that_goes_unread() -> None:
    me = Caller()
    error = error_value(failure())
    ref = me.table.create(me.table.new_id())
    me.table.set_value(ref.binary(), error)
    assert dropped(me, ref) == [error]


def test_the_table_tells_of_an_error_whose_ref_had_gone_before_it_came() -> None:
    me = Caller()
    id = me.table.create(me.table.new_id()).binary()
    me.table.drop([id])
    assert not me.table.set_value(id, packed("a value"))
    assert not me.outside.unseen
    assert not me.table.set_value(id, error_value(failure()))
    assert len(me.outside.unseen) == 1


def test_an_error_that_was_looked_at_or_a_value_goes_without_a_word() -> None:
    me = Caller()
    ref = me.table.create(me.table.new_id())
    me.table.set_value(ref.binary(), error_value(failure()))
    entry = me.table.entry(ref.binary())
    assert entry is not None
    entry.seen = True
    assert dropped(me, ref) == []
    other = me.table.create(me.table.new_id())
    me.table.set_value(other.binary(), packed("a value"))
    assert dropped(me, other) == []
