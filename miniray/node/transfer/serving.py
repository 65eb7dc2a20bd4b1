"""Values on their way from this node to others: its own, and copies of other nodes' values.

The node of a value's owner decides who copies from whom (``directory.py``) and sends those that it
does not serve itself to one that does. What is still arriving here is passed on as it comes. A
value that fits into one piece goes with the answer, to everybody at once.
"""

from __future__ import annotations

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
from miniray.node.transfer.mover_client import Opened
from miniray.node.transfer.requests import IN_FLIGHT, ValueAnswer

if TYPE_CHECKING:
    import asyncio
    from collections.abc import Mapping

    from miniray.node.relay.relay import RelayHub
    from miniray.node.store.segments import Copies, Key, Segment
    from miniray.node.store.spilling import Spilling
    from miniray.node.transfer.directory import Directory
    from miniray.node.transfer.mover_client import MoverClient
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
        #: Answers that wait for the disk, or for what is still on its way here.
        self._answers: set[asyncio.Task[None]] = set()
        self.relay.notices[r.FETCH] = self._fetch
        self.relay.notices[r.READ] = self._read

    def table_sizes(self) -> dict[str, int]:
        """Return the size of each table; all are empty when no value is in use."""
        return {"answers": len(self._answers)}

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
            else:
                self._answer_head(request, segment, by_mover=request.by_mover)
            return
        arriving = self.arriving.get(request.key)
        if arriving is None:
            raise _not_here(request.key)
        run_in(self._answers, self._pass_on(request, arriving))

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
            self._refuse(request.node, request.number, _not_here(request.key).reason)
        else:
            self._answer_head(request, segment, by_mover=request.by_mover and arriving.job > 0)

    def _answer_head(self, request: _Request, segment: Segment, *, by_mover: bool) -> None:
        """Say where the other node's mover gets the value; else it is read in pieces."""
        address = self.mover.address() if by_mover and segment.in_memory else ""
        self._answer(request.node, request.number, _head(segment)._replace(mover=address))

    # --- by mover ------------------------------------------------------------------

    def open(self, key: Key, node_id: bytes) -> Opened | None:
        """Let the mover read a value for another node, or what has come of it.

        It stays mapped until the mover has done that. None if it is not in memory here.
        """
        segment, arriving, job = self._here(key), self.arriving.get(key), 0
        if segment is None and arriving is not None and (arriving.job or arriving.is_whole):
            segment, job = arriving.segment, arriving.job
        if segment is None or not segment.in_memory:
            return None
        number = self._store.map(segment.number, node_id).number

        def released(left_open: bool) -> None:
            self._store.unmap([number], node_id, left_open=left_open)

        return Opened(segment.fd, segment.size, job, released)

    def node_unreachable(self, node_id: bytes) -> None:
        """End what a node fetches here: messages to or from it were lost, and it asks again."""
        self.mover.cut(node_id)

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
        run_in(self._answers, read)

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
