"""Values on their way to this node.

The node that wants a value asks the node of its owner. That one gives it, or names another node
that has it or is getting it (``directory.py``). A small value comes with the answer, and from the
node that wrote it as long as that one lives. A large one comes by the movers of the two nodes;
without them, and from where they have failed, it is read in pieces.
"""

from __future__ import annotations

import asyncio
import collections
import dataclasses
import itertools
import sys
import time
from typing import TYPE_CHECKING, NamedTuple

from miniray.common.config import config
from miniray.common.names import format_bytes
from miniray.common.series import COUNTED
from miniray.common.spans import SPANS
from miniray.exceptions import ObjectLostError
from miniray.node.relay import relayed as r
from miniray.node.relay.relayed import Relayed
from miniray.node.relay.requests import IN_FLIGHT, NoAnswerError, RequestRefusedError
from miniray.node.store.segments import home_of, segment_of, writer_of
from miniray.node.transfer.mover_client import MoveError, MoverDiedError, RefusedError
from miniray.node.transfer.moving import HELLO, write_all

if TYPE_CHECKING:
    from collections.abc import Sequence

    from miniray.node.relay.relay import RelayHub
    from miniray.node.relay.requests import Answered, NodeRequests
    from miniray.node.store.segments import Key, Segment, SegmentStore
    from miniray.node.store.spilling import Spilling
    from miniray.node.transfer.directory import Directory
    from miniray.node.transfer.mover_client import Move, MoverClient

#: Times that a transfer is resumed without having moved on, before it is given up.
_RESUMES = 5
#: Seconds for which a mover that was out of reach is not tried again.
_WITHOUT_MOVER = 60.0
#: Pieces of one value that are asked for ahead of what has come.
_AHEAD = 2


class BrokenTransferError(Exception):
    """A node sent something else than the value."""


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
        """Tell waiters that it begins to come, by the mover if there is a job."""
        self._begun, self.job = True, job
        self._tell()

    def came(self, size: int) -> None:
        """Count bytes that have come."""
        self.offset += size
        self._tell()

    def end(self) -> None:
        """Tell waiters that it is whole, or that nothing more will come."""
        self._ended = True
        self._tell()

    def _tell(self) -> None:
        moved, self._moved = self._moved, asyncio.Event()
        moved.set()

    async def begun(self) -> Segment | None:
        """Wait until something comes; returns where it is written.

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
    """What another daemon says to a request for a value; bytes of it may come with the answer."""

    #: The node to copy it from, as the node of its owner says.
    ask: bytes = b""
    #: Of the whole value.
    size: int = 0
    form: int = 0
    #: Where the other node's mover listens; empty if the value is to be read in pieces.
    mover: str = ""


def piece_size() -> int:
    """Return how many bytes travel at once: a value that is no larger goes with the answer."""
    return min(config().transfer_chunk, IN_FLIGHT)


@dataclasses.dataclass(eq=False, repr=False)
class Transfers:
    """The receiving end of all transfers to this node."""

    node_id: bytes
    store: SegmentStore
    spilling: Spilling
    relay: RelayHub
    requests: NodeRequests
    mover: MoverClient
    directory: Directory

    def __post_init__(self) -> None:
        #: Addresses of movers that were out of reach a moment ago.
        self.unreached: set[str] = set()
        #: Bytes of values that came from other nodes, in all.
        self.received = 0
        #: What is on its way.
        self.arriving: dict[Key, Arriving] = {}

    def table_sizes(self) -> dict[str, int]:
        """Return the size of each table; all are empty when nothing moves."""
        return {"arriving": len(self.arriving), "requests": len(self.requests)}

    async def copy(self, key: Key, size: int) -> Segment:
        """Read a value of another node into a segment of this node, which is not sealed yet.

        Raises:
            ObjectLostError: No node has it, or the node of its owner is gone or does not answer.
            ObjectStoreFullError: There is no room for a copy.
        """
        while (given_up := self.arriving.get(key)) is not None:
            await given_up.reached(sys.maxsize)
        arriving = self.arriving[key] = Arriving()
        try:
            # Before the source is asked: a transfer without memory must not take a turn there.
            room = await self.spilling.room_for(size)
            segment = self.store.create(size, 0, writer_of(key), self.node_id, room)
            arriving.segment = segment
            began = time.perf_counter()
            with SPANS.timed("transfer", format_bytes(size)):
                await _Copying(self, key, segment, arriving).fill()
            COUNTED.took("object_transfer_seconds", time.perf_counter() - began)
            self.received += size
        except BaseException:
            if arriving.segment is not None:
                self.store.seal(arriving.segment.number)
                self.store.free(arriving.segment.number)
            raise
        finally:
            del self.arriving[key]
            arriving.end()
        return segment

    def copied(self, key: Key, size: int) -> None:
        """Tell the node of a value's owner that there is a whole copy of it here.

        It frees the copy with the value. Where a small value was written by its owner's node, that
        one knows already who may have it, and is the only one to name.
        """
        home = home_of(key)
        if home == self.node_id:
            self.directory.copied(home, [key])
        elif size > piece_size() or writer_of(key) != home:
            self.relay.send(home, Relayed(notice=r.COPIED, items=(key,)))


@dataclasses.dataclass(slots=True, eq=False, repr=False)
class _Copying:
    """One transfer to this node."""

    of: Transfers
    key: Key
    #: What is filled.
    segment: Segment
    arriving: Arriving

    async def fill(self) -> None:
        key, arriving, knows = self.key, self.arriving, self.of.relay.knows
        origin, _, home = key
        tried: list[bytes] = []
        resumes = 0
        while True:
            before = arriving.offset
            source, named = home, False
            try:
                answer, beginning = await self._ask(tried)
                named = True
                limit = None
                if answer.ask:
                    source = answer.ask
                    # The node that wrote it is waited for until the head has given it up.
                    limit = None if source == origin else config().transfer_stall
                    answer, beginning = await self._fetch(source, limit=limit)
                await self._take(source, answer, beginning, limit)
                return
            except RequestRefusedError as error:
                if not named or source == home == origin:
                    raise _lost(key, str(error)) from None
                tried.append(source)  # it has evicted its copy, or gets none
            except (NoAnswerError, BrokenTransferError) as error:
                if source != home and (source != origin or not knows(source)):
                    tried.append(source)
                    continue
                # While the head has not given the node up, only the connection broke.
                resumes = resumes + 1 if arriving.offset == before else 0
                gone = source == home != self.of.node_id and not knows(home)
                if gone or resumes > _RESUMES:
                    failed = f"its transfer from node {source.hex()} failed: {error}"
                    reason = f"node {home.hex()} is gone" if gone else failed
                    raise _lost(key, reason) from None

    @property
    def _small(self) -> int:
        """Its bytes, if they come with the answer; else 0."""
        return self.segment.size if self.segment.size <= piece_size() else 0

    async def _ask(self, tried: Sequence[bytes]) -> tuple[ValueAnswer, bytes]:
        """Ask the node of the value's owner for it, or for a node to copy it from."""
        origin, _, home = self.key
        of, small = self.of, self._small > 0
        if small and origin not in tried and of.relay.knows(origin):
            return ValueAnswer(ask=origin), b""  # it gives a small value to everybody at once
        if home != of.node_id:
            return await self._fetch(home, tried)
        try:
            return ValueAnswer(ask=of.directory.ask(self.key, home, tried, small=small)), b""
        except LookupError as error:
            raise RequestRefusedError(str(error)) from None

    async def _fetch(
        self, node_id: bytes, tried: Sequence[bytes] = (), limit: float | None = None
    ) -> tuple[ValueAnswer, bytes]:
        """Ask a node for the value, which it has, or of whose owner it is the node."""
        of, size = self.of, self._small
        arguments = (*self.key, tuple(tried), of.relay.can_dial(node_id), size)
        asked = of.requests.ask(node_id, "fetch", *arguments, size=size, limit=limit)
        answer, beginning = await asked
        return ValueAnswer(*answer), beginning

    async def _take(
        self, source: bytes, answer: ValueAnswer, beginning: bytes, limit: float | None
    ) -> None:
        """Take the value from a node that gives it, from where it is here on."""
        size, arriving = self.segment.size, self.arriving
        if answer.size != size:
            raise BrokenTransferError(f"it has {answer.size} bytes there, and not {size}")
        self.of.store.take_form(self.segment, answer.form)
        if answer.mover and answer.mover not in self.of.unreached:
            await self._take_from_mover(answer.mover)
        if not arriving.offset:
            arriving.begin()
        if len(beginning) > size - arriving.offset:  # nobody made room for that
            raise BrokenTransferError(f"more than its {size} bytes came")
        if beginning:
            self._write(beginning)
        await self._read_rest(source, limit)

    def _write(self, piece: bytes) -> None:
        write_all(self.segment.fd, piece, self.arriving.offset)
        self.arriving.came(len(piece))

    async def _read_rest(self, source: bytes, limit: float | None) -> None:
        size, step, arriving = self.segment.size, piece_size(), self.arriving
        offsets = iter(range(arriving.offset, size, step))
        reads: collections.deque[asyncio.Task[Answered]] = collections.deque()
        try:
            while arriving.offset < size:
                for offset in itertools.islice(offsets, _AHEAD - len(reads)):
                    length = min(step, size - offset)
                    read = self.of.requests.ask(
                        source, "read", *self.key, offset, length, size=length, limit=limit
                    )
                    reads.append(asyncio.ensure_future(read))
                _, piece = await reads[0]
                reads.popleft()
                if len(piece) != min(step, size - arriving.offset):
                    raise BrokenTransferError(f"a piece of {len(piece)} bytes came")
                self._write(piece)
        finally:
            for left in reads:
                left.cancel()
            await asyncio.gather(*reads, return_exceptions=True)

    async def _take_from_mover(self, address: str) -> None:
        """Let the movers of the two nodes carry it, as far as they do."""
        of, segment, arriving = self.of, self.segment, self.arriving
        before = arriving.offset
        hello = HELLO.pack(*self.key, before, of.node_id)
        move: Move | None = None
        try:
            move = of.mover.fetch(address, hello, segment.fd, before, segment.size, arriving.came)
            arriving.begin(move.number)  # its waiters may pass on what comes
            await self._watch(move)
        except MoveError as error:
            if arriving.offset == before and not isinstance(error, (MoverDiedError, RefusedError)):
                of.unreached.add(address)
                again = of.unreached.discard
                asyncio.get_running_loop().call_later(_WITHOUT_MOVER, again, address)
        finally:
            arriving.job = 0
            if move is not None:
                await move.stop()

    async def _watch(self, move: Move) -> None:
        """Wait for what the movers carry, and raise why it does not go on."""
        stall = config().transfer_stall
        while not move.ended.done():
            seen = self.arriving.offset
            done, _ = await asyncio.wait({move.ended}, timeout=stall)
            if not done and self.arriving.offset == seen:
                raise MoveError(f"nothing came for {stall} s")
        move.ended.result()


def _lost(key: Key, why: str) -> ObjectLostError:
    return ObjectLostError(f"segment {segment_of(key)}", why)
