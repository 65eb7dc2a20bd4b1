"""Objects on their way between this node and others, piece by piece.

The node that wants an object fetches it. One that cannot be dialled, because it only dials
out, is asked over the relay to push it instead. What breaks on the way goes on where it was.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
from typing import TYPE_CHECKING

import grpc

from miniray._proto import node_pb2
from miniray.config import config
from miniray.exceptions import ObjectLostError
from miniray.node import relayed as r
from miniray.node.relayed import Relayed
from miniray.node.services import fetch, push

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, AsyncIterator

    from miniray.node.relay import RelayHub
    from miniray.node.segments import Segment, SegmentStore

logger = logging.getLogger(__name__)

#: Times that a transfer is resumed without having moved on, before it is given up.
_RESUMES = 5
#: Pieces that a pushing node may be ahead of what is written.
_AHEAD = 2


class _BrokenError(Exception):
    """A transfer ended before its time and may be resumed."""


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


class Transfers:
    """Both ends of all transfers."""

    def __init__(self, node_id: bytes, store: SegmentStore, relay: RelayHub) -> None:
        self._node_id = node_id
        self._store = store
        self._relay = relay
        #: Which nodes have copies of a segment of this node.
        self._copied_to: dict[int, set[bytes]] = {}
        self._expected: dict[int, _Expected] = {}
        #: Pushes under way, by the node that they go to.
        self._pushes: dict[bytes, set[asyncio.Task[None]]] = {}
        relay.notices[r.WANTED] = self._wanted
        relay.notices[r.REFUSED] = self._refused

    def table_sizes(self) -> dict[str, int]:
        """How many entries each table has; all are empty when no value is in use."""
        return {
            "copied_to": len(self._copied_to),
            "expected": len(self._expected),
            "pushes": sum(map(len, self._pushes.values())),
        }

    def forget(self, number: int) -> set[bytes]:
        """A segment of this node is freed; returns the nodes that have copies of it."""
        return self._copied_to.pop(number, set())

    def node_died(self, node_id: bytes) -> None:
        """A node is gone: nothing is sent to it any more."""
        for task in self._pushes.pop(node_id, ()):
            task.cancel()

    def node_unreachable(self, node_id: bytes) -> None:
        """Messages to or from a node were lost: what was asked of it there is asked again."""
        for expected in self._expected.values():
            if expected.node_id == node_id:
                expected.fail(_BrokenError("the node could not be reached"))

    # --- receiving ---------------------------------------------------------------
    async def copy(self, node_id: bytes, number: int, size: int) -> Segment:
        """Read a segment of another node into one of this node, which is not sealed yet.

        Raises:
            ObjectLostError: it, or its node, is gone, or does not answer.
            ObjectStoreFullError: there is no room for a copy.
        """
        segment: Segment | None = None
        offset = resumes = 0
        try:
            while True:
                before = offset
                try:
                    async with contextlib.aclosing(self._pieces(node_id, number, offset)) as pieces:
                        head = node_pb2.ObjectHead.FromString(await anext(pieces, b""))
                        if head.size != size:
                            raise _BrokenError("no answer came")
                        if segment is None:
                            segment = self._store.create(size, head.form, node_id, self._node_id)
                        async for piece in pieces:
                            _write(segment.fd, piece, offset)
                            offset += len(piece)
                    if offset < size:  # how a stream looks whose other end was cut off
                        raise _BrokenError(f"{offset} of {size} bytes came")
                    return segment
                except _BrokenError as error:
                    # While the head has not given the node up, only the connection broke.
                    resumes = resumes + 1 if offset == before else 0
                    if resumes > _RESUMES:
                        raise ObjectLostError(
                            f"segment {number}",
                            f"its transfer from node {node_id.hex()} failed: {error}",
                        ) from None
        except BaseException:
            if segment is not None:
                self._store.seal(segment.number)
                self._store.free(segment.number)
            raise

    def _pieces(self, node_id: bytes, number: int, offset: int) -> AsyncGenerator[bytes, None]:
        """An ``ObjectHead`` as bytes, then the bytes of the segment from the offset on."""
        channel = self._relay.channel(node_id)
        if channel is not None:
            return self._fetched(channel, node_id, number, offset)
        return self._pushed(node_id, number, offset)

    async def _fetched(
        self, channel: grpc.aio.Channel, node_id: bytes, number: int, offset: int
    ) -> AsyncGenerator[bytes, None]:
        call = fetch(
            channel, node_pb2.FetchRequest(segment=number, offset=offset, node_id=self._node_id)
        )
        try:
            async for piece in call:
                yield piece
        except grpc.aio.AioRpcError as error:
            if error.code() is grpc.StatusCode.UNAVAILABLE:
                raise _BrokenError(error.details()) from None
            raise ObjectLostError(
                f"segment {number}",
                f"its transfer from node {node_id.hex()} failed: {error.details()}",
            ) from None
        finally:
            call.cancel()

    async def _pushed(
        self, node_id: bytes, number: int, offset: int
    ) -> AsyncGenerator[bytes, None]:
        # Random: a push that comes late may be for a daemon that was here before.
        ticket = int.from_bytes(os.urandom(8), "big")
        expected = self._expected[ticket] = _Expected(node_id)
        try:
            wanted = Relayed(notice=r.WANTED, items=(ticket, number, offset))
            if not self._relay.send(node_id, wanted):
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
        if expected is None:
            return  # nobody waits any more
        expected.call = asyncio.ensure_future(self._take(first, pieces, expected))
        try:
            await expected.call
        except asyncio.CancelledError:
            # The reader left, or gRPC cancels this call because the other end is gone.
            if ticket in self._expected:
                expected.fail(_BrokenError("the connection broke"))
                raise

    @staticmethod
    async def _take(first: bytes, pieces: AsyncIterator[bytes], expected: _Expected) -> None:
        try:
            await expected.pieces.put(first)
            async for piece in pieces:
                await expected.pieces.put(piece)
        except Exception as error:  # noqa: BLE001 - whatever gRPC raises when a stream breaks
            expected.fail(_BrokenError(str(error)))
        else:
            await expected.pieces.put(None)

    def _refused(self, _node_id: bytes, message: Relayed) -> None:
        ticket, reason, may_work = message.items
        expected = self._expected.get(ticket)
        if expected is not None:
            error = _BrokenError(reason) if may_work else ObjectLostError("segment", reason)
            expected.fail(error)

    # --- sending -----------------------------------------------------------------
    async def serve(
        self, number: int, offset: int, node_id: bytes, ticket: int = 0
    ) -> AsyncGenerator[bytes, None]:
        """A segment of this node in pieces, for another node.

        Raises:
            ObjectLostError: there is no such segment.
        """
        segment = self._store.map(number, node_id)
        try:
            self._copied_to.setdefault(number, set()).add(node_id)
            head = node_pb2.ObjectHead(size=segment.size, form=segment.form, ticket=ticket)
            yield head.SerializeToString()
            while offset < segment.size:
                length = min(config().transfer_chunk, segment.size - offset)
                piece = os.pread(segment.fd, length, offset)
                offset += len(piece)
                yield piece
        finally:
            self._store.unmap([number], node_id)

    def _wanted(self, node_id: bytes, message: Relayed) -> None:
        """A node that cannot dial this one wants a segment."""
        task = asyncio.ensure_future(self._push(node_id, *message.items))
        pushes = self._pushes.setdefault(node_id, set())
        pushes.add(task)
        task.add_done_callback(pushes.discard)

    async def _push(self, node_id: bytes, ticket: int, number: int, offset: int) -> None:
        channel = self._relay.channel(node_id)
        try:
            if channel is None:
                raise ObjectLostError(
                    f"segment {number}", "neither of the two nodes can dial the other"
                )
            async with contextlib.aclosing(self.serve(number, offset, node_id, ticket)) as pieces:
                # What a call's iterator raises is lost in gRPC, so this is found out before.
                first = await anext(pieces)
                await push(channel, _followed_by(first, pieces))
        except ObjectLostError as error:
            self._refuse(node_id, ticket, error.reason, may_work=False)
        except grpc.aio.AioRpcError as error:
            self._refuse(node_id, ticket, str(error.details()), may_work=True)
        except asyncio.CancelledError:  # by gRPC, unless the node is gone
            self._refuse(node_id, ticket, "the connection broke", may_work=True)
        except Exception as error:
            logger.exception("segment %d could not be pushed to node %s", number, node_id.hex())
            self._refuse(node_id, ticket, repr(error), may_work=True)

    def _refuse(self, node_id: bytes, ticket: int, reason: str, *, may_work: bool) -> None:
        items = (ticket, reason, may_work)
        self._relay.send(node_id, Relayed(notice=r.REFUSED, items=items))


async def _followed_by(first: bytes, rest: AsyncIterator[bytes]) -> AsyncIterator[bytes]:
    yield first
    async for piece in rest:
        yield piece


def _write(fd: int, piece: bytes, offset: int) -> None:
    written = os.pwrite(fd, piece, offset)
    while written < len(piece):
        written += os.pwrite(fd, memoryview(piece)[written:], offset + written)
