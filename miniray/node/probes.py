"""What this node's processes are doing: stacks, profiles and logs, read from inside or outside."""

from __future__ import annotations

import asyncio
import dataclasses
import math
import os
import tempfile
import time
from typing import TYPE_CHECKING, Any

from miniray.common.spans import SPANS

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from miniray.node.base.clients import Client, ClientServer
    from miniray.node.base.node_config import NodeConfig
    from miniray.node.relay.questions import Questions, Told
    from miniray.node.workers.process_names import ProcessNames

#: Seconds that a process may take for its answer beside what a profile takes.
_GRACE = 5.0
#: Seconds that a process may take to report its rank.
_SOON = 1.0
#: Silent processes that are examined from outside at a time.
_MOST_LOOKERS = 8
#: Round trips to a node, of which the quickest gives its clock.
_ROUND_TRIPS = 5


@dataclasses.dataclass(eq=False, repr=False)
class Probes:
    """Answers commands' questions to the processes of this node."""

    _clients: ClientServer
    _questions: Questions
    _names: ProcessNames
    _node: NodeConfig

    def __post_init__(self) -> None:
        self._lookers = asyncio.Semaphore(_MOST_LOOKERS)
        #: Pids of processes that are being profiled.
        self._profiled: set[int] = set()
        #: When the recording ends (``time.monotonic``), and processes that have begun meanwhile.
        self._recorded_until = 0.0
        self._late: list[tuple[Client, asyncio.Task[list[Told]]]] = []
        self._questions.answers.update(
            # Silent ones are then examined from outside.
            stack=lambda seconds, ids: self._of_each(ids, lambda of: self._stack(of, seconds / 4)),
            profile=lambda _, ids, *how: self._of_each(ids, lambda of: self._profile(of, *how)),
            timeline=self._timeline,
            clock=lambda _seconds: (self._node.machine, time.time()),
            clocks=self._clocks,
            logs=self._logs,
        )

    def _all(self) -> list[Client]:
        """Return the processes that run user code."""
        return [each for each in self._clients.clients.values() if not each.is_command]

    async def _ask(self, clients: list[Client], seconds: float, *args: Any) -> list[Told]:
        return await self._questions.ask_processes(clients, "probe", args, seconds)

    async def _of_each(
        self, ids: list[bytes], look: Callable[[Client], Awaitable[dict[str, Any]]]
    ) -> list[dict[str, Any]]:
        """Return the answer of each of these processes, with its rank and a note, if it has."""

        async def find(client: Client) -> dict[str, Any]:
            try:
                return await look(client)
            except (OSError, ValueError) as error:  # the others are examined all the same
                return {"note": f"It could not be looked at: {error}."}

        wanted = set(ids)
        clients = [each for each in self._all() if each.process_id in wanted]
        ranks = self._ask(clients, _SOON, "rank")
        told, *found = await asyncio.gather(ranks, *map(find, clients))
        nothing: dict[str, Any] = {"way": "", "note": "", "stacks": [], "samples": []}
        return [
            self._about(client) | nothing | {"rank": rank.answer} | each
            for client, rank, each in zip(clients, told, found, strict=True)
        ]

    async def _stack(self, client: Client, seconds: float) -> dict[str, Any]:
        [told] = await self._ask([client], seconds, "stack")
        if not told.missing:
            return {"way": "the process itself", "stacks": told.answer}
        from miniray.profiling import outside

        async with self._lookers:  # each is a process
            way, stacks, note = await outside.stacks(client.pid)
        return {"way": way, "stacks": stacks, "note": note}

    async def _profile(
        self, client: Client, kind: str, length: float, leaks: bool
    ) -> dict[str, Any]:
        """Profile a process for ``length`` seconds: "cpu" or "memory"."""
        if client.pid in self._profiled:
            return {"note": "It is being profiled already; try again when that has ended."}
        self._profiled.add(client.pid)
        try:
            if kind == "memory":
                return await self._allocations(client, length, leaks)
            return await self._cpu(client, length)
        finally:
            self._profiled.discard(client.pid)

    async def _cpu(self, client: Client, length: float) -> dict[str, Any]:
        from miniray.profiling import outside

        samples, failure = await outside.cpu(client.pid, length)
        if not failure:
            note = outside.STOPPED if outside.is_stopped(client.pid) else ""
            return {"way": "py-spy", "samples": samples, "note": note}
        [told] = await self._ask([client], length + _GRACE, "cpu", length)
        if told.missing:
            return {"note": f"{outside.silence(client.pid, told.missing)} {failure}"}
        return {"way": "the process itself", "samples": told.answer}

    async def _allocations(self, client: Client, length: float, leaks: bool) -> dict[str, Any]:
        from miniray.profiling import outside

        with tempfile.TemporaryDirectory(prefix="miniray-profile-") as folder:
            path = os.path.join(folder, "allocations")
            [told] = await self._ask([client], length + _GRACE, "memory", length, path, leaks)
            if told.missing:
                return {"note": outside.silence(client.pid, told.missing)}
            way, samples = told.answer
            if way == "memray":
                samples = await outside.read_memray(path, leaks)
        return {"way": way, "samples": samples}

    def joined(self, client: Client) -> None:
        """Have a process that begins during a recording take part in the rest of it."""
        left = self._recorded_until - time.monotonic()
        if left > 0 and not client.is_command:
            asking = self._ask([client], left + _GRACE, "timeline", left)
            self._late.append((client, asyncio.ensure_future(asking)))

    async def _timeline(self, _seconds: float, length: float) -> list[dict[str, Any]]:
        """Record this daemon and its processes for ``length`` seconds (0: their recent past)."""
        clients = self._all()
        if length > 0:
            SPANS.begin()
            self._recorded_until = time.monotonic() + length
        try:
            told = await self._ask(clients, length + _GRACE, "timeline", length)
            if length > 0:
                await asyncio.sleep(self._recorded_until - time.monotonic())  # with no process
                late, self._late = self._late, []
                for client, asking in late:
                    clients.append(client)
                    told += await asking
        finally:
            own, left_out = SPANS.end() if length > 0 else ([], 0)
        nothing: dict[str, Any] = {"spans": [], "left_out": 0, "ahead": 0.0, "note": ""}
        found = [
            self._about(client) | nothing | (each.answer or {"note": f"{each.missing}."})
            for client, each in zip(clients, told, strict=True)
        ]
        ahead = time.time() - time.perf_counter()
        daemon = {"pid": os.getpid(), "worker_id": "", "name": "daemon", "ahead": ahead}
        return [nothing | daemon | {"spans": own, "left_out": left_out}, *found]

    async def _clocks(self, _seconds: float, nodes: list[bytes]) -> dict[bytes, Any]:
        """Return how many seconds nodes' clocks are ahead of this one's, and how exact that is."""
        told = await asyncio.gather(*map(self._clock_of, nodes))
        return dict(zip(nodes, told, strict=True))

    async def _clock_of(self, node: bytes) -> tuple[float, float] | None:
        """Compare clocks as NTP does: of some round trips, the quickest is the most exact.

        Nodes of one machine have one clock; None of a node that does not answer.
        """
        found, quickest = None, math.inf
        for _ in range(_ROUND_TRIPS):
            began = time.time()
            [told] = await self._questions.ask_nodes("clock", (), _SOON, [node])
            half = (time.time() - began) / 2
            if told.missing:
                break
            machine, now = told.answer
            if machine == self._node.machine:
                return 0.0, 0.0
            if half < quickest:
                found, quickest = (now - began - half, half), half
        return found

    async def _logs(self, seconds: float, query: dict[str, Any], ends: Any) -> dict[str, Any]:
        """Read log files, for the fields of a ``LogQuery``.

        ``ends``: by node, what was read already; None at the first read.
        """
        from miniray.logs.log_files import LogQuery, read_on, search

        folder, wanted = self._node.logs, LogQuery(**query)
        if ends is None:
            return await search(folder, wanted, seconds)
        own = ends.get(self._node.node_id.hex(), {})
        return await asyncio.to_thread(read_on, folder, wanted, own)

    def _about(self, client: Client) -> dict[str, Any]:
        name = "driver" if client.is_driver else self._names.work_of(client.process_id)
        return {"pid": client.pid, "worker_id": client.process_id.hex(), "name": name}
