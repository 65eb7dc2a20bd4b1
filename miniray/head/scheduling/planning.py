"""Placement groups: which node each bundle of a group goes to, down to the device.

Responsible for planning all bundles or none; not for when a group is planned or for who draws
on its bundles.
"""

from __future__ import annotations

import collections
from typing import TYPE_CHECKING

from miniray.common.amounts import UNIT
from miniray.common.labels import matches, shared_label
from miniray.head.scheduling.assignment import assign
from miniray.head.scheduling.bundles import candidates, match, total_needs
from miniray.head.scheduling.devices import Patience
from miniray.head.scheduling.policies import avoid_accelerators, least_used, pack_then_spread

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Mapping

    from miniray.common.amounts import Needs
    from miniray.common.specs import Allocation
    from miniray.head.scheduling.bundles import BundleSpec, GroupPlacement
    from miniray.head.scheduling.resources import ResourcePool

#: Steps that a search for a way in which all bundles fit may take, and what it may take at least
#: where bundles are to be on one value of a label and each value is tried.
_STEPS = 20_000
_FEWEST_STEPS = 500
#: Steps that a search for a way with fewer nodes may take, for a group that has a place already.
_STEPS_FOR_FEWER = 1_000


class Trial:
    """Allocations of bundles that can be undone together."""

    def __init__(self, owner: object) -> None:
        self._owner = owner
        self.made: dict[int, tuple[ResourcePool, Allocation]] = {}

    def place(self, index: int, spec: BundleSpec, pool: ResourcePool) -> bool:
        """Place a bundle on a pool if it fits."""
        if not spec.fits(pool, self._owner):
            return False
        self.made[index] = (pool, pool.allocate(spec.needs, self._owner))
        return True

    def place_all(
        self, specs: Mapping[int, BundleSpec], pool: ResourcePool, patience: Patience
    ) -> bool:
        """Place all of these on a pool, however their shares lie on devices, or none."""
        if not all(matches(spec.selector, pool.labels) for spec in specs.values()):
            return False
        indices = list(specs)
        made = pool.allocate_together([specs[i].needs for i in indices], self._owner, patience)
        if made is None:
            return False
        self.made.update((index, (pool, held)) for index, held in zip(indices, made, strict=True))
        return True

    def undo(self) -> None:
        """Give everything back."""
        for pool, allocation in self.made.values():
            pool.release(allocation)
        self.made = {}


def plan(
    group: GroupPlacement,
    pools: Iterable[ResourcePool],
    owner: object,
    threshold: float = 0.5,
) -> dict[int, tuple[ResourcePool, Allocation]] | None:
    """Place every missing bundle of a group, or none.

    Args:
        group: bundles that already have a node keep it, and the others are placed with regard
            to them.
        pools: the nodes.
        owner: whose reservations may be used.
        threshold: use up to which nodes are filled in their stable order.

    Returns:
        For each missing bundle its pool and what was allocated there; None, with nothing
        allocated, if there is no place for all.
    """
    every = list(pools)
    nodes = [pool for pool in every if not pool.closed]
    label = shared_label([spec.selector for spec in group.bundles])
    if label is None:
        specs = _largest_first(group.missing)
        planner = _Planner(specs, nodes, group.nodes, owner, threshold, _STEPS)
        return planner.place(group.strategy)
    values = {pool.node_id: pool.labels.get(label, "") for pool in every}
    by_value = collections.defaultdict(list)
    for node in nodes:
        by_value[values[node.node_id]].append(node)

    steps = max(_FEWEST_STEPS, _STEPS // len(by_value)) if by_value else 0

    def place(name: str, value: str) -> dict[int, tuple[ResourcePool, Allocation]] | None:
        there = by_value[value]
        taken = set(group.places(name).values())
        specs = _largest_first(group.missing_sets[name])
        planner = _Planner(specs, there, taken, owner, threshold, steps)
        return planner.place(group.strategy)

    def has_room(name: str, value: str) -> bool:
        made = place(name, value)
        for pool, allocation in (made or {}).values():
            pool.release(allocation)
        return made is not None

    chosen = match(candidates(group, values, has_room))
    if chosen is None:
        return None
    made: dict[int, tuple[ResourcePool, Allocation]] = {}
    for name, value in chosen.items():
        # Sets are on different nodes, so each has the room that it had alone.
        made |= place(name, value) or {}
    assert made.keys() == group.missing.keys()
    return made


class _Planner:
    """One attempt to place some bundles; each strategy returns whether all were placed."""

    def __init__(
        self,
        specs: dict[int, BundleSpec],
        nodes: list[ResourcePool],
        taken: set[str],
        owner: object,
        threshold: float,
        steps: int,
    ) -> None:
        self.specs = specs
        self.nodes = nodes
        #: Nodes that hold other bundles of the group already.
        self.taken = taken
        self.trial = Trial(owner)
        self._owner = owner
        self._threshold = threshold
        self._names = {name for spec in specs.values() for name, _ in spec.needs}
        device_names = {name for node in nodes for name in node.devices}
        self._without_devices = not self._names & device_names
        self._shares = any(
            units < UNIT and name in device_names
            for spec in specs.values()
            for name, units in spec.needs
        )
        #: For the search on one node, and for that over several.
        self._patience = Patience(steps)
        self._patience_over_nodes = Patience(steps)

    def place(self, strategy: str) -> dict[int, tuple[ResourcePool, Allocation]] | None:
        """Return each bundle's pool and allocation; None if they do not all fit."""
        if not may_have_room(collections.Counter(self.specs.values()), self.nodes, self._owner):
            return None
        placed = {
            "PACK": self.pack,
            "SPREAD": self.spread,
            "STRICT_PACK": self.strict_pack,
            "STRICT_SPREAD": self.strict_spread,
        }[strategy]()
        if placed:
            return self.trial.made
        self.trial.undo()
        return None

    def strict_pack(self) -> bool:
        """Place all on one node: the one that holds the group's other bundles, if there are any."""
        allowed = self._used_nodes() if self.taken else self.nodes
        return self._all_on_one(allowed)

    def pack(self) -> bool:
        """Place all on one node if possible, else on few."""
        placed = self._pack_in_turn() or self._search(
            self.nodes, self._patience_over_nodes, spread=False
        )
        if placed:
            self._use_fewer()
        return placed

    def _pack_in_turn(self) -> bool:
        """Place one after the other, on the roomiest nodes."""
        if self._all_on_one(self._used_nodes() if self.taken else self.nodes):
            return True
        roomiest = self._roomiest()
        left = dict(self.specs)
        for node in roomiest:
            for index in [i for i, spec in left.items() if self.trial.place(i, spec, node)]:
                del left[index]
            if not left:
                return True
        self.trial.undo()
        return False

    def _roomiest(self) -> list[ResourcePool]:
        """Return the nodes with bundles of the group, then the others, the roomiest first."""
        use = least_used(self._names)
        totals = total_needs(self.specs.values())
        kinds = collections.Counter(self.specs.values())

        def room(node: ResourcePool) -> tuple[int, float]:
            bundles = sum(
                min(count, spec.copies(node, self._owner)) for spec, count in kinds.items()
            )
            return -bundles, -sum(min(_free(node, name) / units, 1) for name, units in totals)

        return sorted(
            self.nodes,
            key=lambda node: (
                node.node_id not in self.taken,
                self._avoid(node),
                *room(node),
                use(node),
                node.order,
            ),
        )

    def _use_fewer(self) -> None:
        """Search for a placement on fewer nodes than one after the other took."""
        made = self.trial.made
        used = {pool.node_id for pool, _ in made.values()} - self.taken
        if len(used) <= (0 if self.taken else 2):
            return  # on one node they have no place
        self.trial.undo()
        patience = Patience(_STEPS_FOR_FEWER)
        nodes = self._roomiest()
        begin = sum(node.node_id in self.taken for node in nodes)
        for count in range(self._fewest(begin, nodes), len(used)):
            if self._search(nodes[: begin + count], patience, spread=False):
                return
        for pool, allocation in made.values():
            pool.adopt(allocation)
        self.trial.made = made

    def _fewest(self, begin: int, nodes: list[ResourcePool]) -> int:
        """Return a lower bound of the nodes that are needed beside the first ones."""
        fewest = 0 if self.taken else 2
        for name, units in total_needs(self.specs.values()):
            missing = units - sum(_free(node, name) for node in nodes[:begin])
            rooms = sorted((_free(node, name) for node in nodes[begin:]), reverse=True)
            count = 0
            while missing > 0:
                missing -= rooms[count]
                count += 1
            fewest = max(fewest, count)
        return fewest

    def spread(self) -> bool:
        """Place on as many nodes as possible; several on one where that is unavoidable."""
        return (
            self._spread_in_turn()
            or self._search(self.nodes, self._patience_over_nodes, spread=True)
            or self._pack_in_turn()
        )

    def _spread_in_turn(self) -> bool:
        ranked = self._by_use()
        held = collections.Counter(self.taken)
        for index, spec in self.specs.items():
            for node in sorted(ranked, key=lambda node: held[node.node_id]):
                if self.trial.place(index, spec, node):
                    held[node.node_id] += 1
                    break
            else:
                self.trial.undo()
                return False
        return True

    def _search(self, nodes: list[ResourcePool], patience: Patience, *, spread: bool) -> bool:
        """Search for a placement on these nodes where one after the other found none."""
        made = assign(self.specs, nodes, self._owner, patience, spread=spread)
        self.trial.made.update(made or {})
        return made is not None

    def strict_spread(self) -> bool:
        """Place one bundle a node: a bipartite matching, found by augmenting paths."""
        ranked = [node for node in self._by_use() if node.node_id not in self.taken]
        if len(ranked) < len(self.specs):
            return False
        bundle_at: dict[int, int] = {}  # position in ranked -> bundle
        position_of: dict[int, int] = {}  # bundle -> position in ranked
        for start in self.specs:
            if not self._augment(start, ranked, bundle_at, position_of):
                return False
        return all(
            self.trial.place(index, self.specs[index], ranked[position])
            for index, position in position_of.items()
        )

    def _augment(
        self,
        start: int,
        ranked: list[ResourcePool],
        bundle_at: dict[int, int],
        position_of: dict[int, int],
    ) -> bool:
        """Give one more bundle a node, moving others if that frees one for it."""
        reached: dict[int, int] = {}  # position -> bundle that it was reached from
        frontier = collections.deque([start])
        while frontier:
            bundle = frontier.popleft()
            for position, node in enumerate(ranked):
                if position in reached or not self.specs[bundle].fits(node, self._owner):
                    continue
                reached[position] = bundle
                if position in bundle_at:
                    frontier.append(bundle_at[position])
                    continue
                at: int | None = position
                while at is not None:
                    mover = reached[at]
                    left = position_of.get(mover)
                    bundle_at[at], position_of[mover] = mover, at
                    at = left
                return True
        return False

    def _all_on_one(self, nodes: list[ResourcePool]) -> bool:
        totals = total_needs(self.specs.values())
        rank = pack_then_spread(self._names, self._threshold)
        roomy = [node for node in nodes if _may_hold(node, totals)]
        for node in sorted(roomy, key=lambda node: (self._avoid(node), rank(node), node.order)):
            if all(self.trial.place(index, spec, node) for index, spec in self.specs.items()):
                return True
            self.trial.undo()
            # One after the other they may leave gaps in which the last ones find no room.
            if self._shares and self.trial.place_all(self.specs, node, self._patience):
                return True
        return False

    def _used_nodes(self) -> list[ResourcePool]:
        return [node for node in self.nodes if node.node_id in self.taken]

    def _avoid(self, node: ResourcePool) -> float:
        return avoid_accelerators(node) if self._without_devices else 0.0

    def _by_use(self) -> list[ResourcePool]:
        use = least_used(self._names)
        return sorted(self.nodes, key=lambda node: (self._avoid(node), use(node), node.order))


def may_have_room(
    kinds: collections.Counter[BundleSpec], nodes: Collection[ResourcePool], owner: object
) -> bool:
    """Return whether the sums suffice, and the room for each kind of bundle alone.

    A quick test that refuses none that have a place.
    """
    for name, units in total_needs(kinds):
        missing = units
        for node in nodes:
            missing -= _free(node, name)
            if missing <= 0:
                break
        else:
            return False
    for spec, count in kinds.items():
        left = count
        for node in nodes:
            left -= spec.copies(node, owner)
            if left <= 0:
                break
        else:
            return False
    return True


def _may_hold(node: ResourcePool, totals: Needs) -> bool:
    """Return whether a node may hold the sum of all bundles; refuses none that could."""
    return all(_free(node, name) >= units for name, units in totals)


def _free(node: ResourcePool, name: str) -> int:
    devices = node.devices.get(name)
    return max(node.free.get(name, 0), 0) if devices is None else devices.available()


def _largest_first(specs: dict[int, BundleSpec]) -> dict[int, BundleSpec]:
    """Order bundles, those that are hard to place first: many devices, then much of the rest."""

    def size(item: tuple[int, BundleSpec]) -> tuple[bool, int, int]:
        index, spec = item
        return not spec.selector, -sum(min(units, 1000 * UNIT) for _, units in spec.needs), index

    return dict(sorted(specs.items(), key=size))
