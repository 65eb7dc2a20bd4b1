from __future__ import annotations

import os
import socket
import threading
from typing import TYPE_CHECKING

import pytest
from open_files import open_files
from process_doubles import eventually

from miniray.wire.io_loop import IOLoop

if TYPE_CHECKING:
    from collections.abc import Callable


def test_callbacks_run_in_the_loops_thread_in_order(loop: IOLoop) -> None:
    seen: list[tuple[int, threading.Thread]] = []
    for number in range(100):
        loop.call_soon(lambda number=number: seen.append((number, threading.current_thread())))
    eventually(lambda: len(seen) == 100)
    assert seen == [(number, loop._thread) for number in range(100)]


def test_timers_run_in_the_order_of_their_times_and_not_early(loop: IOLoop) -> None:
    seen: list[str] = []

    def begin() -> None:  # in one turn of the loop: none is due before all are set
        loop.call_later(0.06, lambda: seen.append("third"))
        loop.call_later(0.02, lambda: seen.append("first"))
        loop.call_later(0.04, lambda: seen.append("second"))
        seen.append("set")

    loop.call_soon(begin)
    eventually(lambda: len(seen) == 4)
    assert seen == ["set", "first", "second", "third"]


def test_a_cancelled_timer_does_not_run_and_is_forgotten(loop: IOLoop) -> None:
    seen: list[str] = []
    too_late: list[Callable[[], None]] = []

    def begin() -> None:  # in one turn of the loop: neither is due before the first is cancelled
        cancel = loop.call_later(0.01, lambda: seen.append("cancelled"))
        too_late.append(loop.call_later(0.02, lambda: seen.append("ran")))
        cancel()

    loop.call_soon(begin)
    eventually(lambda: seen)
    too_late[0]()  # has no effect
    loop.call_later(0.01, lambda: seen.append("last"))
    eventually(lambda: len(seen) == 2)
    assert seen == ["ran", "last"]
    eventually(lambda: not loop._cancelled)


def test_a_callback_that_fails_does_not_end_the_loop(
    loop: IOLoop, caplog: pytest.LogCaptureFixture
) -> None:
    seen: list[int] = []
    loop.call_soon(lambda: 1 // 0)
    loop.call_later(0.0, lambda: 1 // 0)
    loop.call_soon(lambda: seen.append(1))
    eventually(lambda: seen)
    eventually(lambda: sum("failed" in record.message for record in caplog.records) == 2)


def test_callbacks_that_lead_to_others_all_run_at_the_end() -> None:
    loop = IOLoop()
    loop.start()
    seen: list[str] = []
    started, go = threading.Event(), threading.Event()

    def last() -> None:
        started.set()
        go.wait(10)
        loop.call_soon(lambda: (loop.call_soon(lambda: seen.append("inner")), seen.append("outer")))

    loop.call_soon(last)
    assert started.wait(10)
    stopper = threading.Thread(target=loop.stop)
    stopper.start()
    eventually(lambda: loop._stopping)
    go.set()
    stopper.join(10)
    assert seen == ["outer", "inner"]


def test_a_loop_that_has_ended_touches_no_descriptor_of_others() -> None:
    before = open_files()
    loop = IOLoop()
    loop.start()
    loop.stop()
    read, write = os.pipe2(os.O_NONBLOCK)
    others = [os.dup(write) for _ in range(4)]  # these get whatever numbers were given back
    loop.call_soon(lambda: None)
    loop.call_later(0.0, lambda: None)
    loop.wake()
    with pytest.raises(BlockingIOError):
        os.read(read, 100)
    for fd in (read, write, *others):
        os.close(fd)
    del loop
    assert not open_files() - before


def test_a_loop_can_be_stopped_while_it_is_busy() -> None:
    for _ in range(100):
        loop = IOLoop()
        loop.start()
        stopping = threading.Event()

        def busy(loop: IOLoop = loop, stopping: threading.Event = stopping) -> None:
            if not stopping.is_set():
                loop.call_soon(busy)

        busy()
        threading.Thread(target=stopping.set).start()
        loop.stop()
        stopping.set()
        assert not loop._thread.is_alive()


def test_the_loop_can_be_stopped_from_within() -> None:
    loop = IOLoop()
    loop.start()
    loop.call_soon(loop.stop)
    loop._thread.join(10)
    assert not loop._thread.is_alive()


def test_a_removed_descriptor_is_not_heard_of_again(loop: IOLoop) -> None:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        heard: list[bytes] = []
        loop.add(ours.fileno(), lambda: heard.append(ours.recv(100)))
        theirs.send(b"one")
        eventually(lambda: heard)
        done = threading.Event()
        loop.call_soon(lambda: (loop.remove(ours.fileno()), done.set()))
        assert done.wait(10)
        loop.watch_writable(ours.fileno(), lambda: heard.append(b"never"))
        theirs.send(b"two")
        again = threading.Event()
        loop.call_soon(again.set)
        assert again.wait(10)
        assert heard == [b"one"]


def test_a_timer_set_by_a_finalizer_inside_the_loops_lock_does_not_block(loop: IOLoop) -> None:
    seen: list[str] = []
    with loop._lock:  # as a garbage collection in the middle of call_later finds it
        loop.call_later(0.0, lambda: seen.append("timer"))
        loop.call_soon(lambda: seen.append("soon"))
    eventually(lambda: len(seen) == 2)
