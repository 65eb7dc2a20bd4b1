"""Waiting threads that handle messages themselves, with real sockets, threads and signals."""

from __future__ import annotations

import os
import signal
import socket
import sys
import threading
import time
from typing import TYPE_CHECKING

import pytest
from process_doubles import eventually

from miniray.wire import interrupts as interrupts_module
from miniray.wire.interrupts import Interrupts
from miniray.wire.io_loop import Gate, IOLoop

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator


@pytest.fixture
def alarm() -> Iterator[Callable[[Callable[[], None]], None]]:
    """Sets what SIGALRM does in the main thread."""
    before = signal.getsignal(signal.SIGALRM)

    def on_alarm(action: Callable[[], None]) -> None:
        signal.signal(signal.SIGALRM, lambda _number, _frame: action())

    yield on_alarm
    signal.setitimer(signal.ITIMER_REAL, 0)
    signal.signal(signal.SIGALRM, before)


class Pipe:
    """A socket of the loop; each byte that is written runs ``action`` as a callback."""

    def __init__(self, loop: IOLoop, action: Callable[[], None]) -> None:
        self._loop = loop
        self._near, self._far = socket.socketpair()
        self._near.setblocking(False)
        self._action = action
        self.threads: list[threading.Thread] = []
        loop.add(self._near.fileno(), self._readable)

    def _readable(self) -> None:
        try:
            self._near.recv(1)
        except BlockingIOError:
            return
        self.threads.append(threading.current_thread())
        self._action()

    def write(self) -> None:
        self._far.send(b"x")

    def close(self) -> None:
        gone = threading.Event()

        def remove() -> None:
            self._loop.remove(self._near.fileno())
            gone.set()

        self._loop.call_soon(remove)
        assert gone.wait(10)
        self._near.close()
        self._far.close()


def later(action: Callable[[], None]) -> threading.Timer:
    timer = threading.Timer(0.02, action)
    timer.start()
    return timer


def test_a_waiting_thread_handles_what_it_waits_for(loop: IOLoop) -> None:
    gate = Gate(loop)
    pipe = Pipe(loop, gate.arrived)
    later(pipe.write)
    assert gate.wait(10)
    assert pipe.threads == [threading.current_thread()]
    pipe.close()


def test_after_the_wait_the_loops_thread_handles_messages_again(loop: IOLoop) -> None:
    gate = Gate(loop)
    pipe = Pipe(loop, gate.arrived)
    pipe.write()
    assert gate.wait(10)
    pipe.write()
    eventually(lambda: len(pipe.threads) == 2)
    assert pipe.threads[1] is loop._thread
    pipe.close()


def test_another_thread_opens_the_gate_of_one_that_serves(loop: IOLoop) -> None:
    gate = Gate(loop)
    later(gate.arrived)
    assert gate.wait(10)


def test_a_timer_of_the_loop_opens_the_gate_of_one_that_serves(loop: IOLoop) -> None:
    gate = Gate(loop)
    loop.call_later(0.02, gate.arrived)
    assert gate.wait(10)


@pytest.mark.parametrize("timeout", [0, -1, 0.01])
def test_a_wait_ends_at_its_timeout(loop: IOLoop, timeout: float) -> None:
    gate = Gate(loop)
    assert not gate.wait(timeout)
    gate.arrived()
    assert gate.wait(timeout)


def test_many_threads_wait_and_each_wakes_for_its_own(loop: IOLoop) -> None:
    gates = [Gate(loop) for _ in range(8)]
    pipes = [Pipe(loop, gate.arrived) for gate in gates]
    woken: list[int] = []

    def wait(number: int) -> None:
        assert gates[number].wait(10)
        woken.append(number)

    threads = [threading.Thread(target=wait, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    order = [3, 0, 7, 1, 2, 6, 5, 4]
    for done, number in enumerate(order):
        pipes[number].write()
        eventually(lambda done=done: len(woken) == done + 1)
    for thread in threads:
        thread.join(10)
    assert woken == order
    for pipe in pipes:
        pipe.close()


def test_a_gate_opens_at_the_last_of_many_arrivals_from_several_threads(loop: IOLoop) -> None:
    gate = Gate(loop, 400)

    def arrive() -> None:
        for _ in range(100):
            gate.arrived()

    threads = [threading.Thread(target=arrive) for _ in range(4)]
    for thread in threads[:3]:
        thread.start()
    for thread in threads[:3]:
        thread.join(10)
    assert not gate.wait(0)
    threads[3].start()
    assert gate.wait(10)
    threads[3].join(10)


def test_a_gate_takes_more_arrivals_than_it_needs(loop: IOLoop) -> None:
    gate = Gate(loop)
    for _ in range(3):
        gate.arrived()
    assert gate.wait(None)


def test_a_second_wait_at_a_gate_works_as_the_first(loop: IOLoop) -> None:
    gate = Gate(loop)
    assert not gate.wait(0.01)
    later(gate.arrived)
    assert gate.wait(10)


def test_a_signal_ends_a_wait_and_the_handlers_are_put_back(
    loop: IOLoop, alarm: Callable[[Callable[[], None]], None]
) -> None:
    def interrupt() -> None:
        raise KeyboardInterrupt

    alarm(interrupt)
    handler = signal.getsignal(signal.SIGALRM)
    signal.setitimer(signal.ITIMER_REAL, 0.02)
    with pytest.raises(KeyboardInterrupt):
        Gate(loop).wait(10)
    assert signal.getsignal(signal.SIGALRM) is handler
    gate = Gate(loop)
    later(gate.arrived)
    assert gate.wait(10)


def test_a_signal_in_the_middle_of_a_message_waits_for_its_end(
    loop: IOLoop, alarm: Callable[[Callable[[], None]], None]
) -> None:
    steps: list[str] = []

    def interrupt() -> None:
        steps.append("signal")
        raise KeyboardInterrupt

    def handle() -> None:
        steps.append("begin")
        os.kill(os.getpid(), signal.SIGALRM)
        for _ in range(1000):  # the signal would strike here
            pass
        steps.append("end")

    alarm(interrupt)
    pipe = Pipe(loop, handle)
    later(pipe.write)
    with pytest.raises(KeyboardInterrupt):
        Gate(loop).wait(10)
    assert steps == ["begin", "end", "signal"]
    pipe.close()


def test_a_signal_that_does_not_raise_lets_the_wait_go_on(
    loop: IOLoop, alarm: Callable[[Callable[[], None]], None]
) -> None:
    seen: list[None] = []
    gate = Gate(loop)

    def note() -> None:
        seen.append(None)
        later(gate.arrived)

    alarm(note)
    signal.setitimer(signal.ITIMER_REAL, 0.02)
    assert gate.wait(10)
    assert len(seen) == 1


def test_the_handler_of_a_signal_may_wait_too(
    loop: IOLoop, alarm: Callable[[Callable[[], None]], None]
) -> None:
    inner, outer = Gate(loop), Gate(loop)
    pipe = Pipe(loop, inner.arrived)

    def wait() -> None:
        later(pipe.write)
        assert inner.wait(10)
        later(outer.arrived)

    alarm(wait)
    signal.setitimer(signal.ITIMER_REAL, 0.02)
    assert outer.wait(10)
    assert pipe.threads == [threading.current_thread()]
    pipe.close()


def test_a_handler_set_by_a_handler_stays(
    loop: IOLoop, alarm: Callable[[Callable[[], None]], None]
) -> None:
    gate = Gate(loop)

    def other(_number: int, _frame: object) -> None:
        pass

    def change() -> None:
        signal.signal(signal.SIGALRM, other)
        gate.arrived()

    alarm(change)
    signal.setitimer(signal.ITIMER_REAL, 0.02)
    assert gate.wait(10)
    assert signal.getsignal(signal.SIGALRM) is other


def test_waiting_in_a_callback_is_refused(loop: IOLoop) -> None:
    refused: list[BaseException] = []
    gate = Gate(loop)

    def callback() -> None:
        try:
            Gate(loop).wait(1)
        except RuntimeError as error:
            refused.append(error)
        gate.arrived()

    loop.call_soon(callback)
    assert gate.wait(10)
    pipe = Pipe(loop, callback)
    gate = Gate(loop)
    pipe.write()
    assert gate.wait(10)
    assert len(refused) == 2
    pipe.close()


def test_a_thread_that_serves_sleeps_on_when_the_loop_ends() -> None:
    loop = IOLoop()
    loop.start()
    gate = Gate(loop)
    opened: list[bool] = []
    thread = threading.Thread(target=lambda: opened.append(gate.wait(None)))
    thread.start()
    eventually(lambda: loop._serving.locked())
    loop.stop()
    assert not opened
    gate.arrived()
    thread.join(10)
    assert opened == [True]


def test_what_a_callback_wants_called_soon_is_called_while_the_thread_goes_on_waiting(
    loop: IOLoop,
) -> None:
    gate = Gate(loop)
    steps: list[str] = []

    def third() -> None:
        steps.append("third")
        gate.arrived()

    def second() -> None:
        steps.append("second")
        loop.call_soon(third)

    def first() -> None:
        steps.append("first")
        loop.call_soon(second)

    pipe = Pipe(loop, first)
    later(pipe.write)
    assert gate.wait(10)
    assert steps == ["first", "second", "third"]
    pipe.close()


def test_the_message_of_the_outer_wait_may_come_in_a_wait_within(
    loop: IOLoop, alarm: Callable[[Callable[[], None]], None]
) -> None:
    inner, outer = Gate(loop), Gate(loop)
    first, second = Pipe(loop, outer.arrived), Pipe(loop, inner.arrived)

    def wait() -> None:
        first.write()
        eventually(lambda: first.threads or not inner.wait(0.001))
        second.write()
        assert inner.wait(10)

    alarm(wait)
    signal.setitimer(signal.ITIMER_REAL, 0.02)
    began = time.monotonic()
    assert outer.wait(10)
    assert time.monotonic() - began < 5
    first.close()
    second.close()


def test_a_wait_may_be_given_years(loop: IOLoop) -> None:
    gate = Gate(loop)
    later(gate.arrived)
    assert gate.wait(1e9)


def test_close_to_the_end_of_the_stack_another_thread_handles_the_messages(loop: IOLoop) -> None:
    gate = Gate(loop)
    pipe = Pipe(loop, gate.arrived)

    def deep(frames: int) -> bool:
        if frames:
            return deep(frames - 1)
        later(pipe.write)
        return gate.wait(10)

    depth = 0
    frame = sys._getframe()
    while frame is not None:
        frame, depth = frame.f_back, depth + 1  # type: ignore[assignment]
    assert deep(sys.getrecursionlimit() - depth - 60)
    assert pipe.threads == [loop._thread]
    pipe.close()


def test_a_signal_while_the_handlers_are_put_back_leaves_none_of_ours(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    numbers = (signal.SIGALRM, signal.SIGUSR1, signal.SIGUSR2)
    before = [signal.getsignal(number) for number in numbers]
    handlers = [lambda _number, _frame: None for _ in numbers]
    for number, handler in zip(numbers, handlers, strict=True):
        signal.signal(number, handler)
    try:
        interrupts = Interrupts.begin()
        assert interrupts is not None
        real, raised = interrupts_module._set_handler, []

        def interrupted(number: int, handler: object) -> object:
            was = real(number, handler)
            if not raised:
                raised.append(number)
                raise KeyboardInterrupt
            return was

        monkeypatch.setattr(interrupts_module, "_set_handler", interrupted)
        with pytest.raises(KeyboardInterrupt):
            interrupts.end()
        monkeypatch.undo()
        assert [signal.getsignal(number) for number in numbers] == handlers
    finally:
        for number, was in zip(numbers, before, strict=True):
            signal.signal(number, was)


@pytest.mark.parametrize("another_thread_serves", [False, True])
def test_a_signal_that_ends_no_wait_is_heard_soon(
    loop: IOLoop,
    alarm: Callable[[Callable[[], None]], None],
    another_thread_serves: bool,
) -> None:
    """As one that comes right before the wait: here the kernel gives it to another thread."""
    gate, other = Gate(loop), Gate(loop)
    alarm(gate.open)
    serving = threading.Thread(target=other.wait, args=(20,))
    if another_thread_serves:
        serving.start()
        eventually(lambda: loop._serving.locked())
    start = time.monotonic()
    later(lambda: signal.pthread_kill(threading.get_ident(), signal.SIGALRM))
    assert gate.wait(20)
    assert time.monotonic() - start < 10
    other.open()
    if another_thread_serves:
        serving.join()
