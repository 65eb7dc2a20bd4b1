"""Turns: when memory is short, one process at a time collects several values.

Else each of several could hold some of what it needs and wait for what the others hold.
"""

from __future__ import annotations

import asyncio
import collections


class Turns:
    """Who has the turn, and who waits for it, in order."""

    def __init__(self) -> None:
        self._queue: collections.OrderedDict[tuple[bytes, int], asyncio.Future[None]] = (
            collections.OrderedDict()
        )

    def __len__(self) -> int:
        return len(self._queue)

    async def take(self, process_id: bytes, ticket: int) -> None:
        """Wait for the turn of a process, until ``end`` with the same number of its choice."""
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._queue[process_id, ticket] = turn
        self._go_on()
        await turn

    def end(self, process_id: bytes, ticket: int) -> None:
        """A process is done, or waits no more."""
        turn = self._queue.pop((process_id, ticket), None)
        if turn is not None:
            turn.cancel()
        self._go_on()

    def process_died(self, process_id: bytes) -> None:
        """A process is gone."""
        for name in [name for name in self._queue if name[0] == process_id]:
            self.end(*name)

    def _go_on(self) -> None:
        for turn in self._queue.values():
            if not turn.done():
                turn.set_result(None)
            return
