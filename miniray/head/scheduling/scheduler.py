"""Grants resources: leases and placement groups over the nodes of a cluster.

Responsible for every such decision, without I/O and without a clock: the caller
passes the time, in seconds of one monotonic clock. Not thread-safe. Each call that
changes something returns all decisions that follow.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from miniray.common.amounts import sum_amounts
from miniray.common.labels import describe_all
from miniray.common.object_ref import short_id
from miniray.common.specs import BundleAffinity, NodeAffinity
from miniray.head.scheduling.demands import Decisions, Refusal
from miniray.head.scheduling.reasons import Reason, ReasonKind, no_bundle, too_small
from miniray.head.scheduling.reservations import choose_revocations
from miniray.head.scheduling.table import ResourceLease, ResourceTable

if TYPE_CHECKING:
    from collections.abc import Collection, Hashable, Iterable, Iterator, Mapping

    from miniray.common.specs import Allocation
    from miniray.head.scheduling.bundles import GroupPlacement
    from miniray.head.scheduling.demands import Demand, LeaseRequest
    from miniray.head.scheduling.resources import ResourcePool


class ClusterScheduler:
    def __init__(self, reserve_after: float = 10.0) -> None:
        """Start with no nodes.

        Args:
            reserve_after: seconds of waiting after which capacity is reserved.
        """
        self._table = ResourceTable(reserve_after)
        #: The nodes of before a restart have not all reported.
        self._awaits_nodes = False

    # --- nodes ---------------------------------------------------------------------
    def add_node(
        self,
        node: ResourcePool,
        now: float,
        bundles: Iterable[tuple[tuple[bytes, int], Allocation]] = (),
        leases: Iterable[tuple[int, Allocation]] = (),
        lasting: Collection[int] = (),
    ) -> Decisions:
        """Add a node, which may come back after a restart of the head with what runs there.

        Grants begin once all that it reports is counted. Bundles ((group id, index),
        allocation) that were awaited there and are not reported are placed again.

        Raises:
            ValueError: the id is taken, or a report does not fit the node or the groups known;
                the node is not added then.
        """
        table = self._table
        if node.node_id in table.nodes:
            raise ValueError(f"node {node.node_id} is in the cluster already")
        try:
            for key, allocation in bundles:
                table.groups.adopt(key, node, allocation)
            for lease_id, allocation in leases:
                table.adopt(lease_id, allocation, node, lasting=lease_id in lasting)
        except ValueError:
            self._drop([*table.groups.lose_node(node.node_id, table.next_arrival, now), node])
            raise
        table.groups.await_no_more(node.node_id, table.next_arrival, now)
        table.domain.pools.add(node.node_id, node)
        for pool in (node, *table.groups.on_node(node.node_id)):
            table.grow(pool)
        table.reserve_soon()  # requests that no node could serve may have waited long
        return table.settle(Decisions(), now)

    def await_nodes(self) -> None:
        """Let hard affinity to missing nodes wait until ``await_no_more``: they may come back."""
        self._awaits_nodes = True

    def await_no_more(self, now: float) -> Decisions:
        """Fail what waits for nodes of before a restart that have not reported."""
        table = self._table
        out = Decisions()
        self._awaits_nodes = False
        for queue in tuple(table.domain.waiting):
            if queue.bound is not None and queue.bound not in table.nodes:
                reason = Reason(ReasonKind.NODE_GONE, node_id=str(queue.bound))
                table.fail_all(queue, reason, out)
        return table.settle(out, now)

    def remove_node(self, node_id: str, now: float) -> Decisions:
        """Remove a node with its leases and bundles; unknown ids have no effect."""
        table = self._table
        out = Decisions()
        lost = table.groups.lose_node(node_id, table.next_arrival, now)
        if node_id in table.nodes:
            lost.append(table.domain.pools.remove(node_id))
        out.lost = self._drop(lost)
        reason = Reason(ReasonKind.NODE_GONE, node_id=node_id)
        for queue in table.domain.bound_to(node_id):
            table.fail_all(queue, reason, out)
        table.leave(node_id, out)
        table.place_groups(out)
        table.report_infeasible(out)
        return table.settle(out, now)

    def drain_node(self, node_id: str, now: float, draining: bool = True) -> Decisions:
        """Stop granting on a node and in its bundles, or grant again; KeyError if it is unknown."""
        table = self._table
        for pool in (table.nodes[node_id], *table.groups.on_node(node_id)):
            pool.closed = draining
            pool.version += 1
            if draining:
                table.forget(pool)
            else:
                table.grow(pool)
        out = Decisions()
        table.leave(node_id, out)
        return table.settle(out, now)

    def set_device_in_service(
        self,
        node_id: str,
        resource: str,
        device_id: str,
        in_service: bool,
        now: float,
        why: str = "",
    ) -> Decisions:
        """Take a device out of service, or back into it; what is held there stays held.

        Unknown devices have no effect; KeyError if there is no such node.
        """
        table = self._table
        out = Decisions()
        for pool in (table.nodes[node_id], *table.groups.on_node(node_id)):
            if pool.set_in_service(resource, device_id, in_service, why):
                if in_service:
                    table.grow(pool)
                else:
                    table.forget(pool)
        table.domain.pools.topology += 1
        table.reserve_soon()  # as in ``add_node``
        table.leave(node_id, out)
        table.report_infeasible(out)
        return table.settle(out, now)

    # --- leases --------------------------------------------------------------------
    def submit(self, request: LeaseRequest, now: float) -> Decisions:
        """Request a lease: it is granted, fails, or waits in its shape's queue.

        Raises:
            ValueError: the id names a lease or a waiting request already.
        """
        table = self._table
        out = Decisions()
        lease_id, demand, near, fill = request
        if lease_id in table.leases or lease_id in table.queue_of:
            raise ValueError(f"lease {lease_id} exists already")
        why = self._impossible(demand)
        if why is not None:
            out.failures.append(Refusal(lease_id, why))
            return out
        domain = table.domain_for(demand)
        queue = domain.queue(demand)
        pool = None if queue.waiting else queue.find(near, fill=fill)
        if pool is not None:
            table.grant(queue, lease_id, pool, out)
            return out
        table.enqueue(queue, request, now)
        reason = queue.infeasible() if domain is table.domain else None
        if reason is not None:
            out.infeasible.append(Refusal(lease_id, reason))
        return out

    def cancel(self, lease_id: int, now: float) -> Decisions:
        """Withdraw a waiting request; ids that do not wait have no effect."""
        table = self._table
        if lease_id in table.queue_of:
            table.head_changed(table.dequeue(lease_id))
        return table.settle(Decisions(), now)

    def release(self, lease_id: int, now: float) -> Decisions:
        """End a lease. Ids without a lease (their node is gone) have no effect."""
        table = self._table
        lease = table.leases.pop(lease_id, None)
        if lease is None:
            return Decisions()
        pool = lease.pool
        pool.remove_lease(lease_id, lease.load)
        if lease.cpu_released:
            pool.add_cpu(-lease.allocation.cpu)
        pool.release(lease.allocation)
        table.grow(pool)
        table.free_bundle(pool)
        return table.settle(Decisions(), now)

    def release_cpu(self, lease_id: int, now: float) -> Decisions:
        """Let others, of its bundle if it is in one, use the CPU of a lease whose task waits."""
        table = self._table
        lease = table.leases.get(lease_id)
        if lease is None or lease.cpu_released or not lease.allocation.cpu:
            return Decisions()
        lease.cpu_released = True
        lease.pool.add_cpu(lease.allocation.cpu)
        table.grow(lease.pool)
        return table.settle(Decisions(), now)

    def empty_lease(self, lease_id: int, now: float) -> Decisions:
        """Give back what a lease holds, devices included; it stays until ``release``."""
        table = self._table
        lease = table.leases.get(lease_id)
        if lease is None:
            return Decisions()
        self.take_cpu(lease_id)
        lease.pool.release(lease.allocation)
        lease.allocation = lease.allocation.emptied()
        table.grow(lease.pool)
        return table.settle(Decisions(), now)

    def take_cpu(self, lease_id: int) -> None:
        """Give a lease's CPU back to its resumed task, even if its pool is in debt then."""
        lease = self._table.leases.get(lease_id)
        if lease is not None and lease.cpu_released:
            lease.cpu_released = False
            lease.pool.add_cpu(-lease.allocation.cpu)

    # --- placement groups ------------------------------------------------------------
    def create_group(self, state: GroupPlacement, now: float) -> Decisions:
        """Request a placement group: all its bundles are placed, or it waits.

        After a restart of the head, ``state.awaited`` names the nodes that are to report them.
        Raises ValueError if the id is taken.
        """
        table = self._table
        out = Decisions()
        group = table.groups.add(state, table.next_arrival(), now)
        if state.missing and table.groups.is_first_of_its_like(group):
            table.place_group(group, out)
        return table.settle(out, now)

    def remove_group(self, group_id: bytes, now: float) -> Decisions:
        """Remove a group: requests for it fail; the caller ends its leases.

        A bundle's resources return to its node when its last lease is released. Unknown ids
        have no effect.
        """
        table = self._table
        out = Decisions()
        if group_id not in table.groups.groups:
            return out
        group, pools = table.groups.remove(group_id)
        table.lift(group)
        reason = Reason(ReasonKind.GROUP_GONE, detail=short_id(group_id.hex()))
        for queue in tuple(group.domain.waiting):
            table.fail_all(queue, reason, out)
        for pool in pools:
            out.to_end.extend(pool.leases)
            table.forget(pool)
            table.free_bundle(pool)
        return table.settle(out, now)

    # --- time ------------------------------------------------------------------------
    def advance(self, now: float) -> Decisions:
        """Reserve capacity for what has waited long. Call it at ``next_deadline``."""
        self._table.reserve_soon()
        return self._table.settle(Decisions(), now)

    def next_deadline(self) -> float | None:
        """Return when ``advance`` should be called next; None: when something else changes."""
        return self._table.next_deadline()

    # --- queries -----------------------------------------------------------------------
    @property
    def nodes(self) -> Mapping[str, ResourcePool]:
        """The nodes by id, draining ones included; for reading only."""
        return self._table.nodes

    def group(self, group_id: bytes) -> GroupPlacement | None:
        group = self._table.groups.groups.get(group_id)
        return None if group is None else group.state

    def awaited_on(self, node_id: str) -> dict[tuple[bytes, int], Allocation]:
        """Return the bundles, by (group id, index), that a node is to report after a restart."""
        return self._table.groups.awaited_on(node_id)

    def lease(self, lease_id: int) -> ResourceLease | None:
        return self._table.leases.get(lease_id)

    def leases_on(self, node_id: str) -> set[int]:
        table = self._table
        node = table.nodes.get(node_id)
        pools = () if node is None else (node, *table.groups.on_node(node_id))
        return {lease_id for pool in pools for lease_id in pool.leases}

    def bundles_on(self, node_id: str) -> Iterator[tuple[tuple[bytes, int], ResourcePool]]:
        """Yield the bundles on a node by (group id, index), with bundles of removed groups."""
        for pool in self._table.groups.on_node(node_id):
            if pool.key is not None:
                yield pool.key, pool

    def total_resources(self) -> dict[str, float]:
        """Return the amounts of all nodes, in units; devices out of service are left out."""
        return sum_amounts(node.totals() for node in self.nodes.values())

    def available_resources(self) -> dict[str, float]:
        """Return what is free and may be granted, in units; bundles count as used."""
        return sum_amounts(node.available() for node in self.nodes.values())

    def waiting(self) -> list[int]:
        queues = self._table.waiting_queues()
        pending = [pending for queue in queues for pending in queue.waiting.values()]
        return [each.request.lease_id for each in sorted(pending, key=lambda each: each.number)]

    def explain(self, lease_id: int) -> Reason | None:
        """Return why a request waits; None if it does not. Looks at every node."""
        queue = self._table.queue_of.get(lease_id)
        if queue is None:
            return None
        placement = queue.demand.placement
        if isinstance(placement, BundleAffinity):
            why = self.explain_group(placement.placement_group_id)
            if why is not None and not queue.reach():
                group = short_id(placement.placement_group_id.hex())
                detail = f"{group} is not placed: {why.sentence()}"
                return Reason(ReasonKind.GROUP_PENDING, detail=detail)
        elif queue.bound is not None and not queue.reach():
            return Reason(ReasonKind.NODE_AWAITED, node_id=str(queue.bound))
        return queue.explain()

    def explain_group(self, group_id: bytes) -> Reason | None:
        """Say why a group is not placed; None if it is, or does not exist. Looks at every node."""
        group = self._table.groups.groups.get(group_id)
        return None if group is None else group.explain(self.nodes.values())

    def explain_groups(self, looks: int) -> dict[bytes, Reason | None]:
        """Say why groups are not placed, by id; None for groups beyond the limit.

        ``looks`` is how many nodes to look at, for all bundles together: like groups need one look.
        """
        groups = self._table.groups
        nodes = self.nodes.values()
        reasons: dict[Hashable, Reason | None] = {}
        for first in groups.first_unplaced():
            looks -= len(nodes) * len(first.state.missing)
            if looks < 0:
                break
            reasons[first.like] = first.explain(nodes)
        return {id: reasons.get(group.like) for id, group in groups.unplaced.items()}

    def revocation_candidates(self, lease_id: int, idle: Iterable[int]) -> list[int]:
        """Choose the fewest leases of one pool whose release lets a waiting request fit.

        ``idle`` are the leases whose owners could return them.
        """
        queue = self._table.queue_of.get(lease_id)
        if queue is None:
            return []
        held = ((id, self._table.leases[id]) for id in idle if id in self._table.leases)
        return choose_revocations(
            queue,
            [
                (id, lease.pool, lease.allocation)
                for id, lease in held
                if not lease.cpu_released and queue.reserved in (None, lease.pool)
            ],
        )

    def set_aside(self, lease_id: int, ending: int) -> bool:
        """Reserve capacity for a waiting request on the pool of a lease that is to end for it.

        Returns whether it is: only for the request that has waited longest of its shape.
        """
        queue = self._table.queue_of.get(lease_id)
        if queue is None or queue.head.request.lease_id != lease_id:
            return False
        return self._table.set_aside(queue, self._table.leases[ending].pool)

    # --- inside --------------------------------------------------------------------------
    def _impossible(self, demand: Demand) -> Reason | None:
        """Return why a demand can never be met, whatever joins the cluster; None if it can."""
        placement = demand.placement
        if isinstance(placement, NodeAffinity) and not placement.soft:
            node = self.nodes.get(placement.node_id)
            if node is None and not self._awaits_nodes:
                return Reason(ReasonKind.NODE_GONE, node_id=placement.node_id)
            if node is not None and not node.could_fit(demand.placing, repaired=True):
                return too_small(demand.placing, node)
            if node is not None and not demand.accepts(node.labels):
                labels = describe_all((demand.selector, *demand.fallbacks))
                return Reason(ReasonKind.NODE_LABELS, node_id=node.node_id, detail=labels)
        if isinstance(placement, BundleAffinity):
            name = short_id(placement.placement_group_id.hex())
            group = self._table.groups.groups.get(placement.placement_group_id)
            if group is None:
                return Reason(ReasonKind.GROUP_GONE, detail=name)
            if not group.could_hold(demand.placing, placement.bundle_index):
                bundles = [spec.needs for spec in group.state.bundles]
                index = placement.bundle_index
                return no_bundle(f"placement group {name}", bundles, demand.placing, index)
        return None

    def _drop(self, pools: Iterable[ResourcePool]) -> list[int]:
        """Forget pools that are gone; return the leases lost with them."""
        lost: list[int] = []
        for pool in pools:
            self._table.forget(pool)
            lost.extend(pool.leases)
            for lease_id in pool.leases:
                del self._table.leases[lease_id]
        return lost
