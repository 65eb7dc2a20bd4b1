"""Several tasks of one gRPC stream, which end together, and waiting that can be cancelled."""

from __future__ import annotations

import asyncio
import contextlib
from typing import TYPE_CHECKING, Any, TypeVar

import grpc

if TYPE_CHECKING:
    from collections.abc import Coroutine

_Result = TypeVar("_Result")

#: What ends a stream.
BROKEN = (grpc.aio.AioRpcError, grpc.aio.UsageError, asyncio.InvalidStateError)


async def first_of(*parts: Coroutine[Any, Any, object]) -> None:
    """Run all until one ends; raises what that one raised, and ends the others."""
    tasks = [asyncio.ensure_future(part) for part in parts]
    try:
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        for task in tasks:
            if task.cancelled():  # by gRPC, which does that to a call of which another part failed
                raise asyncio.InvalidStateError("The stream was cancelled.")
            if task.done():
                task.result()
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def within(work: Coroutine[Any, Any, _Result], seconds: float) -> _Result:
    """What some work gives; it is cancelled, and has ended, when this returns or raises.

    ``asyncio.wait_for`` before Python 3.12 ignores a cancellation that comes just when it ends.

    Raises:
        asyncio.TimeoutError: it has not ended within so many seconds.
    """
    task = asyncio.ensure_future(work)
    try:
        done, _ = await asyncio.wait({task}, timeout=seconds)
        if not done:
            raise asyncio.TimeoutError
        return task.result()
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


async def set_within(event: asyncio.Event, seconds: float | None) -> None:
    """Wait until an event is set, or the time is over.

    ``asyncio.wait_for`` before Python 3.12 ignores a cancellation that comes just when it is set.
    """
    waiting = asyncio.ensure_future(event.wait())
    try:
        await asyncio.wait({waiting}, timeout=seconds)
    finally:
        waiting.cancel()


async def ended(work: asyncio.Future[Any]) -> None:
    """Wait until some work has ended, however it does; a cancellation meanwhile is heeded then."""
    cancelled = False
    while not work.done():
        with contextlib.suppress(asyncio.CancelledError):
            await asyncio.wait({work})
            break
        cancelled = True
    if not work.cancelled():
        work.exception()  # it may be that nobody asks
    if cancelled:
        raise asyncio.CancelledError
