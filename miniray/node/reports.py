"""What a node reports to the head: what it has, which processes it runs, and how they change."""

from __future__ import annotations

import dataclasses
import functools
import socket
from typing import TYPE_CHECKING, Any

from miniray._proto import head_pb2
from miniray.messages import plain
from miniray.version import PYTHON_VERSION, VERSION

if TYPE_CHECKING:
    from collections.abc import Callable

    from miniray.node.base.clients import Client, ClientServer
    from miniray.node.base.head_client import HeadClient
    from miniray.node.base.node_config import NodeConfig
    from miniray.node.workers.worker import NodeLease, Worker
    from miniray.node.workers.workers import WorkerPool


def hello(node: NodeConfig, pool: WorkerPool, lately: head_pb2.FromNodeBatch) -> head_pb2.NodeHello:
    """Make the first message of a session; ``lately`` are reports that may be lost."""
    devices = node.accelerators.devices
    return head_pb2.NodeHello(
        node_id=node.node_id,
        version=VERSION,
        python=PYTHON_VERSION,
        host=node.host,
        address=node.address,
        hostname=socket.gethostname(),
        resources=plain.dumps(
            {
                "scalars": dict(node.scalars),
                "devices": {name: list(group.ids) for name, group in devices.items()},
                "fractional": {name: group.fractional for name, group in devices.items()},
                "labels": dict(node.labels),
            }
        ),
        leases=[
            head_pb2.RunningLease(
                lease=lease.number,
                epoch=lease.epoch,
                process_id=lease.worker.process_id if lease.worker is not None else b"",
                owner=lease.owner,
                actor_id=lease.actor_id or b"",
                allocation=plain.dumps(tuple(lease.allocation)),
            )
            for lease in pool.leases.values()
        ],
        session_dir=str(node.session_dir),
        socket_path=node.socket_path,
        is_head_node=node.is_head,
        drivers_only=node.drivers_only,
        quarantines=pool.quarantines(),
        lately=lately,
    )


def attached(client: Client, machine: str) -> head_pb2.FromNode:
    message = head_pb2.ProcessAttached(
        process_id=client.process_id, pid=client.pid, job_id=client.job_id
    )
    if client.is_driver:
        message.driver = True
        message.details = plain.dumps({**client.details, "machine": machine})
    return head_pb2.FromNode(attached=message)


def blocked_report(worker: Worker, lease: NodeLease) -> head_pb2.FromNode:
    """Report whether a lease's work waits for others, and whether it needs nothing any more."""
    blocked, leaving = lease.blocked, worker.has_let_go
    return head_pb2.FromNode(
        blocked=head_pb2.LeaseBlocked(lease=lease.number, blocked=blocked, leaving=leaving)
    )


def actor_report(worker: Worker, lease: NodeLease, **facts: Any) -> head_pb2.FromNode:
    return head_pb2.FromNode(
        actor=head_pb2.ActorReported(
            actor_id=lease.actor_id,
            lease=lease.number,
            process_id=worker.process_id,
            pid=worker.pid,
            **facts,
        )
    )


@dataclasses.dataclass(eq=False, repr=False)
class WorkerNotices:
    """Takes the notices of workers, for the pool and for the head."""

    clients: ClientServer
    pool: WorkerPool
    head: HeadClient

    def __post_init__(self) -> None:
        pool = self.pool
        of_workers: dict[str, Callable[..., None]] = {
            "ready": pool.ready,
            "blocked": self._blocked,
            "exiting": self._exiting,
            "finishing": pool.ends.finishing,
            "let_go": self._let_go,
            "leaving": self._leaving,
            "actor_failed": self._actor_failed,
        }
        for name, handler in of_workers.items():
            self.clients.notices[name] = self._notice(handler)
        self.clients.notices["actor_ready"] = self._actor_ready

    def _notice(self, handler: Callable[..., None]) -> Callable[..., None]:
        """Return a handler that gets the worker in place of the client; one that is gone is not."""

        @functools.wraps(handler)  # its annotations are checked
        def handle(client: Client, *args: Any) -> None:
            worker = self.pool.workers.get(client.process_id)
            if worker is not None:
                handler(worker, *args)

        return handle

    def _blocked(self, worker: Worker, blocked: bool) -> None:
        if worker.lease is not None:
            worker.lease.blocked = blocked
            self.head.send(blocked_report(worker, worker.lease))

    def _let_go(self, worker: Worker) -> None:
        """Have others get what a worker keeps that only waits for them before it exits."""
        worker.has_let_go = True
        worker.vacated.set()
        if worker.lease is not None:
            worker.lease.allocation = worker.lease.allocation.emptied()
            self._blocked(worker, True)

    def _leaving(self, worker: Worker) -> None:
        """Give a worker, which runs at most exit functions of user code, a last grace period."""
        self.pool.ends.kill_later(worker)

    def _exiting(self, worker: Worker, why: str) -> None:
        self.pool.exiting(worker, why)
        if why == "exit_actor":
            self._report_end(worker, exiting=True)

    def _actor_ready(self, client: Client) -> None:
        worker = self.pool.workers.get(client.process_id)
        if worker is not None:
            worker.attached(client.pid)
            if worker.lease is not None and worker.lease.actor_id is not None:
                worker.lease.alive = True
                self.head.send(actor_report(worker, worker.lease))

    def _actor_failed(self, worker: Worker, error: bytes) -> None:
        worker.exiting = "failed"
        self._report_end(worker, error=error)

    def _report_end(self, worker: Worker, **facts: Any) -> None:
        lease = worker.lease
        if lease is not None and lease.actor_id is not None:
            self.head.report(actor_report(worker, lease, **facts))
