"""The node's shared memory: segments, who owns them and who maps them.

The memory under them (``memories.py``) is held open by this daemon only: nothing stays after it.
Bytes count until the owner freed a segment and nobody maps it; then its memory, which is warm,
serves the next writer.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from miniray.exceptions import ObjectLostError
from miniray.node.memories import Memories, Memory

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

_PAGE = 4096


def _nobody(_process: bytes, _numbers: tuple[int, ...]) -> None:
    """There is nobody to tell."""


def _nothing() -> None:
    """Nobody waits."""


class Segment:
    """One value in shared memory."""

    __slots__ = (
        "creator",
        "form",
        "freed",
        "keepers",
        "left_open",
        "mappers",
        "memory",
        "number",
        "owner",
        "size",
        "writer",
    )

    def __init__(self, number: int, memory: Memory, size: int, form: int, owner: bytes) -> None:
        self.number = number
        self.memory = memory
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
        #: Those that keep it mapped though they do not use it, until it is freed.
        self.keepers: set[bytes] = set()
        #: A process was using it when it left, or forked. It may live on, as a driver does after
        #: `shutdown` or a child after its parent, and look at its arrays: nobody may write there.
        self.left_open = False

    @property
    def fd(self) -> int:
        """Descriptor of its memory."""
        return self.memory.fd


class SegmentStore:
    """All segments of a node.

    Args:
        capacity: Bytes that segments, and memory that waits for the next one, may take.
        give_up: Called with a process and numbers of memory that it is to unmap.
        forget: Called with a process and numbers of segments that it need not keep any longer.
        room: Called when memory has come back.
    """

    def __init__(
        self,
        capacity: int,
        give_up: Callable[[bytes, tuple[int, ...]], object] = _nobody,
        forget: Callable[[bytes, tuple[int, ...]], object] = _nobody,
        room: Callable[[], object] = _nothing,
    ) -> None:
        self.capacity = capacity
        self.memories = Memories(capacity, give_up)
        self._forget = forget
        self._room = room
        self._next = 1
        self._segments: dict[int, Segment] = {}
        #: Freed, but kept mapped by processes that were just told to let go.
        self._returning: set[int] = set()
        self._by_owner: dict[bytes, set[int]] = {}
        self._by_mapper: dict[bytes, set[int]] = {}
        self._by_creator: dict[bytes, set[int]] = {}
        #: What processes wrote for others.
        self._by_writer: dict[bytes, set[int]] = {}

    def __len__(self) -> int:
        return len(self._segments)

    def segments(self) -> list[Segment]:
        """All segments at this moment, oldest first."""
        return list(self._segments.values())

    # --- writing -----------------------------------------------------------------
    def create(self, size: int, form: int, owner: bytes, creator: bytes) -> Segment:
        """Room for a value; hand its descriptor to the writer.

        Raises:
            ObjectStoreFullError: there is no room.
        """
        capacity = max(_PAGE, -(-size // _PAGE) * _PAGE)
        memory = self.memories.take(capacity, creator, len(self))
        number = self._next
        self._next += 1
        segment = Segment(number, memory, size, form, owner)
        segment.creator = segment.writer = creator
        if owner != creator:
            self._by_writer.setdefault(creator, set()).add(number)
        self._segments[number] = segment
        self._by_owner.setdefault(owner, set()).add(number)
        self._by_creator.setdefault(creator, set()).add(number)
        return segment

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

    def leave_open(self, mapper: bytes) -> None:
        """A process has a child that has mapped what it has, and will not tell when it unmaps."""
        for number in self._by_mapper.get(mapper, ()):
            self._segments[number].left_open = True

    def keep(self, number: int, mapper: bytes) -> None:
        """A process that maps a segment leaves it mapped until it is freed, used or not."""
        segment = self._segments.get(number)
        if segment is None or segment.freed:
            self._forget(mapper, (number,))
        else:
            segment.keepers.add(mapper)

    # --- freeing -----------------------------------------------------------------
    def returning(self) -> bool:
        """Whether memory is about to come back: of freed values that processes kept mapped."""
        return bool(self._returning)

    @property
    def used(self) -> int:
        """Bytes of memory that segments are in."""
        return self.memories.used

    def free(self, number: int) -> None:
        """The owner has no use for a segment any more."""
        segment = self._segments.get(number)
        if segment is not None and not segment.freed:
            segment.freed = True
            if segment.keepers:
                self._returning.add(number)
            for process in segment.keepers:
                self._forget(process, (number,))
            self._recycle(segment)

    def process_died(self, process_id: bytes) -> list[int]:
        """Undo what a process had; returns the numbers of the segments that it owned."""
        self.memories.process_died(process_id)
        for number in self._by_creator.pop(process_id, set()):
            segment = self._segments.get(number)
            if segment is not None:  # half written: nobody else knows of it
                segment.creator = None
                segment.freed = True
                segment.left_open = True
                self._recycle(segment)
        for number in self._by_mapper.pop(process_id, set()):
            segment = self._segments.get(number)
            if segment is not None:
                segment.mappers.pop(process_id, None)
                segment.left_open = True
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
        self._returning.discard(segment.number)
        self._drop(self._by_owner, segment.owner, segment.number)
        self._drop(self._by_writer, segment.writer, segment.number)
        self.memories.give_back(segment.memory, again=not segment.left_open)
        self._room()

    @staticmethod
    def _drop(index: dict[bytes, set[int]], key: bytes, number: int) -> None:
        numbers = index.get(key)
        if numbers is not None:
            numbers.discard(number)
            if not numbers:
                del index[key]

    def close(self) -> None:
        """Close every descriptor."""
        self._segments.clear()
        self.memories.close()
