"""The stacks of the ranks of an attempt that hangs: how a rank shows them, and who collects them.

A thread of each rank waits for the request, since the main thread may be what hangs. What follows
from a hang is the controller's decision.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import threading
from typing import TYPE_CHECKING

from miniray.profiling.stacks import as_text, stacks

if TYPE_CHECKING:
    from collections.abc import Collection

    from miniray.train.worker.controller_client import RankCalls

logger = logging.getLogger(__name__)

#: Seconds that ranks get to show their stacks.
ANSWER_TIMEOUT = 5.0

#: What stands for the stacks of a rank that has not answered.
NO_ANSWER = (
    f"It did not show its stacks within {ANSWER_TIMEOUT:g} s: native code holds Python's lock (the "
    f"GIL), or the process is stopped or cut off.\n"
)


class StackBoard:
    """Asks the ranks of one attempt for their stacks; in the controller's event loop."""

    def __init__(self) -> None:
        #: Whether ranks are to show them.
        self._asked: asyncio.Future[bool] = asyncio.Future()
        self._answered = asyncio.Event()
        self._stacks: dict[int, str] = {}

    async def wanted(self) -> bool:
        """Wait, on behalf of a rank, until stacks are wanted; False if they never will be."""
        return await asyncio.shield(self._asked)

    def answer(self, rank: int, stacks: str) -> None:
        self._stacks[rank] = stacks
        self._answered.set()

    async def collect(self, ranks: Collection[int]) -> dict[int, str]:
        """The stacks of these ranks, with a sentence for each that does not answer in time."""
        self._tell(wanted=True)
        with contextlib.suppress(asyncio.TimeoutError):
            await asyncio.wait_for(self._all_of(ranks), ANSWER_TIMEOUT)
        return {rank: self._stacks.get(rank, NO_ANSWER) for rank in ranks}

    async def _all_of(self, ranks: Collection[int]) -> None:
        while not self._stacks.keys() >= set(ranks):
            self._answered.clear()
            await self._answered.wait()

    def close(self) -> None:
        self._tell(wanted=False)

    def _tell(self, *, wanted: bool) -> None:
        if not self._asked.done():
            self._asked.set_result(wanted)


def show_if_asked(calls: RankCalls) -> None:
    """Start the thread of this process that shows its stacks when the controller asks."""

    def serve() -> None:
        try:
            if calls.stacks_wanted()():
                calls.show_stacks(stacks_of_this_process())
        except Exception:  # the controller is gone, and with it who would ask
            logger.debug("no stacks are shown any more", exc_info=True)

    threading.Thread(target=serve, name="train-stacks", daemon=True).start()


def stacks_of_this_process() -> str:
    """Return the stacks of this process as text, that of the main thread first."""
    return as_text(stacks())


def main_stack(text: str) -> str:
    return text.partition("\n\n")[0]
