"""The I/O thread of a driver or a worker: one epoll loop for all its sockets and timers.

Callbacks run in the loop's thread, must not block, and never run user code.
"""

from __future__ import annotations

import collections
import heapq
import itertools
import logging
import os
import select
import threading
import time
from typing import TYPE_CHECKING

from miniray.core.wire import READ_SIZE

if TYPE_CHECKING:
    from collections.abc import Callable

    from miniray.core.wire import Posted

logger = logging.getLogger(__name__)


class IOLoop:
    """An epoll loop in a daemon thread; implements ``core.wire.Poller``."""

    _wake_fd = -1

    def __init__(self) -> None:
        self._epoll = select.epoll()
        self._wake_fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._epoll.register(self._wake_fd, select.EPOLLIN)
        self._readers: dict[int, Callable[[], None]] = {}
        self._writers: dict[int, Callable[[], None]] = {}
        self._soon: collections.deque[Callable[[], None]] = collections.deque()
        self._timers: list[tuple[float, int, Callable[[], None]]] = []
        self._cancelled: set[int] = set()
        self._numbers = itertools.count()
        self._unflushed: collections.deque[Posted] = collections.deque()
        self._flush_scheduled = False
        # Reentrant: a garbage collection may run user code anywhere.
        self._lock = threading.RLock()
        self._stopping = False
        self.buffer = bytearray(READ_SIZE)
        self.buffer_view = memoryview(self.buffer)
        self._thread = threading.Thread(target=self._run, name="miniray-io", daemon=True)

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()

    @property
    def thread(self) -> threading.Thread:
        """The loop's thread."""
        return self._thread

    def stop(self) -> None:
        """End the loop and wait for its thread (unless called from it)."""
        self._stopping = True
        self.wake()
        if threading.current_thread() is not self._thread and self._thread.is_alive():
            self._thread.join()

    def abandon(self) -> None:
        """Close the loop's descriptors: for a forked child, which has no loop thread."""
        self._epoll.close()
        fd, self._wake_fd = self._wake_fd, -1
        os.close(fd)
        self._unflushed.clear()
        self._soon.clear()

    def __del__(self) -> None:
        # Not at the loop's end: a thread may be about to wake it, and would write to whatever
        # has got the number by then.
        if self._wake_fd >= 0:
            os.close(self._wake_fd)

    # --- Poller ------------------------------------------------------------------
    def add(self, fd: int, on_readable: Callable[[], None]) -> None:
        """Watch a descriptor for input."""
        self._readers[fd] = on_readable
        self._epoll.register(fd, select.EPOLLIN)

    def watch_writable(self, fd: int, callback: Callable[[], None] | None) -> None:
        """Watch, or stop watching, a descriptor for room to write. Thread-safe."""
        if fd not in self._readers:
            return
        if callback is None:
            self._writers.pop(fd, None)
            self._epoll.modify(fd, select.EPOLLIN)
        else:
            self._writers[fd] = callback
            self._epoll.modify(fd, select.EPOLLIN | select.EPOLLOUT)

    def remove(self, fd: int) -> None:
        """Forget a descriptor."""
        if self._readers.pop(fd, None) is not None:
            self._writers.pop(fd, None)
            self._epoll.unregister(fd)

    def call_soon(self, callback: Callable[[], None]) -> None:
        """Run a callback in the loop's thread."""
        self._soon.append(callback)
        self.wake()

    def flush_soon(self, connection: Posted) -> None:
        """Write what a connection keeps, in the loop's next turn."""
        self._unflushed.append(connection)
        if not self._flush_scheduled:
            self._flush_scheduled = True
            self.call_soon(self._flush)

    def _flush(self) -> None:
        self._flush_scheduled = False
        self.flush_posted()

    def flush_posted(self) -> None:
        """Write what connections keep; any thread does so before it waits."""
        unflushed = self._unflushed
        while unflushed:
            try:
                connection = unflushed.popleft()
            except IndexError:  # another thread took it
                return
            connection.flush_posted()

    def call_later(self, delay: float, callback: Callable[[], None]) -> Callable[[], None]:
        """Run a callback after a delay; returns a function that cancels it."""
        number = next(self._numbers)
        due = time.monotonic() + delay
        with self._lock:
            first = not self._timers or due < self._timers[0][0]
            heapq.heappush(self._timers, (due, number, callback))
        if first and threading.current_thread() is not self._thread:
            self.wake()

        def cancel() -> None:
            self._cancelled.add(number)

        return cancel

    def wake(self) -> None:
        """Make the loop look at its queues."""
        fd = self._wake_fd
        if fd >= 0:  # else this is a forked child
            os.eventfd_write(fd, 1)

    # --- the thread ----------------------------------------------------------------
    def _run(self) -> None:
        poll = self._epoll.poll
        while not self._stopping:
            events = poll(self._timeout())
            for fd, mask in events:
                if fd == self._wake_fd:
                    os.eventfd_read(fd)
                    continue
                callback = self._readers.get(fd) if mask & ~select.EPOLLOUT else None
                if callback is not None:
                    self._call(callback)
                if mask & select.EPOLLOUT:
                    callback = self._writers.get(fd)
                    if callback is not None:
                        self._call(callback)
            soon = self._soon
            for _ in range(len(soon)):
                self._call(soon.popleft())
            self._run_timers()
        while self._soon:  # one may lead to another
            self._call(self._soon.popleft())
        self._epoll.close()

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
