"""A copy that is on its way to this node: how much of it is here, and who waits for more."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from miniray.node.store.segments import Segment


class BrokenTransferError(Exception):
    """A transfer ended before its time and may be resumed."""


class Arriving:
    """A copy that is on its way to this node; what has come can be passed on already."""

    def __init__(self) -> None:
        #: None until there is room for it; nothing is asked of its node before.
        self.segment: Segment | None = None
        #: Bytes that are here.
        self.offset = 0
        #: The number of the mover's work, while it comes that way.
        self.job = 0
        self._begun = False
        self._ended = False
        self._moved = asyncio.Event()

    def begin(self, job: int = 0) -> None:
        """Tell who waits that it begins to come, by the mover if there is a job."""
        self._begun, self.job = True, job
        self._tell()

    def came(self, size: int) -> None:
        """Count bytes that have come."""
        self.offset += size
        self._tell()

    def end(self) -> None:
        """Tell who waits that it is whole, or that nothing more will come."""
        self._ended = True
        self._tell()

    def _tell(self) -> None:
        moved, self._moved = self._moved, asyncio.Event()
        moved.set()

    async def begun(self) -> Segment | None:
        """Wait until something comes; returns where it is written.

        None if it ended, or if there is no room for it yet: who was sent here meanwhile is better
        served elsewhere.
        """
        while self.segment is not None and not self._begun and not self._ended:
            await self._moved.wait()
        return self.segment if self._begun else None

    async def reached(self, offset: int) -> bool:
        """Wait until it is here up to an offset; False if that much will not come."""
        while self.offset < offset and not self._ended:
            await self._moved.wait()
        return self.offset >= offset
