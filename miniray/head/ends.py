"""How processes ended: whoever had work in one sees its socket close, and asks for the rest."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from miniray.head.clients import ClientDirectory, ProcessExit

    #: Who asked, and the number of the request.
    Waiter = tuple[bytes, int]

#: So many are remembered: of processes that ended, and of those that are asked for and go on.
REMEMBERED = 1000


class ProcessEnds:
    """The ends of late, and who waits to hear of others."""

    def __init__(self, clients: ClientDirectory) -> None:
        self._clients = clients
        self._known: dict[bytes, ProcessExit] = {}
        self._waiting: dict[bytes, list[Waiter]] = {}
        clients.on_ended.append(self._ended)

    def wait(self, waiter: Waiter, process_id: bytes) -> None:
        """Answer a request when it is known how a process ended.

        The answer is (exit code or None, pid or 0, whether its node was lost, what else is known).
        Who asks has a deadline of its own: a process that only lost its socket may go on.
        """
        known = self._known.get(process_id)
        if known is not None:
            self._answer(waiter, known)
            return
        self._waiting.setdefault(process_id, []).append(waiter)
        if len(self._waiting) > REMEMBERED:
            del self._waiting[next(iter(self._waiting))]

    def _ended(self, process_id: bytes, how: ProcessExit) -> None:
        self._known[process_id] = how
        if len(self._known) > REMEMBERED:
            del self._known[next(iter(self._known))]
        for waiter in self._waiting.pop(process_id, ()):
            self._answer(waiter, how)

    def _answer(self, waiter: Waiter, how: ProcessExit) -> None:
        self._clients.answer(*waiter, (how.code, how.pid, how.with_node, how.detail))
