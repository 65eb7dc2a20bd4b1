"""Signals wait until a step of the main thread is over, or waits."""

from __future__ import annotations

import signal
import threading
from typing import TYPE_CHECKING

import pytest

from miniray.wire import interrupts
from miniray.wire.interrupts import Interrupts, held_here, leave_in_place, postpone, uncut
from miniray.wire.io_loop import Gate, IOLoop

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from types import FrameType

    Handler = Callable[[int, FrameType | None], None]


class Interruption(Exception):
    """What the handler of these tests raises."""


def raise_it(_number: int, _frame: FrameType | None) -> None:
    raise Interruption


@pytest.fixture(autouse=True)
def handlers() -> Iterator[None]:
    """SIGALRM raises, as a time limit does; afterwards all is as before."""
    numbers = (signal.SIGALRM, signal.SIGUSR1)
    before = {number: signal.getsignal(number) for number in numbers}
    signal.signal(signal.SIGALRM, raise_it)
    yield
    assert signal.getsignal(signal.SIGALRM) is raise_it
    assert held_here() is None
    for number, handler in before.items():
        signal.signal(number, handler)
    interrupts._known.pop(signal.SIGUSR1, None)


def interrupt() -> None:
    signal.raise_signal(signal.SIGALRM)


def test_a_signal_in_a_step_is_passed_on_when_it_is_over() -> None:
    done = []

    @uncut
    def step() -> None:
        interrupt()
        done.append("the rest")

    with pytest.raises(Interruption):
        step()
    assert done == ["the rest"]


def test_a_step_within_a_step_ends_nothing() -> None:
    done = []

    @uncut
    def step() -> None:
        uncut(interrupt)()
        done.append("the rest")

    with pytest.raises(Interruption):
        step()
    assert done == ["the rest"]


def test_a_step_returns_what_its_function_does_and_raises_what_that_raises() -> None:
    assert uncut(lambda value: value)(3) == 3
    with pytest.raises(ZeroDivisionError):
        uncut(lambda: 1 // 0)()


def test_all_signals_that_waited_are_passed_on_though_one_of_them_raises() -> None:
    heard = []
    signal.signal(signal.SIGUSR1, lambda *_: heard.append("USR1"))

    @uncut
    def step() -> None:
        interrupt()
        signal.raise_signal(signal.SIGUSR1)

    with pytest.raises(Interruption):
        step()
    assert heard == ["USR1"]


def test_a_wait_in_a_step_is_cut_off_and_what_follows_it_is_not() -> None:
    loop = IOLoop()
    loop.start()
    done = []

    @uncut
    def step() -> None:
        gate = Gate(loop)
        timer = threading.Timer(0.05, signal.pthread_kill, (threading.get_ident(), signal.SIGALRM))
        timer.start()
        try:
            gate.wait(30)
        finally:
            interrupt()  # the next one waits again
            done.append("undone")

    with pytest.raises(Interruption):
        step()
    assert done == ["undone"]
    loop.stop()


def test_a_signal_that_came_before_a_wait_cuts_it_off() -> None:
    loop = IOLoop()
    loop.start()
    reached = []

    @uncut
    def step() -> None:
        interrupt()
        reached.append("the wait")
        Gate(loop).wait(30)

    with pytest.raises(Interruption):
        step()
    assert reached == ["the wait"]
    loop.stop()


def test_a_wait_in_a_step_is_cut_off_while_another_thread_serves() -> None:
    loop = IOLoop()
    loop.start()
    served = Gate(loop)
    other = threading.Thread(target=served.wait, args=(30,))
    other.start()
    while not loop._serving.locked():
        pass

    @uncut
    def step() -> None:
        interrupt()
        Gate(loop).wait(30)

    with pytest.raises(Interruption):
        step()
    served.arrived()
    other.join()
    loop.stop()


def test_the_handler_of_a_signal_in_a_wait_may_itself_run_steps() -> None:
    loop = IOLoop()
    loop.start()
    done = []

    def handler(_number: int, _frame: FrameType | None) -> None:
        done.append(uncut(lambda: "handled")())

    signal.signal(signal.SIGUSR1, handler)

    @uncut
    def step() -> None:
        gate = Gate(loop)
        threading.Timer(0.02, signal.pthread_kill, (main, signal.SIGUSR1)).start()
        threading.Timer(0.1, gate.arrived).start()
        assert gate.wait(30)
        interrupt()
        done.append("the rest")

    main = threading.get_ident()
    with pytest.raises(Interruption):
        step()
    assert done == ["handled", "the rest"]
    loop.stop()


def test_a_handler_that_asks_stays_in_its_place_and_is_called_again_after_the_step() -> None:
    calls = []

    def careful(number: int, frame: FrameType | None) -> None:
        calls.append("waits" if postpone(careful, number, frame) else "runs")

    leave_in_place(signal.SIGUSR1, careful)
    signal.signal(signal.SIGUSR1, careful)

    @uncut
    def step() -> None:
        assert signal.getsignal(signal.SIGUSR1) is careful
        signal.raise_signal(signal.SIGUSR1)
        calls.append("the rest")

    step()
    assert calls == ["waits", "the rest", "runs"]
    signal.raise_signal(signal.SIGUSR1)
    assert calls[-1] == "runs"


def test_signals_are_none_of_the_business_of_other_threads() -> None:
    begun = []
    thread = threading.Thread(target=lambda: begun.append(Interrupts.begin()))
    thread.start()
    thread.join()
    assert begun == [None]
    with pytest.raises(Interruption):
        interrupt()


def test_a_handler_that_is_set_in_a_step_stays() -> None:
    def other(_number: int, _frame: FrameType | None) -> None:
        """Another handler."""

    uncut(lambda: signal.signal(signal.SIGALRM, other))()
    assert signal.getsignal(signal.SIGALRM) is other
    signal.signal(signal.SIGALRM, raise_it)
