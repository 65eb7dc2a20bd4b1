"""Movers as threads, alone and of daemons: what they do is the same."""

from __future__ import annotations

import asyncio
import itertools
import os
import socket
import struct
from typing import TYPE_CHECKING, Any, NamedTuple

from node_ends import End, mover_in_thread, two_ends

from miniray.common.host_port import DaemonAddress
from miniray.node.base.node_config import MoverConfig
from miniray.node.transfer.mover import COMES
from miniray.node.transfer.mover_client import Move, MoverClient, Opened
from miniray.node.transfer.moving import HELLO

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine
    from pathlib import Path

    from miniray.node.base.template_client import Helper
    from miniray.node.store.segments import Key, Segment
MIB = 1024 * 1024
SIZE = 33 * MIB + 1
OWNER = b"owner000"
#: The node that fetches.
READER = b"reader00"
#: Seconds in which a mover would do what it is not to do: no event tells of that.
QUIET = 0.05
#: What a reader says that has copied all that is there.
MORE = b"\2"
_HOME = b"its node"
_numbers = itertools.count(1)


class Offer(NamedTuple):
    """What a mover needs to fetch a value from the mover of another node."""

    address: str
    hello: bytes

    def at(self, offset: int) -> bytes:
        """The words that ask for the value from an offset on."""
        *key, _, reader = HELLO.unpack(self.hello)
        return HELLO.pack(*key, offset, reader)


class Movers:
    """Movers of one test, and the memory that they fill."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.clients: list[MoverClient] = []
        #: What their nodes have.
        self.values: dict[Key, Opened] = {}
        self._helpers: dict[MoverClient, Helper] = {}
        self.fds: list[int] = []

    def add(self, machine: str = "here", **settings: Any) -> MoverClient:
        folder = self.folder / str(len(self.clients))
        folder.mkdir()

        def start() -> Helper:
            self._helpers[client] = mover_in_thread()
            return self._helpers[client]

        config = MoverConfig(machine, str(folder), **settings)
        client = MoverClient(start, config, lambda key, _node: self.values.get(key))
        self.clients.append(client)
        return client

    def kill(self, client: MoverClient) -> None:
        """End the mover of a client, as if it had died."""
        self._helpers[client].kill()

    def memory(self, data: bytes = b"", size: int = SIZE) -> int:
        fd = os.memfd_create("value")
        self.fds.append(fd)
        os.ftruncate(fd, max(size, len(data)))
        os.pwrite(fd, data, 0)
        return fd

    def offered(
        self, client: MoverClient, fd: int, size: int, over: list[bool], job: int = 0
    ) -> Offer:
        """Let a value be fetched; ``over`` gets whether it was released with nobody looking."""
        key = (b"writer00", next(_numbers), _HOME)
        self.values[key] = Opened(fd, size, job, lambda left_open: over.append(not left_open))
        return Offer(client.address(), HELLO.pack(*key, 0, READER))

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


async def fetch(client: MoverClient, offer: Offer, fd: int, size: int, offset: int = 0) -> int:
    """Returns how many bytes came."""
    came: list[int] = []
    move = client.fetch(offer.address, offer.at(offset), fd, offset, size, came.append)
    return await finish(move, came)


async def finish(move: Move, came: list[int]) -> int:
    try:
        await asyncio.shield(move.ended)
    finally:
        await move.stop()
    return sum(came)


async def connected(offer: Offer) -> socket.socket:
    """A connection over which a value begins to come."""
    sock = socket.socket(socket.AF_UNIX)
    sock.settimeout(10)
    sock.connect(DaemonAddress.parse(offer.address).socket_path)
    sock.sendall(offer.hello)
    assert await asyncio.to_thread(sock.recv, 1) == COMES
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
        self.offer = Offer(str(DaemonAddress("here", path)), bytes(HELLO.size))

    async def show(self, size: int) -> None:
        """So much of it is there."""
        word = struct.pack("!Q", size)
        if self._sock is None:
            self._sock, _ = await asyncio.to_thread(self._listener.accept)
            self._sock.settimeout(10)
            assert len(self._sock.recv(HELLO.size)) == HELLO.size
            self._sock.sendall(COMES)
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


def written(end: End, data: bytes) -> int:
    segment = end.store.create(len(data), 0, OWNER, OWNER)
    os.pwrite(segment.fd, data, 0)
    end.store.seal(segment.number)
    return segment.number


def with_ends(
    folder: Path,
    test: Callable[[End, End], Coroutine[Any, Any, None]],
    *,
    starts: tuple[Callable[[], Helper], Callable[[], Helper]] = (mover_in_thread, mover_in_thread),
) -> None:
    async def main() -> None:
        async with two_ends(folder, starts=starts) as (a, b):
            await asyncio.wait_for(test(a, b), 30)

    asyncio.run(main())


def content(segment: Segment) -> bytes:
    return os.pread(segment.fd, segment.size, 0)
