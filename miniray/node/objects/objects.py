"""Objects for the processes of this node: room to write, segments to map, copies from elsewhere."""

from __future__ import annotations

from typing import TYPE_CHECKING

from miniray.common.process_limits import is_lack_of_memory
from miniray.node.relay import relayed as r
from miniray.node.relay.relayed import Relayed
from miniray.node.transfer.pulls import Pulls

#: A value whose node is gone: its segment there, that of a copy here, and its owner.
Left = tuple[int, int, bytes]

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Iterable

    from miniray.node.relay.relay import RelayHub
    from miniray.node.store.admission_queue import Claim
    from miniray.node.store.copies import Copies, Copy, Key, Owner
    from miniray.node.store.memories import Memory
    from miniray.node.store.segments import Segment
    from miniray.node.store.spill_files import DiskPlace
    from miniray.node.store.spilling import Spilling
    from miniray.node.transfer.serving import Serving


class NodeObjects:
    """The store of this node and its traffic with others."""

    def __init__(
        self,
        node_id: bytes,
        spilling: Spilling,
        relay: RelayHub,
        copy: Callable[[Key, Claim], Awaitable[tuple[Segment, Owner]]],
        serving: Serving,
        copies: Copies,
        owner_nodes: dict[bytes, bytes],
    ) -> None:
        self.node_id = node_id
        self.store = copies.store
        self._spilling = spilling
        self._relay = relay
        self._serving = serving
        self._copies = copies
        #: Copies on their way.
        self.pulls = Pulls(copy, copies)
        #: Owners of segments here that are on other nodes, or are those nodes' daemons.
        self._remote_owners = owner_nodes
        relay.notices[r.FREED] = lambda _, message: self.free_here(message.items)
        relay.notices[r.FREED_COPIES] = lambda node, message: self.free_copies(node, message.items)
        relay.notices[r.ADOPTED] = self._adopt_all

    def table_sizes(self) -> dict[str, int]:
        """Return the size of each table; all are empty when no value is in use."""
        return {
            "copies": len(self._copies),
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
        self._look_after(segment.number, owner, owner_node)
        return segment

    def create_on_disk(
        self, place: DiskPlace, form: int, owner: bytes, owner_node: bytes, creator: bytes
    ) -> Segment:
        """Create a segment on disk for a value that a process of any node owns."""
        segment = self.store.create_on_disk(place, form, owner, creator)
        self._look_after(segment.number, owner, owner_node)
        return segment

    def _look_after(self, number: int, owner: bytes, owner_node: bytes) -> None:
        """Watch the owner of a segment, which is freed when it ends."""
        if owner_node != self.node_id and owner not in self._remote_owners:
            watch = Relayed(to=owner, sender=self.node_id, notice=r.WATCH)
            if self._relay.send(owner_node, watch):
                self._remote_owners[owner] = owner_node
            else:
                self.store.free(number)  # nobody will: its owner went with its node

    def adopt(self, number: int, node_id: bytes) -> None:
        """Make a node's daemon the owner of a segment of this node."""
        self.store.change_owner(number, node_id)
        if node_id != self.node_id:
            self._remote_owners[node_id] = node_id

    def give(self, number: int, owner: bytes, owner_node: bytes) -> None:
        """Make a process of any node the owner of a segment, in place of a daemon."""
        if self.store.has_number(number):
            self.store.change_owner(number, owner)
            self._look_after(number, owner, owner_node)

    def _adopt_all(self, node_id: bytes, message: Relayed) -> None:
        if not self._relay.knows(node_id):  # the notice outlived it
            self.free_here(message.items)
            return
        for number in message.items:
            self.adopt(number, node_id)

    def node_unreachable(self, node_id: bytes) -> None:
        """Reconcile with a node to or from which messages were lost; free what a dead one owned.

        One that lives may have given up this one, or what it freed may have been in a lost message:
        it receives a list of what it owns here, and answers what can be freed.
        """
        if self._relay.knows(node_id):
            self._tell_copies(node_id)
            for owner, node in list(self._remote_owners.items()):
                if node == node_id != owner:
                    self._ask_owner(owner, node_id)
        elif node_id in self._remote_owners:
            self.process_died(node_id)

    def _tell_copies(self, node_id: bytes) -> None:
        here = [copy.key[1] for copy in self._copies.of_node(node_id) if not copy.left]
        if here:
            self._relay.send(node_id, Relayed(notice=r.COPIED, items=tuple(here)))

    def _ask_owner(self, owner: bytes, node_id: bytes) -> None:
        """Have a process of another node free what it does not know, or find out that it has ended.

        What was on its way to it when messages were lost never comes, as the connections between
        its calls and the processes here are over.
        """
        self._relay.send(node_id, Relayed(to=owner, sender=self.node_id, notice=r.WATCH))
        found = self.store.owned_by(owner)
        if found:
            listed = ("unclaimed", (b"", self.node_id, found))
            self._relay.send(node_id, Relayed(to=owner, notice=r.PUSH, items=listed))

    def left_to(self, node_id: bytes, number: int) -> None:
        """Take over a segment of any node from a process of this node."""
        if node_id == self.node_id:
            self.adopt(number, node_id)
        else:
            self._relay.send(node_id, Relayed(notice=r.ADOPTED, items=(number,)))

    # --- reading -----------------------------------------------------------------
    def is_here(self, node_id: bytes, number: int) -> bool:
        """Return whether a segment of any node is on this one, in memory or on disk."""
        return self._local(node_id, number) is not None

    def map_here(self, node_id: bytes, number: int, mapper: bytes) -> Segment | None:
        """Map a segment of any node for a process of this one; None if it is not in memory here.

        Raises:
            ObjectLostError: it is of this node, and gone.
        """
        local = self._local(node_id, number)
        if local is None or not self.store.get(local).in_memory:
            return None
        return self.store.map(local, mapper)

    def _local(self, node_id: bytes, number: int) -> int | None:
        if node_id == self.node_id:
            return number
        copy = self._copies.find((node_id, number))
        return None if copy is None else copy.number

    async def map(
        self,
        node_id: bytes,
        number: int,
        size: int,
        mapper: bytes,
        request: int,
    ) -> Segment:
        """Map a segment of any node for a process; copy or restore it first if it is not here.

        Args:
            node_id: Its node.
            number: Its number there.
            size: Its bytes.
            mapper: The process that maps it.
            request: Number under which that process may withdraw.
            or_disk: Whether to map it on disk if only what processes look at is in the way.

        Raises:
            ObjectLostError: it, or its node, is gone, or the process has withdrawn.
            ObjectStoreFullError: there is no room for it.
        """
        local = self._local(node_id, number)
        if local is not None:
            segment = self.store.map(local, mapper)
            if not segment.in_memory:
                await self._restore(segment, mapper)
            return segment
        return await self.pulls.wait((node_id, number), size, mapper, request)

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
    def free(self, node_id: bytes, number: int) -> None:
        """Free a segment of any node that a process of this node owns."""
        if node_id == self.node_id:
            self.free_here([number])
        else:
            self._relay.send(node_id, Relayed(notice=r.FREED, items=(number,)))

    def free_here(self, numbers: Iterable[int]) -> None:
        """Free segments of this node, and all their copies."""
        for number in numbers:
            self._copies.drop(number)
            self._free_copies_of(number)

    def _free_copies_of(self, number: int) -> None:
        for node in self._serving.forget(number):
            self._relay.send(node, Relayed(notice=r.FREED_COPIES, items=(number,)))

    def free_copies(self, node_id: bytes, numbers: Iterable[int]) -> None:
        """Free the copies here of segments that another node has freed."""
        for number in numbers:
            copy = self._copies.find((node_id, number))
            if copy is not None:
                self._copies.drop(copy.number)
            else:
                self.pulls.lose((node_id, number), "its owner has freed it")

    def node_died(self, node_id: bytes) -> dict[bytes, list[Left]]:
        """Handle the death of a node: what comes from there, and what its processes owned here.

        Copies of its segments become the values, unless their owners were there too. What is on
        its way is lost; its reader begins anew from a copy.

        Returns:
            The copies that became values, by the owner's node. Until somebody says more, the
            daemons of those nodes are the owners.
        """
        self.pulls.node_died(node_id)
        left: dict[bytes, list[Left]] = {}
        for copy in self._copies.of_node(node_id):
            found = self._left(copy)
            if found is not None:
                left.setdefault(copy.owner.node, []).append(found)
        for owner in [owner for owner, node in self._remote_owners.items() if node == node_id]:
            self.process_died(owner)
        return left

    def _left(self, copy: Copy) -> Left | None:
        """Make a copy the value; if its owner is gone too, drop it and return None."""
        owner = copy.owner
        if owner.node != self.node_id and not self._relay.knows(owner.node):
            self._copies.drop(copy.number)
            return None
        copy.left = True
        self.adopt(copy.number, owner.node)
        return copy.key[1], copy.number, owner.process

    def unclaimed(self, process_id: bytes) -> list[tuple[bytes, bytes, list[int]]]:
        """Return what a killed process wrote for others: (owner's node, owner, segments)."""
        written = self.store.written_by(process_id)
        nodes = self._remote_owners
        return [(nodes.get(owner, self.node_id), owner, found) for owner, found in written.items()]

    def asks_no_more(self, process_id: bytes) -> None:
        """Drop the requests of a process that is ending; what it has mapped stays."""
        self._remote_owners.pop(process_id, None)
        self._spilling.queue.process_died(process_id)
        self.pulls.process_died(process_id)

    def process_died(self, process_id: bytes, *, may_look: bool = True) -> None:
        """Free what a process owned, wrote or mapped here.

        Args:
            process_id: Which one.
            may_look: Whether it may only have left, and look at what it had mapped.
        """
        self.asks_no_more(process_id)
        for number in self.store.process_died(process_id, may_look=may_look):
            self._copies.remove(number)
            self._free_copies_of(number)
