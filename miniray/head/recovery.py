"""A head that starts again: from what was kept and what daemons report to one state.

What runs where is the daemons' truth. Until a node has reported, nothing is granted
there; one that does not come back within the node timeout is lost.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

from miniray._proto import head_pb2
from miniray.config import config
from miniray.head import records
from miniray.head.allocations import allocation_from_json

if TYPE_CHECKING:
    from collections.abc import Iterable

    from miniray.head.grants import Timers
    from miniray.head.head import Head
    from miniray.head.nodes import Node
    from miniray.head.resources import Allocation
    from miniray.head.storage import Saved

logger = logging.getLogger(__name__)


class Recovery:
    """What is kept of before, until the nodes have reported."""

    def __init__(self, head: Head, timers: Timers) -> None:
        self._head = head
        self._timers = timers
        #: Bundles by the name of the node that is to report.
        self._bundles: dict[str, dict[tuple[bytes, int], Allocation]] = {}
        #: Names of nodes that have not reported.
        self._expected: set[str] = set()

    def restore(self, saved: Saved) -> None:
        """Enter what was kept, and wait for the nodes that it names."""
        head = self._head
        for namespace, key, value in saved.values:
            head.kv.restore(namespace, key, value)
        for record in saved.jobs:
            head.jobs.restore(records.read_job(record))
        actors = [records.read_actor(record) for record in saved.actors]
        groups = [records.read_group(record) for record in saved.groups]
        self._expected = {node_id.hex() for _, node_id in actors if node_id}
        for group, allocations in groups:
            for index, allocation in allocations.items():
                held = self._bundles.setdefault(allocation.node_id, {})
                held[group.id, index] = allocation
                self._expected.add(allocation.node_id)
        for name in self._expected:
            head.scheduler.expect_node(name)
        for group, _ in groups:
            head.placement_groups.restore(group)
        for actor, node_id in actors:
            head.actors.restore(actor, node_id)
        if saved.epoch > 1:
            self._timers.call_later(config().node_timeout, self._end_of_wait)

    def add_node(self, node: Node, reports: Iterable[head_pb2.RunningLease]) -> None:
        """A node joins with what runs there: what is known is taken over, the rest is ended.

        Raises:
            ValueError: what it reports does not fit it.
        """
        head = self._head
        running = {
            report.lease: (report, allocation_from_json(node.name, report.allocation))
            for report in reports
        }
        self._expected.discard(node.name)
        bundles = self._bundles.pop(node.name, {})
        groups = {key: held for key, held in bundles.items() if self._is_awaited(key, node.name)}
        leases = {}
        for number, (_, held) in running.items():
            # A bundle may be gone with its group, or have been given up with the node's old
            # session. What the lease holds counts on the node itself then, until it has ended.
            kept = held.bundle is None or held.bundle in groups
            leases[number] = held if kept else held._replace(bundle=None)
        actors = [number for number, (report, _) in running.items() if report.actor_id]
        head.grants.add_node(node.pool, groups.items(), leases.items(), actors)
        for group_id in {key[0] for key in groups}:
            head.placement_groups.reported(group_id)
        head.actors.node_reports(node, {r.lease: r.process_id for r, _ in running.values()})
        for number, (report, _) in running.items():
            if head.actors.has_lease(number):
                continue
            # A session that broke ended all of its leases for everybody else.
            is_older = report.epoch != head.identity.epoch
            lost_bundle = leases[number].bundle != running[number][1].bundle
            if is_older and not report.actor_id and not lost_bundle:
                head.leases.adopt(number, report.owner, node.id, report.process_id)
            else:
                node.send(end_lease=head_pb2.EndLease(lease=number, kill=True))

    def _is_awaited(self, key: tuple[bytes, int], name: str) -> bool:
        state = self._head.scheduler.group(key[0])
        return state is not None and state.awaited.get(key[1]) == name

    def _end_of_wait(self) -> None:
        """Who has not come back by now is gone."""
        head = self._head
        for name in self._expected:
            logger.warning("node %s did not come back after the head's restart", name)
            head.actors.node_never_came(bytes.fromhex(name))
            head.grants.remove_node(name)
        self._expected.clear()
        self._bundles.clear()
        head.actors.end_orphans()
        head.placement_groups.end_orphans()
        head.leases.end_orphans()
        for job in head.jobs.all():
            if job.ended is None and head.clients.get(job.driver) is None:
                head.driver_ended(job.driver)
