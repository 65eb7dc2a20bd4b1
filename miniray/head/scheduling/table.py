"""The resource table: pools, leases, queues and groups, and the work of filling freed capacity.

Responsible for keeping them consistent and for granting whatever fits; the
requests that change the table are in ``scheduler.py``.
"""

from __future__ import annotations

import dataclasses
import functools
import heapq
from typing import TYPE_CHECKING

from miniray.common.amounts import UNIT
from miniray.common.specs import BundleAffinity
from miniray.head.scheduling.demands import Decisions, Grant, Refusal
from miniray.head.scheduling.groups import Group, GroupTable
from miniray.head.scheduling.queues import Domain, Pending, ShapeQueue
from miniray.head.scheduling.reservations import lift, reserve_for_group, reserve_for_queue

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from miniray.common.specs import Allocation
    from miniray.head.scheduling.demands import Demand, LeaseRequest
    from miniray.head.scheduling.reasons import Reason
    from miniray.head.scheduling.resources import ResourcePool

_RESERVATIONS_AT_ONCE = 16  # reservations made per call, each examines every node


@dataclasses.dataclass(slots=True, eq=False, repr=False)
class ResourceLease:
    """The resources that a lease holds of a pool."""

    pool: ResourcePool
    allocation: Allocation
    #: Fixed-point CPU counted as load of the pool though not held.
    load: int = 0
    #: Its CPU is given back while its task waits.
    cpu_released: bool = False
    #: It is an actor's, which may never end.
    lasting: bool = False


class ResourceTable:
    """State of the scheduler. What frees capacity calls ``grow``, and ``settle`` in the end."""

    def __init__(self, reserve_after: float) -> None:
        self.domain = Domain()
        self.groups = GroupTable(self._note_wait)
        self.leases: dict[int, ResourceLease] = {}
        #: Queue of each waiting request.
        self.queue_of: dict[int, ShapeQueue] = {}
        self.time = float("-inf")
        self._reserve_after = reserve_after
        self._arrivals = 0
        self._placements = 0
        #: Domains that may have waiting requests.
        self._busy: dict[Domain, None] = {}
        #: Pools that gained capacity.
        self._grown: dict[ResourcePool, None] = {}
        self._reserve_again = False
        #: When to look next for requests that have waited long: at the latest when the first has.
        self._look_at: float | None = None

    # --- queries -------------------------------------------------------------------
    @property
    def nodes(self) -> Mapping[str, ResourcePool]:
        return self.domain.pools.pools  # type: ignore[return-value]

    def domain_for(self, demand: Demand) -> Domain:
        """Return the pools that a demand chooses from; its group must exist."""
        if isinstance(demand.placement, BundleAffinity):
            return self.groups.groups[demand.placement.placement_group_id].domain
        return self.domain

    def waiting_queues(self) -> Iterator[ShapeQueue]:
        for domain in tuple(self._busy):
            if domain.waiting:
                yield from domain.waiting
            else:
                del self._busy[domain]

    def next_deadline(self) -> float | None:
        """Return when to look next for what has waited long; None if the queues are empty."""
        return self._look_at if self.queue_of or self.groups.unplaced else None

    # --- leases --------------------------------------------------------------------
    def next_arrival(self) -> int:
        self._arrivals += 1
        return self._arrivals

    def grant(self, queue: ShapeQueue, lease_id: int, pool: ResourcePool, out: Decisions) -> None:
        """Grant a lease of a queue's shape on a pool that admits it."""
        demand = queue.demand
        allocation = pool.allocate(demand.needs, queue)
        self._placements += 1
        pool.add_lease(lease_id, demand.load, self._placements)
        self._note_sharing(queue.domain, pool, allocation)
        self.leases[lease_id] = ResourceLease(pool, allocation, demand.load, lasting=demand.lasting)
        out.grants.append(Grant(lease_id, allocation))

    def adopt(
        self, lease_id: int, allocation: Allocation, node: ResourcePool, *, lasting: bool
    ) -> None:
        """Count a lease as its daemon reports it; ValueError if it does not fit the table."""
        pool: ResourcePool | None = node
        if lease_id in self.leases:
            raise ValueError(f"lease {lease_id} exists already")
        if allocation.bundle is not None:
            pool = self.groups.pool_of(allocation.bundle)
        if pool is None or pool.node_id != node.node_id:
            raise ValueError(f"lease {lease_id} draws on a bundle that is not on its node")
        pool.adopt(allocation)
        pool.add_lease(lease_id)
        self.leases[lease_id] = ResourceLease(pool, allocation, lasting=lasting)

    def enqueue(self, queue: ShapeQueue, request: LeaseRequest, now: float) -> None:
        pending = Pending(request, self.next_arrival(), now)
        queue.domain.add(queue, pending)
        self.queue_of[request.lease_id] = queue
        self._busy[queue.domain] = None
        if queue.head is pending:
            self._note_wait(now)

    def dequeue(self, lease_id: int) -> ShapeQueue:
        queue = self.queue_of.pop(lease_id)
        taken = queue.domain.take(queue, lease_id)
        if queue.waiting and queue.number > taken.number:
            self._note_wait(queue.head.since)
        return queue

    def fail_all(self, queue: ShapeQueue, reason: Reason, out: Decisions) -> None:
        for lease_id in tuple(queue.waiting):
            self.dequeue(lease_id)
            out.failures.append(Refusal(lease_id, reason))
        self.lift(queue)

    def head_changed(self, queue: ShapeQueue) -> None:
        """Drop the reservations of a queue unless its head has waited long too."""
        if not queue.waiting or queue.head.since > self.time - self._reserve_after:
            self.lift(queue)

    def leave(self, node_id: str, out: Decisions) -> None:
        """Place what waited for a node that may have become useless, if it could go elsewhere."""
        for queue in self.domain.preferring(node_id):
            while queue.waiting:
                pool = queue.find(None)
                if pool is None:
                    break
                lease_id = next(iter(queue.waiting))
                self.dequeue(lease_id)
                self.grant(queue, lease_id, pool, out)
                self.lift(queue)

    def report_infeasible(self, out: Decisions) -> None:
        """Name the requests that no node can serve any more."""
        for queue in self.domain.waiting:
            if queue.was_infeasible:
                continue
            reason = queue.infeasible()
            if reason is not None:
                out.infeasible.extend(Refusal(lease_id, reason) for lease_id in queue.waiting)

    # --- groups --------------------------------------------------------------------
    def place_group(self, group: Group, out: Decisions) -> bool:
        """Place the missing bundles of a group; return whether they fit."""
        bundles = self.groups.place(group, self.nodes)
        if bundles is None:
            return False
        self.lift(group)
        for index, pool in bundles.items():
            held = group.state.allocations[index]
            self._note_sharing(self.domain, self.nodes[pool.node_id], held)
            self.grow(pool)
        out.placed.append(group.state.group_id)
        return True

    def place_groups(self, out: Decisions, node: ResourcePool | None = None) -> None:
        """Place waiting groups where they fit, oldest first; ``node`` has gained capacity."""
        if node is None:
            firsts = self.groups.first_unplaced()
        else:
            firsts = self.groups.first_that_may_use(node)
        for first in firsts:
            group: Group | None = first
            while group is not None and self.place_group(group, out):
                group = self.groups.next_alike(group)
                if group is not None and node is not None and not group.may_be_placed_by(node):
                    break

    def free_bundle(self, pool: ResourcePool) -> None:
        """Give a removed group's bundle back to its node once all its leases have ended."""
        allocation = self.groups.free_if_done(pool)
        if allocation is not None:
            node = self.nodes[allocation.node_id]
            node.release(allocation)
            self.grow(node)

    # --- filling capacity --------------------------------------------------------------
    def grow(self, pool: ResourcePool) -> None:
        domain = self._domain_of(pool)
        if domain is not None:
            domain.pools.note_better(pool)
            self._grown[pool] = None

    def forget(self, pool: ResourcePool) -> None:
        """Drop a pool that is gone from those to fill."""
        self._grown.pop(pool, None)
        if pool.reservation is not None:
            owner = pool.reservation.owner
            assert isinstance(owner, ShapeQueue | Group)
            self.lift(owner)

    def lift(self, owner: ShapeQueue | Group) -> None:
        pools = lift(owner)
        if not pools:
            return
        self._reserve_again = True
        for pool in pools:
            if not pool.closed:
                self.grow(pool)

    def reserve_soon(self) -> None:
        """Let the next ``settle`` reserve capacity where that is due."""
        self._reserve_again = True

    def settle(self, out: Decisions, now: float) -> Decisions:
        """Use all capacity that came free, then reserve capacity where that is due."""
        self.time = max(self.time, now)
        while True:
            while self._grown:
                pool, _ = self._grown.popitem()
                if pool.key is None:
                    self.place_groups(out, pool)
                self._fill(pool, out)
            if not self._reserve_again:
                return out
            self._reserve_again = False
            self._reserve()

    def _fill(self, pool: ResourcePool, out: Decisions) -> None:
        """Grant what waits and fits on a pool, oldest first."""
        domain = self._domain_of(pool)
        while domain is not None and domain.waiting:
            queues = domain.that_may_use(pool.node_id if pool.key is None else pool.key, pool)
            if not self._fill_from(queues, pool, out):
                return

    def _fill_from(self, queues: dict[int, ShapeQueue], pool: ResourcePool, out: Decisions) -> bool:
        """Grant in the order of these numbers until one does not fit; False if none was granted.

        Others are then looked up anew, which is faster than to try each.
        """
        numbers = sorted(queues)
        granted = False
        while numbers:
            queue = queues[heapq.heappop(numbers)]
            if not queue.admits(pool):
                if granted:
                    break
                continue
            lease_id = next(iter(queue.waiting))
            self.dequeue(lease_id)
            self.grant(queue, lease_id, pool, out)
            self.lift(queue)
            granted = True
            if pool in self._grown:
                return False  # capacity that was reserved here is for all: the pool is filled anew
            if queue.waiting:
                queues[queue.number] = queue
                heapq.heappush(numbers, queue.number)
        return granted

    # --- reserving capacity ----------------------------------------------------------
    def _note_wait(self, since: float) -> None:
        """Record since when the head of a queue, or a group, has waited."""
        due = since + self._reserve_after
        if due > self.time and (self._look_at is None or due < self._look_at):
            self._look_at = due

    def _due(self) -> list[ShapeQueue | Group]:
        """Return the first that have waited long, could be served, and have no reservation."""
        long_ago = self.time - self._reserve_after
        queues = [
            queue
            for queue in self.waiting_queues()
            if queue.head.since <= long_ago and not queue.reserved and queue.infeasible() is None
        ]
        groups = [
            group
            for group in self.groups.first_unplaced()
            if group.since <= long_ago and not group.reserved
        ]
        return heapq.nsmallest(_RESERVATIONS_AT_ONCE, [*queues, *groups], key=lambda o: o.number)

    def _next_look(self) -> float | None:
        """Return when the next request will have waited long."""
        sinces = [queue.head.since for queue in self.waiting_queues()]
        sinces += [group.since for group in self.groups.unplaced.values()]
        long_ago = self.time - self._reserve_after
        young = [since for since in sinces if since > long_ago]
        return min(young) + self._reserve_after if young else None

    def set_aside(self, queue: ShapeQueue, pool: ResourcePool) -> bool:
        """Reserve capacity for a queue's head, however long it has waited; False if none can be."""
        return queue.reserved is not None or reserve_for_queue(queue, self._without_tasks, pool)

    def _reserve(self) -> None:
        """Reserve capacity for the oldest demands and groups that have waited long enough."""
        later = functools.cache(self._without_tasks)
        owners = self._due()
        again = len(owners) == _RESERVATIONS_AT_ONCE
        for owner in owners:
            if isinstance(owner, ShapeQueue):
                made = reserve_for_queue(owner, later)
            else:
                made = reserve_for_group(owner, self.nodes.values(), later)
            again = again or not made
        self._look_at = self._next_look()
        if again:  # actors may end meanwhile, which cannot be foreseen
            retry = self.time + self._reserve_after
            self._look_at = retry if self._look_at is None else min(retry, self._look_at)

    def _without_tasks(self, pool: ResourcePool) -> ResourcePool:
        """Return a copy of a pool as it will be when its tasks have ended."""
        twin = pool.copy()
        for lease_id in pool.leases:
            lease = self.leases[lease_id]
            if lease.lasting:
                continue
            if lease.cpu_released:
                twin.add_cpu(-lease.allocation.cpu)
            twin.release(lease.allocation)
        return twin

    def _domain_of(self, pool: ResourcePool) -> Domain | None:
        if pool.key is None:
            return self.domain
        group_id, _ = pool.key
        group = self.groups.groups.get(group_id)
        return None if group is None else group.domain

    @staticmethod
    def _note_sharing(domain: Domain, pool: ResourcePool, allocation: Allocation) -> None:
        """Record that a device became fuller, and so a better place for further shares."""
        for name, ((_, units), *_) in allocation.devices:
            if units < UNIT:
                domain.pools.note_better(pool, name)
