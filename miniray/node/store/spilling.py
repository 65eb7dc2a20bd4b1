"""What happens when the memory of the object store is full: values move to disk, and back.

Memory comes from what no process has mapped, least recently used first: copies of other nodes'
values are evicted, values of this node are written to disk unless they are there already. The
admission queue (``admission_queue.py``) orders the claims to it. While the disk has room, no claim
waits for what processes have mapped: values are then written to disk by their writers, and mapped
there by their readers.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import itertools
import logging
import time
from typing import TYPE_CHECKING

from miniray.common.config import config
from miniray.common.names import format_bytes
from miniray.common.process_state import OUT_OF_DESCRIPTORS
from miniray.common.spans import SPANS
from miniray.exceptions import ObjectLostError, ObjectStoreFullError
from miniray.node.base.tasks import run_in
from miniray.node.store.admission_queue import AdmissionQueue, Claim
from miniray.node.store.spill_files import DISK_IS_FULL, DiskPlace

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Iterable, Iterator

    from miniray.node.store.memories import Memory
    from miniray.node.store.segments import Copies, Segment

logger = logging.getLogger(__name__)

#: Seconds after a failed write in which no other is tried.
_AFTER_FAILURE = 10.0


@dataclasses.dataclass(slots=True, eq=False, repr=False)
class _Restore:
    """A value that is read back, for all processes that wait for it."""

    claim: Claim
    task: asyncio.Task[None]


class Spilling:
    """Makes memory come free in the store that the copies are in.

    ``describe_holders`` says which processes hold how much of it, for the error.
    """

    def __init__(self, copies: Copies, describe_holders: Callable[[], str], node_id: bytes) -> None:
        self._copies = copies
        self._store = store = copies.store
        self._files = store.files
        self.queue = AdmissionQueue(store, self, describe_holders, node_id)
        #: Values that are being written to disk.
        self._tasks: set[asyncio.Task[None]] = set()
        #: By segment.
        self._restores: dict[int, _Restore] = {}
        #: Bytes of memory that are being written to disk.
        self._leaving = 0
        #: Bytes that were written to disk, and read back, in all.
        self.written = self.restored = 0
        #: Why the last value could not be written, empty if it could; and how full the disk was.
        self._failure = self._taken = ""
        self._failed_at = -_AFTER_FAILURE

    @property
    def spilled(self) -> int:
        return self._files.used

    # --- out ---------------------------------------------------------------------------------
    @property
    def leaving(self) -> int:
        """Bytes that are being written to disk, or go back to the kernel."""
        return self._leaving + self._store.memories.closing

    @property
    def _writes(self) -> bool:
        """Whether values may be written to disk: it has not failed a moment ago."""
        return not self._failure or time.monotonic() - self._failed_at >= _AFTER_FAILURE

    def trouble(self, since: float) -> str:
        """Say why the last value could not be written to disk; empty if it could.

        Empty too if that was long before ``since``: nothing was to be written then.
        """
        if not self._failure or self._failed_at < since - _AFTER_FAILURE:
            return ""
        failed = f"Nothing could be moved to {self._files.folder}: {self._failure}."
        return f"{failed} {self._taken}" if self._taken else failed

    def spill_ahead(self) -> None:
        """Move out what exceeds ``spill_threshold``, so that the next writer need not wait."""
        target = int(self._store.capacity * config().spill_threshold)
        exceeds = self._store.used - self._leaving > target
        if exceeds and self._writes and self.make_room(target) > 0:
            self._store.tell_short()

    def make_room(self, target: int) -> int:
        """Begin to move values out until ``target`` bytes are in use; return the bytes missing."""
        excess = self._store.used - self._leaving - target
        victims = []
        for segment in self._removable():
            if excess <= 0:
                break
            excess -= segment.capacity
            victims.append(segment)
        self._remove(victims)
        return excess

    def move_out(self, count: int) -> bool:
        victims = list(itertools.islice(self._removable(), count))
        self._remove(victims)
        return bool(victims)

    def _removable(self) -> Iterator[Segment]:
        """Iterate over what may leave memory, the least recently used first."""
        writes = self._writes
        for segment in self._store.idle():
            if writes or segment.place is not None or self._copies.may_be_evicted(segment):
                yield segment

    def _remove(self, victims: Iterable[Segment]) -> None:
        for segment in victims:
            if self._copies.may_be_evicted(segment):
                self._copies.drop(segment.number)
            elif segment.place is not None:
                self._store.drop_memory(segment)
            else:
                self._leaving += segment.capacity
                self._store.begin_move(segment)
                run_in(self._tasks, self._spill(segment))

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
            self._store.changed.set()  # whatever came of it

    async def _written(self, segment: Segment) -> DiskPlace:
        with SPANS.timed("spill", format_bytes(segment.size)):
            place = await self._place(
                lambda: self._files.reserve(segment.size),
                lambda place: self._files.write(place, segment.fd),
            )
        self.written += segment.size
        return place

    async def _place(
        self, reserve: Callable[[], DiskPlace], use: Callable[[DiskPlace], Awaitable[None]]
    ) -> DiskPlace:
        """Use a place on disk for the first time; evict copies there if it has no room."""
        while True:
            place = reserve()
            try:
                await use(place)
                self._failure = ""
                return place
            except BaseException as error:
                self._files.release(place)
                if not isinstance(error, OSError) or not await self._evict_copies(error, place):
                    raise

    async def _evict_copies(self, error: OSError, place: DiskPlace) -> bool:
        """Evict unmapped copies on disk if room is missing there; return whether to try again."""
        if error.errno not in DISK_IS_FULL:
            return False
        needed = place.size
        for segment in self._store.resting():
            if needed <= 0:
                break
            if self._copies.may_be_evicted(segment):
                needed -= segment.size
                self._copies.drop(segment.number)
        if needed == place.size:
            return False
        await self._files.all_closed()
        return True

    async def room_for(self, claim: Claim) -> Memory | DiskPlace:
        """Wait for memory, or a place on disk if only what processes have mapped is in the way.

        Raises:
            ObjectStoreFullError: The disk is full too.
            OSError: There is no descriptor, and none will come free.
            ConnectionError: All processes that asked have ended.
        """
        claim.waits = False
        with contextlib.suppress(ObjectStoreFullError):
            return await self.queue.get(claim)
        place = await self._place_for(claim.size)
        if place is not None:
            return place
        claim.waits = True
        return await self.queue.get(claim)

    def give_back(self, room: Memory | DiskPlace) -> None:
        """Return what ``room_for`` found and is not needed after all."""
        if isinstance(room, DiskPlace):
            self._files.release(room)
        else:
            self._store.put_back(room)

    async def _place_for(self, size: int) -> DiskPlace | None:
        """Find a place on disk that a process may write to; None if the disk has no room."""
        making = asyncio.ensure_future(self._make_place(size))
        try:
            return await asyncio.shield(making)
        except asyncio.CancelledError:
            making.add_done_callback(self._release_made)  # a thread may be at its file
            raise

    def _release_made(self, making: asyncio.Task[DiskPlace | None]) -> None:
        place = None if making.cancelled() else making.result()
        if place is not None:
            self._files.release(place)

    async def _make_place(self, size: int) -> DiskPlace | None:
        try:
            return await self._place(lambda: self._files.reserve_file(size), self._files.allocate)
        except OSError as error:
            if error.errno not in OUT_OF_DESCRIPTORS:  # spilled values need none of their own
                await self._disk_failed(error)
            return None

    async def _disk_failed(self, error: OSError) -> None:
        taken = ""
        if error.errno in DISK_IS_FULL:
            await self._files.all_closed()  # what was not written in whole is no value there
            taken = await self._files.describe_disk()
        failure = error.strerror or str(error)
        if time.monotonic() - self._failed_at >= _AFTER_FAILURE:
            logger.warning("could not write to %s: %s", self._files.folder, failure)
        self._failure, self._taken, self._failed_at = failure, taken, time.monotonic()

    # --- back --------------------------------------------------------------------------------
    async def restore(self, segment: Segment, asker: bytes) -> None:
        """Read a value back that a process has mapped; all that wait for it share one read.

        Raises:
            ObjectLostError: The disk cannot be read, or the value was freed.
            ObjectStoreFullError: Only what processes have mapped is in the way.
            OSError: No descriptor is left. In both cases the value can be mapped on disk.
        """
        number = segment.number
        while not segment.in_memory:
            restore = self._restores.get(number)
            if restore is None or restore.task.done():
                claim = Claim(segment.size, asker, waits=False)
                task = asyncio.ensure_future(self._restore(segment, claim))
                restore = self._restores[number] = _Restore(claim, task)
                task.add_done_callback(lambda task: self._restored(number, task))
            else:
                restore.claim.join(asker)
            await asyncio.shield(restore.task)
            if not self._store.has(segment):
                raise ObjectLostError(f"segment {number}", "it was freed meanwhile")

    def _restored(self, number: int, task: asyncio.Task[None]) -> None:
        if self._restores[number].task is task:
            del self._restores[number]
        if not task.cancelled():
            task.exception()  # all that waited may be gone, then nothing else looks at it

    async def _restore(self, segment: Segment, claim: Claim) -> None:
        memory = await self.queue.get(claim)
        if segment.in_memory or not self._store.has(segment):
            self._store.put_back(memory)
            return
        assert segment.place is not None
        self._store.begin_move(segment)
        try:
            with SPANS.timed("restore", format_bytes(segment.size)):
                await self._files.read(segment.place, memory.fd)
            segment.memory = memory
            self.restored += segment.size
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
        assert segment.place is not None
        return await self._files.read_piece(segment.place, offset, length)

    async def close(self) -> None:
        """Stop reading and writing, then give the disk back."""
        self._files.stop()
        tasks = [*self._tasks, *(restore.task for restore in self._restores.values())]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        self._files.close()
