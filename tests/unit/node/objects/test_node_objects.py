"""What a node keeps of values that other nodes have to do with, without any other process."""

from __future__ import annotations

import asyncio
import types
from typing import TYPE_CHECKING, Any

import pytest
from kept import kept
from stores import new_store

from miniray.exceptions import ObjectLostError
from miniray.node.objects.objects import NodeObjects
from miniray.node.relay import relayed as r
from miniray.node.relay.relayed import Relayed
from miniray.node.store.segments import Copies
from miniray.node.transfer.directory import Directory

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine

    from miniray.node.store.segments import Key, Segment, SegmentStore

HERE, ORIGIN, FAR = b"node-own", b"node-one", b"node-far"
OWNER, READER, WRITER = b"owner000", b"reader00", b"writer00"
SIZE = 4096
#: Written on one node for an owner on another.
KEY = (ORIGIN, 7, FAR)


class Relay:
    """Other nodes, as far as they live."""

    def __init__(self) -> None:
        self.notices: dict[str, Callable[..., object]] = {}
        self.living = {ORIGIN, FAR}
        self.sent: list[tuple[bytes, Relayed]] = []

    def knows(self, node: bytes) -> bool:
        return node in self.living

    def send(self, node: bytes, message: Relayed) -> bool:
        if node in self.living:
            self.sent.append((node, message))
        return node in self.living


class Transfers:
    """Copies that come when the test says so."""

    def __init__(self, store: SegmentStore) -> None:
        self._store = store
        self.finish = asyncio.Event()

    async def copy(self, key: Key, size: int) -> Segment:
        segment = self._store.create(size, 0, key[0], HERE)
        try:
            await self.finish.wait()
        except asyncio.CancelledError:
            self._store.seal(segment.number)
            self._store.free(segment.number)
            raise
        return segment

    def copied(self, key: Key, size: int) -> None:
        pass


class Node:
    def __init__(self) -> None:
        self.relay: Any = Relay()
        self.store = new_store(1 << 24)
        self.copies = Copies(self.store, self.relay.knows)
        spilling: Any = types.SimpleNamespace(waiting=0)
        processes = dict.fromkeys((OWNER, READER, WRITER))
        clients: Any = types.SimpleNamespace(requests={}, notices={}, clients=processes)
        directory = Directory(
            HERE, self.store, self.relay, clients, lambda key: self.objects.free_here(key)
        )
        parts = (Transfers(self.store), directory, self.copies, clients)
        self.objects = NodeObjects(HERE, spilling, self.relay, *parts)

    def dies(self, node: bytes) -> None:
        """As the head tells it."""
        self.relay.living.discard(node)
        self.objects.node_died(node)

    def known(self) -> int:
        """How much is kept of values, besides the store's own memory."""
        return kept(self.objects) - kept(self.store)

    def has_copy(self, key: Key = KEY) -> int:
        segment = self.store.create(SIZE, 0, key[0], HERE)
        self.store.seal(segment.number)
        self.copies.add(key, segment.number)
        return segment.number

    def written(self, home: bytes) -> Segment:
        segment = self.store.create(SIZE, 0, OWNER, WRITER, home=home)
        self.objects.seal(segment.number, "")
        return segment


def run(test: Callable[[Node], Coroutine[Any, Any, None]]) -> None:
    async def main() -> None:
        node = Node()
        try:
            await asyncio.wait_for(test(node), 10)
        finally:
            node.store.close()

    asyncio.run(main())


def test_a_value_that_the_daemon_has_adopted_outlives_its_process_and_leaves_nothing() -> None:
    async def test(node: Node) -> None:
        before, key = node.known(), (ORIGIN, 7, HERE)
        node.relay.notices[r.WROTE](ORIGIN, Relayed(notice=r.WROTE, items=(7, OWNER)))
        node.objects.directory.adopt(key)
        node.objects.process_died(OWNER)
        assert not node.relay.sent
        node.objects.directory.free(key)
        assert node.relay.sent == [(ORIGIN, Relayed(notice=r.FREED, items=key))]
        assert node.known() == before

    run(test)


def test_a_value_is_freed_when_it_is_whole_if_its_owner_is_not_connected() -> None:
    async def test(node: Node) -> None:
        node.objects.spilling.spill_ahead = lambda: None  # type: ignore[method-assign]
        writer: Any = types.SimpleNamespace(process_id=WRITER)
        create: Any = node.objects.clients.requests["create_segment"]
        (kept, _memory), _fd = create(writer, SIZE, 0, OWNER, HERE)
        del node.objects.clients.clients[OWNER]
        (freed, _memory), _fd = create(writer, SIZE, 0, OWNER, HERE)
        for number in (kept, freed):
            node.objects.seal(number, "")
        assert [segment.number for segment in node.store] == [kept]

    run(test)


def test_what_was_written_or_is_read_here_of_an_owner_goes_with_its_node() -> None:
    async def test(node: Node) -> None:
        before = node.known()
        node.written(FAR)
        node.has_copy()
        read = asyncio.ensure_future(node.objects.map((ORIGIN, 8, FAR), SIZE, READER, 1))
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        node.dies(FAR)
        with pytest.raises(ObjectLostError, match="is gone"):
            await read
        await asyncio.sleep(0)  # the transfer has ended
        assert not len(node.store)
        assert not len(node.copies)
        assert node.known() == before

    run(test)


def test_a_copy_is_evicted_only_while_the_node_lives_on_which_the_value_was_written() -> None:
    async def test(node: Node) -> None:
        number = node.has_copy()
        copy = node.store.get(number)
        assert node.copies.may_be_evicted(copy)
        node.dies(ORIGIN)
        assert node.store.has_number(number)
        assert not node.copies.may_be_evicted(copy)
        node.relay.notices[r.FREED](FAR, Relayed(notice=r.FREED, items=KEY))
        assert not len(node.store)

    run(test)


def test_a_value_that_is_here_is_not_fetched_again_for_whoever_asks_next() -> None:
    async def test(node: Node) -> None:
        number = node.has_copy()
        segment = await node.objects.map(KEY, SIZE, READER, 1)
        assert segment.number == number
        node.objects.pulls.prefetch(READER, 2, KEY, SIZE)
        await node.objects.pulls.fetch(READER, 3, KEY, SIZE)
        assert not len(node.objects.pulls)
        assert not node.objects.pulls.waiting

    run(test)


def test_a_value_for_an_owner_elsewhere_is_entered_there_once_it_is_written() -> None:
    async def test(node: Node) -> None:
        segment = node.store.create(SIZE, 0, OWNER, WRITER, home=FAR)
        assert not node.relay.sent
        node.objects.seal(segment.number, "")
        wrote = Relayed(notice=r.WROTE, items=(segment.number, OWNER))
        assert node.relay.sent == [(FAR, wrote)]
        node.objects.discard(node.store.create(SIZE, 0, OWNER, WRITER, home=FAR).number)
        node.written(b"")
        assert len(node.relay.sent) == 1
        node.relay.living.discard(FAR)
        assert node.written(FAR).freed  # nobody else will

    run(test)


@pytest.mark.parametrize("alive", [True, False])
def test_a_node_whose_word_was_lost_hears_what_is_here_of_its_owners(alive: bool) -> None:
    async def test(node: Node) -> None:
        node.has_copy()
        written = node.written(FAR)
        node.has_copy((ORIGIN, 8, ORIGIN))
        node.store.create(SIZE, 0, OWNER, WRITER, home=FAR)  # of which it need not know yet
        node.relay.sent.clear()
        if not alive:
            node.relay.living.discard(FAR)
        node.objects.messages_lost(FAR)
        copied = Relayed(notice=r.COPIED, items=(KEY, (HERE, written.number, FAR)))
        assert node.relay.sent == ([(FAR, copied)] if alive else [])
        assert written.freed is not alive

    run(test)


def test_what_a_killed_process_wrote_is_told_with_the_nodes_of_its_owners() -> None:
    async def test(node: Node) -> None:
        far = node.written(FAR).number
        here = node.store.create(SIZE, 0, READER, WRITER).number
        node.objects.seal(here, "")
        node.objects.process_died(WRITER)
        found = node.objects.unclaimed(WRITER)
        assert sorted(found) == [(FAR, OWNER, [far]), (HERE, READER, [here])]

    run(test)
