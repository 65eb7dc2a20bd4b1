"""Requests to other daemons, and theirs to this one.

They travel over the relay, behind calls. Bytes of values may come with an answer: only so many are
on their way from one node at a time. What is asked belongs to the parts that answer.
"""

from __future__ import annotations

import asyncio
import collections
import itertools
from typing import TYPE_CHECKING, Any, NamedTuple

from miniray.node.relay import relayed as r
from miniray.node.relay.relayed import Relayed

if TYPE_CHECKING:
    from collections.abc import Callable

    from miniray.node.relay.relay import RelayHub

#: Bytes that may be on their way from one node at a time. Calls from there may wait behind them.
IN_FLIGHT = 2 << 20


class RequestRefusedError(Exception):
    """A node has said why it gives no answer, or there is no way to it."""


class NoAnswerError(Exception):
    """A node could not be reached, or did not answer in time; it may be asked again."""


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
        #: Those that were sent and have no answer yet, with the bytes that may come.
        self.open: dict[int, tuple[asyncio.Future[Answered], int]] = {}
        self._in_flight = 0
        #: Requests that wait until fewer bytes are on their way, first in, first out.
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
        """Wait until as many bytes more may be on their way; they count until ``end``.

        What asks for none never waits.
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
        #: What this node answers: functions that get a ``NodeRequest`` and the arguments.
        self.handlers: dict[str, Callable[..., object]] = {}
        self._numbers = itertools.count(1).__next__
        self._peers: dict[bytes, _Peer] = {}
        relay.notices[r.REQUEST] = self._asked
        relay.notices[r.ANSWER] = self._answered

    def __len__(self) -> int:
        return len(self._peers)

    def _asked(self, node_id: bytes, message: Relayed) -> None:
        number, what, *arguments = message.items
        self.handlers[what](NodeRequest(node_id, number, self._relay), *arguments)

    async def ask(
        self, node_id: bytes, what: str, *arguments: Any, size: int = 0, limit: float | None = None
    ) -> Answered:
        """Ask another node.

        Args:
            node_id: The node.
            what: Which of its handlers.
            arguments: Plain data.
            size: Bytes that may come with the answer.
            limit: Seconds within which the answer has to come.

        Raises:
            RequestRefusedError: The node says why not, or there is no way to it.
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
                    # Nobody waits any more, but the bytes may be on their way.
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
