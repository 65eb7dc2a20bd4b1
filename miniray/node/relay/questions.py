"""Questions to every node, and there to its processes, on demand.

Responsible for the way of a question and its answers. No answer is awaited for longer than the
question may take: user code may keep a process busy for minutes, and a node may be out of reach.
Missing processes and nodes are named with the reason. The parts that have the facts answer.
"""

from __future__ import annotations

import asyncio
import inspect
import itertools
import time
from typing import TYPE_CHECKING, Any, NamedTuple

from miniray.messages.plain import Arguments
from miniray.node.base.clients import run_in
from miniray.node.relay.relay import NoAnswerError, RequestRefusedError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from miniray.node.base.clients import Client, ClientServer
    from miniray.node.relay.relay import NodeRequest, NodeRequests, RelayHub

#: Seconds that a node's answer may take beyond what its processes may.
_ON_THE_WAY = 1.0
_GONE = "it is gone"
_LATE = "it did not answer in time"


class Told(NamedTuple):
    """The answer of one node or process."""

    #: Its id.
    who: bytes
    answer: Any
    #: Why there is no answer; empty if there is one.
    missing: str


class Questions:
    """Sends questions to processes of this node and to other nodes, and answers other nodes."""

    def __init__(
        self, node_id: bytes, clients: ClientServer, relay: RelayHub, requests: NodeRequests
    ) -> None:
        self._node_id = node_id
        self._clients = clients
        self._relay = relay
        #: Requests to other daemons, which carry the questions.
        self.requests = requests
        #: This node's answers, by the name of the question: functions or coroutine functions
        #: that get the seconds that its processes may take, and the question's arguments.
        self.answers: dict[str, Callable[..., Any]] = {"processes": self._processes}
        self._numbers = itertools.count(1).__next__
        #: The awaited answers of processes, by question and process.
        self._open: dict[int, dict[bytes, asyncio.Future[tuple[Any, str]]]] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        clients.requests["ask_nodes"] = self._for_client
        clients.notices["answer"] = lambda client, number, told: self._answered(
            number, client.process_id, told
        )
        requests.handlers["question"] = self._on_question

    def _answered(self, number: int, who: bytes, told: Any) -> None:
        answer = self._open.get(number, {}).get(who)
        if answer is not None and not answer.done():  # else it came too late
            answer.set_result(told)

    def ended(self, who: bytes) -> None:
        """Give up the answers of a process of this node that is gone."""
        for number in self._open:
            self._answered(number, who, (None, _GONE))

    # --- questions of this node ----------------------------------------------------
    async def ask_processes(
        self, clients: Iterable[Client], what: str, arguments: Sequence[Any], seconds: float
    ) -> list[Told]:
        """Send processes of this node a question; each answers in its I/O thread (``Answers``)."""
        ids = [client.process_id for client in clients]
        number, loop = self._numbers(), asyncio.get_running_loop()
        answers = self._open[number] = {id: loop.create_future() for id in ids}
        body = (number, what, tuple(arguments), time.monotonic() + seconds)
        for id in ids:
            if not self._clients.push(id, "asked", body):
                self._answered(number, id, (None, _GONE))
        try:
            if answers:
                await asyncio.wait(answers.values(), timeout=seconds)
        finally:
            del self._open[number]
        return [
            Told(id, *(answer.result() if answer.done() else (None, _LATE)))
            for id, answer in answers.items()
        ]

    async def ask_nodes(
        self,
        what: str,
        arguments: Sequence[Any],
        seconds: float,
        nodes: Iterable[bytes] | None = None,
    ) -> list[Told]:
        """Send all nodes, this one first, or some a question; processes have ``seconds`` for it."""
        wanted = [self._node_id, *self._relay.nodes()] if nodes is None else list(nodes)
        wanted.sort(key=lambda node: node != self._node_id)
        asking = [self._ask_node(node, what, tuple(arguments), seconds) for node in wanted]
        return list(await asyncio.gather(*asking))

    async def _ask_node(
        self, node: bytes, what: str, arguments: tuple[Any, ...], seconds: float
    ) -> Told:
        if node == self._node_id:
            return Told(node, *await self._answer(what, arguments, seconds))
        question, limit = (what, arguments, seconds), seconds + _ON_THE_WAY
        try:
            told, _ = await self.requests.ask(node, "question", *question, limit=limit)
        except (RequestRefusedError, NoAnswerError) as error:
            return Told(node, None, str(error) if self._relay.knows(node) else _GONE)
        return Told(node, *told)

    # --- answering -----------------------------------------------------------------
    async def _processes(
        self, seconds: float, what: str, arguments: tuple[Any, ...], only: Any
    ) -> list[tuple[bytes, int, str, bytes, Any, str]]:
        """Pass a question on to drivers and workers of this node: of these ids or pids, or all.

        Returns:
            Id, pid, role and job of each, then the answer and why there is none.
        """
        clients = [each for each in self._clients.clients.values() if not each.is_command]
        if only is not None:
            wanted = {*only}
            clients = [each for each in clients if wanted & {each.process_id, each.pid}]
        told = await self.ask_processes(clients, what, arguments, seconds)
        return [
            (client.process_id, client.pid, client.role, client.job_id, answer, missing)
            for client, (_, answer, missing) in zip(clients, told, strict=True)
        ]

    async def _for_client(
        self, _client: Client, what: str, arguments: tuple[Any, ...], seconds: float, nodes: Any
    ) -> tuple[list[tuple[bytes, Any, str]], int]:
        """Send the question of a command or a driver; ``nodes`` are ids, or None for all."""
        return [tuple(each) for each in await self.ask_nodes(what, arguments, seconds, nodes)], -1

    def _on_question(
        self, asked: NodeRequest, what: str, arguments: Sequence[Any], seconds: float
    ) -> None:
        """Answer another daemon."""
        run_in(self._tasks, self._reply(asked, what, arguments, seconds))

    async def _reply(
        self, asked: NodeRequest, what: str, arguments: Sequence[Any], seconds: float
    ) -> None:
        asked.answer(await self._answer(what, arguments, seconds))

    async def _answer(self, what: str, arguments: Sequence[Any], seconds: float) -> tuple[Any, str]:
        """Return this node's answer, or why there is none."""
        handler = self.answers.get(what)
        if handler is None:
            return None, f"a node has no answer to {what!r}; it has {sorted(self.answers)}"
        try:
            answer = handler(seconds, *Arguments(handler, 1).check(tuple(arguments)))
            return (await answer if inspect.isawaitable(answer) else answer), ""
        except Exception as error:  # noqa: BLE001 - it is the answer
            return None, f"{type(error).__name__}: {error}"
