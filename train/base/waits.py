"""Waiting for asyncio tasks and ending them, as the controller needs it."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Coroutine


async def first_of(main: asyncio.Task[None], beside: asyncio.Task[None]) -> None:
    """Wait for the main task; if the one beside it fails before, cancel the first and raise that.

    Args:
        main: What is waited for.
        beside: Has no end of its own.
    """
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
