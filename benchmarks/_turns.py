"""Lets groups of processes work in turns, so that each meets the same machine as the others.

Whoever has no turn waits in a read and takes no processor time. What the members of a group
send at the end of a turn is given to the process that measures.
"""

from __future__ import annotations

import os
import threading
from multiprocessing.connection import Client, Connection, Listener
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

_KEY = b"benchmark"  # the socket is in a folder of the user's own

#: A turn of every group: what its members sent, in the order of their ranks.
Round = dict[str, list[Any]]


class Turns:
    """The process that gives the turns; they are given in a thread.

    Args:
        path: Path of the socket to make.
        groups: Names of the groups.
        members: Number of members of each.
        rounds: Turns of each group.
        before_round: Called before each round with its number, and with a number more at the end.

    Attributes:
        address: What members need to know.
        pids: The processes of all members, once they have come.
    """

    def __init__(
        self,
        path: str,
        groups: Sequence[str],
        members: int,
        rounds: int,
        before_round: Callable[[int], None],
    ) -> None:
        self.address = path
        self.pids: set[int] = set()
        self._before_round = before_round
        self._groups = list(groups)
        self._members = members
        self._rounds = rounds
        self._listener = Listener(path, "AF_UNIX", backlog=members * len(groups), authkey=_KEY)
        self._found: list[Round] = []
        self._error: BaseException | None = None
        # A daemon: if a group never comes, nothing waits for it.
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def result(self) -> list[Round]:
        """Wait until all turns are over; what the members sent."""
        self._thread.join()
        if self._error is not None:
            raise self._error
        return self._found

    def _run(self) -> None:
        connections: dict[tuple[str, int], Connection] = {}
        try:
            while len(connections) < self._members * len(self._groups):
                connection = self._listener.accept()
                group, rank, pid = connection.recv()
                connections[group, rank] = connection
                self.pids.add(pid)
            for number in range(self._rounds):
                self._before_round(number)
                # Whoever came second comes first in the next round.
                order = self._groups if number % 2 else self._groups[::-1]
                self._found.append({name: self._turn(connections, name) for name in order})
            self._before_round(self._rounds)
            for connection in connections.values():
                connection.send(False)
        except (OSError, EOFError) as error:
            self._error = RuntimeError(f"A process ended before its last turn: {error!r}")
        finally:
            for connection in connections.values():
                connection.close()
            self._listener.close()

    def _turn(self, connections: dict[tuple[str, int], Connection], group: str) -> list[Any]:
        members = [connections[group, rank] for rank in range(self._members)]
        for member in members:
            member.send(True)
        return [member.recv() for member in members]


def take_turns(address: str, group: str, rank: int, work: Callable[[], Any]) -> None:
    """Work at each turn of the group, and send what the work returns."""
    with Client(address, "AF_UNIX", authkey=_KEY) as connection:
        connection.send((group, rank, os.getpid()))
        while connection.recv():
            connection.send(work())
