"""The leases that this worker runs tasks of, one after another.

Which one it has comes from the daemon, and its tasks come straight from its owner, who may be
sooner: a task waits here until this process knows what its lease is for.
"""

from __future__ import annotations

import collections
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable

    from miniray.worker.work import Work

#: Leases that are remembered once they are over: an owner who has not heard of that may still
#: send a task, which nobody else would answer.
_REMEMBERED = 10_000


class Leases:
    """What is used in the I/O thread's turns only."""

    def __init__(self, put: Callable[[Work], object]) -> None:
        """No lease yet.

        Args:
            put: Queues a task.
        """
        self._put = put
        #: The number of the lease that this process has.
        self.current = 0
        self._past: collections.deque[int] = collections.deque(maxlen=_REMEMBERED)
        self._early: list[tuple[int, Work]] = []

    def take(self, lease: int, work: Work) -> None:
        """Queue a task, now or when its lease is known."""
        if lease == self.current or lease in self._past:
            self._put(work)
        else:
            self._early.append((lease, work))

    def begin(self, lease: int) -> None:
        """This process has a lease now, and knows what that is for."""
        self._past.append(self.current)
        self.current = lease
        early, self._early = self._early, []
        for number, work in early:
            self.take(number, work)
