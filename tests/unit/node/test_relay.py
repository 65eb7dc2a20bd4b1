"""Streams between daemons that break: every message arrives once, and in order."""

from __future__ import annotations

import asyncio
import contextlib
import random
from typing import TYPE_CHECKING, Any

import grpc
import pytest

from miniray._proto import node_pb2, node_pb2_grpc
from miniray.config import config
from miniray.node import relay as relay_module
from miniray.node.relay import RelayHub
from miniray.node.relay_box import Inbox, Outbox
from miniray.node.relayed import Relayed

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable
    from pathlib import Path


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


# --- the boxes ---------------------------------------------------------------------------
@pytest.mark.parametrize("seed", range(20))
def test_whatever_breaks_each_message_is_accepted_once_and_in_order(seed: int) -> None:
    rng = random.Random(seed)
    outbox, inbox = Outbox(), Inbox()
    on_the_wire: list[node_pb2.RelayBatch] = []
    accepted: list[int] = []
    sent = 0
    while sent < 200 or len(accepted) < 200:
        step = rng.random()
        if step < 0.3 and sent < 200:
            outbox.put(message(sent))
            sent += 1
        elif step < 0.6:
            batch = outbox.take()
            if numbers(Inbox().accept(batch)):
                on_the_wire.append(batch)
        elif step < 0.85 and on_the_wire:
            accepted += numbers(inbox.accept(on_the_wire.pop(0)))
            if rng.random() < 0.5:
                outbox.acknowledged(inbox.received)
        elif step > 0.95:
            if on_the_wire and rng.random() < 0.5:  # the last ones are still read
                accepted += numbers(inbox.accept(on_the_wire.pop(0)))
            on_the_wire.clear()
            outbox.rewind()
    assert accepted == list(range(200))


def test_what_was_given_up_is_not_sent_and_what_follows_is() -> None:
    outbox, inbox = Outbox(), Inbox()
    outbox.put(message(0))
    assert numbers(inbox.accept(outbox.take())) == [0]
    outbox.put(message(1))
    outbox.give_up()
    outbox.put(message(2))
    assert inbox.gaps == 0
    notice, after = inbox.accept(outbox.take())
    assert notice == Relayed()
    assert numbers([after]) == [2]
    assert inbox.gaps == 1


def test_a_new_outbox_of_a_node_begins_to_count_anew() -> None:
    inbox = Inbox()
    for round in range(2):
        outbox = Outbox()
        outbox.put(message(round))
        assert numbers(inbox.accept(outbox.take())) == [round]


# --- over real streams -------------------------------------------------------------------
class Breaker:
    """Passes a connection on, until it is told to cut it."""

    def __init__(self, target: str) -> None:
        self._target = target
        self._open: set[asyncio.StreamWriter] = set()
        self.refuses = False

    async def handle(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if self.refuses:
            writer.close()
            return
        there_reader, there_writer = await asyncio.open_unix_connection(self._target)
        self._open |= {writer, there_writer}
        await asyncio.gather(_copy(reader, there_writer), _copy(there_reader, writer))

    def cut(self) -> None:
        for writer in self._open:
            writer.transport.abort()
        self._open.clear()


async def _copy(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    with contextlib.suppress(ConnectionError):
        while data := await reader.read(4096):
            writer.write(data)
            await writer.drain()
    writer.close()


class Servicer(node_pb2_grpc.NodeServicer):
    def __init__(self, hub: RelayHub) -> None:
        self._hub = hub

    async def Relay(self, incoming: Any, context: Any) -> None:
        await self._hub.serve(incoming, context)


def dial(address: str) -> grpc.aio.Channel:
    return grpc.aio.insecure_channel(address, options=_OPTIONS)


class End:
    """One daemon's hub, reached through a breaker."""

    def __init__(self, folder: Path, name: str) -> None:
        self.id = name.encode()
        self.got: dict[bytes, list[int]] = {}
        self.lost: list[bytes] = []
        self.hub = RelayHub(self.id, dial, self._on_message, self.lost.append)
        self._path = str(folder / f"{name}.sock")
        self.address = f"unix:{folder / f'{name}.proxy'}"
        self.breaker = Breaker(self._path)

    def _on_message(self, node: bytes, relayed: Relayed) -> None:
        if relayed != Relayed():
            self.got.setdefault(node, []).extend(numbers([relayed]))

    async def start(self) -> None:
        self._server = grpc.aio.server()
        node_pb2_grpc.add_NodeServicer_to_server(Servicer(self.hub), self._server)  # type: ignore[no-untyped-call]
        self._server.add_insecure_port(f"unix:{self._path}")
        await self._server.start()
        self._proxy = await asyncio.start_unix_server(
            self.breaker.handle, self.address.removeprefix("unix:")
        )

    async def stop(self) -> None:
        await self.hub.close()
        await self._server.stop(None)
        self._proxy.close()
        self.breaker.cut()


@contextlib.asynccontextmanager
async def two_ends(folder: Path, *, dialable: bool = True) -> AsyncIterator[tuple[End, End]]:
    a, b = End(folder, "a"), End(folder, "b")
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


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(relay_module, "_REOPEN_AFTER", (0.01, 0.05))


@pytest.mark.parametrize("dialable", [True, False], ids=["both dial", "one dials"])
def test_messages_survive_broken_connections(tmp_path: Path, dialable: bool) -> None:
    async def run() -> None:
        async with two_ends(tmp_path, dialable=dialable) as (a, b):
            for number in range(300):
                a.hub.send(b.id, message(number))
                b.hub.send(a.id, message(number))
                if number % 60 == 59:
                    await asyncio.sleep(0.05)
                    a.breaker.cut()
                    b.breaker.cut()
                elif number % 7 == 0:
                    await asyncio.sleep(0.001)
            await until(lambda: len(a.got.get(b.id, ())) >= 300 <= len(b.got.get(a.id, ())))
            assert a.got[b.id] == b.got[a.id] == list(range(300))
            assert a.lost == b.lost == []

    asyncio.run(run())


def test_a_node_out_of_reach_for_long_is_reported_once_and_heard_again_later(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MINIRAY_NODE_TIMEOUT", "0.3")
    config.cache_clear()

    async def run() -> None:
        async with two_ends(tmp_path) as (a, b):
            b.breaker.refuses = True
            a.hub.send(b.id, message(0))
            await until(lambda: a.lost)
            await asyncio.sleep(0.3)
            assert a.lost == [b.id]
            b.breaker.refuses = False
            a.hub.send(b.id, message(1))
            await until(lambda: b.got)
            assert b.got == {a.id: [1]}
            assert b.lost == [a.id]  # it may have waited for what was given up

    try:
        asyncio.run(run())
    finally:
        config.cache_clear()


def test_nothing_is_sent_to_a_node_that_died(tmp_path: Path) -> None:
    async def run() -> None:
        async with two_ends(tmp_path) as (a, b):
            assert a.hub.send(b.id, message(0))
            await until(lambda: b.got)
            a.hub.died(b.id)
            assert not a.hub.send(b.id, message(1))
            assert not a.hub.knows(b.id)

    asyncio.run(run())
