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
from miniray.node.store.admission_queue import Claim
from miniray.node.transfer import spread as spread_module
from miniray.node.transfer import transfers as transfers_module

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, AsyncIterator, Callable, Coroutine
    from pathlib import Path

    from miniray.node.transfer.arriving import Key

SIZE = 12_000_001  # twelve pieces
OWNER = b"owner000"


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

    @contextlib.asynccontextmanager
    async def busy(self, number: int) -> AsyncIterator[None]:
        """The source serves as many as it may meanwhile: who asks is sent elsewhere."""
        others = [
            self.source.serving.serve(self.source.id, number, 0, b"busy%d" % count)
            for count in range(spread_module.FANOUT)
        ]
        for pieces in others:
            await anext(pieces)
        try:
            yield
        finally:
            for pieces in others:
                await pieces.aclose()

    async def fetch(self, end: End, number: int) -> bytes:
        """Copy it there as `NodeObjects` would."""
        key: Key = (self.source.id, number)
        segment, owner, _ = await end.transfers.copy(*key, Claim(SIZE))
        assert owner == (OWNER, self.source.id)
        end.store.seal(segment.number)
        end.serving.copies.add(key, segment.number, owner)
        spreading = self.source.serving._spreads[number]
        await until(lambda: end.id in spreading.spread._whole)
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
    """Counts what nodes send: how many transfers at once, and how many bytes."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *ends: End) -> None:
        self.now: dict[bytes, int] = {}
        self.most: dict[bytes, int] = {}
        self.bytes: dict[bytes, int] = {}
        for end in ends:
            monkeypatch.setattr(end.serving, "serve", self._counted(end))

    def _counted(self, end: End) -> Callable[..., AsyncGenerator[bytes, None]]:
        serve = end.serving.serve

        async def counted(*args: Any, **kwargs: Any) -> AsyncGenerator[bytes, None]:
            sending = 0
            async with contextlib.aclosing(serve(*args, **kwargs)) as pieces:
                try:
                    async for piece in pieces:
                        if len(piece) > 1000 and not sending:
                            sending = 1
                            self.now[end.id] = self.now.get(end.id, 0) + 1
                            self.most[end.id] = max(self.most.get(end.id, 0), self.now[end.id])
                        self.bytes[end.id] = self.bytes.get(end.id, 0) + len(piece)
                        yield piece
                finally:
                    self.now[end.id] = self.now.get(end.id, 0) - sending

        return counted


@pytest.mark.parametrize("dialable", [True, False], ids=["source dialled", "source dials"])
def test_eight_nodes_get_it_and_none_serves_more_than_two(
    tmp_path: Path, dialable: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    data = os.urandom(SIZE)

    async def test(cluster: Cluster) -> None:
        number = written(cluster.source, data)
        sent = Sent(monkeypatch, *cluster.ends)
        got = await asyncio.gather(*(cluster.fetch(end, number) for end in cluster.ends[1:]))
        assert got == [data] * 8
        assert max(sent.most.values()) <= 2
        assert sent.bytes[cluster.source.id] < 4 * SIZE
        assert sum(sent.bytes.values()) < 8 * SIZE + 10_000  # nothing went twice
        cluster.source.store.free(number)
        await until(lambda: not cluster.source.store.used)
        nodes = {end.id for end in cluster.ends[1:]}
        assert cluster.source.serving.forget(number) == nodes

    run(tmp_path, 9, test, source_dialable=dialable)


def test_where_a_copy_is_complete_the_next_is_made_from_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def test(cluster: Cluster) -> None:
        source, holder, late = cluster.ends
        number = written(source, bytes(SIZE))
        await cluster.fetch(holder, number)
        async with cluster.busy(number):
            sent = Sent(monkeypatch, source, holder)
            await cluster.fetch(late, number)
        assert sent.bytes[holder.id] > SIZE
        assert sent.bytes[source.id] < 1000

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
        cut = asyncio.Event()

        def write_and_cut(fd: int, piece: bytes, offset: int) -> None:
            write(fd, piece, offset)
            offsets.append(offset)
            if len(offsets) == 3:
                holder.breaker.refuses = True
                holder.breaker.cut()
                cut.set()

        monkeypatch.setattr(transfers_module, "write_all", write_and_cut)
        async with cluster.busy(number):
            sent = Sent(monkeypatch, source, holder)
            copying = asyncio.ensure_future(cluster.fetch(late, number))
            cutting = asyncio.ensure_future(cut.wait())
            await asyncio.wait({copying, cutting}, return_when=asyncio.FIRST_COMPLETED)
            assert cutting.done(), f"it ended after pieces at {offsets}: {copying}"
        assert await copying == data
        assert offsets == sorted(set(offsets)), "a piece came twice"
        assert sent.bytes[holder.id] > 1_000_000
        assert 1_000_000 < sent.bytes[source.id] < SIZE

    run(tmp_path, 3, test)


def test_a_holder_without_its_copy_is_asked_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    data = os.urandom(SIZE)

    async def test(cluster: Cluster) -> None:
        source, holder, late, later = cluster.ends
        number = written(source, data)
        await cluster.fetch(holder, number)
        copy = holder.serving.copies.find((source.id, number))
        assert copy is not None
        holder.serving.copies.remove(copy.number)  # it needed the memory
        asked: list[int] = []
        serve = holder.serving.serve
        monkeypatch.setattr(
            holder.serving,
            "serve",
            lambda *args, **more: (asked.append(1), serve(*args, **more))[1],
        )
        async with cluster.busy(number):
            copying = asyncio.ensure_future(cluster.fetch(late, number))
            await until(lambda: asked)
        assert await copying == data
        async with cluster.busy(number):
            await cluster.fetch(later, number)  # from the one that was late before
        assert len(asked) == 1

    run(tmp_path, 4, test)


def test_a_holder_that_sends_nothing_is_left(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    data = os.urandom(SIZE)
    monkeypatch.setenv("MINIRAY_TRANSFER_STALL", "0.2")
    config.cache_clear()

    async def test(cluster: Cluster) -> None:
        source, holder, late = cluster.ends
        number = written(source, data)
        await cluster.fetch(holder, number)
        serve = holder.serving.serve

        async def stall(*args: Any, **more: Any) -> AsyncGenerator[bytes, None]:
            async with contextlib.aclosing(serve(*args, **more)) as pieces:
                yield await anext(pieces)
                yield await anext(pieces)
                await asyncio.Event().wait()

        monkeypatch.setattr(holder.serving, "serve", stall)
        async with cluster.busy(number):
            copying = asyncio.ensure_future(cluster.fetch(late, number))
            await until(lambda: any(a.offset for a in late.transfers.arriving.values()))
        assert await copying == data
        await until(lambda: not holder.store._by_mapper)  # the call there has ended

    try:
        run(tmp_path, 3, test)
    finally:
        config.cache_clear()


def test_what_another_node_passes_on_does_not_pile_up_where_it_is_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    data = bytes(60_000_000)
    sent = written_there = most = 0

    async def test(cluster: Cluster) -> None:
        source, holder, reader = cluster.ends
        for end in cluster.ends:
            for other in cluster.ends:  # not by way of this process, which would be the slowest
                end.hub.joined(other.id, f"unix:{other._path}")
        number = written(source, data)
        key: Key = (source.id, number)
        segment, owner, _ = await holder.transfers.copy(*key, Claim(len(data)))
        holder.store.seal(segment.number)
        holder.serving.copies.add(key, segment.number, owner)
        serve, write = holder.serving.serve, transfers_module.write_all

        async def count_sent(*args: Any, **kwargs: Any) -> AsyncGenerator[bytes, None]:
            nonlocal sent, most
            async with contextlib.aclosing(serve(*args, **kwargs)) as pieces:
                async for piece in pieces:
                    sent += len(piece)
                    most = max(most, sent - written_there)
                    yield piece

        def count_written(fd: int, piece: bytes, offset: int) -> None:
            nonlocal written_there
            write(fd, piece, offset)
            written_there += len(piece)

        monkeypatch.setattr(holder.serving, "serve", count_sent)
        monkeypatch.setattr(transfers_module, "write_all", count_written)
        async with cluster.busy(number):
            await reader.transfers.copy(*key, Claim(len(data)))
        assert written_there == len(data)
        # What waits to be written to the stream, and what gRPC and the kernel hold.
        assert most < 12_000_000

    run(tmp_path, 3, test)


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
        assert not first.store.used
        await until(lambda: not source.store._by_mapper)

    run(tmp_path, 3, test)


def test_a_value_freed_half_way_is_lost_for_who_comes_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def test(cluster: Cluster) -> None:
        source, holder, late = cluster.ends
        number = written(source, bytes(SIZE))
        await cluster.fetch(holder, number)
        began = asyncio.Event()

        async def refuse_later(*_: Any, **_more: Any) -> AsyncGenerator[bytes, None]:
            began.set()
            await until(lambda: source.store.used == 0)
            raise ObjectLostError("segment", "freed")
            yield b""

        monkeypatch.setattr(holder.serving, "serve", refuse_later)
        async with cluster.busy(number):
            copying = asyncio.ensure_future(cluster.fetch(late, number))
            await began.wait()
        source.store.free(number)
        source.serving.forget(number)
        with pytest.raises(ObjectLostError):
            await copying
        assert not late.store.used

    run(tmp_path, 3, test)
