"""Who wants copies of other nodes' values here: one transfer for all, ended when nobody wants it.

A process that maps a value never waits for a turn. Of what is fetched before anybody reads it, only
so much is on its way at a time. How a value gets here is ``transfers.py``.
"""

from __future__ import annotations

import asyncio
import dataclasses
from typing import TYPE_CHECKING

from miniray.exceptions import ObjectLostError
from miniray.node.base.tasks import run_in
from miniray.node.store.segments import home_of, segment_of

if TYPE_CHECKING:
    from miniray.node.store.segments import Copies, Key, Segment
    from miniray.node.transfer.transfers import Transfers

#: Part of the store that each kind of what is fetched ahead may take.
_SHARE = 4

#: A process, and the number of its request.
_Name = tuple[bytes, int]


@dataclasses.dataclass(slots=True, eq=False, repr=False)
class Waiter:
    """One request of a process for a copy."""

    name: _Name
    key: Key
    size: int
    #: The copy, mapped for the process if it wants that.
    segment: asyncio.Future[Segment]
    #: Whether the copy is mapped for the process when it is here.
    maps: bool
    #: Where it waits for its turn, and counts; None if the process reads it now.
    lane: _Lane | None = None
    #: Its transfer, while that is on.
    pull: _Pull | None = None


@dataclasses.dataclass(slots=True, eq=False, repr=False)
class _Lane:
    """What is fetched ahead, of one kind: first in, first out."""

    #: Whether it is for calls that have not begun. These values count until the call has them, and
    #: none is fetched into a full store: it is fetched when it is needed.
    for_calls: bool
    queue: dict[_Name, Waiter] = dataclasses.field(default_factory=dict)
    #: How many requests for each value have begun; it counts once.
    begun: dict[Key, int] = dataclasses.field(default_factory=dict)
    #: Bytes of these values.
    bytes: int = 0

    def next(self, limit: int) -> Waiter | None:
        """Return the first that waits, if there is room for it: one at least may begin."""
        waiter = next(iter(self.queue.values()), None)
        if waiter is None or not self.bytes or waiter.key in self.begun:
            return waiter
        return waiter if self.bytes + waiter.size <= limit else None

    def begin(self, waiter: Waiter) -> None:
        """Count one that has waited for its turn, until it is removed."""
        del self.queue[waiter.name]
        wanted = self.begun.get(waiter.key, 0)
        self.begun[waiter.key] = wanted + 1
        if not wanted:
            self.bytes += waiter.size

    def remove(self, waiter: Waiter) -> None:
        """Remove one from the queue, or count it off."""
        if self.queue.pop(waiter.name, None) is not None:
            return
        self.begun[waiter.key] -= 1
        if not self.begun[waiter.key]:
            del self.begun[waiter.key]
            self.bytes -= waiter.size


@dataclasses.dataclass(slots=True, eq=False, repr=False)
class _Pull:
    """One transfer, and who waits for it."""

    key: Key
    size: int
    task: asyncio.Task[None] = dataclasses.field(init=False)
    waiters: set[Waiter] = dataclasses.field(default_factory=set)


@dataclasses.dataclass(eq=False, repr=False)
class Pulls:
    """All requests for copies."""

    #: Brings them.
    transfers: Transfers
    #: Where a copy is added when it is whole, and the store that it is in.
    copies: Copies

    def __post_init__(self) -> None:
        self._store = self.copies.store
        self._pulls: dict[Key, _Pull] = {}
        #: By process and number of its request.
        self._waiters: dict[_Name, Waiter] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._arguments = _Lane(for_calls=True)
        self._awaited = _Lane(for_calls=False)

    def __len__(self) -> int:
        return len(self._pulls)

    @property
    def ahead(self) -> int:
        """How many values are wanted before anybody reads them."""
        return sum(waiter.lane is not None for waiter in self._waiters.values())

    # --- who wants a copy --------------------------------------------------------------
    def wait(self, key: Key, size: int, process_id: bytes, request: int) -> asyncio.Future[Segment]:
        """Have a process wait for a copy, which is mapped for it when it is here.

        Args:
            key: Of a value of which there is no copy here.
            size: Bytes of the segment.
            process_id: Who waits.
            request: A number of its own, for ``withdraw``.
        """
        waiter = self._add(key, size, (process_id, request), maps=True)
        self._begin(waiter)
        return waiter.segment

    def prefetch(self, process_id: bytes, request: int, key: Key, size: int) -> None:
        """Fetch an argument of a call that has arrived, if there is room.

        It counts until ``withdraw``: when the call has it, or does not want it any more.
        """
        waiter = self._add(key, size, (process_id, request), maps=False)
        self._queue(waiter, self._arguments)

    async def fetch(self, process_id: bytes, request: int, key: Key, size: int) -> None:
        """Fetch a value that a process wants here; returns when it is.

        Raises:
            ObjectLostError: It, or its node, is gone, or the process has withdrawn.
            ObjectStoreFullError: There is no room for a copy.
        """
        waiter = self._add(key, size, (process_id, request), maps=False)
        self._queue(waiter, self._awaited)
        await waiter.segment

    def _add(self, key: Key, size: int, name: _Name, *, maps: bool) -> Waiter:
        came: asyncio.Future[Segment] = asyncio.get_running_loop().create_future()
        came.add_done_callback(_retrieve)
        waiter = self._waiters[name] = Waiter(name, key, size, came, maps)
        return waiter

    def _queue(self, waiter: Waiter, lane: _Lane) -> None:
        waiter.lane = lane
        lane.queue[waiter.name] = waiter
        self._begin_next(lane)

    def _begin_next(self, lane: _Lane) -> None:
        """Begin what there is room for of what is fetched ahead."""
        while (waiter := lane.next(self._store.capacity // _SHARE)) is not None:
            number = self.copies.find(waiter.key)
            if number is not None:  # it came while this waited for its turn
                self._forget(waiter)
                waiter.segment.set_result(self._store.get(number))
            elif lane.for_calls and self._store.used + waiter.size > self._store.capacity:
                self._forget(waiter)
            else:
                lane.begin(waiter)
                self._begin(waiter)

    def _begin(self, waiter: Waiter) -> None:
        """Have a request share the transfer of its value; the first begins it."""
        key = waiter.key
        assert self.copies.find(key) is None  # a second one would never be freed
        pull = self._pulls.get(key)
        if pull is None:
            pull = self._pulls[key] = _Pull(key, waiter.size)
            pull.task = run_in(self._tasks, self._run(pull))
        waiter.pull = pull
        pull.waiters.add(waiter)

    # --- who does not, any more ----------------------------------------------------------
    def withdraw(self, process_id: bytes, request: int) -> None:
        """Forget a request: the process has the value, or does not want it any more."""
        waiter = self._waiters.get((process_id, request))
        if waiter is not None:
            self._lose(waiter, "nobody waits for it any more")

    def process_died(self, process_id: bytes) -> None:
        """Forget the requests of a process that is gone."""
        for waiter in [each for each in self._waiters.values() if each.name[0] == process_id]:
            self._lose(waiter, "the process that asked for it has ended")

    def lose(self, key: Key, reason: str) -> None:
        """Fail all who wait for the transfer of a value."""
        pull = self._pulls.get(key)
        if pull is not None:
            for waiter in list(pull.waiters):
                self._lose(waiter, reason)

    def node_died(self, node_id: bytes) -> None:
        """Fail all who wait for copies of values whose owners were on a node."""
        for key in list(self._pulls):
            if home_of(key) == node_id:
                self.lose(key, f"node {node_id.hex()} is gone")

    def _lose(self, waiter: Waiter, reason: str) -> None:
        self._fail(waiter, ObjectLostError(f"segment {segment_of(waiter.key)}", reason))

    def _fail(self, waiter: Waiter, error: Exception) -> None:
        """Forget a request; the last one's transfer ends with it."""
        pull = waiter.pull
        self._forget(waiter)
        if not waiter.segment.done():
            waiter.segment.set_exception(error)
        if pull is not None and not pull.waiters and self._pulls.get(pull.key) is pull:
            del self._pulls[pull.key]
            pull.task.cancel()
        if waiter.lane is not None:
            self._begin_next(waiter.lane)

    def _forget(self, waiter: Waiter) -> None:
        self._leave(waiter)
        del self._waiters[waiter.name]
        if waiter.lane is not None:
            waiter.lane.remove(waiter)

    @staticmethod
    def _leave(waiter: Waiter) -> None:
        """Take a request off its transfer."""
        if waiter.pull is not None:
            waiter.pull.waiters.discard(waiter)
            waiter.pull = None

    # --- transfers -----------------------------------------------------------------------
    async def _run(self, pull: _Pull) -> None:
        try:
            segment = await self.transfers.copy(pull.key, pull.size)
        except asyncio.CancelledError:
            what = f"segment {segment_of(pull.key)}"
            self._end(pull, ObjectLostError(what, "its transfer was ended"))
            raise
        except Exception as error:  # noqa: BLE001 - it is the answer to all who wait
            self._end(pull, error)
            return
        self._store.seal(segment.number)
        if self._pulls.get(pull.key) is pull:
            self._arrived(pull, segment)
        else:
            self._store.free(segment.number)  # all who waited have left

    def _arrived(self, pull: _Pull, segment: Segment) -> None:
        del self._pulls[pull.key]
        self.copies.add(pull.key, segment.number)
        for waiter in list(pull.waiters):
            lane = waiter.lane
            if lane is not None and lane.for_calls:
                self._leave(waiter)  # it counts until the call has it
            else:
                self._forget(waiter)
            if waiter.segment.done():  # who waited was cancelled
                continue
            if waiter.maps:  # at once: its owner may free it before who waits goes on
                self._store.map(segment.number, waiter.name[0])
            waiter.segment.set_result(segment)
        self.transfers.copied(pull.key, segment.size)
        self._begin_next(self._awaited)

    def _end(self, pull: _Pull, error: Exception) -> None:
        if self._pulls.get(pull.key) is pull:
            del self._pulls[pull.key]
        for waiter in list(pull.waiters):
            self._fail(waiter, error)


def _retrieve(future: asyncio.Future[Segment]) -> None:
    """Look at how it ended, as who waited may be gone."""
    if not future.cancelled():
        future.exception()
