"""The event loop of asyncio actors: it reads the sockets itself while it waits."""

from __future__ import annotations

import asyncio
import selectors
from typing import TYPE_CHECKING, Any

from miniray.core.pace import Pace

if TYPE_CHECKING:
    from collections.abc import Coroutine

    from miniray.core.io_loop import IOLoop


class ServingSelector(selectors.EpollSelector):
    """Takes the sockets over from the I/O thread for as long as the event loop waits.

    A call then needs no switch between threads. A coroutine that keeps the event loop busy
    leaves them to the I/O thread.
    """

    def __init__(self, io: IOLoop) -> None:
        super().__init__()
        self._io = io
        self._pace = Pace()

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        """What the event loop asks for: the files that are ready, after at most ``timeout``."""
        if timeout is not None and timeout <= 0:
            return super().select(timeout)
        self._io.watch(False)
        try:
            return self._pace.wait(self._poll, -1 if timeout is None else timeout)
        finally:
            self._io.watch(True)

    def _poll(self, timeout: float) -> list[tuple[selectors.SelectorKey, int]]:
        return super().select(None if timeout < 0 else timeout)


def run(main: Coroutine[Any, Any, None], io: IOLoop) -> None:
    """``asyncio.run`` with such a loop."""
    make_runner: Any = getattr(asyncio, "Runner", None)
    if make_runner is None:  # Python 3.10, where the loop of `asyncio.run` cannot be chosen
        asyncio.run(main)
        return

    def make_loop() -> asyncio.AbstractEventLoop:
        loop = asyncio.SelectorEventLoop(ServingSelector(io))
        loop.add_reader(io.lend(), io.serve_once)
        return loop

    with make_runner(loop_factory=make_loop) as runner:
        runner.run(main)
