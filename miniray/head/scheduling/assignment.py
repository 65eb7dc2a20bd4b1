"""Which node each of several bundles goes to, found by trying, where one after the other fails.

Responsible for a search that ends; what a strategy prefers is told by its caller. Whether bundles
fit on some nodes is the vector packing problem: to try every way can take for ever.
"""

from __future__ import annotations

import collections
import dataclasses
from typing import TYPE_CHECKING

from miniray.common.amounts import UNIT
from miniray.common.labels import matches
from miniray.head.scheduling.bundles import total_needs

if TYPE_CHECKING:
    from collections.abc import Hashable, Iterator, Mapping, Sequence

    from miniray.common.specs import Allocation
    from miniray.head.scheduling.bundles import BundleSpec
    from miniray.head.scheduling.devices import Patience
    from miniray.head.scheduling.resources import ResourcePool

#: Nodes whose state is looked at for one step of patience.
_NODES_PER_STEP = 8


def assign(
    specs: Mapping[int, BundleSpec],
    nodes: Sequence[ResourcePool],
    owner: object,
    patience: Patience,
    *,
    spread: bool,
) -> dict[int, tuple[ResourcePool, Allocation]] | None:
    """Place all bundles, or none.

    Bundles with few places are put down first. Of nodes in the same state one is tried, and a state
    of all nodes that failed is not tried again.

    Args:
        specs: the bundles.
        nodes: where they may go.
        owner: whose reservations may be used.
        patience: its steps are used up.
        spread: whether nodes without a bundle are tried first, or last.

    Returns:
        Node and allocation of each; None, with nothing allocated, if there is no way, or none
        was found before the patience ended.
    """
    search = _Search(specs, nodes, owner, patience, spread=spread)
    return search.found() if search.run() else None


class _Load:
    """A node, with the bundles that the search has put on it."""

    def __init__(self, node: ResourcePool, owner: object, kind: int) -> None:
        self.node = node
        self._owner = owner
        #: Equal for nodes that were alike before the search.
        self.kind = kind
        self.specs: list[BundleSpec] = []
        self.held: list[Allocation] = []

    def add(self, spec: BundleSpec, patience: Patience) -> list[Allocation] | None:
        """Put a bundle on it; return what it held before, for ``take_off``; None if it is full.

        Shares of devices that it holds already may move to other devices of the node.
        """
        before = list(self.held)
        if spec.fits(self.node, self._owner):
            self.held.append(self.node.allocate(spec.needs, self._owner))
        elif not self.specs or not self._rearrange([*self.specs, spec], patience):
            return None
        self.specs.append(spec)
        return before

    def take_off(self, before: list[Allocation]) -> None:
        """Undo the latest ``add`` that is not undone."""
        self.specs.pop()
        self._hold(before)

    def _rearrange(self, specs: list[BundleSpec], patience: Patience) -> bool:
        devices = self.node.devices
        shares = any(
            units < UNIT and name in devices for each in specs for name, units in each.needs
        )
        if not shares or not matches(specs[-1].selector, self.node.labels):
            return False
        before = self.held
        self._hold([])
        made = self.node.allocate_together([each.needs for each in specs], self._owner, patience)
        if made is None:
            self._hold(before)
            return False
        self.held = made
        return True

    def _hold(self, allocations: list[Allocation]) -> None:
        for allocation in self.held:
            self.node.release(allocation)
        for allocation in allocations:
            self.node.adopt(allocation)
        self.held = allocations


@dataclasses.dataclass(frozen=True, slots=True)
class _Level:
    """A bundle that is being placed."""

    index: int
    #: Where it may go and was not tried.
    choices: Iterator[_Load]
    #: Of all nodes, before it.
    state: Hashable


class _Search:
    def __init__(
        self,
        specs: Mapping[int, BundleSpec],
        nodes: Sequence[ResourcePool],
        owner: object,
        patience: Patience,
        *,
        spread: bool,
    ) -> None:
        self._specs = specs
        self._owner = owner
        self._patience = patience
        self._spread = spread
        self._kinds = collections.Counter(specs.values())
        self._most = total_needs(specs.values())
        #: Nodes on which each kind of bundle may have room at all.
        self._places = {
            spec: [node for node in nodes if spec.copies(node, owner)] for spec in self._kinds
        }
        useful = {id(node): node for places in self._places.values() for node in places}
        kinds: dict[Hashable, int] = {}
        self._loads = {
            key: _Load(node, owner, kinds.setdefault(self._look(node), len(kinds)))
            for key, node in useful.items()
        }
        self._number = {spec: number for number, spec in enumerate(self._kinds)}
        #: Those that have few places first, equal ones together.
        self._order = sorted(
            specs,
            key=lambda index: (
                len(self._places[specs[index]]),
                tuple((name, -units) for name, units in specs[index].needs),
                specs[index].selector,
                index,
            ),
        )
        #: (load, what it held before) of the bundles that are placed, in their order.
        self._placed: list[tuple[_Load, list[Allocation]]] = []
        self._hopeless: set[Hashable] = set()

    def run(self) -> bool:
        """Place all, or none; return whether all are placed."""
        levels: list[_Level] = []
        while len(self._placed) < len(self._order):
            if len(levels) == len(self._placed):
                self._patience.steps -= 1 + len(self._loads) // _NODES_PER_STEP
                levels.append(self._enter())
            level = levels[-1]
            load = next(level.choices, None)
            if load is not None and self._patience.steps > 0:
                self._patience.steps -= 1
                before = load.add(self._specs[level.index], self._patience)
                if before is not None:
                    self._placed.append((load, before))
                continue
            self._hopeless.add(level.state)
            levels.pop()
            if not levels or self._patience.steps <= 0:
                self._undo()
                return False
            load, before = self._placed.pop()
            load.take_off(before)
        return True

    def found(self) -> dict[int, tuple[ResourcePool, Allocation]]:
        found = {}
        taken: collections.Counter[int] = collections.Counter()
        for index, (load, _) in zip(self._order, self._placed, strict=True):
            found[index] = (load.node, load.held[taken[id(load)]])
            taken[id(load)] += 1
        return found

    def _enter(self) -> _Level:
        """Begin with the next bundle."""
        level = len(self._placed)
        index = self._order[level]
        spec = self._specs[index]
        states = {key: self._state(load) for key, load in self._loads.items()}
        state = (level, tuple(sorted(states.values())))
        if state in self._hopeless:
            return _Level(index, iter(()), state)
        alike: dict[Hashable, _Load] = {}
        for node in self._places[spec]:
            alike.setdefault(states[id(node)], self._loads[id(node)])
        ranked = sorted(alike.values(), key=lambda load: self._rank(load, spec))
        return _Level(index, iter(ranked), state)

    def _look(self, node: ResourcePool) -> Hashable:
        """Return what is equal for nodes that serve the same."""
        labels = tuple([matches(spec.selector, node.labels) for spec in self._kinds])
        return node.outline(self._most, self._owner), labels

    def _state(self, load: _Load) -> tuple[int, tuple[int, ...]]:
        """Return what is equal for nodes that serve the same with what was put on them."""
        return load.kind, tuple(sorted([self._number[spec] for spec in load.specs]))

    def _rank(self, load: _Load, spec: BundleSpec) -> tuple[int, int, int]:
        """Rank fuller nodes first, so that large gaps stay for large bundles."""
        count = len(load.specs)
        use = count if self._spread else -bool(count)
        return use, spec.copies(load.node, self._owner), load.node.order

    def _undo(self) -> None:
        while self._placed:
            load, before = self._placed.pop()
            load.take_off(before)
