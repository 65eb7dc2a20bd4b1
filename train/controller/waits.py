"""What a controller waits for: its asyncio tasks, and work that blocks, in one thread.

That work is with the storage, and hooks of callbacks. Clients of stores may wait for ever for a
server, so the user is told what a run waits for. What follows from that is the user's decision.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import time
from typing import TYPE_CHECKING, Any, TypeVar

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine


async def first_of(main: asyncio.Task[None], beside: asyncio.Task[None]) -> None:
    """Wait for the main task; if the one beside it fails before, cancel it and raise that."""
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


async def watch_for_slow(
    running: Callable[[], tuple[str, float] | None], tell: Callable[[str], None]
) -> None:
    """Tell of each piece of work that takes long.

    Looked at from outside, as timers for each would cost more than most of the work.

    Args:
        running: What runs now, and since when, by time.monotonic(); None if nothing does.
        tell: Called with a sentence, once for each.
    """
    told = None
    while True:
        await asyncio.sleep(SLOW_WORK / 3)
        found = running()
        if found is None or found == told:
            continue
        what, since = found
        waited = time.monotonic() - since
        if waited >= SLOW_WORK:
            told = found
            tell(f"The run waits for {what}, which has not returned for {waited:.0f} s.")


class BlockingWork:
    """Runs one piece of work after the other, so that what is stored is stored in order.

    Attributes:
        since: When the piece that runs has begun, by time.monotonic(); None if none runs.
    """

    def __init__(self) -> None:
        self._thread = concurrent.futures.ThreadPoolExecutor(1, thread_name_prefix="train-io")
        self.since: float | None = None

    async def do(self, function: Callable[..., T], *args: Any) -> T:
        """Run a function that blocks, behind those that were given before."""
        return await asyncio.get_running_loop().run_in_executor(
            self._thread, self._run, function, *args
        )

    def close(self) -> None:
        """End the thread, which has to be idle."""
        self._thread.shutdown()

    def _run(self, function: Callable[..., T], *args: Any) -> T:
        self.since = time.monotonic()
        try:
            return function(*args)
        finally:
            self.since = None
