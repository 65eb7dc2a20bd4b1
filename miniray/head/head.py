"""The head: its parts put together, and the messages of daemons handed to them.

Knows nothing of gRPC: a session is a ``Node`` whose outbox takes messages. All of it
runs in one event loop's thread.
"""

from __future__ import annotations

import dataclasses
import logging
import platform
import time
from typing import TYPE_CHECKING

from miniray._proto import head_pb2
from miniray.common.config import config
from miniray.head.directories.actors import ActorDirectory
from miniray.head.directories.clients import Client, ClientDirectory, ProcessExit
from miniray.head.directories.departures import Departures
from miniray.head.directories.drains import Drains
from miniray.head.directories.ends import ProcessEnds
from miniray.head.directories.grants import GrantTable
from miniray.head.directories.job_code import JobCode
from miniray.head.directories.jobs import JobDirectory
from miniray.head.directories.kv import KeyValues
from miniray.head.directories.leases import TaskLeases
from miniray.head.directories.nodes import Node, NodeDirectory
from miniray.head.directories.pending_notices import PendingNotices
from miniray.head.directories.placement_groups import PlacementGroups
from miniray.head.directories.quarantines import Quarantines
from miniray.head.directories.revocations import Revocations
from miniray.head.recovery import Recovery, latest_return
from miniray.head.requests import Requests
from miniray.head.scheduling.scheduler import ClusterScheduler
from miniray.head.state import ClusterState
from miniray.version import VERSION

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from miniray.head.directories.grants import Timers
    from miniray.head.directories.nodes import Outbox
    from miniray.head.storage.storage import Saved, Storage

logger = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True)
class Identity:
    """Which head this is."""

    cluster_id: str
    #: Counts the starts of the cluster's head.
    epoch: int
    #: What drivers and other machines know it by.
    address: str = ""


class Head:
    """One head, without its connections."""

    def __init__(self, identity: Identity, timers: Timers, storage: Storage) -> None:
        self.identity = identity
        self.address = identity.address
        #: When the cluster was started, and this head of it.
        self.cluster_started = self.started = time.time()
        self._timers = timers
        self._stopping = False
        tunables = config()
        epoch = identity.epoch
        self.scheduler = ClusterScheduler(tunables.reserve_after, tunables.hybrid_threshold)
        self.nodes = NodeDirectory()
        self.clients = ClientDirectory(self.nodes)
        self.ends = ProcessEnds(self.clients, timers)
        self.jobs = JobDirectory(self._job_over, storage.job_forgotten)
        self.kv = KeyValues(storage.key_value)
        self.code = JobCode(self.kv, self.jobs, tunables.job_code_limit)
        self.grants = GrantTable(
            self.scheduler,
            timers,
            epoch=epoch,
            pending_warning=tunables.pending_warning,
        )
        notices = PendingNotices(self.clients, timers)
        self.leases = TaskLeases(
            self.grants, self.nodes, self.clients, self.jobs, timers, notices, epoch=epoch
        )
        self.leases.on_kill = self.ends.explain
        self.actors = ActorDirectory(
            self.grants,
            self.nodes,
            self.clients,
            self.jobs,
            timers,
            notices,
            epoch=epoch,
            on_change=storage.actor,
        )
        self.placement_groups = PlacementGroups(
            self.grants, self.clients, self.jobs, timers, notices, storage.placement_group
        )
        self._storage = storage
        self.clients.on_ended.append(self._client_ended)
        self.revocations = Revocations(
            self.grants,
            self.leases,
            self.clients,
            timers,
            reserve_after=tunables.reserve_after,
        )
        self.departures = Departures(
            self.grants,
            self.leases,
            self.actors,
            self.clients,
            timers,
            patience=tunables.reserve_after,
        )
        self.recovery = Recovery(self, timers)
        self.drains = Drains(self.grants, self.leases, self.nodes, self.clients, self.kv)
        self.quarantines = Quarantines(self.grants, self.clients, self.jobs)
        self.state = ClusterState(self)
        self._requests = Requests(self)
        self._handlers: dict[str, Callable[[Node, head_pb2.FromNode], None]] = {
            "heartbeat": lambda node, message: node.beat(message.heartbeat),
            "request": lambda _, message: self._requests.handle(message.request),
            "attached": lambda node, message: self._attached(node, message.attached),
            "ended": lambda _, message: self._process_ended(message.ended),
            "lease_started": lambda _, message: self.leases.started(
                message.lease_started.lease,
                message.lease_started.process_id,
                message.lease_started.calls_left,
            ),
            "lease_failed": lambda _, message: self._lease_failed(message.lease_failed),
            "actor": lambda _, message: self.actors.reported(message.actor),
            "lease_ended": lambda _, message: self._lease_ended(message.lease_ended.lease),
            "blocked": lambda _, message: self.grants.set_blocked(
                message.blocked.lease, message.blocked.blocked
            ),
            "quarantines": lambda node, message: self.quarantines.told(node, message.quarantines),
            "leaving": lambda node, message: self.lose(
                node, message.leaving.reason, planned=not message.leaving.failed
            ),
            "batch": self._batch,
        }

    def restore(self, saved: Saved) -> None:
        """Go on from what earlier heads of this cluster kept; before any node joins."""
        self.recovery.restore(saved)
        self.cluster_started = saved.started

    # --- sessions --------------------------------------------------------------------
    def join(self, hello: head_pb2.NodeHello, outbox: Outbox) -> Node | None:
        """A daemon introduces itself; it is answered, and None is returned if refused."""
        refusal = _version_error(hello)
        node = None
        if refusal is None:
            try:
                node = Node.of(hello, outbox, self._timers.time())
            except Exception as error:
                logger.exception("node %s was refused", hello.node_id.hex())
                refusal = ("ValueError", f"The head cannot read what the node told it: {error}")
        if refusal is not None or node is None:
            kind, text = refusal or ("", "")
            outbox.put(head_pb2.ToNode(welcome=head_pb2.Welcome(error_kind=kind, error=text)))
            return None
        self._welcome(node)
        try:
            if not node.drivers_only:
                self.drains.joins(node)
                self.quarantines.joins(node, hello.quarantines)
                self.recovery.add_node(node, hello.leases, hello.lately.messages)
        except Exception as error:
            logger.exception("node %s was refused", node.name)
            reason = f"the head cannot use what the node reports of its leases: {error}"
            node.send(stop=head_pb2.Stop(reason=reason))
            self.lose(node, reason)
            return None
        return node

    def _welcome(self, node: Node) -> None:
        """The welcome goes out before anything that the new node's room leads to."""
        known = self.nodes.get(node.id)
        if known is not None:
            self.lose(known, "it opened a new session")
        others = [self.nodes.introduction(other) for other in self.nodes]
        node.send(
            welcome=head_pb2.Welcome(
                epoch=self.identity.epoch,
                cluster_id=self.identity.cluster_id,
                nodes=others,
                head_address=self.address,
                nodes_are_all=self.recovery.over,
            )
        )
        self.nodes.add(node)

    def lose(self, node: Node, reason: str, *, planned: bool = False) -> None:
        """A node is gone, with everything that ran there; ``planned``: it was asked to end."""
        if self.nodes.get(node.id) is not node:
            return
        if planned or self._stopping:
            logger.info("node %s (%s) has left: %s", node.name, node.hostname, reason)
        else:
            logger.warning("node %s (%s) is lost: %s", node.name, node.hostname, reason)
        self.nodes.remove(node, reason)
        self.grants.remove_node(node.name)
        self.actors.node_never_came(node.id)  # what it was to report, if that was refused
        self.clients.node_lost(node)
        self.drains.left()
        self.recovery.lost(node)
        node.outbox.close()

    def silence_of(self, node: Node) -> float:
        """How many seconds ago a node was last heard of."""
        return self._timers.time() - node.heard

    def check_liveness(self) -> None:
        """Give up the nodes that have been silent for too long; once per heartbeat interval."""
        timeout = config().node_timeout
        every = config().heartbeat_interval
        for node in self.nodes.silent(self._timers.time(), timeout, every):
            self.lose(node, f"it was silent for {timeout:g} s")

    def stop(self, reason: str) -> None:
        """Tell every daemon that the cluster ends."""
        self._stopping = True
        for node in self.nodes:
            node.send(stop=head_pb2.Stop(reason=reason))

    def warn_drivers(self, text: str) -> None:
        """Tell every driver something that its user should know."""
        for job in self.jobs.all():
            self.clients.push(job.driver, "warning", text)

    # --- messages --------------------------------------------------------------------
    def on_message(self, node: Node, message: head_pb2.FromNode) -> None:
        """A message of a node's daemon; one that cannot be handled ends nothing else."""
        if not node.alive:
            return
        node.heard = self._timers.time()
        self.handle(node, message)

    def handle(self, node: Node, message: head_pb2.FromNode) -> None:
        """Do what a message says."""
        kind = message.WhichOneof("kind")
        handler = self._handlers.get(kind or "")
        if handler is None:
            logger.error("node %s sent a message of kind %r", node.name, kind)
            return
        try:
            handler(node, message)
        except Exception:
            logger.exception("handling %s of node %s failed", kind, node.name)

    def _batch(self, node: Node, message: head_pb2.FromNode) -> None:
        for part in message.batch.messages:
            self.handle(node, part)

    def _attached(self, node: Node, attached: head_pb2.ProcessAttached) -> None:
        job_id = attached.job_id or attached.process_id
        self.clients.attach(
            Client(attached.process_id, node, attached.pid, attached.driver, job_id)
        )
        if attached.driver:
            job = self.jobs.started(
                job_id, attached.process_id, node.id, attached.pid, attached.details
            )
            self._storage.job(job)
        self.jobs.hold(attached.process_id, job_id)

    def _process_ended(self, ended: head_pb2.ProcessEnded) -> None:
        if ended.lease:
            self.actors.process_of_lease(ended.lease, ended.process_id)
        code = ended.exit_code if ended.exit_known else None
        how = ProcessExit(code, ended.pid, ended.planned, detail=ended.detail)
        self.clients.ended(ended.process_id, how)

    def driver_ended(self, process_id: bytes) -> None:
        """A process is gone; if it was a driver, its job is over."""
        job = self.jobs.driver_ended(process_id)
        if job is not None:
            self._storage.job(job)
            if not self.jobs.is_over(job.id):
                self._tell_job_ended(job.id)

    def _client_ended(self, process_id: bytes, how: ProcessExit) -> None:
        if not how.with_node:
            self.jobs.release(process_id)
        self.driver_ended(process_id)
        if how.with_node:  # it may live, and be back before its daemon gives up
            self._timers.call_later(latest_return(), lambda: self._release_job(process_id))

    def _release_job(self, process_id: bytes) -> None:
        if self.clients.get(process_id) is None:
            self.jobs.release(process_id)

    def _job_over(self, job_id: bytes) -> None:
        """Nothing of a job runs or will: what was kept for it goes."""
        self.code.job_over(job_id)
        self._tell_job_ended(job_id)

    def _tell_job_ended(self, job_id: bytes) -> None:
        over = self.jobs.is_over(job_id)
        for node in self.nodes:
            node.send(job_ended=head_pb2.JobEnded(job_id=job_id, over=over))

    def tell_ended_jobs(self, node_id: bytes, job_ids: Iterable[bytes]) -> None:
        """A node whose session was broken may have missed that some of these jobs ended."""
        node = self.nodes.get(node_id)
        for job_id in job_ids:
            job = self.jobs.get(job_id)
            if node is not None and (job is None or job.ended is not None):
                over = self.jobs.is_over(job_id)
                node.send(job_ended=head_pb2.JobEnded(job_id=job_id, over=over))

    def _lease_failed(self, failed: head_pb2.LeaseFailed) -> None:
        if self.actors.lease_failed(failed.lease, failed.error, failed.tries):
            self.grants.release(failed.lease)
        else:
            self.leases.failed(failed.lease, failed.error, failed.tries)

    def _lease_ended(self, number: int) -> None:
        self.actors.lease_over(number)
        self.leases.over(number)


def _version_error(hello: head_pb2.NodeHello) -> tuple[str, str] | None:
    """(name of an exception, its text) for a node that cannot be of this cluster."""
    ours = platform.python_version()
    if hello.version != VERSION:
        what, theirs, wanted = "miniray", hello.version, VERSION
    elif _minor(hello.python) != _minor(ours):
        # Code travels as bytecode, and plain data as marshal: both are of one minor version.
        what, theirs, wanted = "Python", hello.python, ours
    else:
        return None
    text = (
        f"This node has {what} {theirs}, the cluster has {wanted}. "
        f"Install the same version on every machine and start the node again."
    )
    return "VersionMismatchError", text


def _minor(version: str) -> str:
    return ".".join(version.split(".")[:2])
