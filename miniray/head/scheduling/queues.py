"""Demands that wait, per shape in order of arrival, and which of them a freed pool may serve.

Responsible for order and look-up; not for granting.
"""

from __future__ import annotations

import collections
from typing import TYPE_CHECKING, NamedTuple

from miniray.common.runtime import BundleAffinity, NodeAffinity
from miniray.head.scheduling.candidates import CandidateIndex, PoolSet
from miniray.head.scheduling.fit_index import FitIndex
from miniray.head.scheduling.reasons import Reason, explain

if TYPE_CHECKING:
    from collections.abc import Collection, Hashable

    from miniray.head.scheduling.demands import Demand, LeaseRequest
    from miniray.head.scheduling.resources import ResourcePool

_MAX_IDLE_SHAPES = 256  # shapes remembered per domain though none of their demands waits


class Pending(NamedTuple):
    """A request that waits."""

    request: LeaseRequest
    #: Order of arrival over all shapes.
    number: int
    #: When it began to wait, in seconds of the caller's clock.
    since: float


class ShapeQueue:
    """The waiting requests of one shape, and where such a request may go."""

    __slots__ = (
        "_index",
        "_topology",
        "_why",
        "bound",
        "demand",
        "domain",
        "preferred",
        "reserved",
        "waiting",
    )

    def __init__(self, demand: Demand, domain: Domain) -> None:
        self.demand = demand
        self.domain = domain
        #: Key of the only pool that may be used, if the placement binds to one.
        self.bound: Hashable = None
        #: Key of the pool to use as long as it could hold such a demand.
        self.preferred: Hashable = None
        placement = demand.placement
        if isinstance(placement, NodeAffinity):
            if placement.soft:
                self.preferred = placement.node_id
            else:
                self.bound = placement.node_id
        elif isinstance(placement, BundleAffinity) and placement.bundle_index >= 0:
            self.bound = (placement.placement_group_id, placement.bundle_index)
        self.waiting: collections.OrderedDict[bytes, Pending] = collections.OrderedDict()
        #: The pool on which room is set aside for the head of the queue.
        self.reserved: ResourcePool | None = None
        self._index: CandidateIndex | None = None
        self._topology = -1
        self._why: Reason | None = None

    @property
    def head(self) -> Pending:
        """The request that waits longest."""
        return next(iter(self.waiting.values()))

    def admits(self, pool: ResourcePool) -> bool:
        """Whether a request of this shape can be placed on this pool now."""
        if not pool.admits(self, self.demand.placing) or not self._could_use(pool):
            return False
        target = self._target()
        return target is None or target is pool

    def _could_use(self, pool: ResourcePool) -> bool:
        return self.demand.accepts(pool.labels)

    def _target(self) -> ResourcePool | None:
        """The pool that must be waited for; None if any will do."""
        key = self.preferred if self.bound is None else self.bound
        pool = None if key is None else self.domain.pools.pools.get(key)
        if pool is None or self.bound is not None:
            return pool
        able = not pool.closed and pool.could_fit(self.demand.placing) and self._could_use(pool)
        return pool if able else None

    def target(self) -> Hashable:
        """Key of the only pool that may be used as things are; None if any may."""
        return self.bound if self._target() is None else self.bound or self.preferred

    def find(self, near: str | None, *, fill: bool = False) -> ResourcePool | None:
        """The best pool for a request of this shape now, or None.

        Args:
            near: node that the default policy prefers while it is not much used.
            fill: it does so as long as there is room.
        """
        pools = self.domain.pools.pools
        target = self._target()
        if target is not None or self.bound is not None:
            return target if target is not None and self.admits(target) else None
        if self._index is None:
            self._index = CandidateIndex(
                self.domain.pools, self.demand, self, self.domain.threshold
            )
        if near is not None and self.demand.placement is None:
            pool = pools.get(near)
            if pool is not None and self._index.is_as_good(pool, however_used=fill):
                return pool
        return self._index.best()

    def reach(self) -> Collection[ResourcePool]:
        """The pools that a request of this shape may use at all."""
        target = self._target()
        if target is not None:
            return (target,)
        return self.domain.pools.pools.values() if self.bound is None else ()

    def explain(self) -> Reason:
        """Why the head of the queue is not placed."""
        demand = self.demand
        return explain(demand.placing, demand.selector, self.reach(), self, demand.fallbacks)

    @property
    def was_infeasible(self) -> bool:
        """Whether the last look found that no pool could ever serve this shape."""
        return self._why is not None

    def infeasible(self) -> Reason | None:
        """The reason if no pool could ever serve this shape; looked up once per topology."""
        if self._topology != self.domain.pools.topology:
            self._topology = self.domain.pools.topology
            able = any(
                pool.could_fit(self.demand.placing) and self._could_use(pool)
                for pool in self.reach()
            )
            self._why = None if able else self.explain()
        return self._why


class Domain:
    """A set of pools with the demands that choose among them."""

    def __init__(self, threshold: float) -> None:
        self.pools = PoolSet()
        self.threshold = threshold
        self._queues: dict[Demand, ShapeQueue] = {}
        #: Queues that are not empty.
        self.waiting: dict[ShapeQueue, None] = {}
        #: The same by what they need: those that may use any pool (None), or only one, by its key.
        self._by_target: dict[Hashable, FitIndex[ShapeQueue]] = {None: FitIndex()}
        #: Where in there each of them is.
        self._target_of: dict[ShapeQueue, Hashable] = {}
        #: Those of them that prefer a pool, by its key.
        self._preferring: dict[Hashable, dict[ShapeQueue, None]] = {}

    def queue(self, demand: Demand) -> ShapeQueue:
        """The queue of a shape."""
        queue = self._queues.get(demand)
        if queue is None:
            if len(self._queues) - len(self.waiting) >= _MAX_IDLE_SHAPES:
                self._queues = {waiting.demand: waiting for waiting in self.waiting}
            queue = self._queues[demand] = ShapeQueue(demand, self)
        return queue

    def add(self, queue: ShapeQueue, pending: Pending) -> None:
        """Put a request at the end of its queue."""
        queue.waiting[pending.request.lease_id] = pending
        if len(queue.waiting) > 1:
            return
        self.waiting[queue] = None
        if queue.preferred is not None:
            self._preferring.setdefault(queue.preferred, {})[queue] = None
        self._enter(queue)

    def take(self, queue: ShapeQueue, lease_id: bytes) -> Pending:
        """Take a request out of its queue."""
        pending = queue.waiting.pop(lease_id)
        if queue.waiting:
            number = queue.head.number
            if number > pending.number:
                self._by_target[self._target_of[queue]].renumber(queue, number)
            return pending
        del self.waiting[queue]
        if queue.preferred is not None:
            alike = self._preferring[queue.preferred]
            del alike[queue]
            if not alike:
                del self._preferring[queue.preferred]
        self._leave(queue)
        return pending

    def _enter(self, queue: ShapeQueue) -> None:
        key = queue.target()
        index = self._by_target.setdefault(key, FitIndex())
        index.add(queue, queue.demand.placing, queue.head.number)
        self._target_of[queue] = key

    def _leave(self, queue: ShapeQueue) -> None:
        key = self._target_of.pop(queue)
        index = self._by_target[key]
        index.discard(queue)
        if not index and key is not None:
            del self._by_target[key]

    def reconsider(self, key: Hashable) -> None:
        """A pool came, went, or serves more or less: those that prefer it may have to use it."""
        for queue in self._preferring.get(key, ()):
            if queue.target() != self._target_of[queue]:
                self._leave(queue)
                self._enter(queue)

    def first_for(self, key: Hashable, pool: ResourcePool) -> ShapeQueue | None:
        """The waiting queue whose head came first of those that may be placed on a pool now."""
        if pool.closed:
            return None
        found: list[tuple[int, ShapeQueue]] = []
        reservation = pool.reservation
        if reservation is not None:
            owner = reservation.owner
            if isinstance(owner, ShapeQueue) and owner.waiting and owner.admits(pool):
                found.append((owner.head.number, owner))
        for target in (None, key):
            index = self._by_target.get(target)
            if not index:
                continue
            for number, queue in index.oldest_first((*pool.free, *pool.devices), pool.most):
                if found and number >= found[0][0]:
                    break
                if queue.admits(pool):
                    found = [(number, queue)]
                    break
        return found[0][1] if found else None

    def bound_to(self, key: Hashable) -> list[ShapeQueue]:
        """Waiting queues that may use this pool only."""
        return [queue for queue in self.waiting if queue.bound == key]

    def preferring(self, key: Hashable) -> list[ShapeQueue]:
        """Waiting queues that use this pool as long as it could serve them."""
        return list(self._preferring.get(key, ()))
