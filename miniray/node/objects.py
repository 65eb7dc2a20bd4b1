"""Objects for the processes of this node: room to write, segments to map, copies from elsewhere."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from miniray.exceptions import ObjectLostError
from miniray.node import relayed as r
from miniray.node.relayed import Relayed

if TYPE_CHECKING:
    from collections.abc import Iterable

    from miniray.node.relay import RelayHub
    from miniray.node.segments import Segment, SegmentStore
    from miniray.node.transfers import Transfers


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

    def __init__(
        self, node_id: bytes, store: SegmentStore, relay: RelayHub, transfers: Transfers
    ) -> None:
        self.node_id = node_id
        self.store = store
        self._relay = relay
        self._transfers = transfers
        #: Copies of segments of other nodes: (node, segment there) → segment here.
        self._copies: dict[tuple[bytes, int], int] = {}
        #: Copies on their way; many who wait share one transfer.
        self._pulls: dict[tuple[bytes, int], _Pull] = {}
        #: Owners of segments here that are on other nodes, or are those nodes' daemons.
        self._remote_owners: dict[bytes, bytes] = {}
        relay.notices[r.FREED] = lambda _, message: self.free_here(message.items)
        relay.notices[r.FREED_COPIES] = lambda node, message: self.free_copies(node, message.items)
        relay.notices[r.ADOPTED] = self._adopt_all

    def table_sizes(self) -> dict[str, int]:
        """How many entries each table has; all are empty when no value is in use."""
        return {"copies": len(self._copies), "pulls": len(self._pulls)}

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
            watch = Relayed(to=owner, sender=self.node_id, notice=r.WATCH)
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

    def _adopt_all(self, node_id: bytes, message: Relayed) -> None:
        for number in message.items:
            self.adopt(number, node_id)

    def left_to(self, node_id: bytes, number: int) -> None:
        """A process of this node leaves a segment of any node to this daemon."""
        if node_id == self.node_id:
            self.adopt(number, node_id)
        else:
            self._relay.send(node_id, Relayed(notice=r.ADOPTED, items=(number,)))

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
            segment = await self._transfers.copy(*key, size)
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

    # --- freeing -----------------------------------------------------------------
    def free(self, node_id: bytes, number: int) -> None:
        """The owner, a process of this node, freed a segment of any node."""
        if node_id == self.node_id:
            self.free_here([number])
        else:
            self._relay.send(node_id, Relayed(notice=r.FREED, items=(number,)))

    def free_here(self, numbers: Iterable[int]) -> None:
        """Segments of this node were freed by their owners."""
        for number in numbers:
            self.store.free(number)
            self._free_copies_of(number)

    def _free_copies_of(self, number: int) -> None:
        for node in self._transfers.forget(number):
            self._relay.send(node, Relayed(notice=r.FREED_COPIES, items=(number,)))

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


def _retrieve(task: asyncio.Task[Segment]) -> None:
    """Everybody who waited may be gone: then nobody else looks at how it ended."""
    if not task.cancelled():
        task.exception()
