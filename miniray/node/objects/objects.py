"""Objects for the processes of this node: room to write, segments to map, copies from elsewhere."""

from __future__ import annotations

from typing import TYPE_CHECKING

from miniray.common.process_limits import is_lack_of_memory
from miniray.node.relay import relayed as r
from miniray.node.relay.relayed import Relayed
from miniray.node.transfer.pulls import Pulls

if TYPE_CHECKING:
    from miniray.node.relay.relay import RelayHub
    from miniray.node.store.memories import Memory
    from miniray.node.store.segments import Copies, Key, Segment
    from miniray.node.store.spill_files import DiskPlace
    from miniray.node.store.spilling import Spilling
    from miniray.node.transfer.directory import Directory
    from miniray.node.transfer.pulls import Copying


class NodeObjects:
    """The store of this node and its traffic with others."""

    def __init__(
        self,
        node_id: bytes,
        spilling: Spilling,
        relay: RelayHub,
        transfers: Copying,
        directory: Directory,
        copies: Copies,
    ) -> None:
        self.node_id = node_id
        self.store = copies.store
        #: Where the values are that processes of this node own.
        self.directory = directory
        self._spilling = spilling
        self._relay = relay
        self._copies = copies
        #: Copies on their way.
        self.pulls = Pulls(transfers, copies)
        relay.notices[r.FREED] = lambda _, message: self.free_here(message.items)

    def table_sizes(self) -> dict[str, int]:
        """Return the size of each table; all are empty when no value is in use."""
        return {
            "copies": len(self._copies),
            "directory": len(self.directory),
            "pulls": len(self.pulls),
            "fetches ahead": self.pulls.ahead,
        }

    # --- writing -----------------------------------------------------------------
    def create(
        self,
        size: int,
        form: int,
        owner: bytes,
        owner_node: bytes,
        creator: bytes,
        memory: Memory | None = None,
    ) -> Segment:
        """Create a segment for a value that a process of any node owns.

        Raises:
            ObjectStoreFullError: there is no room.
        """
        segment = self.store.create(size, form, owner, creator, memory)
        segment.home = b"" if owner_node == self.node_id else owner_node
        return segment

    def create_on_disk(
        self, place: DiskPlace, form: int, owner: bytes, owner_node: bytes, creator: bytes
    ) -> Segment:
        """Create a segment on disk for a value that a process of any node owns."""
        segment = self.store.create_on_disk(place, form, owner, creator)
        segment.home = b"" if owner_node == self.node_id else owner_node
        return segment

    def seal(self, number: int, made: str) -> None:
        """Note that a value is complete; the node of its owner enters it, if that is another."""
        self.store.seal(number, made)
        if not self.store.has_number(number):
            return
        segment = self.store.get(number)
        if segment.home and not segment.freed:
            wrote = Relayed(notice=r.WROTE, items=(number, segment.owner))
            if not self._relay.send(segment.home, wrote):
                self.store.free(number)  # nobody will: its owner went with its node

    def discard(self, number: int) -> None:
        """Free a segment that does not get its value."""
        self.store.seal(number)
        self.store.free(number)

    def messages_lost(self, node_id: bytes) -> None:
        """Tell a node to or from which messages were lost what is here of values owned there.

        It may have given up this one, or what it freed may have been in a lost message: it answers
        what can be freed. What is here of a node that is gone is freed.
        """
        if not self._relay.knows(node_id):
            self.node_died(node_id)
            return
        keys = self._copies.owned_on(node_id)
        keys += [
            (self.node_id, each.number, node_id)
            for each in self.store
            if each.home == node_id and each.sealed and not each.freed
        ]
        if keys:
            self._relay.send(node_id, Relayed(notice=r.COPIED, items=tuple(keys)))

    # --- reading -----------------------------------------------------------------
    def is_here(self, key: Key) -> bool:
        """Return whether a value is on this node, in memory or on disk."""
        return self._local(key) is not None

    def map_here(self, key: Key, mapper: bytes) -> Segment | None:
        """Map a value for a process of this node; None if it is not in memory here.

        Raises:
            ObjectLostError: it was written here, and is gone.
        """
        local = self._local(key)
        if local is None or not self.store.get(local).in_memory:
            return None
        return self.store.map(local, mapper)

    def _local(self, key: Key) -> int | None:
        return key[1] if key[0] == self.node_id else self._copies.find(key)

    async def map(self, key: Key, size: int, mapper: bytes, request: int) -> Segment:
        """Map a value for a process; copy or restore it first if it is not here.

        Args:
            key: The value.
            size: Its bytes.
            mapper: The process that maps it.
            request: Number under which that process may withdraw.

        Raises:
            ObjectLostError: it is gone, or the process has withdrawn.
            ObjectStoreFullError: there is no room for it.
        """
        local = self._local(key)
        if local is not None:
            segment = self.store.map(local, mapper)
            if not segment.in_memory:
                await self._restore(segment, mapper)
            return segment
        return await self.pulls.wait(key, size, mapper, request)

    async def _restore(self, segment: Segment, mapper: bytes) -> None:
        try:
            await self._spilling.restore(segment, mapper)
        except BaseException as error:
            if is_lack_of_memory(error) and self.store.has(segment):
                return
            self.store.unmap([segment.number], mapper)
            raise

    def source_of(self, number: int) -> tuple[bytes, int] | None:
        """Return of which node and segment there a segment here is a copy; None if it is none."""
        return self._copies.source_of(number)

    # --- freeing -----------------------------------------------------------------
    def free_here(self, key: Key) -> None:
        """Free what there is on this node of a value that its owner has freed."""
        local = self._local(key)
        if local is not None:
            self._copies.drop(local)
        else:
            self.pulls.lose(key, "its owner has freed it")

    def node_died(self, node_id: bytes) -> None:
        """Free what owners on a node have left here, which went with it.

        Values that were written on that node for owners elsewhere stay, if there are copies.
        """
        self.pulls.node_died(node_id)
        for key in self._copies.owned_on(node_id):
            self.free_here(key)
        for segment in self.store:
            if segment.home == node_id:
                self.store.free(segment.number)

    def unclaimed(self, process_id: bytes) -> list[tuple[bytes, bytes, list[int]]]:
        """Return what a killed process wrote for others: (owner's node, owner, segments)."""
        return [
            (self.store.get(found[0]).home or self.node_id, owner, found)
            for owner, found in self.store.written_by(process_id).items()
        ]

    def asks_no_more(self, process_id: bytes) -> None:
        """Drop the requests of a process that is ending; what it has mapped stays."""
        self._spilling.queue.process_died(process_id)
        self.pulls.process_died(process_id)

    def process_died(self, process_id: bytes, *, may_look: bool = True) -> None:
        """Free what a process of this node owned, wrote or mapped.

        Args:
            process_id: Which one.
            may_look: Whether it may only have left, and look at what it had mapped.
        """
        self.asks_no_more(process_id)
        for number in self.store.process_died(process_id, may_look=may_look):
            self.directory.free((self.node_id, number, self.node_id))
        self.directory.process_died(process_id)
