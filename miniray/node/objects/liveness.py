"""Memory that is mapped in processes which tell this daemon nothing.

Such are the children of user code, which have mapped what their parent had, and drivers that left
the cluster and look at their values on. They hold one end of a pipe whose other end is here
(``objects/liveness.py``). In the store the pipe stands for them, like a process that has segments
mapped, until it ends.
"""

from __future__ import annotations

import asyncio
import os
from typing import TYPE_CHECKING

from miniray.common.ids import new_id

if TYPE_CHECKING:
    from miniray.node.base.clients import Client, ClientServer
    from miniray.node.store.segments import SegmentStore
    from miniray.node.workers.process_names import ProcessNames


class _Pipe:
    """The end of a pipe of which a process, and its children, have the other."""

    __slots__ = ("fd", "stands_for")

    def __init__(self, fd: int) -> None:
        self.fd = fd
        #: Those who have the other end, as if they were one process.
        self.stands_for = new_id()


class Liveness:
    """All these pipes."""

    def __init__(self, store: SegmentStore, clients: ClientServer, names: ProcessNames) -> None:
        """Register what it answers.

        Args:
            store: What is mapped.
            clients: The processes that are connected.
            names: What processes are called; here is known what some others are.
        """
        self._store = store
        self._names = names
        #: By process that has, or had, the other end, and a number of its choice.
        self._pipes: dict[bytes, dict[int, _Pipe]] = {}
        clients.quick["liveness"] = self._begin
        clients.notices["forked"] = self._forked

    def __len__(self) -> int:
        return sum(map(len, self._pipes.values()))

    def _begin(self, client: Client, number: int) -> tuple[None, int]:
        """A process gets the end of a pipe."""
        fd, others = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
        loop = asyncio.get_running_loop()
        loop.call_soon(os.close, others)  # a copy is on its way by then
        self._pipes.setdefault(client.process_id, {})[number] = _Pipe(fd)
        loop.add_reader(fd, self._look, client.process_id, number)
        return None, others

    def _forked(self, client: Client, number: int) -> None:
        """A process forks: its child has mapped what it has, and the end of this pipe."""
        process = client.process_id
        self._store.leave_open(process)
        pipe = self._pipes.get(process, {}).get(number)
        if pipe is not None:
            self._maps(pipe, process, f"children of {self._names.of(process)}")

    def process_left(self, process_id: bytes, name: str) -> None:
        """A process has hung up, or ended: it may live on, or its children may.

        Args:
            process_id: Which one.
            name: What it was.
        """
        for number, pipe in list(self._pipes.get(process_id, {}).items()):
            if self._look(process_id, number):
                self._maps(pipe, process_id, f"{name}, which has left, or children of it")

    def _maps(self, pipe: _Pipe, process_id: bytes, name: str) -> None:
        """Those who have the other end have mapped what a process has."""
        for number in self._store.mapped_by(process_id):
            if pipe.stands_for not in self._store.get(number).mappers:
                self._store.map(number, pipe.stands_for)
                self._names.others[pipe.stands_for] = name

    def _look(self, process_id: bytes, number: int) -> bool:
        """Whether anybody still has the other end of a pipe."""
        pipes = self._pipes[process_id]
        pipe = pipes[number]
        try:
            if os.read(pipe.fd, 1024):
                return True  # somebody took it for a file of its own
        except BlockingIOError:
            return True
        del pipes[number]
        if not pipes:
            del self._pipes[process_id]
        asyncio.get_running_loop().remove_reader(pipe.fd)
        os.close(pipe.fd)
        self._names.others.pop(pipe.stands_for, None)
        self._store.process_died(pipe.stands_for)
        return False

    def close(self) -> None:
        """Look at none of them any more."""
        loop = asyncio.get_running_loop()
        for pipes in self._pipes.values():
            for pipe in pipes.values():
                loop.remove_reader(pipe.fd)
                os.close(pipe.fd)
        self._pipes.clear()
