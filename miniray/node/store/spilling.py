"""What happens when the memory of the object store is full: values move to disk, and back.

Memory comes from what nobody has mapped, least recently used first: copies of other nodes' values
are dropped, values of this node are written to disk unless they are there already. The admission
queue (``room.py``) orders the claims to it. Nobody waits for what others look at while the disk has
room: then values are written to disk by their writers, and mapped there by their readers.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import itertools
import logging
import threading
import time
from typing import TYPE_CHECKING, TypeVar

from miniray.common.config import config
from miniray.common.descriptors import OUT_OF_DESCRIPTORS
from miniray.exceptions import ObjectLostError, ObjectStoreFullError
from miniray.node.store.disk import describe_disk, look_at
from miniray.node.store.freeing import Freeing
from miniray.node.store.room import AdmissionQueue, Claim
from miniray.node.store.spill_files import (
    DISK_IS_FULL,
    Place,
    allocate,
    punch,
    read,
    read_piece,
    write,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine, Iterable, Iterator

    from miniray.node.store.memories import Memory
    from miniray.node.store.segment import Segment
    from miniray.node.store.segments import SegmentStore
    from miniray.node.store.spill_files import SpillFiles

logger = logging.getLogger(__name__)

T = TypeVar("T")
_Key = TypeVar("_Key")

#: Values that are written or read at the same time: more would only make the disk seek.
_THREADS = 2
#: Seconds after a failed write in which nothing is written ahead of need.
_AFTER_FAILURE = 10.0


def _is_no_copy(_segment: Segment) -> bool:
    return False


def _there_are_none(_segment: Segment) -> None:
    """Nothing to drop."""


def _forget(tasks: dict[_Key, asyncio.Task[None]], key: _Key, task: asyncio.Task[None]) -> None:
    if tasks.get(key) is task:
        del tasks[key]
    if not task.cancelled():
        task.exception()  # who waited may be gone, then nobody else looks at it


class Spilling:
    """Makes room in a store.

    Args:
        store: Of this node.
        files: Where values go.
        holders: Tells in a sentence who holds how much of the store, for the error.
        node_id: Of the node, for the error.
    """

    def __init__(
        self,
        store: SegmentStore,
        files: SpillFiles,
        holders: Callable[[], str] = str,
        node_id: bytes = b"",
    ) -> None:
        self._store = store
        self._files = files
        #: Whether a segment is only a copy of a value of another node, and what drops one.
        self.is_copy: Callable[[Segment], bool] = _is_no_copy
        self.evict: Callable[[Segment], None] = _there_are_none
        self.queue = AdmissionQueue(store, self, holders, node_id)
        #: Memory must not wait for files to go back to a slow disk.
        self._memory_freeing, self._disk_freeing = Freeing(), Freeing()
        store.memories.free = self._memory_freeing
        files.free = self._disk_freeing
        store.on_unplaced = self._discard
        self._threads = concurrent.futures.ThreadPoolExecutor(
            _THREADS, thread_name_prefix="miniray-spill"
        )
        self._stopped = threading.Event()
        #: Writing and giving back, under way; closing waits for nobody.
        self._tasks: set[asyncio.Task[None]] = set()
        #: By segment, what reads it back, and the memory that this is for.
        self._restores: dict[int, asyncio.Task[None]] = {}
        self._claims: dict[int, Claim] = {}
        #: Of these, what has room and is being read.
        self._readings: dict[int, asyncio.Task[None]] = {}
        #: Bytes of memory that are being written to disk.
        self._leaving = 0
        #: How often something could not be written.
        self.failures = 0
        self._failure = ""
        #: Who has taken how much of the disk when that was full, in a sentence.
        self._taken = ""
        self._failed_at = -_AFTER_FAILURE

    @property
    def spilled(self) -> int:
        """Bytes of disk that values take."""
        return self._files.used

    # --- out ---------------------------------------------------------------------------------
    @property
    def leaving(self) -> int:
        """Bytes that are being written to disk, or go back to the kernel."""
        return self._leaving + self._store.memories.closing

    def trouble(self) -> str:
        """Why the last value could not be written to disk, in a sentence."""
        failed = f"Nothing could be moved to {self._files.folder}: {self._failure}."
        return f"{failed} {self._taken}" if self._taken else failed

    def spill_ahead(self) -> None:
        """Move out what exceeds ``spill_threshold``, so that the next writer need not wait."""
        target = int(self._store.capacity * config().spill_threshold)
        if self._store.used - self._leaving > target:
            if time.monotonic() - self._failed_at < _AFTER_FAILURE:
                return
            if self.make_room(target, writes=True) > 0:
                self._store.tell_short()

    def make_room(self, target: int, *, writes: bool) -> int:
        """Begin to move out values until ``target`` bytes are in use.

        Args:
            target: Bytes.
            writes: Whether values may be written to disk.

        Returns:
            Bytes that it falls short.
        """
        excess = self._store.used - self._leaving - target
        victims = []
        for segment in self._removable(writes=writes):
            if excess <= 0:
                break
            excess -= segment.capacity
            victims.append(segment)
        self._remove(victims)
        return excess

    def move_out(self, count: int, *, writes: bool) -> bool:
        """Begin to move so many values out, whatever their size; returns whether there are any."""
        victims = list(itertools.islice(self._removable(writes=writes), count))
        self._remove(victims)
        return bool(victims)

    def _removable(self, *, writes: bool) -> Iterator[Segment]:
        """What may leave memory, the least recently used first."""
        for segment in self._store.idle():
            if writes or segment.place is not None or self.is_copy(segment):
                yield segment

    def _remove(self, victims: Iterable[Segment]) -> None:
        for segment in victims:
            if self.is_copy(segment):
                self.evict(segment)
            elif segment.place is not None:
                self._store.drop_memory(segment)
            else:
                self._leaving += segment.capacity
                self._store.begin_move(segment)
                self._run(self._spill(segment))

    async def _spill(self, segment: Segment) -> None:
        try:
            segment.place = await self._written(segment)
        except OSError as error:
            await self._disk_failed(error)
        finally:
            self._leaving -= segment.capacity
            self._store.end_move(segment)
            if segment.place is not None and self._store.is_idle(segment):
                self._store.drop_memory(segment)
            self.queue.look_soon()  # whatever came of it

    async def _written(self, segment: Segment) -> Place:
        """Where a value was written to."""
        while True:
            place = self._files.reserve(segment.size)
            try:
                await self._in_thread(write, place, segment.fd, self._stopped.is_set)
            except OSError as error:
                await self._empty(place)  # the next try may need what was written
                if not await self._drop_copies(error, place):
                    raise
            except BaseException:
                self._discard(place)
                raise
            else:
                return place

    async def _drop_copies(self, error: OSError, place: Place) -> bool:
        """Drop copies on disk that nobody looks at, if that is what a place on disk lacks.

        Returns:
            Whether it is worth another try.
        """
        if error.errno not in DISK_IS_FULL:
            return False
        needed = place.size
        for segment in self._store.resting():
            if needed <= 0:
                break
            if self.is_copy(segment):
                needed -= segment.size
                self.evict(segment)
        if needed == place.size:
            return False
        await self._disk_freeing.done()  # each has a file to itself, which is closed there
        return True

    async def room_for(self, claim: Claim) -> Memory | Place:
        """Memory, or a place on disk to write to if only what processes look at is in the way.

        Raises:
            ObjectStoreFullError: there is no room on disk either, or no process wants that.
            OSError: there is no descriptor, and none will come.
            ConnectionError: all processes that asked have ended.
        """
        claim.waits = False
        try:
            return await self.queue.get(claim)
        except ObjectStoreFullError as error:
            if claim.on_full is not None:
                claim.on_full(error)
                if not claim.askers:
                    raise
        place = await self._place_for(claim.size)
        if place is not None:
            return place
        claim.waits = True
        return await self.queue.get(claim)

    def give_back(self, room: Memory | Place) -> None:
        """What ``room_for`` found is not needed after all."""
        if isinstance(room, Place):
            self._discard(room)
        else:
            self._store.put_back(room)

    async def _place_for(self, size: int) -> Place | None:
        """A place on disk that a process may write to itself; None if the disk has no room."""
        making = asyncio.ensure_future(self._make_place(size))
        try:
            return await asyncio.shield(making)
        except asyncio.CancelledError:
            making.add_done_callback(self._discard_made)  # a thread may be at its file
            raise

    def _discard_made(self, making: asyncio.Task[Place | None]) -> None:
        place = None if making.cancelled() else making.result()
        if place is not None:
            self._discard(place)

    async def _make_place(self, size: int) -> Place | None:
        try:
            while True:
                place = self._files.reserve(size, alone=True)
                try:
                    await self._in_thread(allocate, place)
                except OSError as error:
                    self._discard(place)
                    if not await self._drop_copies(error, place):
                        raise
                else:
                    return place
        except OSError as error:
            if error.errno not in OUT_OF_DESCRIPTORS:  # others need none of their own
                await self._disk_failed(error)
            return None

    async def _disk_failed(self, error: OSError) -> None:
        taken = ""
        if error.errno in DISK_IS_FULL:
            await self._disk_freeing.done()  # what had no room is no value there
            disk = await self._in_thread(look_at, self._files.folder)
            taken = describe_disk(disk, self._files.used) if disk is not None else ""
        self.failures += 1
        self._failure, self._taken = error.strerror or str(error), taken
        if time.monotonic() - self._failed_at >= _AFTER_FAILURE:
            logger.warning("could not write to %s: %s", self._files.folder, self._failure)
        self._failed_at = time.monotonic()

    # --- back --------------------------------------------------------------------------------
    async def restore(self, segment: Segment, asker: bytes) -> None:
        """Read a value back that a process has mapped; many who wait share one reading.

        Raises:
            ObjectLostError: the disk cannot be read.
            ObjectStoreFullError: only what processes look at is in the way. It can be read where
                it is.
            OSError: the same, of descriptors.
        """
        number = segment.number
        while not segment.in_memory:
            task = self._restores.get(number)
            if task is None or task.done():
                claim = Claim(segment.size, asker, waits=False)
                task = asyncio.ensure_future(self._restore(segment, claim))
                self._restores[number], self._claims[number] = task, claim
                task.add_done_callback(lambda task: self._restored(number, task))
            else:
                self._claims[number].join(asker)
            await asyncio.shield(task)
            if not self._store.has(segment):
                raise ObjectLostError(f"segment {number}", "it was freed meanwhile")

    def _restored(self, number: int, task: asyncio.Task[None]) -> None:
        if self._restores.get(number) is task:
            del self._claims[number]
        _forget(self._restores, number, task)

    async def _restore(self, segment: Segment, claim: Claim) -> None:
        memory = await self.queue.get(claim)
        number = segment.number
        reading = self._readings.get(number)
        if reading is None and not segment.in_memory and self._store.has(segment):
            reading = asyncio.ensure_future(self._read_back(segment, memory))
            self._readings[number] = reading
            reading.add_done_callback(lambda task: _forget(self._readings, number, task))
        else:  # another was quicker, or all who wanted it are gone
            self._store.put_back(memory)
        if reading is not None:
            await asyncio.shield(reading)

    async def _read_back(self, segment: Segment, memory: Memory) -> None:
        place = segment.place
        assert place is not None
        self._store.begin_move(segment)
        try:
            await self._in_thread(read, place, memory.fd, self._stopped.is_set)
            segment.memory = memory
        except BaseException as error:
            self._store.put_back(memory)
            if not isinstance(error, OSError):
                raise
            logger.exception("segment %d could not be read back from disk", segment.number)
            raise ObjectLostError(
                f"segment {segment.number}", f"it could not be read back from disk: {error}"
            ) from None
        finally:
            self._store.end_move(segment)

    async def read(self, segment: Segment, offset: int, length: int) -> bytes:
        """Bytes of a value that is on disk, read without bringing it back."""
        assert segment.place is not None
        return await self._in_thread(read_piece, segment.place, offset, length)

    def _discard(self, place: Place) -> None:
        """A value that was on disk is not needed any more."""
        if self._files.is_to_punch(place):
            self._run(self._empty(place))
        else:
            self._files.release(place)

    async def _empty(self, place: Place) -> None:
        if self._files.is_to_punch(place):
            await self._in_thread(punch, place)
        self._files.release(place)

    # --- threads -----------------------------------------------------------------------------
    async def _in_thread(self, function: Callable[..., T], *args: object) -> T:
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self._threads, function, *args)

    def _run(self, work: Coroutine[None, None, None]) -> None:
        task = asyncio.ensure_future(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def close(self) -> None:
        """Stop reading and writing, then give the disk back."""
        self._stopped.set()
        self.queue.close()
        self._threads.shutdown(wait=False, cancel_futures=True)
        tasks = [*self._tasks, *self._restores.values(), *self._readings.values()]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        self._memory_freeing.close()
        self._disk_freeing.close()
        self._files.close()
