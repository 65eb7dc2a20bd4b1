"""What the processes of this node do: stacks and profiles, from inside and, else, from outside."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Collection

    from miniray.node.base.clients import Client, ClientServer
    from miniray.node.relay.questions import Questions, Told
    from miniray.node.workers.process_names import ProcessNames


class Probes:
    """Answers what commands ask of the processes of this node."""

    def __init__(self, clients: ClientServer, questions: Questions, names: ProcessNames) -> None:
        self._clients = clients
        self._questions = questions
        self._names = names
        questions.answers["stack"] = self._stacks

    def _chosen(self, pids: Collection[int]) -> list[Client]:
        """Return the processes of these pids; without pids all that run user code."""
        return [
            client
            for client in self._clients.clients.values()
            if not client.is_command and (not pids or client.pid in pids)
        ]

    async def _ask(self, clients: list[Client], seconds: float, *args: Any) -> list[Told]:
        return await self._questions.ask_processes(clients, "probe", args, seconds)

    async def _stacks(self, seconds: float, pids: list[int]) -> list[dict[str, Any]]:
        """Return what these processes do, all if there are no pids, and how it was seen."""
        clients = self._chosen(pids)
        told = await self._ask(clients, seconds, "stack")
        return await asyncio.gather(*map(self._stacks_of, clients, told))

    async def _stacks_of(self, client: Client, told: Told) -> dict[str, Any]:
        way, note = "in the process", ""
        rank, stacks = told.answer or (None, [])
        if told.missing:
            from miniray.profiling import outside

            way, stacks, note = await outside.stacks(client.pid)
        seen: dict[str, Any] = {"way": way, "stacks": stacks, "note": note, "rank": rank}
        return self._about(client) | seen

    def _about(self, client: Client) -> dict[str, Any]:
        name = "driver" if client.is_driver else self._names.work_of(client.process_id)
        return {"pid": client.pid, "worker_id": client.process_id.hex(), "name": name}
