"""The node's shared memory: segments, their owners, and the processes that map them.

The memory under them (``memories.py``) is held open by this daemon only, and ends with it.
Bytes count until the owner freed a segment and no process maps it; then its memory, which is warm,
serves the next writer. A segment that no process maps may be on disk instead (``spilling.py``),
where it is mapped if it does not fit into memory.
"""

from __future__ import annotations

import asyncio
import collections
import dataclasses
from typing import TYPE_CHECKING

from miniray.exceptions import ObjectLostError
from miniray.node.store.memories import Memories, Memory

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

    from miniray.node.store.memories import Push
    from miniray.node.store.spill_files import DiskPlace, SpillFiles

_PAGE = 4096

#: The name of a value in shared memory: the node on which it was written, its segment there, and
#: the node of its owner, whose daemon has its location.
Key = tuple[bytes, int, bytes]


def writer_of(key: Key) -> bytes:
    """Return the node on which a value was written."""
    node_id, _, _ = key
    return node_id


def segment_of(key: Key) -> int:
    """Return the segment of a value on the node on which it was written."""
    _, segment, _ = key
    return segment


def home_of(key: Key) -> bytes:
    """Return the node of a value's owner."""
    _, _, home = key
    return home


@dataclasses.dataclass(slots=True, eq=False, repr=False)
class Segment:
    """One value in the shared memory of a node, or on its disk.

    Changed by its store only, but for where it is, which ``spilling.py`` changes too.
    """

    number: int
    #: None while it is on disk only.
    memory: Memory | None
    size: int
    form: int
    owner: bytes
    #: The process that wrote it, or still does.
    writer: bytes
    #: Where it is on disk, if it was written there; it never changes.
    place: DiskPlace | None = None
    #: The node of its owner, if that is another one and it is no copy.
    home: bytes = b""
    #: The value of which it is a whole copy, if that was written on another node.
    copy_of: Key | None = None
    #: It is being written to disk, or read from there.
    moves: bool = False
    #: Whether its writer is done.
    sealed: bool = False
    freed: bool = False
    #: Where user code put it, or what made it, for reports; empty if unknown.
    made: str = ""
    #: How often each process has it mapped.
    mappers: dict[bytes, int] = dataclasses.field(default_factory=dict)
    #: A process was using it when it left, or forked. It may live on, as a driver does after
    #: `shutdown` or a child after its parent, and read its arrays: its memory must not be
    #: written to again.
    left_open: bool = False

    @property
    def in_memory(self) -> bool:
        return self.memory is not None

    @property
    def fd(self) -> int:
        """Descriptor of its memory, or of its file while it is on disk only."""
        if self.memory is not None:
            return self.memory.fd
        assert self.place is not None
        return self.place.fd

    @property
    def offset(self) -> int:
        """Its offset there, in bytes: whole pages."""
        if self.memory is not None:
            return 0
        assert self.place is not None
        return self.place.offset

    @property
    def capacity(self) -> int:
        return 0 if self.memory is None else self.memory.capacity


class SegmentStore:
    """All segments of a node, and memory that waits for the next one: at most ``capacity`` bytes.

    ``push`` notifies a process: it has to unmap memory (``give_up_memory``), a segment that it has
    mapped was freed (``segment_freed``), or memory is short and what it keeps mapped without use is
    in the way (``store_short``).
    """

    def __init__(self, capacity: int, files: SpillFiles, push: Push) -> None:
        self.capacity = capacity
        self.files = files
        self._push = push
        #: Set when memory has come free, or may be made free.
        self.changed = asyncio.Event()
        self.memories = Memories(capacity, push, self.changed)
        self._next = 1
        self._segments: dict[int, Segment] = {}
        #: What each process owns, has written or maps, so that its end costs no walk over all.
        self._of_process: dict[bytes, set[int]] = {}
        #: Sealed, wanted and not mapped; the least recently used first.
        self._idle: collections.OrderedDict[int, Segment] = collections.OrderedDict()
        #: The mappers that have mapped a segment since their notice that memory is short.
        self._may_keep: set[bytes] = set()

    def __len__(self) -> int:
        return len(self._segments)

    def __iter__(self) -> Iterator[Segment]:
        return iter(list(self._segments.values()))

    # --- writing -----------------------------------------------------------------
    def create(
        self,
        size: int,
        form: int,
        owner: bytes,
        writer: bytes,
        space: Memory | DiskPlace | None = None,
        home: bytes = b"",
    ) -> Segment:
        """Make a segment where its writer has reserved space, or in memory that is taken now.

        Raises ObjectStoreFullError if there is no memory for it.
        """
        if space is None:
            space = self.take(size, writer)
        memory, place = (space, None) if isinstance(space, Memory) else (None, space)
        number = self._next
        self._next += 1
        segment = Segment(number, memory, size, form, owner, writer, place, home)
        self._segments[number] = segment
        for process in (owner, writer):
            self._of_process.setdefault(process, set()).add(number)
        return segment

    def take(self, size: int, process: bytes) -> Memory:
        """Take memory for a value.

        Raises:
            ObjectStoreFullError: There is none.
            OSError: EMFILE, there is no descriptor for it.
        """
        capacity = max(_PAGE, -(-size // _PAGE) * _PAGE)
        return self.memories.take(capacity, process, len(self))

    def put_back(self, memory: Memory) -> None:
        """Return memory that was taken and is not needed after all."""
        self.memories.give_back(memory)
        self.changed.set()

    def seal(self, number: int, made: str = "") -> None:
        """Record that a segment is complete, and where user code made it."""
        segment = self._segments.get(number)
        if segment is not None and not segment.sealed:
            segment.made = made
            segment.sealed = True
            self._look_at(segment)  # its owner may have ended meanwhile

    def take_form(self, segment: Segment, form: int) -> None:
        """Record the form of a value that another node has begun to send."""
        segment.form = form

    def change_owner(self, number: int, owner: bytes) -> None:
        """Have another process, or a daemon, own a segment from now on."""
        segment = self._segments.get(number)
        if segment is not None:
            old, segment.owner = segment.owner, owner
            self._of_process.setdefault(owner, set()).add(number)
            self._let_go(segment, old)

    # --- reading -----------------------------------------------------------------
    def get(self, number: int) -> Segment:
        """Return a segment; raise ObjectLostError if there is none of this number."""
        segment = self._segments.get(number)
        if segment is None:
            raise ObjectLostError(f"segment {number}", "its memory was freed already")
        return segment

    def has_number(self, number: int) -> bool:
        return number in self._segments

    def has(self, segment: Segment) -> bool:
        return self._segments.get(segment.number) is segment

    def map(self, number: int, mapper: bytes) -> Segment:
        """Count a mapping by a process, of memory or, if the segment is not there, of the disk."""
        segment = self.get(number)
        self._idle.pop(number, None)
        segment.mappers[mapper] = segment.mappers.get(mapper, 0) + 1
        self._of_process.setdefault(mapper, set()).add(number)
        self._may_keep.add(mapper)
        return segment

    def unmap(self, numbers: Iterable[int], mapper: bytes, *, left_open: bool = False) -> None:
        """Count off one mapping of each segment by a process, or a node that reads it.

        ``left_open``: it may still read their memory.
        """
        for number in numbers:
            segment = self._segments.get(number)
            if segment is None or mapper not in segment.mappers:
                continue
            segment.left_open |= left_open
            segment.mappers[mapper] -= 1
            if segment.mappers[mapper] == 0:
                del segment.mappers[mapper]
                self._let_go(segment, mapper)
                self._look_at(segment)

    def leave_open(self, mapper: bytes) -> None:
        """Keep what a process has mapped now from reuse: its forked child reports no unmapping."""
        for segment in self._of(mapper):
            segment.left_open |= mapper in segment.mappers

    # --- freeing -----------------------------------------------------------------
    @property
    def used(self) -> int:
        return self.memories.used

    def free(self, number: int) -> None:
        """Free a segment for its owner: it is gone once no process maps it."""
        segment = self._segments.get(number)
        if segment is not None and not segment.freed:
            segment.freed = True
            for process in segment.mappers:
                self._push(process, "segment_freed", (number,))
            self._look_at(segment)

    def tell_short(self) -> None:
        """Notify the processes that may keep segments mapped without use: memory is short."""
        told, self._may_keep = self._may_keep, set()
        for process in told:
            self._push(process, "store_short", ())

    def process_died(self, process_id: bytes, *, may_look: bool = True) -> list[int]:
        """Free what a process owned, and return the numbers; count off what it had mapped.

        ``may_look``: it may live on and read that.
        """
        self.memories.process_died(process_id)
        self._may_keep.discard(process_id)
        owned = []
        for segment in self._of(process_id):
            if not segment.sealed and segment.writer == process_id:
                # Half written: no other process has its key.
                segment.sealed = segment.freed = segment.left_open = True
                self._look_at(segment)
            if segment.mappers.pop(process_id, 0):
                segment.left_open |= may_look
                self._let_go(segment, process_id)
                self._look_at(segment)
            if segment.owner == process_id:
                owned.append(segment.number)
                self.free(segment.number)
        return owned

    def written_by(self, process_id: bytes) -> dict[bytes, list[int]]:
        """Return the unfreed segments that an ended process wrote for others, by owner."""
        found: dict[bytes, list[int]] = {}
        for segment in self._of(process_id):
            if segment.writer == process_id != segment.owner and not segment.freed:
                found.setdefault(segment.owner, []).append(segment.number)
        return found

    def _of(self, process: bytes) -> list[Segment]:
        """Return what a process owns, has written or maps."""
        return [self._segments[number] for number in self._of_process.get(process, ())]

    def _let_go(self, segment: Segment, process: bytes) -> None:
        """Drop a process's claim on a segment, unless it has another one."""
        kept = process in (segment.owner, segment.writer) or process in segment.mappers
        if not kept or segment.number not in self._segments:
            numbers = self._of_process.get(process, set())
            numbers.discard(segment.number)
            if not numbers:
                self._of_process.pop(process, None)

    # --- memory and disk -------------------------------------------------------------
    def idle(self) -> Iterable[Segment]:
        """Return sealed segments in memory that no process maps; the least recently used first."""
        return self._idle.values()

    @staticmethod
    def is_unused(segment: Segment) -> bool:
        """Return whether a segment has its value, and no process reads or moves it."""
        return segment.sealed and not segment.mappers and not segment.moves

    def is_idle(self, segment: Segment) -> bool:
        return segment.number in self._idle

    def begin_move(self, segment: Segment) -> None:
        """Keep a segment where it is while it is written to disk, or read from there."""
        segment.moves = True
        self._idle.pop(segment.number, None)

    def end_move(self, segment: Segment) -> None:
        segment.moves = False
        self._look_at(segment)

    def drop_memory(self, segment: Segment) -> None:
        """Free the memory of an idle segment that is on disk too."""
        self._idle.pop(segment.number, None)
        self._give_back(segment)

    def _look_at(self, segment: Segment) -> None:
        """Make a segment idle, or remove it, if it is no longer used."""
        if not self.is_unused(segment):
            return
        if not segment.freed:
            if segment.memory is not None:
                self._idle[segment.number] = segment
                self.changed.set()
            return
        del self._segments[segment.number]
        self._let_go(segment, segment.owner)
        self._let_go(segment, segment.writer)
        self._idle.pop(segment.number, None)
        if segment.place is not None:
            self.files.release(segment.place)
        self._give_back(segment)

    def _give_back(self, segment: Segment) -> None:
        if segment.memory is not None:
            self.memories.give_back(segment.memory, again=not segment.left_open)
            segment.memory = None
            segment.left_open = False  # that was about the memory
        self.changed.set()

    def close(self) -> None:
        self._segments.clear()
        self._of_process.clear()
        self._idle.clear()
        self.memories.close()


class Copies:
    """Which segments of this node are whole copies of values that were written on other nodes."""

    def __init__(self, store: SegmentStore, lives: Callable[[bytes], bool]) -> None:
        self.store = store
        self._lives = lives
        self._by_key: dict[Key, int] = {}

    def __len__(self) -> int:
        return len(self._by_key)

    def add(self, key: Key, number: int) -> None:
        """Add a copy of a value that has none here."""
        assert key not in self._by_key
        self._by_key[key] = number
        self.store.get(number).copy_of = key

    def find(self, key: Key) -> int | None:
        """Return the number here of the copy of a value."""
        return self._by_key.get(key)

    def owned_on(self, node_id: bytes) -> list[Key]:
        """Return the values whose owners are on a node and whose copies are here."""
        return [key for key in self._by_key if home_of(key) == node_id]

    def may_be_evicted(self, segment: Segment) -> bool:
        """Return whether a segment is a copy, and the node on which the value was written lives."""
        return segment.copy_of is not None and self._lives(writer_of(segment.copy_of))

    def drop(self, number: int) -> None:
        """Free a segment of this node, whether it is a copy or not."""
        self.remove(number)
        self.store.free(number)

    def drop_from_disk(self, size: int) -> bool:
        """Drop unmapped copies on disk, of this many bytes; return whether there was any."""
        dropped = 0
        for segment in map(self.store.get, list(self._by_key.values())):
            if dropped >= size:
                break
            if segment.place and self.store.is_unused(segment) and self.may_be_evicted(segment):
                dropped += segment.size
                self.drop(segment.number)
        return dropped > 0

    def remove(self, number: int) -> None:
        """Forget a segment of this node that is freed, whether it is a copy or not."""
        segment = self.store.get(number) if self.store.has_number(number) else None
        if segment is not None and segment.copy_of is not None:
            del self._by_key[segment.copy_of]
            segment.copy_of = None
