"""Calls between nodes: messages to processes of other nodes, batched by what waits.

Each daemon writes to another one over one stream, which it opens itself or, where
the other one cannot be dialled, the answering half of the stream that came from there.
"""

from __future__ import annotations

import asyncio
import collections
import logging
from typing import TYPE_CHECKING, Any, Protocol

import grpc

from miniray._proto import node_pb2
from miniray.node.relayed import Relayed, pack, unpack

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable

logger = logging.getLogger(__name__)

#: Bytes of bodies in one gRPC message.
_BATCH_BYTES = 1 << 20


class Sink(Protocol):
    """Where batches are written."""

    async def write(self, batch: node_pb2.RelayBatch) -> None:
        """Write one message."""


class Outbox:
    """What waits for one other node."""

    def __init__(self, node_id: bytes) -> None:
        self.node_id = node_id
        self._queue: collections.deque[Relayed] = collections.deque()
        self._filled = asyncio.Event()
        self.closed = False

    def put(self, message: Relayed) -> None:
        """Queue a message."""
        self._queue.append(message)
        self._filled.set()

    async def drain_to(self, write: Callable[[node_pb2.RelayBatch], object]) -> None:
        """Write batches for ever; each takes all that waits."""
        while True:
            while not self._queue:
                self._filled.clear()
                await self._filled.wait()
            batch: list[Relayed] = []
            size = 0
            while self._queue and size < _BATCH_BYTES:
                message = self._queue.popleft()
                size += sum(map(len, message.bodies)) + 32
                batch.append(message)
            await write(node_pb2.RelayBatch(messages=pack(batch)))  # type: ignore[misc]


class RelayHub:
    """All other nodes."""

    def __init__(
        self,
        node_id: bytes,
        dial: Callable[[str], grpc.aio.Channel],
        on_message: Callable[[bytes, Relayed], None],
        on_lost: Callable[[bytes], None],
    ) -> None:
        self._node_id = node_id
        self._dial = dial
        self._on_message = on_message
        self._on_lost = on_lost
        #: Address of each living node; empty if it cannot be dialled.
        self._addresses: dict[bytes, str] = {}
        self._outboxes: dict[bytes, Outbox] = {}
        self._channels: dict[bytes, grpc.aio.Channel] = {}
        self._tasks: dict[bytes, asyncio.Task[None]] = {}
        #: Nodes with a stream to this one.
        self._incoming: set[bytes] = set()

    def connected(self) -> set[bytes]:
        """Nodes to which or from which there is a stream."""
        return self._incoming | self._outboxes.keys()

    def knows(self, node_id: bytes) -> bool:
        """Whether a node lives, as far as the head said."""
        return node_id in self._addresses

    def joined(self, node_id: bytes, address: str) -> None:
        """The head says that a node is there."""
        if node_id != self._node_id:
            self._addresses[node_id] = address

    def died(self, node_id: bytes) -> None:
        """The head says that a node is gone."""
        self._addresses.pop(node_id, None)
        outbox = self._outboxes.pop(node_id, None)
        if outbox is not None:
            outbox.closed = True
        task = self._tasks.pop(node_id, None)
        if task is not None:
            task.cancel()
        self._channels.pop(node_id, None)

    def send(self, node_id: bytes, message: Relayed) -> bool:
        """Send a message; False if there is no such node."""
        outbox = self._outboxes.get(node_id)
        if outbox is None:
            if node_id not in self._addresses:
                return False
            outbox = self._outboxes[node_id] = Outbox(node_id)
            address = self._addresses[node_id]
            if address:
                self._tasks[node_id] = asyncio.get_running_loop().create_task(
                    self._write_out(node_id, address, outbox)
                )
        outbox.put(message)
        return True

    def channel(self, node_id: bytes) -> grpc.aio.Channel | None:
        """A channel for objects: apart from calls, which must not wait behind gigabytes."""
        address = self._addresses.get(node_id)
        if not address:
            return None
        channel = self._channels.get(node_id)
        if channel is None:
            channel = self._channels[node_id] = self._dial(address)
        return channel

    async def _write_out(self, node_id: bytes, address: str, outbox: Outbox) -> None:
        """Hold the stream to a node open until the head says that it is gone."""
        from miniray._proto import node_pb2_grpc

        try:
            async with self._dial(address) as channel:
                stub = node_pb2_grpc.NodeStub(channel)  # type: ignore[no-untyped-call]
                call = stub.Relay()
                await call.write(node_pb2.RelayBatch(node_id=self._node_id))
                reader = asyncio.get_running_loop().create_task(self._read(node_id, call))
                try:
                    await outbox.drain_to(call.write)
                finally:
                    reader.cancel()
        except (grpc.aio.AioRpcError, asyncio.InvalidStateError) as error:
            if self._outboxes.get(node_id) is outbox:
                logger.warning("lost the stream to node %s: %s", node_id.hex(), error)
                del self._outboxes[node_id]
                self._tasks.pop(node_id, None)
                # Messages may be lost: whoever waits for that node's processes must know.
                self._on_lost(node_id)

    async def _read(self, node_id: bytes, call: AsyncIterator[node_pb2.RelayBatch]) -> None:
        async for batch in call:
            self._handle(node_id, batch)

    def _handle(self, node_id: bytes, batch: node_pb2.RelayBatch) -> None:
        for message in unpack(batch.messages) if batch.messages else ():
            self._on_message(node_id, message)

    async def serve(
        self,
        incoming: AsyncIterator[node_pb2.RelayBatch],
        context: grpc.aio.ServicerContext[Any, Any],
    ) -> None:
        """The Relay RPC: another node's stream to this one."""
        node_id = b""
        writer: asyncio.Task[None] | None = None
        try:
            async for batch in incoming:
                if batch.node_id:
                    node_id = batch.node_id
                    self._incoming.add(node_id)
                    if not self._addresses.get(node_id) and node_id not in self._outboxes:
                        outbox = self._outboxes[node_id] = Outbox(node_id)
                        self._addresses.setdefault(node_id, "")
                        writer = asyncio.get_running_loop().create_task(
                            outbox.drain_to(context.write)
                        )
                self._handle(node_id, batch)
        finally:
            self._incoming.discard(node_id)
            if writer is not None:
                writer.cancel()
                self._outboxes.pop(node_id, None)

    async def close(self) -> None:
        """End all streams."""
        tasks = list(self._tasks.values())
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        for channel in self._channels.values():
            await channel.close(None)
