"""The values of a node: its store and transfers, and the requests of processes and other nodes.

``SharedObjects`` puts the parts together. ``NodeObjects`` answers processes, and frees what owners,
processes and nodes leave behind.
"""

from __future__ import annotations

import asyncio
import dataclasses
from typing import TYPE_CHECKING

from miniray.common.process_state import OUT_OF_DESCRIPTORS
from miniray.exceptions import ObjectStoreFullError
from miniray.messages.protocol import ON_DISK
from miniray.node.objects.adopted import AdoptedObjects
from miniray.node.objects.memory_service import MemoryService, describe_holders, store_totals
from miniray.node.relay import relayed as r
from miniray.node.relay.relayed import Relayed
from miniray.node.store.segments import Copies, SegmentStore, segment_of, writer_of
from miniray.node.store.spill_files import SpillFiles
from miniray.node.store.spilling import Spilling
from miniray.node.transfer.directory import Directory
from miniray.node.transfer.serving import Serving
from miniray.node.transfer.transfers import Pulls, Transfers

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Iterable

    from miniray.node.base.clients import Answer, Client, ClientServer
    from miniray.node.base.head_client import HeadClient
    from miniray.node.base.node_config import NodeConfig
    from miniray.node.base.template_client import Helper
    from miniray.node.relay.questions import Questions
    from miniray.node.relay.relay import RelayHub
    from miniray.node.store.memories import Memory
    from miniray.node.store.segments import Key, Segment
    from miniray.node.store.spill_files import DiskPlace
    from miniray.node.workers.process_names import ProcessNames

_MOVER = "miniray.node.transfer.mover"

#: (segment of this node, form, where it begins), and the descriptor of its memory or file.
_Mapped = tuple[tuple[int, int, int], int]
#: (segment, memory or ON_DISK), and the descriptor to write to or -1.
_Created = tuple[tuple[int, int], int]

#: A value that needs memory: size, form, owner and the owner's node.
_Value = tuple[int, int, bytes, bytes]

#: The answer that a value is here.
_HERE: tuple[None, int] = (None, -1)


@dataclasses.dataclass(eq=False, repr=False)
class NodeObjects:
    """The store of this node: requests of its processes, and its traffic with others."""

    node_id: bytes
    spilling: Spilling
    relay: RelayHub
    transfers: dataclasses.InitVar[Transfers]
    #: The nodes of the values that processes of this node own.
    directory: Directory
    copies: Copies
    clients: ClientServer

    def __post_init__(self, transfers: Transfers) -> None:
        clients = self.clients
        self.store = store = self.copies.store
        #: Copies in flight.
        self.pulls = Pulls(transfers, self.copies)
        self.relay.notices[r.FREED] = lambda _, message: self.free_here(message.items)
        memories = store.memories
        clients.requests.update(
            {
                "create_segment": self._create,
                "memory": lambda _client, number: (None, memories.descriptor(number)),
                "map_segment": self._map,
                "are_here": self._are_here,
                "lost_values": self._lost,
                "fetch_segment": self._fetch,
            }
        )
        clients.notices.update(
            {
                "seal_segment": lambda _client, number, made: self.seal(number, made),
                "discard_segment": lambda _client, number: self.discard(number),
                "free_segment": lambda _client, *key: self.directory.free(key),
                "unmapped": lambda client, numbers: store.unmap(numbers, client.process_id),
                "forked": lambda client: store.leave_open(client.process_id),
                "mapped_memory": lambda client, number: memories.mapped(number, client.process_id),
                "unmapped_memory": lambda client, numbers: memories.unmapped(
                    numbers, client.process_id
                ),
                "prefetch": self._prefetch,
                "withdraw": self._withdraw,
            }
        )

    def _runs(self, process: bytes) -> bool:
        """Return whether a process of this node has not ended."""
        return process in self.clients.clients

    # --- writing -----------------------------------------------------------------
    def seal(self, number: int, made: str) -> None:
        """Record that a value is complete; the node of its owner enters it, if that is another."""
        self.store.seal(number, made)
        if not self.store.has_number(number):
            return
        segment = self.store.get(number)
        if segment.home and not segment.freed:
            wrote = Relayed(notice=r.WROTE, items=(number, segment.owner))
            if not self.relay.send(segment.home, wrote):
                self.store.free(number)  # its owner, which would, was lost with its node

    def discard(self, number: int) -> None:
        """Free a segment that was not filled."""
        self.store.seal(number)
        self.store.free(number)

    def messages_lost(self, node_id: bytes) -> None:
        """Report to a node, to or from which messages were lost, the values here that it owns.

        It may have given up this node, or a lost message may have freed values: it answers which
        can be freed. Values of a node that is gone are freed.
        """
        if not self.relay.knows(node_id):
            self.node_died(node_id)
            return
        keys = self.copies.owned_on(node_id)
        keys += [
            (self.node_id, each.number, node_id)
            for each in self.store
            if each.home == node_id and each.sealed and not each.freed
        ]
        if keys:
            self.relay.send(node_id, Relayed(notice=r.COPIED, items=tuple(keys)))

    # --- reading -----------------------------------------------------------------
    def is_here(self, key: Key) -> bool:
        """Return whether a value is on this node, in memory or on disk."""
        return self._local(key) is not None

    def _local(self, key: Key) -> int | None:
        return segment_of(key) if writer_of(key) == self.node_id else self.copies.find(key)

    async def map(self, key: Key, size: int, mapper: bytes, request: int) -> Segment:
        """Map a value for a process; copy or restore it first if it is not here.

        Args:
            key: The value.
            size: Its bytes.
            mapper: The process that maps it.
            request: Number under which that process may withdraw.

        Raises:
            ObjectLostError: it is gone, or the process has withdrawn.
            ObjectStoreFullError: there is no memory for it.
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
            await self.spilling.restore(segment)
        except BaseException:
            self.store.unmap([segment.number], mapper)
            raise

    # --- freeing -----------------------------------------------------------------
    def free_here(self, key: Key) -> None:
        """Free this node's segments of a value that its owner has freed."""
        local = self._local(key)
        if local is not None:
            self.copies.drop(local)
        else:
            self.pulls.lose(key, "its owner has freed it")

    def node_died(self, node_id: bytes) -> None:
        """Free the values here whose owners were on a node that died.

        Values that were written on that node for owners elsewhere stay, if there are copies.
        """
        self.pulls.node_died(node_id)
        for key in self.copies.owned_on(node_id):
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

    def process_died(self, process_id: bytes, *, may_look: bool = True) -> None:
        """Free what a process of this node owned, wrote or mapped.

        Args:
            process_id: Which one.
            may_look: Whether it may still run, and read what it had mapped.
        """
        self.pulls.process_died(process_id)
        for number in self.store.process_died(process_id, may_look=may_look):
            self.directory.free((self.node_id, number, self.node_id))
        self.directory.process_died(process_id)

    # --- requests to write -----------------------------------------------------------------
    def _create(
        self, client: Client, size: int, form: int, owner: bytes, owner_node: bytes
    ) -> _Created | Awaitable[_Created]:
        """Make a segment; no descriptor goes along if the writer has its memory mapped."""
        spilling, value = self.spilling, (size, form, owner, owner_node)
        if not spilling.waiting:
            try:
                return self._made(client.process_id, None, value)
            except ObjectStoreFullError:
                pass
            except OSError as error:
                if error.errno not in OUT_OF_DESCRIPTORS:  # else values have to leave memory
                    raise
            finally:
                spilling.spill_ahead()
        return self._create_later(client.process_id, value)

    async def _create_later(self, process: bytes, value: _Value) -> _Created:
        """Wait for memory; the value goes to disk if only mapped values are in the way."""
        spilling, (size, *_) = self.spilling, value
        if size > self.store.capacity:  # only copies may be as large
            raise spilling.full(size)
        space = await spilling.reserve(size, process)
        if not self._runs(process):
            spilling.give_back(space)
            raise _ended()
        return self._made(process, space, value)

    def _made(self, process: bytes, space: Memory | DiskPlace | None, value: _Value) -> _Created:
        size, form, owner, owner_node = value
        home = b"" if owner_node == self.node_id else owner_node
        segment = self.store.create(size, form, owner, process, space, home)
        if not home and not self._runs(owner):
            self.store.free(segment.number)  # its owner, which would, has ended
        memory = segment.memory
        if memory is None:
            return (segment.number, ON_DISK), segment.fd
        return (segment.number, memory.number), -1 if process in memory.writers else memory.fd

    # --- requests to read -----------------------------------------------------------------
    def _map(
        self, client: Client, node_id: bytes, number: int, home: bytes, size: int, request: int
    ) -> _Mapped | Awaitable[_Mapped]:
        key = (node_id, number, home)
        local = self._local(key)
        if local is not None and self.store.get(local).in_memory:
            return _shown(self.store.map(local, client.process_id))
        return self._fetch_and_map(client.process_id, key, size, request)

    async def _fetch_and_map(self, process: bytes, key: Key, size: int, request: int) -> _Mapped:
        segment = await self.map(key, size, process, request)
        if not self._runs(process):  # it ended while it waited
            self.store.unmap([segment.number], process)
            raise _ended()
        return _shown(segment)

    def _are_here(
        self, _client: Client, keys: Iterable[tuple[bytes, int, bytes]]
    ) -> tuple[list[bool], int]:
        return [self.is_here(key) for key in keys], -1

    def _lost(self, client: Client, node_id: bytes) -> tuple[list[int], int]:
        """Return the segments of a node with values of a process that no node has any more."""
        return self.directory.lost(client.process_id, node_id), -1

    def _fetch(
        self, client: Client, node_id: bytes, number: int, home: bytes, size: int, request: int
    ) -> Answer | Awaitable[Answer]:
        """Answer when a value is here."""
        key = (node_id, number, home)
        if self.is_here(key):
            return _HERE
        return self._fetch_later(client.process_id, key, size, request)

    async def _fetch_later(self, process: bytes, key: Key, size: int, request: int) -> Answer:
        if not self._runs(process):
            raise _ended()
        await self.pulls.fetch(process, request, key, size)
        return _HERE

    def _prefetch(
        self, client: Client, wanted: Iterable[tuple[bytes, int, bytes, int, int]]
    ) -> None:
        """Fetch values that a call which has arrived will read."""
        for node_id, number, home, size, request in wanted:
            self.pulls.prefetch(client.process_id, request, (node_id, number, home), size)

    def _withdraw(self, client: Client, requests: Iterable[int]) -> None:
        """Withdraw requests whose answers are no longer awaited."""
        # A request that was read just before is a task that has not begun to wait yet.
        loop = asyncio.get_running_loop()
        for request in requests:
            loop.call_soon(self.pulls.withdraw, client.process_id, request)


def _shown(segment: Segment) -> _Mapped:
    """Return what a process needs to map a segment, in memory or on disk."""
    return (segment.number, segment.form, segment.offset), segment.fd


def _ended() -> ConnectionError:
    return ConnectionError("the requesting process has ended")


class SharedObjects:
    """The parts that hold, move and answer for values.

    ``fork_helper`` runs ``serve(control)`` of a module in a process of the node's own.
    """

    def __init__(
        self,
        node: NodeConfig,
        clients: ClientServer,
        relay: RelayHub,
        questions: Questions,
        names: ProcessNames,
        fork_helper: Callable[[str], Helper],
        head: HeadClient,
    ) -> None:
        node_id, requests = node.node_id, questions.requests
        self._push = clients.push
        self.store = store = SegmentStore(
            node.object_store_capacity, SpillFiles(node.spill_folder), clients.push
        )
        copies = Copies(store, relay.knows)
        self.spilling = Spilling(copies, lambda: describe_holders(store, names.of), node_id)
        self._directory = directory = Directory(node_id, store, relay, clients, self._free_here)
        self._serving = serving = Serving(
            node_id,
            self.spilling,
            requests,
            directory,
            copies,
            lambda: fork_helper(_MOVER),
            node.mover,
        )
        #: Whether large values are on their way to or from this node.
        self.moves_values = serving.mover.is_busy
        self._transfers = Transfers(node_id, self.spilling, relay, requests, directory, serving)
        self._objects = NodeObjects(
            node_id, self.spilling, relay, self._transfers, directory, copies, clients
        )
        self.unclaimed = self._objects.unclaimed
        self.adopted = AdoptedObjects(node_id, clients, relay, directory, head)
        MemoryService(node_id, store, self.adopted, clients, questions, names, self._table_sizes)

    def _table_sizes(self) -> dict[str, int]:
        objects = self._objects
        own = {
            "copies": len(objects.copies),
            "directory": len(objects.directory),
            "pulls": len(objects.pulls),
            "requests for copies": objects.pulls.waiting,
        }
        return own | self._transfers.table_sizes() | self._serving.table_sizes()

    def figures(self) -> list[tuple[str, dict[str, str], float]]:
        """Return the metrics of values on this node, to any thread: (name, labels, value)."""
        spilling, received = self.spilling, self._transfers.received
        moving = self._serving.mover.table_sizes()
        segments = list(self.store)
        totals = store_totals(self.store, segments)
        in_memory = sum(segment.in_memory for segment in segments)
        used = {
            "values": totals["used"] - totals["freed"] - totals["writing"],
            "freed": totals["freed"],
            "writing": totals["writing"],
            "pooled": totals["pooled"],
        }
        return [
            *(("object_store_used_bytes", {"state": state}, used[state]) for state in used),
            ("object_store_capacity_bytes", {}, self.store.capacity),
            ("object_store_spilled_bytes", {}, spilling.spilled),
            ("objects", {"place": "memory"}, in_memory),
            ("objects", {"place": "disk"}, len(segments) - in_memory),
            ("object_transfers", {"direction": "in"}, self._transfers.table_sizes()["arriving"]),
            ("object_transfers", {"direction": "out"}, moving["moving away"]),
            ("object_spill_bytes_total", {}, spilling.written),
            ("object_restore_bytes_total", {}, spilling.restored),
            ("object_transfer_bytes_total", {"direction": "in"}, received),
            ("object_room_waiters", {}, spilling.waiting),
        ]

    def _free_here(self, key: Key) -> None:
        self._objects.free_here(key)

    def process_ended(self, process_id: bytes, *, gone: bool, may_look: bool) -> None:
        """Free what a process of this node owned.

        What it has mapped stays if it was killed and is not gone; ``may_look``: it may live on and
        read that.
        """
        if gone:
            self._objects.process_died(process_id, may_look=may_look)
        else:
            self._objects.pulls.process_died(process_id)
        self.adopted.process_died(process_id)

    def messages_lost(self, node_id: bytes) -> None:
        self._objects.messages_lost(node_id)
        self._ask_owners(node_id)

    def node_died(self, node_id: bytes) -> None:
        self._objects.node_died(node_id)
        self._directory.node_died(node_id)
        self._ask_owners(node_id)
        self.adopted.node_died(node_id)

    def _ask_owners(self, node_id: bytes) -> None:
        """Have owners free what a node wrote for them if the message to them was lost."""
        for owner, segments in self._directory.written_on(node_id).items():
            self._push(owner, "unclaimed", (b"", node_id, segments))

    def stop_transfers(self) -> None:
        self._serving.mover.close()

    async def close(self) -> None:
        await self.spilling.close()
        self.store.close()
