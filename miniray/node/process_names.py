"""What the processes that a daemon knows are called in reports and errors."""

from __future__ import annotations

from typing import TYPE_CHECKING

from miniray.core.names import short_name

if TYPE_CHECKING:
    from miniray.node.clients import Client, ClientServer
    from miniray.node.workers import WorkerPool


class ProcessNames:
    """Names by process id."""

    def __init__(self, node_id: bytes, clients: ClientServer, pool: WorkerPool) -> None:
        self._node_id = node_id
        self._clients = clients
        self._pool = pool

    def work_of(self, process_id: bytes) -> str:
        """The class of a worker's actor, or its task; empty if it has none."""
        worker = self._pool.workers.get(process_id)
        lease = worker.lease if worker is not None else None
        if lease is None:
            return ""
        return short_name(lease.spec.get("class_name") or lease.spec.get("name") or "")

    def of(self, process_id: bytes) -> str:
        """``driver (pid 7)``, ``Keeper (pid 8)``, or that it is of another node or has ended."""
        client = self._clients.clients.get(process_id)
        if client is not None:
            return f"{self._role(client)} (pid {client.pid})"
        worker = self._pool.workers.get(process_id)
        if worker is not None:
            return f"{self.work_of(process_id) or 'worker'} (pid {worker.pid})"
        if process_id == self._node_id:
            return "this node's daemon, for processes that have ended"
        return f"process {process_id.hex()} of another node"

    def _role(self, client: Client) -> str:
        if client.is_driver:
            return "driver"
        return "command" if client.is_command else self.work_of(client.process_id) or "worker"
