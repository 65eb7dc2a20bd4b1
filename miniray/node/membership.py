"""A node in its cluster: joins, rejoins once the head is back, reports, and carries out orders."""

from __future__ import annotations

import dataclasses
import functools
import logging
import marshal
import socket
from typing import TYPE_CHECKING, Any, Protocol

from miniray._proto import head_pb2
from miniray.common.host_port import DaemonAddress
from miniray.common.state_types import DEAD
from miniray.messages import plain
from miniray.node.workers.worker import NodeLease, started_report
from miniray.version import PYTHON_VERSION, VERSION

if TYPE_CHECKING:
    import asyncio
    from collections.abc import Callable

    from miniray._proto import common_pb2
    from miniray.node.base.clients import Client, ClientServer
    from miniray.node.base.head_client import HeadClient
    from miniray.node.base.node_config import NodeConfig
    from miniray.node.objects.adopted import AdoptedObjects
    from miniray.node.relay.relay import RelayHub
    from miniray.node.workers.worker import Worker
    from miniray.node.workers.workers import WorkerPool

logger = logging.getLogger(__name__)


# --- reports -------------------------------------------------------------------------------
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
    """Report whether a lease's work waits for others, and whether it still needs its devices."""
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
        """Free the resources of a worker that only waits for others before it exits."""
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


# --- the head ------------------------------------------------------------------------------
class MemberEvents(Protocol):
    """Handlers of the daemon for messages of the head."""

    def heartbeat(self) -> head_pb2.Heartbeat:
        """Return the usage of this node."""

    def node_died(self, node_id: bytes) -> None:
        """Handle the death of another node."""

    def jobs(self) -> set[bytes]:
        """Return the jobs whose environments or code this node keeps."""

    def end_job(self, job_id: bytes) -> None:
        """Drop the environments and the code of a job that is over."""

    def stop(self, reason: str) -> None:
        """End this node."""


@dataclasses.dataclass(eq=False, repr=False)
class Membership:
    """Keeps the session with the head."""

    config: NodeConfig
    head: HeadClient
    clients: ClientServer
    pool: WorkerPool
    relay: RelayHub
    adopted: AdoptedObjects
    events: MemberEvents

    @property
    def session_ended(self) -> asyncio.Event:
        return self.head.session.ended

    # --- joining -------------------------------------------------------------------
    async def join(self, timeout: float) -> None:
        self._welcomed(await self.head.join(self, timeout, list))

    async def rejoin(self, timeout: float) -> None:
        """Open a session with the head again, or with its successor.

        Raises:
            MinirayError: The head refuses this node.
            ConnectionError: There is no head within ``timeout`` seconds.
        """
        self._welcomed(await self.head.join(self, timeout, self._news))
        for process_id in self.clients.clients:
            self.clients.push(process_id, "head_back", ())
        for actor_id in list(self.adopted.actors):
            self.adopted.await_death(actor_id)
        jobs = self.pool.jobs() | self.events.jobs()
        self.head.notify("ended_jobs", sorted(jobs))
        logger.info("the session with the head is open again")

    def head_lost(self) -> None:
        """Notify commands that watch that updates will pause."""
        for client in self.clients.clients.values():
            if client.is_command:
                self.clients.push(client.process_id, "head_lost", ())

    def _welcomed(self, welcome: head_pb2.Welcome) -> None:
        """Enter nodes; where all are listed, missing ones have died unnoticed."""
        for node in welcome.nodes:
            address = DaemonAddress.parse(node.address)
            self.relay.joined(node.node_id, address.target_from(self.config.machine))
        if welcome.nodes_are_all:
            living = {node.node_id for node in welcome.nodes}
            for node_id in self.relay.nodes():
                if node_id not in living:
                    self.events.node_died(node_id)

    def hello(self) -> head_pb2.NodeHello:
        return hello(self.config, self.pool, self.head.recent_reports())

    def heartbeat(self) -> head_pb2.Heartbeat:
        self.head.drop_stored()
        return self.events.heartbeat()

    def _news(self) -> list[head_pb2.FromNode]:
        """Return the messages for a new head that follow the hello of this node."""
        processes = [attached(c, self.config.machine) for c in self.clients.clients.values()]
        living = [
            actor_report(lease.worker, lease)
            for lease in self.pool.leases.values()
            if lease.alive and lease.worker is not None
        ]
        waiting = [
            blocked_report(lease.worker, lease)
            for lease in self.pool.leases.values()
            if lease.blocked and lease.worker is not None
        ]
        running = [
            started_report(lease, lease.worker)
            for lease in self.pool.leases.values()
            if lease.command is not None and lease.worker is not None and lease.worker.ready
        ]
        return [*living, *processes, *waiting, *running]

    # --- messages of the head --------------------------------------------------------
    def on_message(self, message: head_pb2.ToNode) -> None:
        kind = message.WhichOneof("kind")
        if kind == "reply":
            self.head.answered(message.reply)
        elif kind == "push":
            self._push(message.push)
        elif kind == "start_lease":
            self.pool.start(NodeLease.from_wire(marshal.loads(message.start_lease.granted)))
        elif kind == "end_lease":
            end = message.end_lease
            self.pool.end(end.lease, kill=end.kill, calls_left=end.calls_left, grace=end.grace)
        elif kind == "job_ended":
            self._job_ended(message.job_ended)
        elif kind == "welcome":
            self._welcomed(message.welcome)
        elif kind == "node_died":
            self.events.node_died(message.node_died.node_id)
        elif kind == "stop":
            self.events.stop(message.stop.reason)

    def _job_ended(self, ended: head_pb2.JobEnded) -> None:
        self.pool.end_job(ended.job_id)
        if ended.over:
            self.events.end_job(ended.job_id)

    def _push(self, push: common_pb2.ClientPush) -> None:
        """Pass a push of the head on to a process, or handle it if it is for this daemon."""
        body = marshal.loads(push.body)
        if push.process_id != self.config.node_id:
            self.clients.push(push.process_id, push.topic, body)
        elif push.topic == "actor":
            actor_id, state, *_ = body
            if state == DEAD:
                self.adopted.actor_died(actor_id)
