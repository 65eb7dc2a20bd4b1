"""A node in its cluster: joins, joins again once the head is back, and does what the head says."""

from __future__ import annotations

import dataclasses
import logging
import marshal
from typing import TYPE_CHECKING, Protocol

from miniray.common.host_port import DaemonAddress
from miniray.common.state_types import DEAD
from miniray.node.reports import actor_report, attached, blocked_report, hello
from miniray.node.workers.worker import NodeLease, started_report

if TYPE_CHECKING:
    import asyncio

    from miniray._proto import common_pb2, head_pb2
    from miniray.node.base.clients import ClientServer
    from miniray.node.base.head_client import HeadClient
    from miniray.node.base.node_config import NodeConfig
    from miniray.node.objects.adopted import AdoptedObjects
    from miniray.node.relay.relay import RelayHub
    from miniray.node.workers.workers import WorkerPool

logger = logging.getLogger(__name__)


class MemberEvents(Protocol):
    """What the daemon does about what the head says."""

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
        """Tell commands that look on that nothing will come for a while."""
        for client in self.clients.clients.values():
            if client.is_command:
                self.clients.push(client.process_id, "head_lost", ())

    def _welcomed(self, welcome: head_pb2.Welcome) -> None:
        """Learn of nodes; those that are missing where all are listed have died unheard."""
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
        """Return what a new head must know beyond the hello of this node."""
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
