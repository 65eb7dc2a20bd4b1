"""Objects for the processes of this node: room to write, segments to map, copies from elsewhere."""

from __future__ import annotations

from typing import TYPE_CHECKING

from miniray.node import relayed as r
from miniray.node.fetch_ahead import FetchAhead
from miniray.node.pulls import Pulls
from miniray.node.relayed import Relayed

if TYPE_CHECKING:
    from collections.abc import Iterable

    from miniray.node.relay import RelayHub
    from miniray.node.segments import Segment, SegmentStore
    from miniray.node.serving import Serving
    from miniray.node.spill_files import Place
    from miniray.node.spilling import Spilling
    from miniray.node.transfers import Key, Transfers


class NodeObjects:
    """The store of this node and its traffic with others."""

    def __init__(
        self,
        node_id: bytes,
        store: SegmentStore,
        spilling: Spilling,
        relay: RelayHub,
        transfers: Transfers,
        serving: Serving,
    ) -> None:
        self.node_id = node_id
        self.store = store
        self._spilling = spilling
        spilling.is_copy = lambda segment: self._copies.is_copy(segment.number)
        spilling.evict = lambda segment: self._free_copy(self._copies.key_of(segment.number))
        self._relay = relay
        self._transfers = transfers
        self._serving = serving
        self._copies = serving.copies
        #: Copies on their way.
        self.pulls = Pulls(store, transfers.copy, self._copies)
        #: Copies that are wanted here before they are read.
        self.ahead = FetchAhead(self.pulls, store)
        #: Owners of segments here that are on other nodes, or are those nodes' daemons.
        self._remote_owners: dict[bytes, bytes] = {}
        relay.notices[r.FREED] = lambda _, message: self.free_here(message.items)
        relay.notices[r.FREED_COPIES] = lambda node, message: self.free_copies(node, message.items)
        relay.notices[r.ADOPTED] = self._adopt_all

    def table_sizes(self) -> dict[str, int]:
        """How many entries each table has; all are empty when no value is in use."""
        return {
            "copies": len(self._copies.sources),
            "pulls": len(self.pulls),
            "fetches ahead": len(self.ahead),
        }

    # --- writing -----------------------------------------------------------------
    def create(
        self, size: int, form: int, owner: bytes, owner_node: bytes, creator: bytes
    ) -> Segment:
        """Room for a value that a process of any node owns.

        Raises:
            ObjectStoreFullError: there is no room.
        """
        segment = self.store.create(size, form, owner, creator)
        self._look_after(segment, owner, owner_node)
        return segment

    def create_on_disk(
        self, place: Place, form: int, owner: bytes, owner_node: bytes, creator: bytes
    ) -> Segment:
        """The same on disk, where the writer puts it."""
        segment = self.store.create_on_disk(place, form, owner, creator)
        self._look_after(segment, owner, owner_node)
        return segment

    def _look_after(self, segment: Segment, owner: bytes, owner_node: bytes) -> None:
        """See to it that a segment goes when its owner does."""
        if owner_node != self.node_id and owner not in self._remote_owners:
            watch = Relayed(to=owner, sender=self.node_id, notice=r.WATCH)
            if self._relay.send(owner_node, watch):
                self._remote_owners[owner] = owner_node
            else:
                self.store.free(segment.number)  # nobody will: its owner went with its node

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
    def is_here(self, node_id: bytes, number: int) -> bool:
        """Whether a segment of any node is on this one, in memory or on disk."""
        return self._local(node_id, number) is not None

    def map_here(self, node_id: bytes, number: int, mapper: bytes) -> Segment | None:
        """A segment of any node, mapped by a process of this node; None if it is not in memory.

        Raises:
            ObjectLostError: it is of this node, and gone.
        """
        local = self._local(node_id, number)
        if local is None or not self.store.get(local).in_memory:
            return None
        return self.store.map(local, mapper)

    def _local(self, node_id: bytes, number: int) -> int | None:
        return number if node_id == self.node_id else self._copies.find((node_id, number))

    async def map(
        self,
        node_id: bytes,
        number: int,
        size: int,
        mapper: bytes,
        request: int,
        *,
        patient: bool,
    ) -> Segment:
        """The same; it is copied to this node, or read from disk, if need be.

        Args:
            node_id: Its node.
            number: Its number there.
            size: Its bytes.
            mapper: The process that maps it.
            request: Number under which that process may withdraw.
            patient: Whether to wait for what other processes have mapped, to read it from disk.

        Raises:
            ObjectLostError: it, or its node, is gone, or the process has withdrawn.
            ObjectStoreFullError: there is no room for it.
        """
        local = self._local(node_id, number)
        if local is not None:
            segment = self.store.map(local, mapper)
            if not segment.in_memory:
                await self._restore(segment, mapper, patient=patient)
            return segment
        waiter = self.pulls.wait((node_id, number), size, mapper, request, maps=True)
        return await waiter.segment

    async def _restore(self, segment: Segment, mapper: bytes, *, patient: bool) -> None:
        try:
            await self._spilling.restore(segment, mapper, patient=patient)
        except BaseException:
            self.store.unmap([segment.number], mapper)
            raise

    async def fetch(
        self, node_id: bytes, number: int, size: int, process_id: bytes, request: int
    ) -> None:
        """Copy a segment to this node, if it is not here. As ``map``, but nobody maps it."""
        if self._local(node_id, number) is None:
            waiter = self.pulls.wait((node_id, number), size, process_id, request, maps=False)
            await waiter.segment

    def copies(self) -> dict[int, tuple[bytes, int]]:
        """Segments here that are copies: of which node, and which segment there."""
        return self._copies.sources

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
        for node in self._serving.forget(number):
            self._relay.send(node, Relayed(notice=r.FREED_COPIES, items=(number,)))

    def free_copies(self, node_id: bytes, numbers: Iterable[int]) -> None:
        """Segments of another node were freed: so are their copies here."""
        for number in numbers:
            key = (node_id, number)
            if self._copies.find(key) is not None:
                self._free_copy(key)
            else:
                self.pulls.lose(key, "its owner has freed it")

    def _free_copy(self, key: Key) -> None:
        number = self._copies.remove(key)
        assert number is not None
        self.store.free(number)

    def node_died(self, node_id: bytes) -> None:
        """A node is gone: what it sent, and what its processes owned here.

        Copies of its segments serve those who have them mapped, no others. What is on its way
        from another node that has a copy goes on, for who waits for it.
        """
        for key, arriving in list(self._transfers.arriving.items()):
            if key[0] == node_id:
                self.pulls.origin_died(key)
                if arriving.feeder == node_id:
                    self.pulls.lose(key, f"node {node_id.hex()} is gone")
        for key in self._copies.of_node(node_id):
            self._free_copy(key)
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
        self.ahead.process_died(process_id)
        self.pulls.process_died(process_id)
        for number in self.store.process_died(process_id):
            self._free_copies_of(number)
