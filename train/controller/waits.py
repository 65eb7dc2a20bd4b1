"""What a controller waits for: its asyncio tasks, and work that blocks, in one thread.

That work is with the storage, and hooks of callbacks.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
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


async def end(*futures: asyncio.Future[Any]) -> None:
    """Cancel futures and wait until they have ended; how they ended no longer matters."""
    for future in futures:
        future.cancel()
    await asyncio.gather(*futures, return_exceptions=True)


async def within(seconds: float | None, work: Coroutine[Any, Any, Any]) -> bool:
    """Return whether work ends within ``seconds``, None for no limit; else it is cancelled.

    ``asyncio.wait_for`` before Python 3.12 loses a cancellation that comes as the work ends.
    """
    task = asyncio.ensure_future(work)
    try:
        await asyncio.wait({task}, timeout=seconds)
        if task.done():
            task.result()
            return True
        return False
    finally:
        await end(task)


T = TypeVar("T")


#: Seconds after which the user reads that work has not ended.
SLOW_WORK = 30.0


class BlockingWork:
    """Runs one piece of work after the other, so that what is stored is stored in order.

    Clients of stores may wait for ever for a server, so the user reads what a run waits for, and
    decides what follows.

    Args:
        path: Of the run, in its storage.
        tell: Called with a sentence about work that takes long.
    """

    def __init__(self, path: str, tell: Callable[[str], None]) -> None:
        self._path = path
        self._tell = tell
        self._thread = concurrent.futures.ThreadPoolExecutor(1, thread_name_prefix="train-io")

    async def do(self, function: Callable[..., T], *args: Any) -> T:
        """Run a function that blocks, behind those that were given before."""
        loop = asyncio.get_running_loop()
        slow = loop.call_later(SLOW_WORK, self._tell_of, function)
        try:
            return await loop.run_in_executor(self._thread, function, *args)
        finally:
            slow.cancel()

    def _tell_of(self, function: Callable[..., Any]) -> None:
        name = getattr(function, "__qualname__", repr(function))
        self._tell(
            f"The run waits for its storage {self._path}, or for a callback: {name} has not "
            f"returned for {SLOW_WORK:g} s."
        )

    def close(self) -> None:
        """End the thread, which has to be idle."""
        self._thread.shutdown()
