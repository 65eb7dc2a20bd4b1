"""Interface of the loop that serves a connection, and the way in which a loop waits."""

from __future__ import annotations

import os
import selectors
import time
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

if TYPE_CHECKING:
    import asyncio
    from collections.abc import Callable, Coroutine

#: Bytes that a loop's buffer has: what one read takes at most.
READ_SIZE = 256 * 1024


class Posted(Protocol):
    """Keeps messages for a moment so that they leave together."""

    def flush_posted(self) -> None:
        """Write the kept messages."""


class Poller(Protocol):
    """A loop that watches sockets."""

    #: Where connections read into, one after the other.
    buffer: memoryview

    def add(self, fd: int, on_readable: Callable[[], None]) -> None:
        """Call ``on_readable`` in the loop's thread whenever fd has data."""

    def watch_writable(self, fd: int, callback: Callable[[], None] | None) -> None:
        """Call ``callback`` whenever fd can be written; None ends that. Thread-safe."""

    def remove(self, fd: int) -> None:
        """Forget fd. Only in the loop's thread."""

    def call_soon(self, callback: Callable[[], None]) -> None:
        """Run a callback in the loop's thread. Thread-safe."""

    def flush_soon(self, connection: Posted) -> None:
        """Call ``flush_posted`` of a connection in the loop's next turn. Thread-safe."""

    def call_later(self, delay: float, callback: Callable[[], None]) -> Callable[[], None]:
        """Run a callback in the loop's thread after ``delay`` seconds; return a cancel."""


T = TypeVar("T")

#: With one processor, staying awake only delays the process that is waited for.
_SEVERAL = len(os.sched_getaffinity(0)) > 1
#: Waits that ``rest`` lasts for.
_REST = 16
#: Seconds that a look takes only if others had the processor meanwhile.
_TAKEN = 30e-6


class Pace:
    """Waits of one thread, awake as long as they are short.

    In a series of single calls each side waits for the other for less time than it takes to wake
    a thread (about 30 microseconds, as much as its part of the call). Such waits do not sleep,
    which doubles the calls per second. The processor is offered to others each time round, and a
    wait that turns out long, because there is no work or because others need the processor,
    makes the next one sleep at once: so a thread without work is never awake for longer
    than ``awake``.
    """

    __slots__ = ("_awake", "_gives_way", "_resting", "_short", "_stay")

    def __init__(self, awake: float = 80e-6, short: float = 120e-6) -> None:
        """Start asleep.

        Args:
            awake: Seconds for which it looks again and again before it sleeps.
            short: After a wait of more seconds than this, the next one sleeps at once.
        """
        self._awake = awake
        self._short = short
        self._stay = False
        self._resting = 0
        self._gives_way: Callable[[], bool] = lambda: False

    def give_way_while(self, is_busy: Callable[[], bool]) -> None:
        """Sleep if others take the processor that they are offered while ``is_busy()``.

        They do work in bulk for this process then.
        """
        self._gives_way = is_busy

    def wait(self, poll: Callable[[float], list[T]], timeout: float) -> list[T]:
        """Call ``poll(timeout)``; a negative timeout has no end."""
        now = time.perf_counter
        began = now()
        found: list[T] = []
        if self._stay and timeout and _SEVERAL:
            found = poll(0)
            until = began + (self._awake if timeout < 0 else min(timeout, self._awake))
            looked = began
            while not found and (looks := now()) < until:
                if looks - looked > _TAKEN and self._gives_way():
                    break
                looked = looks
                os.sched_yield()
                found = poll(0)
        if not found:
            found = poll(timeout)
        if self._resting:
            self._resting -= 1
        else:
            self._stay = now() - began < self._short
        return found

    def rest(self) -> None:
        """Sleep in the next few waits: work in bulk needs the processor, not a quick answer."""
        self._stay = False
        self._resting = _REST


class PacedSelector(selectors.EpollSelector):
    """The selector of an asyncio loop that waits as ``Pace`` does."""

    def __init__(self, pace: Pace) -> None:
        super().__init__()
        self._pace = pace

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        if timeout is not None and timeout <= 0:
            return super().select(timeout)
        return self._pace.wait(self._poll, -1 if timeout is None else timeout)

    def _poll(self, timeout: float) -> list[tuple[selectors.SelectorKey, int]]:
        return super().select(None if timeout < 0 else timeout)


def run_in_loop(
    main: Coroutine[Any, Any, T], make_loop: Callable[[], asyncio.AbstractEventLoop]
) -> T:
    """Run a coroutine in a loop made by ``make_loop``; with Python 3.10 in asyncio's own."""
    import asyncio

    make_runner: Any = getattr(asyncio, "Runner", None)
    if make_runner is None:
        return asyncio.run(main)
    with make_runner(loop_factory=make_loop) as runner:
        return runner.run(main)  # type: ignore[no-any-return]
