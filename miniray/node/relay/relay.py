"""The streams to other daemons: messages, and requests with their answers.

Each daemon writes to another one over one stream: one that it opens itself or, if the other node
cannot be dialled, the answering half of the stream that came from there. A stream that breaks is
opened again until the head reports that the node is gone.

Requests travel behind calls. Bytes of values may come with an answer: their number in flight from
one node is limited. The meaning of a request belongs to the part that answers it.
"""

from __future__ import annotations

import asyncio
import collections
import dataclasses
import itertools
import logging
import types
from typing import TYPE_CHECKING, Any, NamedTuple

import grpc

from miniray._proto import node_pb2
from miniray.common.config import config
from miniray.node.base.clients import first_of
from miniray.node.relay import relayed as r
from miniray.node.relay.relayed import Inbox, Outbox, Relayed, refusal
from miniray.security.channels import one_line

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Awaitable, Callable

logger = logging.getLogger(__name__)

#: Seconds after which received messages are acknowledged if no other message goes to that node,
#: and they are few; their sender keeps them until then.
_ACKNOWLEDGE_AFTER = 0.5
#: Seconds until a broken stream is opened again, at first and at most.
_REOPEN_AFTER, _REOPEN_AT_MOST = 0.05, 1.0
#: Errors that end a stream.
_BROKEN = (grpc.aio.AioRpcError, grpc.aio.UsageError, asyncio.InvalidStateError)
#: Nodes that were given up and are remembered.
_REMEMBERED = 1024
#: Bytes that may be in flight from one node at a time. Calls from there may wait behind them.
IN_FLIGHT = 2 << 20


@dataclasses.dataclass(eq=False, repr=False)
class RelayHub:
    """All other nodes; ``only_dials``: nodes of other machines cannot dial this one."""

    node_id: bytes
    dial: Callable[[str], grpc.aio.Channel]
    #: Called when messages to or from a node are lost, which either end has given up: it was out of
    #: reach for ``node_timeout`` seconds, or the head had given up one of the two.
    messages_lost: Callable[[bytes], object]
    _: dataclasses.KW_ONLY
    only_dials: bool = False

    def __post_init__(self) -> None:
        #: Handlers of what other daemons send: kind → function (node, message).
        self.notices: dict[str, Callable[[bytes, Relayed], object]] = {}
        #: Address of each living node; empty if it cannot be dialled.
        self._addresses: dict[bytes, str] = {}
        self._outboxes: dict[bytes, Outbox] = {}
        self._inboxes: dict[bytes, Inbox] = {}
        self._tasks: dict[bytes, asyncio.Task[None]] = {}
        #: Nodes with streams to this one; each stream ends when its event is set.
        self._incoming: dict[bytes, set[asyncio.Event]] = {}
        #: Nodes that were given up, with what had come from them. They may live, unnotified.
        self._given_up: collections.OrderedDict[bytes, Inbox] = collections.OrderedDict()

    def connected(self) -> set[bytes]:
        return self._incoming.keys() | self._outboxes.keys()

    def nodes(self) -> list[bytes]:
        return list(self._addresses)

    def knows(self, node_id: bytes) -> bool:
        """Return whether another node lives, by the head's last report."""
        return node_id in self._addresses

    def joined(self, node_id: bytes, address: str) -> None:
        if node_id == self.node_id:
            return
        self._addresses[node_id] = address
        inbox = self._given_up.pop(node_id, None)
        if inbox is not None:
            self._inboxes.setdefault(node_id, inbox)
            # Its watches here, and messages in flight, are lost: this empty message reports that.
            self.send(node_id, Relayed())

    def died(self, node_id: bytes) -> None:
        self._addresses.pop(node_id, None)
        outbox = self._outboxes.pop(node_id, None)
        inbox = self._inboxes.pop(node_id, None)
        if inbox is not None or outbox is not None:
            # If it lives, it sends unacknowledged messages again, which may have come.
            self._given_up[node_id] = inbox or Inbox()
            if len(self._given_up) > _REMEMBERED:
                self._given_up.popitem(last=False)
        for end in self._incoming.get(node_id, ()):
            end.set()  # if it lives it opens another one, and finds a new numbering
        task = self._tasks.pop(node_id, None)
        if task is not None:
            task.cancel()

    def send(self, node_id: bytes, message: Relayed) -> bool:
        """Send a message; return False if there is no such node, or no way to it."""
        outbox = self._outboxes.get(node_id)
        if outbox is None:
            if node_id not in self._addresses:
                return False
            if self.only_dials and not self._addresses[node_id]:
                return False  # neither can dial the other
            outbox = self._outboxes[node_id] = Outbox()
        address = self._addresses[node_id]
        if address and node_id not in self._tasks:
            self._tasks[node_id] = asyncio.get_running_loop().create_task(
                self._hold_open(node_id, address, outbox)
            )
        outbox.put(message)
        return True

    def backlog(self, node_id: bytes) -> int:
        """Return the bytes that wait because the stream to a node takes no more."""
        outbox = self._outboxes.get(node_id)
        return 0 if outbox is None else outbox.waiting

    def can_dial(self, node_id: bytes) -> bool:
        return bool(self._addresses.get(node_id))

    # --- streams that this node opens --------------------------------------------------
    async def _hold_open(self, node_id: bytes, address: str, outbox: Outbox) -> None:
        """Write to a node until the head declares it dead, over one stream after another."""
        now = asyncio.get_running_loop().time
        pause = _REOPEN_AFTER
        reached = now()
        given_up = told = False
        while self._tasks.get(node_id) is asyncio.current_task():
            heard = asyncio.Event()
            try:
                await self._stream(node_id, address, outbox, heard)
            except _BROKEN as error:
                if heard.is_set() or not told:  # not at each retry
                    logger.info("the stream to node %s broke: %s", node_id.hex(), one_line(error))
                told = True
            except asyncio.CancelledError:
                if self._tasks.get(node_id) is not asyncio.current_task():
                    raise
                logger.info("gRPC cancelled the stream to node %s", node_id.hex())
            except Exception:
                logger.exception("the stream to node %s broke in an unknown way", node_id.hex())
            if heard.is_set():
                reached, given_up, pause = now(), False, _REOPEN_AFTER
            elif now() - reached > config().node_timeout and not given_up:
                logger.warning("node %s cannot be reached from here", node_id.hex())
                given_up = True
                outbox.give_up()
                self.messages_lost(node_id)
            await asyncio.sleep(pause)
            pause = min(2 * pause, _REOPEN_AT_MOST)

    async def _stream(
        self, node_id: bytes, address: str, outbox: Outbox, heard: asyncio.Event
    ) -> None:
        """Run one stream to a node until it breaks; set ``heard`` at the node's first answer."""
        from miniray._proto import node_pb2_grpc

        async with self.dial(address) as channel:
            stub = node_pb2_grpc.NodeStub(channel)  # type: ignore[no-untyped-call]
            call = stub.Relay()
            await first_of(
                self._write(node_id, outbox, call.write), self._read(node_id, call, heard)
            )

    async def _write(
        self,
        node_id: bytes,
        outbox: Outbox,
        write: Callable[[node_pb2.RelayBatch], Awaitable[None]],
    ) -> None:
        inbox = self._inbox(node_id)
        # The last acknowledgement may be lost.
        await write(inbox.acknowledge(node_pb2.RelayBatch(node_id=self.node_id)))
        await outbox.drain_to(write, inbox)

    async def _read(
        self,
        node_id: bytes,
        batches: AsyncIterator[node_pb2.RelayBatch],
        heard: asyncio.Event | None = None,
    ) -> None:
        async for batch in batches:
            if heard is not None:
                heard.set()
            self._handle(node_id, batch)

    def _handle(self, node_id: bytes, batch: node_pb2.RelayBatch) -> None:
        if batch.received:
            outbox = self._outboxes.get(node_id)
            if outbox is not None:
                outbox.acknowledged(batch)
        if batch.messages:
            inbox = self._inbox(node_id)
            if not inbox.will_remind:
                inbox.will_remind = True
                asyncio.get_running_loop().call_later(_ACKNOWLEDGE_AFTER, inbox.remind)
            gaps = inbox.gaps
            messages = inbox.accept(batch)
            if inbox.gaps != gaps:
                self.messages_lost(node_id)
            for message in messages:
                self._handle_one(node_id, message)

    def _handle_one(self, node_id: bytes, message: Relayed) -> None:
        """Handle a message; one that cannot be handled must not lose those behind it."""
        try:
            self.notices[message.notice](node_id, message)
        except Exception as error:
            logger.exception("%s of node %s was not handled", message, node_id.hex())
            answer = refusal(message, f"{type(error).__name__}: {error}")
            if answer is not None and node_id in self._addresses:
                self.send(node_id, answer)

    def _inbox(self, node_id: bytes) -> Inbox:
        inbox = self._inboxes.get(node_id)
        if inbox is None:
            inbox = self._inboxes[node_id] = self._given_up.get(node_id) or Inbox()
        return inbox

    # --- streams that others open --------------------------------------------------------
    def add_to(self, server: grpc.aio.Server) -> None:
        from miniray._proto import node_pb2_grpc

        service = types.SimpleNamespace(Relay=self.serve)
        node_pb2_grpc.add_NodeServicer_to_server(service, server)  # type: ignore[no-untyped-call]

    async def serve(
        self,
        incoming: AsyncIterator[node_pb2.RelayBatch],
        context: grpc.aio.ServicerContext[Any, Any],
    ) -> None:
        """Serve another node's stream to this one (the Relay RPC).

        The stream of a node that the head has not announced ends at once: it is opened again.
        """
        first = await anext(incoming, None)
        if first is None or first.node_id not in self._addresses:
            return
        node_id = first.node_id
        end = asyncio.Event()
        self._incoming.setdefault(node_id, set()).add(end)
        inbox = self._inbox(node_id)
        outbox = Outbox()  # of acknowledgements alone, if that node can be dialled
        if not self._addresses[node_id]:
            outbox = self._outboxes.setdefault(node_id, outbox)
        try:
            await context.write(inbox.acknowledge())
            self._handle(node_id, first)
            await first_of(
                self._read(node_id, incoming), outbox.drain_to(context.write, inbox), end.wait()
            )
        except _BROKEN as error:
            logger.info("the stream from node %s broke: %s", node_id.hex(), one_line(error))
        finally:
            if outbox is not self._outboxes.get(node_id):
                inbox.writers.discard(outbox.filled)
            self._incoming[node_id].discard(end)
            if not self._incoming[node_id]:
                del self._incoming[node_id]

    async def close(self) -> None:
        self._addresses.clear()  # from here on, no message is sent
        self._outboxes.clear()
        tasks = list(self._tasks.values())
        self._tasks.clear()
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


# --- requests ------------------------------------------------------------------------------
class RequestRefusedError(Exception):
    """A node has refused a request with a reason, or there is no way to it."""


class NoAnswerError(Exception):
    """A node could not be reached, or did not answer in time; the request may be repeated."""


class NodeRequest(NamedTuple):
    """A request of another node, which is answered once."""

    node: bytes
    number: int
    relay: RelayHub

    def answer(self, answer: Any, piece: bytes = b"") -> None:
        """Send an answer, and bytes of a value with it."""
        bodies = [piece] if piece else []
        self._send(Relayed(notice=r.ANSWER, items=(self.number, "", answer), bodies=bodies))

    def refuse(self, why: str) -> None:
        self._send(Relayed(notice=r.ANSWER, items=(self.number, why, None)))

    def _send(self, message: Relayed) -> None:
        self.relay.send(self.node, message)


#: An answer, and the bytes that came with it.
Answered = tuple[Any, bytes]


class _Peer:
    """Requests to one node."""

    def __init__(self) -> None:
        #: Sent requests without an answer, with the bytes that may come.
        self.open: dict[int, tuple[asyncio.Future[Answered], int]] = {}
        self._in_flight = 0
        #: Requests that wait until fewer bytes are in flight, first in, first out.
        self._turns: collections.deque[tuple[asyncio.Future[None], int]] = collections.deque()

    def __bool__(self) -> bool:
        return bool(self.open or self._turns or self._in_flight)

    def close(self, number: int) -> asyncio.Future[Answered] | None:
        """Count a request off; return its future, unless it was counted off before."""
        if number not in self.open:
            return None
        came, size = self.open.pop(number)
        self.end(size)
        return came

    async def begin(self, size: int) -> None:
        """Wait until this many more bytes may be in flight; they count until ``end``.

        A request for no bytes never waits.
        """
        if not size or (not self._turns and self._fits(size)):
            self._in_flight += size
            return
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._turns.append((turn, size))
        try:
            await turn
        except asyncio.CancelledError:
            if turn.done() and not turn.cancelled():
                self.end(size)
            raise

    def _fits(self, size: int) -> bool:
        return not self._in_flight or self._in_flight + size <= IN_FLIGHT

    def end(self, size: int) -> None:
        """Count bytes off: they have come, or will not."""
        self._in_flight -= size
        while self._turns:
            turn, waiting = self._turns[0]
            if not (turn.done() or self._fits(waiting)):
                return
            self._turns.popleft()
            if not turn.done():
                self._in_flight += waiting
                turn.set_result(None)


class NodeRequests:
    """All requests from and to this daemon."""

    def __init__(self, relay: RelayHub) -> None:
        self._relay = relay
        #: Handlers of requests to this node: they get a ``NodeRequest`` and the arguments.
        self.handlers: dict[str, Callable[..., object]] = {}
        self._numbers = itertools.count(1).__next__
        self._peers: dict[bytes, _Peer] = {}
        relay.notices[r.REQUEST] = self._on_request
        relay.notices[r.ANSWER] = self._answered

    def __len__(self) -> int:
        return len(self._peers)

    def _on_request(self, node_id: bytes, message: Relayed) -> None:
        number, what, *arguments = message.items
        self.handlers[what](NodeRequest(node_id, number, self._relay), *arguments)

    async def ask(
        self, node_id: bytes, what: str, *arguments: Any, size: int = 0, limit: float | None = None
    ) -> Answered:
        """Send a request to another node, and return its answer.

        Args:
            node_id: The node.
            what: Which of its handlers.
            arguments: Plain data.
            size: Bytes that may come with the answer.
            limit: Seconds within which the answer has to come.

        Raises:
            RequestRefusedError: The node refuses, with a reason, or there is no way to it.
            NoAnswerError: The node could not be reached, or did not answer in time.
        """
        peer = self._peers.setdefault(node_id, _Peer())
        number = self._numbers()
        try:
            await peer.begin(size)
            came: asyncio.Future[Answered] = asyncio.get_running_loop().create_future()
            peer.open[number] = came, size
            asked = Relayed(notice=r.REQUEST, items=(number, what, *arguments))
            if not self._relay.send(node_id, asked):
                peer.close(number)
                raise RequestRefusedError(self._why_not_sent(node_id))
            late = False
            try:
                if limit is not None:
                    done, _ = await asyncio.wait({came}, timeout=limit)
                    late = not done
                if late:
                    raise NoAnswerError("it did not answer in time")
                return await came
            finally:
                came.cancel()  # unless it is there
                if late or not size:
                    peer.close(number)
                elif limit is not None and number in peer.open:
                    # The waiter has left, but the bytes may be in flight.
                    asyncio.get_running_loop().call_later(limit, peer.close, number)
        finally:
            self._forget_idle(node_id, peer)

    def _why_not_sent(self, node_id: bytes) -> str:
        if self._relay.knows(node_id):
            return "neither of the two nodes can dial the other"
        return f"node {node_id.hex()} is gone"

    def _forget_idle(self, node_id: bytes, peer: _Peer) -> None:
        if not peer and self._peers.get(node_id) is peer:
            del self._peers[node_id]

    def _answered(self, node_id: bytes, message: Relayed) -> None:
        number, why, answer = message.items
        peer = self._peers.get(node_id)
        came = None if peer is None else peer.close(number)
        if peer is None or came is None:
            return
        if not came.done():
            if why:
                came.set_exception(RequestRefusedError(why))
            else:
                came.set_result((answer, message.bodies[0] if message.bodies else b""))
        self._forget_idle(node_id, peer)

    def node_unreachable(self, node_id: bytes) -> None:
        """Fail the requests to a node that is gone, or to or from which messages were lost."""
        peer = self._peers.get(node_id)
        if peer is not None:
            for number in list(peer.open):
                came = peer.close(number)
                if came is not None and not came.done():
                    came.set_exception(NoAnswerError("it could not be reached"))
            self._forget_idle(node_id, peer)
