"""What this node asks of the head and reports to it: its own requests and those of its processes.

A head that ends takes with it what it had not done or not yet stored. Its successor is asked
again: everything without an answer, and what made or ended something a moment ago, in the same
order. Whatever is repeated can be done twice without harm.
"""

from __future__ import annotations

import asyncio
import collections
import logging
import marshal
import pickle
from typing import TYPE_CHECKING, Any

from miniray._proto import common_pb2, head_pb2
from miniray.messages import plain
from miniray.messages import protocol as p
from miniray.node.base.head_session import HeadSession
from miniray.wire.sockets import too_large

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    import grpc

    from miniray.node.base.clients import ClientServer
    from miniray.node.base.head_session import SessionEvents

logger = logging.getLogger(__name__)

#: Bytes of one request. gRPC would refuse a message above its limit and end the session, which
#: would be opened again only to send it once more. Processes refuse it themselves.
_LARGEST = p.MAX_HEAD_REQUEST
#: Seconds of a session after which the head has certainly stored what it was asked.
_STORED_AFTER = 2.0
#: Bytes of the reports that one message takes.
_MOST_REPORTS = 16 << 20
#: Requests that make or end something. What a process subscribes to, and which leases it wants, it
#: tells every head anew (`ClusterRuntime._on_head_back`).
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
    """Messages that the next head has to see if this one ends now.

    The clock stands still while there is no session, as no head can have stored anything meanwhile.
    """

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._open: dict[tuple[bytes, int], head_pb2.FromNode] = {}
        #: Requests that made or ended something a moment ago, and reports of how actors ended.
        self._recent: collections.deque[tuple[float, head_pb2.FromNode]] = collections.deque()

    def sent(self, message: head_pb2.FromNode) -> None:
        """Note a request, or a notice (its number is 0)."""
        request = message.request
        if request.request:
            self._open[request.process_id, request.request] = message
        if request.method in _LASTING:
            self.reported(message)

    def reported(self, message: head_pb2.FromNode) -> None:
        """Note a report on how an actor ends, or has ended."""
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
        """Return what was sent and may be lost, in the order of sending, open requests last.

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
