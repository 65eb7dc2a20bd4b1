"""What this node asks of the head and tells it: its own requests and those of its clients."""

from __future__ import annotations

import asyncio
import logging
import marshal
import pickle
from typing import TYPE_CHECKING, Any

from miniray._proto import common_pb2, head_pb2
from miniray.messages import plain
from miniray.messages import protocol as p
from miniray.node.head_requests import HeadRequests
from miniray.node.head_session import HeadSession
from miniray.wire.sockets import too_large

if TYPE_CHECKING:
    from collections.abc import Callable

    import grpc

    from miniray.node.base.clients import ClientServer

logger = logging.getLogger(__name__)

#: Bytes of one request. gRPC would refuse a message above its limit and end the session, which
#: would be opened again only to send it once more. Processes refuse it themselves.
_LARGEST = p.MAX_HEAD_REQUEST


class HeadClient:
    """Requests and answers, over one session after another."""

    def __init__(self, node_id: bytes, clients: ClientServer) -> None:
        self._node_id = node_id
        self._clients = clients
        self._requests = HeadRequests()
        #: The daemon's own, by number.
        self._answers: dict[int, asyncio.Future[bytes]] = {}
        self._numbers = 0
        #: The stream; there once the node has joined.
        self.session: HeadSession

    async def join(
        self,
        channel: grpc.aio.Channel,
        timeout: float,
        *,
        hello: Callable[[], head_pb2.NodeHello],
        on_message: Callable[[head_pb2.ToNode], None],
        usage: Callable[[], head_pb2.Heartbeat],
    ) -> head_pb2.Welcome:
        """Open the session. Errors are those of ``HeadSession.open``."""

        def beat() -> head_pb2.Heartbeat:
            self._requests.drop_older()
            return usage()

        self.session = HeadSession(channel, hello, on_message, beat)
        self.session.on_ended = self._requests.session_ended
        return await self.session.open(timeout)

    async def rejoin(
        self, timeout: float, first: Callable[[], list[head_pb2.FromNode]]
    ) -> head_pb2.Welcome:
        """Open it again; the head's successor hears ``first`` and what may have been lost.

        Errors are those of ``HeadSession.reopen``.
        """
        return await self.session.reopen(
            timeout, lambda waiting: [*first(), *self._requests.to_repeat(waiting)]
        )

    def tell(self, **kind: Any) -> None:
        """Send a message of this kind."""
        self.session.send(head_pb2.FromNode(**kind))

    def report(self, message: head_pb2.FromNode) -> None:
        """Tell how an actor ends, or has ended: this head, and the next one if that is soon."""
        self._requests.reported(message)
        self.session.send(message)

    def lately(self) -> head_pb2.FromNodeBatch:
        """What was reported of late and may be lost."""
        return head_pb2.FromNodeBatch(messages=self._requests.reports())

    def request(self, process_id: bytes, number: int, method: str, body: bytes) -> None:
        """A process's request, or its notice (number 0); one that is too large is refused."""
        if len(body) > _LARGEST:
            self._refuse(process_id, number, method, len(body))
            return
        message = head_pb2.FromNode(
            request=common_pb2.ClientRequest(
                process_id=process_id, request=number, method=method, body=body
            )
        )
        self._requests.sent(message)
        self.session.send(message)

    def _refuse(self, process_id: bytes, number: int, method: str, size: int) -> None:
        error = too_large(size, _LARGEST, f"The request {method!r} to the head")
        logger.error("%s (of process %s)", error, process_id.hex())
        if number:
            pickled = pickle.dumps(error, 5)
            self.answered(
                common_pb2.ClientReply(process_id=process_id, request=number, error=pickled)
            )

    def notify(self, method: str, *args: Any) -> None:
        """A notice of the daemon itself."""
        self.request(self._node_id, 0, method, plain.dumps(args))

    async def ask(self, method: str, *args: Any) -> Any:
        """A request of the daemon itself; raises what the head answers."""
        self._numbers += 1
        number = self._numbers
        future: asyncio.Future[bytes] = asyncio.get_running_loop().create_future()
        self._answers[number] = future
        self.request(self._node_id, number, method, plain.dumps(args))
        return marshal.loads(await future)

    def answered(self, reply: common_pb2.ClientReply) -> None:
        """The head answers."""
        error = reply.error or None
        self._requests.answered(reply.process_id, reply.request)
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

    def process_ended(self, process_id: bytes) -> None:
        """Nobody waits for a process's answers any more."""
        self._requests.process_ended(process_id)
