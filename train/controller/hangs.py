"""Finds an attempt that makes no progress, and writes down where each rank is.

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
from miniray.train.base.stacks import main_stack

if TYPE_CHECKING:
    from collections.abc import Callable

    from miniray.train.controller.attempt import Attempt

#: An error shows the stacks of at most this many ranks; the file has all.
MOST_STACKS = 8

#: Seconds that writing the stacks may take.
WRITE_TIMEOUT = 10.0


async def hung_ranks(attempt: Attempt, limit: float) -> dict[int, str]:
    """Wait until an attempt has made no progress for so many seconds.

    Returns:
        The stacks of each rank that runs.
    """
    while True:
        left = attempt.last_progress + limit - time.monotonic()
        if left <= 0:
            found = await attempt.stacks.collect(attempt.running)
            # Whoever ended meanwhile was not hung, and says itself how it ended.
            return {rank: text for rank, text in found.items() if rank in attempt.running}
        await asyncio.sleep(left)


def fail_hung(attempt: Attempt, stacks: dict[int, str], message: str) -> None:
    """Enter that these ranks hang.

    Args:
        attempt: Their attempt.
        stacks: Where each of them is.
        message: Why they count as hung.
    """
    for number, (rank, text) in enumerate(sorted(stacks.items())):
        failure = WorkerFailure.of(WorkerHungError(message))
        shown = main_stack(text) if number < MOST_STACKS else ""
        attempt.fail(rank, dataclasses.replace(failure, traceback=shown))


def as_file(stacks: dict[int, str]) -> str:
    """The stacks of all ranks as one text."""
    return "\n".join(f"=== rank {rank} ===\n{text}" for rank, text in sorted(stacks.items()))


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
    stacks = await hung_ranks(attempt, limit)
    if not stacks:
        return
    name = f"stacks_attempt_{attempt.number}.txt"
    where = f"All stacks are in {path}/{name}."
    # The storage may be what hangs.
    writing = asyncio.ensure_future(asyncio.to_thread(write, name, as_file(stacks)))
    await asyncio.wait({writing}, timeout=WRITE_TIMEOUT)
    if not writing.done():
        writing.cancel()
        where = f"They could not be written to {path} within {WRITE_TIMEOUT:g} s."
    elif (error := writing.exception()) is not None:
        where = f"They could not be written to {path}: {error}"
    fail_hung(
        attempt,
        stacks,
        f"No rank has reported, uploaded or met the others for {limit:g} s "
        f"(FailureConfig(hang_timeout_s)), while {listed(stacks)} ran. {where}",
    )
