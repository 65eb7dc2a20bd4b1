"""How a thread waits for messages: asleep, or awake for a moment first."""

from __future__ import annotations

import os
import time
from typing import TYPE_CHECKING, TypeVar

if TYPE_CHECKING:
    from collections.abc import Callable

T = TypeVar("T")

#: Seconds for which a thread looks again and again before it sleeps. Waking a processor that
#: sleeps takes about 30 microseconds, a call and its answer as long again.
_AWAKE = 80e-6
#: A thread whose last wait took longer than this sleeps at once.
_SHORT = 120e-6


class Pace:
    """Waits of one thread, awake as long as they are short.

    In a series of single calls each side waits for the other for less time than it takes to wake
    a thread. Such waits do not sleep, which doubles the calls per second. The processor is
    offered to others each time round, and a wait that turns out long, because there is nothing to
    do or because others need the processor, makes the next one sleep at once.
    """

    __slots__ = ("_awake",)

    def __init__(self) -> None:
        self._awake = False

    def wait(self, poll: Callable[[float], list[T]], timeout: float) -> list[T]:
        """``poll(timeout)``; a negative timeout has no end."""
        now = time.perf_counter
        began = now()
        found: list[T] = []
        if self._awake and timeout and _MORE_THAN_ONE:
            found = poll(0)
            until = began + (_AWAKE if timeout < 0 else min(timeout, _AWAKE))
            while not found and now() < until:
                os.sched_yield()
                found = poll(0)
        if not found:
            found = poll(timeout)
        self._awake = now() - began < _SHORT
        return found


#: With one processor, staying awake only keeps away what is waited for.
_MORE_THAN_ONE = len(os.sched_getaffinity(0)) > 1
