"""The session with the head: this node's requests and reports, and the head's messages.

``HeadSession`` is one stream after another, with messages both ways. ``HeadClient`` sends requests
of this daemon and of its processes over it.

A head that ends loses what it had not done or not yet stored. Its successor gets again, in the
same order, everything without an answer, and what made or ended something a moment ago. Handlers
of what is repeated are idempotent.
"""

from __future__ import annotations

import asyncio
import collections
import contextlib
import logging
import marshal
import pickle
import time
from typing import TYPE_CHECKING, Any, Protocol

import grpc

from miniray import exceptions
from miniray._proto import common_pb2, head_pb2, head_pb2_grpc
from miniray.common.config import config
from miniray.common.series import COUNTED
from miniray.messages import plain
from miniray.messages import protocol as p
from miniray.security.channels import one_line
from miniray.wire.sockets import too_large

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from miniray.node.base.clients import ClientServer

    _Call = grpc.aio.StreamStreamCall[head_pb2.FromNode, head_pb2.ToNode]

logger = logging.getLogger(__name__)

#: Bytes of one request. gRPC would refuse a message above its limit and end the session, which
#: would be opened again only to send it once more. Processes refuse it themselves.
_LARGEST = p.MAX_HEAD_REQUEST
#: Seconds of a session after which the head has certainly stored a request's effect.
_STORED_AFTER = 2.0
#: Bytes of the reports that one message takes.
_MOST_REPORTS = 16 << 20
#: Most messages that are written together, and their bytes without the last one.
_BATCH = 256
_BATCH_BYTES = 1 << 20
#: Seconds between two attempts at a head that runs but does not take the session.
_RETRY = 0.2
#: Seconds that the head may take to read that this node ends.
_FAREWELL = 1.0
#: The result of reading an ended stream; the type stubs of gRPC lack it.
_EOF: Any = grpc.aio.EOF  # type: ignore[attr-defined]
#: Requests that make or end something. Subscriptions and wanted leases are sent to every head anew
#: by their process (`ClusterRuntime._on_head_back`).
_LASTING = frozenset(
    {
        "create_actor",
        "start_actor",
        "kill_actor",
        "actor_out_of_scope",
        "create_placement_group",
        "remove_placement_group",
        "return_lease",
        "stop_job",
        "delete_job",
        "put_code",
        "use_code",
        "kv_put",
        "kv_del",
    }
)


class Unconfirmed:
    """Messages that the next head has to receive if this one ends now.

    The clock stands still while there is no session, as no head can have stored anything meanwhile.
    """

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._open: dict[tuple[bytes, int], head_pb2.FromNode] = {}
        #: Requests that made or ended something a moment ago, and reports of how actors ended.
        self._recent: collections.deque[tuple[float, head_pb2.FromNode]] = collections.deque()

    def sent(self, message: head_pb2.FromNode) -> None:
        """Record a request, or a notice (its number is 0)."""
        request = message.request
        if request.request:
            self._open[request.process_id, request.request] = message
        if request.method in _LASTING:
            self.reported(message)

    def reported(self, message: head_pb2.FromNode) -> None:
        """Record a report on how an actor ends, or has ended."""
        self._recent.append((self._clock(), message))
        self.drop_stored()

    def reports(self) -> list[head_pb2.FromNode]:
        """Return the reports that may be lost, as many as one message can take."""
        self.drop_stored()
        left = _MOST_REPORTS
        found: list[head_pb2.FromNode] = []
        for _, message in self._recent:
            if not message.HasField("request"):
                left -= message.ByteSize()
                if left < 0:
                    break
                found.append(message)
        return found

    def answered(self, process_id: bytes, number: int) -> None:
        self._open.pop((process_id, number), None)
        self.drop_stored()

    def process_ended(self, process_id: bytes) -> None:
        for key in [key for key in self._open if key[0] == process_id]:
            del self._open[key]

    def to_repeat(self, waiting: Iterable[head_pb2.FromNode]) -> list[head_pb2.FromNode]:
        """Return the sent messages that may be lost, in the order of sending, open requests last.

        Messages that still wait to be sent are not repeated.
        """
        now = self._clock()
        # This head may end too before it has stored them.
        self._recent = collections.deque((now, message) for _, message in self._recent)
        sent = {id(each): each for _, each in self._recent if each.HasField("request")}
        sent.update((id(message), message) for message in self._open.values())
        for message in waiting:
            sent.pop(id(message), None)
        return list(sent.values())

    def drop_stored(self) -> None:
        """Forget what the head has certainly stored, which may be large."""
        now = self._clock()
        while self._recent:
            sent_at, _ = self._recent[0]
            if now - sent_at <= _STORED_AFTER:
                return
            self._recent.popleft()


class SessionEvents(Protocol):
    """Handlers of the node for events of its session."""

    def hello(self) -> head_pb2.NodeHello:
        """Introduce this node."""

    def heartbeat(self) -> head_pb2.Heartbeat:
        """Return the usage of this node."""

    def on_message(self, message: head_pb2.ToNode) -> None:
        """Handle a message of the head."""


class HeadSession:
    """Sends queued messages, and passes on messages of the head."""

    def __init__(self, channel: grpc.aio.Channel) -> None:
        self._channel = channel
        self._queue: asyncio.Queue[head_pb2.FromNode] = asyncio.Queue()
        self._tasks: list[asyncio.Task[None]] = []
        #: Set when the stream has ended.
        self.ended = asyncio.Event()
        #: When the stream ended, until there is one again.
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

        ``first`` gets the messages that wait when the head has accepted, and returns what to send
        before them.

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
            # If the head refuses while a message is being written to it, gRPC may lose the reason.
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
        """Put the waiting messages into one: each write costs more than its content.

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


class HeadClient:
    """Requests and answers, over one session after another."""

    def __init__(self, node_id: bytes, clients: ClientServer, channel: grpc.aio.Channel) -> None:
        self._node_id = node_id
        self._clients = clients
        self.session = HeadSession(channel)
        self.send = self.session.send
        self._unconfirmed = Unconfirmed(self.session.clock)
        self.drop_stored = self._unconfirmed.drop_stored
        self.process_ended = self._unconfirmed.process_ended
        #: Requests of the daemon itself, by number.
        self._answers: dict[int, asyncio.Future[bytes]] = {}
        self._numbers = 0
        clients.kinds[p.HEAD_REQUEST] = lambda client, number, method, body: self.request(
            client.process_id, number, method, body
        )
        clients.kinds[p.HEAD_NOTICE] = lambda client, method, body: self.request(
            client.process_id, 0, method, body
        )

    async def join(
        self, member: SessionEvents, timeout: float, news: Callable[[], list[head_pb2.FromNode]]
    ) -> head_pb2.Welcome:
        """Open the session, anew too; the head gets ``news`` and what may have been lost."""
        return await self.session.open(
            member, timeout, lambda waiting: [*news(), *self._unconfirmed.to_repeat(waiting)]
        )

    def report(self, message: head_pb2.FromNode) -> None:
        """Report how an actor ends, or has ended: to this head, and to the next one if need be."""
        self._unconfirmed.reported(message)
        self.send(message)

    def recent_reports(self) -> head_pb2.FromNodeBatch:
        return head_pb2.FromNodeBatch(messages=self._unconfirmed.reports())

    def request(self, process_id: bytes, number: int, method: str, body: bytes) -> None:
        """Send a process's request, or its notice (number 0); refuse one that is too large."""
        if len(body) > _LARGEST:
            self._refuse(process_id, number, method, len(body))
            return
        message = head_pb2.FromNode(
            request=common_pb2.ClientRequest(
                process_id=process_id, request=number, method=method, body=body
            )
        )
        self._unconfirmed.sent(message)
        self.send(message)

    def _refuse(self, process_id: bytes, number: int, method: str, size: int) -> None:
        error = too_large(size, _LARGEST, f"The request {method!r} to the head")
        logger.error("%s (of process %s)", error, process_id.hex())
        if number:
            pickled = pickle.dumps(error, 5)
            self.answered(
                common_pb2.ClientReply(process_id=process_id, request=number, error=pickled)
            )

    def notify(self, method: str, *args: Any) -> None:
        self.request(self._node_id, 0, method, plain.dumps(args))

    async def ask(self, method: str, *args: Any) -> Any:
        """Send a request of the daemon itself; return the head's answer, or raise it."""
        self._numbers += 1
        number = self._numbers
        future: asyncio.Future[bytes] = asyncio.get_running_loop().create_future()
        self._answers[number] = future
        self.request(self._node_id, number, method, plain.dumps(args))
        return marshal.loads(await future)

    def answered(self, reply: common_pb2.ClientReply) -> None:
        error = reply.error or None
        self._unconfirmed.answered(reply.process_id, reply.request)
        if reply.process_id == self._node_id:
            future = self._answers.pop(reply.request, None)
            if future is not None and not future.done():
                if error is not None:
                    future.set_exception(pickle.loads(error))
                else:
                    future.set_result(reply.body)
            return
        client = self._clients.clients.get(reply.process_id)
        if client is not None:
            client.conn.send((p.HEAD_REPLY, reply.request, error, reply.body))
