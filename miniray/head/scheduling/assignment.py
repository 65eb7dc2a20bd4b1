"""Which node each of several bundles goes to: a search that goes back where a bundle has no place.

What a strategy prefers is told by the order of the nodes. Whether bundles fit on some nodes is the
vector packing problem: to try every way can take for ever, so the search ends with its patience.
"""

from __future__ import annotations

import collections
import dataclasses
from typing import TYPE_CHECKING

from miniray.common.amounts import UNIT
from miniray.common.labels import matches
from miniray.head.scheduling.bundles import total_needs

if TYPE_CHECKING:
    from collections.abc import Container, Hashable, Iterator, Mapping, Sequence

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
    taken: Container[str] = (),
    spread: bool = False,
) -> dict[int, tuple[ResourcePool, Allocation]] | None:
    """Place all bundles, or none.

    Bundles with few places are put down first, then the large ones. Of nodes in the same state one
    is tried, and a state of all nodes that failed is not tried again.

    Args:
        specs: the bundles.
        nodes: where they may go, the preferred ones first.
        owner: whose reservations may be used.
        patience: its steps are used up by going back.
        taken: ids of nodes that hold other bundles of the group.
        spread: whether nodes with the fewest bundles are tried first; else those with any.

    Returns:
        Node and allocation of each; None, with nothing allocated, if there is no way, or none
        was found before the patience ended.
    """
    search = _Search(specs, nodes, owner, patience, taken=taken, spread=spread)
    return search.found() if search.run() else None


@dataclasses.dataclass(slots=True, eq=False)
class _Load:
    """A node, with the bundles that the search has put on it."""

    node: ResourcePool
    owner: object
    #: Equal for nodes that were alike before the search.
    kind: int
    #: Where the node is in the order of preference.
    place: int
    #: Bundles of the group on it, those of before the search included.
    count: int
    specs: list[BundleSpec] = dataclasses.field(default_factory=list)
    held: list[Allocation] = dataclasses.field(default_factory=list)

    def may_rearrange(self, spec: BundleSpec) -> bool:
        """Return whether shares of devices may move so that a bundle has room."""
        devices = self.node.devices
        return bool(self.specs) and any(
            units < UNIT and name in devices
            for each in (*self.specs, spec)
            for name, units in each.needs
        )

    def add(self, spec: BundleSpec, patience: Patience) -> list[Allocation] | None:
        """Put a bundle on it; return what it held before, for ``take_off``; None if it is full.

        Shares of devices that it holds already may move to other devices of the node.
        """
        before = list(self.held)
        if spec.fits(self.node, self.owner):
            self.held.append(self.node.allocate(spec.needs, self.owner))
        elif not self.may_rearrange(spec) or not self._rearrange([*self.specs, spec], patience):
            return None
        self.specs.append(spec)
        self.count += 1
        return before

    def take_off(self, before: list[Allocation]) -> None:
        """Undo the latest ``add`` that is not undone."""
        self.specs.pop()
        self.count -= 1
        self._hold(before)

    def _rearrange(self, specs: list[BundleSpec], patience: Patience) -> bool:
        if not matches(specs[-1].selector, self.node.labels):
            return False
        before = self.held
        self._hold([])
        made = self.node.allocate_together([each.needs for each in specs], self.owner, patience)
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
    """A bundle that is being placed, and where it may go and was not tried."""

    index: int
    choices: Iterator[_Load]


class _Search:
    def __init__(
        self,
        specs: Mapping[int, BundleSpec],
        nodes: Sequence[ResourcePool],
        owner: object,
        patience: Patience,
        *,
        taken: Container[str],
        spread: bool,
    ) -> None:
        self._specs = specs
        self._owner = owner
        self._patience = patience
        self._spread = spread
        self._number = {spec: number for number, spec in enumerate(dict.fromkeys(specs.values()))}
        several = len(nodes) > 1  # a lone node need not be told from others
        self._most = total_needs(specs.values()) if several else ()
        kinds: dict[Hashable, int] = {}
        self._loads = [
            _Load(
                node,
                owner,
                kinds.setdefault(self._look(node), len(kinds)) if several else 0,
                place,
                int(node.node_id in taken),
            )
            for place, node in enumerate(nodes)
        ]
        #: Nodes on which each kind of bundle may have room at all.
        self._places = {
            spec: [load for load in self._loads if spec.copies(load.node, owner)]
            for spec in self._number
        }
        #: Those that have few places first, equal ones together.
        self._order = sorted(
            specs,
            key=lambda index: (
                len(self._places[specs[index]]),
                -sum(min(units, 1000 * UNIT) for _, units in specs[index].needs),
                self._number[specs[index]],
                index,
            ),
        )
        #: (load, what it held before) of the bundles that are placed, in their order.
        self._placed: list[tuple[_Load, list[Allocation]]] = []
        self._hopeless: set[Hashable] = set()

    def run(self) -> bool:
        levels: list[_Level] = []
        while len(self._placed) < len(self._order):
            if len(levels) == len(self._placed):
                levels.append(self._enter())
            level = levels[-1]
            load = next(level.choices, None)
            if load is not None and self._patience.steps > 0:
                before = load.add(self._specs[level.index], self._patience)
                if before is None:
                    self._patience.steps -= 1
                else:
                    self._placed.append((load, before))
                continue
            self._patience.steps -= 1 + len(self._loads) // _NODES_PER_STEP
            self._hopeless.add(self._state())
            levels.pop()
            if not levels or self._patience.steps <= 0:
                while self._placed:
                    self._go_back()
                return False
            self._go_back()
        return True

    def _go_back(self) -> None:
        load, before = self._placed.pop()
        load.take_off(before)

    def found(self) -> dict[int, tuple[ResourcePool, Allocation]]:
        found = {}
        taken: collections.Counter[int] = collections.Counter()
        for index, (load, _) in zip(self._order, self._placed, strict=True):
            found[index] = (load.node, load.held[taken[load.place]])
            taken[load.place] += 1
        return found

    def _enter(self) -> _Level:
        """Begin with the next bundle."""
        index = self._order[len(self._placed)]
        if self._hopeless and self._state() in self._hopeless:
            return _Level(index, iter(()))
        return _Level(index, self._choices(self._specs[index]))

    def _choices(self, spec: BundleSpec) -> Iterator[_Load]:
        """Iterate over the nodes for a bundle, one of each state; nodes to rearrange come last."""
        places = self._places[spec]
        ranked = sorted(places, key=lambda load: load.count if self._spread else not load.count)
        tried = set()
        for fits in (True, False):
            for load in ranked:
                if bool(spec.copies(load.node, self._owner)) != fits:
                    continue
                state = self._state_of(load)
                if state not in tried and (fits or load.may_rearrange(spec)):
                    tried.add(state)
                    yield load

    def _look(self, node: ResourcePool) -> Hashable:
        """Return what is equal for nodes that serve the same."""
        labels = tuple([matches(spec.selector, node.labels) for spec in self._number])
        return node.outline(self._most, self._owner), labels

    def _state_of(self, load: _Load) -> tuple[int, int, tuple[int, ...]]:
        """Return what is equal for nodes that serve the same with what was put on them."""
        put = sorted([self._number[spec] for spec in load.specs])
        return load.kind, load.count, tuple(put)

    def _state(self) -> Hashable:
        """Return what is equal for states of all nodes in which the rest has the same places."""
        return len(self._placed), tuple(sorted(map(self._state_of, self._loads)))
