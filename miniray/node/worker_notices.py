"""What workers tell their daemon of themselves, and what of it the head has to know."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from miniray.node.hello import actor_report, blocked_report

if TYPE_CHECKING:
    from miniray.node.base.clients import Client, ClientServer
    from miniray.node.head_client import HeadClient
    from miniray.node.workers.worker import Worker
    from miniray.node.workers.workers import WorkerPool


class WorkerNotices:
    """Takes the notices of workers; the pool keeps what they say."""

    def __init__(self, clients: ClientServer, pool: WorkerPool, head: HeadClient) -> None:
        self._pool = pool
        self._head = head
        clients.notices.update(
            {
                "ready": lambda client: pool.ready(client.process_id),
                "blocked": self._blocked,
                "exiting": self._exiting,
                "finishing": lambda client: pool.finishing(client.process_id),
                "leaving": lambda client: pool.leaving(client.process_id),
                "actor_ready": self._actor_ready,
                "actor_failed": self._actor_failed,
            }
        )

    def _blocked(self, client: Client, blocked: bool) -> None:
        worker = self._pool.workers.get(client.process_id)
        if worker is not None and worker.lease is not None:
            worker.lease.blocked = blocked
            self._head.session.send(blocked_report(worker, worker.lease))

    def _exiting(self, client: Client, why: str) -> None:
        self._pool.exiting(client.process_id, why)
        worker = self._pool.workers.get(client.process_id)
        if why == "exit_actor" and worker is not None:
            self._report_end(worker, exiting=True)

    def _actor_ready(self, client: Client) -> None:
        worker = self._pool.workers.get(client.process_id)
        if worker is not None:
            worker.pid = client.pid
            if worker.lease is not None and worker.lease.actor_id is not None:
                worker.lease.alive = True
                self._head.session.send(actor_report(worker, worker.lease))

    def _actor_failed(self, client: Client, error: bytes) -> None:
        worker = self._pool.workers.get(client.process_id)
        if worker is not None:
            worker.failed = True
            worker.exiting = "failed"
            self._report_end(worker, error=error)

    def _report_end(self, worker: Worker, **facts: Any) -> None:
        lease = worker.lease
        if lease is not None and lease.actor_id is not None:
            self._head.report(actor_report(worker, lease, **facts))
