"""``Gate``: what a thread waits at until something has happened.

The waiting thread does not sleep while others work for it: as long as no other thread does so
already, it takes over the sockets (``IOLoop.serve``) and handles what comes. The reply that it
waits for then costs no switch from the I/O thread to this one, which is half the time of a call.
"""

from __future__ import annotations

import math
import threading
import time
from typing import TYPE_CHECKING

from miniray.wire.interrupts import LISTEN, held_here, in_main_thread

if TYPE_CHECKING:
    from miniray.wire.io_loop import IOLoop


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
            if self.opened:  # whoever opened it may have looked for a sleeper just before
                return True
            while True:
                left = max(0.0, deadline - time.monotonic())
                if sleeping.acquire(timeout=min(left, longest)):
                    return True
                if left <= longest:
                    return False
        finally:
            self._sleeping = None  # the next wait may serve
