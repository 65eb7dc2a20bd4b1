"""What a controller waits for: its asyncio tasks, and work that blocks, in one thread.

That work is with the storage, and hooks of callbacks. Clients of stores may wait for ever for a
server, so the user is told what a run waits for. What follows from that is the user's decision.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import dataclasses
import time
from typing import TYPE_CHECKING, Any, TypeVar

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine


async def first_of(main: asyncio.Task[None], beside: asyncio.Task[None]) -> None:
    """Wait for the main task; if the one beside it fails before, cancel the first and raise that."""
    await asyncio.wait({main, beside}, return_when=asyncio.FIRST_COMPLETED)
    if beside.done():
        main.cancel()
        await asyncio.wait({main})
        beside.result()
    main.result()


async def wait_at_most(waiting: Coroutine[Any, Any, Any], timeout: float) -> None:
    """Wait for something, but not longer than ``timeout`` seconds."""
    task = asyncio.ensure_future(waiting)
    await asyncio.wait({task}, timeout=timeout)
    await end(task)


async def end(*futures: asyncio.Future[Any]) -> None:
    """Cancel futures and wait until they have ended; how they ended no longer matters."""
    for future in futures:
        future.cancel()
    await asyncio.gather(*futures, return_exceptions=True)


T = TypeVar("T")

#: Seconds after which the user is told of work that has not ended.
SLOW_WORK = 30.0


@dataclasses.dataclass(frozen=True, eq=False)
class _Running:
    """A piece of work that has not ended."""

    since: float  # time.monotonic()


class BlockingWork:
    """Runs one piece of work after the other, so that what is stored is stored in order."""

    def __init__(self) -> None:
        self._thread = concurrent.futures.ThreadPoolExecutor(1, thread_name_prefix="train-io")
        self._running: _Running | None = None

    async def do(self, function: Callable[..., T], *args: Any) -> T:
        """Run a function that blocks, behind those that were given before."""
        return await asyncio.get_running_loop().run_in_executor(
            self._thread, self._run, function, *args
        )

    def close(self) -> None:
        """End the thread, which has to be idle."""
        self._thread.shutdown()

    def _run(self, function: Callable[..., T], *args: Any) -> T:
        self._running = _Running(time.monotonic())
        try:
            return function(*args)
        finally:
            self._running = None

    async def watch(self, is_known: Callable[[], bool], tell: Callable[[float], None]) -> None:
        """Tell of each piece of work that takes long.

        Looked at from outside, as timers for each would cost more than most of the work.

        Args:
            is_known: Whether somebody else tells what the thread waits for now.
            tell: Called with the seconds by then, once for each.
        """
        told = None
        while True:
            await asyncio.sleep(SLOW_WORK / 3)
            running = self._running
            if running is None or running is told or is_known():
                continue
            waited = time.monotonic() - running.since
            if waited >= SLOW_WORK:
                told = running
                tell(waited)
