"""Finds an attempt that makes no progress, writes down where each rank is, and fails them.

What counts as progress is the attempt's knowledge; what follows from a failure
is the controller's decision.
"""

from __future__ import annotations

import asyncio
import dataclasses
import time
from typing import TYPE_CHECKING

from miniray.train.base.exceptions import WorkerHungError
from miniray.train.base.failures import WorkerFailure
from miniray.train.base.ranks import listed
from miniray.train.worker.stacks import main_stack

if TYPE_CHECKING:
    from collections.abc import Callable

    from miniray.train.controller.attempt import Attempt

#: An error shows the stacks of at most this many ranks; the file has all.
MOST_STACKS = 8

#: Seconds that writing the stacks may take.
WRITE_TIMEOUT = 10.0


async def watch_for_hang(
    attempt: Attempt, limit: float, path: str, write: Callable[[str, str], None]
) -> None:
    """Fail the ranks of an attempt when it makes no progress.

    Args:
        attempt: The attempt.
        limit: Seconds without progress.
        path: The run's folder.
        write: Writes a text under a name in that folder; blocks.
    """
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
