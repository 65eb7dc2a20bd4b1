"""A copy that is on its way to this node: how much of it is here, and who waits for more."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from miniray.node.transfer.copies import Owner

if TYPE_CHECKING:
    from miniray.node.store.segments import Segment

#: A segment of any node: the node, and its number there.
Key = tuple[bytes, int]


class BrokenTransferError(Exception):
    """A transfer ended before its time and may be resumed."""


class Arriving:
    """A copy that is on its way to this node; what has come can be passed on already."""

    def __init__(self, feeder: bytes) -> None:
        #: The node that it comes from at present.
        self.feeder = feeder
        #: Who owns it, once the first word of it came.
        self.owner = Owner(b"", b"")
        #: None until there is room for it; nothing is asked of its node before.
        self.segment: Segment | None = None
        #: Bytes that are here.
        self.offset = 0
        #: Nodes that the origin named, and that did not serve.
        self.tried: list[bytes] = []
        #: Copies that were to take the place of the origin, which is gone, and that are gone too.
        self.useless: set[Key] = set()
        #: The number of the mover's work, while it comes that way.
        self.job = 0
        self._begun = False
        self._ended = False
        self._moved = asyncio.Event()

    @property
    def begun(self) -> bool:
        """Whether the first word of it came."""
        return self._begun

    def begin(self, owner: Owner) -> None:
        """The first word of it came, or it goes on."""
        if not self._begun:  # a copy that takes the place of the origin may not know its owner yet
            self._begun = True
            self.owner = owner
        self._tell()

    def came(self, size: int) -> None:
        """So many more bytes are here."""
        self.offset += size
        self._tell()

    def end(self) -> None:
        """It is whole, or nothing more will come."""
        self._ended = True
        self._tell()

    def _tell(self) -> None:
        moved, self._moved = self._moved, asyncio.Event()
        moved.set()

    async def room(self) -> Segment | None:
        """Where it is written, once something comes; None if there is no room, or it ended.

        Nodes that were sent here while there is no room are better served elsewhere.
        """
        while self.segment is not None and not self._begun and not self._ended:
            await self._moved.wait()
        return self.segment if self._begun else None

    async def beyond(self, offset: int) -> int:
        """How much is here, once it is more than ``offset``, or no more will come."""
        while self.offset <= offset and not self._ended:
            await self._moved.wait()
        return self.offset
