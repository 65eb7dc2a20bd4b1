"""The daemon's session with the head: one stream, messages both ways."""

from __future__ import annotations

import asyncio
import logging
from typing import TYPE_CHECKING, Any

import grpc

from miniray import exceptions
from miniray._proto import head_pb2, head_pb2_grpc
from miniray.config import config

if TYPE_CHECKING:
    from collections.abc import Callable

logger = logging.getLogger(__name__)

#: Messages that are written together at most.
_BATCH = 256
#: What reading an ended stream gives; the type stubs of gRPC lack it.
_EOF: Any = grpc.aio.EOF  # type: ignore[attr-defined]


class HeadSession:
    """Sends what is queued, hands on what comes."""

    def __init__(
        self,
        channel: grpc.aio.Channel,
        hello: Callable[[], head_pb2.NodeHello],
        on_message: Callable[[head_pb2.ToNode], None],
        usage: Callable[[], head_pb2.Heartbeat],
    ) -> None:
        self._channel = channel
        self._usage = usage
        self._hello = hello
        self._on_message = on_message
        self._queue: asyncio.Queue[head_pb2.FromNode] = asyncio.Queue()
        self._tasks: list[asyncio.Task[None]] = []
        #: Set when the stream has ended.
        self.ended = asyncio.Event()

    def send(self, message: head_pb2.FromNode) -> None:
        """Queue a message for the head."""
        self._queue.put_nowait(message)

    async def open(self, timeout: float) -> head_pb2.Welcome:
        """Introduce this node.

        Raises:
            MinirayError: the head refuses; the class is what the head named.
            ConnectionError: there is no head, or it does not answer in time.
        """
        self.ended.clear()
        call = head_pb2_grpc.HeadStub(self._channel).Session(  # type: ignore[no-untyped-call]
            wait_for_ready=True
        )
        try:
            await asyncio.wait_for(call.write(head_pb2.FromNode(hello=self._hello())), timeout)
            first = await asyncio.wait_for(call.read(), timeout)
        except asyncio.TimeoutError:
            call.cancel()
            raise ConnectionError(f"The head did not answer within {timeout:g} s.") from None
        except grpc.aio.AioRpcError as error:
            if error.code() == grpc.StatusCode.UNAUTHENTICATED:
                raise exceptions.AuthenticationError(
                    error.details() or "The head refused the secret."
                ) from None
            raise ConnectionError(f"The head cannot be reached: {error.details()}") from None
        if first is _EOF:
            raise ConnectionError("The head closed the session at once.")
        welcome: head_pb2.Welcome = first.welcome
        if welcome.error_kind:
            kind = getattr(exceptions, welcome.error_kind, exceptions.MinirayError)
            refusal = exceptions.MinirayError.__new__(kind)
            Exception.__init__(refusal, welcome.error)
            raise refusal
        loop = asyncio.get_running_loop()
        self._tasks = [
            loop.create_task(self._write(call)),
            loop.create_task(self._read(call)),
            loop.create_task(self._beat()),
        ]
        return welcome

    async def _write(
        self, call: grpc.aio.StreamStreamCall[head_pb2.FromNode, head_pb2.ToNode]
    ) -> None:
        try:
            while True:
                message = await self._queue.get()
                if not self._queue.empty():
                    message = self._batch(message)
                await call.write(message)
        except (grpc.aio.AioRpcError, asyncio.InvalidStateError):
            self.ended.set()

    def _batch(self, first: head_pb2.FromNode) -> head_pb2.FromNode:
        """One message of all that waits: each write costs more than what is in it."""
        messages = [first]
        while not self._queue.empty() and len(messages) < _BATCH:
            messages.append(self._queue.get_nowait())
        return head_pb2.FromNode(batch=head_pb2.FromNodeBatch(messages=messages))

    async def _read(
        self, call: grpc.aio.StreamStreamCall[head_pb2.FromNode, head_pb2.ToNode]
    ) -> None:
        try:
            while True:
                message: Any = await call.read()
                if message is _EOF:
                    break
                if message.WhichOneof("kind") == "batch":
                    for part in message.batch.messages:
                        self._handle(part)
                else:
                    self._handle(message)
        except grpc.aio.AioRpcError as error:
            logger.info("the session with the head ended: %s", error.details())
        self.ended.set()

    def _handle(self, message: Any) -> None:
        """One message that cannot be handled must not end the session."""
        try:
            self._on_message(message)
        except Exception:
            logger.exception("handling %s failed", message.WhichOneof("kind"))

    async def _beat(self) -> None:
        """Heartbeats: their absence, not a broken stream alone, tells a dead machine."""
        while True:
            await asyncio.sleep(config().heartbeat_interval)
            self.send(head_pb2.FromNode(heartbeat=self._usage()))

    async def close(self) -> None:
        """End the session."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self._channel.close(None)
