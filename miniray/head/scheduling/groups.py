"""The table of placement groups: their bundles as pools that leases draw on.

Responsible for the life of bundles on nodes; planning is in ``bundles.py``, and
the scheduler decides which leases draw on them.
"""

from __future__ import annotations

import collections
import dataclasses
import logging
import operator
from typing import TYPE_CHECKING

from miniray.common.amounts import UNIT
from miniray.common.labels import shared_label
from miniray.head.scheduling.bundles import may_fit, plan, total_needs
from miniray.head.scheduling.queues import Domain
from miniray.head.scheduling.reasons import Reason, ReasonKind, explain, first_quarantined
from miniray.head.scheduling.resources import bundle_pool

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Hashable, Iterable, Mapping

    from miniray.common.amounts import Needs
    from miniray.common.specs import Allocation
    from miniray.head.scheduling.bundles import BundleSpec, GroupPlacement
    from miniray.head.scheduling.resources import ResourcePool

    BundleKey = tuple[bytes, int]


@dataclasses.dataclass(eq=False, repr=False)
class Group:
    """A placement group with the pools of its placed bundles."""

    state: GroupPlacement
    #: Order of arrival among demands and groups.
    number: int
    #: When it was requested, or lost a bundle.
    since: float
    domain: Domain
    #: What it lacks, while it is to be placed; groups with an equal one wait in line.
    like: Hashable = None
    #: How many bundles of each kind it lacks, and the sum of their needs.
    kinds: collections.Counter[BundleSpec] = dataclasses.field(default_factory=collections.Counter)
    most: Needs = ()
    #: What each node had for it at the last search, if the sums sufficed but it failed: until a
    #: node has more, another search would fail too.
    searched: dict[str, tuple[int, ...]] = dataclasses.field(default_factory=dict)
    #: Nodes on which capacity is reserved for it.
    reserved: list[ResourcePool] = dataclasses.field(default_factory=list)

    def may_be_placed_by(self, node: ResourcePool) -> bool:
        """Return whether more capacity on a node may give it a place; a quick test."""
        if not any(spec.fits(node, self) for spec in self.kinds):
            return False
        if not self.searched:
            return True
        had = self.searched.get(node.node_id, ())
        has = node.outline(self.most, self)
        return len(has) != len(had) or any(map(operator.gt, has, had))

    def could_hold(self, needs: Needs, bundle_index: int) -> bool:
        """Return whether the bundle (-1: some bundle) is large enough; False if there is none."""
        bundles = self.state.bundles
        if bundle_index == -1:
            return any(_within(needs, dict(spec.needs)) for spec in bundles)
        return 0 <= bundle_index < len(bundles) and _within(
            needs, dict(bundles[bundle_index].needs)
        )

    def explain(self, nodes: Collection[ResourcePool]) -> Reason | None:
        """Return why the group is not placed; None if it is."""
        missing = self.state.missing
        if not missing:
            if not self.state.awaited:
                return None
            node_id = min(held.node_id for held in self.state.awaited.values())
            return Reason(ReasonKind.NODE_AWAITED, node_id=node_id)
        reasons = self._reasons(nodes)
        never = next((reason for reason in reasons if reason.infeasible), None)
        if never is not None:
            return never
        if plan(self.state, [node.emptied() for node in nodes], self) is None:
            whole = [node.emptied(repaired=True) for node in nodes]
            if plan(self.state, whole, self) is not None:
                out = next(reason for reason in map(first_quarantined, nodes) if reason is not None)
                return out._replace(resource="", needed=0)
            detail = f"the {len(self.state.bundles)} bundles of {self._rule()}"
            never = Reason(ReasonKind.NEVER_TOGETHER, detail=detail, total=len(nodes))
            return self._not_enough(nodes) or never
        return reasons[0] if reasons else Reason(ReasonKind.TOGETHER, detail=self._rule())

    def _not_enough(self, nodes: Collection[ResourcePool]) -> Reason | None:
        """Return which resource all nodes together have too little of; None if there is none."""
        missing = self.state.missing
        totals = [node.totals() for node in nodes]
        for name, units in self.most:
            total = sum(each.get(name, 0) for each in totals)
            if total < units:
                detail = f"the {len(missing)} bundles"
                return Reason(ReasonKind.NOT_ENOUGH, name, units, total=total, detail=detail)
        return None

    def _rule(self) -> str:
        """Describe how the strategy places bundles relative to each other."""
        label = shared_label([spec.selector for spec in self.state.bundles])
        if label is None:
            return self.state.strategy
        return f"{self.state.strategy} (each set on nodes with one value of {label})"

    def _reasons(self, nodes: Collection[ResourcePool]) -> list[Reason]:
        """Return why single bundles, or for STRICT_PACK all together, cannot be placed now."""
        missing = self.state.missing
        found = [explain(spec.needs, spec.selector, nodes, self) for spec in missing.values()]
        if self.state.strategy == "STRICT_PACK":
            names = {name for node in nodes for name in node.devices}
            for specs in self.state.missing_sets.values():
                selector = tuple({c: None for spec in specs.values() for c in spec.selector})
                needs = tuple(
                    (name, -(-units // UNIT) * UNIT if name in names and units > UNIT else units)
                    for name, units in total_needs(specs.values())
                )
                found.append(explain(needs, selector, nodes, self))
        return [reason for reason in found if reason.kind is not ReasonKind.QUEUED]


class GroupTable:
    """All groups, and which bundles each node holds."""

    def __init__(self, on_wait: Callable[[float], None]) -> None:
        #: Called with the time since when a group waits, when it begins to.
        self._on_wait = on_wait
        self.groups: dict[bytes, Group] = {}
        #: Groups with bundles to place.
        self.unplaced: dict[bytes, Group] = {}
        #: ``unplaced`` by missing bundles: if the oldest of a kind does not fit, no other does.
        self._alike: dict[Hashable, dict[bytes, Group]] = {}
        self._on_node: dict[str, dict[BundleKey, ResourcePool]] = collections.defaultdict(dict)
        #: Bundles of removed groups that still hold leases.
        self._closing: dict[BundleKey, Allocation] = {}

    def add(self, state: GroupPlacement, number: int, since: float) -> Group:
        """Enter a group; ValueError if its id is taken."""
        if state.group_id in self.groups:
            raise ValueError(f"placement group {state.group_id.hex()} exists already")
        group = Group(state, number, since, Domain())
        self.groups[state.group_id] = group
        self._enqueue(group)
        return group

    def place(
        self, group: Group, nodes: Mapping[str, ResourcePool]
    ) -> dict[int, ResourcePool] | None:
        """Place the missing bundles of a group and return their pools; None if it does not fit."""
        group.searched = {}
        usable = [node for node in nodes.values() if not node.closed]
        if not may_fit(group.kinds, usable, group):
            return None
        made = plan(group.state, nodes.values(), group)
        if made is None:
            group.searched = {id: node.outline(group.most, group) for id, node in nodes.items()}
            return None
        self._dequeue(group)
        return {
            index: self.install(group, index, node, allocation)
            for index, (node, allocation) in sorted(made.items())
        }

    def install(
        self, group: Group, index: int, node: ResourcePool, allocation: Allocation
    ) -> ResourcePool:
        """Make the pool of a bundle whose allocation is counted on its node."""
        group.state.place(index, allocation)
        key = (group.state.group_id, index)
        pool = bundle_pool(allocation, node, key)
        self._on_node[node.node_id][key] = pool
        group.domain.pools.add(key, pool)
        return pool

    def adopt(self, key: BundleKey, node: ResourcePool, allocation: Allocation) -> None:
        """Count a bundle that a daemon reports; ValueError if it is not one of the group's."""
        group_id, index = key
        group = self.groups.get(group_id)
        if group is None or not 0 <= index < len(group.state.bundles):
            raise ValueError(f"bundle {index} of placement group {group_id.hex()} is unknown")
        if index in group.state.allocations:
            raise ValueError(
                f"bundle {index} of placement group {group_id.hex()} is placed already"
            )
        node.adopt(allocation)
        self._dequeue(group)
        self.install(group, index, node, allocation)
        self._enqueue(group)

    def remove(self, group_id: bytes) -> tuple[Group, list[ResourcePool]]:
        """Remove a group; return it and its pools; the caller frees the empty ones."""
        group = self.groups.pop(group_id)
        self._dequeue(group)
        group.state.remove()
        pools = [group.domain.pools.remove((group_id, index)) for index in group.state.allocations]
        for index, held in group.state.allocations.items():
            self._closing[group_id, index] = held
        return group, pools

    def free_if_done(self, bundle: ResourcePool) -> Allocation | None:
        """Close a removed group's bundle without leases; return what its node gets back."""
        key = bundle.key
        if key is None or bundle.leases or key not in self._closing:
            return None
        del self._on_node[bundle.node_id][key]
        return self._closing.pop(key)

    def on_node(self, node_id: str) -> list[ResourcePool]:
        """Return the pools of the bundles on a node, with bundles of removed groups."""
        return list(self._on_node.get(node_id, {}).values())

    def pool_of(self, key: BundleKey) -> ResourcePool | None:
        group = self.groups.get(key[0])
        return None if group is None else group.domain.pools.pools.get(key)

    def lose_node(
        self, node_id: str, next_number: Callable[[], int], now: float
    ) -> list[ResourcePool]:
        """Drop the bundles of a node that is gone; their groups wait to be placed again."""
        lost = self._on_node.pop(node_id, {})
        incomplete: dict[Group, None] = {}
        for group_id, index in lost:
            self._closing.pop((group_id, index), None)
            group = self.groups.get(group_id)
            if group is not None:
                self._dequeue(group)
                group.domain.pools.remove((group_id, index))
                group.state.lose(index)
                incomplete[group] = None
        self._reschedule(incomplete, next_number, now)
        self.await_no_more(node_id, next_number, now)
        return list(lost.values())

    def awaited_on(self, node_id: str) -> dict[BundleKey, Allocation]:
        """Return the bundles that a node is to report after a restart of the head."""
        return {
            (id, index): held
            for id, group in self.groups.items()
            for index, held in group.state.awaited.items()
            if held.node_id == node_id
        }

    def await_no_more(self, node_id: str, next_number: Callable[[], int], now: float) -> None:
        """Place the bundles again that a node had to report and will not."""
        incomplete: dict[Group, None] = {}
        for id, index in self.awaited_on(node_id):
            group = self.groups[id]
            self._dequeue(group)
            group.state.lose(index)
            incomplete[group] = None
        self._reschedule(incomplete, next_number, now)

    def _reschedule(
        self, groups: Iterable[Group], next_number: Callable[[], int], now: float
    ) -> None:
        """Let groups wait behind all others, in their order among themselves."""
        for group in sorted(groups, key=lambda group: group.number):
            group.number, group.since = next_number(), now
            self._enqueue(group)

    def is_first_of_its_like(self, group: Group) -> bool:
        """Return whether it is the oldest waiting group with these missing bundles."""
        return next(iter(self._alike.get(group.like, {}).values()), None) is group

    def first_unplaced(self) -> list[Group]:
        """Return the oldest group for each set of missing bundles, in order of arrival."""
        firsts = [next(iter(alike.values())) for alike in self._alike.values()]
        return sorted(firsts, key=lambda group: group.number)

    def first_that_may_use(self, node: ResourcePool) -> list[Group]:
        """Return those of ``first_unplaced`` to which more capacity on a node may give a place."""
        return [group for group in self.first_unplaced() if group.may_be_placed_by(node)]

    def next_alike(self, group: Group) -> Group | None:
        """Return the next group with identical missing bundles."""
        return next(iter(self._alike.get(group.like, {}).values()), None)

    def _enqueue(self, group: Group) -> None:
        state = group.state
        missing = state.missing
        if not missing:
            return
        group.like = (state.strategy, tuple(missing.items()), frozenset(state.nodes))
        group.kinds = collections.Counter(missing.values())
        group.most = total_needs(group.kinds)
        group.searched = {}
        self.unplaced[state.group_id] = group
        self._alike.setdefault(group.like, {})[state.group_id] = group
        self._on_wait(group.since)

    def _dequeue(self, group: Group) -> None:
        if self.unplaced.pop(group.state.group_id, None) is None:
            return
        alike = self._alike[group.like]
        del alike[group.state.group_id]
        if not alike:
            del self._alike[group.like]


def _within(needs: Needs, reserved: dict[str, int]) -> bool:
    return all(reserved.get(name, 0) >= units for name, units in needs)


logger = logging.getLogger(__name__)


def sort_out(
    node: ResourcePool,
    awaited: Mapping[BundleKey, Allocation],
    running: Mapping[int, Allocation],
) -> tuple[dict[BundleKey, Allocation], set[int]]:
    """Return the bundles that are there, and the leases without their bundle.

    A lease may have outlived its bundle: the group was removed, or the head gave the node up and
    placed the bundle again, maybe on other devices of the same node. Until it ends, its resources
    count on the node itself. The end of a group may not have been kept either, nor the grants of
    its resources to others: these run.

    Raises:
        ValueError: the leases hold more than the node has.
    """
    left = dict(awaited)
    while True:
        trial = node.copy()
        inside = _inside(node, left, running)
        for number, held in running.items():
            if number not in inside:
                trial.adopt(held)
        used = {running[number].bundle for number in inside}
        gone = [
            key
            for key in sorted(left, key=lambda key: key not in used)
            if not _take(trial, left[key])
        ]
        for group, bundle in gone:
            logger.warning("other leases hold what bundle %d of %s had", bundle, group.hex())
            del left[group, bundle]
        if not used.intersection(gone):  # else their leases hold capacity of others
            return left, {n for n, held in running.items() if held.bundle and n not in inside}


def _inside(
    node: ResourcePool, bundles: Mapping[BundleKey, Allocation], running: Mapping[int, Allocation]
) -> set[int]:
    """Return the leases that draw on these bundles, the latest first."""
    pools = {key: bundle_pool(held, node, key) for key, held in bundles.items()}
    return {
        number
        for number, held in sorted(running.items(), reverse=True)
        if held.bundle in pools and _take(pools[held.bundle], held)
    }


def _take(pool: ResourcePool, held: Allocation) -> bool:
    """Count an allocation if it fits (CPU may be in debt)."""
    if any(name != "CPU" and pool.free.get(name, 0) < units for name, units in held.scalars):
        return False
    try:
        pool.adopt(held)
    except ValueError:
        return False
    return True
