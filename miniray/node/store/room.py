"""Room in the object store: who waits for memory, in which order, and for how long.

Who asked first is served first. Who has memory in hand may pass those who wait for others, since
it may be what they wait for. Nobody waits for others for more than ``store_full_timeout``
altogether; how memory comes free is ``spilling.py``.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Protocol

from miniray.common.config import config
from miniray.common.descriptors import OUT_OF_DESCRIPTORS
from miniray.exceptions import ObjectStoreFullError

if TYPE_CHECKING:
    from collections.abc import Callable

    from miniray.node.store.memories import Memory
    from miniray.node.store.segments import SegmentStore

#: Seconds in which a process unmaps what it was told to, unless user code keeps it busy.
_RETURN_WITHIN = 2.0
#: Values that leave memory together when there are too many for this process's descriptors.
_AT_ONCE = 32
#: Seconds that a timer may be early.
_EARLY = 0.001


class Supply(Protocol):
    """Where memory comes from that somebody waits for."""

    @property
    def leaving(self) -> int:
        """Bytes that are on their way out of memory."""

    @property
    def arriving(self) -> bool:
        """Whether something is being read back, into memory that nobody has mapped yet."""

    @property
    def failures(self) -> int:
        """How often something could not be written to disk."""

    def make_room(self, target: int, *, writes: bool) -> int:
        """Begin to move values out until so many bytes are in use; returns how many too many.

        Args:
            target: Bytes.
            writes: Whether values may be written to disk.
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
        patient: Whether to wait for what other processes have mapped.
        on_stuck: Called with what to tell the askers that are not patient, when nothing is left
            to wait for but other processes.
    """

    __slots__ = ("askers", "ends", "failures", "failures_before", "hurried", "on_stuck", "patient",
                 "room", "size", "turn", "writer")  # fmt: skip

    def __init__(
        self,
        size: int,
        asker: bytes | None = None,
        *,
        patient: bool = True,
        on_stuck: Callable[[ObjectStoreFullError], object] | None = None,
    ) -> None:
        self.size = size
        self.patient = patient
        self.on_stuck = on_stuck
        #: Who is likely to have some memory mapped for writing.
        self.writer = asker or b""
        #: How many requests of each process need it.
        self.askers: dict[bytes, int] = {}
        #: Somebody who needs it is not patient, and has not been told that it is stuck.
        self.hurried = False
        #: Where it waits, and until when by that one's clock.
        self.room: Room | None = None
        self.ends = 0.0
        #: The memory, when its turn has come.
        self.turn: asyncio.Future[Memory]
        #: How often the disk had failed when it began to wait, this time and the first time.
        self.failures = 0
        self.failures_before: int | None = None
        if asker is not None:
            self.join(asker)

    def join(self, process: bytes) -> None:
        """One more request of a process needs it."""
        self.askers[process] = self.askers.get(process, 0) + 1
        if self.room is not None:
            self.room.joined(self, process)

    def leave(self, process: bytes) -> None:
        """One of them does not any more."""
        count = self.askers.pop(process, 0)
        if count > 1:
            self.askers[process] = count - 1
        elif count and self.room is not None:
            self.room.left(self, process)

    def hurry(self) -> None:
        """Somebody needs it who is not patient."""
        self.hurried = True
        if self.room is not None:
            self.room.hurried(self)


class Room:
    """All who wait for memory.

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
        #: In the order in which they came; the same by process.
        self._queue: dict[Claim, None] = {}
        self._of: dict[bytes, dict[Claim, None]] = {}
        #: Those of them that somebody needs who is not patient.
        self._hurried: dict[Claim, None] = {}
        #: Their bytes.
        self._wanted = 0
        #: How many were given memory that they have not put anything in yet.
        self._given = 0
        self._due = False
        #: Seconds that the first waited for others, whoever it was, and since when it does again:
        #: a clock that stands still while what it needs is on its way out of memory.
        self._waited = 0.0
        self._since: float | None = None
        #: Until when processes are expected to unmap what they were told to.
        self._returns_until: float | None = None
        self._timer: asyncio.TimerHandle | None = None
        store.on_room = self.look_soon

    def __len__(self) -> int:
        return len(self._queue)

    def is_free(self, size: int) -> bool:
        """Whether so many bytes can be taken without overtaking who waits for room."""
        if not self._wanted:
            return True
        return self._store.memories.taken + self._wanted + size <= self._store.capacity

    async def get(self, claim: Claim) -> Memory:
        """Wait for memory. A claim that was refused may be made again.

        Raises:
            ObjectStoreFullError: there is no room, and none will come.
            OSError: there is no descriptor, and none will come.
            ConnectionError: all processes that asked have ended.
        """
        if claim.failures_before is None:
            claim.failures_before = self._supply.failures
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
        self._enter(claim)
        try:
            return await claim.turn
        except asyncio.CancelledError:
            if _has_memory(claim):
                self._store.put_back(claim.turn.result())  # it came too late
            raise
        finally:
            self._remove(claim)
            if _has_memory(claim):
                self._given -= 1
                self.look_soon()

    def _enter(self, claim: Claim) -> None:
        claim.room = self
        claim.turn = asyncio.get_running_loop().create_future()
        claim.failures = self._supply.failures
        claim.ends = self._clock() + config().store_full_timeout
        self._queue[claim] = None
        self._wanted += claim.size
        for process in claim.askers:
            self.joined(claim, process)
        if claim.hurried or not claim.patient:
            self._hurried[claim] = None
        self._look()

    def _remove(self, claim: Claim) -> None:
        if claim not in self._queue:
            return
        del self._queue[claim]
        self._wanted -= claim.size
        self._hurried.pop(claim, None)
        for process in claim.askers:
            self.left(claim, process)
        claim.room = None
        self.look_soon()

    # --- who asks ------------------------------------------------------------------
    def joined(self, claim: Claim, process: bytes) -> None:
        """A process needs what a claim is for."""
        self._of.setdefault(process, {})[claim] = None

    def left(self, claim: Claim, process: bytes) -> None:
        """A process needs it no more."""
        claims = self._of[process]
        del claims[claim]
        if not claims:
            del self._of[process]

    def hurried(self, claim: Claim) -> None:
        """Somebody needs it who is not patient."""
        self._hurried[claim] = None
        self.look_soon()

    def process_died(self, process: bytes) -> None:
        """A process is gone, and needs nothing any more."""
        for claim in list(self._of.get(process, ())):
            del claim.askers[process]
            self.left(claim, process)
            if not claim.askers:
                self._refuse(claim, ConnectionError("the process that asked has ended"))

    # --- serving -------------------------------------------------------------------
    def look_soon(self) -> None:
        """Something has changed that those who wait may wait for."""
        if self._queue and not self._due:
            self._due = True
            asyncio.get_running_loop().call_soon(self._look)

    def _look(self) -> None:
        """Give memory to those who can have it, and see to it that there is more."""
        self._due = False
        while self._queue:
            first = next(iter(self._queue))
            if self._grant(first):
                continue
            asked = self._make_room(first)
            if self._grant(first):  # copies, and what is on disk already, are gone at once
                continue
            if self._supply.leaving or self._returns(asked=asked) or not self._settle(first):
                break
        self._set_timer()

    def _grant(self, claim: Claim) -> bool:
        """Give a claim its memory; False if there is no room."""
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
            self._store.put_back(memory)  # who waited was cancelled
        else:
            claim.turn.set_result(memory)
            self._given += 1
        return True

    def _frees_descriptors(self, claim: Claim) -> bool:
        """See to it that a claim finds a descriptor; False if none comes free.

        What is on disk takes none.
        """
        if self._supply.leaving:
            return True
        writes = self._supply.failures == claim.failures
        if self._supply.move_out(_AT_ONCE, writes=writes):
            return True
        return self._returns(asked=self._store.ask_keepers(1))

    def _refuse(self, claim: Claim, error: Exception) -> None:
        self._remove(claim)
        if not claim.turn.done():
            claim.turn.set_exception(error)

    def _make_room(self, first: Claim) -> bool:
        """Begin to; returns whether processes were asked for what they keep."""
        writes = self._supply.failures == first.failures
        short = self._supply.make_room(self._store.capacity - self._wanted, writes=writes)
        return short > 0 and self._store.ask_keepers(short)

    def _returns(self, *, asked: bool) -> bool:
        """Whether processes are about to unmap what they keep, unless they are busy."""
        if not self._store.returning():
            self._returns_until = None
            return False
        now = asyncio.get_running_loop().time()
        if asked or self._returns_until is None:
            self._returns_until = now + _RETURN_WITHIN
        return now + _EARLY < self._returns_until

    def _settle(self, first: Claim) -> bool:
        """Only what processes have mapped can come back: say who waits for that.

        Returns:
            Whether anything has changed by it.
        """
        store = self._store
        for claims in list(self._of.values()):
            claim = next(iter(claims))
            if claim is first or not any(map(store.holds, claim.askers)):
                continue
            if self._grant(claim):
                return True
            if not self._may_return(claim):
                self._refuse(claim, self._full(claim))
                return True
        hurried, self._hurried = self._hurried, {}
        for claim in hurried:
            claim.hurried = False
            if not claim.patient:
                self._refuse(claim, self._full(claim))
            elif claim.on_stuck is not None:
                claim.on_stuck(self._full(claim, named=False))
        if first in self._queue and not self._may_return(first):
            self._refuse(first, self._full(first))
        return first not in self._queue

    def _may_return(self, claim: Claim) -> bool:
        """Whether any but those who wait for a claim have memory."""
        if self._given or self._supply.arriving:
            return True  # whoever it is for
        return self._store.is_held_by_others(claim.askers)

    def _full(self, claim: Claim, *, named: bool = True) -> ObjectStoreFullError:
        store = self._store
        notes = []
        if claim.size <= store.capacity:
            # Who is not patient asks again, so nobody would read who holds what.
            held = self._holders() if named and claim.patient else ""
            if held:
                notes.append(f"It holds {held}.")
        if self._supply.failures != claim.failures_before:
            notes.append(self._supply.trouble())
        return ObjectStoreFullError(
            needed=claim.size,
            used=store.used,
            capacity=store.capacity,
            details=" ".join(notes),
            node_id=self._node_id.hex(),
        )

    # --- time ----------------------------------------------------------------------
    def _clock(self) -> float:
        if self._since is None:
            return self._waited
        return self._waited + asyncio.get_running_loop().time() - self._since

    def _set_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        first = next(iter(self._queue), None)
        waits = first is not None and not self._is_coming(first)
        if waits != (self._since is not None):
            self._waited = self._clock()
            self._since = asyncio.get_running_loop().time() if waits else None
        if first is None:
            self._returns_until = None
            return
        loop = asyncio.get_running_loop()
        ends = [] if self._since is None else [loop.time() + first.ends - self._clock()]
        if self._returns_until is not None and loop.time() < self._returns_until:
            ends.append(self._returns_until)
        if ends:
            self._timer = loop.call_at(min(ends), self._time_is_up)

    def _is_coming(self, claim: Claim) -> bool:
        """Whether what is on its way out of memory is as much as a claim needs."""
        leaving = self._supply.leaving
        taken = self._store.memories.taken
        return bool(leaving) and taken - leaving + claim.size <= self._store.capacity

    def _time_is_up(self) -> None:
        """The first has waited long enough; so may have those behind it, which came later."""
        self._timer = None
        while self._queue:
            first = next(iter(self._queue))
            if first.ends > self._clock() + _EARLY:
                break
            self._refuse(first, self._full(first))
        self._look()

    def close(self) -> None:
        """Nobody is served any more."""
        if self._timer is not None:
            self._timer.cancel()
        self._store.on_room = _nothing


def _has_memory(claim: Claim) -> bool:
    turn = claim.turn
    return turn.done() and not turn.cancelled() and turn.exception() is None


def _nothing() -> None:
    """Nobody waits."""
