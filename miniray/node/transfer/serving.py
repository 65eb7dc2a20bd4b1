"""Objects on their way from this node to others: its own, and copies of other nodes' objects.

The node of a segment decides who copies from whom (``spread.py``) and sends those that it does
not serve itself to one that does. What is still arriving here is passed on as it comes.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
from typing import TYPE_CHECKING

import grpc

from miniray._proto import node_pb2
from miniray.common.config import config
from miniray.exceptions import ObjectLostError
from miniray.node.relay import relayed as r
from miniray.node.relay.relayed import Relayed
from miniray.node.transfer.copies import Copies, Owner
from miniray.node.transfer.services import push
from miniray.node.transfer.spread import Spread

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterator, Sequence

    from miniray.node.relay.relay import RelayHub
    from miniray.node.store.segments import Segment, SegmentStore
    from miniray.node.store.spilling import Spilling
    from miniray.node.transfer.arriving import Arriving, Key
    from miniray.node.transfer.mover_client import MoverClient, Offer
    from miniray.node.transfer.spread import Place
    from miniray.node.transfer.transfers import Transfers

logger = logging.getLogger(__name__)

#: Pieces that wait at a time to be taken by one node: each is in this process's own memory.
_PIECES = 8


class _Spreading:
    """The tree of a segment of this node, and who waits for a place in it."""

    def __init__(self, node_id: bytes) -> None:
        self.spread = Spread(node_id)
        #: Set when there may be room for one more.
        self.room = asyncio.Event()


class Serving:
    """The sending end of all transfers from this node."""

    def __init__(
        self,
        node_id: bytes,
        store: SegmentStore,
        spilling: Spilling,
        relay: RelayHub,
        transfers: Transfers,
        mover: MoverClient,
    ) -> None:
        """Register what it answers.

        Args:
            node_id: Of this node.
            store: Its segments.
            spilling: What reads those that are on disk.
            relay: The way to other daemons.
            transfers: What is on its way here.
            mover: What large values go through.
        """
        self._node_id = node_id
        self._store = store
        self._spilling = spilling
        self._relay = relay
        self._arriving = transfers.arriving
        transfers.others.number_of = self._copy_of
        self._mover = mover
        #: Copies here of segments of other nodes.
        self.copies = Copies()
        #: The node of the process that owns a segment of this one.
        self.node_of: Callable[[bytes], bytes] = lambda _owner: node_id
        self._spreads: dict[int, _Spreading] = {}
        #: Who may hold a piece that a node has not taken yet.
        self._turns: dict[bytes, asyncio.Semaphore] = {}
        #: Pushes under way, by the node that they go to.
        self._pushes: dict[bytes, set[asyncio.Task[None]]] = {}
        relay.notices[r.WANTED] = self._wanted
        relay.notices[r.COPIED] = self._copied

    def table_sizes(self) -> dict[str, int]:
        """How many entries each table has; all are empty when no value is in use."""
        return {
            "spreads": len(self._spreads),
            "pushes": sum(map(len, self._pushes.values())),
        }

    def _copy_of(self, key: Key) -> int:
        """The whole copy here of another node's segment; 0 if there is none."""
        copy = self.copies.find(key)
        return 0 if copy is None else copy.number

    def forget(self, number: int) -> set[bytes]:
        """A segment of this node is freed; returns the nodes that may have copies of it."""
        spreading = self._spreads.pop(number, None)
        if spreading is None:
            return set()
        spreading.room.set()
        return spreading.spread.nodes

    def node_died(self, node_id: bytes) -> None:
        """A node is gone: nothing is sent to it any more."""
        self._turns.pop(node_id, None)
        for task in self._pushes.pop(node_id, ()):
            task.cancel()
        for spreading in self._spreads.values():
            spreading.spread.node_died(node_id)
            spreading.room.set()

    # --- sending -----------------------------------------------------------------
    async def serve(
        self,
        origin: bytes,
        number: int,
        offset: int,
        node_id: bytes,
        tried: Sequence[bytes] = (),
        ticket: int = 0,
        *,
        unreached: str | None = None,
    ) -> AsyncGenerator[bytes, None]:
        """A segment in pieces for another node, or the word whom or where to ask instead.

        Args:
            origin: The node of the segment.
            number: Its number there.
            offset: Where to begin.
            node_id: Who asks.
            tried: Nodes that this one named to it and that did not serve.
            ticket: Of a push.
            unreached: A mover that a large one cannot come from; None: it comes from none.

        Raises:
            ObjectLostError: it is not here.
        """
        if origin == self._node_id:
            parts = self._serve_own(number, offset, node_id, tried, ticket, unreached=unreached)
        else:
            parts = self._pass_on((origin, number), offset, node_id, unreached=unreached)
        async with contextlib.aclosing(parts):
            async for part in parts:
                yield part

    async def _serve_own(
        self,
        number: int,
        offset: int,
        node_id: bytes,
        tried: Sequence[bytes],
        ticket: int,
        *,
        unreached: str | None,
    ) -> AsyncGenerator[bytes, None]:
        place = await self._place(number, node_id, tried)
        try:
            if place.parent != self._node_id:
                head = node_pb2.ObjectHead(ask=place.parent, ticket=ticket)
                yield head.SerializeToString()
                await asyncio.Event().wait()  # until the other end hangs up
            with self._mapped(self._store.get(number), node_id) as segment:
                owner = Owner(segment.owner, self.node_of(segment.owner))
                parts = self._parts(
                    segment, owner, offset, node_id, ticket, None, unreached=unreached
                )
                async with contextlib.aclosing(parts):
                    async for part in parts:
                        yield part
        finally:
            self._leave(number, place)

    async def _place(self, number: int, node_id: bytes, tried: Sequence[bytes]) -> Place:
        """Wait until a node may copy a segment of this one, from here or from elsewhere."""
        failed = tried[-1:]
        while True:
            segment = self._store.get(number)
            if segment.freed:
                raise ObjectLostError(f"segment {number}", "its owner has freed it")
            spreading = self._spreads.get(number)
            if spreading is None:
                spreading = self._spreads[number] = _Spreading(self._node_id)
            for holder in failed:
                spreading.spread.failed(holder)
            failed = ()
            serves = self._relay.can_dial(node_id)
            place = spreading.spread.place(node_id, tried, serves=serves)
            if place is not None:
                return place
            spreading.room.clear()
            await spreading.room.wait()

    def _leave(self, number: int, place: Place) -> None:
        spreading = self._spreads.get(number)
        if spreading is not None:
            spreading.spread.leave(place)
            spreading.room.set()

    def _copied(self, node_id: bytes, message: Relayed) -> None:
        """Another node has copies of segments of this one; it may be one that came back."""
        freed = []
        for number in message.items:
            spreading = self._spreads.get(number)
            if spreading is not None:
                spreading.spread.has_copy(node_id, serves=self._relay.can_dial(node_id))
                spreading.room.set()
            else:
                freed.append(number)
        if freed:
            self._relay.send(node_id, Relayed(notice=r.FREED_COPIES, items=tuple(freed)))

    async def _pass_on(
        self, key: Key, offset: int, node_id: bytes, *, unreached: str | None
    ) -> AsyncGenerator[bytes, None]:
        """A copy that is here, or as much of it as is."""
        copy = self.copies.find(key)
        arriving: Arriving | None = None
        found: Segment | None = None
        if copy is not None:
            found = self._store.get(copy.number)
            owner = copy.owner
        else:
            arriving = self._arriving.get(key)
            if arriving is not None:
                found = await arriving.room()
                owner = arriving.owner
        if found is None:
            raise ObjectLostError(f"segment {key[1]}", "there is no copy of it on this node")
        with self._mapped(found, node_id) as segment:
            parts = self._parts(segment, owner, offset, node_id, 0, arriving, unreached=unreached)
            async with contextlib.aclosing(parts):
                async for part in parts:
                    yield part

    async def _parts(
        self,
        segment: Segment,
        owner: Owner,
        offset: int,
        node_id: bytes,
        ticket: int,
        arriving: Arriving | None,
        *,
        unreached: str | None,
    ) -> AsyncGenerator[bytes, None]:
        """The first word of a segment, and its bytes unless they go from mover to mover."""
        large = segment.in_memory and segment.size - offset > config().transfer_chunk
        if unreached is not None and large and (arriving is None or arriving.job):
            over: asyncio.Future[None] = asyncio.get_running_loop().create_future()
            job = arriving.job if arriving is not None else 0
            offer = await self._offer(segment, node_id, job, over, unreached)
            if offer is not None:
                try:
                    yield _head(segment, owner, ticket, offer)
                    await over
                finally:
                    self._mover.withdraw(offer.ticket)
                return
        yield _head(segment, owner, ticket)
        turns = self._turns.get(node_id)
        if turns is None:
            turns = self._turns[node_id] = asyncio.Semaphore(_PIECES)
        while offset < segment.size:
            end = segment.size if arriving is None else await arriving.beyond(offset)
            if end <= offset:
                raise ObjectLostError(f"segment {segment.number}", "its transfer here ended")
            async with turns:  # until the piece is taken
                piece = await self._read(segment, offset, end)
                offset += len(piece)
                yield piece

    async def _offer(
        self,
        segment: Segment,
        node_id: bytes,
        job: int,
        over: asyncio.Future[None],
        unreached: str,
    ) -> Offer | None:
        """Let another node's mover read a segment, which stays mapped until that is ``over``."""

        def released(*, clean: bool) -> None:
            self._store.unmap([segment.number], node_id, left_open=not clean)
            if not over.done():
                over.set_result(None)

        self._store.map(segment.number, node_id)
        return await self._mover.offer(segment.fd, segment.size, job, released, unreached)

    async def _read(self, segment: Segment, offset: int, end: int) -> bytes:
        length = min(config().transfer_chunk, end - offset)
        if segment.in_memory:
            return os.pread(segment.fd, length, offset)
        return await self._spilling.read(segment, offset, length)

    @contextlib.contextmanager
    def _mapped(self, segment: Segment, node_id: bytes) -> Iterator[Segment]:
        """A segment that another node reads."""
        self._store.map(segment.number, node_id)
        try:
            yield segment
        finally:
            self._store.unmap([segment.number], node_id)

    # --- pushing -----------------------------------------------------------------
    def _wanted(self, node_id: bytes, message: Relayed) -> None:
        """A node that cannot dial this one wants a segment."""
        task = asyncio.ensure_future(self._push(node_id, *message.items))
        pushes = self._pushes.setdefault(node_id, set())
        pushes.add(task)
        task.add_done_callback(pushes.discard)

    async def _push(
        self, node_id: bytes, ticket: int, number: int, offset: int, *tried: bytes
    ) -> None:
        channel = self._relay.channel(node_id)
        try:
            if channel is None:
                raise ObjectLostError(
                    f"segment {number}", "neither of the two nodes can dial the other"
                )
            served = self.serve(self._node_id, number, offset, node_id, tried, ticket)
            async with contextlib.aclosing(served) as pieces:
                # What a call's iterator raises is lost in gRPC, so this is found out before.
                first = await anext(pieces)
                await _send(channel, first, pieces)
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


async def _send(channel: grpc.aio.Channel, first: bytes, rest: AsyncGenerator[bytes, None]) -> None:
    """Push pieces; after the word whom to ask instead, until the other end hangs up."""
    if not node_pb2.ObjectHead.FromString(first).ask:
        await push(channel, _followed_by(first, rest))
        return
    over = asyncio.Event()
    try:
        await push(channel, _until(over, first))
    finally:
        over.set()


async def _followed_by(first: bytes, rest: AsyncIterator[bytes]) -> AsyncIterator[bytes]:
    yield first
    async for piece in rest:
        yield piece


async def _until(over: asyncio.Event, only: bytes) -> AsyncIterator[bytes]:
    yield only
    await over.wait()


def _head(segment: Segment, owner: Owner, ticket: int, offer: Offer | None = None) -> bytes:
    head = node_pb2.ObjectHead(
        size=segment.size,
        form=segment.form,
        ticket=ticket,
        owner=owner.process,
        owner_node=owner.node,
        mover=offer.address if offer is not None else "",
        move=offer.ticket if offer is not None else b"",
    )
    return bytes(head.SerializeToString())
