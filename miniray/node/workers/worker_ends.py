"""How workers are made to end: asked first, then killed, then given up.

Responsible for the time that each step may take. What follows from an end is the pool's.
"""

from __future__ import annotations

import asyncio
import logging
import signal
from typing import TYPE_CHECKING

from miniray.common.config import config

if TYPE_CHECKING:
    from collections.abc import Callable

    from miniray.node.workers.worker import Worker

logger = logging.getLogger(__name__)


class WorkerEnds:
    """The ends of a node's workers."""

    def __init__(
        self, ask: Callable[[Worker], object], give_up: Callable[[Worker], object]
    ) -> None:
        """Start with nobody.

        Args:
            ask: tells a worker that it is to end.
            give_up: called once with a worker that was killed, or has ended, and is not gone
                with all that it had started within ``quarantine_after`` seconds.
        """
        self._ask = ask
        self._give_up = give_up

    def ask(self, worker: Worker) -> None:
        """Let a worker end by rule; kill it if it takes too long."""
        if worker.exiting is None:
            worker.exiting = "rule"
        if not worker.ready:  # it hears nothing yet, and has nothing that others may need
            self.kill(worker)
            return
        self._ask(worker)
        if not worker.finishing:
            self.kill_later(worker)

    def finishing(self, worker: Worker) -> None:
        """A worker ends by rule, and may wait for what others need of it as long as it takes."""
        worker.finishing = True
        if worker.kill_timer is not None:
            worker.kill_timer.cancel()

    def kill_later(self, worker: Worker) -> None:
        """Kill a worker that is not gone after the grace period."""
        if worker.kill_timer is not None:
            worker.kill_timer.cancel()
        worker.kill_timer = asyncio.get_running_loop().call_later(
            config().stop_grace, self._kill_late, worker
        )

    def _kill_late(self, worker: Worker) -> None:
        logger.warning("worker %d did not end in time and is killed", worker.pid)
        self.kill(worker)

    def kill(self, worker: Worker) -> None:
        """End a worker's process at once; one that is being started is killed after that."""
        if worker.pid and worker.template is not None:
            worker.template.kill(worker.pid, signal.SIGKILL)
            self.killed(worker)

    def lingers(self, worker: Worker, pids: list[int]) -> None:
        """A worker has ended, and these that it had started were killed and are not gone."""
        worker.left = tuple(pids)
        self.killed(worker)

    def killed(self, worker: Worker) -> None:
        """A worker was killed: it is to be gone soon."""
        if worker.give_up_timer is None:
            worker.give_up_timer = asyncio.get_running_loop().call_later(
                config().quarantine_after, self._give_up, worker
            )

    @staticmethod
    def gone(worker: Worker) -> None:
        """A worker is gone, with all that it had started."""
        for timer in (worker.kill_timer, worker.give_up_timer):
            if timer is not None:
                timer.cancel()
