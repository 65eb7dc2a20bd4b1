"""Names of processes in reports and errors, and explanations of their ends."""

from __future__ import annotations

import re
import signal
import time
from pathlib import Path
from typing import TYPE_CHECKING

from miniray.common.names import short_name
from miniray.exceptions import describe_exit
from miniray.system.machine import memory_limit

if TYPE_CHECKING:
    from collections.abc import Callable

    from miniray.node.base.clients import Client, ClientServer
    from miniray.node.workers.workers import WorkerPool

#: Processes that ended and are remembered.
_REMEMBERED = 1000
#: Seconds after a kill for lack of memory in which the end of a process counts as it: the kernel
#: takes long to free many gigabytes, and only heartbeats look at its count.
_RECENT = 15.0
_COUNT = re.compile(r"^oom_kill (?P<count>\d+)$", re.MULTILINE)


class ProcessNames:
    """The processes of this daemon, by id, ended ones too."""

    def __init__(self, node_id: bytes, clients: ClientServer, pool: WorkerPool) -> None:
        self._node_id = node_id
        self._clients = clients
        self._pool = pool
        #: Descriptions of processes that have ended, the latest last.
        self._ended: dict[bytes, str] = {}

    def runs(self, process_id: bytes) -> bool:
        return process_id in self._clients.clients or process_id in self._pool.workers

    def ended(
        self, process_id: bytes, work: str, pid: int, code: int | None, why: str = ""
    ) -> None:
        """Record the description of an ended process, for errors about its objects.

        ``why`` says why this daemon has killed it; empty if it has not.
        """
        self._ended[process_id] = self._was(work, pid, code, why)
        if len(self._ended) > _REMEMBERED:
            del self._ended[next(iter(self._ended))]

    def _was(self, work: str, pid: int, code: int | None, why: str) -> str:
        how = f", which {describe_exit(code, hint=False)}" if code is not None else ""
        if why:
            how = f", which was ended: {why}"
        return f"{work} (pid {pid}) on node {self._node_id.hex()[:8]}{how}"

    def of_ended(self, process_id: bytes) -> str:
        """Describe a process of this node that has ended; empty if it is forgotten."""
        worker = self._pool.workers.get(process_id)
        if worker is not None:  # it has hung up and is not reaped yet
            return self._was(worker.work, worker.pid, None, worker.why_killed)
        return self._ended.get(process_id, "")

    def work_of(self, process_id: bytes) -> str:
        """Return the class of a worker's actor, or its task; empty if it has none."""
        worker = self._pool.workers.get(process_id)
        return short_name(worker.name) if worker is not None and worker.lease is not None else ""

    def of(self, process_id: bytes) -> str:
        """Name a process: ``driver (pid 7)``, ``Keeper (pid 8)``, or that it is of another node."""
        client = self._clients.clients.get(process_id)
        if client is not None:
            return f"{self._role(client)} (pid {client.pid})"
        worker = self._pool.workers.get(process_id)
        if worker is not None:
            return f"{self.work_of(process_id) or 'worker'} (pid {worker.pid})"
        if process_id == self._node_id:
            return "this node's daemon, for processes that have ended and for detached actors"
        return f"process {process_id.hex()} of another node"

    def _role(self, client: Client) -> str:
        if client.is_driver:
            return "driver"
        return "command" if client.is_command else self.work_of(client.process_id) or "worker"


class MemoryKills:
    """Recognises processes that the kernel killed for lack of memory.

    The kernel does not report which process it killed. It counts these kills for the whole machine,
    so a process that SIGKILL ended right after the count rose was most likely the one. ``root`` has
    ``/proc`` and ``/sys``.
    """

    def __init__(self, root: Path = Path("/"), clock: Callable[[], float] = time.monotonic) -> None:
        self._root = root
        self._clock = clock
        self._count = self.count()
        self._last: float | None = None

    def look(self) -> None:
        """Read the count. Call it regularly, so that older kills are not taken for new."""
        count = self.count()
        if count > self._count:
            self._last = self._clock()
        self._count = count

    def explain(self, code: int | None) -> str:
        """Return a sentence on the end of a process if it was most likely such a kill, else ""."""
        if code != -signal.SIGKILL:
            return ""
        self.look()
        if self._last is None or self._clock() - self._last > _RECENT:
            return ""
        return (
            f"At that time the kernel killed a process of this machine because memory ran out, "
            f"most likely this one. The machine, or the container, has "
            f"{memory_limit(self._root) / 2**30:.1f} GiB."
        )

    def count(self) -> int:
        """Return how many processes of this machine the kernel has killed for lack of memory."""
        try:
            found = _COUNT.search((self._root / "proc/vmstat").read_text())
        except OSError:
            return 0
        return int(found["count"]) if found is not None else 0
