"""What a controller waits for: its asyncio tasks, work that blocks, and ranks that may hang.

Work that blocks is with the storage, and hooks of callbacks. An attempt that makes no progress
fails, with the stacks of its ranks.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import dataclasses
import time
from typing import TYPE_CHECKING, Any, TypeVar

from miniray.train.base.exceptions import WorkerHungError
from miniray.train.base.failures import WorkerFailure
from miniray.train.base.ranks import listed
from miniray.train.worker.stacks import main_stack

if TYPE_CHECKING:
    from collections.abc import Callable

    from miniray.train.controller.attempt import Attempt


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


T = TypeVar("T")


class BlockingWork:
    """Runs one piece of work after the other, so that what is stored is stored in order."""

    def __init__(self) -> None:
        self._thread = concurrent.futures.ThreadPoolExecutor(1, thread_name_prefix="train-io")

    async def do(self, function: Callable[..., T], *args: Any) -> T:
        """Run a function that blocks, behind those that were given before."""
        return await asyncio.get_running_loop().run_in_executor(self._thread, function, *args)

    def close(self) -> None:
        """End the thread, which has to be idle."""
        self._thread.shutdown()


#: An error shows the stacks of at most this many ranks; the file has all.
MOST_STACKS = 8

#: Seconds that writing the stacks may take.
WRITE_TIMEOUT = 10.0


async def watch_for_hang(
    attempt: Attempt, limit: float, path: str, write: Callable[[str, str], None]
) -> None:
    """Fail the ranks of an attempt when it makes no progress for ``limit`` seconds."""
    while (left := attempt.last_progress + limit - time.monotonic()) > 0:  # noqa: ASYNC110 - not an event
        await asyncio.sleep(left)
    found = await attempt.stacks.collect(attempt.running)
    # A rank that ended meanwhile was not hung, and says itself how it ended.
    stacks = {rank: text for rank, text in sorted(found.items()) if rank in attempt.running}
    if not stacks:
        return
    where = await _keep(stacks, f"stacks_attempt_{attempt.number}.txt", path, write)
    message = (
        f"No rank has reported, uploaded or met the others for {limit:g} s "
        f"(FailureConfig(hang_timeout_s)), while {listed(stacks)} ran. {where}"
    )
    for number, (rank, text) in enumerate(stacks.items()):
        failure = WorkerFailure.of(WorkerHungError(message))
        shown = main_stack(text) if number < MOST_STACKS else ""
        attempt.fail(rank, dataclasses.replace(failure, traceback=shown))


async def _keep(
    stacks: dict[int, str], name: str, path: str, write: Callable[[str, str], None]
) -> str:
    """Write all stacks into one file; returns a sentence that says where they are."""
    text = "\n".join(f"=== rank {rank} ===\n{each}" for rank, each in stacks.items())
    # The storage may be what hangs.
    writing = asyncio.ensure_future(asyncio.to_thread(write, name, text))
    await asyncio.wait({writing}, timeout=WRITE_TIMEOUT)
    if not writing.done():
        writing.cancel()
        return f"They could not be written to {path} within {WRITE_TIMEOUT:g} s."
    if (error := writing.exception()) is not None:
        return f"They could not be written to {path}: {error}"
    return f"All stacks are in {path}/{name}."
