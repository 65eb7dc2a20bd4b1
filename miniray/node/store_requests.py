"""What the processes of a node ask and tell of its object store."""

from __future__ import annotations

import asyncio
import contextlib
import time
from typing import TYPE_CHECKING

from miniray.exceptions import ObjectStoreFullError

if TYPE_CHECKING:
    from collections.abc import Callable

    from miniray.node.clients import Client, ClientServer
    from miniray.node.objects import NodeObjects

#: (node, segment of this node, form), and the descriptor of its memory.
_Mapped = tuple[tuple[int, int], int]


#: Seconds in which a process unmaps what it was told to, unless user code keeps it busy.
_RETURN_WITHIN = 2.0


class StoreRequests:
    """Answers them."""

    def __init__(
        self,
        node_id: bytes,
        objects: NodeObjects,
        clients: ClientServer,
        runs: Callable[[bytes], bool],
        room: asyncio.Event,
    ) -> None:
        """Register what it answers.

        Args:
            node_id: Of this node.
            objects: The store.
            clients: Where requests come from.
            runs: Whether a process of this node has not ended.
            room: Set when memory has come back.
        """
        self._room = room
        self._node_id = node_id
        self._objects = objects
        self._store = store = objects.store
        self._runs = runs
        memories = store.memories
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
                "seal_segment": lambda _client, number, made="": store.seal(number, made),
                "free_segment": lambda _client, node, number: objects.free(node, number),
                "unmapped": lambda client, numbers: store.unmap(numbers, client.process_id),
                "forked": lambda client: store.leave_open(client.process_id),
                "keep_segment": lambda client, number: store.keep(number, client.process_id),
                "mapped_memory": lambda client, number: memories.mapped(number, client.process_id),
                "unmapped_memory": lambda client, numbers: memories.unmapped(
                    numbers, client.process_id
                ),
            }
        )

    def _create(
        self, client: Client, size: int, form: int, owner: bytes, owner_node: bytes
    ) -> tuple[tuple[int, int], int] | None:
        """Room for a value: (segment, memory), and no descriptor if the writer has it mapped."""
        try:
            return self._room_for(client, size, form, owner, owner_node)
        except ObjectStoreFullError:
            if self._store.returning():
                return None
            raise

    async def _create_later(
        self, client: Client, size: int, form: int, owner: bytes, owner_node: bytes
    ) -> tuple[tuple[int, int], int]:
        """The same, when memory is on its way back from processes that were told to unmap it."""
        deadline = time.monotonic() + _RETURN_WITHIN
        while True:
            if not self._runs(client.process_id):
                raise ConnectionError("the process that asked has ended")  # nobody hears it
            try:
                return self._room_for(client, size, form, owner, owner_node)
            except ObjectStoreFullError:
                left = deadline - time.monotonic()
                if left <= 0 or not self._store.returning():
                    raise
                self._room.clear()
                with contextlib.suppress(asyncio.TimeoutError):
                    await asyncio.wait_for(self._room.wait(), left)

    def _room_for(
        self, client: Client, size: int, form: int, owner: bytes, owner_node: bytes
    ) -> tuple[tuple[int, int], int]:
        segment = self._objects.create(size, form, owner, owner_node, client.process_id)
        if owner_node == self._node_id and not self._runs(owner):
            self._store.free(segment.number)  # nobody will: its owner has ended
        memory = segment.memory
        fd = -1 if client.process_id in memory.writers else memory.fd
        return (segment.number, memory.number), fd

    def _map(self, client: Client, node_id: bytes, number: int, _size: int) -> _Mapped | None:
        if node_id != self._node_id:
            return None
        segment = self._store.map(number, client.process_id)
        return (segment.number, segment.form), segment.fd

    async def _fetch_and_map(
        self, client: Client, node_id: bytes, number: int, size: int
    ) -> _Mapped:
        segment = await self._objects.map(node_id, number, size, client.process_id)
        if not self._runs(client.process_id):  # it ended while it waited
            self._store.unmap([segment.number], client.process_id)
        return (segment.number, segment.form), segment.fd
