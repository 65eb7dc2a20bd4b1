"""Copies here of segments of other nodes: those that are whole, and those on their way."""

from __future__ import annotations

import asyncio
import dataclasses
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from miniray.node.store.segments import Segment

#: A segment of any node: the node, and its number there.
Key = tuple[bytes, int]


class BrokenTransferError(Exception):
    """A transfer ended before its time and may be resumed."""


class Owner(NamedTuple):
    """Who frees a value."""

    process: bytes
    node: bytes


@dataclasses.dataclass(eq=False, slots=True)
class Copy:
    """A whole copy of a segment of another node."""

    key: Key
    #: Its number here.
    number: int
    #: Who owned the value when it was copied.
    owner: Owner
    #: The node of the segment is gone: this is the value from now on, and no copy any more.
    left: bool = False


class Copies:
    """All whole copies, by either number."""

    def __init__(self) -> None:
        self._by_key: dict[Key, Copy] = {}
        self._by_number: dict[int, Copy] = {}

    def __len__(self) -> int:
        return len(self._by_number)

    def add(self, key: Key, number: int, owner: Owner) -> Copy:
        """Add a copy of a segment that has none here."""
        assert key not in self._by_key
        copy = self._by_key[key] = self._by_number[number] = Copy(key, number, owner)
        return copy

    def find(self, key: Key) -> Copy | None:
        """Return the copy of a segment of another node."""
        return self._by_key.get(key)

    def is_copy(self, number: int) -> bool:
        """Return whether a segment of this node is a copy, and not the value itself."""
        return self.source_of(number) is not None

    def source_of(self, number: int) -> Key | None:
        """Return of which segment a segment of this node is a copy; None if it is the value."""
        copy = self._by_number.get(number)
        return None if copy is None or copy.left else copy.key

    def remove(self, number: int) -> None:
        """Forget a segment of this node, whether it is a copy or not."""
        copy = self._by_number.pop(number, None)
        if copy is not None:
            del self._by_key[copy.key]

    def of_node(self, node_id: bytes) -> list[Copy]:
        """Return the copies here of segments of a node."""
        return [copy for key, copy in self._by_key.items() if key[0] == node_id]


class Arriving:
    """A copy that is on its way to this node; what has come can be passed on already."""

    def __init__(self) -> None:
        #: Who owns it, once it begins to come.
        self.owner = Owner(b"", b"")
        #: None until there is room for it; nothing is asked of its node before.
        self.segment: Segment | None = None
        #: Bytes that are here.
        self.offset = 0
        #: The number of the mover's work, while it comes that way.
        self.job = 0
        self._begun = False
        self._ended = False
        self._moved = asyncio.Event()

    def begin(self, owner: Owner, job: int = 0) -> None:
        """Tell who waits that it begins to come, by the mover if there is a job."""
        self._begun, self.owner, self.job = True, owner, job
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
