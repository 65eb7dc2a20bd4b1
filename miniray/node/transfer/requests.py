"""Requests to other daemons for values: which node gives one, and bytes of it.

They travel over the relay, behind calls. Only so many bytes are on their way from one node at a
time.
"""

from __future__ import annotations

import asyncio
import collections
import dataclasses
import itertools
from typing import TYPE_CHECKING, NamedTuple

from miniray.common.config import config
from miniray.exceptions import ObjectLostError
from miniray.node.relay import relayed as r
from miniray.node.relay.relayed import Relayed

if TYPE_CHECKING:
    from collections.abc import Sequence

    from miniray.node.relay.relay import RelayHub
    from miniray.node.store.segments import Key, Segment


class BrokenTransferError(Exception):
    """A transfer ended before its time and may be resumed."""


class Arriving:
    """A copy that is on its way to this node; what has come can be passed on already."""

    def __init__(self) -> None:
        #: None until there is room for it; nothing is asked of its node before.
        self.segment: Segment | None = None
        #: Bytes that are here.
        self.offset = 0
        #: The number of the mover's work, while it comes that way.
        self.job = 0
        self._begun = False
        self._ended = False
        self._moved = asyncio.Event()

    @property
    def is_whole(self) -> bool:
        return self.segment is not None and self.offset == self.segment.size

    def begin(self, job: int = 0) -> None:
        """Tell who waits that it begins to come, by the mover if there is a job."""
        self._begun, self.job = True, job
        self._tell()

    def came(self, size: int) -> None:
        """Count bytes that have come."""
        self.offset += size
        self._tell()

    def end(self) -> None:
        """Tell who waits that it is whole, or that nothing more will come."""
        self._ended = True
        self._tell()

    def _tell(self) -> None:
        moved, self._moved = self._moved, asyncio.Event()
        moved.set()

    async def begun(self) -> Segment | None:
        """Wait until something comes; returns where it is written.

        None if it ended, or if there is no room for it yet: who was sent here meanwhile is better
        served elsewhere.
        """
        while self.segment is not None and not self._begun and not self._ended:
            await self._moved.wait()
        return self.segment if self._begun else None

    async def reached(self, offset: int) -> bool:
        """Wait until it is here up to an offset; False if that much will not come."""
        while self.offset < offset and not self._ended:
            await self._moved.wait()
        return self.offset >= offset


#: Bytes that may be on their way from one node at a time. Calls from there may wait behind them.
IN_FLIGHT = 2 << 20


def piece_size() -> int:
    """Return how many bytes travel at once: a value that is no larger goes with the answer."""
    return min(config().transfer_chunk, IN_FLIGHT)


class ValueAnswer(NamedTuple):
    """What another daemon says to a request; bytes of the value go beside it."""

    #: Why the value cannot be had; empty if it can.
    lost: str = ""
    #: The node to copy it from, as the node of its owner says.
    ask: bytes = b""
    #: Of the whole value.
    size: int = 0
    form: int = 0
    #: Where the other node's mover listens; empty if the value is to be read in pieces.
    mover: str = ""


#: An answer, and the bytes that came with it.
_Answered = tuple[ValueAnswer, bytes]


@dataclasses.dataclass(eq=False, slots=True)
class _Request:
    """A request that was sent and has no answer yet."""

    came: asyncio.Future[_Answered]
    size: int
    timer: asyncio.TimerHandle | None = None


class _Peer:
    """Requests to one node."""

    def __init__(self) -> None:
        self.open: dict[int, _Request] = {}
        self._in_flight = 0
        #: Requests that wait until fewer bytes are on their way, first in, first out.
        self._turns: collections.deque[tuple[asyncio.Future[None], int]] = collections.deque()

    def __bool__(self) -> bool:
        return bool(self.open or self._turns or self._in_flight)

    def close(self, number: int) -> asyncio.Future[_Answered] | None:
        """Count a request off; return its future, unless it was counted off before."""
        request = self.open.pop(number, None)
        if request is None:
            return None
        if request.timer is not None:
            request.timer.cancel()
        self.end(request.size)
        return request.came

    async def begin(self, size: int) -> None:
        """Wait until as many bytes more may be on their way; they count until ``end``."""
        if not self._turns and self._fits(size):
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
        return not (size and self._in_flight) or self._in_flight + size <= IN_FLIGHT

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


class ValueRequests:
    """All requests of this daemon."""

    def __init__(self, relay: RelayHub) -> None:
        self._relay = relay
        self._numbers = itertools.count(1).__next__
        self._peers: dict[bytes, _Peer] = {}
        relay.notices[r.ANSWER] = self._answered

    def __len__(self) -> int:
        return len(self._peers)

    async def fetch(
        self,
        node_id: bytes,
        key: Key,
        size: int,
        tried: Sequence[bytes] = (),
        *,
        by_mover: bool = True,
        limit: float | None = None,
    ) -> _Answered:
        """Ask a node for a value that it has, or of whose owner it is the node.

        Args:
            node_id: The node.
            key: The value.
            size: Bytes that may come with the answer.
            tried: Nodes that it named, and that did not serve.
            by_mover: Whether the value may come from the mover there.
            limit: Seconds within which the answer has to come.

        Raises:
            ObjectLostError: It is not there.
            BrokenTransferError: The node was out of reach, or did not answer in time.
        """
        items = (*key, tuple(tried), by_mover, size)
        return await self._ask(node_id, r.FETCH, items, size, limit)

    async def read(
        self, node_id: bytes, key: Key, offset: int, length: int, limit: float | None = None
    ) -> bytes:
        """Ask a node for bytes of a value; raises as ``fetch``."""
        items = (*key, offset, length)
        _, piece = await self._ask(node_id, r.READ, items, length, limit)
        if len(piece) != length:
            raise BrokenTransferError(f"{len(piece)} bytes came in place of {length}")
        return piece

    async def _ask(
        self, node_id: bytes, notice: str, items: tuple[object, ...], size: int, limit: float | None
    ) -> _Answered:
        peer = self._peers.setdefault(node_id, _Peer())
        number = self._numbers()
        try:
            await peer.begin(size)
            came = self._begin(peer, number, node_id, size, limit)
            if not self._relay.send(node_id, Relayed(notice=notice, items=(number, *items))):
                peer.close(number)
                raise ObjectLostError("segment", self._why_not_sent(node_id))
            try:
                answered = await came
            finally:
                if not size:  # else they may be on their way, though nobody waits for them
                    peer.close(number)
        finally:
            self._forget_idle(node_id, peer)
        if answered[0].lost:
            raise ObjectLostError("segment", answered[0].lost)
        return answered

    def _begin(
        self, peer: _Peer, number: int, node_id: bytes, size: int, limit: float | None
    ) -> asyncio.Future[_Answered]:
        loop = asyncio.get_running_loop()
        request = peer.open[number] = _Request(loop.create_future(), size)
        if limit is not None:
            late = BrokenTransferError(f"nothing came for {limit} s")
            request.timer = loop.call_later(limit, self._fail, node_id, peer, number, late)
        return request.came

    def _why_not_sent(self, node_id: bytes) -> str:
        if self._relay.knows(node_id):
            return "neither of the two nodes can dial the other"
        return f"node {node_id.hex()} is gone"

    def _forget_idle(self, node_id: bytes, peer: _Peer) -> None:
        if not peer and self._peers.get(node_id) is peer:
            del self._peers[node_id]

    def _answered(self, node_id: bytes, message: Relayed) -> None:
        number, *fields = message.items
        peer = self._peers.get(node_id)
        if peer is None:
            return
        came = peer.close(number)
        if came is not None and not came.done():
            came.set_result((ValueAnswer(*fields), message.bodies[0] if message.bodies else b""))
        self._forget_idle(node_id, peer)

    def node_unreachable(self, node_id: bytes) -> None:
        """Fail the requests to a node that is gone, or to or from which messages were lost."""
        peer = self._peers.get(node_id)
        if peer is not None:
            for number in list(peer.open):
                broken = BrokenTransferError("the node could not be reached")
                self._fail(node_id, peer, number, broken)

    def _fail(self, node_id: bytes, peer: _Peer, number: int, error: BrokenTransferError) -> None:
        came = peer.close(number)
        if came is not None and not came.done():
            came.set_exception(error)
        self._forget_idle(node_id, peer)
