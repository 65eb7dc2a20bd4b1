"""A node in its cluster: it joins, joins anew with a head that is back, and does what that says."""

from __future__ import annotations

import logging
import marshal
from typing import TYPE_CHECKING, Protocol

from miniray._proto import head_pb2
from miniray.calls.actor_client import DEAD
from miniray.common.host_port import DaemonAddress
from miniray.messages.errors import encode_error
from miniray.node.hello import actor_report, attached, blocked_report, hello
from miniray.node.workers.worker import NodeLease

if TYPE_CHECKING:
    import asyncio
    from collections.abc import Callable, Container, Iterable

    import grpc

    from miniray._proto import common_pb2
    from miniray.node.base.clients import ClientServer
    from miniray.node.base.node_config import NodeConfig
    from miniray.node.head_client import HeadClient
    from miniray.node.objects.adopted_service import AdoptedService
    from miniray.node.relay.relay import RelayHub
    from miniray.node.workers.workers import WorkerPool

logger = logging.getLogger(__name__)


class JobKeeper(Protocol):
    """Keeps something of jobs until they are over."""

    def jobs(self) -> set[bytes]:
        """Those it keeps something of."""

    def end_job(self, job_id: bytes) -> None:
        """A job is over."""


class Membership:
    """What the head knows of this node, and wants of it."""

    def __init__(
        self,
        config: NodeConfig,
        head: HeadClient,
        clients: ClientServer,
        pool: WorkerPool,
        relay: RelayHub,
        adopted: AdoptedService,
        *,
        usage: Callable[[], head_pb2.Heartbeat],
        node_died: Callable[[bytes], None],
        stop: Callable[[str], None],
        keepers: Iterable[JobKeeper],
    ) -> None:
        """Not a member yet.

        Args:
            config: Of this node.
            head: The way to the head.
            clients: The processes of this node, which the head sends messages to.
            pool: Its workers.
            relay: The way to other nodes.
            adopted: What it owns for processes that have ended.
            usage: What a heartbeat says.
            node_died: Called with another node that is gone.
            stop: Ends this node.
            keepers: What keeps something for jobs until they are over.
        """
        self._config = config
        self._head = head
        self._clients = clients
        self._pool = pool
        self._relay = relay
        self._adopted = adopted
        self._usage = usage
        self._node_died = node_died
        self._stop = stop
        self._keepers = tuple(keepers)

    @property
    def session_ended(self) -> asyncio.Event:
        """Set when the session with the head has broken."""
        return self._head.session.ended

    # --- joining -------------------------------------------------------------------
    async def join(self, channel: grpc.aio.Channel, timeout: float) -> None:
        """Open the session with the head."""
        welcome = await self._head.join(
            channel,
            timeout,
            hello=lambda: hello(self._config, self._pool, self._head.lately()),
            on_message=self._on_message,
            usage=self._usage,
        )
        self._welcomed(welcome)

    async def rejoin(self, timeout: float) -> None:
        """Open a session with the head again, or with its successor.

        Raises:
            MinirayError: the head refuses this node.
            ConnectionError: there is no head within ``timeout`` seconds.
        """
        self._welcomed(await self._head.rejoin(timeout, self._tell_again))
        for process_id in self._clients.clients:
            self._clients.push(process_id, "head_back", ())
        for actor_id in self._adopted.actors():
            self.await_death(actor_id)
        jobs = self._pool.jobs().union(*(keeper.jobs() for keeper in self._keepers))
        self._head.notify("ended_jobs", sorted(jobs))
        logger.info("the session with the head is open again")

    def _welcomed(self, welcome: head_pb2.Welcome) -> None:
        for node in welcome.nodes:
            self._joined(node)
        if welcome.nodes_are_all:
            self._only_these_live({node.node_id for node in welcome.nodes})

    def _tell_again(self) -> list[head_pb2.FromNode]:
        """What a head must know that knows of this node only what its hello said."""
        processes = [attached(c, self._config.machine) for c in self._clients.clients.values()]
        living = [
            actor_report(lease.worker, lease)
            for lease in self._pool.leases.values()
            if lease.alive and lease.worker is not None
        ]
        waiting = [
            blocked_report(lease.worker, lease)
            for lease in self._pool.leases.values()
            if lease.blocked and lease.worker is not None
        ]
        return [*living, *processes, *waiting]

    def await_death(self, actor_id: bytes) -> None:
        """Have the head tell when an actor is dead."""
        self._head.notify("subscribe_actor", actor_id)

    # --- what the head says ----------------------------------------------------------
    def _on_message(self, message: head_pb2.ToNode) -> None:
        kind = message.WhichOneof("kind")
        if kind == "reply":
            self._head.answered(message.reply)
        elif kind == "push":
            self._push(message.push)
        elif kind == "start_lease":
            self._start(NodeLease.from_wire(marshal.loads(message.start_lease.granted)))
        elif kind == "end_lease":
            end = message.end_lease
            self._pool.end(end.lease, kill=end.kill, calls_left=end.calls_left, why=end.why)
        elif kind == "job_ended":
            self._job_ended(message.job_ended)
        elif kind == "node_joined":
            self._joined(message.node_joined)
        elif kind == "node_died":
            self._node_died(message.node_died.node_id)
        elif kind == "living":
            self._only_these_live({self._config.node_id, *message.living.ids})
        elif kind == "stop":
            self._stop(message.stop.reason)

    def _job_ended(self, ended: head_pb2.JobEnded) -> None:
        self._pool.end_job(ended.job_id)
        if ended.over:
            for keeper in self._keepers:
                keeper.end_job(ended.job_id)

    def _push(self, push: common_pb2.ClientPush) -> None:
        """The head has something to tell to a process, or to this daemon itself."""
        body = marshal.loads(push.body)
        if push.process_id != self._config.node_id:
            self._clients.push(push.process_id, push.topic, body)
        elif push.topic == "actor" and body[1] == DEAD:
            self._adopted.actor_died(body[0])

    def _start(self, lease: NodeLease) -> None:
        """Give a lease its worker; if that cannot even begin, its owner must not wait."""
        try:
            self._pool.start(lease)
        except Exception as error:
            logger.exception("lease %d of process %s cannot start", lease.number, lease.owner.hex())
            self._pool.leases.pop(lease.number, None)
            failed = head_pb2.LeaseFailed(lease=lease.number, error=encode_error(error))
            self._head.tell(lease_failed=failed)

    def _joined(self, node: head_pb2.NodeJoined) -> None:
        address = DaemonAddress.parse(node.address)
        self._relay.joined(node.node_id, address.target_from(self._config.machine))

    def _only_these_live(self, node_ids: Container[bytes]) -> None:
        """The head tells of all nodes; this one may have missed the end of others."""
        for node_id in self._relay.announced():
            if node_id not in node_ids:
                self._node_died(node_id)
