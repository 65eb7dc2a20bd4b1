"""The leases that this worker runs tasks of, one after another, and tasks that go back.

The daemon says which lease this process has, but its tasks come straight from the owner of the
lease, perhaps sooner: a task waits here until this process has received its lease. Tasks that
have not begun go back to their owners when the running one blocks or turns out long, and others
could run them, or when the head wants the lease back.
"""

from __future__ import annotations

import collections
import dataclasses
import time
from typing import TYPE_CHECKING

from miniray.common.config import config
from miniray.messages import protocol as p
from miniray.worker.work import forget_arguments

if TYPE_CHECKING:
    from collections.abc import Callable

    from miniray.client.cluster_runtime import ClusterRuntime
    from miniray.wire.peers import Peer
    from miniray.worker.work import Work, WorkQueue

#: Ended leases that are remembered: an owner that was not yet notified may still send a task, which
#: only this process can answer.
_REMEMBERED = 10_000


class Leases:
    """The leases of this worker. Not thread-safe: used in the I/O thread's turns only."""

    def __init__(self, put: Callable[[Work], object]) -> None:
        self._put = put
        #: The number of the lease that this process has.
        self.current = 0
        self._past: collections.deque[int] = collections.deque(maxlen=_REMEMBERED)
        self._early: list[tuple[int, Work]] = []

    def take(self, lease: int, work: Work) -> None:
        """Queue a task, now or when its lease has come."""
        if lease == self.current or lease in self._past:
            self._put(work)
        else:
            self._early.append((lease, work))

    def begin(self, lease: int) -> None:
        """Record this process's lease, and queue its tasks that came before."""
        self._past.append(self.current)
        self.current = lease
        early, self._early = self._early, []
        for number, work in early:
            self.take(number, work)


@dataclasses.dataclass(eq=False, repr=False)
class Recall:
    """Hands tasks back that wait behind a long one."""

    #: Of this process.
    runtime: ClusterRuntime
    #: What waits.
    queue: WorkQueue
    #: By call of a caller, what was received and has not ended.
    waiting: dict[tuple[bytes, int], Work]
    #: The task that runs.
    running: Callable[[], Work | None]
    _watches: bool = dataclasses.field(default=False, init=False)

    def watch(self) -> None:
        """Look later whether the running task is long. In the I/O thread."""
        if not self._watches:
            self._watches = True
            self.runtime.loop.call_later(config().recall_after, self._hand_back_if_long)

    def _hand_back_if_long(self) -> None:
        self._watches = False
        if self.queue.empty():
            return
        running = self.running()
        if running is not None:
            ran = time.perf_counter() - running.started
            if ran >= config().recall_after:
                self.hand_back()
                return
        self.watch()

    def hand_back(self) -> None:
        """Return the tasks that have not begun to their owner."""
        back: dict[Peer, list[int]] = {}
        while True:
            try:
                work = self.queue.take()
            except IndexError:
                break
            if work is None:
                self.queue.put(None)
                break
            forget_arguments(self.runtime, work)
            if self.waiting.pop(work.key, None) is not None:
                back.setdefault(work.caller, []).append(work.number)
        for peer, numbers in back.items():
            peer.send((p.PEER_RECALLED, numbers))
