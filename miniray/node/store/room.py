"""The admission queue of the object store: who gets memory next, and who is refused.

Claims are served first in, first out. A process that already holds memory may overtake claims that
wait for other processes, because they may be waiting for its memory. A claim waits as long as
values are on their way out of memory. When only memory that processes hold can come free, a claim
with an alternative on disk is refused at once; another one waits for at most
``store_full_timeout``. How memory comes free is ``spilling.py``.
"""

from __future__ import annotations

import asyncio
import collections
from typing import TYPE_CHECKING, Protocol

from miniray.common.config import config
from miniray.common.descriptors import OUT_OF_DESCRIPTORS
from miniray.exceptions import ObjectStoreFullError

if TYPE_CHECKING:
    from collections.abc import Callable

    from miniray.node.store.memories import Memory
    from miniray.node.store.segments import SegmentStore

#: Values that leave memory together when there are too many for this process's descriptors.
_AT_ONCE = 32


class Supply(Protocol):
    """What moves values out of memory."""

    @property
    def leaving(self) -> int:
        """Bytes that are on their way out of memory."""

    @property
    def failures(self) -> int:
        """How often something could not be written to disk."""

    def make_room(self, target: int, *, writes: bool) -> int:
        """Begin to move values out until so many bytes are in use.

        Args:
            target: Bytes.
            writes: Whether values may be written to disk.

        Returns:
            Bytes that it falls short.
        """

    def move_out(self, count: int, *, writes: bool) -> bool:
        """Begin to move so many values out, whatever their size; returns whether there are any.

        Args:
            count: How many.
            writes: Whether values may be written to disk.
        """

    def trouble(self) -> str:
        """Why the last value could not be written to disk, in a sentence."""


class Claim:
    """Memory that processes of this node need.

    Args:
        size: Bytes.
        asker: A process that needs it; more may join. None: none yet.
        waits: Whether it waits for memory that processes hold; else it has an alternative on disk.
        on_full: Called with the error when the claim could only wait for other processes, before
            it takes its alternative: askers that do not want that one leave.
    """

    __slots__ = ("askers", "failures", "on_full", "size", "turn", "waits", "writer")

    def __init__(
        self,
        size: int,
        asker: bytes | None = None,
        *,
        waits: bool = True,
        on_full: Callable[[ObjectStoreFullError], object] | None = None,
    ) -> None:
        self.size = size
        self.on_full = on_full
        self.waits = waits
        #: The process that is likely to have some memory mapped for writing.
        self.writer = asker or b""
        #: How many requests of each process need it.
        self.askers: collections.Counter[bytes] = collections.Counter()
        #: The memory, when its turn has come.
        self.turn: asyncio.Future[Memory]
        #: How often the disk had failed before it was first queued.
        self.failures: int | None = None
        if asker is not None:
            self.join(asker)

    def join(self, process: bytes) -> None:
        """Add one request of a process."""
        self.askers[process] += 1

    def leave(self, process: bytes) -> None:
        """Remove one request of a process, if it has any."""
        if self.askers[process] > 1:
            self.askers[process] -= 1
        else:
            del self.askers[process]


class AdmissionQueue:
    """All claims that cannot be served at once.

    Args:
        store: Of this node.
        supply: What makes room in it.
        holders: Tells in a sentence who holds how much of the store, for the error.
        node_id: Of the node, for the error.
    """

    def __init__(
        self,
        store: SegmentStore,
        supply: Supply,
        holders: Callable[[], str],
        node_id: bytes = b"",
    ) -> None:
        self._node_id = node_id
        self._store = store
        self._supply = supply
        self._holders = holders
        #: In the order in which they came, and their bytes.
        self._queue: dict[Claim, None] = {}
        self._wanted = 0
        self._due = False
        store.on_room = self.look_soon

    def __len__(self) -> int:
        return len(self._queue)

    async def get(self, claim: Claim) -> Memory:
        """Wait for memory. A claim that was refused may be queued again.

        Raises:
            ObjectStoreFullError: there is none, and none will come.
            OSError: there is no descriptor, and none will come.
            ConnectionError: all processes that asked have ended.
        """
        if claim.failures is None:
            claim.failures = self._supply.failures
        if claim.size > self._store.capacity:
            raise self._full(claim)
        if not self._queue:
            try:
                return self._store.take(claim.size, claim.writer)
            except ObjectStoreFullError:
                pass
            except OSError as error:
                if error.errno not in OUT_OF_DESCRIPTORS:
                    raise
        loop = asyncio.get_running_loop()
        claim.turn = loop.create_future()
        self._queue[claim] = None
        self._wanted += claim.size
        waiting = loop.create_task(self._expire(claim)) if claim.waits else None
        self._look()
        try:
            return await claim.turn
        except asyncio.CancelledError:
            if _has_memory(claim):
                self._store.put_back(claim.turn.result())  # it came too late
            raise
        finally:
            if waiting is not None:
                waiting.cancel()
            self._remove(claim)
            self.look_soon()

    async def _expire(self, claim: Claim) -> None:
        """Refuse a claim after its time, unless the disk is still at work."""
        while True:
            await asyncio.sleep(config().store_full_timeout)
            if not self._supply.leaving:
                self._refuse(claim, self._full(claim))
                return

    def _remove(self, claim: Claim) -> None:
        if claim in self._queue:
            del self._queue[claim]
            self._wanted -= claim.size

    def process_died(self, process: bytes) -> None:
        """Refuse the claims that nobody but a process needs, which is gone."""
        for claim in list(self._queue):
            if process in claim.askers:
                del claim.askers[process]
                if not claim.askers:
                    self._refuse(claim, ConnectionError("the process that asked has ended"))

    # --- serving -------------------------------------------------------------------
    def look_soon(self) -> None:
        """Serve the queue again: there may be more memory, or fewer processes that hold some."""
        if self._queue and not self._due:
            self._due = True
            asyncio.get_running_loop().call_soon(self._look)

    def _look(self) -> None:
        """Grant the claims that can have their memory, and make room for the others."""
        self._due = False
        while self._queue:
            first = next(iter(self._queue))
            if self._grant(first):
                continue
            writes = self._supply.failures == first.failures
            target = self._store.capacity - self._wanted
            if self._supply.make_room(target, writes=writes) > 0:
                self._store.tell_short()
            if self._grant(first):  # copies, and what is on disk already, are gone at once
                continue
            if not self._supply.leaving:
                self._settle(first)
            if first in self._queue:
                return

    def _grant(self, claim: Claim) -> bool:
        """Give a claim its memory, or its error; False if there is no room."""
        try:
            memory = self._store.take(claim.size, claim.writer)
        except ObjectStoreFullError:
            return False
        except OSError as error:
            if error.errno in OUT_OF_DESCRIPTORS and self._frees_descriptors(claim):
                return False
            self._refuse(claim, error)
            return True
        self._remove(claim)
        if claim.turn.done():
            self._store.put_back(memory)  # its task was cancelled
        else:
            claim.turn.set_result(memory)
        return True

    def _frees_descriptors(self, claim: Claim) -> bool:
        """Move values to disk, where they take no descriptor; False if none comes free."""
        if self._supply.leaving:
            return True
        writes = self._supply.failures == claim.failures
        if self._supply.move_out(_AT_ONCE, writes=writes):
            return True
        self._store.tell_short()
        return False

    def _refuse(self, claim: Claim, error: Exception) -> None:
        self._remove(claim)
        if not claim.turn.done():
            claim.turn.set_exception(error)

    def _settle(self, first: Claim) -> None:
        """Serve the queue when only memory that processes hold can come free."""
        for claim in list(self._queue):
            overtakes = claim is not first and any(map(self._store.holds, claim.askers))
            if overtakes and self._grant(claim):
                continue
            served_next = overtakes or claim is first
            if not claim.waits or (served_next and not self._store.others_hold(claim.askers)):
                self._refuse(claim, self._full(claim))

    def _full(self, claim: Claim) -> ObjectStoreFullError:
        store = self._store
        notes = []
        if claim.waits and claim.size <= store.capacity:  # else nobody reads it
            held = self._holders()
            if held:
                notes.append(f"It holds {held}.")
        if self._supply.failures != claim.failures:
            notes.append(self._supply.trouble())
        return ObjectStoreFullError(
            needed=claim.size,
            used=store.used,
            capacity=store.capacity,
            details=" ".join(notes),
            node_id=self._node_id.hex(),
        )

    def close(self) -> None:
        """Serve nobody any more."""
        self._store.on_room = _nothing


def _has_memory(claim: Claim) -> bool:
    turn = claim.turn
    return turn.done() and not turn.cancelled() and turn.exception() is None


def _nothing() -> None:
    """Ignore that there is more memory."""
