"""Objects on their way to this node, piece by piece.

The node that wants an object fetches it from the node that has it, or from one that it is sent
to instead, which has a copy or is getting one (``serving.py``). A node that cannot be dialled,
because it only dials out, is asked over the relay to push (``pushes.py``). What breaks on the way
goes on where it was.
"""

from __future__ import annotations

import asyncio
import contextlib
from typing import TYPE_CHECKING

from miniray._proto import node_pb2
from miniray.common.config import config
from miniray.exceptions import ObjectLostError
from miniray.node.base.tasks import ended
from miniray.node.relay import relayed as r
from miniray.node.relay.relayed import Relayed
from miniray.node.store.spill_files import DiskPlace
from miniray.node.transfer.arriving import Arriving, BrokenTransferError
from miniray.node.transfer.copies import Owner
from miniray.node.transfer.fetch_streams import FetchStreams
from miniray.node.transfer.mover_client import Move, MoveError, MoverDiedError
from miniray.node.transfer.moving import write_all
from miniray.node.transfer.other_copies import OtherCopies
from miniray.node.transfer.pushes import Pushes

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, AsyncIterator

    from miniray.node.relay.relay import RelayHub
    from miniray.node.store.admission_queue import Claim
    from miniray.node.store.segments import Segment, SegmentStore
    from miniray.node.store.spilling import Spilling
    from miniray.node.transfer.arriving import Key
    from miniray.node.transfer.fetch_streams import Fetch
    from miniray.node.transfer.mover_client import MoverClient

#: Times that a transfer is resumed without having moved on, before it is given up.
_RESUMES = 5
#: Seconds for which large values come through the daemon after a mover was out of reach.
_WITHOUT_MOVER = 60.0


class _NotServedError(Exception):
    """A node that the origin named has not served; the origin has to name another."""


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
        #: Movers of other nodes that were out of reach, and when to try them again.
        self._unreached: dict[bytes, tuple[str, float]] = {}
        #: What is on its way.
        self.arriving: dict[Key, Arriving] = {}
        self._from_origins = FetchStreams()
        #: Copies come from these: if one cannot be reached, the origin names another.
        self._from_holders = FetchStreams(waits=False)
        #: What comes from nodes that this one cannot dial.
        self.pushes = Pushes(relay)
        #: Where to go on when the node of a segment is gone.
        self.others = OtherCopies(relay)

    def table_sizes(self) -> dict[str, int]:
        """How many entries each table has; all are empty when nothing moves."""
        return {
            "arriving": len(self.arriving),
            "fetches": len(self._from_origins) + len(self._from_holders),
            "expected": len(self.pushes),
        }

    def node_died(self, node_id: bytes) -> None:
        """A node is gone."""
        self._unreached.pop(node_id, None)
        self._from_origins.node_died(node_id)
        self._from_holders.node_died(node_id)
        self.node_unreachable(node_id)

    def node_unreachable(self, node_id: bytes) -> None:
        """Messages to or from a node were lost."""
        self.pushes.node_unreachable(node_id)
        self.others.node_unreachable(node_id)

    async def close(self) -> None:
        """The node ends; nothing more comes."""
        await self._from_origins.close()
        await self._from_holders.close()

    async def copy(self, node_id: bytes, number: int, claim: Claim) -> tuple[Segment, Owner, Key]:
        """Read a segment of another node into one of this node, which is not sealed yet.

        Args:
            node_id: The other node.
            number: Of the segment there.
            claim: Room of its size.

        Returns:
            The copy, who owns the value, and of which segment it is a copy: of another one of
            the same value if the node has died on the way.

        Raises:
            ObjectLostError: it, or its node, is gone, or does not answer.
            ObjectStoreFullError: there is no room for a copy.
        """
        key = (node_id, number)
        arriving = self.arriving[key] = Arriving(node_id)
        size = claim.size
        try:
            # Before anything is asked: who waits for room must not take others' turn over there.
            room = await self._spilling.room_for(claim)
            # Until it is whole it is this daemon's: it may outlive its node.
            owner = self._node_id
            if isinstance(room, DiskPlace):
                segment = self._store.create_on_disk(room, 0, owner, owner)
            else:
                segment = self._store.create(size, 0, owner, owner, room)
            arriving.segment = segment
            source = await self._fill(segment, key, arriving)
        except BaseException:
            if arriving.segment is not None:
                self._store.seal(arriving.segment.number)
                self._store.free(arriving.segment.number)
            raise
        finally:
            arriving.end()
            if self.arriving.get(key) is arriving:
                del self.arriving[key]
        if not self._relay.send(source[0], Relayed(notice=r.COPIED, items=(source[1],))):
            source = key  # that node is gone too, and has told nobody of this copy
        return segment, arriving.owner, source

    async def _fill(self, segment: Segment, key: Key, arriving: Arriving) -> Key:
        """Try until all of it is here; returns the segment that it came from in the end."""
        resumes = 0
        while True:
            before = arriving.offset
            try:
                if before and not self._relay.knows(key[0]):
                    return await self._from_copy(segment, key, arriving)
                await self._from_origin(segment, key, arriving)
            except _NotServedError:
                continue  # there are only so many nodes, and none is named twice
            except BrokenTransferError as error:
                # While the head has not given the node up, only the connection broke.
                resumes = resumes + 1 if arriving.offset == before else 0
                if resumes > _RESUMES:
                    raise ObjectLostError(
                        f"segment {key[1]}",
                        f"its transfer from node {key[0].hex()} failed: {error}",
                    ) from None
            else:
                return key

    async def _from_copy(self, segment: Segment, gone: Key, arriving: Arriving) -> Key:
        """Go on from a copy of a segment whose node has died on the way, as from its own node."""
        key = await self.others.find(gone, arriving.useless)
        if key is None:
            raise ObjectLostError(f"segment {gone[1]}", f"node {gone[0].hex()} is gone")
        arriving.tried.clear()
        self.arriving.setdefault(key, arriving)  # others may be sent here for that one
        try:
            while True:
                with contextlib.suppress(_NotServedError):
                    await self._from_origin(segment, key, arriving)
                    return key
        except (BrokenTransferError, ObjectLostError) as error:
            if isinstance(error, BrokenTransferError) and self._relay.knows(key[0]):
                raise
            arriving.useless.add(key)
            raise _NotServedError from error
        finally:
            if self.arriving.get(key) is arriving:
                del self.arriving[key]

    async def _from_origin(self, segment: Segment, key: Key, arriving: Arriving) -> None:
        """Ask the node of a segment, and go where it says."""
        arriving.feeder = key[0]
        async with contextlib.aclosing(self._pieces(key, arriving)) as pieces:
            head = node_pb2.ObjectHead.FromString(await anext(pieces, b""))
            if not head.ask:
                await self._take(head, pieces, segment, arriving)
                return
            # The origin counts this node among those that the other one serves until the call
            # to the origin ends, which stays open meanwhile.
            arriving.feeder = head.ask
            try:
                await self._from_holder(head.ask, segment, key, arriving)
            except (BrokenTransferError, ObjectLostError) as error:
                arriving.tried.append(head.ask)
                raise _NotServedError from error

    async def _from_holder(
        self, holder: bytes, segment: Segment, key: Key, arriving: Arriving
    ) -> None:
        """Copy from a node that is not the segment's own."""
        channel = self._relay.channel(holder)
        if channel is None:
            raise BrokenTransferError("it cannot be dialled")
        request = self._request(holder, key, arriving)
        pieces = self._from_holders.fetch(holder, channel, request)
        pieces.limit = config().transfer_stall
        async with contextlib.aclosing(pieces):
            head = node_pb2.ObjectHead.FromString(await anext(pieces, b""))
            if head.move:
                pieces.limit = None  # it says no more until the movers are done
            await self._take(head, pieces, segment, arriving)

    async def _take(
        self,
        head: node_pb2.ObjectHead,
        pieces: AsyncIterator[bytes],
        segment: Segment,
        arriving: Arriving,
    ) -> None:
        """Take what follows the first word.

        Args:
            head: The first word.
            pieces: What follows.
            segment: Where it goes.
            arriving: How much is there.
        """
        size = segment.size
        if not head.size:
            raise BrokenTransferError("no answer came")
        if head.size != size:
            raise BrokenTransferError(f"it has {head.size} bytes there, and not {size}")
        segment.form = head.form
        if head.move:
            await self._take_from_mover(head, pieces, segment, arriving)
            return
        arriving.begin(Owner(head.owner, head.owner_node))
        async for piece in pieces:
            if arriving.offset + len(piece) > size:  # nobody made room for that
                raise BrokenTransferError(f"more than its {size} bytes came")
            write_all(segment.fd, piece, arriving.offset)
            arriving.came(len(piece))
        if arriving.offset < size:  # how a stream looks whose other end was cut off
            raise BrokenTransferError(f"{arriving.offset} of {size} bytes came")

    async def _take_from_mover(
        self,
        head: node_pb2.ObjectHead,
        call: AsyncIterator[bytes],
        segment: Segment,
        arriving: Arriving,
    ) -> None:
        """Let the movers of the two nodes carry it, while the call between them holds."""
        before = arriving.offset
        try:
            move = self._mover.fetch(
                head.mover, head.move, segment.fd, before, segment.size, arriving.came
            )
        except MoveError as error:
            self._without_mover(arriving.feeder, head.mover)
            raise BrokenTransferError(str(error)) from None
        # Who waits for the first word may pass on what comes.
        arriving.job = move.number
        arriving.begin(Owner(head.owner, head.owner_node))
        watching = asyncio.ensure_future(_consume(call))
        try:
            await self._watch(move, watching, arriving)
        except MoveError as error:
            if arriving.offset == before and not isinstance(error, MoverDiedError):
                self._without_mover(arriving.feeder, head.mover)
            raise BrokenTransferError(str(error)) from None
        finally:
            arriving.job = 0
            watching.cancel()
            try:
                await move.stop()
            finally:
                await ended(watching)

    async def _watch(self, move: Move, watching: asyncio.Future[None], arriving: Arriving) -> None:
        """Wait for what the movers carry, and raise why it does not go on."""
        stall = config().transfer_stall
        while not move.ended.done():
            seen = arriving.offset
            parts = {move.ended} if watching.done() else {move.ended, watching}
            done, _ = await asyncio.wait(parts, timeout=stall, return_when=asyncio.FIRST_COMPLETED)
            if watching.done():
                watching.result()  # raises what broke the call
            if not done and arriving.offset == seen:
                raise MoveError(f"nothing came for {stall} s")
        move.ended.result()

    def _without_mover(self, node_id: bytes, address: str) -> None:
        """The mover of a node is out of reach."""
        again = asyncio.get_running_loop().time() + _WITHOUT_MOVER
        self._unreached[node_id] = (address, again)

    # --- asking --------------------------------------------------------------------
    def _pieces(self, key: Key, arriving: Arriving) -> Fetch | AsyncGenerator[bytes, None]:
        """An ``ObjectHead`` as bytes, then the bytes that are not here yet."""
        channel = self._relay.channel(key[0])
        if channel is not None:
            return self._from_origins.fetch(key[0], channel, self._request(key[0], key, arriving))
        return self.pushes.ask(key, arriving)

    def _request(self, node_id: bytes, key: Key, arriving: Arriving) -> node_pb2.FetchRequest:
        return node_pb2.FetchRequest(
            origin=key[0],
            segment=key[1],
            offset=arriving.offset,
            node_id=self._node_id,
            tried=arriving.tried,
            unreached=self._unreached_at(node_id),
        )

    def _unreached_at(self, node_id: bytes) -> str:
        """The mover of a node that could not be reached in the last minute, or nothing."""
        address, again = self._unreached.get(node_id, ("", 0.0))
        if address and asyncio.get_running_loop().time() >= again:
            del self._unreached[node_id]
            return ""
        return address


async def _consume(pieces: AsyncIterator[bytes]) -> None:
    """Wait for the end of a call that says no more."""
    async for _ in pieces:
        pass
