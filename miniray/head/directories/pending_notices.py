"""Tells drivers why what they asked for waits: one line for all that wait for the same reason.

Gathers for a moment, counts, and bounds the lines of a driver. Knows nothing of how reasons are
found, nor of how a driver shows them.
"""

from __future__ import annotations

import dataclasses
import math
from typing import TYPE_CHECKING, NamedTuple

from miniray.common.names import short_name

if TYPE_CHECKING:
    from collections.abc import Callable

    from miniray.head.directories.clients import ClientDirectory
    from miniray.head.directories.grants import Timers
    from miniray.head.scheduling.reasons import Reason

#: Seconds until a line is told, in which others like it are counted; and after it was told.
_GATHER, _AGAIN = 0.5, 5.0
#: Different lines that a driver is told in ``_AGAIN`` seconds.
_MOST = 20


class _Line(NamedTuple):
    """What must be equal to be told together."""

    kind: str
    reason: str
    infeasible: bool


@dataclasses.dataclass
class _Waiting:
    due: float
    #: The name of each that was not told of yet, and whether it still waits.
    names: list[tuple[str, Callable[[], bool]]] = dataclasses.field(default_factory=list)
    told: bool = False


class PendingNotices:
    """Lines that are about to be told to drivers, or were told lately."""

    def __init__(self, clients: ClientDirectory, timers: Timers) -> None:
        self._clients = clients
        self._timers = timers
        self._lines: dict[bytes, dict[_Line, _Waiting]] = {}
        #: Of drivers that have more lines than they are told: how much else waits.
        self._rest: dict[bytes, int] = {}
        self._next = math.inf  # when it looks

    def tell(
        self,
        driver: bytes,
        name: str,
        reason: Reason,
        waits: Callable[[], bool],
        kind: str = "",
    ) -> None:
        """Notify a driver soon that something waits, unless it does not by then.

        ``kind`` is what several of them are called; default: the name.
        """
        lines = self._lines.setdefault(driver, {})
        line = _Line(kind or name, reason.sentence(), reason.infeasible)
        if line not in lines and len(lines) >= _MOST:
            self._rest[driver] = self._rest.get(driver, 0) + 1
        else:
            waiting = lines.setdefault(line, _Waiting(self._timers.time() + _GATHER))
            waiting.names.append((name, waits))
            self._look_at(waiting.due)

    def _look_at(self, due: float) -> None:
        if due < self._next:
            self._next = due
            self._timers.call_later(max(0.0, due - self._timers.time()), self._look)

    def _look(self) -> None:
        self._next = math.inf
        now = self._timers.time()
        for driver, lines in list(self._lines.items()):
            for line, waiting in list(lines.items()):
                if waiting.due <= now:
                    self._settle(driver, line, waiting)
            if not lines:
                del self._lines[driver]
                count = self._rest.pop(driver, 0)
                if count:
                    text = f"{count:,} more wait for other reasons, which `miniray status` tells."
                    self._clients.push(driver, "warning", text)
        dues = [waiting.due for lines in self._lines.values() for waiting in lines.values()]
        self._look_at(min(dues, default=math.inf))

    def _settle(self, driver: bytes, line: _Line, waiting: _Waiting) -> None:
        """Tell a line, or forget it if nothing new waits for this reason."""
        names = [name for name, waits in waiting.names if waits()]
        if not names:
            del self._lines[driver][line]
            return
        name = names[0]
        if len(names) > 1:
            name = f"{len(names):,} {'more ' * waiting.told}x {short_name(line.kind)}"
        self._clients.push(driver, "pending", name, line.reason, line.infeasible)
        waiting.names, waiting.told = [], True
        waiting.due = self._timers.time() + _AGAIN
