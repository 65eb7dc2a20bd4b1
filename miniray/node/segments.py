"""The node's shared memory: segments, who owns and maps them, and the pool of warm ones.

Segments are memfds that only this daemon holds open for long: nothing stays after it.
Bytes count until the owner freed a segment and nobody maps it; then its memory,
which is warm, serves the next writer.
"""

from __future__ import annotations

import bisect
import errno
import logging
import os
from typing import TYPE_CHECKING

from miniray.core.descriptors import limit
from miniray.exceptions import ObjectLostError, ObjectStoreFullError

if TYPE_CHECKING:
    from collections.abc import Iterable

logger = logging.getLogger(__name__)

_PAGE = 4096
#: A pooled segment may be this many times larger than what it is used for.
_POOL_SLACK = 2
#: Descriptors that values leave free, so that they can still be handed to readers.
_RESERVE = 16


class Segment:
    """One value in shared memory."""

    __slots__ = (
        "capacity",
        "creator",
        "fd",
        "form",
        "freed",
        "mappers",
        "number",
        "owner",
        "size",
        "writer",
    )

    def __init__(
        self, number: int, fd: int, capacity: int, size: int, form: int, owner: bytes
    ) -> None:
        self.number = number
        self.fd = fd
        self.capacity = capacity
        self.size = size
        self.form = form
        self.owner = owner
        #: The process that writes it; None once it is complete.
        self.creator: bytes | None = None
        #: The process that wrote it, complete or not.
        self.writer = b""
        self.freed = False
        #: How often each process has it mapped.
        self.mappers: dict[bytes, int] = {}


class SegmentStore:
    """All segments of a node.

    Args:
        capacity: Bytes that segments, pooled ones included, may take.
    """

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        #: Bytes of segments in use.
        self.used = 0
        self._pooled = 0
        self._next = 1
        self._segments: dict[int, Segment] = {}
        #: Warm segments nobody uses, by capacity: (capacity, descriptor), sorted.
        self._pool: list[tuple[int, int]] = []
        self._by_owner: dict[bytes, set[int]] = {}
        self._by_mapper: dict[bytes, set[int]] = {}
        self._by_creator: dict[bytes, set[int]] = {}
        #: What processes wrote for others.
        self._by_writer: dict[bytes, set[int]] = {}

    def __len__(self) -> int:
        return len(self._segments)

    # --- writing -----------------------------------------------------------------
    def create(self, size: int, form: int, owner: bytes, creator: bytes) -> Segment:
        """Room for a value; hand its descriptor to the writer.

        Raises:
            ObjectStoreFullError: there is no room.
        """
        capacity = max(_PAGE, -(-size // _PAGE) * _PAGE)
        fd = self._take_pooled(capacity)
        if fd is not None:
            capacity = os.fstat(fd).st_size
        else:
            self._make_room(capacity)
            fd = self._new_memory()
            os.ftruncate(fd, capacity)
        number = self._next
        self._next += 1
        segment = Segment(number, fd, capacity, size, form, owner)
        segment.creator = segment.writer = creator
        if owner != creator:
            self._by_writer.setdefault(creator, set()).add(number)
        self._segments[number] = segment
        self.used += capacity
        self._by_owner.setdefault(owner, set()).add(number)
        self._by_creator.setdefault(creator, set()).add(number)
        return segment

    def _take_pooled(self, capacity: int) -> int | None:
        index = bisect.bisect_left(self._pool, (capacity, -1))
        if index == len(self._pool) or self._pool[index][0] > capacity * _POOL_SLACK:
            return None
        size, fd = self._pool.pop(index)
        self._pooled -= size
        return fd

    def _new_memory(self) -> int:
        fd = os.memfd_create("miniray", os.MFD_CLOEXEC)
        # The kernel gives the lowest free number: this one says how many are open.
        if fd < limit() - _RESERVE:
            return fd
        os.close(fd)
        if self._pool:
            self._empty_pool()
            return self._new_memory()
        raise OSError(
            errno.EMFILE,
            f"Too many open files: each of the {len(self)} values in the object store of this "
            f"node takes one, and its limit is {limit()}. Drop refs that are no longer needed, "
            f"or raise the limit (`ulimit -n`) before the node is started",
        )

    def _empty_pool(self) -> None:
        for _, fd in self._pool:
            os.close(fd)
        self._pool.clear()
        self._pooled = 0

    def _make_room(self, needed: int) -> None:
        while self._pool and self.used + self._pooled + needed > self.capacity:
            size, fd = self._pool.pop()
            self._pooled -= size
            os.close(fd)
        if self.used + needed > self.capacity:
            raise ObjectStoreFullError(needed, self.used, self.capacity)

    def seal(self, number: int) -> None:
        """The writer is done."""
        segment = self._segments.get(number)
        if segment is not None and segment.creator is not None:
            self._drop(self._by_creator, segment.creator, number)
            segment.creator = None
            self._recycle(segment)  # its owner may have ended meanwhile

    def change_owner(self, number: int, owner: bytes) -> None:
        """Somebody else answers for a segment from now on."""
        segment = self._segments.get(number)
        if segment is not None:
            self._drop(self._by_owner, segment.owner, number)
            segment.owner = owner
            self._by_owner.setdefault(owner, set()).add(number)

    # --- reading -----------------------------------------------------------------
    def get(self, number: int) -> Segment:
        """A segment; ObjectLostError if there is none of this number."""
        segment = self._segments.get(number)
        if segment is None:
            raise ObjectLostError(f"segment {number}", "its memory was freed already")
        return segment

    def map(self, number: int, mapper: bytes) -> Segment:
        """A process maps a segment."""
        segment = self.get(number)
        segment.mappers[mapper] = segment.mappers.get(mapper, 0) + 1
        self._by_mapper.setdefault(mapper, set()).add(number)
        return segment

    def unmap(self, numbers: Iterable[int], mapper: bytes) -> None:
        """A process has unmapped segments."""
        for number in numbers:
            segment = self._segments.get(number)
            if segment is None or mapper not in segment.mappers:
                continue
            segment.mappers[mapper] -= 1
            if segment.mappers[mapper] == 0:
                del segment.mappers[mapper]
                self._drop(self._by_mapper, mapper, number)
                self._recycle(segment)

    # --- freeing -----------------------------------------------------------------
    def free(self, number: int) -> None:
        """The owner has no use for a segment any more."""
        segment = self._segments.get(number)
        if segment is not None and not segment.freed:
            segment.freed = True
            self._recycle(segment)

    def process_died(self, process_id: bytes) -> list[int]:
        """Undo what a process had; returns the numbers of the segments that it owned."""
        for number in self._by_creator.pop(process_id, set()):
            segment = self._segments.get(number)
            if segment is not None:  # half written: nobody else knows of it
                segment.creator = None
                segment.freed = True
                self._recycle(segment)
        for number in self._by_mapper.pop(process_id, set()):
            segment = self._segments.get(number)
            if segment is not None:
                segment.mappers.pop(process_id, None)
                self._recycle(segment)
        owned = list(self._by_owner.get(process_id, ()))
        for number in owned:
            self.free(number)
        return owned

    def written_by(self, process_id: bytes) -> dict[bytes, list[int]]:
        """What a process that ended wrote for others and they have not freed, by owner."""
        found: dict[bytes, list[int]] = {}
        for number in self._by_writer.pop(process_id, ()):
            segment = self._segments[number]
            if not segment.freed:
                found.setdefault(segment.owner, []).append(number)
        return found

    def owners(self) -> list[bytes]:
        """The processes that own segments here."""
        return list(self._by_owner)

    def _recycle(self, segment: Segment) -> None:
        if not segment.freed or segment.mappers or segment.creator is not None:
            return
        del self._segments[segment.number]
        self._drop(self._by_owner, segment.owner, segment.number)
        self._drop(self._by_writer, segment.writer, segment.number)
        self.used -= segment.capacity
        if segment.fd >= limit() // 2:  # so many are open that workers may need them
            os.close(segment.fd)
            return
        bisect.insort(self._pool, (segment.capacity, segment.fd))
        self._pooled += segment.capacity
        # Warm memory is kept for as much as is in use, so an idle node gives it back.
        while self._pool and self._pooled > max(self.used, self.capacity // 8):
            size, fd = self._pool.pop(0)
            self._pooled -= size
            os.close(fd)

    @staticmethod
    def _drop(index: dict[bytes, set[int]], key: bytes, number: int) -> None:
        numbers = index.get(key)
        if numbers is not None:
            numbers.discard(number)
            if not numbers:
                del index[key]

    def close(self) -> None:
        """Close every descriptor."""
        for segment in self._segments.values():
            os.close(segment.fd)
        for _, fd in self._pool:
            os.close(fd)
        self._segments.clear()
        self._pool.clear()
