"""Large values between two daemons, by way of their movers."""

from __future__ import annotations

import asyncio
import errno
import os
import shutil
import socket
from typing import TYPE_CHECKING, Any

import pytest
from mover_ends import (
    MIB,
    OWNER,
    SIZE,
    content,
    with_ends,
    written,
)
from node_ends import End, mover_in_thread, no_mover, until

from miniray.common.config import config
from miniray.common.host_port import DaemonAddress
from miniray.node.transfer import transfers as transfers_module

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from miniray.node.transfer.mover_client import Move


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
        copy = await b.transfers.copy(a.key(number), SIZE)
        assert content(copy) == data
        a.store.free(number)
        await until(lambda: not a.store.used)  # nobody maps it any more
        assert not any({**a.mover.table_sizes(), **b.mover.table_sizes()}.values())

    with_ends(tmp_path, test)


@pytest.mark.parametrize("what", ["relay", "mover that sends", "mover that receives"])
def test_what_breaks_on_the_way_goes_on_where_it_was(
    tmp_path: Path, what: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    data = os.urandom(SIZE)
    pieces: list[int] = []
    write = transfers_module.write_all

    def note(fd: int, piece: bytes, offset: int) -> None:
        pieces.append(offset)
        write(fd, piece, offset)

    monkeypatch.setattr(transfers_module, "write_all", note)

    async def test(a: End, b: End) -> None:
        number = written(a, data)
        broken: list[int] = []
        fetch_by_mover = b.mover.fetch

        def fetch_and_break(*args: Any) -> Move:
            *others, came = args

            def came_and_break(count: int) -> None:
                came(count)
                if not broken:
                    break_it()
                broken.append(count)

            return fetch_by_mover(*others, came_and_break)

        def break_it() -> None:
            if what == "relay":
                a.breaker.cut()
                b.breaker.cut()
            else:
                end = a if what == "mover that sends" else b
                end.movers[-1].kill()

        b.mover.fetch = fetch_and_break  # type: ignore[method-assign]
        copy = await b.transfers.copy(a.key(number), SIZE)
        assert content(copy) == data
        assert 0 not in pieces
        assert pieces == sorted(set(pieces)), "a piece came twice"
        if what == "relay":
            assert not pieces

    with_ends(tmp_path, test)


def count_fetches(end: End, before: Callable[[], None] = lambda: None) -> list[int]:
    """Note each value that a node asks another mover for; ``before`` runs before it does."""
    asked: list[int] = []
    fetch_by_mover = end.mover.fetch

    def fetch_and_count(*args: Any) -> Move:
        asked.append(1)
        before()
        return fetch_by_mover(*args)

    end.mover.fetch = fetch_and_count  # type: ignore[method-assign]
    return asked


def test_a_mover_out_of_reach_is_not_asked_again_soon(tmp_path: Path) -> None:
    data = os.urandom(3 * MIB)

    async def test(a: End, b: End) -> None:
        asked = count_fetches(b, before=lambda: shutil.rmtree(tmp_path / "a"))
        for _ in range(3):
            copy = await b.transfers.copy(a.key(written(a, data)), len(data))
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
        with socket.socket(socket.AF_UNIX) as listener:
            listener.bind(str(tmp_path / "silent.sock"))
            listener.listen()
            silent = str(DaemonAddress("here", str(tmp_path / "silent.sock")))

            a.mover.address = lambda: silent  # type: ignore[method-assign]
            number = written(a, data)
            copy = await b.transfers.copy(a.key(number), len(data))
        assert content(copy) == data
        b.transfers.copied(a.key(number), len(data))
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
        copy = await b.transfers.copy(a.key(written(a, data)), SIZE)
        assert not copy.in_memory
        assert content(copy) == data

    with_ends(tmp_path, test)


@pytest.mark.parametrize("starts", [(no_mover, mover_in_thread), (mover_in_thread, no_mover)])
def test_without_a_mover_large_values_come_through_the_daemons(tmp_path: Path, starts: Any) -> None:
    data = os.urandom(3 * MIB)

    async def test(a: End, b: End) -> None:
        copy = await b.transfers.copy(a.key(written(a, data)), len(data))
        assert content(copy) == data

    with_ends(tmp_path, test, starts=starts)


def test_a_mover_that_does_not_have_a_value_in_memory_any_more_is_asked_for_the_next(
    tmp_path: Path,
) -> None:
    data = os.urandom(3 * MIB)

    async def test(a: End, b: End) -> None:
        def to_disk() -> None:
            if len(asked) == 1:
                assert a.spilling.make_room(0) <= 0

        asked = count_fetches(b, before=to_disk)
        for _ in range(2):
            copy = await b.transfers.copy(a.key(written(a, data)), len(data))
            assert content(copy) == data
        assert len(asked) == 2

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
        copying = asyncio.ensure_future(b.transfers.copy(a.key(number), SIZE))
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


@pytest.mark.parametrize("refused", [False, True])
def test_memory_that_could_not_be_shown_comes_another_way(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, refused: bool
) -> None:
    """The kernel may refuse to pass another descriptor, or the other end have no room for it."""
    data = os.urandom(3 * MIB)
    send = socket.send_fds

    def show_nothing(sock: socket.socket, buffers: list[bytes], fds: list[int]) -> int:
        if sock.type == socket.SOCK_SEQPACKET:
            return send(sock, buffers, fds)
        if refused:
            raise OSError(errno.ETOOMANYREFS, os.strerror(errno.ETOOMANYREFS))
        return send(sock, buffers, [])

    monkeypatch.setattr(socket, "send_fds", show_nothing)

    async def test(a: End, b: End) -> None:
        asked = count_fetches(b)
        for _ in range(2):
            copy = await b.transfers.copy(a.key(written(a, data)), len(data))
            assert content(copy) == data
        assert len(asked) == 1  # this mover is left alone for a while

    with_ends(tmp_path, test)
