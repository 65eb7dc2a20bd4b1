"""The life of a node's workers: the template that forks one, idle times, and the end.

``Templates`` chooses what a worker is forked from, ``IdleWorkers`` keeps those that may serve the
next lease of their kind, and ``WorkerEnds`` requests an exit, then kills, then gives up a worker.
The pool (``workers.py``) decides, and cleans up.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import logging
import signal
import time
from typing import TYPE_CHECKING, Any

from miniray._proto import head_pb2
from miniray.common.config import config
from miniray.common.process_state import is_dying
from miniray.node.base.template_client import TemplateClient

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from miniray.node.workers.worker import Worker

logger = logging.getLogger(__name__)


# --- templates -----------------------------------------------------------------------------
@dataclasses.dataclass(eq=False, repr=False)
class Templates:
    """All templates of a node; ``on_exited`` and ``on_lingers`` are as for ``TemplateClient``."""

    first: TemplateClient
    workers: Callable[[], Iterable[Worker]]
    on_exited: Callable[[int, int], None]
    on_lingers: Callable[[int, list[int]], None]

    def __post_init__(self) -> None:
        #: Templates that were forked from another one: by that one, and the modules added to it.
        self._larger: dict[tuple[TemplateClient, tuple[str, ...]], TemplateClient] = {}

    def get(self, modules: tuple[str, ...], later: tuple[str, ...] = ()) -> TemplateClient:
        """Return a template that has imported these modules too; make it on first use.

        It has the ``later`` modules as well if a template has them by now. The first call has one
        load them, beside whatever is forked meanwhile. Raises TemplateGoneError if the first one is
        gone.
        """
        template = self._with(self.first, modules, beside=False)
        larger = self._with(template, later, beside=True)
        return larger if larger.ready else template

    def _with(
        self, parent: TemplateClient, modules: tuple[str, ...], *, beside: bool
    ) -> TemplateClient:
        if not modules:
            return parent
        template = self._larger.get((parent, modules)) or next(
            (
                other
                for (below, names), other in self._larger.items()
                if below is parent and other.ready and set(modules) <= set(names)
            ),
            None,
        )
        if template is None:
            template = self._larger[parent, modules] = TemplateClient(
                parent.fork_template(list(modules), beside=beside),
                0,
                self.on_exited,
                lambda: self._lost(parent, modules, beside=beside),
                self.on_lingers,
            )
        return template

    def _lost(self, parent: TemplateClient, modules: tuple[str, ...], *, beside: bool) -> None:
        """Handle the death of a template that another has forked.

        Its workers, and templates that were forked from it, fall to that one, which kills them at
        the same moment. If it could not load modules that workers can do without, there is no
        second try.
        """
        logger.warning("the template with %s ended", ", ".join(modules))
        gone = self._larger[parent, modules]
        if gone.pid or not beside:
            del self._larger[parent, modules]
            for worker in list(self.workers()):
                if worker.template is gone:
                    self.on_exited(worker.pid, signal.SIGKILL)

    def is_first(self, template: TemplateClient | None) -> bool:
        """Return whether the node ends with this template; None: another could not be made."""
        return template is None or template is self.first

    def close(self) -> None:
        for template in (self.first, *self._larger.values()):
            template.close()


# --- idle workers --------------------------------------------------------------------------
def surplus(workers: Iterable[Worker], soft_limit: int) -> int:
    """Return how many workers a node has above its soft limit, without those that are ending."""
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
        """Remove and return the workers of a job whose driver is gone."""
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
        for worker in idle[: max(0, self._surplus())]:
            if now - worker.idle_since >= config().worker_idle:
                self.remove(worker)
                self._end(worker)
        if self._by_key and self._surplus() > 0:
            self._set_timer()


# --- ends ----------------------------------------------------------------------------------
class DeviceKeptError(RuntimeError):
    """A device that was granted is kept by a process that could not be killed."""


class WorkerEnds:
    """Ends the workers of a node.

    A process that exits by itself (``os._exit``), or that a user kills, may hang in a driver with
    its sockets open. The kernel reports that to no process, so each worker is checked once in
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
        if not worker.ready:  # it has no connection yet, and no objects that others may need
            self.kill(worker)
            return
        self._ask(worker)
        if not worker.finishing:
            self.kill_later(worker)

    async def vacate(self, worker: Worker) -> None:
        """Wait until a worker whose end was requested has let go of its devices.

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
        """Record the children of an ended worker that were killed and are not gone."""
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
    """Name processes as the kernel does; leave out processes that are gone.

    Their command lines are not read: they are in memory that the kernel may have locked for as
    long as the process hangs, and then the reader hangs too.
    """
    found = []
    for pid in pids:
        with contextlib.suppress(OSError), open(f"/proc/{pid}/comm", encoding="utf-8") as file:
            found.append(head_pb2.Process(pid=pid, name=file.read().strip()))
    return found
