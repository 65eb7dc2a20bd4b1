"""Objects for the processes of this node: room to write, segments to map, copies from elsewhere."""

from __future__ import annotations

import asyncio
import logging
import os
from typing import TYPE_CHECKING

import grpc

from miniray._proto import node_pb2
from miniray.config import config
from miniray.exceptions import ObjectLostError
from miniray.node.relayed import Relayed
from miniray.node.services import fetch

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Iterable

    from miniray.node.relay import RelayHub
    from miniray.node.segments import Segment, SegmentStore

logger = logging.getLogger(__name__)

#: Times that a transfer is resumed without having moved on, before it is given up.
_RESUMES = 5


class _Pull:
    """One transfer on its way, and who waits for it."""

    def __init__(self) -> None:
        self.task: asyncio.Task[Segment]
        #: Processes that map the copy when it is there.
        self.mappers: list[bytes] = []
        #: The owner freed the value meanwhile: who waits may still read it, nobody else.
        self.freed = False


class NodeObjects:
    """The store of this node and its traffic with others."""

    def __init__(self, node_id: bytes, store: SegmentStore, relay: RelayHub) -> None:
        self.node_id = node_id
        self.store = store
        self._relay = relay
        #: Copies of segments of other nodes: (node, segment there) → segment here.
        self._copies: dict[tuple[bytes, int], int] = {}
        #: Copies on their way; many who wait share one transfer.
        self._pulls: dict[tuple[bytes, int], _Pull] = {}
        #: Which nodes have copies of a segment of this node.
        self._copied_to: dict[int, set[bytes]] = {}
        #: Owners of segments here that are on other nodes, or are those nodes' daemons.
        self._remote_owners: dict[bytes, bytes] = {}

    # --- writing -----------------------------------------------------------------
    def create(
        self, size: int, form: int, owner: bytes, owner_node: bytes, creator: bytes
    ) -> Segment:
        """Room for a value that a process of any node owns.

        Raises:
            ObjectStoreFullError: there is no room.
        """
        segment = self.store.create(size, form, owner, creator)
        if owner_node != self.node_id and owner not in self._remote_owners:
            watch = Relayed(to=owner, sender=self.node_id, watch=True)
            if self._relay.send(owner_node, watch):
                self._remote_owners[owner] = owner_node
            else:
                self.store.free(segment.number)  # nobody will: its owner went with its node
        return segment

    def adopt(self, number: int, node_id: bytes) -> None:
        """A node's daemon answers for a segment of this node, whose owner ends by rule."""
        self.store.change_owner(number, node_id)
        if node_id != self.node_id:
            self._remote_owners[node_id] = node_id

    def left_to(self, node_id: bytes, number: int) -> None:
        """A process of this node leaves a segment of any node to this daemon."""
        if node_id == self.node_id:
            self.adopt(number, node_id)
        else:
            self._relay.send(node_id, Relayed(adopted=(number,)))

    # --- reading -----------------------------------------------------------------
    async def map(self, node_id: bytes, number: int, size: int, mapper: bytes) -> Segment:
        """A segment of any node, mapped here by a process of this node.

        Raises:
            ObjectLostError: it, or its node, is gone.
            ObjectStoreFullError: there is no room for a copy.
        """
        if node_id == self.node_id:
            return self.store.map(number, mapper)
        key = (node_id, number)
        local = self._copies.get(key)
        if local is not None:
            return self.store.map(local, mapper)
        pull = self._pulls.get(key)
        if pull is None:
            pull = self._pulls[key] = _Pull()
            pull.task = asyncio.get_running_loop().create_task(self._pull(key, size, pull))
            pull.task.add_done_callback(_retrieve)
        pull.mappers.append(mapper)
        try:
            return await asyncio.shield(pull.task)
        except asyncio.CancelledError:
            if not pull.task.cancelled():
                raise  # it is this request that was cancelled
            # The node died before the transfer had begun.
            self._pulls.pop(key, None)
            raise ObjectLostError(f"segment {number}", f"node {node_id.hex()} is gone") from None

    async def _pull(self, key: tuple[bytes, int], size: int, pull: _Pull) -> Segment:
        """Copy a segment of another node into this one and map it for who waits."""
        try:
            segment = await self._transfer(key, size)
        except asyncio.CancelledError:
            raise ObjectLostError(f"segment {key[1]}", f"node {key[0].hex()} is gone") from None
        finally:
            del self._pulls[key]
        self.store.seal(segment.number)
        for mapper in pull.mappers:
            self.store.map(segment.number, mapper)
        if pull.freed:
            self.store.free(segment.number)
        else:
            self._copies[key] = segment.number
        return segment

    async def _transfer(self, key: tuple[bytes, int], size: int) -> Segment:
        """Read a segment of another node into one of this node, which is not sealed yet."""
        node_id, number = key
        segment: Segment | None = None
        offset = resumes = 0
        try:
            while True:
                before = offset
                try:
                    pieces = self._fetch(node_id, number, offset)
                    head = node_pb2.ObjectHead.FromString(await anext(pieces, b""))
                    if segment is None:
                        segment = self.store.create(size, head.form, node_id, self.node_id)
                    async for piece in pieces:
                        _write(segment.fd, piece, offset)
                        offset += len(piece)
                except grpc.aio.AioRpcError as error:
                    # While the head has not given the node up, only the connection broke.
                    resumes = resumes + 1 if offset == before else 0
                    if error.code() is not grpc.StatusCode.UNAVAILABLE or resumes > _RESUMES:
                        raise ObjectLostError(
                            f"segment {number}",
                            f"its transfer from node {node_id.hex()} failed: {error.details()}",
                        ) from None
                    continue
                if segment is None or offset != size:
                    raise ObjectLostError(
                        f"segment {number}", f"node {node_id.hex()} sent {offset} of {size} bytes"
                    )
                return segment
        except BaseException:
            if segment is not None:
                self.store.seal(segment.number)
                self.store.free(segment.number)
            raise

    async def _fetch(self, node_id: bytes, number: int, offset: int) -> AsyncGenerator[bytes, None]:
        """The pieces of a segment of another node; waits while that cannot be reached."""
        channel = self._relay.channel(node_id)
        if channel is None:
            raise ObjectLostError(f"segment {number}", f"node {node_id.hex()} is gone")
        request = node_pb2.FetchRequest(segment=number, offset=offset, node_id=self.node_id)
        call = fetch(channel, request)
        try:
            async for chunk in call:
                yield chunk
        finally:
            call.cancel()

    async def serve(self, request: node_pb2.FetchRequest) -> AsyncGenerator[bytes, None]:
        """The Fetch RPC: a segment of this node in pieces."""
        segment = self.store.map(request.segment, request.node_id)
        try:
            self._copied_to.setdefault(request.segment, set()).add(request.node_id)
            yield node_pb2.ObjectHead(size=segment.size, form=segment.form).SerializeToString()
            offset = request.offset
            while offset < segment.size:
                length = min(config().transfer_chunk, segment.size - offset)
                piece = os.pread(segment.fd, length, offset)
                offset += len(piece)
                yield piece
        finally:
            self.store.unmap([request.segment], request.node_id)

    # --- freeing -----------------------------------------------------------------
    def free(self, node_id: bytes, number: int) -> None:
        """The owner, a process of this node, freed a segment of any node."""
        if node_id == self.node_id:
            self.free_here([number])
        else:
            self._relay.send(node_id, Relayed(freed=(number,)))

    def free_here(self, numbers: Iterable[int]) -> None:
        """Segments of this node were freed by their owners."""
        for number in numbers:
            self.store.free(number)
            self._free_copies_of(number)

    def _free_copies_of(self, number: int) -> None:
        for node in self._copied_to.pop(number, ()):
            self._relay.send(node, Relayed(freed_copies=(number,)))

    def free_copies(self, node_id: bytes, numbers: Iterable[int]) -> None:
        """Segments of another node were freed: so are their copies here."""
        for number in numbers:
            key = (node_id, number)
            local = self._copies.pop(key, None)
            if local is not None:
                self.store.free(local)
            elif key in self._pulls:
                self._pulls[key].freed = True

    def node_died(self, node_id: bytes) -> None:
        """A node is gone: what it sent, and what its processes owned here.

        Copies of its segments serve those who have them mapped, no others.
        """
        for key, pull in self._pulls.items():
            if key[0] == node_id:
                pull.task.cancel()
        for key in [key for key in self._copies if key[0] == node_id]:
            self.store.free(self._copies.pop(key))
        for owner in [owner for owner, node in self._remote_owners.items() if node == node_id]:
            self.process_died(owner)

    def unclaimed(self, process_id: bytes) -> list[tuple[bytes, bytes, list[int]]]:
        """What a process that was killed wrote for others: (owner's node, owner, segments)."""
        written = self.store.written_by(process_id)
        nodes = self._remote_owners
        return [(nodes.get(owner, self.node_id), owner, found) for owner, found in written.items()]

    def process_died(self, process_id: bytes) -> None:
        """A process that may own, write or map segments here is gone."""
        self._remote_owners.pop(process_id, None)
        for number in self.store.process_died(process_id):
            self._free_copies_of(number)


def _write(fd: int, piece: bytes, offset: int) -> None:
    written = os.pwrite(fd, piece, offset)
    while written < len(piece):
        written += os.pwrite(fd, memoryview(piece)[written:], offset + written)


def _retrieve(task: asyncio.Task[Segment]) -> None:
    """Everybody who waited may be gone: then nobody else looks at how it ended."""
    if not task.cancelled():
        task.exception()
