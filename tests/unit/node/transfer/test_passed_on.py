"""What still comes to a node is passed on to others, from mover to mover."""

from __future__ import annotations

import asyncio
import os
import select
import socket
import struct
from typing import TYPE_CHECKING

import pytest
from mover_ends import (
    MIB,
    MORE,
    SIZE,
    Movers,
    Source,
    connected,
    fetch,
    finish,
)
from node_ends import until

from miniray.node.transfer.mover_client import MoveError

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path


@pytest.fixture
def movers(tmp_path: Path) -> Iterator[Movers]:
    made = Movers(tmp_path)
    yield made
    made.close()


def test_who_is_passed_on_what_comes_is_told_of_more_when_it_asks(movers: Movers) -> None:
    async def test() -> None:
        b = movers.add()
        with Source(movers, b"x" * SIZE) as source:
            middle = movers.memory()
            came: list[int] = []
            move = b.fetch(*source.offer, middle, 0, SIZE, came.append)
            moving = asyncio.ensure_future(finish(move, []))
            await source.show(MIB)
            await until(lambda: sum(came) == MIB)
            offer = movers.offered(b, middle, SIZE, [], job=move.number)
            with await connected(offer) as reader:
                word, fds, _, _ = await asyncio.to_thread(socket.recv_fds, reader, 100, 1)
                os.close(*fds)
                assert struct.unpack("!Q", word) == (MIB,)
                await source.show(SIZE)
                await moving
                assert not select.select([reader], [], [], 0)[0]
                reader.sendall(MORE)
                assert struct.unpack("!Q", await asyncio.to_thread(reader.recv, 100)) == (SIZE,)

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
            move = b.fetch(*source.offer, middle, 0, size, came.append)
            first = asyncio.ensure_future(finish(move, came))
            await source.show(half)
            offer = movers.offered(b, middle, size, over, job=move.number)
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
            move = b.fetch(*source.offer, middle, 0, size, int)
            first = asyncio.ensure_future(finish(move, []))
            await source.show(1)
            offer = movers.offered(b, middle, size, [], job=move.number)
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
            move = b.fetch(*source.offer, middle, 0, size, came.append)
            first = asyncio.ensure_future(finish(move, came))
            await source.show(half)
            gone: list[bool] = []
            over: list[bool] = []
            offers = [movers.offered(b, middle, size, o, job=move.number) for o in (gone, over)]
            leaves = asyncio.ensure_future(fetch(c, offers[0], left, size))
            stays = asyncio.ensure_future(fetch(d, offers[1], last, size))
            for fd in (left, last):
                await until(lambda fd=fd: os.pread(fd, 1, half - 1) == data[half - 1 : half])
            leaves.cancel()
            with pytest.raises(asyncio.CancelledError):
                await leaves
            await source.show(size)
            assert await first == await stays == size
            await until(lambda: gone and over)
            assert os.pread(last, size, 0) == data

    movers.run(test())
