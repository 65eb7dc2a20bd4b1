"""What the processes of a node ask of values on other nodes, besides mapping them."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Iterable

    from miniray.node.base.clients import Answer, Client, ClientServer
    from miniray.node.objects.objects import NodeObjects

_HERE: tuple[None, int] = (None, -1)


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
        clients.requests["fetch_segment"] = self._fetch
        clients.notices["prefetch"] = self._prefetch
        clients.notices["withdraw"] = self._withdraw

    def _are_here(
        self, _client: Client, places: Iterable[tuple[bytes, int]]
    ) -> tuple[list[bool], int]:
        return [self._objects.is_here(*place) for place in places], -1

    def _fetch(
        self, client: Client, node_id: bytes, number: int, size: int, request: int
    ) -> Answer | Awaitable[Answer]:
        """Answer when a value is here."""
        if self._objects.is_here(node_id, number):
            return _HERE
        return self._fetch_later(client, node_id, number, size, request)

    async def _fetch_later(
        self, client: Client, node_id: bytes, number: int, size: int, request: int
    ) -> Answer:
        if not self._runs(client.process_id):
            raise ConnectionError("the process that asked has ended")
        await self._objects.ahead.fetch(client.process_id, request, (node_id, number), size)
        return _HERE

    def _prefetch(self, client: Client, wanted: Iterable[tuple[bytes, int, int, int]]) -> None:
        """Values that a call which has arrived will read."""
        for node_id, number, size, request in wanted:
            self._objects.ahead.prefetch(client.process_id, request, (node_id, number), size)

    def _withdraw(self, client: Client, requests: Iterable[int]) -> None:
        """Requests whose answers nobody waits for any more."""
        # A request that was read just before is a task that has not begun to wait yet.
        loop = asyncio.get_running_loop()
        loop.call_soon(self._withdraw_now, client.process_id, requests)

    def _withdraw_now(self, process_id: bytes, requests: Iterable[int]) -> None:
        for request in requests:
            self._objects.ahead.withdraw(process_id, request)
            self._objects.pulls.withdraw(process_id, request)
