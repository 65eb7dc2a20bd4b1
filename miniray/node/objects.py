"""Objects for the processes of this node: room to write, segments to map, copies from elsewhere."""

from __future__ import annotations

import asyncio
import logging
import os
from typing import TYPE_CHECKING

import grpc

from miniray._proto import node_pb2, node_pb2_grpc
from miniray.config import config
from miniray.exceptions import ObjectLostError

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from miniray.node.relay import RelayHub
    from miniray.node.segments import Segment, SegmentStore

logger = logging.getLogger(__name__)


class NodeObjects:
    """The store of this node and its traffic with others."""

    def __init__(self, node_id: bytes, store: SegmentStore, relay: RelayHub) -> None:
        self.node_id = node_id
        self.store = store
        self._relay = relay
        #: Copies of segments of other nodes: (node, segment there) → segment here.
        self._copies: dict[tuple[bytes, int], int] = {}
        #: Copies on their way; many who wait share one transfer.
        self._pulls: dict[tuple[bytes, int], asyncio.Task[int]] = {}
        #: Which nodes have copies of a segment of this node.
        self._copied_to: dict[int, set[bytes]] = {}

    async def map(self, node_id: bytes, number: int, size: int, mapper: bytes) -> Segment:
        """A segment of any node, mapped here by a process of this node.

        Raises:
            ObjectLostError: it, or its node, is gone.
        """
        if node_id == self.node_id:
            return self.store.map(number, mapper)
        key = (node_id, number)
        local = self._copies.get(key)
        if local is None:
            pull = self._pulls.get(key)
            if pull is None:
                pull = self._pulls[key] = asyncio.get_running_loop().create_task(
                    self._pull(node_id, number, size)
                )
                pull.add_done_callback(lambda _task: self._pulls.pop(key, None))
            local = await asyncio.shield(pull)
        return self.store.map(local, mapper)

    async def _pull(self, node_id: bytes, number: int, size: int) -> int:
        """Copy a segment of another node into this one; returns its number here."""
        channel = self._relay.channel(node_id)
        if channel is None:
            raise ObjectLostError(f"segment {number}", f"node {node_id.hex()} is gone")
        stub = node_pb2_grpc.NodeStub(channel)  # type: ignore[no-untyped-call]
        segment: Segment | None = None
        offset = 0
        try:
            async for chunk in stub.Fetch(
                node_pb2.FetchRequest(segment=number, node_id=self.node_id)
            ):
                if segment is None:
                    segment = self.store.create(size, chunk.form, node_id, self.node_id)
                os.pwrite(segment.fd, chunk.data, offset)
                offset += len(chunk.data)
        except grpc.aio.AioRpcError as error:
            self._undo(segment)
            raise ObjectLostError(
                f"segment {number}",
                f"its transfer from node {node_id.hex()} failed: {error.details()}",
            ) from None
        if segment is None or offset != size:
            self._undo(segment)
            raise ObjectLostError(
                f"segment {number}", f"node {node_id.hex()} sent {offset} of {size} bytes"
            )
        self.store.seal(segment.number)
        self._copies[(node_id, number)] = segment.number
        return segment.number

    def _undo(self, segment: Segment | None) -> None:
        if segment is not None:
            self.store.seal(segment.number)
            self.store.free(segment.number)

    async def serve(self, request: node_pb2.FetchRequest) -> AsyncIterator[node_pb2.Chunk]:
        """The Fetch RPC: a segment of this node in pieces."""
        segment = self.store.map(request.segment, request.node_id)
        try:
            self._copied_to.setdefault(request.segment, set()).add(request.node_id)
            size = config().transfer_chunk
            offset = request.offset
            while offset < segment.size or offset == 0:
                data = os.pread(segment.fd, min(size, segment.size - offset), offset)
                if offset == request.offset:
                    yield node_pb2.Chunk(data=data, total=segment.size, form=segment.form)
                else:
                    yield node_pb2.Chunk(data=data)
                offset += len(data)
                if not data:
                    break
        finally:
            self.store.unmap([request.segment], request.node_id)

    # --- freeing -----------------------------------------------------------------
    def free(self, node_id: bytes, number: int) -> None:
        """The owner, a process of this node, freed a segment of any node."""
        if node_id == self.node_id:
            self.free_here([number])
        else:
            self._relay.send(node_id, node_pb2.Relayed(freed=[number]))

    def free_here(self, numbers: list[int]) -> None:
        """Segments of this node were freed by their owners."""
        for number in numbers:
            self.store.free(number)
            for node in self._copied_to.pop(number, ()):
                self._relay.send(node, node_pb2.Relayed(freed_copies=[number]))

    def free_copies(self, node_id: bytes, numbers: list[int]) -> None:
        """Segments of another node were freed: so are their copies here."""
        for number in numbers:
            local = self._copies.pop((node_id, number), None)
            if local is not None:
                self.store.free(local)

    def node_died(self, node_id: bytes) -> None:
        """Copies from a node that is gone serve those who have them mapped, no others."""
        for key in [key for key in self._copies if key[0] == node_id]:
            self.store.free(self._copies.pop(key))

    def process_died(self, process_id: bytes) -> None:
        """A process that may own, write or map segments here is gone."""
        for number in self.store.process_died(process_id):
            for node in self._copied_to.pop(number, ()):
                self._relay.send(node, node_pb2.Relayed(freed_copies=[number]))
