"""What the processes of a node ask and tell of its object store."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from miniray.core.descriptors import OUT_OF_DESCRIPTORS
from miniray.core.warm_memory import ON_DISK
from miniray.exceptions import ObjectStoreFullError
from miniray.node.room import Claim
from miniray.node.turns import Turns

if TYPE_CHECKING:
    from collections.abc import Callable

    from miniray.node.clients import Client, ClientServer
    from miniray.node.memories import Memory
    from miniray.node.objects import NodeObjects
    from miniray.node.segments import Segment
    from miniray.node.spilling import Spilling

#: (node, segment of this node, form), and the descriptor of its memory.
_Mapped = tuple[tuple[int, int], int]
#: (segment, memory or ON_DISK), and the descriptor to write to or -1.
_Created = tuple[tuple[int, int], int]


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
        self._room = spilling.room
        self._node_id = node_id
        self._objects = objects
        self._store = store = objects.store
        self._runs = runs
        memories = store.memories
        self.turns = Turns()
        clients.requests["take_turn"] = self._take_turn
        clients.requests["map_segment"] = self._fetch_and_map
        clients.requests["create_segment"] = self._create_later
        clients.quick.update(
            {
                "create_segment": self._create,
                "memory": lambda _client, number: (None, memories.descriptor(number)),
                "map_segment": self._map,
            }
        )
        clients.notices.update(
            {
                "end_turn": lambda client, ticket: self._end_turn(client.process_id, ticket),
                "seal_segment": lambda _client, number, made="": store.seal(number, made),
                "free_segment": lambda _client, node, number: objects.free(node, number),
                "unmapped": lambda client, numbers: store.unmap(numbers, client.process_id),
                "in_use": lambda client, numbers: store.in_use(numbers, client.process_id),
                "keep_segment": lambda client, number: store.keep(number, client.process_id),
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
        _patient: bool,
    ) -> _Created | None:
        """Room for a value: (segment, memory), and no descriptor if the writer has it mapped."""
        if not self._room.is_free(size):
            return None
        try:
            return self._room_for(client, size, form, owner, owner_node)
        except ObjectStoreFullError:
            return None
        except OSError as error:
            if error.errno in OUT_OF_DESCRIPTORS:  # values have to leave memory
                return None
            raise
        finally:
            self._spilling.spill_ahead()

    async def _create_later(
        self,
        client: Client,
        size: int,
        form: int,
        owner: bytes,
        owner_node: bytes,
        patient: bool,
    ) -> _Created:
        """The same, when there is room; before it would wait for others, on disk."""

        async def wait(*, patient: bool) -> _Created:
            memory = await self._room.get(Claim(size, client.process_id, patient=patient))
            if not self._runs(client.process_id):
                self._store.put_back(memory)
                raise ConnectionError("the process that asked has ended")  # nobody hears it
            return self._room_for(client, size, form, owner, owner_node, memory)

        try:
            return await wait(patient=False)
        except ObjectStoreFullError as error:
            if not patient or size > error.capacity:
                raise
        place = await self._spilling.place_for(size)
        if place is None:
            return await wait(patient=True)
        segment = self._objects.create_on_disk(place, form, owner, owner_node, client.process_id)
        if not self._runs(client.process_id):
            self._store.seal(segment.number)
            self._store.free(segment.number)
            raise ConnectionError("the process that asked has ended")
        self._free_if_unowned(segment, owner, owner_node)
        return (segment.number, ON_DISK), place.fd

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
        self,
        client: Client,
        node_id: bytes,
        number: int,
        _size: int,
        _request: int,
        _patient: bool,
    ) -> _Mapped | None:
        segment = self._objects.map_here(node_id, number, client.process_id)
        return None if segment is None else ((segment.number, segment.form), segment.fd)

    async def _fetch_and_map(
        self,
        client: Client,
        node_id: bytes,
        number: int,
        size: int,
        request: int,
        patient: bool,
    ) -> _Mapped:
        process = client.process_id
        segment = await self._objects.map(node_id, number, size, process, request, patient=patient)
        if not self._runs(process):  # it ended while it waited
            self._store.unmap([segment.number], process)
        return (segment.number, segment.form), segment.fd

    async def _take_turn(self, client: Client, ticket: int) -> tuple[None, int]:
        if not self._runs(client.process_id):
            raise ConnectionError("the process that asked has ended")  # nobody hears it
        await self.turns.take(client.process_id, ticket)
        return None, -1

    def _end_turn(self, process_id: bytes, ticket: int) -> None:
        # A request that was read just before is a task that has not begun to wait yet.
        asyncio.get_running_loop().call_soon(self.turns.end, process_id, ticket)
