"""Who waits for copies of other nodes' values, and how much is fetched before it is read."""

from __future__ import annotations

import asyncio
import contextlib
from typing import TYPE_CHECKING, Any

import pytest
from kept import kept
from stores import new_store

from miniray.exceptions import ObjectLostError, ObjectStoreFullError
from miniray.node.store.segments import Copies
from miniray.node.transfer.transfers import Pulls

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine

    from miniray.node.store.memories import Memory
    from miniray.node.store.segments import Key, Segment, SegmentStore

SIZE = 100_000
KEY = (b"node", 7, b"home")
A, B = b"process a", b"process b"


class Transfers:
    """Copies that end when a test says so."""

    def __init__(self, store: SegmentStore) -> None:
        self._store = store
        self.begun: list[Key] = []
        self.over: list[Key] = []
        self.told: list[tuple[Key, int]] = []
        self._open: dict[Key, asyncio.Future[None]] = {}

    async def copy(self, key: Key, size: int) -> Segment:
        memory = await self._memory(size)
        self.begun.append(key)
        self._open[key] = asyncio.get_running_loop().create_future()
        segment = self._store.create(size, 0, key[0], b"daemon", memory)
        try:
            await self._open[key]
        except BaseException:
            self._store.seal(segment.number)
            self._store.free(segment.number)
            raise
        finally:
            self.over.append(key)
        return segment

    def copied(self, key: Key, size: int) -> None:
        self.told.append((key, size))

    async def _memory(self, size: int) -> Memory:
        while True:
            with contextlib.suppress(ObjectStoreFullError):
                return self._store.take(size, b"")
            self._store.changed.clear()
            await self._store.changed.wait()

    def finish(self, key: Key, error: Exception | None = None) -> None:
        if error is None:
            self._open[key].set_result(None)
        else:
            self._open[key].set_exception(error)


class Node:
    def __init__(self, capacity: int = 1 << 24) -> None:
        self.store = new_store(capacity)
        self.transfers = Transfers(self.store)
        self.copies = Copies(self.store, lambda _node: True)
        self.pulls = Pulls(self.transfers, self.copies)

    def copy(self, key: Key) -> int | None:
        """The number of the copy of a segment, if it is here."""
        return self.copies.find(key)

    def waited_for(self) -> int:
        """How much is kept of those who wait."""
        return kept(self.pulls) - kept(self.copies)

    def here(self) -> list[Key]:
        """Of what there are copies."""
        return self.copies.owned_on(b"home")


def run(test: Callable[[Node], Coroutine[Any, Any, None]], **node: int) -> None:
    async def main() -> None:
        made = Node(**node)
        try:
            await asyncio.wait_for(test(made), 10)
        finally:
            made.store.close()

    asyncio.run(main())


async def settled() -> None:
    """What is ready to run has run."""
    for _ in range(5):
        await asyncio.sleep(0)


# --- pulls -------------------------------------------------------------------------------
def test_all_who_wait_share_one_transfer_and_map_it_once_each() -> None:
    async def test(node: Node) -> None:
        waiters = [node.pulls.wait(KEY, SIZE, *name) for name in ((A, 1), (A, 2), (B, 3))]
        node.pulls.prefetch(B, 4, KEY, SIZE)
        await settled()
        node.transfers.finish(KEY)
        segments = [await waiter for waiter in waiters]
        assert node.transfers.begun == [KEY]
        assert {segment.number for segment in segments} == {node.copy(KEY)}
        assert segments[0].mappers == {A: 2, B: 1}
        assert not len(node.pulls)

    run(test)


def test_a_transfer_ends_with_the_last_who_waits() -> None:
    async def test(node: Node) -> None:
        first = node.pulls.wait(KEY, SIZE, A, 1)
        second = node.pulls.wait(KEY, SIZE, B, 1)
        await settled()
        node.pulls.withdraw(A, 1)
        with pytest.raises(ObjectLostError, match="request was withdrawn"):
            await first
        await settled()
        assert not node.transfers.over
        assert node.store.used
        node.pulls.withdraw(B, 1)
        with pytest.raises(ObjectLostError):
            await second
        await settled()
        assert node.transfers.over == [KEY]
        assert not node.store.used
        assert node.copies.find(KEY) is None

    run(test)


def test_a_process_that_ends_waits_no_more() -> None:
    async def test(node: Node) -> None:
        for request, key in enumerate([KEY, (b"node", 8, b"home"), KEY]):
            node.pulls.wait(key, SIZE, A, request)
        node.pulls.wait((b"node", 8, b"home"), SIZE, B, 1)
        await settled()
        node.pulls.process_died(A)
        await settled()
        assert node.transfers.over == [KEY]
        node.transfers.finish((b"node", 8, b"home"))
        await settled()
        assert node.here() == [(b"node", 8, b"home")]

    run(test)


def test_who_comes_after_the_last_has_left_begins_anew() -> None:
    async def test(node: Node) -> None:
        node.pulls.wait(KEY, SIZE, A, 1)
        await settled()
        node.pulls.withdraw(A, 1)
        again = node.pulls.wait(KEY, SIZE, A, 2)
        await settled()
        assert node.transfers.begun == [KEY, KEY]
        node.transfers.finish(KEY)
        assert (await again).number == node.copy(KEY)

    run(test)


def test_a_freed_value_is_lost_for_all_who_wait_and_its_half_copy_is_gone() -> None:
    async def test(node: Node) -> None:
        waiters = [node.pulls.wait(KEY, SIZE, process, 1) for process in (A, B)]
        await settled()
        node.pulls.lose(KEY, "its owner has freed it")
        for waiter in waiters:
            with pytest.raises(ObjectLostError, match="freed"):
                await waiter
        await settled()
        assert not node.store.used
        assert not len(node.pulls)

    run(test)


def test_what_stops_a_transfer_is_told_to_all_who_wait() -> None:
    async def test(node: Node) -> None:
        waiters = [node.pulls.wait(KEY, SIZE, process, 1) for process in (A, B)]
        await settled()
        node.transfers.finish(KEY, ObjectStoreFullError(needed=SIZE))
        for waiter in waiters:
            with pytest.raises(ObjectStoreFullError):
                await waiter
        await settled()
        assert not len(node.pulls)
        assert not node.waited_for()

    run(test)


def test_copies_of_a_node_that_dies_are_lost() -> None:
    async def test(node: Node) -> None:
        lost = node.pulls.wait(KEY, SIZE, A, 1)
        other = node.pulls.wait((b"other", 7, b"other"), SIZE, A, 2)
        await settled()
        node.pulls.node_died(KEY[2])
        with pytest.raises(ObjectLostError, match="is gone"):
            await lost
        node.transfers.finish((b"other", 7, b"other"))
        await other

    run(test)


def test_who_stopped_waiting_does_not_keep_the_others_from_their_copy() -> None:
    async def test(node: Node) -> None:
        waiters = [node.pulls.wait(KEY, SIZE, A, request) for request in range(3)]
        await settled()
        waiters[1].cancel()
        node.transfers.finish(KEY)
        segments = [await waiter for waiter in (waiters[0], waiters[2])]
        assert segments[0].mappers == {A: 2}

    run(test)


# --- ahead -------------------------------------------------------------------------------
def keys(count: int) -> list[Key]:
    return [(b"node", number, b"home") for number in range(count)]


def test_arguments_are_fetched_ahead_into_free_memory_only() -> None:
    async def test(node: Node) -> None:
        for request, key in enumerate(keys(8)):
            node.pulls.prefetch(A, request, key, SIZE)
        await settled()
        assert node.transfers.begun == keys(6)  # what would have values written to disk waits
        node.transfers.finish(keys(8)[0])
        await settled()
        node.pulls.process_died(A)
        await settled()
        assert not node.pulls.waiting
        assert not node.waited_for()
        assert sorted(node.transfers.over) == node.transfers.begun == keys(6)
        assert node.here() == keys(1)

    run(test, capacity=8 * SIZE)


def test_what_came_while_it_waited_for_its_turn_is_not_fetched_again() -> None:
    async def test(node: Node) -> None:
        *_, last = wanted = keys(3)
        fetches = [
            asyncio.ensure_future(node.pulls.fetch(A, request, key, SIZE))
            for request, key in enumerate(wanted)
        ]
        await settled()
        reads = node.pulls.wait(last, SIZE, B, 1)
        await settled()
        node.transfers.finish(last)
        await reads
        for key in wanted[:2]:
            node.transfers.finish(key)
        await asyncio.gather(*fetches)
        assert node.transfers.begun == wanted
        assert not node.waited_for()

    run(test, capacity=8 * SIZE)


def test_one_value_is_fetched_ahead_however_large_if_there_is_room() -> None:
    async def test(node: Node) -> None:
        node.pulls.prefetch(A, 1, KEY, SIZE)
        await settled()
        assert node.transfers.begun == [KEY]

    run(test, capacity=2 * SIZE)


def test_nothing_is_fetched_ahead_into_a_full_store() -> None:
    async def test(node: Node) -> None:
        node.store.create(SIZE, 0, A, A)
        node.pulls.prefetch(A, 1, KEY, SIZE)
        await settled()
        assert not node.transfers.begun
        assert not node.pulls.waiting

    run(test, capacity=SIZE * 3 // 2)


def test_who_reads_does_not_wait_behind_what_is_fetched_ahead() -> None:
    async def test(node: Node) -> None:
        for request, key in enumerate(keys(6)):
            node.pulls.prefetch(A, request, key, SIZE)
        last = keys(6)[-1]
        waiter = node.pulls.wait(last, SIZE, A, 100)
        await settled()
        node.transfers.finish(last)
        assert (await waiter).mappers == {A: 1}
        node.pulls.withdraw(A, 5)
        assert node.copies.find(last) is not None

    run(test, capacity=8 * SIZE)


def test_a_value_that_is_wanted_here_is_told_of_when_it_is() -> None:
    async def test(node: Node) -> None:
        fetches = [
            asyncio.ensure_future(node.pulls.fetch(A, request, key, SIZE))
            for request, key in enumerate(keys(3))
        ]
        await settled()
        assert node.transfers.begun == keys(2)
        node.transfers.finish(keys(3)[0])
        node.transfers.finish(keys(3)[1], ObjectLostError("segment", "it is gone"))
        await fetches[0]
        with pytest.raises(ObjectLostError, match="it is gone"):
            await fetches[1]
        await settled()
        assert node.transfers.begun == keys(3)  # nothing counts that has come
        node.pulls.withdraw(A, 2)
        with pytest.raises(ObjectLostError, match="request was withdrawn"):
            await fetches[2]
        await settled()
        assert not node.pulls.waiting
        assert not node.waited_for()

    run(test, capacity=8 * SIZE)


def test_a_value_that_waits_its_turn_can_be_withdrawn() -> None:
    async def test(node: Node) -> None:
        fetches = [
            asyncio.ensure_future(node.pulls.fetch(A, request, key, SIZE))
            for request, key in enumerate(keys(3))
        ]
        await settled()
        node.pulls.withdraw(A, 2)
        with pytest.raises(ObjectLostError, match="request was withdrawn"):
            await fetches[2]
        node.pulls.process_died(A)
        for fetch in fetches[:2]:
            with pytest.raises(ObjectLostError):
                await fetch

    run(test, capacity=8 * SIZE)


def test_an_argument_of_several_calls_comes_once() -> None:
    async def test(node: Node) -> None:
        for request in range(4):
            node.pulls.prefetch(A, request, KEY, SIZE)
        node.pulls.prefetch(A, 4, (b"node", 8, b"home"), SIZE)
        await settled()
        assert node.transfers.begun == [KEY, (b"node", 8, b"home")]  # what counts once leaves room
        node.transfers.finish(KEY)
        for request in range(4):
            node.pulls.withdraw(A, request)
            await settled()
        assert node.transfers.begun == [KEY, (b"node", 8, b"home")]

    run(test, capacity=8 * SIZE)


def test_who_waits_does_not_wait_behind_arguments_of_calls_that_have_not_begun() -> None:
    async def test(node: Node) -> None:
        for request, key in enumerate(keys(6)):
            node.pulls.prefetch(A, request, key, SIZE)
        await settled()
        for key in keys(2):
            node.transfers.finish(key)  # they are here, and nobody reads them
        waited_for = (b"node", 99, b"home")
        waiting = asyncio.ensure_future(node.pulls.fetch(A, 99, waited_for, SIZE))
        await settled()
        node.transfers.finish(waited_for)
        await waiting

    run(test, capacity=8 * SIZE)
