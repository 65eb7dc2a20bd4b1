"""Copies on their way to this node: one transfer for all who wait, ended when nobody does.

How a segment gets here is ``transfers.py``.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from miniray.exceptions import ObjectLostError
from miniray.node.store.admission_queue import Claim

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from miniray.exceptions import ObjectStoreFullError
    from miniray.node.store.copies import Copies, Key, Owner
    from miniray.node.store.segments import Segment


class Waiter:
    """One request of a process that waits for a copy."""

    def __init__(
        self, process_id: bytes, request: int, pull: _Pull, *, maps: bool, or_disk: bool
    ) -> None:
        self.name = (process_id, request)
        self.pull = pull
        self.maps = maps
        self.or_disk = or_disk
        #: The copy, mapped for the process if it wanted that.
        self.segment: asyncio.Future[Segment] = asyncio.get_running_loop().create_future()
        self.segment.add_done_callback(_retrieve)


class _Pull:
    """One transfer, and who waits for it."""

    def __init__(self, key: Key, size: int, give_up: Callable[[Waiter, Exception], object]) -> None:
        self.key = key
        self._give_up_one = give_up
        #: The room that it needs first. Who wants memory only gives up; the rest goes on.
        self.claim = Claim(size, on_full=self._give_up)
        self.task: asyncio.Task[None]
        self.waiters: set[Waiter] = set()

    def _give_up(self, error: ObjectStoreFullError) -> None:
        for waiter in [waiter for waiter in self.waiters if not waiter.or_disk]:
            self._give_up_one(waiter, error)


class Pulls:
    """All of them.

    Args:
        copy: Copies a segment of another node into room that it claims. The one that it
            returns is to be sealed.
        copies: Where a copy is added when it is whole, and the store that it is in.
    """

    def __init__(
        self,
        copy: Callable[[Key, Claim], Awaitable[tuple[Segment, Owner]]],
        copies: Copies,
    ) -> None:
        self._store = copies.store
        self._copy = copy
        self._copies = copies
        self._pulls: dict[Key, _Pull] = {}
        #: By process and number of its request.
        self._waiters: dict[tuple[bytes, int], Waiter] = {}
        self._waiting: dict[bytes, set[Waiter]] = {}
        self._tasks: set[asyncio.Task[None]] = set()

    def __len__(self) -> int:
        return len(self._pulls)

    def wait(
        self,
        key: Key,
        size: int,
        process_id: bytes,
        request: int,
        *,
        maps: bool,
        or_disk: bool = True,
    ) -> Waiter:
        """Let a process wait for a copy; the first who does begins the transfer.

        Args:
            key: The node and the number there, of which there is no copy here.
            size: Bytes of the segment.
            process_id: Who waits.
            request: A number of its own, for ``withdraw``.
            maps: Whether the copy is mapped for the process when it is there.
            or_disk: Whether to take it on disk if only what processes look at is in the way of
                having it in memory.
        """
        assert self._copies.find(key) is None  # a second one would never be freed
        pull = self._pulls.get(key)
        if pull is None:
            pull = self._pulls[key] = _Pull(key, size, self._drop)
            pull.task = asyncio.get_running_loop().create_task(self._run(pull))
            self._tasks.add(pull.task)
            pull.task.add_done_callback(self._tasks.discard)
        waiter = Waiter(process_id, request, pull, maps=maps, or_disk=or_disk)
        pull.waiters.add(waiter)
        pull.claim.join(process_id)
        self._waiters[waiter.name] = waiter
        self._waiting.setdefault(process_id, set()).add(waiter)
        return waiter

    def withdraw(self, process_id: bytes, request: int) -> None:
        """A process does not wait any more."""
        waiter = self._waiters.get((process_id, request))
        if waiter is not None:
            self._withdraw(waiter, "nobody waits for it any more")

    def process_died(self, process_id: bytes) -> None:
        """A process is gone, and waits no more."""
        for waiter in list(self._waiting.get(process_id, ())):
            self._withdraw(waiter, "the process that asked for it has ended")

    def lose(self, key: Key, reason: str) -> None:
        """A copy will not come any more."""
        pull = self._pulls.get(key)
        if pull is not None:
            for waiter in list(pull.waiters):
                self._withdraw(waiter, reason)

    def node_died(self, node_id: bytes) -> None:
        """Fail all who wait for copies of a node's segments."""
        for key in list(self._pulls):
            if key[0] == node_id:
                self.lose(key, f"node {node_id.hex()} is gone")

    def _withdraw(self, waiter: Waiter, reason: str) -> None:
        self._drop(waiter, ObjectLostError(f"segment {waiter.pull.key[1]}", reason))

    def _drop(self, waiter: Waiter, error: Exception) -> None:
        pull = waiter.pull
        self._forget(waiter)
        _fail(waiter, error)
        if not pull.waiters and self._pulls.get(pull.key) is pull:
            del self._pulls[pull.key]
            pull.task.cancel()

    def _forget(self, waiter: Waiter) -> None:
        waiter.pull.waiters.discard(waiter)
        waiter.pull.claim.leave(waiter.name[0])
        del self._waiters[waiter.name]
        mine = self._waiting[waiter.name[0]]
        mine.discard(waiter)
        if not mine:
            del self._waiting[waiter.name[0]]

    async def _run(self, pull: _Pull) -> None:
        try:
            segment, owner = await self._copy(pull.key, pull.claim)
        except asyncio.CancelledError:
            self._end(pull, ObjectLostError(f"segment {pull.key[1]}", "its transfer was ended"))
            raise
        except Exception as error:  # noqa: BLE001 - it is the answer to all who wait
            self._end(pull, error)
            return
        self._store.seal(segment.number)
        if self._pulls.get(pull.key) is not pull:
            self._store.free(segment.number)  # all who waited have left
        elif not self._store.has(segment):
            self._end(pull, ObjectLostError(f"segment {pull.key[1]}", "it was freed meanwhile"))
        else:
            self._arrived(pull, segment, owner)

    def _arrived(self, pull: _Pull, segment: Segment, owner: Owner) -> None:
        del self._pulls[pull.key]
        self._store.change_owner(segment.number, pull.key[0])
        self._copies.add(pull.key, segment.number, owner)
        for waiter in list(pull.waiters):
            self._forget(waiter)
            if waiter.segment.done():  # who waited was cancelled
                continue
            if waiter.maps:  # at once: its owner may free it before who waits goes on
                self._store.map(segment.number, waiter.name[0])
            waiter.segment.set_result(segment)

    def _end(self, pull: _Pull, error: Exception) -> None:
        if self._pulls.get(pull.key) is pull:
            del self._pulls[pull.key]
        for waiter in list(pull.waiters):
            self._forget(waiter)
            _fail(waiter, error)


def _fail(waiter: Waiter, error: Exception) -> None:
    if not waiter.segment.done():
        waiter.segment.set_exception(error)


def _retrieve(future: asyncio.Future[Segment]) -> None:
    """Who waited may be gone: then nobody else looks at how it ended."""
    if not future.cancelled():
        future.exception()
