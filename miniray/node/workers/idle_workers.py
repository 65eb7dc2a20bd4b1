"""Workers without a lease that wait for the next one of their kind.

Responsible for finding them, and for deciding when there are too many; the pool ends them.
"""

from __future__ import annotations

import asyncio
import time
from typing import TYPE_CHECKING, Any

from miniray.common.config import config

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from miniray.node.workers.worker import Worker


#: Jobs that have ended and are remembered.
_REMEMBERED = 1000


def surplus(workers: Iterable[Worker], soft_limit: int) -> int:
    """Return how many workers a node has above its soft limit, without those asked to end."""
    return sum(worker.exiting is None for worker in workers) - soft_limit


class IdleWorkers:
    """The idle workers of a node, by kind.

    ``surplus`` returns how many workers the node has above its soft limit; ``end`` gets one that
    was idle for long meanwhile.
    """

    def __init__(self, surplus: Callable[[], int], end: Callable[[Worker], None]) -> None:
        self._surplus = surplus
        self._end = end
        self._by_key: dict[tuple[Any, ...], list[Worker]] = {}
        self._timer: asyncio.TimerHandle | None = None
        #: The jobs that ended last, the latest last.
        self._ended_jobs: dict[bytes, None] = {}

    def take(self, key: tuple[Any, ...]) -> Worker | None:
        """Take the worker of a kind that became idle last; None if there is none."""
        idle = self._by_key.get(key)
        worker = idle.pop() if idle else None
        if idle == []:
            del self._by_key[key]
        return worker

    def add(self, worker: Worker) -> None:
        worker.idle_since = time.monotonic()
        self._by_key.setdefault(worker.pool_key, []).append(worker)
        if self._timer is None:
            self._set_timer()

    def remove(self, worker: Worker) -> None:
        idle = self._by_key.get(worker.pool_key, [])
        if worker in idle:
            idle.remove(worker)
            if not idle:
                del self._by_key[worker.pool_key]

    def all(self) -> list[Worker]:
        return [worker for workers in self._by_key.values() for worker in workers]

    def end_job(self, job_id: bytes) -> list[Worker]:
        """Remove and return the workers of a job whose driver is gone.

        Later workers of the job, for its detached actors, stay idle for ``worker_idle`` only.
        """
        self._ended_jobs[job_id] = None
        if len(self._ended_jobs) > _REMEMBERED:
            del self._ended_jobs[next(iter(self._ended_jobs))]
        found = [worker for worker in self.all() if worker.job_id == job_id]
        for worker in found:
            self.remove(worker)
        return found

    def _set_timer(self) -> None:
        self._timer = asyncio.get_running_loop().call_later(config().worker_idle, self._end_some)

    def _end_some(self) -> None:
        """End workers that were idle for a while: above the soft limit, the oldest first."""
        self._timer = None
        now = time.monotonic()
        idle = sorted(self.all(), key=lambda worker: worker.idle_since)
        surplus = self._surplus()
        for place, worker in enumerate(idle):
            too_many = place < surplus or worker.job_id in self._ended_jobs
            if too_many and now - worker.idle_since >= config().worker_idle:
                self.remove(worker)
                self._end(worker)
        left = self.all()
        if left and (self._surplus() > 0 or any(w.job_id in self._ended_jobs for w in left)):
            self._set_timer()
