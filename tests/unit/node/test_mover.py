"""Large values from mover to mover. The movers are threads here; what they do is the same."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import marshal
import os
import select
import socket
import struct
import threading
from typing import TYPE_CHECKING, Any

import pytest
from node_ends import End, mover_in_thread, no_mover, two_ends, until

from miniray.config import config
from miniray.node import mover_fetches, mover_sends, moving, showing
from miniray.node import transfers as transfers_module
from miniray.node.addresses import DaemonAddress
from miniray.node.control_socket import control_pair
from miniray.node.mover_client import Move, MoveError, MoverClient, MoverConfig, Offer
from miniray.node.mover_sends import HELLO
from miniray.node.room import Claim
from miniray.node.template_client import Helper
from miniray.security.certificates import Authority, make_node_key

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine, Iterator
    from pathlib import Path

    from miniray.node.segment import Segment

MIB = 1024 * 1024
SIZE = 33 * MIB + 1
OWNER = b"owner000"
QUIET = 0.2


# --- movers alone -----------------------------------------------------------------------
class Movers:
    """Movers of one test, and the memory that they fill."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.clients: list[MoverClient] = []
        self.fds: list[int] = []

    def add(self, machine: str = "here", **settings: Any) -> MoverClient:
        folder = self.folder / str(len(self.clients))
        folder.mkdir()
        client = MoverClient(mover_in_thread, MoverConfig(machine, str(folder), **settings))
        self.clients.append(client)
        return client

    def memory(self, data: bytes = b"", size: int = SIZE) -> int:
        fd = os.memfd_create("value")
        self.fds.append(fd)
        os.ftruncate(fd, max(size, len(data)))
        os.pwrite(fd, data, 0)
        return fd

    def run(self, test: Coroutine[Any, Any, None]) -> None:
        async def main() -> None:
            try:
                await asyncio.wait_for(test, 30)
            finally:
                for client in self.clients:
                    client.close()

        asyncio.run(main())

    def close(self) -> None:
        for fd in self.fds:
            os.close(fd)


@pytest.fixture
def movers(tmp_path: Path) -> Iterator[Movers]:
    made = Movers(tmp_path)
    yield made
    made.close()


async def offered(client: MoverClient, fd: int, size: int, over: list[bool], job: int = 0) -> Offer:
    def released(*, clean: bool) -> None:
        over.append(clean)

    offer = await client.offer(fd, size, job, released)
    assert offer is not None
    return offer


async def fetch(client: MoverClient, offer: Offer, fd: int, size: int, offset: int = 0) -> int:
    """Returns how many bytes came."""
    came: list[int] = []
    move = client.fetch(offer.address, offer.ticket, fd, offset, size, came.append)
    return await finish(move, came)


async def finish(move: Move, came: list[int]) -> int:
    try:
        await asyncio.shield(move.ended)
    finally:
        await move.stop()
    return sum(came)


def connected(offer: Offer, offset: int = 0) -> socket.socket:
    """A connection that has shown a ticket."""
    sock = socket.socket(socket.AF_UNIX)
    sock.settimeout(10)
    sock.connect(DaemonAddress.parse(offer.address).socket_path)
    sock.sendall(HELLO.pack(offer.ticket, offset))
    return sock


class Source:
    """The mover of another node of this machine, which shows its memory bit by bit."""

    def __init__(self, movers: Movers, data: bytes) -> None:
        self.fd = movers.memory(data)
        path = str(movers.folder / f"source-{self.fd}.sock")
        self._listener = socket.socket(socket.AF_UNIX)
        self._listener.bind(path)
        self._listener.listen()
        self._sock: socket.socket | None = None
        self.offer = Offer(str(DaemonAddress("here", path)), bytes(16))

    async def show(self, size: int) -> None:
        """So much of it is there."""
        word = struct.pack("!Q", size)
        if self._sock is None:
            self._sock, _ = await asyncio.to_thread(self._listener.accept)
            self._sock.settimeout(10)
            assert len(self._sock.recv(HELLO.size)) == HELLO.size
            socket.send_fds(self._sock, [word], [self.fd])
        else:
            await asyncio.to_thread(self._sock.recv, 1)  # the other end asks for more
            self._sock.sendall(word)

    def leave(self) -> None:
        if self._sock is not None:
            self._sock.close()

    def __enter__(self) -> Source:
        return self

    def __exit__(self, *_: object) -> None:
        self.leave()
        self._listener.close()


def test_a_value_arrives_whole_and_is_released(movers: Movers) -> None:
    data = os.urandom(SIZE)

    async def test() -> None:
        a, b = movers.add(), movers.add()
        for offset in (0, 5, SIZE - 1):
            source, target, over = movers.memory(data), movers.memory(), []
            offer = await offered(a, source, SIZE, over)
            assert await fetch(b, offer, target, SIZE, offset) == SIZE - offset
            assert os.pread(target, SIZE, offset) == data[offset:]
            await until(lambda over=over: over)
        assert not any(a.table_sizes().values())
        assert not any(b.table_sizes().values())

    movers.run(test())


def test_a_ticket_is_good_for_one_transfer(movers: Movers) -> None:
    async def test() -> None:
        a, b = movers.add(), movers.add()
        over: list[bool] = []
        offer = await offered(a, movers.memory(), SIZE, over)
        await fetch(b, offer, movers.memory(), SIZE)
        with pytest.raises(MoveError):
            await fetch(b, offer, movers.memory(), SIZE)
        with pytest.raises(MoveError):
            await fetch(b, Offer(offer.address, bytes(16)), movers.memory(), SIZE)

    movers.run(test())


def test_what_is_withdrawn_before_anybody_came_is_released_at_once(movers: Movers) -> None:
    async def test() -> None:
        a, b = movers.add(), movers.add()
        over: list[bool] = []
        offer = await offered(a, movers.memory(), SIZE, over)
        a.withdraw(offer.ticket)
        await until(lambda: over)
        with pytest.raises(MoveError):
            await fetch(b, offer, movers.memory(), SIZE)

    movers.run(test())


def test_memory_that_a_reader_has_not_read_yet_is_not_released(movers: Movers) -> None:
    """Between processes of a machine the memory itself is shown, and not a copy of it."""

    async def test() -> None:
        a = movers.add()
        over: list[bool] = []
        offer = await offered(a, movers.memory(), SIZE, over)
        with connected(offer) as reader:
            assert await asyncio.to_thread(reader.recv, 1000)
            a.withdraw(offer.ticket)

            def rest() -> None:
                while reader.recv(MIB):
                    pass

            await asyncio.sleep(QUIET)
            assert not over
            await asyncio.to_thread(rest)
            assert not over
        await until(lambda: over)

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
    receive, hear_no_more = moving.receive, mover_fetches.hear_no_more
    received, stopped = threading.Event(), threading.Event()

    def receive_and_wait(*args: Any) -> None:
        receive(*args)
        received.set()
        assert stopped.wait(10)

    def note(sock: socket.socket) -> None:
        hear_no_more(sock)
        stopped.set()

    monkeypatch.setattr(moving, "receive", receive_and_wait)
    monkeypatch.setattr(mover_fetches, "hear_no_more", note)

    async def test() -> None:
        a, b = movers.add(), movers.add()
        offer = await offered(a, movers.memory(data), len(data), [])
        move = b.fetch(offer.address, offer.ticket, movers.memory(), 0, len(data), int)
        assert await asyncio.to_thread(received.wait, 10)
        await move.stop()
        target = movers.memory()
        offer = await offered(a, movers.memory(data), len(data), [])
        assert await fetch(b, offer, target, len(data)) == len(data)
        assert os.pread(target, len(data), 0) == data

    movers.run(test())


def test_a_transfer_ends_when_what_is_shown_is_withdrawn_in_the_middle(
    movers: Movers, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else its memory would be held for as long as the rest takes to be copied."""
    monkeypatch.setattr(showing, "PIECE", 4096)  # that takes long
    many = 256 * MIB

    async def test() -> None:
        a, b = movers.add(), movers.add()
        over: list[bool] = []
        offer = await offered(a, movers.memory(b"x", many), many, over)
        target = movers.memory(size=many)
        fetching = asyncio.ensure_future(fetch(b, offer, target, many))
        await until(lambda: os.pread(target, 1, 0) == b"x")
        a.withdraw(offer.ticket)
        with pytest.raises(MoveError, match="shown no further"):
            await fetching
        await until(lambda: over)
        assert over == [True]

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
        offer = await offered(a, movers.memory(), SIZE, [])
        with connected(offer) as reader:
            _, fds, _, _ = await asyncio.to_thread(socket.recv_fds, reader, 8, 1)
            try:
                with pytest.raises(OSError, match="Bad file descriptor"):
                    os.pwrite(fds[0], b"x", 0)
            finally:
                os.close(fds[0])

    movers.run(test())


def test_who_is_passed_on_what_comes_is_told_of_more_when_it_asks(movers: Movers) -> None:
    async def test() -> None:
        b = movers.add()
        with Source(movers, b"x" * SIZE) as source:
            middle = movers.memory()
            move = b.fetch(*source.offer, middle, 0, SIZE, int)
            moving = asyncio.ensure_future(finish(move, []))
            await source.show(MIB)
            await until(lambda: os.pread(middle, 1, MIB - 1) == b"x")
            offer = await offered(b, middle, SIZE, [], job=move.number)
            with connected(offer) as reader:
                word, fds, _, _ = await asyncio.to_thread(socket.recv_fds, reader, 100, 1)
                os.close(*fds)
                assert struct.unpack("!Q", word) == (MIB,)
                await source.show(SIZE)
                await moving
                assert not select.select([reader], [], [], 0)[0]
                reader.sendall(b"\2")
                assert struct.unpack("!Q", await asyncio.to_thread(reader.recv, 100)) == (SIZE,)

    movers.run(test())


def test_a_node_is_busy_while_values_move(movers: Movers) -> None:
    async def test() -> None:
        a, b = movers.add(), movers.add()
        assert not a.is_busy()
        assert not b.is_busy()
        over: list[bool] = []
        offer = await offered(a, movers.memory(), SIZE, over)
        assert a.is_busy()
        move = b.fetch(*offer, movers.memory(), 0, SIZE, int)
        assert b.is_busy()
        await finish(move, [])
        await until(lambda: over)
        assert not a.is_busy()
        assert not b.is_busy()

    movers.run(test())


def test_what_still_comes_is_passed_on_and_ends_when_it_ends(movers: Movers) -> None:
    size = 8 * MIB
    half = size // 2
    data = os.urandom(size)

    async def pass_on(whole: bool) -> None:
        b, c = movers.add(), movers.add()
        with Source(movers, data) as source:
            middle, last, over = movers.memory(size=size), movers.memory(size=size), []
            came: list[int] = []
            address, ticket = source.offer
            move = b.fetch(address, ticket, middle, 0, size, came.append)
            first = asyncio.ensure_future(finish(move, came))
            await source.show(half)
            offer = await offered(b, middle, size, over, job=move.number)
            second = asyncio.ensure_future(fetch(c, offer, last, size))
            await until(lambda: os.pread(last, 1, half - 1) == data[half - 1 : half])
            assert not second.done()
            if whole:
                await source.show(size)
                assert await first == await second == size
                assert os.pread(last, size, 0) == data
            else:
                source.leave()
                for transfer in (first, second):
                    with pytest.raises(MoveError):
                        await transfer
            await until(lambda: over)

    async def test() -> None:
        await pass_on(whole=True)
        await pass_on(whole=False)

    movers.run(test())


def test_what_comes_slowly_is_passed_on_too(movers: Movers) -> None:
    """Who passes on nothing for some seconds is left, though it may have half a MiB more."""
    size = 4 * MIB

    async def test() -> None:
        b, c = movers.add(), movers.add()
        with Source(movers, b"x" * size) as source:
            middle, last = movers.memory(size=size), movers.memory(size=size)
            address, ticket = source.offer
            move = b.fetch(address, ticket, middle, 0, size, int)
            first = asyncio.ensure_future(finish(move, []))
            await source.show(1)
            offer = await offered(b, middle, size, [], job=move.number)
            second = asyncio.ensure_future(fetch(c, offer, last, size))
            await until(lambda: os.pread(last, 1, 0) == b"x")
            await source.show(MIB // 2)
            await until(lambda: os.pread(last, 1, MIB // 2 - 1) == b"x")
            await source.show(size)
            await first
            assert await second == size

    movers.run(test())


def test_a_reader_that_leaves_does_not_end_what_others_are_passed_on(movers: Movers) -> None:
    size = 8 * MIB
    half = size // 2
    data = os.urandom(size)

    async def test() -> None:
        b, c, d = movers.add(), movers.add(), movers.add()
        with Source(movers, data) as source:
            middle, left, last = (movers.memory(size=size) for _ in range(3))
            came: list[int] = []
            address, ticket = source.offer
            move = b.fetch(address, ticket, middle, 0, size, came.append)
            first = asyncio.ensure_future(finish(move, came))
            await source.show(half)
            gone: list[bool] = []
            over: list[bool] = []
            offers = [await offered(b, middle, size, o, job=move.number) for o in (gone, over)]
            leaves = asyncio.ensure_future(fetch(c, offers[0], left, size))
            stays = asyncio.ensure_future(fetch(d, offers[1], last, size))
            for fd in (left, last):
                await until(lambda fd=fd: os.pread(fd, 1, half - 1) == data[half - 1 : half])
            b.withdraw(offers[0].ticket)
            await until(lambda: gone)
            with pytest.raises(MoveError):
                await leaves
            await source.show(size)
            assert await first == await stays == size
            assert os.pread(last, size, 0) == data

    movers.run(test())


def test_memory_that_a_reader_never_reads_is_given_back_as_one_that_is_looked_at(
    movers: Movers, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(mover_sends, "_READ_WITHIN", QUIET)

    async def test() -> None:
        a = movers.add()
        over: list[bool] = []
        offer = await offered(a, movers.memory(), SIZE, over)
        with connected(offer) as reader:
            assert await asyncio.to_thread(reader.recv, 1000)
            a.withdraw(offer.ticket)
            await until(lambda: over)
        assert over == [False]

    movers.run(test())


def test_what_a_mover_that_died_has_sent_may_still_be_looked_at(movers: Movers) -> None:
    async def test() -> None:
        a = movers.add()
        over: list[bool] = []
        offer = await offered(a, movers.memory(), SIZE, over)
        with connected(offer) as reader:
            assert await asyncio.to_thread(reader.recv, 1000)
            a._running()._control.shutdown(socket.SHUT_RDWR)
            await until(lambda: over)
        assert over == [False]
        assert not os.path.exists(DaemonAddress.parse(offer.address).socket_path)

    movers.run(test())


def test_transfers_end_when_their_mover_dies_and_the_next_has_a_new_one(movers: Movers) -> None:
    async def test() -> None:
        a, b = movers.add(), movers.add()
        offer = await offered(a, movers.memory(), SIZE, [])
        with connected(offer) as reader:
            await asyncio.to_thread(reader.recv, 1000)
            assert b._running().address is not None
            path = str(movers.folder / "silent.sock")
            with socket.socket(socket.AF_UNIX) as listener:
                listener.bind(path)
                listener.listen()
                silent = Offer(str(DaemonAddress("here", path)), bytes(16))
                fetching = asyncio.ensure_future(fetch(b, silent, movers.memory(), SIZE))
                await asyncio.to_thread(listener.accept)
                b._running()._control.shutdown(socket.SHUT_RDWR)
                with pytest.raises(MoveError, match="has died"):
                    await fetching
        over: list[bool] = []
        offer = await offered(a, movers.memory(), SIZE, over)
        assert await fetch(b, offer, movers.memory(), SIZE) == SIZE

    movers.run(test())


def network(authority: Authority) -> dict[str, Any]:
    """What a mover is told that others of its cluster reach over the network."""
    private, public = make_node_key()
    return {
        "host": "127.0.0.1",
        "advertised_host": "127.0.0.1",
        "identity": authority.sign_node(public, "00") + private,
        "authority": authority.certificate,
    }


def test_what_came_before_a_transfer_was_stopped_is_right_through_tls(movers: Movers) -> None:
    """It goes on from there: what came must not end with bytes that were not decrypted."""
    data = os.urandom(SIZE)

    async def test() -> None:
        authority = Authority.create()
        a = movers.add("one", **network(authority))
        b = movers.add("two", **network(authority))
        for _ in range(8):
            over: list[bool] = []
            came: list[int] = []
            target = movers.memory()
            offer = await offered(a, movers.memory(data), SIZE, over)
            move = b.fetch(offer.address, offer.ticket, target, 0, SIZE, came.append)
            await until(lambda came=came: came)
            await move.stop()
            count = sum(came)
            assert os.pread(target, count, 0) == data[:count]
            await until(lambda over=over: over)

    movers.run(test())


def test_movers_of_two_machines_trust_only_their_cluster(movers: Movers) -> None:
    data = os.urandom(SIZE)

    async def test() -> None:
        ours, other = Authority.create(), Authority.create()
        a = movers.add("one", **network(ours))
        b = movers.add("two", **network(ours))
        stranger = movers.add("three", **network(other))
        target = movers.memory()
        for _ in range(2):  # the second one over the connection of the first
            over: list[bool] = []
            offer = await offered(a, movers.memory(data), SIZE, over)
            assert await fetch(b, offer, target, SIZE) == SIZE
            assert os.pread(target, SIZE, 0) == data
            await until(lambda over=over: over)
        offer = await offered(a, movers.memory(data), SIZE, [])
        with pytest.raises(MoveError, match="certificate"):
            await fetch(stranger, offer, movers.memory(), SIZE)
        alone = movers.add("four")
        with pytest.raises(MoveError):
            await fetch(alone, offer, movers.memory(), SIZE)

    movers.run(test())


# --- movers of daemons ------------------------------------------------------------------
def written(end: End, data: bytes) -> int:
    segment = end.store.create(len(data), 0, OWNER, OWNER)
    os.pwrite(segment.fd, data, 0)
    end.store.seal(segment.number)
    return segment.number


def with_ends(
    folder: Path, test: Callable[[End, End], Coroutine[Any, Any, None]], *, movers: bool = True
) -> None:
    async def main() -> None:
        async with two_ends(folder, movers=movers) as (a, b):
            await asyncio.wait_for(test(a, b), 30)

    asyncio.run(main())


def content(segment: Segment) -> bytes:
    return os.pread(segment.fd, segment.size, 0)


@pytest.fixture
def no_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing may come through the daemons."""

    def refuse(*_: object) -> None:
        raise AssertionError("it came through the daemons")

    monkeypatch.setattr(transfers_module, "write_all", refuse)


@pytest.mark.usefixtures("no_pieces")
def test_a_large_value_comes_by_mover_and_leaves_nothing_open(tmp_path: Path) -> None:
    data = os.urandom(SIZE)

    async def test(a: End, b: End) -> None:
        number = written(a, data)
        copy, owner, _ = await b.transfers.copy(a.id, number, Claim(SIZE))
        assert content(copy) == data
        assert owner == (OWNER, a.id)
        a.store.free(number)
        await until(lambda: not a.store.used)  # nobody maps it any more
        assert not any({**a.mover.table_sizes(), **b.mover.table_sizes()}.values())

    with_ends(tmp_path, test)


@pytest.mark.usefixtures("no_pieces")
@pytest.mark.parametrize("what", ["call", "mover that sends", "mover that receives"])
def test_what_breaks_on_the_way_goes_on_where_it_was(tmp_path: Path, what: str) -> None:
    data = os.urandom(SIZE)

    async def test(a: End, b: End) -> None:
        number = written(a, data)
        offsets: list[int] = []
        fetch_by_mover = b.mover.fetch

        def fetch_and_break(*args: Any) -> Move:
            *others, offset, size, came = args
            offsets.append(offset)

            def came_and_break(count: int) -> None:
                came(count)
                if len(offsets) == 1:
                    break_it()

            return fetch_by_mover(*others, offset, size, came_and_break)

        def break_it() -> None:
            if what == "call":
                a.breaker.cut()
                b.breaker.cut()
            else:
                end = a if what == "mover that sends" else b
                end.mover._running()._control.shutdown(socket.SHUT_RDWR)

        b.mover.fetch = fetch_and_break  # type: ignore[method-assign]
        copy, *_ = await b.transfers.copy(a.id, number, Claim(SIZE))
        assert content(copy) == data
        assert len(offsets) <= 2
        if len(offsets) > 1:
            assert offsets[1] > 0

    with_ends(tmp_path, test)


def test_a_mover_out_of_reach_is_not_asked_again_soon(tmp_path: Path) -> None:
    data = os.urandom(3 * MIB)

    async def test(a: End, b: End) -> None:
        address = await a.mover._running().address
        os.unlink(DaemonAddress.parse(address).socket_path)
        asked: list[int] = []
        fetch_by_mover = b.mover.fetch

        def count(*args: Any) -> Move:
            asked.append(1)
            return fetch_by_mover(*args)

        b.mover.fetch = count  # type: ignore[method-assign]
        for _ in range(3):
            copy, *_ = await b.transfers.copy(a.id, written(a, data), Claim(len(data)))
            assert content(copy) == data
        assert len(asked) == 1

    with_ends(tmp_path, test)


def test_a_mover_that_sends_nothing_is_left(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    data = os.urandom(3 * MIB)
    monkeypatch.setenv("MINIRAY_TRANSFER_STALL", "0.2")
    config.cache_clear()

    async def test(a: End, b: End) -> None:
        offer_by_mover = a.mover.offer

        with socket.socket(socket.AF_UNIX) as listener:
            listener.bind(str(tmp_path / "silent.sock"))
            listener.listen()
            silent = str(DaemonAddress("here", str(tmp_path / "silent.sock")))

            async def offer(*args: Any) -> Offer | None:
                offered = await offer_by_mover(*args[:-1])
                assert offered is not None
                if args[-1] != silent:
                    return Offer(silent, offered.ticket)
                a.mover.withdraw(offered.ticket)
                return None

            a.mover.offer = offer  # type: ignore[method-assign]
            number = written(a, data)
            copy, *_ = await b.transfers.copy(a.id, number, Claim(len(data)))
        assert content(copy) == data
        a.store.free(number)
        await until(lambda: not a.store.used)

    try:
        with_ends(tmp_path, test)
    finally:
        config.cache_clear()


@pytest.mark.usefixtures("no_pieces")
def test_a_large_value_comes_by_mover_when_there_is_room_on_disk_only(tmp_path: Path) -> None:
    data = os.urandom(SIZE)

    async def test(a: End, b: End) -> None:
        b.store.create(b.store.capacity, 0, OWNER, OWNER)
        copy, *_ = await b.transfers.copy(a.id, written(a, data), Claim(SIZE))
        assert not copy.in_memory
        assert content(copy) == data

    with_ends(tmp_path, test)


def test_without_movers_large_values_come_through_the_daemons(tmp_path: Path) -> None:
    data = os.urandom(3 * MIB)

    async def test(a: End, b: End) -> None:
        a.mover = a.serving._mover = MoverClient(no_mover, MoverConfig("here", "/nowhere"))
        copy, *_ = await b.transfers.copy(a.id, written(a, data), Claim(len(data)))
        assert content(copy) == data
        b.mover = b.transfers._mover = MoverClient(no_mover, MoverConfig("here", "/nowhere"))
        copy, *_ = await b.transfers.copy(a.id, written(a, data), Claim(len(data)))
        assert content(copy) == data

    with_ends(tmp_path, test)


def test_who_stops_waiting_gives_the_memory_back_when_nothing_writes_there(tmp_path: Path) -> None:
    async def test(a: End, b: End) -> None:
        number = written(a, bytes(SIZE))
        began = asyncio.Event()
        used: list[int] = []
        fetch_by_mover = b.mover.fetch

        def fetch_and_tell(*args: Any) -> Move:
            began.set()
            move = fetch_by_mover(*args)
            move.ended.add_done_callback(lambda _: used.append(b.store.used))
            return move

        b.mover.fetch = fetch_and_tell  # type: ignore[method-assign]
        copying = asyncio.ensure_future(b.transfers.copy(a.id, number, Claim(SIZE)))
        await began.wait()
        copying.cancel()
        with pytest.raises(asyncio.CancelledError):
            await copying
        assert not b.store.used
        assert used[0]  # it was given back after that
        assert not b.mover.table_sizes()["moving here"]
        a.store.free(number)
        await until(lambda: not a.store.used)

    with_ends(tmp_path, test)


class StoppedMovers:
    """Starts movers, of which the first one does nothing but to tell that it listens."""

    def __init__(self) -> None:
        self.started = 0
        self.killed = 0

    def start(self) -> Helper:
        self.started += 1
        if self.started > 1:
            return mover_in_thread()
        ours, theirs = control_pair()
        theirs.send(marshal.dumps(("listening", 0)))

        def kill() -> None:
            self.killed += 1
            theirs.close()

        return Helper(ours, kill)


@pytest.mark.parametrize("what", ["sends", "receives"])
def test_a_mover_that_is_stopped_is_ended_and_the_value_comes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, what: str
) -> None:
    data = os.urandom(3 * MIB)
    monkeypatch.setenv("MINIRAY_TRANSFER_STALL", "0.2")
    config.cache_clear()
    movers = StoppedMovers()

    async def test(a: End, b: End) -> None:
        (a if what == "sends" else b).mover._start = movers.start
        number = written(a, data)
        copy, *_ = await b.transfers.copy(a.id, number, Claim(len(data)))
        assert content(copy) == data
        assert movers.killed == 1
        a.store.free(number)
        await until(lambda: not a.store.used)
        assert not any({**a.mover.table_sizes(), **b.mover.table_sizes()}.values())

    try:
        with_ends(tmp_path, test)
    finally:
        config.cache_clear()


def test_who_stops_waiting_for_a_mover_that_is_stopped_waits_until_it_is_ended(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MINIRAY_TRANSFER_STALL", "0.2")
    config.cache_clear()
    movers = StoppedMovers()

    async def test(a: End, b: End) -> None:
        b.mover._start = movers.start
        number = written(a, bytes(3 * MIB))
        copying = asyncio.ensure_future(b.transfers.copy(a.id, number, Claim(3 * MIB)))
        await until(lambda: b.mover.table_sizes()["moving here"])
        copying.cancel()
        with pytest.raises(asyncio.CancelledError):
            await copying
        assert movers.killed == 1
        assert not b.store.used

    try:
        with_ends(tmp_path, test)
    finally:
        config.cache_clear()


def test_a_mover_that_is_stopped_after_an_answer_is_ended_for_what_it_was_told_before_that(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MINIRAY_TRANSFER_STALL", "0.2")
    config.cache_clear()
    ours, theirs = control_pair()
    theirs.send(marshal.dumps(("listening", 0)))

    def released(*, clean: bool) -> None:
        assert not clean  # it may have been sent already

    async def main() -> None:
        helper = Helper(ours, lambda: theirs.shutdown(socket.SHUT_RDWR))
        client = MoverClient(lambda: helper, MoverConfig("here", str(tmp_path)))
        with open(os.devnull, "rb") as file:
            offers = [
                asyncio.ensure_future(client.offer(file.fileno(), 1, 0, released)) for _ in range(2)
            ]
            await until(lambda: client.table_sizes()["offered"] == 2)
            theirs.send(marshal.dumps(("there",)))  # to what came with the first
            assert await asyncio.gather(*offers) == [None, None]

    try:
        asyncio.run(asyncio.wait_for(main(), 5))
    finally:
        config.cache_clear()
        theirs.close()


def test_nothing_goes_on_for_who_stops_waiting_while_a_mover_that_is_stopped_is_ended(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MINIRAY_TRANSFER_STALL", "0.2")
    config.cache_clear()
    movers = StoppedMovers()

    async def test(a: End, b: End) -> None:
        b.mover._start = movers.start
        stopping = asyncio.Event()
        stop = Move.stop

        async def stop_and_tell(move: Move) -> None:
            stopping.set()
            await stop(move)

        monkeypatch.setattr(Move, "stop", stop_and_tell)
        number = written(a, bytes(3 * MIB))
        copying = asyncio.ensure_future(b.transfers.copy(a.id, number, Claim(3 * MIB)))
        await stopping.wait()  # nothing came, so that it is to be begun anew
        copying.cancel()
        with pytest.raises(asyncio.CancelledError):
            await copying
        assert movers.killed == movers.started == 1
        assert not b.store.used

    try:
        with_ends(tmp_path, test)
    finally:
        config.cache_clear()


@pytest.mark.parametrize("message", ["offer", "fetch"])
def test_nobody_waits_for_the_answer_to_what_a_mover_could_not_be_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, message: str
) -> None:
    """The kernel may refuse to pass another descriptor."""
    data = os.urandom(3 * MIB)
    refused: list[str] = []
    send = socket.send_fds

    def send_or_refuse(control: socket.socket, buffers: list[bytes], fds: list[int]) -> int:
        is_control = control.type == socket.SOCK_SEQPACKET
        if is_control and marshal.loads(buffers[0])[0] == message and not refused:
            refused.append(message)
            raise OSError(errno.ETOOMANYREFS, os.strerror(errno.ETOOMANYREFS))
        return send(control, buffers, fds)

    monkeypatch.setattr(socket, "send_fds", send_or_refuse)

    async def test(a: End, b: End) -> None:
        copy, *_ = await b.transfers.copy(a.id, written(a, data), Claim(len(data)))
        assert content(copy) == data
        assert refused

    with_ends(tmp_path, test)


def test_memory_that_could_not_be_shown_comes_another_way(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The kernel may refuse to pass another descriptor, or the other end have no room for it."""
    data = os.urandom(3 * MIB)
    send = socket.send_fds

    def without(sock: socket.socket, buffers: list[bytes], fds: list[int]) -> int:
        return send(sock, buffers, fds if sock.type == socket.SOCK_SEQPACKET else [])

    def refuse(sock: socket.socket, buffers: list[bytes], fds: list[int]) -> int:
        if sock.type == socket.SOCK_SEQPACKET:
            return send(sock, buffers, fds)
        raise OSError(errno.ETOOMANYREFS, os.strerror(errno.ETOOMANYREFS))

    async def test(a: End, b: End) -> None:
        for way in (without, refuse):
            monkeypatch.setattr(socket, "send_fds", way)
            b.transfers._unreached.clear()
            copy, *_ = await b.transfers.copy(a.id, written(a, data), Claim(len(data)))
            assert content(copy) == data
            assert a.id in b.transfers._unreached

    with_ends(tmp_path, test)


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
