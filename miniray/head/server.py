"""The head's gRPC service: sessions with daemons.

Responsible for connections and for batching what waits; what messages mean is in
``head.py``.
"""

from __future__ import annotations

import asyncio
import logging
from typing import TYPE_CHECKING, Any

import grpc

from miniray._proto import head_pb2, head_pb2_grpc
from miniray.common.config import config
from miniray.security.channels import host_of, one_line

if TYPE_CHECKING:
    from miniray.head.directories.nodes import ClusterNode
    from miniray.head.head import Head

    SessionContext = grpc.aio.ServicerContext[head_pb2.FromNode, head_pb2.ToNode]

logger = logging.getLogger(__name__)

#: What reading an ended stream gives; the type stubs of gRPC lack it.
_EOF: Any = grpc.aio.EOF  # type: ignore[attr-defined]
#: Bytes of the messages in one batch; one that is larger goes alone.
_BATCH_BYTES = 4 * 1024 * 1024


class SessionOutbox:
    """Messages for one daemon, written as fast as it reads."""

    def __init__(self) -> None:
        self._waiting: list[head_pb2.ToNode] = []
        self._wake = asyncio.Event()
        self._closed = False

    def put(self, message: head_pb2.ToNode) -> None:
        self._waiting.append(message)
        self._wake.set()

    def close(self) -> None:
        self._closed = True
        self._wake.set()

    async def drain(self, context: SessionContext) -> None:
        while True:
            if not self._waiting:
                if self._closed:
                    return
                self._wake.clear()
                await self._wake.wait()
                continue
            waiting, self._waiting = self._waiting, []
            for message in _in_batches(waiting):
                await context.write(message)


def _in_batches(messages: list[head_pb2.ToNode]) -> list[head_pb2.ToNode]:
    """Return the messages in order, in as few as the size of a batch allows."""
    if len(messages) == 1:
        return messages
    if messages[0].HasField("welcome"):  # the daemon reads it by itself, as answer to its hello
        return [messages[0], *_in_batches(messages[1:])]
    batches: list[head_pb2.ToNode] = []
    batch = head_pb2.ToNodeBatch()
    size = 0
    for message in messages:
        length = message.ByteSize()
        if size and size + length > _BATCH_BYTES:
            batches.append(head_pb2.ToNode(batch=batch))
            batch, size = head_pb2.ToNodeBatch(), 0
        batch.messages.append(message)
        size += length
    batches.append(head_pb2.ToNode(batch=batch))
    return batches


class HeadServicer(head_pb2_grpc.HeadServicer):
    def __init__(self, head: Head) -> None:
        self._head = head

    async def Session(  # noqa: N802 - gRPC's name
        self, _incoming: Any, context: SessionContext
    ) -> None:
        first: Any = await context.read()
        if first is _EOF or first.WhichOneof("kind") != "hello":
            await context.abort(
                grpc.StatusCode.INVALID_ARGUMENT, "A session begins with the node's hello."
            )
        outbox = SessionOutbox()
        node = self._head.join(first.hello, outbox)
        if node is None:
            outbox.close()
            await outbox.drain(context)
            return
        where = host_of(context.peer())
        logger.info("node %s (%s) joined from %s", node.name, node.hostname, where)
        reader = asyncio.ensure_future(self._read(node, context))
        writer = asyncio.ensure_future(outbox.drain(context))
        reason = "its daemon ended unexpectedly"
        if where != "this machine":
            reason += ", or the network failed"
        try:
            done, _ = await asyncio.wait({reader, writer}, return_when=asyncio.FIRST_COMPLETED)
            failures = [error for task in done if (error := task.exception()) is not None]
            if failures:
                reason = f"its session broke ({one_line(failures[0])})"
        finally:
            reader.cancel()
            writer.cancel()
            self._head.lose(node, reason)

    async def _read(self, node: ClusterNode, context: SessionContext) -> None:
        on_message = self._head.on_message
        while True:
            message: Any = await context.read()
            if message is _EOF:
                return
            on_message(node, message)


async def watch_liveness(head: Head) -> None:
    """Check for silent nodes, forever."""
    while True:
        await asyncio.sleep(config().heartbeat_interval)
        head.check_liveness()
