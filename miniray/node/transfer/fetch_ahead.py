"""Copies that are fetched before anybody reads them: arguments of queued calls, values in `wait`.

Responsible for how much of that is done at a time; a process that maps a value never waits here.
"""

from __future__ import annotations

import asyncio
import functools
from typing import TYPE_CHECKING

from miniray.exceptions import ObjectLostError

if TYPE_CHECKING:
    from miniray.node.store.copies import Copies, Key
    from miniray.node.store.segments import Segment
    from miniray.node.transfer.pulls import Pulls

#: Part of the store that each kind of what is fetched ahead may take.
_SHARE = 4

#: A process, and a number of its own.
_Name = tuple[bytes, int]


class _Ahead:
    """A value that a process wants here."""

    def __init__(self, name: _Name, key: Key, size: int, lane: _Lane) -> None:
        self.name = name
        self.key = key
        self.size = size
        self.lane = lane
        #: Who waits until it is here; None if it is for a call that has not begun.
        self.here: asyncio.Future[None] | None = None


class _Lane:
    """Those of one kind: what waits for its turn, first in, first out, and what has begun."""

    def __init__(self) -> None:
        self.queue: dict[_Name, _Ahead] = {}
        #: How many have begun to want each value, which counts once.
        self.begun: dict[Key, int] = {}
        #: Bytes of these.
        self.bytes = 0

    def next(self, limit: int) -> _Ahead | None:
        """The first that waits, if there is room for it: one at least may begin."""
        ahead = next(iter(self.queue.values()), None)
        if ahead is None or not self.bytes or ahead.key in self.begun:
            return ahead
        return ahead if self.bytes + ahead.size <= limit else None

    def begin(self, ahead: _Ahead) -> None:
        """One that waits begins, and counts until it is removed."""
        del self.queue[ahead.name]
        wanted = self.begun.get(ahead.key, 0)
        self.begun[ahead.key] = wanted + 1
        if not wanted:
            self.bytes += ahead.size

    def remove(self, ahead: _Ahead) -> None:
        """One waits no more, or has begun and does not count any more."""
        if self.queue.pop(ahead.name, None) is not None:
            return
        self.begun[ahead.key] -= 1
        if not self.begun[ahead.key]:
            del self.begun[ahead.key]
            self.bytes -= ahead.size


class FetchAhead:
    """All of it, in the order asked for; who waits does not stand behind who only prefetches.

    Args:
        pulls: What fetches.
        copies: What is here, in a store that must not become full by it.
    """

    def __init__(self, pulls: Pulls, copies: Copies) -> None:
        self._pulls = pulls
        self._copies = copies
        self._store = copies.store
        #: Arguments of calls: they count until the call has them, which may take for ever.
        self._arguments = _Lane()
        #: Values that somebody waits for: they count while they are on their way.
        self._awaited = _Lane()
        self._wanted: dict[_Name, _Ahead] = {}
        self._by_process: dict[bytes, set[int]] = {}

    def __len__(self) -> int:
        return len(self._wanted)

    @property
    def size(self) -> int:
        """Bytes of what has begun, and counts."""
        return self._arguments.bytes + self._awaited.bytes

    @property
    def waiting(self) -> int:
        """How many wait for their turn."""
        return len(self._arguments.queue) + len(self._awaited.queue)

    def prefetch(self, process_id: bytes, request: int, key: Key, size: int) -> None:
        """An argument of a call that has arrived: good to have here, if there is room.

        It counts until ``withdraw``: when the call has it, or does not want it any more.
        """
        self._add(_Ahead((process_id, request), key, size, self._arguments))

    async def fetch(self, process_id: bytes, request: int, key: Key, size: int) -> None:
        """A value that a process wants here; returns when it is.

        Raises:
            ObjectLostError: it, or its node, is gone, or the process has withdrawn.
            ObjectStoreFullError: there is no room for a copy.
        """
        ahead = _Ahead((process_id, request), key, size, self._awaited)
        ahead.here = asyncio.get_running_loop().create_future()
        self._add(ahead)
        await ahead.here

    def _add(self, ahead: _Ahead) -> None:
        process_id, request = ahead.name
        self._wanted[ahead.name] = ahead
        self._by_process.setdefault(process_id, set()).add(request)
        ahead.lane.queue[ahead.name] = ahead
        self._begin(ahead.lane)

    def withdraw(self, process_id: bytes, request: int) -> None:
        """A process has it, or does not want it any more."""
        ahead = self._wanted.get((process_id, request))
        if ahead is None:
            return
        self._forget(ahead)
        self._pulls.withdraw(process_id, request)
        _tell(ahead, ObjectLostError(f"segment {ahead.key[1]}", "nobody waits for it any more"))
        self._begin(ahead.lane)

    def process_died(self, process_id: bytes) -> None:
        """A process is gone, and wants nothing."""
        for request in list(self._by_process.get(process_id, ())):
            self.withdraw(process_id, request)

    def _forget(self, ahead: _Ahead) -> None:
        process_id, request = ahead.name
        del self._wanted[ahead.name]
        requests = self._by_process[process_id]
        requests.discard(request)
        if not requests:
            del self._by_process[process_id]
        ahead.lane.remove(ahead)

    def _begin(self, lane: _Lane) -> None:
        """Begin what there is room for."""
        limit = self._store.capacity // _SHARE
        while True:
            ahead = lane.next(limit)
            if ahead is None:
                return
            if self._copies.find(ahead.key) is not None:
                self._forget(ahead)  # it came while this waited for its turn
                _tell(ahead, None)
            elif ahead.here is None and self._store.used + ahead.size > self._store.capacity:
                self._forget(ahead)  # it is fetched when it is needed
            else:
                lane.begin(ahead)
                waiter = self._pulls.wait(
                    ahead.key,
                    ahead.size,
                    *ahead.name,
                    maps=False,
                    or_disk=ahead.here is not None,  # else it is fetched when it is needed
                )
                waiter.segment.add_done_callback(functools.partial(self._came, ahead))

    def _came(self, ahead: _Ahead, got: asyncio.Future[Segment]) -> None:
        """It is here, or will not be."""
        error = got.exception()
        _tell(ahead, error)
        if ahead.here is None and error is None:
            return  # it counts until the call has it
        if self._wanted.get(ahead.name) is ahead:
            self._forget(ahead)
            self._begin(ahead.lane)


def _tell(ahead: _Ahead, error: BaseException | None) -> None:
    """Answer who waits for a value, if somebody does."""
    here = ahead.here
    if here is None or here.done():
        return
    if error is None:
        here.set_result(None)
    else:
        here.set_exception(error)
