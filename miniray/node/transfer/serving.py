"""Values on their way from this node to others: its own, and copies of other nodes' values.

The node of a value's owner decides which node copies from which (``directory.py``) and sends those
that it does not serve itself to one that does. What is still arriving here is passed on as it
comes. A value that fits into one piece goes with the answer, to all requesters at once.
"""

from __future__ import annotations

import asyncio
import dataclasses
import logging
import os
from typing import TYPE_CHECKING, NamedTuple

from miniray.common.config import config
from miniray.node.base.clients import run_in
from miniray.node.relay.relay import IN_FLIGHT
from miniray.node.store.segments import home_of, segment_of, writer_of
from miniray.node.transfer.mover_client import MoverClient, Opened

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from miniray.node.base.node_config import MoverConfig
    from miniray.node.base.template_client import Helper
    from miniray.node.relay.relay import NodeRequest, NodeRequests
    from miniray.node.store.segments import Copies, Key, Segment
    from miniray.node.store.spilling import Spilling
    from miniray.node.transfer.directory import Directory

logger = logging.getLogger(__name__)

#: Why a node gives no value, or no more of it.
_NOT_HERE = "it is not on this node"
_ENDED = "its transfer to the node that passes it on ended"


class Arriving:
    """A copy in flight to this node; the part that has come can be passed on already."""

    def __init__(self) -> None:
        #: None until it has memory; its node gets no request before.
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
        """Notify waiters that it begins to come, by the mover if there is a job."""
        self._begun, self.job = True, job
        self._notify()

    def came(self, size: int) -> None:
        """Count bytes that have come."""
        self.offset += size
        self._notify()

    def end(self) -> None:
        """Notify waiters that it is whole, or that no more will come."""
        self._ended = True
        self._notify()

    def _notify(self) -> None:
        moved, self._moved = self._moved, asyncio.Event()
        moved.set()

    async def begun(self) -> Segment | None:
        """Wait until something comes; return where it is written.

        None if it ended, or has no memory yet: another source serves a node that was sent here
        better.
        """
        while self.segment is not None and not self._begun and not self._ended:
            await self._moved.wait()
        return self.segment if self._begun else None

    async def reached(self, offset: int) -> bool:
        """Wait until it is here up to an offset; False if that much will not come."""
        while self.offset < offset and not self._ended:
            await self._moved.wait()
        return self.offset >= offset


class ValueAnswer(NamedTuple):
    """Another daemon's answer to a request for a value; bytes of it may come along."""

    #: The node to copy it from, named by the node of its owner.
    ask: bytes = b""
    #: Of the whole value.
    size: int = 0
    form: int = 0
    #: Where the other node's mover listens; empty if the value is to be read in pieces.
    mover: str = ""


def piece_size() -> int:
    """Return how many bytes travel at once: a value up to this size goes with the answer."""
    return min(config().transfer_chunk, IN_FLIGHT)


class _Wanted(NamedTuple):
    """A value that another node wants."""

    asked: NodeRequest
    key: Key
    #: Nodes that were named for it, and that did not serve it.
    tried: tuple[bytes, ...]
    by_mover: bool
    #: Bytes that may come with the answer.
    size: int


@dataclasses.dataclass(eq=False, repr=False)
class Serving:
    """The sending end of all transfers from this node."""

    node_id: bytes
    #: Reads values that are on disk.
    spilling: Spilling
    requests: dataclasses.InitVar[NodeRequests]
    #: Has the nodes of the values that processes of this node own.
    directory: Directory
    #: Of other nodes' values, and the store that they are in.
    copies: Copies
    start_mover: dataclasses.InitVar[Callable[[], Helper]]
    settings: dataclasses.InitVar[MoverConfig]

    def __post_init__(
        self, requests: NodeRequests, start_mover: Callable[[], Helper], settings: MoverConfig
    ) -> None:
        #: The mover, for large values in both directions.
        self.mover = MoverClient(start_mover, settings, self.open)
        #: The copies that are on their way here.
        self.arriving: dict[Key, Arriving] = {}
        self._store = self.copies.store
        #: Answers that wait for the disk, or for what is still on its way here.
        self._answers: set[asyncio.Task[None]] = set()
        requests.handlers["fetch"] = self._fetch
        requests.handlers["read"] = self._read

    def table_sizes(self) -> dict[str, int]:
        """Return the size of each table; all are empty when no value is in use."""
        return {"answers": len(self._answers)}

    # --- requests -----------------------------------------------------------------
    def _fetch(
        self,
        asked: NodeRequest,
        writer: bytes,
        segment: int,
        home: bytes,
        tried: Iterable[bytes],
        by_mover: bool,
        size: int,
    ) -> None:
        """Answer a node that wants a value, which is here, or whose owner is."""
        wanted = _Wanted(asked, (writer, segment, home), tuple(tried), by_mover, size)
        if home == self.node_id:
            self._find(wanted)
        elif not self._serve(wanted):
            asked.refuse(_NOT_HERE)

    def _find(self, wanted: _Wanted) -> None:
        """Serve a value that a process of this node owns, or name a node that does."""
        asked = wanted.asked
        try:
            small = wanted.size > 0
            source = self.directory.ask(wanted.key, asked.node, wanted.tried, small=small)
        except LookupError as error:
            asked.refuse(str(error))
            return
        if source != self.node_id:
            asked.answer(tuple(ValueAnswer(ask=source)))
        elif not self._serve(wanted):  # a copy that was evicted
            self._find_other(wanted)

    def _find_other(self, wanted: _Wanted) -> None:
        """Name a node that has a value which this one, named for it, does not give."""
        self._find(wanted._replace(tried=(*wanted.tried, self.node_id)))

    def _serve(self, wanted: _Wanted) -> bool:
        """Give a value that is here, or as much of it as is; return whether it is."""
        segment = self._here(wanted.key)
        arriving = self.arriving.get(wanted.key)
        if segment is not None:
            if segment.size <= min(wanted.size, IN_FLIGHT):
                self._answer_with(wanted.asked, segment, 0, segment.size)
            else:
                self._answer_head(wanted, segment, by_mover=wanted.by_mover)
        elif arriving is not None:
            run_in(self._answers, self._pass_on(wanted, arriving))
        return segment is not None or arriving is not None

    def _here(self, key: Key) -> Segment | None:
        """Return the segment that has a whole value; None if there is none, or it is freed."""
        own = writer_of(key) == self.node_id
        number = segment_of(key) if own else self.copies.find(key)
        if number is None or not self._store.has_number(number):
            return None
        segment = self._store.get(number)
        return None if segment.freed else segment

    async def _pass_on(self, wanted: _Wanted, arriving: Arriving) -> None:
        segment = await arriving.begun()
        if segment is None and home_of(wanted.key) == self.node_id:
            self._find_other(wanted)
        elif segment is None:
            wanted.asked.refuse(_NOT_HERE)
        else:
            self._answer_head(wanted, segment, by_mover=wanted.by_mover and arriving.job > 0)

    def _answer_head(self, wanted: _Wanted, segment: Segment, *, by_mover: bool) -> None:
        """Answer where the other node's mover gets the value; else it is read in pieces."""
        address = self.mover.address() if by_mover and segment.in_memory else ""
        wanted.asked.answer(tuple(_head(segment)._replace(mover=address)))

    # --- by mover -----------------------------------------------------------------

    def open(self, key: Key, node_id: bytes) -> Opened | None:
        """Let the mover read a value for another node, or the part that has come.

        It stays mapped until the mover has done that. None if it is not in memory here.
        """
        segment, arriving, job = self._here(key), self.arriving.get(key), 0
        if segment is None and arriving is not None and (arriving.job or arriving.is_whole):
            segment, job = arriving.segment, 0 if arriving.is_whole else arriving.job
        if segment is None or not segment.in_memory:
            return None
        number = self._store.map(segment.number, node_id).number

        def released(left_open: bool) -> None:
            self._store.unmap([number], node_id, left_open=left_open)

        return Opened(segment.fd, segment.size, job, released)

    # --- in pieces ----------------------------------------------------------------
    def _read(
        self, asked: NodeRequest, writer: bytes, number: int, home: bytes, offset: int, length: int
    ) -> None:
        """Answer a node that wants bytes of a value that is here, or on its way here."""
        key = (writer, number, home)
        segment, arriving = self._here(key), None
        if segment is None:
            arriving = self.arriving.get(key)
            segment = None if arriving is None else arriving.segment
        if not 0 < length <= IN_FLIGHT:
            asked.refuse(f"{length} bytes cannot be had at once")
        elif segment is None:
            asked.refuse(_NOT_HERE)
        elif arriving is None or arriving.offset >= offset + length:
            self._answer_with(asked, segment, offset, length)
        else:
            self._begin_read(asked, segment, offset, length, arriving)

    def _answer_with(self, asked: NodeRequest, segment: Segment, offset: int, length: int) -> None:
        if segment.in_memory:
            piece = os.pread(segment.fd, length, offset)
            asked.answer(tuple(_head(segment)), piece)
        else:
            self._begin_read(asked, segment, offset, length)

    def _begin_read(
        self,
        asked: NodeRequest,
        segment: Segment,
        offset: int,
        length: int,
        arriving: Arriving | None = None,
    ) -> None:
        """Map a segment, which may be freed before the task runs, and read it in a task."""
        self._store.map(segment.number, asked.node)
        run_in(self._answers, self._read_later(asked, segment, offset, length, arriving))

    async def _read_later(
        self,
        asked: NodeRequest,
        segment: Segment,
        offset: int,
        length: int,
        arriving: Arriving | None,
    ) -> None:
        """Answer a request with bytes that are on disk, or have yet to arrive here."""
        try:
            if arriving is not None and not await arriving.reached(offset + length):
                asked.refuse(_ENDED)
                return
            if segment.in_memory:
                piece = os.pread(segment.fd, length, offset)
            else:
                piece = await self.spilling.read(segment, offset, length)
            asked.answer(tuple(_head(segment)), piece)
        except Exception as error:
            logger.exception("a value could not be read for another node")
            asked.refuse(repr(error))
        finally:
            self._store.unmap([segment.number], asked.node)


def _head(segment: Segment) -> ValueAnswer:
    return ValueAnswer(size=segment.size, form=segment.form)
