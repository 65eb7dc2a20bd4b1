"""Values on their way to this node: one transfer for all requesters of a value.

``Pulls`` has the requesters, and ends a transfer when its last one leaves. A process that maps a
value never waits for a turn. Arguments of calls that have not begun are fetched into memory that is
free; values for ``wait`` have a limit of bytes in flight.

``Transfers`` brings them. It sends a request to the node of the owner, which gives the value, or
names another node that has it or is getting it (``directory.py``). A small value comes with the
answer, and from the node that wrote it as long as that one lives. A large one comes by the movers
of the two nodes; without them, and from where they have failed, it is read in pieces.
"""

from __future__ import annotations

import asyncio
import collections
import dataclasses
import itertools
import sys
import time
from typing import TYPE_CHECKING

from miniray.common.config import config
from miniray.common.names import format_bytes
from miniray.common.series import COUNTED
from miniray.common.spans import SPANS
from miniray.exceptions import ObjectLostError
from miniray.node.base.clients import run_in
from miniray.node.relay import relayed as r
from miniray.node.relay.relay import NoAnswerError, RequestRefusedError
from miniray.node.relay.relayed import Relayed
from miniray.node.store.segments import home_of, segment_of, writer_of
from miniray.node.transfer.mover_client import MoveError, MoverDiedError, RefusedError
from miniray.node.transfer.moving import HELLO, write_all
from miniray.node.transfer.serving import Arriving, ValueAnswer, piece_size

if TYPE_CHECKING:
    from collections.abc import Sequence

    from miniray.node.relay.relay import Answered, NodeRequests, RelayHub
    from miniray.node.store.segments import Copies, Key, Segment
    from miniray.node.store.spilling import Spilling
    from miniray.node.transfer.directory import Directory
    from miniray.node.transfer.mover_client import Move
    from miniray.node.transfer.serving import Serving

#: Times that a transfer is resumed without having moved on, before it is given up.
_RESUMES = 5
#: Seconds for which a mover that was out of reach is not tried again.
_WITHOUT_MOVER = 60.0
#: Pieces of one value that are requested ahead of what has come.
_AHEAD = 2
#: Part of the store that values for `wait` may take while in flight.
_SHARE = 4
#: A process, and the number of its request.
_Name = tuple[bytes, int]


class BrokenTransferError(Exception):
    """A node sent something else than the value."""


@dataclasses.dataclass(eq=False, repr=False)
class Transfers:
    """The receiving end of all transfers to this node."""

    node_id: bytes
    spilling: Spilling
    relay: RelayHub
    requests: NodeRequests
    directory: Directory
    #: Passes on values that are in flight to this node.
    serving: dataclasses.InitVar[Serving]

    def __post_init__(self, serving: Serving) -> None:
        self.store = serving.copies.store
        self.mover = serving.mover
        #: The values in flight.
        self.arriving = serving.arriving
        #: Addresses of movers that were out of reach a moment ago.
        self.unreached: set[str] = set()
        #: Bytes of values that came from other nodes, in all.
        self.received = 0

    def table_sizes(self) -> dict[str, int]:
        """Return the size of each table; all are empty without transfers."""
        return {"arriving": len(self.arriving), "requests": len(self.requests)}

    async def copy(self, key: Key, size: int) -> Segment:
        """Read a value of another node into a segment of this node, which is not sealed yet.

        Raises:
            ObjectLostError: No node has it, or the node of its owner is gone or does not answer.
            ObjectStoreFullError: There is no memory for a copy.
        """
        while (given_up := self.arriving.get(key)) is not None:
            await given_up.reached(sys.maxsize)
        arriving = self.arriving[key] = Arriving()
        try:
            # Before the request: a transfer without memory must not take a turn at the source.
            space = await self.spilling.reserve(size)
            segment = self.store.create(size, 0, writer_of(key), self.node_id, space)
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
        """Notify the node of a value's owner that there is a whole copy of it here.

        It frees the copy with the value. If a small value was written by its owner's node, that
        node has already recorded this one, and is the only source.
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
    #: The segment that is filled.
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
        """The value's bytes, if they come with the answer; else 0."""
        return self.segment.size if self.segment.size <= piece_size() else 0

    async def _ask(self, tried: Sequence[bytes]) -> tuple[ValueAnswer, bytes]:
        """Request the value, or a node to copy it from, from the node of its owner."""
        origin, _, home = self.key
        of, small = self.of, self._small > 0
        if small and origin not in tried and of.relay.knows(origin):
            return ValueAnswer(ask=origin), b""  # it gives a small value to all requesters at once
        if home != of.node_id:
            return await self._fetch(home, tried)
        try:
            return ValueAnswer(ask=of.directory.ask(self.key, home, tried, small=small)), b""
        except LookupError as error:
            raise RequestRefusedError(str(error)) from None

    async def _fetch(
        self, node_id: bytes, tried: Sequence[bytes] = (), limit: float | None = None
    ) -> tuple[ValueAnswer, bytes]:
        """Request the value from a node that has it, or from the node of its owner."""
        of, size = self.of, self._small
        arguments = (*self.key, tuple(tried), of.relay.can_dial(node_id), size)
        asked = of.requests.ask(node_id, "fetch", *arguments, size=size, limit=limit)
        answer, beginning = await asked
        return ValueAnswer(*answer), beginning

    async def _take(
        self, source: bytes, answer: ValueAnswer, beginning: bytes, limit: float | None
    ) -> None:
        """Take the rest of the value from a node that gives it."""
        size, arriving = self.segment.size, self.arriving
        if answer.size != size:
            raise BrokenTransferError(f"it has {answer.size} bytes there, and not {size}")
        self.of.store.take_form(self.segment, answer.form)
        if answer.mover and answer.mover not in self.of.unreached:
            await self._take_from_mover(answer.mover)
        if not arriving.offset:
            arriving.begin()
        if len(beginning) > size - arriving.offset:  # there is no memory for that
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
        """Let the movers of the two nodes carry it, until the end or their failure."""
        of, segment, arriving = self.of, self.segment, self.arriving
        before = arriving.offset
        hello = HELLO.pack(*self.key, before, of.node_id)
        move: Move | None = None
        try:
            move = of.mover.fetch(address, hello, segment.fd, before, segment.size, arriving.came)
            arriving.begin(move.number)  # its waiters may pass on what comes
            await move.whole()
        except MoveError as error:
            if arriving.offset == before and not isinstance(error, (MoverDiedError, RefusedError)):
                of.unreached.add(address)
                again = of.unreached.discard
                asyncio.get_running_loop().call_later(_WITHOUT_MOVER, again, address)
        finally:
            arriving.job = 0
            if move is not None:
                await move.stop()


def _lost(key: Key, why: str) -> ObjectLostError:
    return ObjectLostError(f"segment {segment_of(key)}", why)


# --- requests for copies ----------------------------------------------------------------------
@dataclasses.dataclass(slots=True, eq=False, repr=False)
class Waiter:
    """One request of a process for a copy."""

    name: _Name
    key: Key
    size: int
    #: The copy, mapped for the process if it wants that.
    segment: asyncio.Future[Segment]
    #: Whether the copy is mapped for the process when it is here.
    maps: bool
    #: Its transfer, while that is on.
    pull: _Pull | None = None


@dataclasses.dataclass(slots=True, eq=False, repr=False)
class _Pull:
    """One transfer and its waiters."""

    key: Key
    size: int
    #: Whether it was begun for `wait`.
    ahead: bool
    task: asyncio.Task[None] = dataclasses.field(init=False)
    waiters: set[Waiter] = dataclasses.field(default_factory=set)


@dataclasses.dataclass(eq=False, repr=False)
class Pulls:
    """All requests for copies."""

    #: Brings them.
    transfers: Transfers
    #: Where a copy is added when it is whole, and the store that it is in.
    copies: Copies

    def __post_init__(self) -> None:
        self._store = self.copies.store
        self._pulls: dict[Key, _Pull] = {}
        #: Bytes of these, and of the ones that were begun for `wait`.
        self._moving = self._ahead = 0
        #: By process and number of its request.
        self._waiters: dict[_Name, Waiter] = {}
        #: Requests of `wait` that wait for their turn, first in, first out.
        self._queue: dict[_Name, Waiter] = {}
        self._tasks: set[asyncio.Task[None]] = set()

    def __len__(self) -> int:
        return len(self._pulls)

    @property
    def waiting(self) -> int:
        """The number of requests."""
        return len(self._waiters)

    # --- requesters ---------------------------------------------------------------
    def wait(self, key: Key, size: int, process_id: bytes, request: int) -> asyncio.Future[Segment]:
        """Have a process wait for a copy, which is mapped for it when it is here.

        Args:
            key: Of a value that has no copy here.
            size: Bytes of the segment.
            process_id: The process that waits.
            request: A number of its own, for ``withdraw``.
        """
        waiter = self._add(key, size, (process_id, request), maps=True)
        self._begin(waiter)
        return waiter.segment

    def prefetch(self, process_id: bytes, request: int, key: Key, size: int) -> None:
        """Fetch an argument of a call that has arrived, if the other values can stay in memory.

        Else it is fetched when the call reads it.
        """
        free = self._store.capacity * config().spill_threshold - self._store.used - self._moving
        if key in self._pulls or (size <= free and self.copies.find(key) is None):
            self._begin(self._add(key, size, (process_id, request), maps=False))

    async def fetch(self, process_id: bytes, request: int, key: Key, size: int) -> None:
        """Fetch a value that a process wants here; returns when it is.

        Raises:
            ObjectLostError: It, or its node, is gone, or the process has withdrawn.
            ObjectStoreFullError: There is no memory for a copy.
        """
        waiter = self._add(key, size, (process_id, request), maps=False)
        self._queue[waiter.name] = waiter
        self._begin_next()
        await waiter.segment

    def _add(self, key: Key, size: int, name: _Name, *, maps: bool) -> Waiter:
        came: asyncio.Future[Segment] = asyncio.get_running_loop().create_future()
        came.add_done_callback(_retrieve)
        waiter = self._waiters[name] = Waiter(name, key, size, came, maps)
        return waiter

    def _begin_next(self) -> None:
        """Begin fetches for `wait` up to the limit of bytes in flight; at least one."""
        while self._queue:
            name, waiter = next(iter(self._queue.items()))
            number = self.copies.find(waiter.key)
            if number is not None:  # it came while this waited for its turn
                self._forget(waiter)
                waiter.segment.set_result(self._store.get(number))
                continue
            beyond = self._ahead + waiter.size > self._store.capacity // _SHARE
            if beyond and self._ahead and waiter.key not in self._pulls:
                return
            del self._queue[name]
            self._begin(waiter, ahead=True)

    def _begin(self, waiter: Waiter, *, ahead: bool = False) -> None:
        """Have a request share the transfer of its value; the first begins it."""
        key = waiter.key
        assert self.copies.find(key) is None  # a second one would never be freed
        pull = self._pulls.get(key)
        if pull is None:
            pull = self._pulls[key] = _Pull(key, waiter.size, ahead)
            self._moving += pull.size
            self._ahead += pull.size * ahead
            pull.task = run_in(self._tasks, self._run(pull))
        waiter.pull = pull
        pull.waiters.add(waiter)

    # --- requests that end --------------------------------------------------------
    def withdraw(self, process_id: bytes, request: int) -> None:
        """Forget a request: the process has the value, or no longer wants it."""
        waiter = self._waiters.get((process_id, request))
        if waiter is not None:
            self._lose(waiter, "the request was withdrawn")

    def process_died(self, process_id: bytes) -> None:
        """Forget the requests of a process that is gone."""
        for waiter in [each for each in self._waiters.values() if each.name[0] == process_id]:
            self._lose(waiter, "the process that requested it has ended")

    def lose(self, key: Key, reason: str) -> None:
        """Fail all requests for a value with a reason."""
        pull = self._pulls.get(key)
        if pull is not None:
            for waiter in list(pull.waiters):
                self._lose(waiter, reason)

    def node_died(self, node_id: bytes) -> None:
        """Fail all requests for values whose owners were on a node."""
        for key in list(self._pulls):
            if home_of(key) == node_id:
                self.lose(key, f"node {node_id.hex()} is gone")

    def _lose(self, waiter: Waiter, reason: str) -> None:
        self._fail(waiter, ObjectLostError(f"segment {segment_of(waiter.key)}", reason))

    def _fail(self, waiter: Waiter, error: Exception) -> None:
        """Forget a request; the last one's transfer ends with it."""
        pull = waiter.pull
        self._forget(waiter)
        if not waiter.segment.done():
            waiter.segment.set_exception(error)
        if pull is not None and not pull.waiters and self._over(pull):
            pull.task.cancel()

    def _forget(self, waiter: Waiter) -> None:
        del self._waiters[waiter.name]
        self._queue.pop(waiter.name, None)
        if waiter.pull is not None:
            waiter.pull.waiters.discard(waiter)

    # --- transfers ----------------------------------------------------------------
    def _over(self, pull: _Pull) -> bool:
        """Count a transfer off, so that another may begin; return False if it was before."""
        if self._pulls.get(pull.key) is not pull:
            return False
        del self._pulls[pull.key]
        self._moving -= pull.size
        self._ahead -= pull.size * pull.ahead
        asyncio.get_running_loop().call_soon(self._begin_next)
        return True

    async def _run(self, pull: _Pull) -> None:
        try:
            segment = await self.transfers.copy(pull.key, pull.size)
        except asyncio.CancelledError:
            what = f"segment {segment_of(pull.key)}"
            self._end(pull, ObjectLostError(what, "its transfer was ended"))
            raise
        except Exception as error:  # noqa: BLE001 - it is the answer to all requests
            self._end(pull, error)
            return
        self._store.seal(segment.number)
        if self._over(pull):
            self._arrived(pull, segment)
        else:
            self._store.free(segment.number)  # all requesters have left

    def _arrived(self, pull: _Pull, segment: Segment) -> None:
        self.copies.add(pull.key, segment.number)
        for waiter in list(pull.waiters):
            self._forget(waiter)
            if waiter.segment.done():  # its requester was cancelled
                continue
            if waiter.maps:  # at once: its owner may free it before the waiter goes on
                self._store.map(segment.number, waiter.name[0])
            waiter.segment.set_result(segment)
        self.transfers.copied(pull.key, segment.size)

    def _end(self, pull: _Pull, error: Exception) -> None:
        self._over(pull)
        for waiter in list(pull.waiters):
            self._fail(waiter, error)


def _retrieve(future: asyncio.Future[Segment]) -> None:
    """Read the result, as its requester may be gone."""
    if not future.cancelled():
        future.exception()
