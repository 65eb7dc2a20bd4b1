"""Spilling: when the memory of the object store is full, values move to disk, and back.

Memory comes from values that no process has mapped, least recently used first: copies of other
nodes' values are evicted, values of this node are written to disk unless they are there already.
Requests for memory wait for that, first in, first out. They wait for mapped values only if the
disk is full, and for some seconds: else values are then written to disk by their writers, and
mapped there by their readers.
"""

from __future__ import annotations

import asyncio
import dataclasses
import itertools
import logging
import time
from typing import TYPE_CHECKING

from miniray.common.config import config
from miniray.common.names import format_bytes
from miniray.common.process_state import OUT_OF_DESCRIPTORS
from miniray.common.series import COUNTED
from miniray.common.spans import SPANS
from miniray.exceptions import ObjectLostError, ObjectStoreFullError
from miniray.node.base.clients import run_in
from miniray.node.store.spill_files import DISK_IS_FULL, DiskPlace

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

    from miniray.node.store.memories import Memory
    from miniray.node.store.segments import Copies, Segment

logger = logging.getLogger(__name__)

#: Seconds without writes after a failed one.
_AFTER_FAILURE = 10.0
#: Values that leave memory together when this process is out of descriptors.
_AT_ONCE = 32


@dataclasses.dataclass(slots=True, eq=False, repr=False)
class _Claim:
    """A request for memory that waits for values to leave."""

    #: Bytes.
    size: int
    #: The process that will write, whose warm memory is preferred; empty: any.
    writer: bytes
    #: Whether it waits for mapped values too.
    patient: bool
    #: The memory; None if only mapped values are in the way.
    turn: asyncio.Future[Memory | None]


class Spilling:
    """Frees memory in the store that the copies are in.

    ``describe_holders`` says which processes hold how much of it, for the error.
    """

    def __init__(self, copies: Copies, describe_holders: Callable[[], str], node_id: bytes) -> None:
        self._copies = copies
        self._store = store = copies.store
        self._files = store.files
        self._describe_holders = describe_holders
        self._node_id = node_id
        #: Oldest first, and their bytes.
        self._queue: dict[_Claim, None] = {}
        self._wanted = 0
        #: Serves the queue until it is empty.
        self._serving: asyncio.Task[None] | None = None
        #: Values that are being written to disk.
        self._tasks: set[asyncio.Task[None]] = set()
        #: Values that are read back, by segment.
        self._restores: dict[int, asyncio.Task[None]] = {}
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

    @property
    def waiting(self) -> int:
        """The number of requests that wait for memory."""
        return len(self._queue)

    # --- requests for memory -----------------------------------------------------------------
    async def reserve(self, size: int, writer: bytes = b"") -> Memory | DiskPlace:
        """Reserve memory, or a place on disk if only mapped values are in the way; wait for it.

        Raises:
            ObjectStoreFullError: The disk is full too, and processes went on using what they have.
            OSError: There is no descriptor, and none will come free.
        """
        space = await self._take(size, writer) or await self._place_for(size)
        if space is None:
            space = await self._take(size, writer, config().store_full_timeout)
        if space is not None:
            return space
        held = self._describe_holders()
        raise self.full(size, f"It holds {held}." if held else "", self._trouble())

    def full(self, size: int, *notes: str) -> ObjectStoreFullError:
        """Make the error of a process for whose value there is no space."""
        COUNTED.count("object_store_full_errors_total")
        return ObjectStoreFullError(
            needed=size,
            used=self._store.used,
            capacity=self._store.capacity,
            details=" ".join(filter(None, notes)),
            node_id=self._node_id.hex(),
        )

    def give_back(self, space: Memory | DiskPlace) -> None:
        """Return a reservation that is not needed after all."""
        if isinstance(space, DiskPlace):
            self._files.release(space)
        else:
            self._store.put_back(space)

    async def _take(self, size: int, writer: bytes, patience: float = 0.0) -> Memory | None:
        """Wait for memory as long as values leave it; None if only mapped values are left.

        ``patience``: seconds to wait for that too.

        Raises:
            OSError: There is no descriptor, and none will come free.
        """
        if size > self._store.capacity:  # a copy of a larger store's value
            return None
        loop = asyncio.get_running_loop()
        claim = _Claim(size, writer, patience > 0, loop.create_future())
        if not self._queue and self._grant(claim):
            return claim.turn.result()
        self._queue[claim] = None
        self._wanted += size
        began = time.monotonic()
        self._serve()
        if self._queue and (self._serving is None or self._serving.done()):
            self._serving = loop.create_task(self._keep_serving())
        try:
            return await asyncio.wait_for(claim.turn, patience or None)
        except asyncio.TimeoutError:  # which Python 3.12 may raise although it has been granted
            turn = claim.turn
            return turn.result() if turn.done() and not turn.cancelled() else None
        except asyncio.CancelledError:
            turn = claim.turn
            if turn.done() and not turn.cancelled() and turn.exception() is None:
                memory = turn.result()
                if memory is not None:
                    self._store.put_back(memory)  # it was granted too late
            raise
        finally:
            self._remove_claim(claim)
            self._store.changed.set()
            COUNTED.count("object_room_wait_seconds_total", by=time.monotonic() - began)

    def _remove_claim(self, claim: _Claim) -> None:
        if claim in self._queue:
            del self._queue[claim]
            self._wanted -= claim.size

    async def _keep_serving(self) -> None:
        """Serve the queue whenever memory may have come free, until the queue is empty."""
        while self._queue:
            await self._store.changed.wait()
            self._serve()

    def _serve(self) -> None:
        """Grant the requests that can have their memory, and begin to free it for the others."""
        self._store.changed.clear()
        for claim in [*self._queue]:
            if self._grant(claim):
                continue
            if self.make_room(self._store.capacity - self._wanted) > 0:
                self._store.tell_short()
            if self._grant(claim):  # copies, and what is on disk already, are gone at once
                continue
            if self._is_moving_out:
                return
            if not claim.patient:
                self._answer(claim, None)

    def _grant(self, claim: _Claim) -> bool:
        """Give a request its memory, or its error; return False if there is no memory for it."""
        try:
            memory = self._store.take(claim.size, claim.writer)
        except ObjectStoreFullError:
            return False
        except OSError as error:
            if error.errno in OUT_OF_DESCRIPTORS and self._frees_descriptors():
                return False
            self._remove_claim(claim)
            if not claim.turn.done():
                claim.turn.set_exception(error)
            return True
        self._answer(claim, memory)
        return True

    def _answer(self, claim: _Claim, memory: Memory | None) -> None:
        self._remove_claim(claim)
        if not claim.turn.done():
            claim.turn.set_result(memory)
        elif memory is not None:
            self._store.put_back(memory)  # the waiter was cancelled

    def _frees_descriptors(self) -> bool:
        """Move values to disk, where they take none; return False if no descriptor comes free."""
        if self._is_moving_out:
            return True
        victims = list(itertools.islice(self._removable(), _AT_ONCE))
        self._remove(victims)
        if not victims:
            self._store.tell_short()
        return bool(victims)

    # --- out ---------------------------------------------------------------------------------
    @property
    def _is_moving_out(self) -> bool:
        """Return whether values are being written to disk, or memory goes back to the kernel."""
        return self._leaving + self._store.memories.closing > 0

    @property
    def _writes(self) -> bool:
        """Return whether values may be written to disk: the last write has not just failed."""
        return not self._failure or time.monotonic() - self._failed_at >= _AFTER_FAILURE

    def _trouble(self) -> str:
        """Return why the last value could not be written to disk; empty if it could."""
        if not self._failure:
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
            place = self._files.reserve(segment.size)
            try:
                with SPANS.timed("spill", format_bytes(segment.size)):
                    await self._files.write(place, segment.fd)
            except BaseException:
                self._files.release(place)
                raise
            self._failure = ""
            self.written += segment.size
            segment.place = place
        except OSError as error:
            await self._disk_failed(error)
        finally:
            self._leaving -= segment.capacity
            self._store.end_move(segment)
            if segment.place is not None and self._store.is_idle(segment):
                self._store.drop_memory(segment)
            self._store.changed.set()  # whatever the outcome

    async def _place_for(self, size: int) -> DiskPlace | None:
        """Find a place on disk that a process may write to; None if the disk is full."""
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
            place = self._files.reserve_file(size)
            try:
                await self._files.allocate(place)
            except BaseException:
                self._files.release(place)
                raise
        except OSError as error:
            if error.errno in DISK_IS_FULL and self._copies.drop_from_disk(size):
                await self._files.all_closed()
                return await self._make_place(size)
            if error.errno not in OUT_OF_DESCRIPTORS:  # spilled values need none of their own
                await self._disk_failed(error)
            return None
        self._failure = ""
        return place

    async def _disk_failed(self, error: OSError) -> None:
        taken = await self._files.describe_disk() if error.errno in DISK_IS_FULL else ""
        failure = error.strerror or str(error)
        if time.monotonic() - self._failed_at >= _AFTER_FAILURE:
            logger.warning("could not write to %s: %s", self._files.folder, failure)
        self._failure, self._taken, self._failed_at = failure, taken, time.monotonic()

    # --- back --------------------------------------------------------------------------------
    async def restore(self, segment: Segment) -> bool:
        """Read a value back that a process has mapped; all its waiters share one read.

        Returns:
            False if there is no memory for it: it can be mapped on disk.

        Raises:
            ObjectLostError: The disk cannot be read, or the value was freed.
        """
        number = segment.number
        if not segment.in_memory:
            restore = self._restores.get(number)
            if restore is None:
                restore = self._restores[number] = asyncio.ensure_future(self._restore(segment))
                restore.add_done_callback(lambda task: self._restored(number, task))
            await asyncio.shield(restore)
            if not self._store.has(segment):
                raise ObjectLostError(f"segment {number}", "it was freed meanwhile")
        return segment.in_memory

    def _restored(self, number: int, task: asyncio.Task[None]) -> None:
        del self._restores[number]
        if not task.cancelled():
            task.exception()  # all waiters may be gone: then the result has no other reader

    async def _restore(self, segment: Segment) -> None:
        try:
            memory = await self._take(segment.size, b"")
        except OSError:  # the process is out of descriptors
            return
        if memory is None:
            return
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
        tasks = [*self._tasks, *self._restores.values()]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        self._files.close()
