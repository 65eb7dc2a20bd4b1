"""Two daemons' ends with real streams between them that a test can cut."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import threading
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import grpc
from stores import new_store

from miniray.common.object_ref import PROCESS_ID_LENGTH
from miniray.node.base.control_socket import control_pair
from miniray.node.base.node_config import MoverConfig
from miniray.node.base.template_client import Helper, TemplateGoneError
from miniray.node.objects.objects import NodeObjects
from miniray.node.relay.relay import NodeRequests, RelayHub
from miniray.node.relay.relayed import MESSAGES, Relayed
from miniray.node.store.segments import Copies
from miniray.node.store.spilling import Spilling
from miniray.node.transfer.directory import Directory
from miniray.node.transfer.mover import Mover
from miniray.node.transfer.serving import Serving
from miniray.node.transfer.transfers import Transfers

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable
    from pathlib import Path

    from miniray.node.store.segments import Key

#: As security/channels.py has them: a new channel tries at once, whatever others met.
_OPTIONS = [
    ("grpc.use_local_subchannel_pool", 1),
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.min_reconnect_backoff_ms", 100),
]


def message(number: int) -> Relayed:
    return Relayed(to=b"to", sender=b"from", bodies=[number.to_bytes(4, "big")])


def numbers(messages: list[Relayed]) -> list[int]:
    return [int.from_bytes(m.bodies[0], "big") for m in messages]


class Breaker:
    """Passes a connection on, until it is told to cut it."""

    def __init__(self, target: str) -> None:
        self._target = target
        self._open: set[asyncio.StreamWriter] = set()
        self.refuses = False
        self.refused = 0

    async def handle(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if self.refuses:
            self.refused += 1
            writer.close()
            return
        there_reader, there_writer = await asyncio.open_unix_connection(self._target)
        both = {writer, there_writer}
        self._open |= both
        await asyncio.gather(_copy(reader, there_writer), _copy(there_reader, writer))
        self._open -= both

    def cut(self) -> None:
        for writer in self._open:
            if not writer.transport.is_closing():
                writer.transport.abort()
        self._open.clear()


async def _copy(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    with contextlib.suppress(ConnectionError):
        while data := await reader.read(4096):
            writer.write(data)
            await writer.drain()
    writer.close()


def mover_in_thread() -> Helper:
    """A mover in a thread of this process; ends when the socket is closed."""
    ours, theirs = control_pair()
    threading.Thread(target=Mover(theirs).run, daemon=True).start()
    return Helper(ours, lambda: theirs.shutdown(socket.SHUT_RDWR))


def no_mover() -> Helper:
    """Everything goes through the daemons."""
    raise TemplateGoneError("none is to be started")


def dial(address: str) -> grpc.aio.Channel:
    return grpc.aio.insecure_channel(address, options=_OPTIONS)


class Everybody(dict[bytes, Any]):
    """Clients among which is every process."""

    def __contains__(self, process: object) -> bool:
        return True


class End:
    """One daemon's hub, reached through a breaker."""

    def __init__(
        self, folder: Path, name: str, start_mover: Callable[[], Helper] = no_mover
    ) -> None:
        self.id = name.encode().ljust(PROCESS_ID_LENGTH)
        self.movers: list[Helper] = []
        self._start_mover = start_mover
        self.got: dict[bytes, list[int]] = {}
        self.lost: list[bytes] = []
        self.hub = RelayHub(self.id, dial, self.lost.append)
        self.hub.notices[MESSAGES] = self._relayed
        self.requests = NodeRequests(self.hub)
        self.store = new_store(1 << 26, folder / f"{name}.spilled")
        self.copies = Copies(self.store, self.hub.knows)
        self.spilling = Spilling(self.copies, str, self.id)
        (folder / name).mkdir()
        clients: Any = SimpleNamespace(requests={}, notices={}, clients=Everybody())
        self.directory = Directory(self.id, self.store, self.hub, clients, self._free_here)
        self.serving = Serving(
            self.id,
            self.spilling,
            self.requests,
            self.directory,
            self.copies,
            self._start_one,
            MoverConfig("here", str(folder / name)),
        )
        self.mover = self.serving.mover
        self.transfers = Transfers(
            self.id, self.spilling, self.hub, self.requests, self.directory, self.serving
        )
        self.objects = NodeObjects(
            self.id,
            self.spilling,
            self.hub,
            self.transfers,
            self.directory,
            self.copies,
            clients,
        )
        self._path = str(folder / f"{name}.sock")
        self.address = f"unix:{folder / f'{name}.proxy'}"
        self.breaker = Breaker(self._path)

    def _free_here(self, key: Key) -> None:
        self.objects.free_here(key)

    def key(self, number: int) -> Key:
        """The name of a value that was written here for a process of this node."""
        return self.id, number, self.id

    def _start_one(self) -> Helper:
        self.movers.append(self._start_mover())
        return self.movers[-1]

    def _relayed(self, node_id: bytes, message: Relayed) -> None:
        if message != Relayed():
            self.got.setdefault(node_id, []).extend(numbers([message]))

    async def start(self) -> None:
        self._server = grpc.aio.server()
        self.hub.add_to(self._server)
        self._server.add_insecure_port(f"unix:{self._path}")
        await self._server.start()
        self._proxy = await asyncio.start_unix_server(
            self.breaker.handle, self.address.removeprefix("unix:")
        )

    async def stop(self) -> None:
        await self.hub.close()
        await self._server.stop(None)
        self._proxy.close()
        self.mover.close()
        await self.spilling.close()
        self.store.close()
        self.breaker.cut()


@contextlib.asynccontextmanager
async def two_ends(
    folder: Path,
    *,
    dialable: bool = True,
    starts: tuple[Callable[[], Helper], Callable[[], Helper]] = (no_mover, no_mover),
) -> AsyncIterator[tuple[End, End]]:
    a, b = End(folder, "a", starts[0]), End(folder, "b", starts[1])
    for end in (a, b):
        await end.start()
    a.hub.joined(b.id, b.address)
    b.hub.joined(a.id, a.address if dialable else "")
    try:
        yield a, b
    finally:
        await a.stop()
        await b.stop()


async def until(condition: Callable[[], object]) -> None:
    deadline = asyncio.get_running_loop().time() + 20
    while not condition():
        assert asyncio.get_running_loop().time() < deadline
        await asyncio.sleep(0.01)
