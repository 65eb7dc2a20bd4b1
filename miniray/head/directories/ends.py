"""How processes ended: whoever had work in one sees its socket close, and asks for the rest."""

from __future__ import annotations

from typing import TYPE_CHECKING

from miniray.head.directories.clients import ProcessExit

if TYPE_CHECKING:
    from miniray.head.directories.clients import ClientDirectory
    from miniray.head.directories.grants import Timers

    #: Who asked, and the number of the request.
    Waiter = tuple[bytes, int]

#: So many processes that ended are remembered.
REMEMBERED = 1000
#: Seconds after which it is answered that nothing is known: a process may only have lost its
#: socket, or have ended under an earlier head.
UNTIL_UNKNOWN = 10.0


class ProcessEnds:
    """The ends of late, and who waits to hear of others."""

    def __init__(self, clients: ClientDirectory, timers: Timers) -> None:
        self._clients = clients
        self._timers = timers
        self._known: dict[bytes, ProcessExit] = {}
        #: Why processes are being ended whose end was not heard of yet.
        self._reasons: dict[bytes, str] = {}
        self._waiting: dict[bytes, list[Waiter]] = {}
        clients.on_ended.append(self._ended)

    def wait(self, waiter: Waiter, process_id: bytes) -> None:
        """Answer a request when it is known how a process ended.

        The answer is (exit code or None, pid or 0, whether its node was lost, what else is known).
        """
        known = self._known.get(process_id)
        if known is not None:
            self._answer(waiter, known)
            return
        waiting = self._waiting.setdefault(process_id, [])
        waiting.append(waiter)
        if len(waiting) == 1:
            unknown = ProcessExit()
            self._timers.call_later(UNTIL_UNKNOWN, lambda: self._tell(process_id, unknown))

    def explain(self, process_id: bytes, reason: str) -> None:
        """A process is about to be ended, and why, as a sentence."""
        self._reasons[process_id] = reason

    def _ended(self, process_id: bytes, how: ProcessExit) -> None:
        reason = self._reasons.pop(process_id, None)
        if reason is not None:
            # How it was ended tells nobody anything: a signal would read as the kernel's doing.
            how = how._replace(code=None, detail=reason)
        self._known[process_id] = how
        if len(self._known) > REMEMBERED:
            del self._known[next(iter(self._known))]
        self._tell(process_id, how)

    def _tell(self, process_id: bytes, how: ProcessExit) -> None:
        for waiter in self._waiting.pop(process_id, ()):
            self._answer(waiter, how)

    def _answer(self, waiter: Waiter, how: ProcessExit) -> None:
        self._clients.answer(*waiter, (how.code, how.pid, how.with_node, how.detail))
