"""Values on their way from this node to others: its own, and copies of other nodes' values.

The node of a segment decides who copies from whom (``spread.py``) and sends those that it does
not serve itself to one that does. What is still arriving here is passed on as it comes. A value
that fits into one piece goes with the answer, to everybody at once.
"""

from __future__ import annotations

import asyncio
import dataclasses
import logging
import os
from typing import TYPE_CHECKING

from miniray.exceptions import ObjectLostError
from miniray.node.relay import relayed as r
from miniray.node.relay.relayed import Relayed
from miniray.node.store.copies import Owner
from miniray.node.transfer.requests import IN_FLIGHT, ValueAnswer
from miniray.node.transfer.spread import SpreadTree

if TYPE_CHECKING:
    from collections.abc import Coroutine, Mapping

    from miniray.node.relay.relay import RelayHub
    from miniray.node.store.copies import Copies, Key
    from miniray.node.store.segments import Segment
    from miniray.node.store.spilling import Spilling
    from miniray.node.transfer.arriving import Arriving
    from miniray.node.transfer.mover_client import MoverClient, Offer

logger = logging.getLogger(__name__)


@dataclasses.dataclass(eq=False, slots=True)
class _Request:
    """What another node asks: FETCH of ``relayed.py``."""

    node: bytes
    number: int
    origin: bytes
    segment: int
    tried: tuple[bytes, ...]
    by_mover: bool
    #: Bytes that may come with the answer.
    size: int

    @property
    def key(self) -> Key:
        """The value that it asks for."""
        return self.origin, self.segment


class _Spreading:
    """The tree of a segment of this node, and who waits for a place in it."""

    def __init__(self, node_id: bytes) -> None:
        self.spread = SpreadTree(node_id)
        self.waiting: dict[bytes, _Request] = {}


class Serving:
    """The sending end of all transfers from this node."""

    def __init__(
        self,
        node_id: bytes,
        spilling: Spilling,
        relay: RelayHub,
        mover: MoverClient,
        *,
        copies: Copies,
        arriving: Mapping[Key, Arriving],
        owner_nodes: Mapping[bytes, bytes],
    ) -> None:
        """Register what it answers.

        Args:
            node_id: Of this node.
            spilling: What reads those that are on disk.
            relay: The way to other daemons.
            mover: What large values go through.
            copies: Of other nodes' segments, and the store that they are in.
            arriving: Those that are on their way here.
            owner_nodes: The nodes of owners of segments here that are of other nodes.
        """
        self._node_id = node_id
        self._store = copies.store
        self._spilling = spilling
        self._relay = relay
        self._mover = mover
        self._copies = copies
        self._arriving = arriving
        self._owner_nodes = owner_nodes
        self._spreads: dict[int, _Spreading] = {}
        #: What is offered to other nodes by the mover, or about to be: node and value.
        self._offers: dict[tuple[bytes, Key], asyncio.Task[None]] = {}
        #: Reads that wait for the disk, or for what is still on its way here.
        self._reads: set[asyncio.Task[None]] = set()
        relay.notices[r.FETCH] = self._fetch
        relay.notices[r.READ] = self._read
        relay.notices[r.FETCH_ENDED] = self._fetch_ended
        relay.notices[r.COPIED] = self._copied

    def table_sizes(self) -> dict[str, int]:
        """How many entries each table has; all are empty when no value is in use."""
        return {
            "spreads": len(self._spreads),
            "offers": len(self._offers),
            "reads": len(self._reads),
        }

    # --- who is served -----------------------------------------------------------
    def _fetch(self, node_id: bytes, message: Relayed) -> None:
        """Another node wants a value."""
        number, origin, segment, tried, by_mover, size = message.items
        request = _Request(node_id, number, origin, segment, tuple(tried), bool(by_mover), size)
        try:
            if request.origin == self._node_id:
                self._serve_own(request)
            else:
                self._serve_copy(request)
        except ObjectLostError as error:
            self._refuse(node_id, request.number, error)

    def _serve_own(self, request: _Request) -> None:
        number = request.segment
        segment = self._store.get(number)
        if segment.freed:
            raise ObjectLostError(f"segment {number}", "its owner has freed it")
        spreading = self._spreads.get(number)
        if spreading is None:
            spreading = self._spreads[number] = _Spreading(self._node_id)
        if segment.size <= min(request.size, IN_FLIGHT):
            spreading.spread.nodes.add(request.node)
            self._answer_with(request.node, request.number, segment, 0, segment.size)
            return
        for holder in request.tried[-1:]:
            spreading.spread.failed(holder)
        spreading.waiting[request.node] = request
        self._place(number)

    def _place(self, number: int) -> None:
        """Answer those who want a segment of this node and can copy it now."""
        spreading = self._spreads.get(number)
        if spreading is None or not spreading.waiting:
            return
        segment = self._store.get(number)
        for request in list(spreading.waiting.values()):
            serves = self._relay.can_dial(request.node)
            parent = spreading.spread.place(request.node, request.tried, serves=serves)
            if parent is None:
                continue
            del spreading.waiting[request.node]
            if parent == self._node_id:
                self._give(request, segment)
            else:
                self._answer(request.node, request.number, ValueAnswer(ask=parent))

    def _serve_copy(self, request: _Request) -> None:
        """Serve a copy that is here, or as much of it as is."""
        copy = self._copies.find(request.key)
        if copy is not None:
            self._give(request, self._store.get(copy.number), copy.owner)
            return
        arriving = self._arriving.get(request.key)
        if arriving is None:
            raise _no_copy(request.key)
        self._offer_later(request, self._pass_on(request, arriving))

    async def _pass_on(self, request: _Request, arriving: Arriving) -> None:
        segment = await arriving.begun()
        if segment is None:
            raise _no_copy(request.key)
        if arriving.job:
            await self._offer(request, segment, arriving.owner, arriving.job)
        else:
            self._answer(request.node, request.number, _head(segment, arriving.owner))

    def forget(self, number: int) -> set[bytes]:
        """Forget a segment that is freed; returns the nodes that may have copies of it."""
        spreading = self._spreads.pop(number, None)
        if spreading is None:
            return set()
        freed = ObjectLostError(f"segment {number}", "its owner has freed it")
        for request in spreading.waiting.values():
            self._refuse(request.node, request.number, freed)
        return spreading.spread.nodes

    def _copied(self, node_id: bytes, message: Relayed) -> None:
        """Another node has copies of segments of this one; it may be one that came back."""
        freed = []
        for number in message.items:
            self._end_offer(node_id, (self._node_id, number))
            spreading = self._spreads.get(number)
            if spreading is not None:
                spreading.spread.has_copy(node_id, serves=self._relay.can_dial(node_id))
                self._place(number)
            else:
                freed.append(number)
        if freed:
            self._relay.send(node_id, Relayed(notice=r.FREED_COPIES, items=tuple(freed)))

    def _fetch_ended(self, node_id: bytes, message: Relayed) -> None:
        """Another node does not fetch a value from here any more."""
        origin, number = message.items
        self._end_offer(node_id, (origin, number))
        if origin == self._node_id:
            self._leave(number, node_id)

    def _leave(self, number: int, node_id: bytes) -> None:
        spreading = self._spreads.get(number)
        if spreading is not None:
            spreading.waiting.pop(node_id, None)
            spreading.spread.leave(node_id)
            self._place(number)

    def node_unreachable(self, node_id: bytes) -> None:
        """End what a node fetches here: messages to or from it were lost, and it asks again."""
        for node, key in list(self._offers):
            if node == node_id:
                self._end_offer(node, key)
        for number in list(self._spreads):
            self._leave(number, node_id)

    def node_died(self, node_id: bytes) -> None:
        """Forget a node that is gone."""
        for spreading in self._spreads.values():
            spreading.spread.node_died(node_id)
        self.node_unreachable(node_id)

    # --- by mover ------------------------------------------------------------------
    def _give(self, request: _Request, segment: Segment, owner: Owner | None = None) -> None:
        """Say how a node gets a large value from here."""
        owner = owner or self._owner(segment)
        if request.by_mover and segment.in_memory:
            self._offer_later(request, self._offer(request, segment, owner, 0))
        else:
            self._answer(request.node, request.number, _head(segment, owner))

    def _offer_later(self, request: _Request, work: Coroutine[None, None, None]) -> None:
        """Answer a request by a task that lasts as long as the node may fetch from the mover."""
        name = (request.node, request.key)
        self._end_offer(*name)

        async def run() -> None:
            try:
                await work
            except ObjectLostError as error:
                self._refuse(request.node, request.number, error)
            except Exception as error:
                logger.exception("a value could not be sent to another node")
                self._refuse(request.node, request.number, ObjectLostError("", repr(error)))

        def forget(task: asyncio.Task[None]) -> None:
            work.close()  # if it has not begun
            if self._offers.get(name) is task:
                del self._offers[name]

        task = self._offers[name] = asyncio.ensure_future(run())
        task.add_done_callback(forget)

    def _end_offer(self, node_id: bytes, key: Key) -> None:
        task = self._offers.pop((node_id, key), None)
        if task is not None:
            task.cancel()

    async def _offer(self, request: _Request, segment: Segment, owner: Owner, job: int) -> None:
        """Let another node's mover read a segment, which stays mapped until it has.

        Args:
            request: Of that node.
            segment: Here, complete or filled by the mover.
            owner: Of the value.
            job: The number of the mover's work that fills it; 0 if it is complete.
        """
        over: asyncio.Future[None] = asyncio.get_running_loop().create_future()

        def released(*, clean: bool) -> None:
            self._store.unmap([segment.number], request.node, left_open=not clean)
            if not over.done():
                over.set_result(None)

        self._store.map(segment.number, request.node)
        head = _head(segment, owner)
        offer: Offer | None = None
        if segment.in_memory:
            offer = await self._mover.offer(segment.fd, segment.size, job, released)
        else:  # it went to disk before it was mapped
            released(clean=True)
        if offer is None:
            self._answer(request.node, request.number, head)
            return
        try:
            head = head._replace(mover=offer.address, ticket=offer.ticket)
            self._answer(request.node, request.number, head)
            await over
        finally:
            self._mover.withdraw(offer.ticket)

    # --- in pieces -----------------------------------------------------------------
    def _read(self, node_id: bytes, message: Relayed) -> None:
        """Another node wants bytes of a value that is here, or on its way here."""
        number, origin, segment_there, offset, length = message.items
        key = (origin, segment_there)
        arriving = None
        try:
            if not 0 < length <= IN_FLIGHT:
                raise ObjectLostError("segment", f"{length} bytes cannot be had at once")
            if origin == self._node_id:
                segment = self._store.get(segment_there)
            elif (copy := self._copies.find(key)) is not None:
                segment = self._store.get(copy.number)
            else:
                arriving = self._arriving.get(key)
                if arriving is None or arriving.segment is None:
                    raise _no_copy(key)
                segment = arriving.segment
        except ObjectLostError as error:
            self._refuse(node_id, number, error)
            return
        if arriving is None or arriving.offset >= offset + length:
            self._answer_with(node_id, number, segment, offset, length)
        else:
            self._begin_read(node_id, number, segment, offset, length, arriving)

    def _answer_with(
        self, node_id: bytes, number: int, segment: Segment, offset: int, length: int
    ) -> None:
        """Answer a request with bytes of a segment."""
        if segment.in_memory:
            piece = os.pread(segment.fd, length, offset)
            self._answer(node_id, number, _head(segment, self._owner(segment)), piece)
        else:
            self._begin_read(node_id, number, segment, offset, length)

    def _begin_read(
        self,
        node_id: bytes,
        number: int,
        segment: Segment,
        offset: int,
        length: int,
        arriving: Arriving | None = None,
    ) -> None:
        """Map a segment, which may be freed before the task runs, and read it in a task."""
        self._store.map(segment.number, node_id)
        task = asyncio.ensure_future(
            self._read_later(node_id, number, segment, offset, length, arriving)
        )
        self._reads.add(task)
        task.add_done_callback(self._reads.discard)

    async def _read_later(
        self,
        node_id: bytes,
        number: int,
        segment: Segment,
        offset: int,
        length: int,
        arriving: Arriving | None,
    ) -> None:
        """Answer a request with bytes that are on disk, or have yet to arrive here."""
        try:
            if arriving is not None and not await arriving.reached(offset + length):
                raise ObjectLostError("segment", "its transfer to the node that passes it on ended")
            if segment.in_memory:
                piece = os.pread(segment.fd, length, offset)
            else:
                piece = await self._spilling.read(segment, offset, length)
            self._answer(node_id, number, _head(segment, self._owner(segment)), piece)
        except ObjectLostError as error:
            self._refuse(node_id, number, error)
        except Exception as error:
            logger.exception("a value could not be read for another node")
            self._refuse(node_id, number, ObjectLostError("segment", repr(error)))
        finally:
            self._store.unmap([segment.number], node_id)

    # --- answers -------------------------------------------------------------------
    def _owner(self, segment: Segment) -> Owner:
        return Owner(segment.owner, self._owner_nodes.get(segment.owner, self._node_id))

    def _answer(self, node_id: bytes, number: int, answer: ValueAnswer, piece: bytes = b"") -> None:
        bodies = [piece] if piece else []
        self._relay.send(node_id, Relayed(notice=r.ANSWER, items=(number, *answer), bodies=bodies))

    def _refuse(self, node_id: bytes, number: int, error: ObjectLostError) -> None:
        self._answer(node_id, number, ValueAnswer(lost=error.reason))


def _head(segment: Segment, owner: Owner) -> ValueAnswer:
    return ValueAnswer(
        size=segment.size, form=segment.form, owner=owner.process, owner_node=owner.node
    )


def _no_copy(key: Key) -> ObjectLostError:
    return ObjectLostError(f"segment {key[1]}", "there is no copy of it on this node")
