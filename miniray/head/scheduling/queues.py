"""Demands that wait, per shape in order of arrival, and the pools that may serve each shape.

Responsible for order and look-up; not for granting.
"""

from __future__ import annotations

import collections
import dataclasses
import heapq
import itertools
from typing import TYPE_CHECKING, NamedTuple

from miniray.common.specs import BundleAffinity, NodeAffinity
from miniray.head.scheduling.policies import rankers_for, shared_device
from miniray.head.scheduling.reasons import Reason, explain

if TYPE_CHECKING:
    from collections.abc import Collection, Hashable, Iterable

    from miniray.common.amounts import Needs
    from miniray.head.scheduling.demands import Demand, LeaseRequest
    from miniray.head.scheduling.resources import ResourcePool

    Entry = tuple[tuple[float, ...], int, int, ResourcePool]
    Units = tuple[int, ...]
    #: A pool, and the resource of which a device became fuller, if that is all.
    Change = tuple[ResourcePool, str | None]

_LOG_SLACK = 1024  # entries a log may hold beyond four per pool


class ChangeLog:
    """Pools whose rank may have improved, in order; forgets the old ones."""

    __slots__ = ("_entries", "end")

    def __init__(self) -> None:
        self._entries: list[Change] = []
        #: Number of all entries ever made.
        self.end = 0

    def append(self, change: Change, keep: int) -> None:
        """Add a pool; forget everything first if ``keep`` entries are held."""
        if len(self._entries) >= keep:
            self._entries = []
        self._entries.append(change)
        self.end += 1

    def since(self, position: int) -> list[Change] | None:
        """Return entries from this position on; None if they are forgotten."""
        missed = self.end - position
        if missed > len(self._entries):
            return None
        return self._entries[len(self._entries) - missed :]


class PoolSet:
    """The pools that demands choose from: the cluster's nodes, or a group's bundles."""

    def __init__(self) -> None:
        self.pools: dict[Hashable, ResourcePool] = {}
        self.device_names: set[str] = set()
        #: Changes whenever what is feasible may have changed.
        self.topology = 0
        self.changes = ChangeLog()
        self._orders = itertools.count(1).__next__

    def add(self, key: Hashable, pool: ResourcePool) -> None:
        pool.order = self._orders()
        self.pools[key] = pool
        self.topology += 1
        self.device_names.update(pool.devices)
        self.note_better(pool)

    def remove(self, key: Hashable) -> ResourcePool:
        """Remove a pool; it grants no more."""
        pool = self.pools.pop(key)
        pool.closed = True
        pool.version += 1
        self.topology += 1
        return pool

    def note_better(self, pool: ResourcePool, shared: str | None = None) -> None:
        """Mark in the indexes that more fits on this pool than before.

        Or that a device of the resource ``shared`` became fuller: better for further shares.
        """
        self.changes.append((pool, shared), keep=4 * len(self.pools) + _LOG_SLACK)


class CandidateIndex:
    """The pools of a set that fit one demand now, best first."""

    def __init__(self, pools: PoolSet, demand: Demand, owner: object) -> None:
        self._set = pools
        self._seen = 0
        self._demand = demand
        self._owner = owner
        self._rebuild()

    def best(self) -> ResourcePool | None:
        self._catch_up()
        heap = self._heap
        while heap:
            _, order, version, pool = heap[0]
            if version == pool.version:
                return pool
            if self._pushed.get(order) != version:
                heapq.heappop(heap)  # a newer entry of this pool is in the heap
                continue
            entry = self._entry(pool)
            if entry is None:
                heapq.heappop(heap)
                del self._pushed[order]
            else:
                heapq.heapreplace(heap, entry)
                self._pushed[order] = pool.version
        return None

    def is_as_good(self, pool: ResourcePool, *, however_used: bool) -> bool:
        """Return whether a pool fits and ranks no worse than the best one.

        ``however_used``: its use, for which the last ranker stands, does not count.
        """
        entry = self._entry(pool)
        if entry is None:
            return False
        best = self.best()
        if best is None:
            return False
        counts = -1 if however_used else None
        return entry[0][:counts] <= self._rank(best)[:counts]

    def _rank(self, pool: ResourcePool) -> tuple[float, ...]:
        return tuple([ranker(pool) for ranker in self._rankers])

    def _entry(self, pool: ResourcePool) -> Entry | None:
        demand = self._demand
        if not pool.admits(self._owner, demand.placing) or not demand.accepts(pool.labels):
            return None
        return self._rank(pool), pool.order, pool.version, pool

    def _catch_up(self) -> None:
        """Update the entries of pools whose rank may have improved since the last call."""
        pools = self._set
        if self._seen == pools.changes.end:
            return
        changed = pools.changes.since(self._seen)
        if changed is None or self._known_devices != len(pools.device_names):
            self._rebuild()
            return
        self._seen = pools.changes.end
        for pool, shared in changed:
            if shared not in (None, self._shared):
                continue
            if self._pushed.get(pool.order) == pool.version:
                continue
            entry = self._entry(pool)
            if entry is not None:
                heapq.heappush(self._heap, entry)
                self._pushed[pool.order] = pool.version
        if len(self._heap) > 4 * len(pools.pools) + _LOG_SLACK:
            self._rebuild()

    def _rebuild(self) -> None:
        pools, demand = self._set, self._demand
        self._known_devices = len(pools.device_names)
        self._rankers = rankers_for(demand, pools.device_names)
        shared = shared_device(demand, pools.device_names)
        self._shared = None if shared is None else shared[0]
        self._seen = pools.changes.end
        entries = [self._entry(pool) for pool in pools.pools.values()]
        self._heap: list[Entry] = [entry for entry in entries if entry is not None]
        heapq.heapify(self._heap)
        #: Version of each pool's newest entry, by the pool's order.
        self._pushed: dict[int, int] = {order: version for _, order, version, _ in self._heap}


_MAX_IDLE_SHAPES = 256  # shapes remembered per domain though none of their demands waits


class Pending(NamedTuple):
    request: LeaseRequest
    #: Order of arrival over all shapes.
    number: int
    #: When it began to wait, in seconds of the caller's clock.
    since: float


@dataclasses.dataclass(slots=True, eq=False, repr=False)
class ShapeQueue:
    """The waiting requests of one shape, and where such a request may go."""

    demand: Demand
    domain: Domain
    #: Key of the only pool that may be used, if the placement binds to one.
    bound: Hashable = None
    #: Key of the pool to use as long as it could hold such a demand.
    preferred: Hashable = None
    #: It names no pool.
    anywhere: bool = dataclasses.field(init=False)
    waiting: collections.OrderedDict[int, Pending] = dataclasses.field(
        default_factory=collections.OrderedDict
    )
    #: Of the request that waits longest; of the last one if the queue is empty.
    number: int = 0
    #: The pool on which capacity is reserved for the head of the queue.
    reserved: ResourcePool | None = None
    _index: CandidateIndex | None = None
    _topology: int = -1
    _why: Reason | None = None

    def __post_init__(self) -> None:
        placement = self.demand.placement
        if isinstance(placement, NodeAffinity):
            if placement.soft:
                self.preferred = placement.node_id
            else:
                self.bound = placement.node_id
        elif isinstance(placement, BundleAffinity) and placement.bundle_index >= 0:
            self.bound = (placement.placement_group_id, placement.bundle_index)
        self.anywhere = self.bound is None and self.preferred is None

    @property
    def head(self) -> Pending:
        return next(iter(self.waiting.values()))

    def append(self, pending: Pending) -> None:
        if not self.waiting:
            self.number = pending.number
        self.waiting[pending.request.lease_id] = pending

    def take(self, lease_id: int) -> Pending:
        pending = self.waiting.pop(lease_id)
        if self.waiting:
            self.number = self.head.number
        return pending

    def admits(self, pool: ResourcePool) -> bool:
        """Return whether a request of this shape can be placed on this pool now."""
        if not pool.admits(self, self.demand.placing) or not self._could_use(pool):
            return False
        target = self._target()
        return target is None or target is pool

    def _could_use(self, pool: ResourcePool) -> bool:
        return self.demand.accepts(pool.labels)

    def _target(self) -> ResourcePool | None:
        """Return the only pool that may be used as things are; None if any may."""
        key = self.preferred if self.bound is None else self.bound
        pool = None if key is None else self.domain.pools.pools.get(key)
        if pool is None or self.bound is not None:
            return pool
        able = not pool.closed and pool.could_fit(self.demand.placing) and self._could_use(pool)
        return pool if able else None

    def may_wait_for(self, key: Hashable) -> bool:
        """Return whether requests of this shape may use the pool with this key as things are."""
        if self.bound is not None:
            return self.bound == key
        return self.preferred in (None, key) or self._target() is None

    def find(self, near: str | None, *, fill: bool = False) -> ResourcePool | None:
        """Return the best pool for a request of this shape now, or None.

        ``near`` is preferred while it is little used; with ``fill``, as long as it has capacity.
        """
        pools = self.domain.pools.pools
        target = self._target()
        if target is not None or self.bound is not None:
            return target if target is not None and self.admits(target) else None
        if self._index is None:
            self._index = CandidateIndex(self.domain.pools, self.demand, self)
        if near is not None and self.demand.placement is None:
            pool = pools.get(near)
            if pool is not None and self._index.is_as_good(pool, however_used=fill):
                return pool
        return self._index.best()

    def reach(self) -> Collection[ResourcePool]:
        """Return the pools that requests of this shape may use at all."""
        target = self._target()
        if target is not None:
            return (target,)
        return self.domain.pools.pools.values() if self.bound is None else ()

    def explain(self) -> Reason:
        demand = self.demand
        return explain(demand.placing, demand.selector, self.reach(), self, demand.fallbacks)

    @property
    def was_infeasible(self) -> bool:
        """Whether the last look found that no pool could ever serve this shape."""
        return self._why is not None

    def infeasible(self) -> Reason | None:
        """Return why no pool could ever serve this shape, if so; computed once per topology."""
        if self._topology != self.domain.pools.topology:
            self._topology = self.domain.pools.topology
            able = any(
                pool.could_fit(self.demand.placing) and self._could_use(pool)
                for pool in self.reach()
            )
            self._why = None if able else self.explain()
        return self._why


class Domain:
    """A set of pools, and the demands that choose among them."""

    def __init__(self) -> None:
        self.pools = PoolSet()
        self._queues: dict[Demand, ShapeQueue] = {}
        #: Queues that are not empty.
        self.waiting: dict[ShapeQueue, None] = {}
        #: ``waiting`` by the names of the resources that the queues need, with the amounts.
        self._by_names: dict[tuple[str, ...], dict[ShapeQueue, Units]] = {}

    def queue(self, demand: Demand) -> ShapeQueue:
        queue = self._queues.get(demand)
        if queue is None:
            if len(self._queues) - len(self.waiting) >= _MAX_IDLE_SHAPES:
                self._queues = {waiting.demand: waiting for waiting in self.waiting}
            queue = self._queues[demand] = ShapeQueue(demand, self)
        return queue

    def add(self, queue: ShapeQueue, pending: Pending) -> None:
        queue.append(pending)
        if len(queue.waiting) > 1:
            return
        self.waiting[queue] = None
        names, amounts = _apart(queue.demand.placing)
        self._by_names.setdefault(names, {})[queue] = amounts

    def take(self, queue: ShapeQueue, lease_id: int) -> Pending:
        pending = queue.take(lease_id)
        if queue.waiting:
            return pending
        del self.waiting[queue]
        names, _ = _apart(queue.demand.placing)
        alike = self._by_names[names]
        del alike[queue]
        if not alike:
            del self._by_names[names]
        return pending

    def that_may_use(self, key: Hashable, pool: ResourcePool) -> dict[int, ShapeQueue]:
        """Return the queues that a pool may hold, by the number of their heads.

        A quick test that passes every queue that has a place: ``ShapeQueue.admits`` decides.
        """
        if pool.closed:
            return {}
        names_here = (*pool.free, *pool.devices)
        have = {name: most for name in names_here if (most := pool.most(name)) > 0}
        some = set(have)
        found: list[ShapeQueue] = []
        for names, queues in self._by_names.items():
            if not some.issuperset(names):
                continue
            shapes: Iterable[tuple[ShapeQueue, Units]] = queues.items()
            for at, name in enumerate(names):
                most = have[name]
                shapes = [(queue, units) for queue, units in shapes if units[at] <= most]
            found += [queue for queue, _ in shapes if queue.anywhere or queue.may_wait_for(key)]
        owner = None if pool.reservation is None else pool.reservation.owner
        if isinstance(owner, ShapeQueue) and owner.waiting:
            found.append(owner)
        return {queue.number: queue for queue in found}

    def bound_to(self, key: Hashable) -> list[ShapeQueue]:
        return [queue for queue in self.waiting if queue.bound == key]

    def preferring(self, key: Hashable) -> list[ShapeQueue]:
        """Return the waiting queues that use this pool as long as it could serve them."""
        return [queue for queue in self.waiting if queue.preferred == key]


def _apart(needs: Needs) -> tuple[tuple[str, ...], Units]:
    return tuple([name for name, _ in needs]), tuple([units for _, units in needs])
