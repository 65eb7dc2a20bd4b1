"""Objects that other nodes push to this one, because it cannot dial them.

They are asked for over the relay, and come by the RPC ``Push``.
"""

from __future__ import annotations

import asyncio
import os
from typing import TYPE_CHECKING

from miniray._proto import node_pb2
from miniray.exceptions import ObjectLostError
from miniray.node.relay import relayed as r
from miniray.node.relay.relayed import Relayed
from miniray.node.transfer.arriving import BrokenTransferError

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, AsyncIterator

    from miniray.node.relay.relay import RelayHub
    from miniray.node.transfer.arriving import Arriving, Key

#: Pieces that a pushing node may be ahead of what is written.
_AHEAD = 2


class _Expected:
    """A push that was asked for: what has come of it, and the call that brings it."""

    def __init__(self, node_id: bytes) -> None:
        self.node_id = node_id
        #: Pieces; None at the end; what went wrong instead of more.
        self.pieces: asyncio.Queue[bytes | Exception | None] = asyncio.Queue(_AHEAD)
        self.call: asyncio.Task[None] | None = None

    def fail(self, error: Exception) -> None:
        """Nothing more will come."""
        while not self.pieces.empty():
            self.pieces.get_nowait()  # the next try begins behind what was taken
        self.pieces.put_nowait(error)


class Pushes:
    """All that this node has asked others to push.

    Args:
        relay: The way to other daemons.
    """

    def __init__(self, relay: RelayHub) -> None:
        self._relay = relay
        self._expected: dict[int, _Expected] = {}
        relay.notices[r.REFUSED] = self._refused

    def __len__(self) -> int:
        return len(self._expected)

    def node_unreachable(self, node_id: bytes) -> None:
        """Messages to or from a node were lost: what was asked of it there is asked again."""
        for expected in self._expected.values():
            if expected.node_id == node_id:
                expected.fail(BrokenTransferError("the node could not be reached"))

    async def ask(self, key: Key, arriving: Arriving) -> AsyncGenerator[bytes, None]:
        """What is missing of a segment: an ``ObjectHead`` as bytes, then the bytes."""
        node_id, number = key
        # Random: a push that comes late may be for a daemon that was here before.
        ticket = int.from_bytes(os.urandom(8), "big")
        expected = self._expected[ticket] = _Expected(node_id)
        try:
            items = (ticket, number, arriving.offset, *arriving.tried)
            if not self._relay.send(node_id, Relayed(notice=r.WANTED, items=items)):
                raise ObjectLostError(f"segment {number}", f"node {node_id.hex()} is gone")
            while True:
                piece = await expected.pieces.get()
                if piece is None:
                    return
                if isinstance(piece, Exception):
                    raise piece
                yield piece
        finally:
            del self._expected[ticket]
            if expected.call is not None:
                expected.call.cancel()  # it may wait for room

    async def receive(self, pieces: AsyncIterator[bytes]) -> None:
        """The Push RPC: a segment that this node asked for."""
        first = await anext(aiter(pieces), b"")
        ticket = node_pb2.ObjectHead.FromString(first).ticket
        expected = self._expected.get(ticket)
        if expected is None or expected.call is not None:
            return  # nobody waits any more, or it comes twice
        expected.call = asyncio.ensure_future(self._collect(first, pieces, expected))
        try:
            await expected.call
        except asyncio.CancelledError:
            # The reader left, or gRPC cancels this call because the other end is gone.
            if ticket in self._expected:
                expected.fail(BrokenTransferError("the connection broke"))
                raise

    @staticmethod
    async def _collect(first: bytes, pieces: AsyncIterator[bytes], expected: _Expected) -> None:
        try:
            await expected.pieces.put(first)
            async for piece in pieces:
                await expected.pieces.put(piece)
        except Exception as error:  # noqa: BLE001 - whatever gRPC raises when a stream breaks
            expected.fail(BrokenTransferError(str(error)))
        else:
            await expected.pieces.put(None)

    def _refused(self, _node_id: bytes, message: Relayed) -> None:
        ticket, reason, may_work = message.items
        expected = self._expected.get(ticket)
        if expected is not None:
            error = BrokenTransferError(reason) if may_work else ObjectLostError("segment", reason)
            expected.fail(error)
