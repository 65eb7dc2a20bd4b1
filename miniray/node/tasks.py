"""Several tasks of one gRPC stream, which end together."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

import grpc

if TYPE_CHECKING:
    from collections.abc import Coroutine

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
