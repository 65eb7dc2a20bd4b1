"""Workers that are on their way out by themselves and get no further.

A process that user code ends (``os._exit``), or that somebody else kills, may hang in a driver with
its sockets open, so that nobody hears of it. The kernel does not tell, so it is asked now and then.
"""

from __future__ import annotations

import asyncio
import collections
from typing import TYPE_CHECKING

from miniray.common.config import config
from miniray.common.process_state import is_dying

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from miniray.node.workers.worker import Worker

#: Workers that are looked at together: some 20 µs each, in which the daemon does nothing else.
_AT_ONCE = 32


class DyingWatch:
    """Looks at each worker once in ``quarantine_after`` seconds."""

    def __init__(
        self, workers: Callable[[], Iterable[Worker]], found: Callable[[Worker], object]
    ) -> None:
        """Begin to look.

        Args:
            workers: those that have a process which is not gone.
            found: called with one that is dying and of which nobody knows it.
        """
        self._workers = workers
        self._found = found
        self._due: collections.deque[Worker] = collections.deque()
        self._delay = config().quarantine_after
        self._timer = asyncio.get_running_loop().call_later(self._delay, self._look)

    def close(self) -> None:
        """Look no more."""
        self._timer.cancel()

    def _look(self) -> None:
        if not self._due:
            self._due.extend(self._workers())
            self._delay = config().quarantine_after / (1 + len(self._due) // _AT_ONCE)
        for _ in range(min(_AT_ONCE, len(self._due))):
            worker = self._due.popleft()
            if not worker.gone.is_set() and worker.give_up_timer is None and is_dying(worker.pid):
                self._found(worker)
        self._timer = asyncio.get_running_loop().call_later(self._delay, self._look)
