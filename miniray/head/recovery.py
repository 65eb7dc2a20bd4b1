"""A head that starts again: one state from the stored records and the daemons' reports.

What runs where is the daemons' truth. Nothing is granted on a node before it has
reported; a node that does not come back within the node timeout is lost.
"""

from __future__ import annotations

import dataclasses
import json
import logging
from typing import TYPE_CHECKING

from miniray._proto import head_pb2
from miniray.common.amounts import Needs
from miniray.common.config import config
from miniray.common.specs import Allocation
from miniray.head.cluster import latest_return
from miniray.head.scheduling.groups import sort_out
from miniray.head.storage import (
    read_actor,
    read_dead_actor,
    read_group,
    read_job,
    read_submitted_job,
)
from miniray.messages import plain

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from miniray.head.cluster import ClusterDirectories
    from miniray.head.directories.grants import Timers
    from miniray.head.directories.jobs import Job
    from miniray.head.directories.nodes import ClusterNode
    from miniray.head.storage import Saved

logger = logging.getLogger(__name__)


#: The nodes of the cluster, for the next head.
_NODES = "_nodes"


#: An ``Allocation``, as daemons report it.
_HELD = tuple[str, Needs, tuple[tuple[str, Needs], ...], tuple[bytes, int] | None]


@dataclasses.dataclass(eq=False, repr=False)
class HeadRecovery:
    """Merges what earlier heads kept with what nodes report."""

    _cluster: ClusterDirectories
    _timers: Timers
    _handle: Callable[[ClusterNode, head_pb2.FromNode], None]

    def __post_init__(self) -> None:
        #: Names of nodes that have reported to this head.
        self._reported: set[str] = set()
        #: Earlier nodes that have not come back, as (address, host name) by name.
        self.awaited: dict[str, tuple[str, str]] = {}
        #: Whether all earlier nodes that still live are here.
        self.over = True

    def restore(self, saved: Saved) -> None:
        """Enter what earlier heads kept, before any node joins, and wait for the nodes in it."""
        cluster = self._cluster
        for namespace, key, value in saved.values:
            cluster.kv.restore(namespace, key, value)
        for record in saved.jobs:
            self._restore_job(read_job(record))
        submitted = [read_submitted_job(record) for record in saved.submitted_jobs]
        for job in sorted(submitted, key=lambda job: job.submitted):
            cluster.submissions.restore(job)
        cluster.code.restored()
        cluster.events.restore(saved.events)
        if saved.epoch > 1:
            text = "The head was lost, and started again."
            cluster.events.add("HEAD", "started", text, "WARNING")
        for record in saved.dead_actors:
            cluster.actors.restore_dead(*read_dead_actor(record))
        for id in saved.removed_groups:
            cluster.placement_groups.forbid(id)
        if saved.epoch > 1:
            self.over = False
            cluster.scheduler.await_nodes()
            self._timers.call_later(config().node_timeout, self._end_of_wait)
            for name in cluster.kv.keys(_NODES, ""):
                address, hostname = json.loads(cluster.kv.get(_NODES, name) or b"")
                self.awaited[str(name)] = (address, hostname)
        for record in saved.groups:
            cluster.placement_groups.restore(read_group(record))
        for record in saved.actors:
            cluster.actors.restore(*read_actor(record))

    def _restore_job(self, job: Job) -> None:
        """Enter a job, which is not over while processes of it may come back with their nodes."""
        jobs, holder = self._cluster.jobs, b"restored" + job.id
        jobs.restore(job)
        jobs.hold(holder, job.id)
        self._timers.call_later(latest_return(), lambda: jobs.release(holder))

    def add_node(
        self,
        node: ClusterNode,
        reports: Iterable[head_pb2.RunningLease],
        lately: Iterable[head_pb2.FromNode] = (),
    ) -> None:
        """Add a node with what runs there: known leases are taken over, others ended.

        ``lately`` are reports of ends that earlier heads may have missed.
        Raises ValueError if its reports do not fit it.
        """
        cluster = self._cluster
        running = {report.lease: (report, _held(node, report)) for report in reports}
        self.awaited.pop(node.name, None)
        cluster.kv.put(_NODES, node.name, json.dumps((node.host, node.hostname)).encode())
        awaited = cluster.scheduler.awaited_on(node.name)
        bundles, without_bundle = sort_out(
            node.pool, awaited, {number: held for number, (_, held) in running.items()}
        )
        leases = {
            number: held._replace(bundle=None) if number in without_bundle else held
            for number, (_, held) in running.items()
        }
        has_job = cluster.submissions.has_lease
        lasting = {number for number, (report, _) in running.items() if report.actor_id}
        lasting |= {number for number in running if has_job(number)}
        cluster.grants.decide(
            cluster.scheduler.add_node,
            node.pool,
            bundles=bundles.items(),
            leases=leases.items(),
            lasting=lasting,
        )
        for group_id in dict.fromkeys(key[0] for key in bundles):
            cluster.placement_groups.reported(group_id)
        for message in lately:
            self._handle(node, message)
        processes = {number: report.process_id for number, (report, _) in running.items()}
        cluster.actors.node_reports(node, processes, without_bundle)
        cluster.submissions.node_reports(node, running.keys())
        for number, (report, _) in running.items():
            if cluster.actors.has_lease(number) or has_job(number):
                continue
            if report.actor_id or number in without_bundle or not self._is_of_before(report, node):
                node.send(end_lease=head_pb2.EndLease(lease=number, kill=True))
            else:
                self._adopt(report, node)
        self._reported.add(node.name)

    def lost(self, node: ClusterNode) -> None:
        self._cluster.kv.delete(_NODES, node.name)

    def _is_of_before(self, report: head_pb2.RunningLease, node: ClusterNode) -> bool:
        """Return whether a lease is of an earlier head, and this one has not ended it already.

        A session that broke ended all leases of its node for all other processes.
        """
        return report.epoch != self._cluster.identity.epoch and node.name not in self._reported

    def _adopt(self, report: head_pb2.RunningLease, node: ClusterNode) -> None:
        self._cluster.leases.adopt(report.lease, report.owner, node.id, report.process_id)
        if self.over:  # its owner may have ended long ago, or attach to this node in a moment
            self._timers.call_later(config().node_timeout, self._cluster.leases.end_orphans)

    def _end_of_wait(self) -> None:
        """Give up the nodes and processes that have not come back."""
        cluster = self._cluster
        self.over = True
        # What ends with a process that is gone ends first, else it would start again elsewhere.
        cluster.actors.end_orphans()
        cluster.placement_groups.end_orphans()
        cluster.leases.end_orphans()
        for name in sorted(self.awaited):
            logger.warning("node %s did not come back after the head's restart", name)
            cluster.actors.node_never_came(bytes.fromhex(name))
            cluster.submissions.node_never_came(name)
            cluster.grants.decide(cluster.scheduler.remove_node, name)
            cluster.kv.delete(_NODES, name)
        self.awaited.clear()
        cluster.grants.decide(cluster.scheduler.await_no_more)
        for job in cluster.jobs.all():
            if job.ended is None and cluster.clients.get(job.driver) is None:
                cluster.driver_ended(job.driver)
        cluster.nodes.tell_all()


def _held(node: ClusterNode, report: head_pb2.RunningLease) -> Allocation:
    """Return what a reported lease holds; ValueError if that is malformed."""
    told = plain.loads(report.allocation)
    if not plain.check_of(_HELD)(told):
        raise ValueError(f"node {node.name} reports that lease {report.lease} holds {told!r:.80}")
    return Allocation(*told)._replace(node_id=node.name)
