"""Placement groups: requested and reserved bundles, and nodes for missing ones.

Plans all missing bundles or none, down to the device. When a group is planned, and which leases
draw on its bundles, is decided elsewhere.
"""

from __future__ import annotations

import collections
import dataclasses
import enum
from typing import TYPE_CHECKING, NamedTuple, TypeVar

from miniray.common.amounts import UNIT, Needs, parse_needs
from miniray.common.labels import LabelSelector, matches, parse_selector, set_name, shared_label
from miniray.head.scheduling.policies import avoid_accelerators, least_used, pack_then_spread

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable, Mapping, Sequence

    from miniray.common.specs import Allocation
    from miniray.head.scheduling.resources import ResourcePool

    #: Each bundle's pool, and the allocation there.
    Placed = dict[int, tuple[ResourcePool, Allocation]]

_Item = TypeVar("_Item")
_Place = TypeVar("_Place")
STRATEGIES = ("PACK", "SPREAD", "STRICT_PACK", "STRICT_SPREAD")


class BundleSpec(NamedTuple):
    """The resources that one bundle reserves, and the nodes that may hold it."""

    needs: Needs
    selector: LabelSelector = ()

    def fits(self, pool: ResourcePool, owner: object) -> bool:
        """Return whether the owner can place this bundle on the pool now."""
        return pool.admits(owner, self.needs) and matches(self.selector, pool.labels)

    def copies(self, pool: ResourcePool, owner: object) -> int:
        """Return an upper bound of how many such bundles the owner can place on the pool now."""
        return pool.copies(self.needs, owner) if matches(self.selector, pool.labels) else 0

    def could_fit(self, pool: ResourcePool) -> bool:
        """Return whether this bundle could be placed on the pool if the pool were idle."""
        return pool.could_fit(self.needs) and matches(self.selector, pool.labels)


class GroupStatus(str, enum.Enum):
    """The state of a placement group, with the names of Ray's table."""

    PENDING = "PENDING"
    CREATED = "CREATED"
    RESCHEDULING = "RESCHEDULING"
    REMOVED = "REMOVED"


@dataclasses.dataclass(eq=False, repr=False)
class GroupPlacement:
    """The bundles that a placement group requested, and what each has reserved."""

    group_id: bytes
    strategy: str
    bundles: tuple[BundleSpec, ...]
    status: GroupStatus = GroupStatus.PENDING
    #: What each placed bundle reserved, by bundle index.
    allocations: dict[int, Allocation] = dataclasses.field(default_factory=dict)
    #: Reservations from before a restart of the head, on nodes that have not reported yet.
    awaited: dict[int, Allocation] = dataclasses.field(default_factory=dict)

    @classmethod
    def of(
        cls,
        group_id: bytes,
        bundles: Sequence[Mapping[str, float]],
        strategy: str = "PACK",
        bundle_label_selector: Sequence[Mapping[str, str]] | None = None,
    ) -> GroupPlacement:
        """Make the state of a new group; amounts are in units.

        Raises:
            ValueError: no bundles, an empty or malformed bundle, an unknown strategy, or
                selectors that are not one per bundle or that contradict each other.
        """
        if strategy not in STRATEGIES:
            raise ValueError(f"the strategy {strategy!r} is not one of {', '.join(STRATEGIES)}")
        if not bundles:
            raise ValueError("a placement group needs at least one bundle")
        selectors = bundle_label_selector or [{}] * len(bundles)
        if len(selectors) != len(bundles):
            raise ValueError(
                f"bundle_label_selector has {len(selectors)} entries for {len(bundles)} bundles; "
                "give one per bundle"
            )
        specs = []
        for index, (resources, selector) in enumerate(zip(bundles, selectors, strict=True)):
            try:
                spec = BundleSpec(parse_needs(resources), parse_selector(selector, of_bundle=True))
            except ValueError as error:
                raise ValueError(f"bundle {index}: {error}") from None
            if not spec.needs:
                raise ValueError(f"bundle {index} reserves nothing; name at least one resource")
            specs.append(spec)
        shared_label([spec.selector for spec in specs])
        return cls(group_id, strategy, tuple(specs))

    def place(self, index: int, allocation: Allocation) -> None:
        self.allocations[index] = allocation
        self.awaited.pop(index, None)
        if len(self.allocations) == len(self.bundles):
            self.status = GroupStatus.CREATED

    def lose(self, index: int) -> None:
        """Record that a bundle's node is gone, or will not report it."""
        self.allocations.pop(index, None)
        self.awaited.pop(index, None)
        self.status = GroupStatus.RESCHEDULING

    def remove(self) -> None:
        self.status = GroupStatus.REMOVED

    def choose_nodes(self, selectors: Sequence[Mapping[str, str]]) -> None:
        """Require these labels, a selector per bundle, of nodes for bundles still to be placed."""
        self.bundles = tuple(
            spec._replace(selector=parse_selector(selector, of_bundle=True))
            for spec, selector in zip(self.bundles, selectors, strict=True)
        )

    @property
    def missing(self) -> dict[int, BundleSpec]:
        """Bundles that have no node and do not wait for one to report."""
        return {
            index: spec
            for index, spec in enumerate(self.bundles)
            if index not in self.allocations and index not in self.awaited
        }

    @property
    def missing_sets(self) -> dict[str, dict[int, BundleSpec]]:
        """Return the missing bundles by the set that shares a label's value; "" without sets."""
        sets: dict[str, dict[int, BundleSpec]] = {}
        for index, spec in self.missing.items():
            sets.setdefault(set_name(spec.selector), {})[index] = spec
        return sets

    def places(self, name: str) -> dict[int, str]:
        """Return the nodes of a set's bundles that are placed, or awaited to be reported."""
        return {
            index: made.node_id
            for index, made in (self.allocations | self.awaited).items()
            if set_name(self.bundles[index].selector) == name
        }

    @property
    def nodes(self) -> set[str]:
        """Nodes that hold bundles of the group, or are awaited to report them."""
        return {made.node_id for made in (*self.allocations.values(), *self.awaited.values())}


def total_needs(specs: Iterable[BundleSpec]) -> Needs:
    """Sum up what bundles reserve; a Counter names each kind once."""
    totals: collections.Counter[str] = collections.Counter()
    for spec, count in collections.Counter(specs).items():
        for name, units in spec.needs:
            totals[name] += count * units
    return tuple(sorted(totals.items()))


def candidates(
    group: GroupPlacement, values: Mapping[str, str], fits: Callable[[str, str], bool]
) -> dict[str, list[str]]:
    """Return, for each set with missing bundles, the values whose nodes can hold all of them.

    A set keeps the value that the nodes of its placed bundles have, and no other set gets it.
    ``values`` has the label's value of each node, empty where it has none; ``fits`` returns
    whether the missing bundles of a set fit on the nodes with a value.
    """
    names = {set_name(spec.selector) for spec in group.bundles}
    fixed = {
        name: values.get(node_id, "") for name in names for node_id in group.places(name).values()
    }
    free = sorted(set(values.values()) - set(fixed.values()) - {""})
    known: dict[tuple[object, str], bool] = {}  # equal sets fit on the same values
    found: dict[str, list[str]] = {}
    for name, specs in group.missing_sets.items():
        shape = tuple(
            (spec.needs, tuple(each for each in spec.selector if not each.same))
            for spec in specs.values()
        )
        found[name] = []
        for value in [fixed[name]] if name in fixed else free:
            if (shape, value) not in known:
                known[shape, value] = fits(name, value)
            if known[shape, value]:
                found[name].append(value)
    return found


def match(candidates: Mapping[_Item, Sequence[_Place]]) -> dict[_Item, _Place] | None:
    """Give each item one of its places for itself, by augmenting paths; None if that cannot be."""
    place_of: dict[_Item, _Place] = {}
    item_at: dict[_Place, _Item] = {}
    for start in candidates:
        reached: dict[_Place, _Item] = {}  # place -> item that it was reached from
        frontier = collections.deque([start])
        place: _Place | None = None
        while frontier and place is None:
            item = frontier.popleft()
            for each in candidates[item]:
                if each in reached:
                    continue
                reached[each] = item
                if each not in item_at:
                    place = each
                    break
                frontier.append(item_at[each])
        if place is None:
            return None
        while place is not None:  # each item on the way moves on by one place
            item = reached[place]
            left = place_of.get(item)
            place_of[item], item_at[place] = place, item
            place = left
    return place_of


def plan(group: GroupPlacement, pools: Iterable[ResourcePool], owner: object) -> Placed | None:
    """Place every missing bundle of a group, or none; placed bundles keep their node.

    Reservations of ``owner`` may be used. If there is no place for all, return None and
    allocate none.
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
        if not may_fit(collections.Counter(specs.values()), there, owner):
            return None
        return _Planner(specs, there, taken, owner).place(group.strategy)

    def fits(name: str, value: str) -> bool:
        made = place(name, value)
        for pool, allocation in (made or {}).values():
            pool.release(allocation)
        return made is not None

    chosen = match(candidates(group, values, fits))
    if chosen is None:
        return None
    made: Placed = {}
    for name, value in chosen.items():
        # Sets are on different nodes, so each has the capacity that it had alone.
        made |= place(name, value) or {}
    assert made.keys() == group.missing.keys()
    return made


@dataclasses.dataclass(eq=False, repr=False)
class _Planner:
    """Chooses the nodes of one group's bundles."""

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
                return self._on_one() or self._one_by_one(self._most_free())
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
        large_enough = [
            node
            for node in allowed
            if all(_free(node, name) >= units for name, units in totals)
            and all(matches(spec.selector, node.labels) for spec in self.specs.values())
        ]
        for node in sorted(
            large_enough, key=lambda node: (self._avoid(node), rank(node), node.order)
        ):
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

    def _most_free(self) -> list[ResourcePool]:
        """Return the nodes with bundles of the group, then the others, by how much is free."""
        use = least_used(self._names)
        totals = total_needs(self.specs.values())
        kinds = collections.Counter(self.specs.values())

        def rank(node: ResourcePool) -> tuple[int, float]:
            bundles = sum(
                min(count, spec.copies(node, self.owner)) for spec, count in kinds.items()
            )
            return -bundles, -sum(min(_free(node, name) / units, 1) for name, units in totals)

        return sorted(
            self.nodes,
            key=lambda node: (
                node.node_id not in self.taken,
                self._avoid(node),
                *rank(node),
                use(node),
                node.order,
            ),
        )

    def _avoid(self, node: ResourcePool) -> float:
        return avoid_accelerators(node) if self._without_devices else 0.0

    def _by_use(self) -> list[ResourcePool]:
        use = least_used(self._names)
        return sorted(self.nodes, key=lambda node: (self._avoid(node), use(node), node.order))


def may_fit(
    kinds: collections.Counter[BundleSpec], nodes: Collection[ResourcePool], owner: object
) -> bool:
    """Return whether the sums suffice, and the capacity for each kind of bundle alone.

    A quick test that passes every group that has a place.
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
