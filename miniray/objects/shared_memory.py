"""Large values: written once into memory that the daemon holds, read without a copy.

A segment lies in a memfd of the node daemon. Writers write it through its descriptor or, where
they have it mapped already, copy into it (``WarmMemory``). A value that does not fit into memory
is written to a file, or mapped there. Readers map it copy-on-write, so that no writer can disturb
another reader. The daemon is notified when the last view in this process is gone. The values that
were read last, and more than once, stay mapped until they are freed, or memory is short.
"""

from __future__ import annotations

import collections
import contextlib
import ctypes
import dataclasses
import functools
import os
import threading
import time
import weakref
from typing import TYPE_CHECKING, Any

from miniray.common.config import config
from miniray.common.object_ref import hooks
from miniray.common.process_state import is_lack_of_memory
from miniray.exceptions import ObjectStoreFullError
from miniray.messages.protocol import ON_DISK, VALUE_SHARED, VALUE_TENSORS
from miniray.messages.value import location_of
from miniray.objects.waiting import deadline_of, time_left
from miniray.values.mapped import copy_into, map_memory
from miniray.wire.interrupts import uncut

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from miniray.messages.value import Location, Value
    from miniray.objects.waiting import ValueFetches
    from miniray.values.serialization import Serialized
    from miniray.wire.node_link import NodeLink

#: Segments that stay mapped although they are not in use, and those known to have been read once.
_KEPT = 16
_REMEMBERED = 256
#: Part of the time that a process which writes into a full store may look for garbage of its own.
_LOOKING = 0.1
#: Linux writes at most this much with one call.
_WRITE_LIMIT = 0x7FFFF000
_IOV_LIMIT = 1024
#: Pieces of memory that stay mapped, and bytes of them.
_WARM = 16
_WARM_BYTES = 1 << 30
#: Pieces of memory that are remembered as written once.
_WRITTEN = 64

#: Number of a segment on this node, its form, and where it begins in the file to be mapped.
_Got = tuple[int, int, int]
Block = ctypes.Array[ctypes.c_char]
#: The form of a value, and its memory. It stays mapped as long as a view of it lives: a
#: value that only refs hold may leave memory.
Mapped = tuple[int, Block]


class WarmMemory:
    """Memory that this process has written before and keeps mapped for its next value. Thread-safe.

    Copying into mapped memory is twice as fast as writing it through its descriptor, but mapping it
    takes as long as a copy. So the first value in a piece of memory is written, at the second it is
    mapped, and from the third on both are saved.
    """

    def __init__(self, link: NodeLink) -> None:
        self._link = link
        # Reentrant: a garbage collection may run user code, which may put, in any section.
        self._lock = threading.RLock()
        self._blocks: collections.OrderedDict[int, Block] = collections.OrderedDict()
        self._bytes = 0
        self._written: collections.OrderedDict[int, None] = collections.OrderedDict()

    def write(self, memory: int, fd: int, size: int, pieces: Sequence[bytes | memoryview]) -> None:
        """Write a value of ``size`` bytes, in pieces, to the beginning of a piece of memory.

        Args:
            memory: Its number, or ON_DISK.
            fd: Its descriptor, which stays open; -1 if the daemon knows that it is mapped here.
            size: Bytes of all pieces.
            pieces: What to write one after the other.
        """
        if fd < 0:
            block = self._blocks.get(memory)
            if block is not None:
                with self._lock:
                    if memory in self._blocks:
                        self._blocks.move_to_end(memory)
                _copy(block, pieces)
                return
            # Another thread has just unmapped it to free memory.
            _, fd = self._link.node_request("memory", (memory,))
            try:
                write_all(fd, pieces)
            finally:
                os.close(fd)
        elif memory == ON_DISK:
            write_all(fd, pieces)
        elif memory in self._written:
            block = map_memory(fd, os.fstat(fd).st_size, shared=True)
            self._keep(memory, block)
            _copy(block, pieces)
        else:
            write_all(fd, pieces)
            with self._lock:
                self._written[memory] = None
                while len(self._written) > _WRITTEN:
                    self._written.popitem(last=False)

    def _keep(self, memory: int, block: Block) -> None:
        too_many = []
        with self._lock:
            self._written.pop(memory, None)
            if len(block) > _WARM_BYTES:
                return
            self._blocks[memory] = block
            self._bytes += len(block)
            while len(self._blocks) > _WARM or self._bytes > _WARM_BYTES:
                number, old = self._blocks.popitem(last=False)
                self._bytes -= len(old)
                too_many.append(number)
        self._link.node_notice("mapped_memory", memory)
        if too_many:
            del old
            self._link.node_notice("unmapped_memory", too_many)

    def give_up(self, numbers: Iterable[int]) -> None:
        """Unmap memory that the daemon wants back."""
        for number in numbers:
            with self._lock:
                self._written.pop(number, None)
                block = self._blocks.pop(number, None)
                if block is not None:
                    self._bytes -= len(block)
            del block
        self._link.node_notice("unmapped_memory", list(numbers))

    def close(self) -> None:
        with self._lock:
            self._blocks.clear()
            self._bytes = 0


@dataclasses.dataclass(eq=False, repr=False)
class SharedMemory:
    """This process's side of the node's object store. Thread-safe."""

    link: NodeLink
    node_id: bytes
    #: The fetches of values to this node for this process.
    fetches: ValueFetches
    #: Releases everything that this process no longer needs.
    make_room: Callable[[], object]

    def __post_init__(self) -> None:
        tunables = config()
        #: Bytes up to which a value is put into no shared memory, and no record made of where.
        self.plain_limit = -1 if tunables.record_call_sites else tunables.inline_limit
        #: When a writer may look again for garbage of this process.
        self._look_again_at = 0.0
        #: Segments whose last view went away; reported in batches.
        self.unmapped: collections.deque[int] = collections.deque()
        #: Whether the daemon has reported, since the last request, that memory is short.
        self._is_short = False
        self.warm = WarmMemory(self.link)
        # Reentrant: a garbage collection may run user code, which may get, in any section.
        self._lock = threading.RLock()
        #: What is mapped now. Other readers of this process share it, as it cannot be changed.
        self._live: dict[Location, tuple[int, weakref.ref[Block]]] = {}
        #: What stays mapped, with the number of its segment on this node; and what was read once.
        self._kept: collections.OrderedDict[Location, tuple[int, Block]] = collections.OrderedDict()
        self._read: collections.OrderedDict[Location, None] = collections.OrderedDict()

    # --- writing -----------------------------------------------------------------
    def write(self, value: Serialized, owner: bytes, owner_node: bytes, made: str = "") -> Value:
        """Store a value on this node for an owner on any; returns what others need to read it.

        Args:
            value: What to store.
            owner: The process that owns it.
            owner_node: That process's node.
            made: Where in user code it was made, for reports.

        Raises:
            ObjectStoreFullError: the store has no memory for it.
        """
        (segment, memory), fd = self._request(
            "create_segment",
            (value.size, value.form, owner, owner_node),
            self._not_written,
        )
        try:
            self.warm.write(memory, fd, value.size, value.pieces())
        except BaseException:
            self._discard(segment)
            raise
        finally:
            if fd >= 0:
                os.close(fd)
        self.link.node_notice("seal_segment", segment, made)
        contained = tuple((ref.binary(), ref._owner_node) for ref in value.refs)
        return (VALUE_SHARED, (self.node_id, segment, owner_node, value.size), contained)

    def _request(
        self,
        method: str,
        args: tuple[Any, ...],
        undo: Callable[[Any], None],
        timeout: float | None = None,
    ) -> Any:
        """Request memory from the daemon; if it has none, return what is unused and retry once."""
        deadline = deadline_of(timeout)
        self._before_request()
        try:
            return self.link.node_request(method, args, timeout=timeout, undo=undo)
        except (ObjectStoreFullError, OSError) as error:
            if not is_lack_of_memory(error):
                raise
        self._return_all()
        return self.link.node_request(method, args, timeout=time_left(deadline), undo=undo)

    def _before_request(self) -> None:
        """Return to the daemon the memory that it lacks."""
        if self._is_short:
            self._is_short = False
            self._return_all()
        else:
            self.report_unmapped()

    def _return_all(self) -> None:
        """Return all unused memory to the daemon: kept mappings, and values of garbage.

        Finding garbage takes time, so it is done only as often as that is a small part of all time.
        """
        self._drop_kept()
        began = time.monotonic()
        if began >= self._look_again_at:
            self.make_room()
            ended = time.monotonic()
            self._look_again_at = ended + (ended - began) / _LOOKING
        self.report_unmapped()

    def _not_written(self, made: tuple[int, int]) -> None:
        segment, _memory = made
        self._discard(segment)

    def _discard(self, segment: int) -> None:
        """Free a segment of this node that was not filled."""
        self.link.node_notice("discard_segment", segment)

    # --- reading -----------------------------------------------------------------
    def mapped(self, location: Location) -> Mapped | None:
        """Return a value that this process has mapped already."""
        known = self._live.get(location)
        if known is None:
            return None
        form, block = known[0], known[1]()
        return None if block is None else (form, block)

    def map(self, location: Location, timeout: float | None = None) -> Mapped:
        """Map a value, fetched from its node, or read back from disk, if need be.

        Args:
            location: Where it is.
            timeout: Seconds; None: no limit.

        Raises:
            ObjectLostError: its node, or the segment, is gone.
            ObjectStoreFullError: this node has no memory for it.
            TimeoutError: it was not here within ``timeout`` seconds.
        """
        return self.mapped(location) or self._map(location, timeout)

    @uncut  # else the daemon would count it as mapped for ever; the wait itself may be
    def _map(self, location: Location, timeout: float | None) -> Mapped:
        request = self.fetches.next_number()
        args = (*location, request)
        try:
            got, fd = self._request("map_segment", args, self._not_taken, timeout)
        except BaseException:
            self._not_mapped(location, request)
            raise
        return self._mapped(location, got, fd)

    def _not_mapped(self, location: Location, request: int) -> None:
        """Withdraw a request for a value of another node."""
        node_id, *_ = location
        if node_id != self.node_id:
            self.fetches.withdraw([request])

    async def map_later(self, location: Location) -> Mapped:
        """Map as ``map`` does, without blocking the event loop while the value is on its way."""
        known = self.mapped(location)
        if known is not None:
            return known
        request = self.fetches.next_number()
        args = (*location, request)
        ask = self.link.node_request_later
        self._before_request()
        try:
            try:
                got, fd = await ask("map_segment", args, self._not_taken)
            except (ObjectStoreFullError, OSError) as error:
                if not is_lack_of_memory(error):
                    raise
                self._return_all()
                got, fd = await ask("map_segment", args, self._not_taken)
        except BaseException:
            self._not_mapped(location, request)
            raise
        return self._mapped(location, got, fd)

    def _not_taken(self, got: _Got) -> None:
        """Undo a mapping whose requester gave up."""
        local, _form, _offset = got
        self._gone(local)

    def _mapped(self, location: Location, got: _Got, fd: int) -> Mapped:
        """Map what the daemon has handed out."""
        *_, size = location
        local, form, offset = got
        try:
            gone = functools.partial(self._gone, local, location)
            block = map_memory(fd, size, offset=offset, shared=False, gone=gone)
        except OSError:
            self._gone(local)
            raise
        finally:
            os.close(fd)
        if form != VALUE_TENSORS:
            self._live[location] = form, weakref.ref(block)
            self._remember(location, local, block)
        return form, block

    def _gone(self, segment: int, location: Location | None = None) -> None:
        """Note that a segment's last view went away. May run in a garbage collection anywhere."""
        if location is not None:
            self._live.pop(location, None)
        self.unmapped.append(segment)
        # An id that no ref has makes the runtime look at its queues, and so report.
        hooks.dropped.append(b"")
        hooks.call()

    def _remember(self, key: Location, segment: int, block: Block) -> None:
        """Keep a value mapped that is read a second time: it may be read a third time."""
        old: list[Block] = []  # let go after the section: their end is reported
        with self._lock:
            if key not in self._read:
                self._read[key] = None
                if len(self._read) > _REMEMBERED:
                    self._read.popitem(last=False)
                return
            if self._is_short:  # the daemon notified once, after it had mapped this
                return
            self._kept[key] = (segment, block)
            if len(self._kept) > _KEPT:
                _, (_, dropped) = self._kept.popitem(last=False)
                old.append(dropped)

    def on_freed(self, segment: int) -> None:
        """Drop the mapping of this segment of this node: it was freed."""
        with self._lock:
            keys = [key for key, (number, _) in self._kept.items() if number == segment]
            dropped = [self._kept.pop(key) for key in keys]
        del dropped  # not in the section: its end is reported
        self.report_unmapped()

    def on_short(self) -> None:
        """Unmap everything that is not in use: the store has no memory left.

        Garbage is looked for before the next request, not amid whatever this thread does now.
        """
        self._is_short = True
        self._drop_kept()
        self.report_unmapped()

    def _drop_kept(self) -> None:
        with self._lock:
            kept = list(self._kept.values())
            self._kept.clear()
        del kept  # not in the section: its end is reported

    def before_fork(self) -> None:
        """Notify the daemon that a child is about to have all mappings of this process.

        The memory under them is never used again, as the child does not report its unmaps. What
        this process unmaps later is reported on the same connection, so the daemon reads it later.
        """
        self.link.node_notice("forked")

    def report_unmapped(self) -> None:
        """Report to the daemon which segments this process no longer reads."""
        if not self.unmapped:
            return
        gone = []
        with contextlib.suppress(IndexError):  # another thread may take some of them
            while True:
                gone.append(self.unmapped.popleft())
        self.link.node_notice("unmapped", gone)

    def close(self) -> None:
        """Unmap all segments without a view."""
        self.warm.close()
        self._drop_kept()
        self.report_unmapped()

    # --- freeing -----------------------------------------------------------------
    def free(self, value: Value) -> None:
        """Free a value of this process; its mapping goes too, unless it is in use."""
        location = location_of(value)
        with self._lock:
            dropped = self._kept.pop(location, None)
        if dropped is not None:
            del dropped  # not in the section: its end is reported
            self.report_unmapped()
        *key, _size = location
        self.link.node_notice("free_segment", *key)


def _copy(block: Block, pieces: Sequence[bytes | memoryview]) -> None:
    offset = 0
    for piece in pieces:
        copy_into(block, offset, piece)
        offset += len(piece)


def write_all(fd: int, pieces: Iterable[bytes | memoryview]) -> None:
    """Write pieces one after the other to the beginning of a file."""
    offset = 0
    pending = collections.deque(pieces)
    while pending:
        batch: list[bytes | memoryview] = []
        total = 0
        for piece in pending:
            if len(batch) == _IOV_LIMIT or total >= _WRITE_LIMIT:
                break
            batch.append(piece)
            total += len(piece)
        written = os.pwritev(fd, batch, offset)
        offset += written
        while pending and written >= len(pending[0]):
            written -= len(pending[0])
            pending.popleft()
        if written:
            pending[0] = memoryview(pending[0])[written:]
