"""Demands that wait, per shape in order of arrival, and which of them a freed pool may serve.

Responsible for order and look-up; not for granting.
"""

from __future__ import annotations

import collections
from typing import TYPE_CHECKING, NamedTuple

from miniray.core.runtime import BundleAffinity, NodeAffinity
from miniray.head.candidates import CandidateIndex, PoolSet
from miniray.head.labels import matches
from miniray.head.reasons import Reason, explain

if TYPE_CHECKING:
    from collections.abc import Collection, Hashable, Iterable

    from miniray.head.demands import Demand, LeaseRequest
    from miniray.head.resources import ResourcePool

_ANYTHING = ""  # stands for the resource of demands that need none
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
        return matches(self.demand.selector, pool.labels)

    def _target(self) -> ResourcePool | None:
        """The pool that must be waited for; None if any will do."""
        key = self.preferred if self.bound is None else self.bound
        pool = None if key is None else self.domain.pools.pools.get(key)
        if pool is None or self.bound is not None:
            return pool
        able = not pool.closed and pool.could_fit(self.demand.placing) and self._could_use(pool)
        return pool if able else None

    def find(self, near: str | None) -> ResourcePool | None:
        """The best pool for a request of this shape now, or None.

        Args:
            near: node that the default policy prefers while it is not much used.
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
            if pool is not None and self._index.is_as_good(pool):
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
        return explain(self.demand.placing, self.demand.selector, self.reach(), self)

    @property
    def was_infeasible(self) -> bool:
        """Whether the last look found that no pool could ever serve this shape."""
        return self._why is not None

    def infeasible(self) -> Reason | None:
        """The reason if no pool could ever serve this shape; looked up once per topology."""
        if self._topology != self.domain.pools.topology:
            self._topology = self.domain.pools.topology
            able = any(
                pool.could_fit(self.demand.placing) and matches(self.demand.selector, pool.labels)
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
        self._by_resource: dict[str, dict[ShapeQueue, None]] = collections.defaultdict(dict)
        self._by_bound: dict[Hashable, dict[ShapeQueue, None]] = collections.defaultdict(dict)
        #: Queues that are not empty.
        self.waiting: dict[ShapeQueue, None] = {}

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
        if not queue.waiting:
            self.waiting[queue] = None
            for index in self._indexes(queue):
                index[queue] = None
        queue.waiting[pending.request.lease_id] = pending

    def take(self, queue: ShapeQueue, lease_id: bytes) -> Pending:
        """Take a request out of its queue."""
        pending = queue.waiting.pop(lease_id)
        if not queue.waiting:
            del self.waiting[queue]
            for index in self._indexes(queue):
                del index[queue]
            if queue.bound is not None and not self._by_bound[queue.bound]:
                del self._by_bound[queue.bound]
        return pending

    def interested(self, key: Hashable, names: Iterable[str] | None) -> Collection[ShapeQueue]:
        """Waiting queues that may use a pool after these of its resources grew.

        Args:
            key: the pool's key in the set.
            names: what grew; None: anything.
        """
        bound = self._by_bound.get(key, {})
        kinds = self._by_resource if names is None else {*names, _ANYTHING}
        found = dict(bound)
        for name in kinds:
            found.update(self._by_resource.get(name, {}))
        return found

    def bound_to(self, key: Hashable) -> list[ShapeQueue]:
        """Waiting queues that may use this pool only."""
        return list(self._by_bound.get(key, ()))

    def _indexes(self, queue: ShapeQueue) -> list[dict[ShapeQueue, None]]:
        if queue.bound is not None:
            return [self._by_bound[queue.bound]]
        names = [name for name, _ in queue.demand.placing] or [_ANYTHING]
        return [self._by_resource[name] for name in names]
