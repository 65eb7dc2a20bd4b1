"""Who is served at once, who waits, and what is passed on while it still arrives."""

from __future__ import annotations

import asyncio
import os
from typing import TYPE_CHECKING, Any

import pytest
from node_ends import End, mover_in_thread, no_mover, until

from miniray.node.relay import relayed as r
from miniray.node.relay.relayed import Relayed
from miniray.node.transfer.serving import Arriving, ValueAnswer

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine
    from pathlib import Path

    from miniray.node.store.segments import Key, Segment

SIZE = 3_000_000
PIECE = 1_000_000
OWNER = b"owner000"
ORIGIN = b"origin"
HOME = b"its node"
FAR = (ORIGIN, 7, HOME)


class Node(End):
    """A node that never meets another; what it would send is here."""

    def __init__(self, folder: Path, *, movers: bool = False) -> None:
        super().__init__(folder, "a", mover_in_thread if movers else no_mover)
        self.sent: list[tuple[bytes, Relayed]] = []
        self.hub.send = self._send  # type: ignore[method-assign]

    def _send(self, node: bytes, message: Relayed) -> bool:
        self.sent.append((node, message))
        return True

    def hear(self, node: bytes, notice: str, *items: Any) -> None:
        self.hub.notices[notice](node, Relayed(notice=notice, items=items))

    def fetch(self, node: bytes, number: int, key: Key | None = None) -> None:
        self.hear(node, r.REQUEST, 1, "fetch", *(key or self.key(number)), (), False, 0)

    def read(self, node: bytes, number: int, offset: int, key: Key | None = None) -> None:
        self.hear(node, r.REQUEST, 2, "read", *(key or self.key(number)), offset, PIECE)

    def _answers(self, node: bytes, number: int) -> list[tuple[str, Any]]:
        messages = (each for to, each in self.sent if to == node and each.notice == r.ANSWER)
        return [each.items[1:] for each in messages if each.items[0] == number]

    def answers(self, node: bytes) -> list[ValueAnswer]:
        """To the requests of a node for values."""
        return [ValueAnswer(*answer) for why, answer in self._answers(node, 1) if not why]

    def refused(self, node: bytes, number: int = 1) -> list[str]:
        """Why it got none, or no piece (2)."""
        return [why for why, _ in self._answers(node, number) if why]

    def pieces(self, node: bytes) -> bytes:
        messages = (each for to, each in self.sent if to == node and each.bodies)
        return b"".join(each.bodies[0] for each in messages)


def run(
    folder: Path, test: Callable[[Node], Coroutine[Any, Any, None]], *, movers: bool = False
) -> None:
    async def main() -> None:
        node = Node(folder, movers=movers)
        try:
            await asyncio.wait_for(test(node), 30)
        finally:
            await node.hub.close()
            node.mover.close()
            await node.spilling.close()
            node.store.close()

    asyncio.run(main())


def written(end: End, data: bytes) -> Segment:
    segment = end.store.create(len(data), 0, OWNER, OWNER)
    os.pwrite(segment.fd, data, 0)
    end.store.seal(segment.number)
    return segment


def to_disk(node: Node, segment: Segment, data: bytes) -> None:
    segment.place = node.store.files.reserve(len(data))
    os.pwrite(segment.place.fd, data, segment.place.offset)
    node.store.drop_memory(segment)


def moved_to_disk(node: Node, data: bytes) -> Segment:
    segment = written(node, data)
    to_disk(node, segment, data)
    return segment


def two_served(node: Node) -> int:
    """Two nodes that others cannot reach copy a segment; returns its number."""
    number = written(node, bytes(SIZE)).number
    for other in (b"one", b"two"):
        node.fetch(other, number)
        assert [answer.size for answer in node.answers(other)] == [SIZE]
    return number


def test_nobody_waits_for_others_that_copy_a_value(tmp_path: Path) -> None:
    async def test(node: Node) -> None:
        number = two_served(node)
        node.fetch(b"three", number)
        assert [answer.size for answer in node.answers(b"three")] == [SIZE]

    run(tmp_path, test)


def test_a_value_that_is_freed_is_freed_on_all_nodes_that_may_have_it(tmp_path: Path) -> None:
    async def test(node: Node) -> None:
        number = two_served(node)
        node.directory.free(node.key(number))
        assert {to for to, each in node.sent if each.notice == r.FREED} == {b"one", b"two"}
        assert not node.store.used
        node.fetch(b"three", number)
        assert "freed" in node.refused(b"three")[0]
        node.read(b"one", number, 0)
        assert "not on this node" in node.refused(b"one", 2)[0]

    run(tmp_path, test)


def test_a_freed_value_that_somebody_still_reads_is_served_to_nobody_else(tmp_path: Path) -> None:
    async def test(node: Node) -> None:
        number = written(node, bytes(SIZE)).number
        node.store.map(number, b"reader")
        node.store.free(number)
        node.fetch(b"one", number)
        assert "freed" in node.refused(b"one")[0]
        assert not node.directory

    run(tmp_path, test)


def test_a_node_that_comes_back_with_a_copy_is_told_when_it_is_freed(tmp_path: Path) -> None:
    async def test(node: Node) -> None:
        kept, freed = (written(node, bytes(SIZE)).number for _ in range(2))
        for number in (kept, freed):
            node.fetch(b"one", number)
        node.directory.node_died(b"one")
        node.sent.clear()
        node.directory.free(node.key(freed))
        assert not node.sent
        node.hear(b"one", r.COPIED, node.key(kept), node.key(freed))
        assert node.sent == [(b"one", Relayed(notice=r.FREED, items=node.key(freed)))]
        node.directory.free(node.key(kept))
        assert node.sent[1:] == [(b"one", Relayed(notice=r.FREED, items=node.key(kept)))]

    run(tmp_path, test)


def test_when_the_source_is_busy_others_are_sent_to_who_is_still_getting_a_copy(
    tmp_path: Path,
) -> None:
    async def test(node: Node) -> None:
        for other in (b"one", b"two", b"three"):
            node.hub.joined(other, f"unix:{tmp_path}/{other.decode()}")
        number = two_served(node)
        node.fetch(b"three", number)
        assert [answer.ask for answer in node.answers(b"three")] == [b"one"]

    run(tmp_path, test)


def test_who_asks_for_a_value_that_was_written_elsewhere_is_sent_there(tmp_path: Path) -> None:
    async def test(node: Node) -> None:
        for other in (b"one", b"two", ORIGIN):
            node.hub.joined(other, f"unix:{tmp_path}/{other.decode()}")
        key = (ORIGIN, 7, node.id)
        node.hear(ORIGIN, r.WROTE, 7, OWNER)
        node.fetch(b"one", 7, key)
        assert [answer.ask for answer in node.answers(b"one")] == [ORIGIN]
        node.hear(b"one", r.COPIED, key)
        node.directory.node_died(ORIGIN)
        node.fetch(b"two", 7, key)
        assert [answer.ask for answer in node.answers(b"two")] == [b"one"]
        node.hear(b"one", r.REQUEST, 1, "fetch", *key, (), False, 0)  # it has dropped its copy
        assert "no node has" in node.refused(b"one")[-1]
        assert node.directory.lost(OWNER, ORIGIN) == [7]
        node.directory.process_died(OWNER)
        freed = {to for to, each in node.sent if each == Relayed(notice=r.FREED, items=key)}
        assert freed == {b"one", b"two"}
        assert not node.directory

    run(tmp_path, test)


def test_a_value_of_one_piece_goes_to_everybody_at_once(tmp_path: Path) -> None:
    data = os.urandom(PIECE)

    async def test(node: Node) -> None:
        number = written(node, data).number
        nodes = [b"node%d" % count for count in range(5)]
        for other in nodes:
            node.hear(other, r.REQUEST, 1, "fetch", *node.key(number), (), False, PIECE)
        assert [node.pieces(other) for other in nodes] == [data] * 5
        node.directory.free(node.key(number))
        assert {to for to, each in node.sent if each.notice == r.FREED} == set(nodes)

    run(tmp_path, test)


def test_the_node_that_asks_says_what_fits_into_one_piece(tmp_path: Path) -> None:
    data = os.urandom(PIECE + PIECE // 2)

    async def test(node: Node) -> None:
        number = written(node, data).number
        nodes = [b"node%d" % count for count in range(5)]
        for other in nodes:  # none of them says that it is done
            node.hear(other, r.REQUEST, 1, "fetch", *node.key(number), (), True, len(data))
        assert [node.pieces(other) for other in nodes] == [data] * 5
        assert not node.serving.table_sizes()["answers"]

    run(tmp_path, test, movers=True)


def test_a_value_that_is_freed_just_when_its_bytes_are_asked_for_is_read_all_the_same(
    tmp_path: Path,
) -> None:
    async def test(node: Node) -> None:
        number = moved_to_disk(node, bytes(SIZE)).number
        node.read(b"one", number, 0)
        node.store.free(number)
        await until(lambda: node.pieces(b"one") == bytes(PIECE))
        await until(lambda: not node.serving.table_sizes()["answers"])
        assert not node.store.files.used

    run(tmp_path, test)


def test_a_value_on_disk_comes_in_pieces(tmp_path: Path) -> None:
    data = os.urandom(SIZE)

    async def test(node: Node) -> None:
        moved_to_disk(node, bytes(SIZE))  # the next one shares its file
        segment = moved_to_disk(node, data)
        node.hear(b"one", r.REQUEST, 1, "fetch", *node.key(segment.number), (), True, 0)
        assert node.answers(b"one") == [ValueAnswer(size=SIZE)]
        assert node.serving.open(node.key(segment.number), b"one") is None
        for start in range(0, SIZE, PIECE):
            node.read(b"one", segment.number, start)
            await until(lambda end=start + PIECE: len(node.pieces(b"one")) == end)
        assert node.pieces(b"one") == data

    run(tmp_path, test, movers=True)


# --- passing on --------------------------------------------------------------------------
def test_what_has_arrived_is_passed_on_before_the_rest_is_here(tmp_path: Path) -> None:
    data = os.urandom(SIZE)

    async def test(node: Node) -> None:
        arriving = node.transfers.arriving[FAR] = Arriving()
        segment = arriving.segment = node.store.create(SIZE, 0, ORIGIN, node.id)
        node.fetch(b"one", 7, FAR)
        await asyncio.sleep(0)
        assert not node.answers(b"one")
        arriving.begin()
        await until(lambda: node.answers(b"one"))
        assert node.answers(b"one") == [ValueAnswer(size=SIZE)]
        for start in range(0, SIZE, PIECE):
            node.read(b"one", 7, start, FAR)
        for start in range(0, SIZE, PIECE):
            os.pwrite(segment.fd, data[start : start + PIECE], start)
            arriving.came(PIECE)
            await until(lambda: len(node.pieces(b"one")) == arriving.offset)
        node.store.seal(segment.number)
        node.store.free(segment.number)
        arriving.end()
        assert node.pieces(b"one") == data
        assert not node.store.used
        await until(lambda: not node.serving.table_sizes()["answers"])

    run(tmp_path, test)


@pytest.mark.parametrize("begun", [True, False])
def test_what_ends_on_its_way_here_ends_where_it_is_passed_on_to(
    tmp_path: Path, begun: bool
) -> None:
    async def test(node: Node) -> None:
        arriving = node.transfers.arriving[FAR] = Arriving()
        segment = arriving.segment = node.store.create(SIZE, 0, ORIGIN, node.id)
        if begun:
            arriving.begin()
            arriving.came(1000)
            node.read(b"one", 7, 0, FAR)
        else:
            node.fetch(b"one", 7, FAR)
        await asyncio.sleep(0)
        node.store.seal(segment.number)
        node.store.free(segment.number)
        arriving.end()
        number = 2 if begun else 1
        await until(lambda: node.refused(b"one", number))
        await until(lambda: not node.store.used)

    run(tmp_path, test)


def test_who_is_sent_to_a_node_that_waits_for_room_goes_elsewhere_at_once(tmp_path: Path) -> None:
    async def test(node: Node) -> None:
        node.transfers.arriving[FAR] = Arriving()
        node.fetch(b"one", 7, FAR)
        await until(lambda: node.refused(b"one"))
        assert "not on this node" in node.refused(b"one")[0]

    run(tmp_path, test)


def test_who_waits_at_the_node_of_the_owner_for_what_does_not_come_there_is_sent_elsewhere(
    tmp_path: Path,
) -> None:
    async def test(node: Node) -> None:
        node.hub.joined(ORIGIN, f"unix:{tmp_path}/origin")
        node.hear(ORIGIN, r.WROTE, 7, OWNER)
        key = (ORIGIN, 7, node.id)
        assert node.directory.ask(key, node.id, (), small=False) == ORIGIN
        arriving = node.transfers.arriving[key] = Arriving()
        segment = arriving.segment = node.store.create(SIZE, 0, ORIGIN, node.id)
        for other in (b"one", b"two"):
            node.fetch(other, 7, key)
        await asyncio.sleep(0)
        assert not node.answers(b"two")
        node.store.seal(segment.number)
        node.store.free(segment.number)
        del node.transfers.arriving[key]
        arriving.end()  # nobody here waits for it any more
        await until(lambda: node.answers(b"two") or node.refused(b"two"))
        assert [answer.ask for answer in node.answers(b"two")] == [ORIGIN]

    run(tmp_path, test)


def test_a_copy_that_is_whole_is_given_though_its_transfer_has_not_been_ended(
    tmp_path: Path,
) -> None:
    """The mover may have forgotten the transfer by then."""

    async def test(node: Node) -> None:
        arriving = node.transfers.arriving[FAR] = Arriving()
        arriving.segment = node.store.create(SIZE, 0, ORIGIN, node.id)
        arriving.begin(3)
        arriving.came(SIZE - 1)
        opened = node.serving.open(FAR, b"one")
        assert opened is not None
        assert opened.job == 3
        arriving.came(1)
        opened = node.serving.open(FAR, b"one")
        assert opened is not None
        assert opened.job == 0

    run(tmp_path, test)


def test_a_copy_is_passed_on_until_it_goes(tmp_path: Path) -> None:
    data = os.urandom(SIZE)

    async def test(node: Node) -> None:
        copy = written(node, data)
        node.copies.add(FAR, copy.number)
        node.fetch(b"one", 7, FAR)
        assert node.answers(b"one")[0].size == SIZE
        node.read(b"one", 7, PIECE, FAR)
        assert node.pieces(b"one") == data[PIECE : 2 * PIECE]
        node.copies.remove(copy.number)
        node.store.free(copy.number)
        node.read(b"one", 7, 2 * PIECE, FAR)
        assert "not on this node" in node.refused(b"one", 2)[-1]
        assert not node.store.used

    run(tmp_path, test)
