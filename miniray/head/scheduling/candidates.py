"""Sets of pools, and for each demand shape an index of the pools that fit it, best first.

Responsible for finding the best pool in time that does not grow with the number
of pools. An index is a heap that is corrected when looked at: using a pool only
worsens its rank, so a stale top is recomputed; what improves is told through logs.
"""

from __future__ import annotations

import heapq
from typing import TYPE_CHECKING

from miniray.head.scheduling.policies import rankers_for, shared_device

if TYPE_CHECKING:
    from collections.abc import Hashable

    from miniray.head.scheduling.demands import Demand
    from miniray.head.scheduling.resources import ResourcePool

    Entry = tuple[tuple[float, ...], int, int, ResourcePool]

_LOG_SLACK = 1024  # entries a log may hold beyond four per pool


class ChangeLog:
    """Pools whose rank may have improved, in order; forgets the old ones."""

    __slots__ = ("_entries", "end")

    def __init__(self) -> None:
        self._entries: list[ResourcePool] = []
        #: Number of all entries ever made.
        self.end = 0

    def append(self, pool: ResourcePool, keep: int) -> None:
        """Add a pool; forget everything first if ``keep`` entries are held."""
        if len(self._entries) >= keep:
            self._entries = []
        self._entries.append(pool)
        self.end += 1

    def since(self, position: int) -> list[ResourcePool] | None:
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
        self.grown = ChangeLog()
        #: Per device resource, pools where a shared device became fuller (a better fit).
        self.tightened: dict[str, ChangeLog] = {}
        self._orders = 0

    def add(self, key: Hashable, pool: ResourcePool) -> None:
        self._orders += 1
        pool.order = self._orders
        self.pools[key] = pool
        self.topology += 1
        self.device_names.update(pool.devices)
        for name in pool.devices:
            self.tightened.setdefault(name, ChangeLog())
        self.note_growth(pool)

    def remove(self, key: Hashable) -> ResourcePool:
        """Remove a pool; it grants nothing any more."""
        pool = self.pools.pop(key)
        pool.closed = True
        pool.version += 1
        self.topology += 1
        return pool

    def note_growth(self, pool: ResourcePool) -> None:
        """Tell the indexes that more may fit on this pool than before."""
        self.grown.append(pool, self._keep)

    def note_sharing(self, pool: ResourcePool, resource: str) -> None:
        """Tell the indexes that a shared device of this pool became fuller."""
        self.tightened[resource].append(pool, self._keep)

    @property
    def _keep(self) -> int:
        return 4 * len(self.pools) + _LOG_SLACK


class CandidateIndex:
    """The pools of a set that fit one demand now, best first."""

    def __init__(self, pools: PoolSet, demand: Demand, owner: object, threshold: float) -> None:
        self._set = pools
        self._grown = 0
        self._tightened = 0
        self._demand = demand
        self._owner = owner
        self._threshold = threshold
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
        """Update the entries of pools whose rank may have improved since the last look."""
        pools = self._set
        stale: list[ResourcePool] = []
        if self._known_devices != len(pools.device_names):
            self._rebuild()
        if self._grown != pools.grown.end:
            changed = pools.grown.since(self._grown)
            if changed is None:
                return self._rebuild()
            stale.extend(changed)
            self._grown = pools.grown.end
        if self._shared is not None and self._tightened != self._shared.end:
            changed = self._shared.since(self._tightened)
            if changed is None:
                return self._rebuild()
            stale.extend(changed)
            self._tightened = self._shared.end
        for pool in stale:
            if self._pushed.get(pool.order) == pool.version:
                continue
            entry = self._entry(pool)
            if entry is not None:
                heapq.heappush(self._heap, entry)
                self._pushed[pool.order] = pool.version
        if len(self._heap) > 4 * len(pools.pools) + _LOG_SLACK:
            self._rebuild()
        return None

    def _rebuild(self) -> None:
        pools, demand = self._set, self._demand
        self._known_devices = len(pools.device_names)
        self._rankers = rankers_for(demand, pools.device_names, self._threshold)
        shared = shared_device(demand, pools.device_names)
        self._shared = None if shared is None else pools.tightened[shared[0]]
        self._grown = pools.grown.end
        self._tightened = 0 if self._shared is None else self._shared.end
        entries = [self._entry(pool) for pool in pools.pools.values()]
        self._heap: list[Entry] = [entry for entry in entries if entry is not None]
        heapq.heapify(self._heap)
        #: Version of each pool's newest entry, by the pool's order.
        self._pushed: dict[int, int] = {order: version for _, order, version, _ in self._heap}
