"""One object for many nodes, over real streams: who has it passes it on."""

from __future__ import annotations

import asyncio
import contextlib
import os
from typing import TYPE_CHECKING, Any

import pytest
from node_ends import End, message, until

from miniray.common.config import config
from miniray.exceptions import ObjectLostError
from miniray.node.relay import relayed as r
from miniray.node.relay.relayed import Relayed
from miniray.node.transfer import transfers as transfers_module
from miniray.node.transfer.directory import FANOUT

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine, Iterator
    from pathlib import Path

    from miniray.node.relay.relay import NodeRequest

SIZE = 12_000_001  # twelve pieces
OWNER, READER = b"owner000", b"reader00"


def written(end: End, data: bytes) -> int:
    segment = end.store.create(len(data), 0, OWNER, OWNER)
    os.pwrite(segment.fd, data, 0)
    end.store.seal(segment.number)
    return segment.number


class Cluster:
    """Nodes that know each other; the first has the objects."""

    def __init__(self, folder: Path, count: int) -> None:
        self.ends = [End(folder, f"n{number}") for number in range(count)]
        self.source = self.ends[0]
        #: Which nodes have told the source of a whole copy, and of what.
        self.copied: set[tuple[bytes, int]] = set()
        heard = self.source.hub.notices[r.COPIED]

        def copied(node: bytes, told: Relayed) -> None:
            heard(node, told)
            self.copied |= {(node, key[1]) for key in told.items}

        self.source.hub.notices[r.COPIED] = copied

    async def start(self, *, source_dialable: bool) -> None:
        for end in self.ends:
            await end.start()
        for end in self.ends:
            for other in self.ends:
                dialable = source_dialable or other is not self.source
                end.hub.joined(other.id, other.address if dialable else "")
        for end in self.ends[1:]:
            self.source.hub.send(end.id, message(1))
        await until(lambda: all(end.got for end in self.ends[1:]))

    @contextlib.contextmanager
    def busy(self, number: int) -> Iterator[None]:
        """The source serves as many as it may meanwhile: who asks is sent elsewhere."""
        others = [b"busy%d" % count for count in range(FANOUT)]
        tried = (*(end.id for end in self.ends[1:]), b"nobody")  # so that it asks the source
        for other in others:
            self.hear(other, r.REQUEST, 1, "fetch", *self.source.key(number), tried, False, 0)
        yield

    def hear(self, node: bytes, notice: str, *items: Any) -> None:
        """Have the source hear from a node that is not there."""
        self.source.hub.notices[notice](node, Relayed(notice=notice, items=items))

    async def fetch(self, end: End, number: int) -> bytes:
        """Copy it there as `NodeObjects` would."""
        try:
            segment = await end.objects.map(self.source.key(number), SIZE, READER, 1)
        except asyncio.CancelledError:
            end.objects.pulls.withdraw(READER, 1)
            raise
        await until(lambda: (end.id, number) in self.copied)
        return os.pread(segment.fd, SIZE, 0)


def run(
    folder: Path,
    count: int,
    test: Callable[[Cluster], Coroutine[Any, Any, None]],
    *,
    source_dialable: bool = True,
) -> None:
    async def main() -> None:
        cluster = Cluster(folder, count)
        try:
            await cluster.start(source_dialable=source_dialable)
            await asyncio.wait_for(test(cluster), 60)
        finally:
            for end in cluster.ends:
                await end.stop()

    asyncio.run(main())


class Sent:
    """Counts the bytes of values that nodes send, and what they are asked."""

    def __init__(self, *ends: End) -> None:
        self.bytes: dict[bytes, int] = {}
        self.asked: dict[bytes, int] = {}
        for end in ends:
            self._watch(end)

    def _watch(self, end: End) -> None:
        send, fetch = end.hub.send, end.requests.handlers["fetch"]
        self.bytes[end.id] = self.asked[end.id] = 0

        def counted(node: bytes, sent: Relayed) -> bool:
            if sent.notice == r.ANSWER:
                self.bytes[end.id] += sum(map(len, sent.bodies))
            return send(node, sent)

        def asked(*args: Any) -> None:
            self.asked[end.id] += 1
            fetch(*args)

        end.hub.send = counted  # type: ignore[method-assign]
        end.requests.handlers["fetch"] = asked


@pytest.mark.parametrize("dialable", [True, False], ids=["source dialled", "source dials"])
def test_eight_nodes_get_it_and_the_source_sends_it_to_few(tmp_path: Path, dialable: bool) -> None:
    data = os.urandom(SIZE)

    async def test(cluster: Cluster) -> None:
        number = written(cluster.source, data)
        sent = Sent(*cluster.ends)
        got = await asyncio.gather(*(cluster.fetch(end, number) for end in cluster.ends[1:]))
        assert got == [data] * 8
        assert sent.bytes[cluster.source.id] < 4 * SIZE
        assert sum(sent.bytes.values()) == 8 * SIZE  # nothing went twice
        cluster.source.directory.free(cluster.source.key(number))
        await until(lambda: not cluster.source.store.used)
        await until(lambda: not any(len(end.copies) for end in cluster.ends[1:]))

    run(tmp_path, 9, test, source_dialable=dialable)


def test_where_a_copy_is_complete_the_next_is_made_from_it(tmp_path: Path) -> None:
    async def test(cluster: Cluster) -> None:
        source, holder, late = cluster.ends
        number = written(source, bytes(SIZE))
        await cluster.fetch(holder, number)
        with cluster.busy(number):
            sent = Sent(source, holder)
            await cluster.fetch(late, number)
        assert sent.bytes == {holder.id: SIZE, source.id: 0}

    run(tmp_path, 3, test)


def test_a_holder_that_dies_is_left_at_the_offset_where_it_was(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    data = os.urandom(SIZE)

    async def test(cluster: Cluster) -> None:
        source, holder, late = cluster.ends
        number = written(source, data)
        await cluster.fetch(holder, number)
        offsets: list[int] = []
        write = transfers_module.write_all

        def write_and_cut(fd: int, piece: bytes, offset: int) -> None:
            write(fd, piece, offset)
            offsets.append(offset)
            if len(offsets) == 3:
                late.hub.died(holder.id)
                late.requests.node_unreachable(holder.id)

        monkeypatch.setattr(transfers_module, "write_all", write_and_cut)
        with cluster.busy(number):
            sent = Sent(source, holder)
            assert await cluster.fetch(late, number) == data
        assert offsets == sorted(set(offsets)), "a piece came twice"
        assert sent.bytes[holder.id] > 1_000_000
        assert 1_000_000 < sent.bytes[source.id] < SIZE

    run(tmp_path, 3, test)


def test_a_holder_without_its_copy_is_asked_once(tmp_path: Path) -> None:
    data = os.urandom(SIZE)

    async def test(cluster: Cluster) -> None:
        source, holder, late, later = cluster.ends
        number = written(source, data)
        await cluster.fetch(holder, number)
        copy = holder.copies.find(source.key(number))
        assert copy is not None
        holder.copies.remove(copy)  # it needed the memory
        sent = Sent(holder)
        with cluster.busy(number):
            copying = asyncio.ensure_future(cluster.fetch(late, number))
            await until(lambda: sent.asked[holder.id])
        assert await copying == data
        with cluster.busy(number):
            await cluster.fetch(later, number)  # from the one that was late before
        assert sent.asked[holder.id] == 1

    run(tmp_path, 4, test)


def test_a_holder_that_sends_nothing_is_left(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    data = os.urandom(SIZE)
    monkeypatch.setenv("MINIRAY_TRANSFER_STALL", "1")
    config.cache_clear()

    async def test(cluster: Cluster) -> None:
        source, holder, late = cluster.ends
        number = written(source, data)
        await cluster.fetch(holder, number)
        read = holder.requests.handlers["read"]
        reads = iter(range(3))

        def stall(*args: Any) -> None:
            if next(reads, None) is not None:
                read(*args)

        holder.requests.handlers["read"] = stall
        with cluster.busy(number):
            copying = asyncio.ensure_future(cluster.fetch(late, number))
            await until(lambda: any(a.offset for a in late.transfers.arriving.values()))
        assert await copying == data
        await until(lambda: not any(late.id in segment.mappers for segment in holder.store))

    try:
        run(tmp_path, 3, test)
    finally:
        config.cache_clear()


def test_a_reader_that_ends_half_way_leaves_its_place_to_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    data = os.urandom(SIZE)

    async def test(cluster: Cluster) -> None:
        source, first, late = cluster.ends
        number = written(source, data)
        began = asyncio.Event()
        write = transfers_module.write_all

        def stand_still(*args: Any) -> None:
            began.set()
            write(*args)

        monkeypatch.setattr(transfers_module, "write_all", stand_still)
        first_copy = asyncio.ensure_future(cluster.fetch(first, number))
        await began.wait()
        late_copy = asyncio.ensure_future(cluster.fetch(late, number))
        first_copy.cancel()
        assert await late_copy == data
        with pytest.raises(asyncio.CancelledError):
            await first_copy
        await until(lambda: not first.store.used)
        await until(lambda: not any(segment.mappers for segment in source.store))

    run(tmp_path, 3, test)


def test_a_copy_that_the_node_of_the_owner_evicts_half_way_comes_from_who_has_it(
    tmp_path: Path,
) -> None:
    data = os.urandom(SIZE)

    async def test(cluster: Cluster) -> None:
        home, writer, late = cluster.ends
        segment = writer.store.create(SIZE, 0, OWNER, OWNER)
        segment.home = home.id
        os.pwrite(segment.fd, data, 0)
        writer.objects.seal(segment.number, "")
        key = (writer.id, segment.number, home.id)
        await until(lambda: len(home.directory))
        await home.objects.map(key, SIZE, READER, 1)
        tried = (home.id, b"nobody")
        for count in range(FANOUT):  # the writer is busy
            cluster.hear(b"busy%d" % count, r.REQUEST, 1, "fetch", *key, tried, False, 0)
        read = home.requests.handlers["read"]

        def evict(*args: Any) -> None:
            copy = home.copies.find(key)
            if copy is not None and args[-2] > SIZE // 2:
                home.copies.remove(copy)
            read(*args)

        home.requests.handlers["read"] = evict
        copy = await late.objects.map(key, SIZE, READER, 1)
        assert home.copies.find(key) is None, "it did not come from there"
        assert os.pread(copy.fd, SIZE, 0) == data

    run(tmp_path, 3, test)


def test_a_value_freed_half_way_is_lost_for_who_comes_back(tmp_path: Path) -> None:
    async def test(cluster: Cluster) -> None:
        source, holder, late = cluster.ends
        number = written(source, bytes(SIZE))
        await cluster.fetch(holder, number)

        def freed_meanwhile(asked: NodeRequest, *_: object) -> None:
            source.directory.free(source.key(number))
            asked.refuse("it was dropped")

        holder.requests.handlers["fetch"] = freed_meanwhile
        with cluster.busy(number), pytest.raises(ObjectLostError):
            await cluster.fetch(late, number)
        await until(lambda: not late.store.used)

    run(tmp_path, 3, test)
