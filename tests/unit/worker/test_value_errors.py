"""Which of the exceptions that come out of pickling and unpickling are errors of the call."""

from __future__ import annotations

import signal
import sys
import threading
from typing import TYPE_CHECKING, Any

import pytest

from miniray.worker.work import ValueRaisedError, carried, raise_as_error

if TYPE_CHECKING:
    from collections.abc import Iterator
    from types import FrameType


@pytest.fixture(autouse=True)
def _ctrl_c_is_the_drivers() -> Iterator[None]:
    """As in a worker; else each KeyboardInterrupt is taken for that of Ctrl-C."""
    before = signal.signal(signal.SIGINT, lambda _number, _frame: None)
    yield
    signal.signal(signal.SIGINT, before)


def end(_number: int, _frame: FrameType | None) -> None:
    sys.exit(3)


def outcome(raise_one: Any) -> BaseException:
    """What becomes of what a function raises."""
    try:
        try:
            raise_one()
        except BaseException as error:
            raise_as_error(error)
    except BaseException as error:
        return error


def interrupt() -> None:
    raise KeyboardInterrupt


@pytest.mark.parametrize("raise_one", [sys.exit, interrupt])
def test_what_the_code_of_a_value_raises_is_carried(raise_one: Any) -> None:
    found = outcome(raise_one)
    assert isinstance(found, ValueRaisedError)
    assert type(carried(found)) in (SystemExit, KeyboardInterrupt)


@pytest.mark.parametrize(
    ("handler", "kind"), [(end, SystemExit), (signal.default_int_handler, KeyboardInterrupt)]
)
def test_what_a_signal_handler_raises_goes_on_as_it_is(
    handler: Any, kind: type[BaseException]
) -> None:
    before = signal.signal(signal.SIGUSR2, handler)
    try:
        assert type(outcome(lambda: signal.raise_signal(signal.SIGUSR2))) is kind
    finally:
        signal.signal(signal.SIGUSR2, before)


def test_a_thread_has_no_signals() -> None:
    found: list[BaseException] = []
    before = signal.signal(signal.SIGUSR2, signal.default_int_handler)
    try:
        thread = threading.Thread(target=lambda: found.append(outcome(interrupt)))
        thread.start()
        thread.join()
    finally:
        signal.signal(signal.SIGUSR2, before)
    assert [type(error) for error in found] == [ValueRaisedError]


def test_other_errors_carry_nothing() -> None:
    error = ValueError("x")
    assert carried(error) is error
