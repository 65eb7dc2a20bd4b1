"""Large values from mover to mover."""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
import threading
from typing import TYPE_CHECKING, Any

import pytest
from mover_ends import (
    MIB,
    MORE,
    QUIET,
    SIZE,
    Movers,
    Offer,
    Source,
    connected,
    fetch,
    finish,
)
from node_ends import until

from miniray.common.host_port import DaemonAddress
from miniray.node.transfer import mover, moving
from miniray.node.transfer.mover_client import MoveError, RefusedError
from miniray.node.transfer.moving import HELLO
from miniray.security.certificates import make_credentials

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path


@pytest.fixture
def movers(tmp_path: Path) -> Iterator[Movers]:
    made = Movers(tmp_path)
    yield made
    made.close()


def test_a_value_arrives_whole_and_is_released(movers: Movers) -> None:
    data = os.urandom(SIZE)

    async def test() -> None:
        a, b = movers.add(), movers.add()
        for offset in (0, 5, SIZE - 1):
            source, target, over = movers.memory(data), movers.memory(), []
            offer = movers.offered(a, source, SIZE, over)
            assert await fetch(b, offer, target, SIZE, offset) == SIZE - offset
            assert os.pread(target, SIZE, offset) == data[offset:]
            await until(lambda over=over: over)
        assert not any(a.table_sizes().values())
        assert not any(b.table_sizes().values())

    movers.run(test())


def test_a_value_that_is_not_there_is_refused_and_the_next_one_comes(movers: Movers) -> None:
    async def test() -> None:
        a, b = movers.add(), movers.add()
        offer = movers.offered(a, movers.memory(), SIZE, [])
        for _ in range(2):
            with pytest.raises(RefusedError):
                await fetch(b, Offer(offer.address, bytes(HELLO.size)), movers.memory(), SIZE)
            assert await fetch(b, offer, movers.memory(), SIZE) == SIZE

    movers.run(test())


def test_memory_that_a_reader_has_not_read_yet_is_not_released(movers: Movers) -> None:
    """Between processes of a machine the memory itself is shown, and not a copy of it."""

    async def test() -> None:
        a = movers.add()
        over: list[bool] = []
        offer = movers.offered(a, movers.memory(), SIZE, over)
        with await connected(offer) as reader:
            assert await asyncio.to_thread(reader.recv, 1000)
            await asyncio.sleep(QUIET)
            assert not over
        await until(lambda: over)
        assert over == [True]

    movers.run(test())


def test_a_transfer_that_is_given_up_writes_nothing_more(movers: Movers) -> None:
    async def test() -> None:
        b = movers.add()
        with Source(movers, b"x" * MIB) as source:
            target = movers.memory()
            fetching = asyncio.ensure_future(fetch(b, source.offer, target, SIZE))
            await source.show(MIB)
            await until(lambda: os.pread(target, 1, MIB - 1) == b"x")
            fetching.cancel()
            with pytest.raises(asyncio.CancelledError):
                await fetching
            assert not any(b.table_sizes().values())
            os.pwrite(source.fd, b"y" * MIB, MIB)
            with contextlib.suppress(OSError):
                await source.show(2 * MIB)
            await asyncio.sleep(QUIET)
            assert os.pread(target, SIZE, 0).count(b"y") == 0

    movers.run(test())


def test_a_transfer_that_is_stopped_when_all_has_come_does_not_harm_the_next_one(
    movers: Movers, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its connection hears no more, so nothing else can come over it."""
    data = os.urandom(2 * MIB)
    receive, hear_no_more = mover.receive, mover.hear_no_more
    received, stopped = threading.Event(), threading.Event()

    def receive_and_wait(*args: Any) -> None:
        receive(*args)
        received.set()
        assert stopped.wait(10)

    def note(sock: socket.socket) -> None:
        hear_no_more(sock)
        stopped.set()

    monkeypatch.setattr(mover, "receive", receive_and_wait)
    monkeypatch.setattr(mover, "hear_no_more", note)

    async def test() -> None:
        a, b = movers.add(), movers.add()
        offer = movers.offered(a, movers.memory(data), len(data), [])
        move = b.fetch(*offer, movers.memory(), 0, len(data), int)
        assert await asyncio.to_thread(received.wait, 10)
        await move.stop()
        target = movers.memory()
        offer = movers.offered(a, movers.memory(data), len(data), [])
        assert await fetch(b, offer, target, len(data)) == len(data)
        assert os.pread(target, len(data), 0) == data

    movers.run(test())


def test_no_byte_is_read_before_it_is_there(movers: Movers) -> None:
    async def test() -> None:
        b = movers.add()
        with Source(movers, b"x" * SIZE) as source:
            target = movers.memory()
            fetching = asyncio.ensure_future(fetch(b, source.offer, target, SIZE))
            for there in (5, MIB + 1, 3 * MIB):
                await source.show(there)
                await until(lambda there=there: os.pread(target, 1, there - 1) == b"x")
                assert os.pread(target, 1, there) == b"\0"
            await source.show(SIZE)
            assert await fetching == SIZE

    movers.run(test())


def test_what_is_shown_cannot_be_written_by_who_reads_it(movers: Movers) -> None:
    async def test() -> None:
        a = movers.add()
        offer = movers.offered(a, movers.memory(), SIZE, [])
        with await connected(offer) as reader:
            _, fds, _, _ = await asyncio.to_thread(socket.recv_fds, reader, 8, 1)
            try:
                with pytest.raises(OSError, match="Bad file descriptor"):
                    os.pwrite(fds[0], b"x", 0)
            finally:
                os.close(fds[0])

    movers.run(test())


def test_a_node_is_busy_while_values_move(movers: Movers) -> None:
    async def test() -> None:
        a, b = movers.add(), movers.add()
        assert not a.is_busy()
        assert not b.is_busy()
        over: list[bool] = []
        offer = movers.offered(a, movers.memory(), SIZE, over)
        move = b.fetch(*offer, movers.memory(), 0, SIZE, int)
        assert b.is_busy()
        while not a.is_busy():  # in each turn: it may be over in a few
            await asyncio.sleep(0)
        await finish(move, [])
        await until(lambda: over)
        assert not a.is_busy()
        assert not b.is_busy()

    movers.run(test())


def test_memory_that_a_reader_may_still_look_at_is_given_back_as_such(movers: Movers) -> None:
    async def test() -> None:
        a = movers.add()
        over: list[bool] = []
        with Source(movers, b"x" * MIB) as source:
            middle = movers.memory()
            came: list[int] = []
            move = a.fetch(*source.offer, middle, 0, SIZE, came.append)
            offer = movers.offered(a, middle, SIZE, over, job=move.number)
            await source.show(MIB)
            await until(lambda: sum(came) == MIB)
            with await connected(offer) as reader:
                assert await asyncio.to_thread(reader.recv, 1000)
                reader.sendall(MORE)
                source.leave()  # nothing more comes
                await until(lambda: over)
            await move.stop()
        assert over == [False]

    movers.run(test())


def test_what_a_mover_that_died_has_sent_may_still_be_looked_at(movers: Movers) -> None:
    async def test() -> None:
        a = movers.add()
        over: list[bool] = []
        offer = movers.offered(a, movers.memory(), SIZE, over)
        with await connected(offer) as reader:
            assert await asyncio.to_thread(reader.recv, 1000)
            movers.kill(a)
            await until(lambda: over)
        assert over == [False]
        assert not os.path.exists(DaemonAddress.parse(offer.address).socket_path)

    movers.run(test())


def test_transfers_end_when_their_mover_dies_and_the_next_has_a_new_one(movers: Movers) -> None:
    async def test() -> None:
        a, b = movers.add(), movers.add()
        offer = movers.offered(a, movers.memory(), SIZE, [])
        with await connected(offer) as reader:
            await asyncio.to_thread(reader.recv, 1000)
            path = str(movers.folder / "silent.sock")
            with socket.socket(socket.AF_UNIX) as listener:
                listener.bind(path)
                listener.listen()
                silent = Offer(str(DaemonAddress("here", path)), bytes(HELLO.size))
                fetching = asyncio.ensure_future(fetch(b, silent, movers.memory(), SIZE))
                await asyncio.to_thread(listener.accept)
                movers.kill(b)
                with pytest.raises(MoveError, match="has died"):
                    await fetching
        over: list[bool] = []
        offer = movers.offered(a, movers.memory(), SIZE, over)
        assert await fetch(b, offer, movers.memory(), SIZE) == SIZE

    movers.run(test())


def network(key: bytes = b"k" * 32) -> dict[str, Any]:
    """What a mover is told that others of its cluster reach over the network."""
    return {
        "host": "127.0.0.1",
        "advertised_host": "127.0.0.1",
        "credentials": make_credentials(key),
    }


def test_what_came_before_a_transfer_was_stopped_is_right_through_tls(movers: Movers) -> None:
    """It goes on from there: what came must not end with bytes that were not decrypted."""
    data = os.urandom(SIZE)

    async def test() -> None:
        a = movers.add("one", **network())
        b = movers.add("two", **network())
        for _ in range(8):
            over: list[bool] = []
            came: list[int] = []
            target = movers.memory()
            offer = movers.offered(a, movers.memory(data), SIZE, over)
            move = b.fetch(*offer, target, 0, SIZE, came.append)
            await until(lambda came=came: came)
            await move.stop()
            count = sum(came)
            assert os.pread(target, count, 0) == data[:count]
            await until(lambda over=over: over)

    movers.run(test())


def test_movers_of_two_machines_trust_only_their_cluster(movers: Movers) -> None:
    data = os.urandom(SIZE)

    async def test() -> None:
        a = movers.add("one", **network())
        b = movers.add("two", **network())
        stranger = movers.add("three", **network(b"o" * 32))
        target = movers.memory()
        for _ in range(2):  # the second one over the connection of the first
            over: list[bool] = []
            offer = movers.offered(a, movers.memory(data), SIZE, over)
            assert await fetch(b, offer, target, SIZE) == SIZE
            assert os.pread(target, SIZE, 0) == data
            await until(lambda over=over: over)
        offer = movers.offered(a, movers.memory(data), SIZE, [])
        with pytest.raises(MoveError, match="certificate"):
            await fetch(stranger, offer, movers.memory(), SIZE)
        alone = movers.add("four")
        with pytest.raises(MoveError):
            await fetch(alone, offer, movers.memory(), SIZE)

    movers.run(test())


def test_what_came_stays_as_it_was_when_the_sender_writes_to_its_memory_again() -> None:
    size = 3 << 20
    source, target = os.memfd_create("source"), os.memfd_create("target")
    here, there = socket.socketpair()
    data = os.urandom(size)
    try:
        os.pwrite(source, data, 0)
        os.ftruncate(target, size)
        sending = threading.Thread(target=moving.send, args=(there, source, 0, size))
        sending.start()
        moving.receive(here, target, 0, size, lambda _count: None)
        sending.join()
        os.pwrite(source, bytes(size), 0)
        assert os.pread(target, size, 0) == data
    finally:
        here.close()
        there.close()
        os.close(source)
        os.close(target)
