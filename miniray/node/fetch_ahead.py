"""Copies that are fetched before anybody reads them: arguments of queued calls, values in `wait`.

Responsible for how much of that is done at a time; a process that maps a value never waits here.
"""

from __future__ import annotations

import asyncio
import collections
from typing import TYPE_CHECKING

from miniray.exceptions import ObjectLostError

if TYPE_CHECKING:
    from miniray.node.pulls import Pulls
    from miniray.node.segments import SegmentStore
    from miniray.node.transfers import Key

#: Part of the store that may be taken by what is fetched ahead and not read yet.
_SHARE = 4


class _Ahead:
    """A value that a process wants here."""

    def __init__(self, process_id: bytes, request: int, key: Key, size: int) -> None:
        self.process_id = process_id
        self.request = request
        self.key = key
        self.size = size
        self.begun = False
        #: Who waits until it is here; None if it is for a call that has not begun.
        self.here: asyncio.Future[None] | None = None


class FetchAhead:
    """All of it, in the order asked for.

    Args:
        pulls: What fetches.
        store: What must not become full by it.
    """

    def __init__(self, pulls: Pulls, store: SegmentStore) -> None:
        self._pulls = pulls
        self._store = store
        #: Bytes of what has begun.
        self.bytes = 0
        self._wanted: dict[tuple[bytes, int], _Ahead] = {}
        self._by_process: dict[bytes, set[int]] = {}
        self._queue: collections.deque[_Ahead] = collections.deque()

    def __len__(self) -> int:
        return len(self._wanted)

    def prefetch(self, process_id: bytes, request: int, key: Key, size: int) -> None:
        """An argument of a call that has arrived: good to have here, if there is room.

        It counts until ``withdraw``: when the call has it, or does not want it any more.
        """
        self._add(_Ahead(process_id, request, key, size))

    async def fetch(self, process_id: bytes, request: int, key: Key, size: int) -> None:
        """A value that a process wants here; returns when it is.

        Raises:
            ObjectLostError: it, or its node, is gone, or the process has withdrawn.
            ObjectStoreFullError: there is no room for a copy.
        """
        ahead = _Ahead(process_id, request, key, size)
        ahead.here = asyncio.get_running_loop().create_future()
        self._add(ahead)
        await ahead.here

    def _add(self, ahead: _Ahead) -> None:
        self._wanted[ahead.process_id, ahead.request] = ahead
        self._by_process.setdefault(ahead.process_id, set()).add(ahead.request)
        self._queue.append(ahead)
        self._begin()

    def withdraw(self, process_id: bytes, request: int) -> None:
        """A process has it, or does not want it any more."""
        ahead = self._forget(process_id, request)
        if ahead is None:
            return
        if ahead.begun:
            self._pulls.withdraw(process_id, request)
        elif ahead.here is not None and not ahead.here.done():
            ahead.here.set_exception(
                ObjectLostError(f"segment {ahead.key[1]}", "nobody waits for it any more")
            )
        self._begin()

    def process_died(self, process_id: bytes) -> None:
        """A process is gone, and wants nothing."""
        for request in list(self._by_process.get(process_id, ())):
            self.withdraw(process_id, request)

    def _forget(self, process_id: bytes, request: int) -> _Ahead | None:
        ahead = self._wanted.pop((process_id, request), None)
        if ahead is not None:
            requests = self._by_process[process_id]
            requests.discard(request)
            if not requests:
                del self._by_process[process_id]
            if ahead.begun:
                self.bytes -= ahead.size
        return ahead

    def _begin(self) -> None:
        """Begin what there is room for."""
        limit = self._store.capacity // _SHARE
        while self._queue:
            ahead = self._queue[0]
            if self.bytes and self.bytes + ahead.size > limit:
                return
            self._queue.popleft()
            if self._wanted.get((ahead.process_id, ahead.request)) is not ahead:
                continue  # it was withdrawn
            if ahead.here is None and self._store.used + ahead.size > self._store.capacity:
                self._forget(ahead.process_id, ahead.request)  # it is fetched when it is needed
                continue
            self._start(ahead)

    def _start(self, ahead: _Ahead) -> None:
        ahead.begun = True
        self.bytes += ahead.size
        waiter = self._pulls.wait(
            ahead.key, ahead.size, ahead.process_id, ahead.request, maps=False
        )
        if ahead.here is not None:
            waiter.segment.add_done_callback(lambda got: self._answer(ahead, got.exception()))

    def _answer(self, ahead: _Ahead, error: BaseException | None) -> None:
        assert ahead.here is not None
        if not ahead.here.done():
            if error is None:
                ahead.here.set_result(None)
            else:
                ahead.here.set_exception(error)
        if self._wanted.get((ahead.process_id, ahead.request)) is ahead:
            self._forget(ahead.process_id, ahead.request)
            self._begin()
