"""Values on their way to this node.

The node that wants a value asks the node that has it. That one gives it, or names another node
that has a copy or is getting one (``serving.py``). A small value comes with the answer. A large
one comes by the movers of the two nodes; without them, and from where they have failed, it is
read in pieces.
"""

from __future__ import annotations

import asyncio
import collections
import itertools
import sys
from typing import TYPE_CHECKING

from miniray.common.config import config
from miniray.exceptions import ObjectLostError
from miniray.node.relay import relayed as r
from miniray.node.relay.relayed import Relayed
from miniray.node.store.copies import Owner
from miniray.node.store.spill_files import DiskPlace
from miniray.node.transfer.arriving import Arriving, BrokenTransferError
from miniray.node.transfer.mover_client import MoveError, MoverDiedError
from miniray.node.transfer.moving import write_all
from miniray.node.transfer.requests import ValueRequests, piece_size

if TYPE_CHECKING:
    from miniray.node.relay.relay import RelayHub
    from miniray.node.store.admission_queue import Claim
    from miniray.node.store.copies import Key
    from miniray.node.store.segments import Segment, SegmentStore
    from miniray.node.store.spilling import Spilling
    from miniray.node.transfer.mover_client import Move, MoverClient
    from miniray.node.transfer.requests import ValueAnswer

#: Times that a transfer is resumed without having moved on, before it is given up.
_RESUMES = 5
#: Seconds for which a mover that was out of reach is not tried again.
_WITHOUT_MOVER = 60.0
#: Pieces of one value that are asked for ahead of what has come.
_AHEAD = 2


class Transfers:
    """The receiving end of all transfers to this node."""

    def __init__(
        self,
        node_id: bytes,
        store: SegmentStore,
        spilling: Spilling,
        relay: RelayHub,
        mover: MoverClient,
    ) -> None:
        self._node_id = node_id
        self._store = store
        self._spilling = spilling
        self._relay = relay
        self._mover = mover
        #: Addresses of movers that were out of reach a moment ago.
        self._unreached: set[str] = set()
        #: What is on its way.
        self.arriving: dict[Key, Arriving] = {}
        self._requests = ValueRequests(relay)

    def table_sizes(self) -> dict[str, int]:
        """How many entries each table has; all are empty when nothing moves."""
        return {"arriving": len(self.arriving), "fetches": len(self._requests)}

    def node_unreachable(self, node_id: bytes) -> None:
        """Ask again for what was asked of a node to or from which messages were lost."""
        self._requests.node_unreachable(node_id)

    async def copy(self, key: Key, claim: Claim) -> tuple[Segment, Owner]:
        """Read a segment of another node into one of this node, which is not sealed yet.

        Args:
            key: The segment.
            claim: Room of its size.

        Returns:
            The copy, and who owns the value.

        Raises:
            ObjectLostError: It, or its node, is gone, or does not answer.
            ObjectStoreFullError: There is no room for a copy.
        """
        while (given_up := self.arriving.get(key)) is not None:
            await given_up.reached(sys.maxsize)
        arriving = self.arriving[key] = Arriving()
        is_large = claim.size > piece_size()
        try:
            # Before anything is asked: who waits for room must not take others' turn over there.
            room = await self._spilling.room_for(claim)
            # Until it is whole it is this daemon's: it may outlive its node.
            owner = self._node_id
            if isinstance(room, DiskPlace):
                segment = self._store.create_on_disk(room, 0, owner, owner)
            else:
                segment = self._store.create(claim.size, 0, owner, owner, room)
            arriving.segment = segment
            await self._fill(segment, key, arriving)
        except BaseException:
            if is_large:
                self._end(key[0], key)
            if arriving.segment is not None:
                self._store.seal(arriving.segment.number)
                self._store.free(arriving.segment.number)
            raise
        finally:
            del self.arriving[key]
            arriving.end()
        if is_large:
            self._relay.send(key[0], Relayed(notice=r.COPIED, items=(key[1],)))
        return segment, arriving.owner

    def _end(self, node_id: bytes, key: Key) -> None:
        """Tell a node that a large value is fetched from there no more."""
        self._relay.send(node_id, Relayed(notice=r.FETCH_ENDED, items=key))

    async def _fill(self, segment: Segment, key: Key, arriving: Arriving) -> None:
        """Try until all of it is here."""
        origin = key[0]
        tried: list[bytes] = []
        resumes = 0
        while True:
            before = arriving.offset
            try:
                answer, beginning = await self._requests.fetch(
                    origin,
                    key,
                    segment.size if segment.size <= piece_size() else 0,
                    tried,
                    by_mover=self._relay.can_dial(origin),
                )
                if not answer.ask:
                    await self._take(origin, answer, beginning, segment, key, arriving)
                    return
            except BrokenTransferError as error:
                # While the head has not given the node up, only the connection broke.
                resumes = resumes + 1 if arriving.offset == before else 0
                gone = not self._relay.knows(origin)
                if gone or resumes > _RESUMES:
                    failed = f"its transfer from node {origin.hex()} failed: {error}"
                    reason = f"node {origin.hex()} is gone" if gone else failed
                    raise ObjectLostError(f"segment {key[1]}", reason) from None
                continue
            # There are only so many nodes, and none is named twice.
            tried.append(answer.ask)
            if await self._from_holder(answer.ask, segment, key, arriving):
                return

    async def _from_holder(
        self, holder: bytes, segment: Segment, key: Key, arriving: Arriving
    ) -> bool:
        """Copy from a node that is not the segment's own; False if it does not serve."""
        limit = config().transfer_stall
        try:
            answer, beginning = await self._requests.fetch(
                holder, key, 0, by_mover=self._relay.can_dial(holder), limit=limit
            )
            await self._take(holder, answer, beginning, segment, key, arriving, limit=limit)
        except (BrokenTransferError, ObjectLostError):
            return False
        finally:
            self._end(holder, key)
        return True

    async def _take(
        self,
        source: bytes,
        answer: ValueAnswer,
        beginning: bytes,
        segment: Segment,
        key: Key,
        arriving: Arriving,
        *,
        limit: float | None = None,
    ) -> None:
        """Take a value from a node that gives it, from where it is here on."""
        size = segment.size
        if answer.size != size:
            raise BrokenTransferError(f"it has {answer.size} bytes there, and not {size}")
        segment.form = answer.form
        owner = Owner(answer.owner, answer.owner_node)
        if answer.mover and answer.mover not in self._unreached:
            await self._take_from_mover(answer, owner, segment, arriving)
        if not arriving.offset:
            arriving.begin(owner)
        if len(beginning) > size - arriving.offset:  # nobody made room for that
            raise BrokenTransferError(f"more than its {size} bytes came")
        if beginning:
            write_all(segment.fd, beginning, arriving.offset)
            arriving.came(len(beginning))
        await self._read_rest(source, segment, key, arriving, limit)

    async def _read_rest(
        self,
        source: bytes,
        segment: Segment,
        key: Key,
        arriving: Arriving,
        limit: float | None,
    ) -> None:
        """Read in pieces what is not here yet."""
        size, step = segment.size, piece_size()
        offsets = iter(range(arriving.offset, size, step))
        reads: collections.deque[asyncio.Task[bytes]] = collections.deque()
        try:
            while arriving.offset < size:
                for offset in itertools.islice(offsets, _AHEAD - len(reads)):
                    length = min(step, size - offset)
                    read = self._requests.read(source, key, offset, length, limit)
                    reads.append(asyncio.ensure_future(read))
                piece = await reads[0]
                reads.popleft()
                write_all(segment.fd, piece, arriving.offset)
                arriving.came(len(piece))
        finally:
            for left in reads:
                left.cancel()
            await asyncio.gather(*reads, return_exceptions=True)

    async def _take_from_mover(
        self, answer: ValueAnswer, owner: Owner, segment: Segment, arriving: Arriving
    ) -> None:
        """Let the movers of the two nodes carry it, as far as they do."""
        before = arriving.offset
        move: Move | None = None
        try:
            move = self._mover.fetch(
                answer.mover, answer.ticket, segment.fd, before, segment.size, arriving.came
            )
            arriving.begin(owner, move.number)  # who waits for that may pass on what comes
            await self._watch(move, arriving)
        except MoveError as error:
            if arriving.offset == before and not isinstance(error, MoverDiedError):
                self._unreached.add(answer.mover)
                again = self._unreached.discard
                asyncio.get_running_loop().call_later(_WITHOUT_MOVER, again, answer.mover)
        finally:
            arriving.job = 0
            if move is not None:
                await move.stop()

    async def _watch(self, move: Move, arriving: Arriving) -> None:
        """Wait for what the movers carry, and raise why it does not go on."""
        stall = config().transfer_stall
        while not move.ended.done():
            seen = arriving.offset
            done, _ = await asyncio.wait({move.ended}, timeout=stall)
            if not done and arriving.offset == seen:
                raise MoveError(f"nothing came for {stall} s")
        move.ended.result()
