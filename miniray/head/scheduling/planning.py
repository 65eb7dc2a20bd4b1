"""Placement groups: which node each bundle of a group goes to, down to the device.

Responsible for planning all bundles or none; not for when a group is planned or for who draws
on its bundles.
"""

from __future__ import annotations

import collections
import dataclasses
from typing import TYPE_CHECKING

from miniray.common.amounts import UNIT
from miniray.common.labels import matches, shared_label
from miniray.head.scheduling.bundles import candidates, match, total_needs
from miniray.head.scheduling.policies import avoid_accelerators, least_used, pack_then_spread

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable

    from miniray.common.specs import Allocation
    from miniray.head.scheduling.bundles import BundleSpec, GroupPlacement
    from miniray.head.scheduling.resources import ResourcePool

    #: Of each bundle its pool, and what was allocated there.
    Placed = dict[int, tuple[ResourcePool, Allocation]]


def plan(group: GroupPlacement, pools: Iterable[ResourcePool], owner: object) -> Placed | None:
    """Place every missing bundle of a group, or none; those that have a node keep it.

    Reservations of ``owner`` may be used. None, with nothing allocated, if there is no place for
    all.
    """
    every = list(pools)
    nodes = [pool for pool in every if not pool.closed]
    label = shared_label([spec.selector for spec in group.bundles])
    if label is None:
        specs = group.missing
        return _Planner(specs, nodes, group.nodes, owner).place(group.strategy)
    values = {pool.node_id: pool.labels.get(label, "") for pool in every}
    by_value = collections.defaultdict(list)
    for node in nodes:
        by_value[values[node.node_id]].append(node)

    def place(name: str, value: str) -> Placed | None:
        there = by_value[value]
        taken = set(group.places(name).values())
        specs = group.missing_sets[name]
        if not may_have_room(collections.Counter(specs.values()), there, owner):
            return None
        return _Planner(specs, there, taken, owner).place(group.strategy)

    def has_room(name: str, value: str) -> bool:
        made = place(name, value)
        for pool, allocation in (made or {}).values():
            pool.release(allocation)
        return made is not None

    chosen = match(candidates(group, values, has_room))
    if chosen is None:
        return None
    made: Placed = {}
    for name, value in chosen.items():
        # Sets are on different nodes, so each has the room that it had alone.
        made |= place(name, value) or {}
    assert made.keys() == group.missing.keys()
    return made


@dataclasses.dataclass(eq=False, repr=False)
class _Planner:
    """Where the bundles of one group go."""

    specs: dict[int, BundleSpec]
    nodes: list[ResourcePool]
    #: Nodes that hold other bundles of the group already.
    taken: set[str]
    owner: object

    def __post_init__(self) -> None:
        self._names = {name for spec in self.specs.values() for name, _ in spec.needs}
        self._without_devices = not any(self._names & node.devices.keys() for node in self.nodes)

    def place(self, strategy: str) -> Placed | None:
        match strategy:
            case "PACK":
                return self._on_one() or self._one_by_one(self._roomiest())
            case "SPREAD":
                return self._one_by_one(self._by_use(), spread=True)
            case "STRICT_PACK":
                return self._on_one()
        return self._one_a_node()

    def _one_by_one(self, nodes: list[ResourcePool], *, spread: bool = False) -> Placed | None:
        """Place one bundle after the other: those with few places, then the most of devices."""
        places = {
            spec: [node for node in nodes if spec.copies(node, self.owner)]
            for spec in dict.fromkeys(self.specs.values())
        }
        kinds = {spec: number for number, spec in enumerate(places)}
        amounts = {spec: sum(min(units, 1000 * UNIT) for _, units in spec.needs) for spec in places}
        devices = {name for node in nodes for name in node.devices}
        shares = {
            spec: sum(units for name, units in spec.needs if name in devices) for spec in places
        }

        def rank(index: int) -> tuple[int, ...]:
            spec = self.specs[index]
            return len(places[spec]), -shares[spec], -amounts[spec], kinds[spec], index

        counts = collections.Counter(self.taken)
        made: Placed = {}
        for index in sorted(self.specs, key=rank):
            spec = self.specs[index]
            ranked = sorted(
                places[spec],
                key=lambda node: counts[node.node_id] if spread else not counts[node.node_id],
            )
            for node in ranked:
                if spec.fits(node, self.owner):
                    break
                places[spec].remove(node)  # what is full stays full here
            else:
                for node, allocation in made.values():
                    node.release(allocation)
                return None
            made[index] = (node, node.allocate(spec.needs, self.owner))
            counts[node.node_id] += 1
        return made

    def _on_one(self) -> Placed | None:
        """Place all on one node: the one that holds the group's other bundles, if there are any."""
        allowed = [node for node in self.nodes if not self.taken or node.node_id in self.taken]
        totals = total_needs(self.specs.values())
        rank = pack_then_spread(self._names)
        roomy = [
            node
            for node in allowed
            if all(_free(node, name) >= units for name, units in totals)
            and all(matches(spec.selector, node.labels) for spec in self.specs.values())
        ]
        for node in sorted(roomy, key=lambda node: (self._avoid(node), rank(node), node.order)):
            made = self._one_by_one([node])
            if made is not None:
                return made
        return None

    def _one_a_node(self) -> Placed | None:
        """Place one bundle a node."""
        ranked = [node for node in self._by_use() if node.node_id not in self.taken]
        if len(ranked) < len(self.specs):
            return None
        places = {
            spec: [at for at, node in enumerate(ranked) if spec.fits(node, self.owner)]
            for spec in set(self.specs.values())
        }
        found = match({index: places[spec] for index, spec in self.specs.items()})
        if found is None:
            return None
        return {
            index: (ranked[at], ranked[at].allocate(self.specs[index].needs, self.owner))
            for index, at in found.items()
        }

    def _roomiest(self) -> list[ResourcePool]:
        """Return the nodes with bundles of the group, then the others, the roomiest first."""
        use = least_used(self._names)
        totals = total_needs(self.specs.values())
        kinds = collections.Counter(self.specs.values())

        def room(node: ResourcePool) -> tuple[int, float]:
            bundles = sum(
                min(count, spec.copies(node, self.owner)) for spec, count in kinds.items()
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


def _free(node: ResourcePool, name: str) -> int:
    devices = node.devices.get(name)
    return max(node.free.get(name, 0), 0) if devices is None else devices.available()
