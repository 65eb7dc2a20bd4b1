"""What a node keeps of other nodes' values when those nodes die, without any other process."""

from __future__ import annotations

import asyncio
import types
from typing import TYPE_CHECKING, Any

import pytest
from kept import kept
from stores import new_store

from miniray.exceptions import ObjectLostError
from miniray.node.objects.left_copies import LeftCopies
from miniray.node.objects.objects import NodeObjects
from miniray.node.relay import relayed as r
from miniray.node.relay.relayed import Relayed
from miniray.node.store.copies import Copies, Owner

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine

    from miniray.node.store.admission_queue import Claim
    from miniray.node.store.copies import Key
    from miniray.node.store.segments import Segment, SegmentStore

HERE, ORIGIN, FEEDER, FAR = b"node-own", b"node-one", b"node-two", b"node-far"
OWNER, READER = b"owner000", b"reader00"
SIZE = 4096


class Relay:
    """Other nodes, as far as they live."""

    def __init__(self) -> None:
        self.notices: dict[str, Callable[..., object]] = {}
        self.living = {ORIGIN, FEEDER, FAR}
        self.sent: list[tuple[bytes, Relayed]] = []

    def nodes(self) -> list[bytes]:
        return list(self.living)

    def knows(self, node: bytes) -> bool:
        return node in self.living

    def send(self, node: bytes, message: Relayed) -> bool:
        if node in self.living:
            self.sent.append((node, message))
        return node in self.living


class Transfers:
    """Copies that come when the test says so."""

    def __init__(self, store: SegmentStore, owner: Owner) -> None:
        self._store = store
        self._owner = owner
        self.finish = asyncio.Event()

    async def copy(self, key: Key, claim: Claim) -> tuple[Segment, Owner]:
        segment = self._store.create(claim.size, 0, HERE, HERE)
        try:
            await self.finish.wait()
        except asyncio.CancelledError:
            self._store.seal(segment.number)
            self._store.free(segment.number)
            raise
        return segment, self._owner


class Node:
    def __init__(self) -> None:
        self.relay = Relay()
        self.store = new_store(1 << 24)
        self.copies = Copies(self.store)
        self.transfers = Transfers(self.store, Owner(OWNER, FAR))
        serving = types.SimpleNamespace(forget=lambda _number: set())
        spilling = types.SimpleNamespace(queue=types.SimpleNamespace(process_died=lambda _id: None))
        parts: Any = (spilling, self.relay, self.transfers.copy, serving, self.copies, {})
        self.objects = NodeObjects(HERE, *parts)
        clients = types.SimpleNamespace(requests={}, push=lambda *_: True)
        adopted: Any = types.SimpleNamespace(moved=lambda *_: False)
        others: Any = (clients, self.relay, self.objects, adopted)
        self.left = LeftCopies(HERE, *others, lambda _process: False)

    def dies(self, node: bytes) -> None:
        """As the daemon hears it from the head."""
        self.relay.living.discard(node)
        self.left.node_died(node)

    def known(self) -> int:
        """How much is kept of values, besides the store's own memory."""
        return kept(self.objects) - kept(self.store)

    def has_copy(self, owner: Owner) -> int:
        segment = self.store.create(SIZE, 0, ORIGIN, HERE)
        self.store.seal(segment.number)
        self.copies.add((ORIGIN, 7), segment.number, owner)
        return segment.number


def run(test: Callable[[Node], Coroutine[Any, Any, None]]) -> None:
    async def main() -> None:
        node = Node()
        try:
            await asyncio.wait_for(test(node), 10)
        finally:
            node.store.close()

    asyncio.run(main())


def test_what_comes_of_a_node_that_dies_is_lost_and_so_is_what_it_left_here() -> None:
    async def test(node: Node) -> None:
        own = node.objects.create(SIZE, 0, b"process0", ORIGIN, b"writer00")
        node.store.seal(own.number)
        node.objects.adopt(own.number, ORIGIN)  # its owner has ended by rule
        read = asyncio.ensure_future(node.objects.map(ORIGIN, 7, SIZE, READER, 1))
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        node.dies(ORIGIN)
        with pytest.raises(ObjectLostError, match="is gone"):
            await read
        assert not len(node.store)

    run(test)


def test_copies_are_dropped_when_the_nodes_of_value_and_owner_are_gone() -> None:
    async def test(node: Node) -> None:
        before = node.known()
        for first, second in ((FAR, ORIGIN), (ORIGIN, FAR)):
            node.relay.living = {ORIGIN, FEEDER, FAR}
            node.has_copy(Owner(OWNER, FAR))
            node.dies(first)
            assert len(node.store) == 1
            node.dies(second)
            assert not len(node.store)
            assert not len(node.copies)
            assert node.known() == before

    run(test)


def test_a_value_that_is_here_is_not_fetched_again_for_whoever_asks_next() -> None:
    async def test(node: Node) -> None:
        number = node.has_copy(Owner(OWNER, FAR))
        segment = await node.objects.map(ORIGIN, 7, SIZE, READER, 1)
        assert segment.number == number
        node.objects.pulls.prefetch(READER, 2, (ORIGIN, 7), SIZE)
        await node.objects.pulls.fetch(READER, 3, (ORIGIN, 7), SIZE)
        assert not len(node.objects.pulls)
        assert not node.objects.pulls.ahead

    run(test)


def test_what_a_node_that_is_gone_says_late_of_its_adoptions_is_not_believed() -> None:
    async def test(node: Node) -> None:
        before = node.known()
        for comes_back in (False, True):
            node.relay.living = {ORIGIN, FEEDER, FAR}
            own = node.objects.create(SIZE, 0, b"process0", ORIGIN, b"writer00")
            node.store.seal(own.number)
            node.store.map(own.number, READER)
            node.dies(ORIGIN)
            if comes_back:  # it has opened a stream, and the head has given it up
                node.relay.living.add(ORIGIN)
            node.relay.notices[r.ADOPTED](ORIGIN, Relayed(notice=r.ADOPTED, items=(own.number,)))
            if comes_back:
                node.relay.living.discard(ORIGIN)
                node.objects.node_unreachable(ORIGIN)
            assert own.freed
            node.store.unmap([own.number], READER)
            assert not len(node.store)
            assert node.known() == before

    run(test)


@pytest.mark.parametrize("alive", [True, False])
def test_a_node_whose_word_was_lost_hears_which_copies_of_its_values_are_here(alive: bool) -> None:
    async def test(node: Node) -> None:
        node.has_copy(Owner(OWNER, FAR))
        if not alive:
            node.relay.living.discard(ORIGIN)
        node.objects.node_unreachable(FEEDER)
        node.objects.node_unreachable(ORIGIN)
        told = [(ORIGIN, Relayed(notice=r.COPIED, items=(7,)))] if alive else []
        assert node.relay.sent == told

    run(test)


def test_owners_on_a_node_whose_word_was_lost_hear_what_they_have_here() -> None:
    async def test(node: Node) -> None:
        mine, other = (
            node.objects.create(SIZE, 0, owner, there, b"writer00").number
            for owner, there in ((OWNER, ORIGIN), (b"owner001", FEEDER))
        )
        left = node.objects.create(SIZE, 0, b"owner002", ORIGIN, b"writer00").number
        node.objects.adopt(left, ORIGIN)  # the daemon there answers for it
        node.relay.sent.clear()
        node.objects.node_unreachable(ORIGIN)
        watched = [m.to for n, m in node.relay.sent if n == ORIGIN and m.notice == r.WATCH]
        assert watched == [OWNER, b"owner002"]
        listed = [(n, m.to, m.items) for n, m in node.relay.sent if m.notice == r.PUSH]
        assert listed == [(ORIGIN, OWNER, ("unclaimed", (b"", HERE, [mine])))]
        assert node.store.has_number(other)

    run(test)
