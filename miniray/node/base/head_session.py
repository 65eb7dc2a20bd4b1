"""The daemon's session with the head: one stream, messages both ways."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from typing import TYPE_CHECKING, Any, Protocol

import grpc

from miniray import exceptions
from miniray._proto import head_pb2, head_pb2_grpc
from miniray.common.config import config
from miniray.common.series import COUNTED
from miniray.security.channels import one_line

if TYPE_CHECKING:
    from collections.abc import Callable

    _Call = grpc.aio.StreamStreamCall[head_pb2.FromNode, head_pb2.ToNode]

logger = logging.getLogger(__name__)

#: Most messages that are written together, and their bytes without those of the last.
_BATCH = 256
_BATCH_BYTES = 1 << 20
#: Seconds between two attempts at a head that runs but does not take the session.
_RETRY = 0.2
#: Seconds that the head may take to read that this node ends.
_FAREWELL = 1.0
#: The result of reading an ended stream; the type stubs of gRPC lack it.
_EOF: Any = grpc.aio.EOF  # type: ignore[attr-defined]


class SessionEvents(Protocol):
    """What the node does for its session."""

    def hello(self) -> head_pb2.NodeHello:
        """Introduce this node."""

    def heartbeat(self) -> head_pb2.Heartbeat:
        """Return the usage of this node."""

    def on_message(self, message: head_pb2.ToNode) -> None:
        """Do what the head says."""


class HeadSession:
    """Sends queued messages, and hands on those of the head."""

    def __init__(self, channel: grpc.aio.Channel) -> None:
        self._channel = channel
        self._queue: asyncio.Queue[head_pb2.FromNode] = asyncio.Queue()
        self._tasks: list[asyncio.Task[None]] = []
        #: Set when the stream has ended.
        self.ended = asyncio.Event()
        #: The time of that, until there is a stream again.
        self._lost_at: float | None = None

    def clock(self) -> float:
        """Return the time in seconds; it stands still while there is no session."""
        return time.monotonic() if self._lost_at is None else self._lost_at

    def lost_for(self) -> float | None:
        """Return for how many seconds there has been no session; None while there is one."""
        return None if self._lost_at is None else time.monotonic() - self._lost_at

    def send(self, message: head_pb2.FromNode) -> None:
        self._queue.put_nowait(message)

    async def open(
        self,
        member: SessionEvents,
        timeout: float,
        first: Callable[[list[head_pb2.FromNode]], list[head_pb2.FromNode]],
    ) -> head_pb2.Welcome:
        """Introduce this node, again if there was a session; with retries for ``timeout`` seconds.

        ``first`` gets the messages that wait when the head has accepted, and returns what is to be
        sent before them.

        Raises:
            MinirayError: The head refuses; the class is the one that the head named.
            ConnectionError: There is no head, or it does not answer in time.
        """
        await self._end_tasks()
        loop = asyncio.get_running_loop()
        deadline = loop.time() + timeout
        told = False
        while True:
            try:
                # The introduction is made after that: it must be true when it is read.
                await asyncio.wait_for(self._channel.channel_ready(), deadline - loop.time())
                call, welcome = await self._introduce(member, deadline - loop.time())
                break
            except asyncio.TimeoutError:
                raise ConnectionError(f"there was none for {timeout:g} s") from None
            except exceptions.MinirayError:
                raise
            except ConnectionError as error:
                if loop.time() + _RETRY > deadline:
                    raise
                if not told:
                    logger.info("the head does not take the session yet: %s", error)
                told = True
                await asyncio.sleep(_RETRY)
        self._lost_at = None
        waiting = [self._queue.get_nowait() for _ in range(self._queue.qsize())]
        for message in (*first(waiting), *waiting):
            self._queue.put_nowait(message)
        self._begin(call, member)
        return welcome

    async def _introduce(
        self, member: SessionEvents, timeout: float
    ) -> tuple[_Call, head_pb2.Welcome]:
        self.ended.clear()
        call = head_pb2_grpc.HeadStub(self._channel).Session(  # type: ignore[no-untyped-call]
            wait_for_ready=True
        )
        try:
            await asyncio.wait_for(call.write(head_pb2.FromNode(hello=member.hello())), timeout)
            first = await asyncio.wait_for(call.read(), timeout)
        except asyncio.TimeoutError:
            call.cancel()
            raise ConnectionError(f"The head did not answer within {timeout:g} s.") from None
        except grpc.aio.AioRpcError as error:
            if error.code() == grpc.StatusCode.UNAUTHENTICATED:
                raise exceptions.AuthenticationError(
                    error.details() or "The head refused the secret."
                ) from None
            # If the head refuses while a message is being written to it, gRPC may forget why.
            raise ConnectionError(f"The head cannot be reached: {error.details()}") from None
        if first is _EOF:
            raise ConnectionError("The head closed the session at once.")
        welcome: head_pb2.Welcome = first.welcome
        if welcome.error_kind:
            kind = getattr(exceptions, welcome.error_kind, exceptions.MinirayError)
            refusal = exceptions.MinirayError.__new__(kind)
            Exception.__init__(refusal, welcome.error)
            raise refusal
        return call, welcome

    def _begin(self, call: _Call, member: SessionEvents) -> None:
        loop = asyncio.get_running_loop()
        self._tasks = [
            loop.create_task(self._write(call)),
            loop.create_task(self._read(call, member)),
            loop.create_task(self._beat(member)),
        ]

    async def _write(self, call: _Call) -> None:
        try:
            while True:
                message = await self._queue.get()
                if self._queue.empty():
                    await call.write(message)
                    continue
                for each in self._batched(message):
                    await call.write(each)
        except (grpc.aio.AioRpcError, asyncio.InvalidStateError):
            self._end()

    def _batched(self, message: head_pb2.FromNode) -> list[head_pb2.FromNode]:
        """Put the waiting messages into one: each write costs more than what is in it.

        A large message ends it and goes by itself: there is a limit to what can be written at once.
        """
        messages: list[head_pb2.FromNode] = []
        size = message.ByteSize()
        while size < _BATCH_BYTES:
            messages.append(message)
            if self._queue.empty() or len(messages) == _BATCH:
                return [head_pb2.FromNode(batch=head_pb2.FromNodeBatch(messages=messages))]
            message = self._queue.get_nowait()
            size += message.ByteSize()
        if not messages:
            return [message]
        return [head_pb2.FromNode(batch=head_pb2.FromNodeBatch(messages=messages)), message]

    async def _read(self, call: _Call, member: SessionEvents) -> None:
        try:
            while True:
                message: Any = await call.read()
                if message is _EOF:
                    break
                if message.WhichOneof("kind") == "batch":
                    for part in message.batch.messages:
                        _handle(part, member)
                else:
                    _handle(message, member)
        except grpc.aio.AioRpcError as error:
            logger.info("the session with the head ended: %s", one_line(error))
        self._end()

    def _end(self) -> None:
        if self._lost_at is None:
            self._lost_at = time.monotonic()
        self.ended.set()

    async def _beat(self, member: SessionEvents) -> None:
        """Send heartbeats: their absence, not a broken stream alone, means a dead machine."""
        clock = asyncio.get_running_loop().time
        while True:
            due = clock() + config().heartbeat_interval
            await asyncio.sleep(config().heartbeat_interval)
            COUNTED.set("daemon_event_loop_lag_seconds", clock() - due)
            self.send(head_pb2.FromNode(heartbeat=member.heartbeat()))

    async def _end_tasks(self) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        self._tasks = []

    async def close(self, leaving: head_pb2.Leaving) -> None:
        """Announce the end of this node, which the head answers by ending the stream."""
        if not self.ended.is_set():
            self.send(head_pb2.FromNode(leaving=leaving))
            with contextlib.suppress(asyncio.TimeoutError):
                await asyncio.wait_for(self.ended.wait(), _FAREWELL)
        await self._end_tasks()
        await self._channel.close(None)


def _handle(message: Any, member: SessionEvents) -> None:
    """Handle a message; one that cannot be handled must not end the session."""
    try:
        member.on_message(message)
    except Exception:
        logger.exception("handling %s failed", message.WhichOneof("kind"))
