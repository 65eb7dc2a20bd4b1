"""A value whose node dies while it is on its way: it goes on from a copy on another node."""

from __future__ import annotations

import asyncio
import os
from typing import TYPE_CHECKING, Any

import pytest
from node_ends import End, until

from miniray.exceptions import ObjectLostError
from miniray.node.base.question import Question
from miniray.node.store.admission_queue import Claim
from miniray.node.transfer import mover_sends, showing
from miniray.node.transfer import transfers as transfers_module

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine
    from pathlib import Path

OWNER = b"owner000"
SIZE = 12_000_001  # twelve pieces


class Cluster:
    """Nodes of which the first has the value, and the others know each other."""

    def __init__(self, folder: Path, count: int, *, movers: bool) -> None:
        self.ends = [End(folder, f"n{number}", movers=movers) for number in range(count)]
        self.source = self.ends[0]

    async def start(self) -> None:
        for end in self.ends:
            await end.start()
        for end in self.ends:
            for other in self.ends:
                end.hub.joined(other.id, other.address)

    def put(self, data: bytes) -> int:
        segment = self.source.store.create(len(data), 0, OWNER, OWNER)
        os.pwrite(segment.fd, data, 0)
        self.source.store.seal(segment.number)
        return segment.number

    async def put_with_copies(self, data: bytes, holders: list[End]) -> int:
        number = self.put(data)
        for holder in holders:
            await self.fetch(holder, number, len(data))
        return number

    async def fetch(self, end: End, number: int, size: int) -> bytes:
        """As ``NodeObjects`` does."""
        segment, owner, key = await end.transfers.copy(self.source.id, number, Claim(size))
        assert owner == (OWNER, self.source.id)
        end.store.seal(segment.number)
        end.serving.copies.add(key, segment.number, owner)
        return os.pread(segment.fd, size, 0)

    def dies(self, end: End) -> None:
        """As the other daemons hear it: connections break, and the head says so."""
        end.breaker.refuses = True
        end.breaker.cut()
        end.mover.close()
        for other in self.ends:
            if other is not end:
                other.hub.died(end.id)
                other.serving.node_died(end.id)
                other.transfers.node_died(end.id)


def run(
    folder: Path,
    count: int,
    test: Callable[[Cluster], Coroutine[Any, Any, None]],
    *,
    movers: bool = False,
) -> None:
    async def main() -> None:
        cluster = Cluster(folder, count, movers=movers)
        try:
            await cluster.start()
            await asyncio.wait_for(test(cluster), 60)
        finally:
            for end in cluster.ends:
                await end.stop()

    asyncio.run(main())


class Writes:
    """What a daemon writes of values that come through it; does something at some of them."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.offsets: list[int] = []
        self.at: dict[int, Callable[[], object]] = {}
        self._write = transfers_module.write_all
        monkeypatch.setattr(transfers_module, "write_all", self._note)

    def _note(self, fd: int, piece: bytes, offset: int) -> None:
        self._write(fd, piece, offset)
        self.offsets.append(offset)
        action = self.at.pop(len(self.offsets), None)
        if action is not None:
            asyncio.get_running_loop().call_soon(action)


def test_it_goes_on_where_it_was(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    data = os.urandom(SIZE)

    async def test(cluster: Cluster) -> None:
        source, holder, late = cluster.ends
        number = await cluster.put_with_copies(data, [holder])
        writes = Writes(monkeypatch)
        writes.at[3] = lambda: cluster.dies(source)
        assert await cluster.fetch(late, number, SIZE) == data
        assert len(writes.offsets) > 3
        assert writes.offsets == sorted(set(writes.offsets)), "a piece came twice"
        assert not late.transfers.arriving
        assert not late.transfers.others._questions
        there = holder.serving.copies.find((source.id, number))
        assert there is not None
        assert late.serving.copies.find((holder.id, there.number)) is not None  # of that, not gone
        spread = holder.serving._spreads[there.number].spread
        await until(lambda: late.id in spread._whole)

    run(tmp_path, 3, test)


def test_it_goes_on_where_it_was_between_movers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(showing, "PIECE", 4096)  # so it takes long
    size = 128 << 20
    data = os.urandom(1 << 20) * 128
    begun_at: list[int] = []
    send = mover_sends.moving.send

    def noted(sock: Any, fd: int, offset: int, *more: Any) -> None:
        begun_at.append(offset)
        send(sock, fd, offset, *more)

    monkeypatch.setattr(mover_sends.moving, "send", noted)

    async def test(cluster: Cluster) -> None:
        for end in cluster.ends:
            end.store.capacity = end.store.memories.capacity = 4 * size
        source, holder, late = cluster.ends
        number = await cluster.put_with_copies(data, [holder])
        copying = asyncio.ensure_future(cluster.fetch(late, number, size))
        await until(lambda: any(there.offset for there in late.transfers.arriving.values()))
        cluster.dies(source)
        assert await copying == data
        assert begun_at[:2] == [0, 0]
        assert 0 < begun_at[2] < size

    run(tmp_path, 3, test, movers=True)


def test_without_another_copy_it_is_lost_and_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def test(cluster: Cluster) -> None:
        source, _, late = cluster.ends
        number = cluster.put(bytes(SIZE))
        writes = Writes(monkeypatch)
        writes.at[3] = lambda: cluster.dies(source)
        with pytest.raises(ObjectLostError, match=f"node {source.id.hex()} is gone"):
            await cluster.fetch(late, number, SIZE)
        assert not late.store.used
        assert not late.transfers.arriving

    run(tmp_path, 3, test)


def test_it_survives_the_death_of_the_node_that_took_the_place(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    data = os.urandom(SIZE)

    async def test(cluster: Cluster) -> None:
        source, *holders, late = cluster.ends
        number = await cluster.put_with_copies(data, holders)
        writes = Writes(monkeypatch)

        def feeder_dies() -> None:
            (feeder,) = {there.feeder for there in late.transfers.arriving.values()}
            cluster.dies(next(end for end in cluster.ends if end.id == feeder))

        writes.at[3] = lambda: cluster.dies(source)
        writes.at[6] = feeder_dies
        assert await cluster.fetch(late, number, SIZE) == data
        assert not writes.at
        assert writes.offsets == sorted(set(writes.offsets)), "a piece came twice"

    run(tmp_path, 4, test)


def test_a_copy_that_was_dropped_meanwhile_is_not_asked_for_twice(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    data = os.urandom(SIZE)

    async def test(cluster: Cluster) -> None:
        source, *holders, late = cluster.ends
        number = await cluster.put_with_copies(data, holders)
        empty = holders[0]
        copy = empty.serving.copies.find((source.id, number))
        assert copy is not None
        empty.store.free(copy.number)  # it says that it has it, but cannot serve it
        asked: list[int] = []
        serve = empty.serving.serve
        monkeypatch.setattr(
            empty.serving, "serve", lambda *args, **more: (asked.append(1), serve(*args, **more))[1]
        )
        writes = Writes(monkeypatch)
        writes.at[3] = lambda: cluster.dies(source)
        assert await cluster.fetch(late, number, SIZE) == data
        assert len(asked) <= 1

    run(tmp_path, 4, test)


def test_those_that_go_on_from_one_copy_do_so_two_at_a_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    data = os.urandom(SIZE)

    async def test(cluster: Cluster) -> None:
        source, holder, *late = cluster.ends
        number = await cluster.put_with_copies(data, [holder])
        most = 0
        place = holder.serving._place

        async def counted(*args: Any) -> Any:
            nonlocal most
            found = await place(*args)
            of_copy = next(iter(holder.serving._spreads.values())).spread
            most = max(most, of_copy._children.get(holder.id, 0))
            return found

        monkeypatch.setattr(holder.serving, "_place", counted)
        writes = Writes(monkeypatch)
        writes.at[3 * len(late)] = lambda: cluster.dies(source)
        copies = await asyncio.gather(*(cluster.fetch(end, number, SIZE) for end in late))
        assert copies == [data] * len(late)
        assert 1 <= most <= 2

    run(tmp_path, 7, test)


@pytest.mark.parametrize("later", range(4))
def test_nothing_is_asked_for_anybody_who_leaves_just_when_the_answer_comes(later: int) -> None:
    async def main() -> None:
        question = Question([b"n1"])
        asking = asyncio.ensure_future(question.wait(60))
        for _ in range(5):
            await asyncio.sleep(0)
        question.answered(b"n1", 1)
        for _ in range(later):
            await asyncio.sleep(0)
        if asking.cancel():
            with pytest.raises(asyncio.CancelledError):
                await asking

    asyncio.run(main())
