"""Objects between nodes: fetched from those that can be dialled, pushed by those that cannot."""

from __future__ import annotations

import asyncio
import errno
import os
from typing import TYPE_CHECKING, Any

import pytest
from node_ends import End, message, two_ends, until

from miniray.exceptions import ObjectLostError, ObjectStoreFullError
from miniray.node.store import spill_files
from miniray.node.store.admission_queue import Claim
from miniray.node.transfer import serving as serving_module
from miniray.node.transfer import transfers as transfers_module

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine
    from pathlib import Path

    from miniray.node.store.segments import Segment

SIZE = 12_000_001  # twelve pieces
OWNER = b"owner000"

both_ways = pytest.mark.parametrize("dialable", [True, False], ids=["both dial", "one dials"])


def written(end: End, data: bytes) -> int:
    """A value in the store of a node; returns its number."""
    segment = end.store.create(len(data), 0, OWNER, OWNER)
    os.pwrite(segment.fd, data, 0)
    end.store.seal(segment.number)
    return segment.number


def content(segment: Segment, size: int) -> bytes:
    return os.pread(segment.fd, size, 0)


def run(
    folder: Path, dialable: bool, test: Callable[[End, End], Coroutine[Any, Any, None]]
) -> None:
    """Call the test with a node that has objects and one that wants them; the first dials."""

    async def main() -> None:
        async with two_ends(folder, dialable=dialable) as (a, b):
            a.hub.send(b.id, message(1))
            await until(lambda: b.got)
            await asyncio.wait_for(test(a, b), 30)

    asyncio.run(main())


@both_ways
def test_an_object_arrives_whole_and_leaves_nothing_open(tmp_path: Path, dialable: bool) -> None:
    data = os.urandom(SIZE)

    async def test(a: End, b: End) -> None:
        number = written(a, data)
        found = await asyncio.gather(
            *(b.transfers.copy(a.id, number, Claim(SIZE)) for _ in range(3))
        )
        copies = [copy for copy, *_ in found]
        assert [content(copy, SIZE) for copy in copies] == [data] * 3
        a.store.free(number)
        await until(lambda: not a.store.used)  # nobody maps it any more
        assert a.serving.forget(number) == {b.id}
        assert not len(b.transfers.pushes)

    run(tmp_path, dialable, test)


@both_ways
def test_an_object_that_is_not_there_is_lost(tmp_path: Path, dialable: bool) -> None:
    async def test(a: End, b: End) -> None:
        with pytest.raises(ObjectLostError):
            await b.transfers.copy(a.id, 7, Claim(SIZE))
        assert not b.store.used

    run(tmp_path, dialable, test)


@both_ways
def test_a_broken_transfer_goes_on_where_it_was(
    tmp_path: Path, dialable: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    data = os.urandom(SIZE)

    async def test(a: End, b: End) -> None:
        number = written(a, data)
        offsets: list[int] = []
        write = transfers_module.write_all

        def write_and_cut(fd: int, piece: bytes, offset: int) -> None:
            write(fd, piece, offset)
            offsets.append(offset)
            if len(offsets) in (3, 7):
                a.breaker.cut()
                b.breaker.cut()

        monkeypatch.setattr(transfers_module, "write_all", write_and_cut)
        copy, *_ = await b.transfers.copy(a.id, number, Claim(SIZE))
        assert content(copy, SIZE) == data
        assert offsets == sorted(set(offsets)), "a piece came twice"

    run(tmp_path, dialable, test)


@both_ways
def test_who_stops_waiting_stops_the_transfer(
    tmp_path: Path, dialable: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def test(a: End, b: End) -> None:
        number = written(a, bytes(SIZE))
        began = asyncio.Event()
        monkeypatch.setattr(transfers_module, "write_all", lambda *_: began.set())
        copying = asyncio.ensure_future(b.transfers.copy(a.id, number, Claim(SIZE)))
        await began.wait()
        copying.cancel()
        with pytest.raises(asyncio.CancelledError):
            await copying
        a.store.free(number)
        await until(lambda: not a.store.used)
        assert not b.store.used
        assert not len(b.transfers.pushes)

    run(tmp_path, dialable, test)


def test_a_node_that_is_gone_has_no_objects(tmp_path: Path) -> None:
    async def test(_a: End, b: End) -> None:
        with pytest.raises(ObjectLostError, match="is gone"):
            await b.transfers.copy(b"nobody", 1, Claim(SIZE))

    run(tmp_path, True, test)


def test_a_push_that_fails_in_an_unknown_way_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def fail(*_: Any) -> None:
        raise OSError("the disk is on fire")

    async def test(a: End, b: End) -> None:
        monkeypatch.setattr(serving_module, "push", fail)
        with pytest.raises(ObjectLostError, match="on fire"):
            await b.transfers.copy(a.id, written(a, bytes(SIZE)), Claim(SIZE))

    run(tmp_path, False, test)


def test_nothing_is_kept_for_a_node_that_dies_before_it_is_reached(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun: list[bool] = []

    async def never(*_: Any) -> None:
        begun.append(True)
        await asyncio.Event().wait()

    async def test(a: End, b: End) -> None:
        monkeypatch.setattr(serving_module, "push", never)
        number = written(a, bytes(SIZE))
        copying = asyncio.ensure_future(b.transfers.copy(a.id, number, Claim(SIZE)))
        await until(lambda: begun)  # from then on what is sent is held
        copying.cancel()
        a.store.free(number)
        assert a.store.used
        a.serving.node_died(b.id)
        await until(lambda: not a.store.used)

    run(tmp_path, False, test)


@both_ways
def test_a_copy_for_which_there_is_no_memory_arrives_on_disk(
    tmp_path: Path, dialable: bool
) -> None:
    data = os.urandom(SIZE)

    async def test(a: End, b: End) -> None:
        number = written(a, data)
        b.store.create(b.store.capacity, 0, OWNER, OWNER)
        copy, *_ = await b.transfers.copy(a.id, number, Claim(SIZE))
        assert not copy.in_memory
        assert content(copy, SIZE) == data
        b.store.seal(copy.number)
        b.store.free(copy.number)
        await until(lambda: not b.spilling.spilled)

    run(tmp_path, dialable, test)


def test_a_copy_that_is_larger_than_the_store_arrives_on_disk(tmp_path: Path) -> None:
    data = os.urandom(SIZE)

    async def test(a: End, b: End) -> None:
        b.store.memories.capacity = b.store.capacity = SIZE // 2
        copy, *_ = await b.transfers.copy(a.id, written(a, data), Claim(SIZE))
        assert not copy.in_memory
        assert content(copy, SIZE) == data

    run(tmp_path, True, test)


def test_who_waits_for_room_keeps_nobody_else_from_a_copy(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full_disk(_place: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(spill_files, "allocate", full_disk)

    async def test(a: End, b: End) -> None:
        number = written(a, bytes(SIZE))
        full = b.store.create(b.store.capacity, 0, OWNER, OWNER)
        copying = asyncio.ensure_future(b.transfers.copy(a.id, number, Claim(SIZE, OWNER)))
        other = asyncio.ensure_future(b.transfers.copy(a.id, number, Claim(SIZE, b"other")))
        with pytest.raises(ObjectStoreFullError):
            await copying
        assert not other.done()
        assert number not in a.serving._spreads  # nothing was asked for yet
        b.store.seal(full.number)
        b.store.free(full.number)
        segment, *_ = await other
        assert content(segment, SIZE) == bytes(SIZE)

    run(tmp_path, True, test)


def test_a_copy_whose_node_refuses_it_gives_its_room_back(tmp_path: Path) -> None:
    async def test(a: End, b: End) -> None:
        with pytest.raises(ObjectLostError):
            await b.transfers.copy(a.id, 7, Claim(SIZE))
        assert not b.store.used
        assert not b.transfers.arriving

    run(tmp_path, True, test)


@both_ways
@pytest.mark.parametrize("what", ["another size", "more bytes"])
def test_a_node_that_sends_what_nobody_made_room_for_is_not_believed(
    tmp_path: Path, dialable: bool, what: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Even if it does so again and again."""

    async def read_more(_self: object, _segment: object, _offset: int, _end: int) -> bytes:
        return bytes(1 << 20)  # also behind the last whole piece

    async def test(a: End, b: End) -> None:
        number = written(a, bytes(SIZE))
        if what == "more bytes":
            monkeypatch.setattr(serving_module.Serving, "_read", read_more)
            claim = Claim(SIZE)
        else:
            claim = Claim(SIZE - 1)
        with pytest.raises(ObjectLostError, match=f"{SIZE}.* bytes"):
            await b.transfers.copy(a.id, number, claim)
        assert not b.store.used
        a.store.free(number)
        await until(lambda: not a.store.used)

    run(tmp_path, dialable, test)
