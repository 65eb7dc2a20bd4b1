"""The admission queue of the object store: which claim gets memory next, and which is refused.

Claims are served first in, first out. A process that already holds memory may overtake claims that
wait for other processes, because they may be waiting for its memory. A claim waits as long as
values are on their way out of memory. When only memory that processes hold can come free, a claim
with an alternative on disk is refused at once; any other waits for at most ``store_full_timeout``.
How memory comes free is ``spilling.py``.
"""

from __future__ import annotations

import asyncio
import collections
import dataclasses
import time
from typing import TYPE_CHECKING, Protocol

from miniray.common.config import config
from miniray.common.process_state import OUT_OF_DESCRIPTORS
from miniray.common.series import COUNTED
from miniray.exceptions import ObjectStoreFullError

if TYPE_CHECKING:
    from collections.abc import Callable

    from miniray.node.store.memories import Memory
    from miniray.node.store.segments import SegmentStore

#: Values that leave memory together when this process is out of descriptors.
_AT_ONCE = 32


class Evictions(Protocol):
    """Moves values out of memory."""

    @property
    def leaving(self) -> int:
        """Bytes that are on their way out of memory."""

    def make_room(self, target: int) -> int:
        """Begin to move values out until ``target`` bytes are in use; return the bytes missing."""

    def move_out(self, count: int) -> bool:
        """Begin to move some values out, whatever their size; return whether there are any."""

    def trouble(self, since: float) -> str:
        """Say why the last value could not be written to disk; empty if it could.

        Empty too if that was long before ``since`` (``time.monotonic``).
        """


@dataclasses.dataclass(slots=True, eq=False, repr=False)
class Claim:
    """A claim to memory for processes of this node."""

    #: Bytes.
    size: int
    #: A process that needs it, whose warm memory is preferred; more may join. Empty: none yet.
    writer: bytes = b""
    _: dataclasses.KW_ONLY
    #: Whether it waits for memory that processes hold; else it has an alternative on disk.
    waits: bool = True
    #: How many requests of each process need it.
    askers: collections.Counter[bytes] = dataclasses.field(default_factory=collections.Counter)
    #: The memory, once it is granted.
    turn: asyncio.Future[Memory] = dataclasses.field(init=False)
    #: When it was made (``time.monotonic``).
    made: float = dataclasses.field(default_factory=time.monotonic)

    def __post_init__(self) -> None:
        if self.writer:
            self.join(self.writer)

    def join(self, process: bytes) -> None:
        self.askers[process] += 1

    def leave(self, process: bytes) -> None:
        if self.askers[process] > 1:
            self.askers[process] -= 1
        else:
            del self.askers[process]


@dataclasses.dataclass(eq=False, repr=False)
class AdmissionQueue:
    """The claims that cannot be served at once.

    ``describe_holders`` says which processes hold how much of the store, for the error.
    """

    store: SegmentStore
    evictions: Evictions
    describe_holders: Callable[[], str]
    node_id: bytes

    def __post_init__(self) -> None:
        #: Oldest first, and their bytes.
        self._queue: dict[Claim, None] = {}
        self._wanted = 0
        #: Serves the queue until it is empty.
        self._serving: asyncio.Task[None] | None = None

    def __len__(self) -> int:
        return len(self._queue)

    async def get(self, claim: Claim) -> Memory:
        """Wait for memory. A claim that was refused may be queued again.

        Raises:
            ObjectStoreFullError: There is none, and none will come free.
            OSError: There is no descriptor, and none will come free.
            ConnectionError: All processes that asked have ended.
        """
        if claim.size > self.store.capacity:
            raise self._full(claim)
        loop = asyncio.get_running_loop()
        claim.turn = loop.create_future()
        if not self._queue and self._grant(claim):
            return claim.turn.result()
        self._queue[claim] = None
        self._wanted += claim.size
        began = time.monotonic()
        waiting = loop.create_task(self._expire(claim)) if claim.waits else None
        self._serve()
        if self._queue and (self._serving is None or self._serving.done()):
            self._serving = loop.create_task(self._keep_serving())
        try:
            return await claim.turn
        except asyncio.CancelledError:
            turn = claim.turn
            if turn.done() and not turn.cancelled() and turn.exception() is None:
                self.store.put_back(turn.result())  # it was granted too late
            raise
        finally:
            if waiting is not None:
                waiting.cancel()
            self._remove(claim)
            self.store.changed.set()
            COUNTED.count("object_room_wait_seconds_total", by=time.monotonic() - began)

    async def _expire(self, claim: Claim) -> None:
        """Refuse a claim after its time, unless the disk is still at work."""
        while True:
            await asyncio.sleep(config().store_full_timeout)
            if not self.evictions.leaving:
                self._refuse(claim, self._full(claim))
                return

    def _remove(self, claim: Claim) -> None:
        if claim in self._queue:
            del self._queue[claim]
            self._wanted -= claim.size

    def process_died(self, process: bytes) -> None:
        """Refuse the claims that only this process needs, which is gone."""
        for claim in list(self._queue):
            if process in claim.askers:
                del claim.askers[process]
                if not claim.askers:
                    self._refuse(claim, ConnectionError("the process that asked has ended"))

    # --- serving -------------------------------------------------------------------
    async def _keep_serving(self) -> None:
        """Serve the queue whenever memory may have come free, until the queue is empty."""
        while self._queue:
            await self.store.changed.wait()
            self._serve()

    def _serve(self) -> None:
        """Grant the claims that can have their memory, and begin to free it for the others."""
        self.store.changed.clear()
        while self._queue:
            first = next(iter(self._queue))
            if self._grant(first):
                continue
            if self.evictions.make_room(self.store.capacity - self._wanted) > 0:
                self.store.tell_short()
            if self._grant(first):  # copies, and what is on disk already, are gone at once
                continue
            if not self.evictions.leaving:
                self._settle(first)
            if first in self._queue:
                return

    def _grant(self, claim: Claim) -> bool:
        """Give a claim its memory, or its error; return False if there is no memory for it."""
        try:
            memory = self.store.take(claim.size, claim.writer)
        except ObjectStoreFullError:
            return False
        except OSError as error:
            if error.errno in OUT_OF_DESCRIPTORS and self._frees_descriptors():
                return False
            self._refuse(claim, error)
            return True
        self._remove(claim)
        if claim.turn.done():
            self.store.put_back(memory)  # whoever waited was cancelled
        else:
            claim.turn.set_result(memory)
        return True

    def _frees_descriptors(self) -> bool:
        """Move values to disk, where they take none; return False if no descriptor comes free."""
        if self.evictions.leaving or self.evictions.move_out(_AT_ONCE):
            return True
        self.store.tell_short()
        return False

    def _refuse(self, claim: Claim, error: Exception) -> None:
        self._remove(claim)
        if not claim.turn.done():
            claim.turn.set_exception(error)

    def _settle(self, first: Claim) -> None:
        """Serve the queue when only memory that processes hold can come free."""
        holders = self.store.holders()
        for claim in list(self._queue):
            overtakes = claim is not first and not holders.isdisjoint(claim.askers)
            if overtakes and self._grant(claim):
                continue
            served_next = overtakes or claim is first
            if not claim.waits or (served_next and not self._others_hold(claim, holders)):
                self._refuse(claim, self._full(claim))

    def _others_hold(self, claim: Claim, holders: set[bytes]) -> bool:
        return not holders <= claim.askers.keys() or self.store.has_memory_without_segment()

    def _full(self, claim: Claim) -> ObjectStoreFullError:
        store = self.store
        notes = [self.evictions.trouble(claim.made)]
        if claim.waits:  # else no process sees this error
            COUNTED.count("object_store_full_errors_total")
        if claim.waits and claim.size <= store.capacity:
            held = self.describe_holders()
            if held:
                notes.insert(0, f"It holds {held}.")
        return ObjectStoreFullError(
            needed=claim.size,
            used=store.used,
            capacity=store.capacity,
            details=" ".join(filter(None, notes)),
            node_id=self.node_id.hex(),
        )
