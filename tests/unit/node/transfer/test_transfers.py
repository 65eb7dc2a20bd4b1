"""Objects between nodes, in pieces over the relay: from those that can be dialled, and others."""

from __future__ import annotations

import asyncio
import errno
import os
from typing import TYPE_CHECKING, Any

import pytest
from node_ends import End, message, two_ends, until

from miniray.common.config import config
from miniray.exceptions import ObjectLostError, ObjectStoreFullError
from miniray.node.relay.relay import IN_FLIGHT
from miniray.node.relay.relayed import ANSWER, Inbox, Outbox, Relayed
from miniray.node.store import spill_files
from miniray.node.store import spilling as spilling_module
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
        copies = await asyncio.gather(*(b.transfers.copy(a.key(number), SIZE) for _ in range(3)))
        assert [content(copy, SIZE) for copy in copies] == [data] * 3
        b.transfers.copied(a.key(number), SIZE)
        a.directory.free(a.key(number))
        await until(lambda: not a.store.used)  # nobody maps it any more
        assert not a.directory
        assert not any(b.transfers.table_sizes().values())

    run(tmp_path, dialable, test)


@both_ways
def test_an_object_that_is_not_there_is_lost(tmp_path: Path, dialable: bool) -> None:
    async def test(a: End, b: End) -> None:
        with pytest.raises(ObjectLostError):
            await b.transfers.copy(a.key(7), SIZE)
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
        copy = await b.transfers.copy(a.key(number), SIZE)
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
        copying = asyncio.ensure_future(b.transfers.copy(a.key(number), SIZE))
        await began.wait()
        copying.cancel()
        with pytest.raises(asyncio.CancelledError):
            await copying
        a.store.free(number)
        await until(lambda: not a.store.used)
        assert not b.store.used
        await until(lambda: not any(b.transfers.table_sizes().values()))  # what was sent is here

    run(tmp_path, dialable, test)


def test_a_node_that_is_gone_has_no_objects(tmp_path: Path) -> None:
    async def test(_a: End, b: End) -> None:
        with pytest.raises(ObjectLostError, match="is gone"):
            await b.transfers.copy((b"nobody", 1, b"nobody"), SIZE)

    run(tmp_path, True, test)


@both_ways
def test_a_value_that_cannot_be_read_is_refused(
    tmp_path: Path, dialable: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def fail(*_: Any) -> bytes:
        raise OSError("the disk is on fire")

    async def test(a: End, b: End) -> None:
        place = a.store.files.reserve(SIZE)
        number = a.store.create(SIZE, 0, OWNER, OWNER, place).number
        a.store.seal(number)
        monkeypatch.setattr(a.spilling, "read", fail)
        with pytest.raises(ObjectLostError, match="on fire"):
            await b.transfers.copy(a.key(number), SIZE)

    run(tmp_path, dialable, test)


def test_a_second_transfer_of_a_value_begins_when_the_first_has_ended(tmp_path: Path) -> None:
    data = os.urandom(SIZE)

    async def test(a: End, b: End) -> None:
        number = written(a, data)
        first = asyncio.ensure_future(b.transfers.copy(a.key(number), SIZE))
        await until(lambda: b.transfers.arriving)
        second = asyncio.ensure_future(b.transfers.copy(a.key(number), SIZE))
        await asyncio.sleep(0)
        first.cancel()
        copy = await second
        assert content(copy, SIZE) == data
        assert not b.transfers.arriving

    run(tmp_path, True, test)


@both_ways
def test_a_value_whose_node_dies_on_the_way_is_lost_and_leaves_nothing(
    tmp_path: Path, dialable: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def test(a: End, b: End) -> None:
        write = transfers_module.write_all

        def write_and_die(fd: int, piece: bytes, offset: int) -> None:
            write(fd, piece, offset)
            if offset > 2_000_000 and b.hub.knows(a.id):
                b.hub.died(a.id)
                b.requests.node_unreachable(a.id)

        monkeypatch.setattr(transfers_module, "write_all", write_and_die)
        with pytest.raises(ObjectLostError, match=f"node {a.id.hex()} is gone"):
            await b.transfers.copy(a.key(written(a, bytes(SIZE))), SIZE)
        assert not b.store.used
        assert not any(b.transfers.table_sizes().values())

    run(tmp_path, dialable, test)


def test_calls_do_not_wait_behind_values() -> None:
    outbox, inbox = Outbox(), Inbox()
    for _ in range(3):
        outbox.put(Relayed(notice=ANSWER, items=(1,), bodies=[bytes(1 << 20)]))
    outbox.put(message(7))
    first, *rest = inbox.accept(outbox.take())
    assert first == message(7)
    assert [each.notice for each in rest] == [ANSWER]


def test_values_do_not_wait_for_an_end_of_calls() -> None:
    outbox, inbox = Outbox(), Inbox()
    outbox.put(Relayed(notice=ANSWER, items=(1,), bodies=[bytes(1 << 20)]))
    for _ in range(9):
        outbox.put(Relayed(b"to", b"from", [bytes(1 << 20)]))
    assert [each.notice for each in inbox.accept(outbox.take())] == ["", ANSWER]


def test_what_nobody_waits_for_any_more_counts_until_it_has_come(tmp_path: Path) -> None:
    size = 1_000_000

    async def test(a: End, b: End) -> None:
        number = written(a, bytes(size))
        asked: list[tuple[Any, ...]] = []
        answer = a.requests.handlers["fetch"]
        a.requests.handlers["fetch"] = lambda *args: asked.append(args)
        for count in range(10):
            copying = asyncio.ensure_future(b.transfers.copy(a.key(number), size))
            await asyncio.sleep(0.01)
            copying.cancel()
            await asyncio.wait([copying])
            b.hub.send(a.id, message(count))
            await until(lambda count=count: len(a.got.get(b.id, ())) > count)
        assert len(asked) == IN_FLIGHT // size
        a.requests.handlers["fetch"] = answer
        for each in asked:
            answer(*each)
        await b.transfers.copy(a.key(number), size)
        assert not any(b.transfers.table_sizes().values())

    run(tmp_path, True, test)


def test_what_a_silent_node_never_sends_stops_to_count_after_a_while(tmp_path: Path) -> None:
    async def test(a: End, b: End) -> None:
        asked = asyncio.Event()
        a.requests.handlers["read"] = lambda *_: asked.set()
        read = b.requests.ask(a.id, "read", size=IN_FLIGHT, limit=0.3)
        reading = asyncio.ensure_future(read)
        await asked.wait()
        reading.cancel()
        await asyncio.wait([reading])
        a.requests.handlers["read"] = lambda asked: asked.answer("yes", b"bytes")
        again = b.requests.ask(a.id, "read", size=IN_FLIGHT)
        assert await asyncio.wait_for(again, 10) == ("yes", b"bytes")

    run(tmp_path, True, test)


def test_a_request_without_bytes_does_not_wait_behind_those_with_bytes(tmp_path: Path) -> None:
    size = 1_000_000

    async def test(a: End, b: End) -> None:
        number = written(a, bytes(size))
        a.requests.handlers["read"] = lambda *_: None
        a.requests.handlers["question"] = lambda asked: asked.answer("yes")
        key = a.key(number)
        reads = [
            asyncio.ensure_future(b.requests.ask(a.id, "read", *key, 0, size, size=size))
            for _ in range(5)
        ]
        await asyncio.sleep(0)
        assert await asyncio.wait_for(b.requests.ask(a.id, "question"), 10) == ("yes", b"")
        for read in reads:
            read.cancel()
        await asyncio.wait(reads)

    run(tmp_path, True, test)


def test_only_so_much_is_on_its_way_from_a_node_at_a_time(tmp_path: Path) -> None:
    async def test(a: End, b: End) -> None:
        size = 1_000_000
        numbers = [written(a, bytes(size)) for _ in range(20)]
        most = 0
        answer = a.serving._answer_with

        def counted(*args: Any) -> None:
            nonlocal most
            most = max(most, b.requests._peers[a.id]._in_flight)
            answer(*args)

        a.serving._answer_with = counted  # type: ignore[method-assign]
        await asyncio.gather(*(b.transfers.copy(a.key(number), size) for number in numbers))
        assert size < most <= IN_FLIGHT

    run(tmp_path, True, test)


@both_ways
def test_a_copy_for_which_there_is_no_memory_arrives_on_disk(
    tmp_path: Path, dialable: bool
) -> None:
    data = os.urandom(SIZE)

    async def test(a: End, b: End) -> None:
        number = written(a, data)
        b.store.create(b.store.capacity, 0, OWNER, OWNER)
        copy = await b.transfers.copy(a.key(number), SIZE)
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
        copy = await b.transfers.copy(a.key(written(a, data)), SIZE)
        assert not copy.in_memory
        assert content(copy, SIZE) == data

    run(tmp_path, True, test)


def test_a_copy_for_which_there_is_no_room_asks_nobody(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full_disk(_place: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(spill_files, "allocate", full_disk)
    short = config()._replace(store_full_timeout=0.1)
    monkeypatch.setattr(spilling_module, "config", lambda: short)

    async def test(a: End, b: End) -> None:
        number = written(a, bytes(SIZE))
        b.store.create(b.store.capacity, 0, OWNER, OWNER)
        with pytest.raises(ObjectStoreFullError, match="No space left"):
            await b.transfers.copy(a.key(number), SIZE)
        assert not a.directory

    run(tmp_path, True, test)


def test_a_copy_whose_node_refuses_it_gives_its_room_back(tmp_path: Path) -> None:
    async def test(a: End, b: End) -> None:
        with pytest.raises(ObjectLostError):
            await b.transfers.copy(a.key(7), SIZE)
        assert not b.store.used
        assert not b.transfers.arriving

    run(tmp_path, True, test)


@both_ways
@pytest.mark.parametrize("what", ["another size", "more bytes"])
def test_a_node_that_sends_what_nobody_made_room_for_is_not_believed(
    tmp_path: Path, dialable: bool, what: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Even if it does so again and again."""

    def read_more(_fd: int, length: int, _offset: int) -> bytes:
        return bytes(length + 1)

    async def test(a: End, b: End) -> None:
        number = written(a, bytes(SIZE))
        if what == "more bytes":
            monkeypatch.setattr(serving_module.os, "pread", read_more)
            size = SIZE
        else:
            size = SIZE - 1
        with pytest.raises(ObjectLostError, match="bytes"):
            await b.transfers.copy(a.key(number), size)
        assert not b.store.used
        a.store.free(number)
        await until(lambda: not a.store.used)

    run(tmp_path, dialable, test)
