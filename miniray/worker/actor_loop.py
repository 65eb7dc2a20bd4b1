"""The event loop of asyncio actors: it reads the sockets itself while it waits."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from miniray.wire.pace import Pace, PacedSelector

if TYPE_CHECKING:
    import selectors

    from miniray.wire.io_loop import IOLoop


class ServingSelector(PacedSelector):
    """Takes the sockets over from the I/O thread for as long as the event loop waits.

    A call then needs no switch between threads. A coroutine that keeps the event loop busy
    leaves them to the I/O thread.
    """

    def __init__(self, io: IOLoop) -> None:
        super().__init__(Pace())
        self._io = io

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        """As its base, with the sockets."""
        if timeout is not None and timeout <= 0:
            return super().select(timeout)
        self._io.watch(False)
        try:
            return super().select(timeout)
        finally:
            self._io.watch(True)


def serving_loop(io: IOLoop) -> asyncio.AbstractEventLoop:
    """An event loop that handles what comes over the sockets of ``io``."""
    loop = asyncio.SelectorEventLoop(ServingSelector(io))
    loop.add_reader(io.lend(), io.serve_once)
    return loop
