"""What the processes that a daemon knows are called in reports and errors."""

from __future__ import annotations

from typing import TYPE_CHECKING

from miniray.exceptions import describe_exit

if TYPE_CHECKING:
    from miniray.node.base.clients import Client, ClientServer
    from miniray.node.workers.workers import WorkerPool

#: Processes that ended and are remembered.
_REMEMBERED = 1000


class ProcessNames:
    """Names by process id."""

    def __init__(self, node_id: bytes, clients: ClientServer, pool: WorkerPool) -> None:
        self._node_id = node_id
        self._clients = clients
        self._pool = pool
        #: What processes were that ended of late, the latest last.
        self._ended: dict[bytes, str] = {}

    def ended(
        self, process_id: bytes, work: str, pid: int, code: int | None, why: str = ""
    ) -> None:
        """Remember what a process was that has ended, and how, for errors about its objects.

        Args:
            process_id: of the process.
            work: what it did.
            pid: of the process.
            code: its exit code; None if that is not known.
            why: why this daemon has killed it; empty if it has not.
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
        """What a process of this node was that has ended; empty if nobody remembers."""
        worker = self._pool.workers.get(process_id)
        if worker is not None:  # it has hung up and is not reaped yet
            return self._was(worker.work, worker.pid, None, worker.why_killed)
        return self._ended.get(process_id, "")

    def work_of(self, process_id: bytes) -> str:
        """The class of a worker's actor, or its task; empty if it has none."""
        worker = self._pool.workers.get(process_id)
        return worker.name if worker is not None and worker.lease is not None else ""

    def of(self, process_id: bytes) -> str:
        """``driver (pid 7)``, ``Keeper (pid 8)``, or that it is of another node or has ended."""
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
