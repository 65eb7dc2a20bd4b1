"""The I/O of a driver or a worker: an epoll loop for its sockets and timers, and the waits for it.

A thread of its own runs it. A thread that waits for a message, at a ``Gate``, takes the sockets
over for that time (``serve``), so that what it waits for costs no switch between threads: the
sockets are in an epoll of their own, which is watched either by the I/O thread or by the one that
serves. Callbacks run one at a time, whichever thread it is, must not block, never run user code.
"""

from __future__ import annotations

import collections
import contextlib
import heapq
import itertools
import logging
import math
import mmap
import os
import select
import sys
import threading
import time
from typing import TYPE_CHECKING

from miniray.wire.interrupts import LISTEN, Interrupts, forked, held_here, in_main_thread
from miniray.wire.poller import READ_SIZE, Pace

if TYPE_CHECKING:
    from collections.abc import Callable

    from miniray.wire.poller import Posted

logger = logging.getLogger(__name__)


#: Frames that handling a message may take on the stack of a thread that waits.
_FRAMES = 100
#: Seconds of one poll at most: the kernel counts milliseconds in 31 bits.
_LONGEST = 86400.0


def _room_on_stack() -> bool:
    """Return whether messages can be handled here: a RecursionError would lose one."""
    try:
        sys._getframe(max(0, sys.getrecursionlimit() - _FRAMES))
    except ValueError:  # the stack is not so deep
        return True
    return False


def _eventfd() -> int:
    return os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)


class _Unflushed:
    """A connection that keeps something; each time it does is an entry of its own in a queue."""

    __slots__ = ("connection",)

    def __init__(self, connection: Posted) -> None:
        self.connection = connection


class IOLoop:
    """An epoll loop in a daemon thread; a ``Poller``."""

    _wake_fd = -1
    _nudge_fd = -1

    def __init__(self) -> None:
        #: The sockets, for the thread that serves; and the I/O thread's poll of these and `wake`.
        self._sockets = select.epoll()
        self._sockets_fd = self._sockets.fileno()
        self._all = select.epoll()
        self._wake_fd = _eventfd()
        self._nudge_fd = _eventfd()
        self._all.register(self._wake_fd, select.EPOLLIN)
        self._all.register(self._sockets_fd, select.EPOLLIN)
        self._sockets.register(self._nudge_fd, select.EPOLLIN)
        self._readers: dict[int, Callable[[], None]] = {self._nudge_fd: self._nudged}
        self._writers: dict[int, Callable[[], None]] = {}
        self._soon: collections.deque[Callable[[], None]] = collections.deque()
        self._timers: list[tuple[float, int, Callable[[], None]]] = []
        self._cancelled: set[int] = set()
        self._numbers = itertools.count()
        self._unflushed: collections.deque[_Unflushed] = collections.deque()
        self._flush_scheduled = False
        # Reentrant: a garbage collection may run user code anywhere.
        self._lock = threading.RLock()
        #: Held while callbacks run, and by which thread.
        self._turn = threading.Lock()
        self._in_turn = 0
        #: Held by the thread that serves instead of the I/O thread, and which that is.
        self._serving = threading.Lock()
        self._server = 0
        self._pace = Pace()
        self._interrupts: Interrupts | None = None
        self._stopping = False
        # Its pages take memory, and time, only once something is read into them.
        buffer = mmap.mmap(-1, READ_SIZE, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        self.buffer = memoryview(buffer)
        self._thread = threading.Thread(target=self._run, name="miniray-io", daemon=True)

    def start(self) -> None:
        self._thread.start()

    @property
    def in_callback(self) -> bool:
        """Whether the calling thread is running a callback, and so must not wait."""
        return self._in_turn == threading.get_ident()

    def stop(self) -> None:
        """End the loop and wait for its thread (unless called from it)."""
        self._stopping = True
        self.wake()
        self.nudge()
        if not self.in_callback and self._thread.is_alive():
            self._thread.join()

    def abandon(self) -> None:
        """Close the loop's descriptors: for a forked child, which has no loop thread."""
        self._stopping = True
        self._all.close()
        self._sockets.close()
        for fd in self._take_events():
            os.close(fd)
        forked()
        self._unflushed.clear()
        self._soon.clear()

    def __del__(self) -> None:
        # Not at the loop's end: a thread may be about to wake it, and would write to whatever
        # has got the number by then.
        for fd in self._take_events():
            os.close(fd)

    def _take_events(self) -> list[int]:
        fds = [fd for fd in (self._wake_fd, self._nudge_fd) if fd >= 0]
        self._wake_fd = self._nudge_fd = -1
        return fds

    # --- Poller ------------------------------------------------------------------
    def add(self, fd: int, on_readable: Callable[[], None]) -> None:
        self._readers[fd] = on_readable
        self._sockets.register(fd, select.EPOLLIN)

    def watch_writable(self, fd: int, callback: Callable[[], None] | None) -> None:
        if fd not in self._readers:
            return
        if callback is None:
            self._writers.pop(fd, None)
            self._sockets.modify(fd, select.EPOLLIN)
        else:
            self._writers[fd] = callback
            self._sockets.modify(fd, select.EPOLLIN | select.EPOLLOUT)

    def remove(self, fd: int) -> None:
        if self._readers.pop(fd, None) is not None:
            self._writers.pop(fd, None)
            self._sockets.unregister(fd)

    def call_soon(self, callback: Callable[[], None]) -> None:
        self._soon.append(callback)
        if self._in_turn != threading.get_ident():  # else the thread that has the turn handles it
            self.wake()

    def flush_soon(self, connection: Posted) -> None:
        self._unflushed.append(_Unflushed(connection))
        if not self._flush_scheduled:
            self._flush_scheduled = True
            self.call_soon(self._flush)

    def _flush(self) -> None:
        self._flush_scheduled = False
        self.flush_posted()

    def flush_posted(self) -> None:
        """Write what connections keep; any thread does so before it waits.

        All of it is written when this returns, also what another thread has begun to write: user
        code that runs next may hold the interpreter's lock for minutes.
        """
        unflushed = self._unflushed
        while unflushed:
            try:
                first = unflushed[0]
            except IndexError:  # another thread was quicker
                return
            first.connection.flush_posted()
            try:
                unflushed.remove(first)
            except ValueError:  # as above
                continue

    def call_later(self, delay: float, callback: Callable[[], None]) -> Callable[[], None]:
        number = next(self._numbers)
        due = time.monotonic() + delay
        with self._lock:
            first = not self._timers or due < self._timers[0][0]
            heapq.heappush(self._timers, (due, number, callback))
        if first and threading.get_ident() != self._thread.ident:
            self.wake()

        def cancel() -> None:
            self._cancelled.add(number)

        return cancel

    def wake(self) -> None:
        fd = self._wake_fd
        if fd >= 0:  # else this is a forked child
            os.eventfd_write(fd, 1)

    # --- a thread that waits ---------------------------------------------------------
    def serve(self, gate: Gate, timeout: float | None, *, idle: bool = False) -> bool:
        """Handle messages in the calling thread until a gate opens or the time is over.

        False, at once, if another thread does so already or the loop has ended.

        Args:
            gate: What is waited for.
            timeout: Seconds, None for no limit.
            idle: No user code waits here, so that nothing has to be kept from it.

        Raises:
            RuntimeError: this thread is running a callback, which must not wait. User code gets
                there only in a ``__del__`` that the garbage collector calls.
        """
        ident = threading.get_ident()
        if self._in_turn == ident:
            raise RuntimeError(
                "miniray cannot wait here: this runs in the middle of a message, in a __del__ "
                "that the garbage collector called."
            )
        if self._server == ident:  # the handler of a signal waits, in a wait
            try:
                return self._serve_until(gate, timeout)
            finally:
                # The outer wait goes on in its poll, though its message may have come here.
                os.eventfd_write(self._nudge_fd, 1)
        if self._stopping or self._serving.locked():
            return False
        if idle:
            return self._take_over(gate, timeout)
        if not _room_on_stack():
            return False
        interrupts = Interrupts.begin(look=True)
        if interrupts is None:
            return self._take_over(gate, timeout)
        try:
            return self._take_over(gate, timeout, interrupts)
        finally:
            interrupts.end()

    def _take_over(
        self, gate: Gate, timeout: float | None, interrupts: Interrupts | None = None
    ) -> bool:
        if not self._serving.acquire(blocking=False):
            return False
        try:
            self._interrupts = interrupts
            self._server = threading.get_ident()
            self._all.modify(self._sockets_fd, 0)
            if interrupts is not None:
                interrupts.release()
            return self._serve_until(gate, timeout)
        finally:
            if interrupts is not None:
                interrupts.held = True
            self._server = 0
            self._all.modify(self._sockets_fd, select.EPOLLIN)
            self._serving.release()
            if self._soon or self._stopping:
                self.wake()

    def _serve_until(self, gate: Gate, timeout: float | None) -> bool:
        interrupts = self._interrupts
        deadline = None if timeout is None else time.monotonic() + timeout
        longest = _LONGEST if interrupts is None else LISTEN
        left = -1.0 if interrupts is None else longest
        while not gate.opened:
            if self._stopping:
                return False
            if deadline is not None:
                left = min(deadline - time.monotonic(), longest)
                if left <= 0:
                    return True
            events = self._pace.wait(self._sockets.poll, left)
            if not events:
                continue
            if interrupts is not None:
                interrupts.held = True
            self._take_turn(events)
            if interrupts is not None:
                interrupts.release()
        return True

    def _take_turn(self, events: list[tuple[int, int]]) -> None:
        ident = threading.get_ident()
        with self._turn:
            self._in_turn = ident
            try:
                self._handle(events)
                self._run_soon()
            finally:
                self._in_turn = 0
        if self._soon:  # what those callbacks want to be called
            self.wake()

    def lend(self) -> int:
        """Return the sockets as one descriptor for an event loop: readable means ``serve_once``."""
        return self._sockets_fd

    def watch(self, watching: bool) -> None:
        """Let the I/O thread watch the sockets, or leave them to the event loop that has them."""
        if not self._stopping:
            self._all.modify(self._sockets_fd, select.EPOLLIN if watching else 0)

    def serve_once(self) -> None:
        self._take_turn(self._sockets.poll(0))

    def nudge(self) -> None:
        """Make a thread that serves check its gate."""
        # One that runs a callback checks it afterwards; a signal's handler interrupts a poll
        # that then goes on.
        if self._server and self._in_turn != self._server:
            fd = self._nudge_fd
            if fd >= 0:  # else this is a forked child
                os.eventfd_write(fd, 1)

    def _nudged(self) -> None:
        with contextlib.suppress(BlockingIOError):  # another thread has read it
            os.eventfd_read(self._nudge_fd)
        if self._server and self._server != threading.get_ident():
            os.eventfd_write(self._nudge_fd, 1)  # it was for that one

    # --- the thread ----------------------------------------------------------------
    def _run(self) -> None:
        poll = self._all.poll
        wake_fd = self._wake_fd
        ident = threading.get_ident()
        while not self._stopping:
            sockets = False
            for fd, _ in poll(self._timeout()):
                if fd == wake_fd:
                    os.eventfd_read(fd)
                else:
                    sockets = True
            with self._turn:
                self._in_turn = ident
                if sockets:
                    self._handle(self._sockets.poll(0))
                self._run_soon()
                self._run_timers()
                self._in_turn = 0
        with self._turn:
            self._in_turn = ident
            while self._soon:  # one may lead to another
                self._run_soon()
            self._in_turn = 0
        if self._serving.acquire(blocking=False):  # for good: what is closed is not served
            self._all.close()
            self._sockets.close()

    def _handle(self, events: list[tuple[int, int]]) -> None:
        """Run the callbacks of epoll's events. Needs the turn."""
        for fd, mask in events:
            callback = self._readers.get(fd) if mask & ~select.EPOLLOUT else None
            if callback is not None:
                self._call(callback)
            if mask & select.EPOLLOUT:
                callback = self._writers.get(fd)
                if callback is not None:
                    self._call(callback)

    def _run_soon(self) -> None:
        soon = self._soon
        for _ in range(len(soon)):
            self._call(soon.popleft())

    def _timeout(self) -> float:
        if self._soon:
            return 0
        with self._lock:
            if not self._timers:
                return -1
            return max(0.0, self._timers[0][0] - time.monotonic())

    def _run_timers(self) -> None:
        while True:
            with self._lock:
                if not self._timers or self._timers[0][0] > time.monotonic():
                    if not self._timers:
                        self._cancelled.clear()
                    return
                _, number, callback = heapq.heappop(self._timers)
            if number in self._cancelled:
                self._cancelled.discard(number)
                continue
            self._call(callback)

    @staticmethod
    def _call(callback: Callable[[], None]) -> None:
        try:
            callback()
        except Exception:
            logger.exception("a callback of the I/O thread failed")


class Gate:
    """Opens when ``arrived`` was called ``needed`` times. One thread waits, any may open it."""

    __slots__ = ("_count", "_loop", "_needed", "_sleeping", "opened")

    def __init__(self, loop: IOLoop, needed: int = 1) -> None:
        self._loop = loop
        self._needed = needed
        self._count = threading.Lock()
        self._sleeping: threading.Lock | None = None
        #: Whether it is open.
        self.opened = needed <= 0

    def arrived(self, _what: object = None) -> None:
        if self._needed > 1:
            with self._count:
                self._needed -= 1
                if self._needed:
                    return
        self.open()

    def open(self) -> None:
        """Open, whatever is still missing."""
        self.opened = True
        sleeping = self._sleeping
        if sleeping is None:
            self._loop.nudge()
        else:
            self._wake(sleeping)

    def _wake(self, sleeping: threading.Lock) -> None:
        with self._count:
            if sleeping.locked():
                sleeping.release()

    def wait(self, timeout: float | None, *, idle: bool = False) -> bool:
        """Wait until it is open, at most ``timeout`` seconds; return whether it is.

        ``idle`` says that this is a process's own loop and not a wait of user code.
        """
        if self.opened:
            return True
        if self._loop.serve(self, timeout, idle=idle):
            return self.opened
        # Another thread serves, and if it ends the I/O thread does: this one sleeps.
        longest = LISTEN if in_main_thread() and not idle else threading.TIMEOUT_MAX
        step = held_here()
        if step is None:
            return self._sleep(timeout, longest)
        held = step.held
        try:
            step.release()
            return self._sleep(timeout, longest)
        finally:
            step.held = held

    def _sleep(self, timeout: float | None, longest: float) -> bool:
        """Wait until another thread opens it, for no more than ``longest`` seconds at a time."""
        deadline = math.inf if timeout is None else time.monotonic() + timeout
        sleeping = threading.Lock()
        sleeping.acquire()
        self._sleeping = sleeping
        try:
            if self.opened:  # the thread that opened it may have looked for a sleeper just before
                return True
            while True:
                left = max(0.0, deadline - time.monotonic())
                if sleeping.acquire(timeout=min(left, longest)):
                    return True
                if left <= longest:
                    return False
        finally:
            self._sleeping = None  # the next wait may serve
