"""How workers are made to end: asked first, then killed, then given up.

Responsible for the time that each step may take, and for noticing workers that begin to exit by
themselves and hang. The pool cleans up after them.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import signal
import time
from typing import TYPE_CHECKING

from miniray._proto import head_pb2
from miniray.common.config import config
from miniray.common.process_state import is_dying

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from miniray.node.workers.worker import Worker

logger = logging.getLogger(__name__)


class DeviceKeptError(RuntimeError):
    """A device that was granted is kept by a process that could not be killed."""


class WorkerEnds:
    """Ends the workers of a node.

    A process that exits by itself (``os._exit``), or that a user kills, may hang in a driver with
    its sockets open. The kernel reports that to no process, so each worker is looked at once in
    ``quarantine_after`` seconds, which takes some 20 microseconds. ``give_up`` gets once each
    worker that was killed, or has ended, and is not gone with all its children within that time.
    """

    def __init__(
        self,
        workers: Callable[[], Iterable[Worker]],
        ask: Callable[[Worker], object],
        give_up: Callable[[Worker], object],
    ) -> None:
        self._workers = workers
        self._ask = ask
        self._give_up = give_up
        self._look_again()

    def _look_again(self) -> None:
        loop = asyncio.get_running_loop()
        self._timer = loop.call_later(config().quarantine_after, self._look)

    def _look(self) -> None:
        for worker in self._workers():
            if worker.give_up_timer is None and is_dying(worker.pid):
                self.kill(worker)
        self._look_again()

    def close(self) -> None:
        self._timer.cancel()

    def ask(self, worker: Worker) -> None:
        """Have a worker exit as planned; kill it if it takes too long."""
        if worker.exiting is None:
            worker.exiting = "planned"
        if not worker.ready:  # it cannot be asked yet, and has nothing that others may need
            self.kill(worker)
            return
        self._ask(worker)
        if not worker.finishing:
            self.kill_later(worker)

    async def vacate(self, worker: Worker) -> None:
        """Wait until a worker that was asked to end needs its devices no more.

        Raises DeviceKeptError if it could not be killed.
        """
        await worker.vacated.wait()
        if worker.quarantine is not None:
            raise DeviceKeptError(
                f"the process {worker.pid}, which had worked on a device of this lease, could "
                f"not be killed"
            )

    def finishing(self, worker: Worker) -> None:
        """Let a worker's planned exit take as long as others need objects of it."""
        worker.finishing = True
        if worker.kill_timer is not None:
            worker.kill_timer.cancel()

    def kill_later(self, worker: Worker, grace: float | None = None) -> None:
        """Kill a worker that is not gone after the grace period; None: the usual one."""
        if worker.kill_timer is not None:
            worker.kill_timer.cancel()
        worker.kill_timer = asyncio.get_running_loop().call_later(
            config().stop_grace if grace is None else grace, self._kill_late, worker
        )

    def _kill_late(self, worker: Worker) -> None:
        logger.warning("worker %d did not end in time and is killed", worker.pid)
        self.kill(worker)

    def kill(self, worker: Worker) -> None:
        """Kill a worker's process; one that is being started is killed after its start."""
        if worker.pid and worker.template is not None:
            worker.template.kill(worker.pid, signal.SIGKILL)
            self.killed(worker)

    def lingers(self, worker: Worker, pids: list[int]) -> None:
        """Note the children of an ended worker that were killed and are not gone."""
        worker.left = tuple(pids)
        self.killed(worker)

    def killed(self, worker: Worker) -> None:
        """Give up a worker that was killed if it is not gone in time."""
        if worker.give_up_timer is None:
            worker.give_up_timer = asyncio.get_running_loop().call_later(
                config().quarantine_after, self._give_up, worker
            )

    @staticmethod
    def gone(worker: Worker) -> None:
        """Stop the timers of a worker that is gone with all its children."""
        for timer in (worker.kill_timer, worker.give_up_timer):
            if timer is not None:
                timer.cancel()


def quarantine_of(worker: Worker, since: float | None = None) -> head_pb2.Quarantine:
    """Describe a worker that, or whose children, could not be killed, with its devices.

    It was given up at ``since``, in seconds since the epoch; now if not given.
    """
    devices: dict[str, list[str]] = {}
    for resource, id in sorted(worker.devices):
        devices.setdefault(resource, []).append(id)
    processes = _named(worker.left or (worker.pid,))
    if not worker.left and worker.name:
        processes = [head_pb2.Process(pid=worker.pid, name=worker.name)]
    return head_pb2.Quarantine(
        process_id=worker.process_id,
        job_id=worker.job_id,
        processes=processes,
        devices=[head_pb2.DeviceSet(resource=name, ids=ids) for name, ids in devices.items()],
        since=time.time() if since is None else since,
    )


def _named(pids: Iterable[int]) -> list[head_pb2.Process]:
    """Name processes as the kernel does; leave out those that are gone.

    Their command lines are not read: they are in memory that the kernel may have locked for as
    long as the process hangs, and then the reader hangs too.
    """
    found = []
    for pid in pids:
        with contextlib.suppress(OSError), open(f"/proc/{pid}/comm", encoding="utf-8") as file:
            found.append(head_pb2.Process(pid=pid, name=file.read().strip()))
    return found
