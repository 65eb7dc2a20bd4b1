"""Copies of other nodes' values: one transfer for all requesters, ended when the last one leaves.

A process that maps a value never waits for a turn. Arguments of calls that have not begun are
fetched into memory that is free; of what ``wait`` waits for, only so much is on its way at a time.
How a value gets here is ``transfers.py``.
"""

from __future__ import annotations

import asyncio
import dataclasses
from typing import TYPE_CHECKING

from miniray.common.config import config
from miniray.exceptions import ObjectLostError
from miniray.node.base.clients import run_in
from miniray.node.store.segments import home_of, segment_of

if TYPE_CHECKING:
    from miniray.node.store.segments import Copies, Key, Segment
    from miniray.node.transfer.transfers import Transfers

#: Part of the store that what `wait` wants may take while it is on its way.
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
    #: Its transfer, while that is on.
    pull: _Pull | None = None


@dataclasses.dataclass(slots=True, eq=False, repr=False)
class _Pull:
    """One transfer and its waiters."""

    key: Key
    size: int
    #: Whether it was begun for `wait`.
    ahead: bool
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
        #: Bytes of these, and of those that were begun for `wait`.
        self._moving = self._ahead = 0
        #: By process and number of its request.
        self._waiters: dict[_Name, Waiter] = {}
        #: Those of `wait` that wait for their turn, first in, first out.
        self._queue: dict[_Name, Waiter] = {}
        self._tasks: set[asyncio.Task[None]] = set()

    def __len__(self) -> int:
        return len(self._pulls)

    @property
    def waiting(self) -> int:
        """How many requests there are."""
        return len(self._waiters)

    # --- requesters --------------------------------------------------------------------
    def wait(self, key: Key, size: int, process_id: bytes, request: int) -> asyncio.Future[Segment]:
        """Have a process wait for a copy, which is mapped for it when it is here.

        Args:
            key: Of a value of which there is no copy here.
            size: Bytes of the segment.
            process_id: The process that waits.
            request: A number of its own, for ``withdraw``.
        """
        waiter = self._add(key, size, (process_id, request), maps=True)
        self._begin(waiter)
        return waiter.segment

    def prefetch(self, process_id: bytes, request: int, key: Key, size: int) -> None:
        """Fetch an argument of a call that has arrived, if that moves nothing to disk.

        Else it is fetched when the call reads it.
        """
        free = self._store.capacity * config().spill_threshold - self._store.used - self._moving
        if key in self._pulls or (size <= free and self.copies.find(key) is None):
            self._begin(self._add(key, size, (process_id, request), maps=False))

    async def fetch(self, process_id: bytes, request: int, key: Key, size: int) -> None:
        """Fetch a value that a process wants here; returns when it is.

        Raises:
            ObjectLostError: It, or its node, is gone, or the process has withdrawn.
            ObjectStoreFullError: There is no room for a copy.
        """
        waiter = self._add(key, size, (process_id, request), maps=False)
        self._queue[waiter.name] = waiter
        self._begin_next()
        await waiter.segment

    def _add(self, key: Key, size: int, name: _Name, *, maps: bool) -> Waiter:
        came: asyncio.Future[Segment] = asyncio.get_running_loop().create_future()
        came.add_done_callback(_retrieve)
        waiter = self._waiters[name] = Waiter(name, key, size, came, maps)
        return waiter

    def _begin_next(self) -> None:
        """Begin what `wait` wants, as far as not too much is on its way; one value at least is."""
        while self._queue:
            name, waiter = next(iter(self._queue.items()))
            number = self.copies.find(waiter.key)
            if number is not None:  # it came while this waited for its turn
                self._forget(waiter)
                waiter.segment.set_result(self._store.get(number))
                continue
            beyond = self._ahead + waiter.size > self._store.capacity // _SHARE
            if beyond and self._ahead and waiter.key not in self._pulls:
                return
            del self._queue[name]
            self._begin(waiter, ahead=True)

    def _begin(self, waiter: Waiter, *, ahead: bool = False) -> None:
        """Have a request share the transfer of its value; the first begins it."""
        key = waiter.key
        assert self.copies.find(key) is None  # a second one would never be freed
        pull = self._pulls.get(key)
        if pull is None:
            pull = self._pulls[key] = _Pull(key, waiter.size, ahead)
            self._moving += pull.size
            self._ahead += pull.size * ahead
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
        if pull is not None and not pull.waiters and self._over(pull):
            pull.task.cancel()

    def _forget(self, waiter: Waiter) -> None:
        del self._waiters[waiter.name]
        self._queue.pop(waiter.name, None)
        if waiter.pull is not None:
            waiter.pull.waiters.discard(waiter)

    # --- transfers -----------------------------------------------------------------------
    def _over(self, pull: _Pull) -> bool:
        """Count a transfer off, so that another may begin; return False if it was before."""
        if self._pulls.get(pull.key) is not pull:
            return False
        del self._pulls[pull.key]
        self._moving -= pull.size
        self._ahead -= pull.size * pull.ahead
        asyncio.get_running_loop().call_soon(self._begin_next)
        return True

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
        if self._over(pull):
            self._arrived(pull, segment)
        else:
            self._store.free(segment.number)  # all who waited have left

    def _arrived(self, pull: _Pull, segment: Segment) -> None:
        self.copies.add(pull.key, segment.number)
        for waiter in list(pull.waiters):
            self._forget(waiter)
            if waiter.segment.done():  # who waited was cancelled
                continue
            if waiter.maps:  # at once: its owner may free it before the waiter goes on
                self._store.map(segment.number, waiter.name[0])
            waiter.segment.set_result(segment)
        self.transfers.copied(pull.key, segment.size)

    def _end(self, pull: _Pull, error: Exception) -> None:
        self._over(pull)
        for waiter in list(pull.waiters):
            self._fail(waiter, error)


def _retrieve(future: asyncio.Future[Segment]) -> None:
    """Look at how it ended, as who waited may be gone."""
    if not future.cancelled():
        future.exception()
