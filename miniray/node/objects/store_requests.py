"""Requests of the processes of a node about its object store, and values on other nodes."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from miniray.common.process_limits import OUT_OF_DESCRIPTORS
from miniray.exceptions import ObjectStoreFullError
from miniray.node.store.admission_queue import Claim
from miniray.node.store.spill_files import DiskPlace
from miniray.objects.warm_memory import ON_DISK

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Iterable

    from miniray.node.base.clients import Answer, Client, ClientServer
    from miniray.node.objects.objects import NodeObjects
    from miniray.node.store.memories import Memory
    from miniray.node.store.segments import Key, Segment
    from miniray.node.store.spilling import Spilling

#: (segment of this node, form, where it begins), and the descriptor of its memory or file.
_Mapped = tuple[tuple[int, int, int], int]
#: (segment, memory or ON_DISK), and the descriptor to write to or -1.
_Created = tuple[tuple[int, int], int]

#: The answer that a value is here.
_HERE: tuple[None, int] = (None, -1)


class StoreRequests:
    """Answers them."""

    def __init__(
        self,
        node_id: bytes,
        objects: NodeObjects,
        clients: ClientServer,
        spilling: Spilling,
        runs: Callable[[bytes], bool],
    ) -> None:
        """Register what it answers.

        Args:
            node_id: Of this node.
            objects: The store.
            clients: Where requests come from.
            spilling: What makes room in it.
            runs: Whether a process of this node has not ended.
        """
        self._spilling = spilling
        self._node_id = node_id
        self._objects = objects
        self._store = store = objects.store
        self._runs = runs
        memories = store.memories
        clients.requests.update(
            {
                "create_segment": self._create,
                "memory": lambda _client, number: (None, memories.descriptor(number)),
                "map_segment": self._map,
            }
        )
        clients.notices.update(
            {
                "seal_segment": lambda _client, number, made: objects.seal(number, made),
                "discard_segment": lambda _client, number: objects.discard(number),
                "free_segment": lambda _client, *key: objects.directory.free(key),
                "unmapped": lambda client, numbers: store.unmap(numbers, client.process_id),
                "forked": lambda client: store.leave_open(client.process_id),
                "mapped_memory": lambda client, number: memories.mapped(number, client.process_id),
                "unmapped_memory": lambda client, numbers: memories.unmapped(
                    numbers, client.process_id
                ),
            }
        )

    def _create(
        self,
        client: Client,
        size: int,
        form: int,
        owner: bytes,
        owner_node: bytes,
    ) -> _Created | Awaitable[_Created]:
        """Make a segment; no descriptor goes along if the writer has its memory mapped."""
        if not self._spilling.queue:
            try:
                return self._room_for(client, size, form, owner, owner_node)
            except ObjectStoreFullError:
                pass
            except OSError as error:
                if error.errno not in OUT_OF_DESCRIPTORS:  # else values have to leave memory
                    raise
            finally:
                self._spilling.spill_ahead()
        return self._create_later(client, size, form, owner, owner_node)

    async def _create_later(
        self,
        client: Client,
        size: int,
        form: int,
        owner: bytes,
        owner_node: bytes,
    ) -> _Created:
        """Wait for memory; the value goes to disk if only what processes look at is in the way."""
        process = client.process_id
        claim = Claim(size, process)
        if size > self._store.capacity:
            await self._spilling.queue.get(claim)  # it says so; only copies may be as large
        room = await self._spilling.room_for(claim)
        if not self._runs(process):
            self._spilling.give_back(room)
            raise ConnectionError("the process that asked has ended")
        if not isinstance(room, DiskPlace):
            return self._room_for(client, size, form, owner, owner_node, room)
        segment = self._objects.create_on_disk(room, form, owner, owner_node, process)
        self._free_if_unowned(segment, owner, owner_node)
        return (segment.number, ON_DISK), room.fd

    def _room_for(
        self,
        client: Client,
        size: int,
        form: int,
        owner: bytes,
        owner_node: bytes,
        memory: Memory | None = None,
    ) -> _Created:
        segment = self._objects.create(size, form, owner, owner_node, client.process_id, memory)
        self._free_if_unowned(segment, owner, owner_node)
        memory = segment.memory
        assert memory is not None
        fd = -1 if client.process_id in memory.writers else memory.fd
        return (segment.number, memory.number), fd

    def _free_if_unowned(self, segment: Segment, owner: bytes, owner_node: bytes) -> None:
        if owner_node == self._node_id and not self._runs(owner):
            self._store.free(segment.number)  # nobody will: its owner has ended

    def _map(
        self, client: Client, node_id: bytes, number: int, home: bytes, size: int, request: int
    ) -> _Mapped | Awaitable[_Mapped]:
        key = (node_id, number, home)
        segment = self._objects.map_here(key, client.process_id)
        if segment is None:
            return self._fetch_and_map(client, key, size, request)
        return _shown(segment)

    async def _fetch_and_map(self, client: Client, key: Key, size: int, request: int) -> _Mapped:
        process = client.process_id
        segment = await self._objects.map(key, size, process, request)
        if not self._runs(process):  # it ended while it waited
            self._store.unmap([segment.number], process)
            raise ConnectionError("the process that asked has ended")
        return _shown(segment)


class FetchRequests:
    """Answers them."""

    def __init__(
        self, objects: NodeObjects, clients: ClientServer, runs: Callable[[bytes], bool]
    ) -> None:
        """Register what it answers.

        Args:
            objects: The store, and what is on its way there.
            clients: Where requests come from.
            runs: Whether a process of this node has not ended.
        """
        self._objects = objects
        self._runs = runs
        clients.requests["are_here"] = self._are_here
        clients.requests["lost_values"] = self._lost
        clients.requests["fetch_segment"] = self._fetch
        clients.notices["prefetch"] = self._prefetch
        clients.notices["withdraw"] = self._withdraw

    def _are_here(
        self, _client: Client, keys: Iterable[tuple[bytes, int, bytes]]
    ) -> tuple[list[bool], int]:
        return [self._objects.is_here(key) for key in keys], -1

    def _lost(self, client: Client, node_id: bytes) -> tuple[list[int], int]:
        """Name the segments of a node with values of a process that no node has any more."""
        return self._objects.directory.lost(client.process_id, node_id), -1

    def _fetch(
        self, client: Client, node_id: bytes, number: int, home: bytes, size: int, request: int
    ) -> Answer | Awaitable[Answer]:
        """Answer when a value is here."""
        key = (node_id, number, home)
        if self._objects.is_here(key):
            return _HERE
        return self._fetch_later(client, key, size, request)

    async def _fetch_later(self, client: Client, key: Key, size: int, request: int) -> Answer:
        if not self._runs(client.process_id):
            raise ConnectionError("the process that asked has ended")
        await self._objects.pulls.fetch(client.process_id, request, key, size)
        return _HERE

    def _prefetch(
        self, client: Client, wanted: Iterable[tuple[bytes, int, bytes, int, int]]
    ) -> None:
        """Fetch values that a call which has arrived will read."""
        for node_id, number, home, size, request in wanted:
            key = (node_id, number, home)
            self._objects.pulls.prefetch(client.process_id, request, key, size)

    def _withdraw(self, client: Client, requests: Iterable[int]) -> None:
        """Withdraw requests whose answers nobody waits for."""
        # A request that was read just before is a task that has not begun to wait yet.
        loop = asyncio.get_running_loop()
        loop.call_soon(self._withdraw_now, client.process_id, requests)

    def _withdraw_now(self, process_id: bytes, requests: Iterable[int]) -> None:
        for request in requests:
            self._objects.pulls.withdraw(process_id, request)


def _shown(segment: Segment) -> _Mapped:
    """Return what a process needs to map a segment, in memory or on disk."""
    return (segment.number, segment.form, segment.offset), segment.fd
