"""Values on their way from this node to others: its own, and copies of other nodes' values.

The node of a value's owner decides who copies from whom (``directory.py``) and sends those that it
does not serve itself to one that does. What is still arriving here is passed on as it comes. A
value that fits into one piece goes with the answer, to everybody at once.
"""

from __future__ import annotations

import asyncio
import dataclasses
import logging
import os
from typing import TYPE_CHECKING

from miniray.exceptions import ObjectLostError
from miniray.node.base.tasks import run_in
from miniray.node.relay import relayed as r
from miniray.node.relay.relayed import Relayed
from miniray.node.store.segments import home_of, segment_of, writer_of
from miniray.node.transfer.directory import SourceRequest
from miniray.node.transfer.requests import IN_FLIGHT, ValueAnswer

if TYPE_CHECKING:
    from collections.abc import Coroutine, Mapping

    from miniray.node.relay.relay import RelayHub
    from miniray.node.store.segments import Copies, Key, Segment
    from miniray.node.store.spilling import Spilling
    from miniray.node.transfer.directory import Directory
    from miniray.node.transfer.mover_client import MoverClient, Offer
    from miniray.node.transfer.requests import Arriving

logger = logging.getLogger(__name__)


@dataclasses.dataclass(eq=False, slots=True)
class _Request:
    """What another node asks: FETCH of ``relayed.py``."""

    node: bytes
    number: int
    key: Key
    tried: tuple[bytes, ...]
    by_mover: bool
    #: Bytes that may come with the answer.
    size: int


@dataclasses.dataclass(eq=False)
class Serving:
    """The sending end of all transfers from this node."""

    node_id: bytes
    #: Reads values that are on disk.
    spilling: Spilling
    relay: RelayHub
    #: What large values go through.
    mover: MoverClient
    #: Knows who has the values that processes of this node own.
    directory: Directory
    _: dataclasses.KW_ONLY
    #: Of other nodes' values, and the store that they are in.
    copies: Copies
    #: Those that are on their way here.
    arriving: Mapping[Key, Arriving]

    def __post_init__(self) -> None:
        self._store = self.copies.store
        #: What is offered to other nodes by the mover, or about to be: node and value.
        self._offers: dict[tuple[bytes, Key], asyncio.Task[None]] = {}
        #: Reads that wait for the disk, or for what is still on its way here.
        self._reads: set[asyncio.Task[None]] = set()
        self.relay.notices[r.FETCH] = self._fetch
        self.relay.notices[r.READ] = self._read
        self.relay.notices[r.FETCH_ENDED] = self._fetch_ended
        self.relay.notices[r.COPIED] = self._copied

    def table_sizes(self) -> dict[str, int]:
        """Return the size of each table; all are empty when no value is in use."""
        return {"offers": len(self._offers), "reads": len(self._reads)}

    # --- who is served -----------------------------------------------------------
    def _fetch(self, node_id: bytes, message: Relayed) -> None:
        """Another node wants a value, which this one has, or of whose owner it is the node."""
        number, *key, tried, by_mover, size = message.items
        request = _Request(node_id, number, _key(*key), tuple(tried), bool(by_mover), size)
        if home_of(request.key) == self.node_id:
            self._find(request, request.tried)
        else:
            try:
                self._serve(request)
            except ObjectLostError as error:
                self._refuse(node_id, number, error.reason)

    def _find(self, request: _Request, tried: tuple[bytes, ...]) -> None:
        """Serve a value that a process of this node owns, or name a node that does."""

        def answer(source: bytes, why: str) -> None:
            if why:
                self._refuse(request.node, request.number, why)
            elif source != self.node_id:
                self._answer(request.node, request.number, ValueAnswer(ask=source))
            else:
                try:
                    self._serve(request)
                except ObjectLostError:  # a copy that was evicted
                    self._find(request, (*tried, source))

        wanted = SourceRequest(tried, request.size > 0, answer)
        self.directory.ask(request.key, request.node, wanted)

    def _serve(self, request: _Request) -> None:
        """Give a value that is here, or as much of it as is."""
        segment = self._here(request.key)
        if segment is not None:
            if segment.size <= min(request.size, IN_FLIGHT):
                self._answer_with(request.node, request.number, segment, 0, segment.size)
            elif request.by_mover and segment.in_memory:
                self._offer_later(request, self._offer(request, segment, 0))
            else:
                self._answer(request.node, request.number, _head(segment))
            return
        arriving = self.arriving.get(request.key)
        if arriving is None:
            raise _not_here(request.key)
        self._offer_later(request, self._pass_on(request, arriving))

    def _here(self, key: Key) -> Segment | None:
        """Return the segment that has a whole value; None if there is none, or it is freed."""
        own = writer_of(key) == self.node_id
        number = segment_of(key) if own else self.copies.find(key)
        if number is None or not self._store.has_number(number):
            return None
        segment = self._store.get(number)
        return None if segment.freed else segment

    async def _pass_on(self, request: _Request, arriving: Arriving) -> None:
        segment = await arriving.begun()
        if segment is None:
            raise _not_here(request.key)
        if arriving.job:
            await self._offer(request, segment, arriving.job)
        else:
            self._answer(request.node, request.number, _head(segment))

    def _fetch_ended(self, node_id: bytes, message: Relayed) -> None:
        key = _key(*message.items)
        self._end_offer(node_id, key)
        if home_of(key) == self.node_id:
            self.directory.ended(key, node_id)

    def _copied(self, node_id: bytes, message: Relayed) -> None:
        """Another node has values now; it may be one that came back."""
        for key in message.items:
            self._end_offer(node_id, _key(*key))
        self.directory.copied(node_id, message.items)

    def node_unreachable(self, node_id: bytes) -> None:
        """End what a node fetches here: messages to or from it were lost, and it asks again."""
        for node, key in list(self._offers):
            if node == node_id:
                self._end_offer(node, key)

    # --- by mover ------------------------------------------------------------------
    def _offer_later(self, request: _Request, work: Coroutine[None, None, None]) -> None:
        """Answer a request by a task that lasts as long as the node may fetch from the mover."""
        name = (request.node, request.key)
        self._end_offer(*name)

        async def run() -> None:
            try:
                await work
            except ObjectLostError as error:
                self._refuse(request.node, request.number, error.reason)
            except Exception as error:
                logger.exception("a value could not be sent to another node")
                self._refuse(request.node, request.number, repr(error))

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

    async def _offer(self, request: _Request, segment: Segment, job: int) -> None:
        """Let another node's mover read a segment, which stays mapped until it has.

        Args:
            request: Of that node.
            segment: Here, complete or filled by the mover.
            job: The number of the mover's work that fills it; 0 if it is complete.
        """
        over = asyncio.Event()

        def released(*, clean: bool) -> None:
            self._store.unmap([segment.number], request.node, left_open=not clean)
            over.set()

        self._store.map(segment.number, request.node)
        head = _head(segment)
        offer: Offer | None = None
        if segment.in_memory:
            offer = await self.mover.offer(segment.fd, segment.size, job, released)
        else:  # it went to disk before it was mapped
            released(clean=True)
        if offer is None:
            self._answer(request.node, request.number, head)
            return
        try:
            head = head._replace(mover=offer.address, ticket=offer.ticket)
            self._answer(request.node, request.number, head)
            await over.wait()
        finally:
            self.mover.withdraw(offer.ticket)

    # --- in pieces -----------------------------------------------------------------
    def _read(self, node_id: bytes, message: Relayed) -> None:
        """Another node wants bytes of a value that is here, or on its way here."""
        number, *key_items, offset, length = message.items
        key = _key(*key_items)
        segment, arriving = self._here(key), None
        if segment is None:
            arriving = self.arriving.get(key)
            segment = None if arriving is None else arriving.segment
        if not 0 < length <= IN_FLIGHT:
            self._refuse(node_id, number, f"{length} bytes cannot be had at once")
        elif segment is None:
            self._refuse(node_id, number, _not_here(key).reason)
        elif arriving is None or arriving.offset >= offset + length:
            self._answer_with(node_id, number, segment, offset, length)
        else:
            self._begin_read(node_id, number, segment, offset, length, arriving)

    def _answer_with(
        self, node_id: bytes, number: int, segment: Segment, offset: int, length: int
    ) -> None:
        if segment.in_memory:
            piece = os.pread(segment.fd, length, offset)
            self._answer(node_id, number, _head(segment), piece)
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
        read = self._read_later(node_id, number, segment, offset, length, arriving)
        run_in(self._reads, read)

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
                piece = await self.spilling.read(segment, offset, length)
            self._answer(node_id, number, _head(segment), piece)
        except ObjectLostError as error:
            self._refuse(node_id, number, error.reason)
        except Exception as error:
            logger.exception("a value could not be read for another node")
            self._refuse(node_id, number, repr(error))
        finally:
            self._store.unmap([segment.number], node_id)

    # --- answers -------------------------------------------------------------------
    def _answer(self, node_id: bytes, number: int, answer: ValueAnswer, piece: bytes = b"") -> None:
        bodies = [piece] if piece else []
        self.relay.send(node_id, Relayed(notice=r.ANSWER, items=(number, *answer), bodies=bodies))

    def _refuse(self, node_id: bytes, number: int, why: str) -> None:
        self._answer(node_id, number, ValueAnswer(lost=why))


def _head(segment: Segment) -> ValueAnswer:
    return ValueAnswer(size=segment.size, form=segment.form)


def _key(node_id: bytes, number: int, home: bytes) -> Key:
    return node_id, number, home


def _not_here(key: Key) -> ObjectLostError:
    return ObjectLostError(f"segment {segment_of(key)}", "it is not on this node")
