"""Tasks of one gRPC stream, which end together; waits that can be cancelled."""

from __future__ import annotations

import asyncio
import contextlib
from typing import TYPE_CHECKING, Any

import grpc

if TYPE_CHECKING:
    from collections.abc import Coroutine

#: Errors that end a stream.
BROKEN = (grpc.aio.AioRpcError, grpc.aio.UsageError, asyncio.InvalidStateError)


def run_in(tasks: set[asyncio.Task[None]], work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
    """Run a coroutine in a task that ``tasks`` holds until it ends: the loop alone may drop it."""
    task = asyncio.get_running_loop().create_task(work)
    tasks.add(task)
    task.add_done_callback(tasks.discard)
    return task


async def first_of(*parts: Coroutine[Any, Any, object]) -> int:
    """Run all until one ends; return its place, or raise its error, and cancel the others."""
    tasks = [asyncio.ensure_future(part) for part in parts]
    try:
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        ended = [place for place, task in enumerate(tasks) if task.done()]
        for place in ended:
            if not tasks[place].cancelled():
                tasks[place].result()  # an error says more than that another part was cancelled
        if any(task.cancelled() for task in tasks):  # gRPC does that if a part of a call fails
            raise asyncio.InvalidStateError("The stream was cancelled.")
        return ended[0]
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def ended(work: asyncio.Future[Any]) -> None:
    """Wait until a task has ended, however it ends; raise a cancellation of the wait after that."""
    cancelled = False
    while not work.done():
        with contextlib.suppress(asyncio.CancelledError):
            await asyncio.wait({work})
            break
        cancelled = True
    if not work.cancelled():
        work.exception()  # its result may not be read
    if cancelled:
        raise asyncio.CancelledError
