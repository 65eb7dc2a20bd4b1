"""The node's shared memory: segments, who owns them and who maps them.

The memory under them (``memories.py``) is held open by this daemon only: nothing stays after it.
Bytes count until the owner freed a segment and nobody maps it; then its memory, which is warm,
serves the next writer. A segment that nobody maps may be on disk instead (``spilling.py``), where
it is mapped if there is no room for it in memory.
"""

from __future__ import annotations

import collections
from typing import TYPE_CHECKING, TypeVar

from miniray.exceptions import ObjectLostError
from miniray.node.store.memories import Memories, Memory
from miniray.node.store.segment import Segment

if TYPE_CHECKING:
    from collections.abc import Callable, Container, Iterable, Iterator

    from miniray.node.store.spill_files import Place

_Key = TypeVar("_Key")
_Item = TypeVar("_Item")

_PAGE = 4096


def _nobody(_process: bytes, _numbers: tuple[int, ...]) -> None:
    """There is nobody to tell."""


def _nothing(*_what: object) -> None:
    """Tell nobody."""


def _ignore(_place: Place) -> None:
    """There is no disk."""


class SegmentStore:
    """All segments of a node.

    Args:
        capacity: Bytes that segments, and memory that waits for the next one, may take.
        give_up: Called with a process and numbers of memory that it is to unmap.
        freed: Called with a process that has mapped a segment which was just freed, and its number.
        short: Called with a process that may keep segments mapped without use: memory is short.
    """

    def __init__(
        self,
        capacity: int,
        give_up: Callable[[bytes, tuple[int, ...]], object] = _nobody,
        freed: Callable[[bytes, int], object] = _nothing,
        short: Callable[[bytes], object] = _nothing,
    ) -> None:
        self.capacity = capacity
        self.memories = Memories(capacity, give_up)
        self._tell_freed = freed
        self._tell_short = short
        #: Called when memory has come back, or may be had now.
        self.on_room: Callable[[], object] = _nothing
        #: Called with the place of a freed segment that was on disk.
        self.on_unplaced: Callable[[Place], object] = _ignore
        self.memories.on_freed = self._freed
        self._next = 1
        self._segments: dict[int, Segment] = {}
        #: Complete, wanted and not mapped; the least recently used first.
        self._idle: collections.OrderedDict[int, Segment] = collections.OrderedDict()
        self._by_owner: dict[bytes, set[int]] = {}
        self._by_mapper: dict[bytes, set[int]] = {}
        #: Those of the mappers that have mapped something since they heard that memory is short.
        self._may_keep: set[bytes] = set()
        self._by_creator: dict[bytes, set[int]] = {}
        #: What processes wrote for others.
        self._by_writer: dict[bytes, set[int]] = {}

    def __len__(self) -> int:
        return len(self._segments)

    def __iter__(self) -> Iterator[Segment]:
        """All of them at this moment."""
        return iter(list(self._segments.values()))

    # --- writing -----------------------------------------------------------------
    def create(
        self, size: int, form: int, owner: bytes, creator: bytes, memory: Memory | None = None
    ) -> Segment:
        """Room for a value; hand its descriptor to the writer.

        Args:
            size: Bytes.
            form: How it is written.
            owner: The process that frees it.
            creator: The process that writes it.
            memory: For it, if that was taken already.

        Raises:
            ObjectStoreFullError: there is no room.
        """
        if memory is None:
            memory = self.take(size, creator)
        return self._add(Segment(self._next, memory, size, form, owner), creator)

    def create_on_disk(self, place: Place, form: int, owner: bytes, creator: bytes) -> Segment:
        """A value that its writer puts on disk, because there is no room in memory."""
        segment = Segment(self._next, None, place.size, form, owner)
        segment.place = place
        return self._add(segment, creator)

    def _add(self, segment: Segment, creator: bytes) -> Segment:
        number, owner = segment.number, segment.owner
        self._next += 1
        segment.creator = segment.writer = creator
        if owner != creator:
            self._by_writer.setdefault(creator, set()).add(number)
        self._segments[number] = segment
        self._by_owner.setdefault(owner, set()).add(number)
        self._by_creator.setdefault(creator, set()).add(number)
        return segment

    def take(self, size: int, process: bytes) -> Memory:
        """Memory for a value; ObjectStoreFullError if there is no room."""
        capacity = max(_PAGE, -(-size // _PAGE) * _PAGE)
        return self.memories.take(capacity, process, len(self))

    def _freed(self) -> None:
        self.on_room()

    def put_back(self, memory: Memory) -> None:
        """Memory that was taken is not needed after all."""
        self.memories.give_back(memory)
        self.on_room()

    def seal(self, number: int, made: str = "") -> None:
        """The writer is done, and may tell where in user code it was made."""
        segment = self._segments.get(number)
        if segment is not None and segment.creator is not None:
            segment.made = made
            self._drop(self._by_creator, segment.creator, number)
            segment.creator = None
            self._look_at(segment)  # its owner may have ended meanwhile

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

    def has_number(self, number: int) -> bool:
        """Whether there is a segment of this number."""
        return number in self._segments

    def has(self, segment: Segment) -> bool:
        """Whether a segment is still here."""
        return self._segments.get(segment.number) is segment

    def map(self, number: int, mapper: bytes) -> Segment:
        """A process maps a segment, in memory or, if it is not and cannot be there, on disk."""
        segment = self.get(number)
        self._idle.pop(number, None)
        segment.mappers[mapper] = segment.mappers.get(mapper, 0) + 1
        self._by_mapper.setdefault(mapper, set()).add(number)
        self._may_keep.add(mapper)
        return segment

    def unmap(self, numbers: Iterable[int], mapper: bytes, *, left_open: bool = False) -> None:
        """Count off one mapping of each segment by a process, or a node that reads it.

        Args:
            numbers: The segments.
            mapper: Who has unmapped them.
            left_open: Whether it may still look at their memory.
        """
        for number in numbers:
            segment = self._segments.get(number)
            if segment is None or mapper not in segment.mappers:
                continue
            if left_open:
                segment.leave_open()
            segment.mappers[mapper] -= 1
            if segment.mappers[mapper] == 0:
                del segment.mappers[mapper]
                self._drop(self._by_mapper, mapper, number)
                if mapper not in self._by_mapper:
                    self._may_keep.discard(mapper)
                self._look_at(segment)
                if segment.mappers:
                    self.on_room()  # a claim may wait for nobody but its own processes now

    def leave_open(self, mapper: bytes) -> None:
        """Never use the memory again that a process has mapped now: it forks.

        Its child has mapped the same, and reports nothing.
        """
        for number in self._by_mapper.get(mapper, ()):
            self._segments[number].leave_open()

    # --- freeing -----------------------------------------------------------------
    @property
    def used(self) -> int:
        """Bytes of memory that segments are in."""
        return self.memories.used

    def free(self, number: int) -> None:
        """The owner has no use for a segment any more."""
        segment = self._segments.get(number)
        if segment is not None and not segment.freed:
            segment.freed = True
            for process in segment.mappers:
                self._tell_freed(process, number)
            self._look_at(segment)

    def tell_short(self) -> None:
        """Tell the processes that may keep segments mapped without use that memory is short."""
        told, self._may_keep = self._may_keep, set()
        for process in told:
            self._tell_short(process)

    def process_died(self, process_id: bytes, *, may_look: bool = True) -> list[int]:
        """Undo what a process had; returns the numbers of the segments that it owned.

        Args:
            process_id: Which one.
            may_look: Whether it may live on and look at what it had mapped.
        """
        self.memories.process_died(process_id)
        for number in self._by_creator.pop(process_id, set()):
            segment = self._segments.get(number)
            if segment is not None:  # half written: nobody else knows of it
                segment.creator = None
                segment.freed = True
                segment.leave_open()
                self._look_at(segment)
        self._may_keep.discard(process_id)
        for number in self._by_mapper.pop(process_id, set()):
            segment = self._segments.get(number)
            if segment is not None:
                segment.mappers.pop(process_id, None)
                if may_look:
                    segment.leave_open()
                self._look_at(segment)
        owned = self.owned_by(process_id)
        for number in owned:
            self.free(number)
        return owned

    def owned_by(self, process_id: bytes) -> list[int]:
        """Numbers of the segments that a process owns."""
        return list(self._by_owner.get(process_id, ()))

    def written_by(self, process_id: bytes) -> dict[bytes, list[int]]:
        """What a process that ended wrote for others and they have not freed, by owner."""
        found: dict[bytes, list[int]] = {}
        for number in self._by_writer.pop(process_id, ()):
            segment = self._segments[number]
            if not segment.freed:
                found.setdefault(segment.owner, []).append(number)
        return found

    # --- memory and disk -------------------------------------------------------------
    def idle(self) -> Iterable[Segment]:
        """Complete segments in memory that nobody maps; the least recently used first."""
        return self._idle.values()

    def resting(self) -> Iterator[Segment]:
        """Complete segments that are on disk, in memory too or not, and that nobody maps.

        The oldest first.
        """
        for segment in self:
            if segment.place is not None and not self._is_busy(segment):
                yield segment

    @staticmethod
    def _is_busy(segment: Segment) -> bool:
        return bool(segment.mappers) or segment.creator is not None or segment.moves

    def is_idle(self, segment: Segment) -> bool:
        """Whether a segment is one of them."""
        return segment.number in self._idle

    def holds(self, process: bytes) -> bool:
        """Whether a process writes a segment, or maps one that is in memory."""
        if process in self._by_creator:
            return True
        mapped = self._by_mapper.get(process, ())
        return any(self._segments[number].in_memory for number in mapped)

    def others_hold(self, processes: Container[bytes]) -> bool:
        """Whether any but these processes hold segments, or memory that is in no segment yet.

        Daemons that read or send segments count too.
        """
        if self.used > sum(segment.capacity for segment in self._segments.values()):
            return True  # it was granted just now, or a value is being read back into it
        return any(
            self.holds(other)
            for index in (self._by_creator, self._by_mapper)
            for other in index
            if other not in processes
        )

    def begin_move(self, segment: Segment) -> None:
        """A segment is being written to disk, or read from there."""
        segment.moves = True
        self._idle.pop(segment.number, None)

    def end_move(self, segment: Segment) -> None:
        """It is no longer, whatever came of it."""
        segment.moves = False
        self._look_at(segment)

    def drop_memory(self, segment: Segment) -> None:
        """A segment that nobody maps is on disk: its memory is free."""
        self._idle.pop(segment.number, None)
        self._give_back(segment)

    def _look_at(self, segment: Segment) -> None:
        """Somebody is done with a segment: it may be idle now, or gone."""
        if self._is_busy(segment):
            return
        if segment.place is not None:
            segment.place.shown = False
        if not segment.freed:
            if segment.memory is not None:
                self._idle[segment.number] = segment
                self.on_room()
            return
        del self._segments[segment.number]
        self._idle.pop(segment.number, None)
        self._drop(self._by_owner, segment.owner, segment.number)
        self._drop(self._by_writer, segment.writer, segment.number)
        if segment.place is not None:
            self.on_unplaced(segment.place)
        self._give_back(segment)

    def _give_back(self, segment: Segment) -> None:
        if segment.memory is not None:
            self.memories.give_back(segment.memory, again=not segment.left_open)
            segment.memory = None
            segment.left_open = False  # that was about the memory
        self.on_room()

    @staticmethod
    def _drop(index: dict[_Key, set[_Item]], key: _Key, item: _Item) -> None:
        items = index.get(key)
        if items is not None:
            items.discard(item)
            if not items:
                del index[key]

    def close(self) -> None:
        """Close every descriptor."""
        self._segments.clear()
        self._idle.clear()
        self.memories.close()
