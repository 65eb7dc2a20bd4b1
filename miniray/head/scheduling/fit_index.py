"""Items by the amounts that they need: which of those that fit into given room came first.

Responsible for finding it without looking at the items that do not fit. Items that need the same
resources are in one tree, which divides the space of amounts; each part of it knows the least
amounts and the first item within, so that whole parts are left out.
"""

from __future__ import annotations

import heapq
import itertools
from typing import TYPE_CHECKING, Generic, TypeVar

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

    from miniray.common.amounts import Needs

T = TypeVar("T")

_LEAF = 8  # kinds that are looked at one by one
_LEANING = 0.7  # share of a part's kinds on one side from which on it is divided anew
_NOTHING = ""  # stands for the resource of items that need none


class FitIndex(Generic[T]):
    """Items with what they need and a number by which they are in order.

    An item's number may only grow.
    """

    __slots__ = ("_by_name", "_places", "_trees")

    def __init__(self) -> None:
        #: By the names of the resources that its items need, in order.
        self._trees: dict[tuple[str, ...], _Tree[T]] = {}
        #: The same, each under the one of its names that the fewest others are under.
        self._by_name: dict[str, dict[tuple[str, ...], _Tree[T]]] = {}
        self._places: dict[T, tuple[_Tree[T], _Kind[T]]] = {}

    def __bool__(self) -> bool:
        return bool(self._places)

    def add(self, item: T, needs: Needs, number: int) -> None:
        """Enter an item that is not here; ``needs`` are in the order of their names."""
        names = tuple([name for name, _ in needs])
        tree = self._trees.get(names)
        if tree is None:
            candidates = names or (_NOTHING,)
            name = min(candidates, key=lambda name: len(self._by_name.get(name, ())))
            tree = self._trees[names] = _Tree(names, name)
            self._by_name.setdefault(name, {})[names] = tree
        kind = tree.add(tuple([units for _, units in needs]), item, number)
        self._places[item] = tree, kind

    def discard(self, item: T) -> None:
        """Take an item out; one that is not here changes nothing."""
        place = self._places.pop(item, None)
        if place is None:
            return
        tree, kind = place
        tree.remove(kind, item)
        if not tree.kinds:
            del self._trees[tree.names]
            others = self._by_name[tree.name]
            del others[tree.names]
            if not others:
                del self._by_name[tree.name]

    def renumber(self, item: T, number: int) -> None:
        """Give an item that is here a higher number."""
        self._places[item][1].put(item, number)

    def oldest_first(
        self, names: Iterable[str], room: Callable[[str], int]
    ) -> Iterator[tuple[int, T]]:
        """Numbers and items that fit, the lowest first. Nothing may change meanwhile.

        Args:
            names: resources of which there is any.
            room: the most of a resource that one item may have.
        """
        # (number, tie-breaker, part or kind of a tree or (item,), room for that tree)
        heap: list[tuple[int, int, _Part[T] | _Kind[T] | tuple[T], tuple[int, ...]]] = []
        serial = itertools.count().__next__
        known: dict[str, int] = {}
        for name in (*names, _NOTHING):
            trees = self._by_name.get(name)
            if trees is None:
                continue
            for tree in trees.values():
                root = tree.root
                have = []
                for need, least in zip(tree.names, root.least, strict=True):
                    free = known.get(need)
                    if free is None:
                        free = known[need] = room(need)
                    if least > free:
                        break
                    have.append(free)
                else:
                    heap.append((root.first, serial(), root, tuple(have)))
        heapq.heapify(heap)
        while heap:
            number, _, found, room_for_it = heapq.heappop(heap)
            if isinstance(found, tuple):
                yield number, found[0]
                continue
            if isinstance(found, _Kind):
                first = found.first_item
                yield number, first
                for item, its_number in found.numbers.items():
                    if item is not first:
                        heapq.heappush(heap, (its_number, serial(), (item,), room_for_it))
                continue
            inside = found.inside()
            # What is told of a part may be too low since items were taken out or renumbered.
            found.first = min([each.first for each in inside], default=found.first)
            for each in inside:
                if _fits(each.least, room_for_it):
                    heapq.heappush(heap, (each.first, serial(), each, room_for_it))


def _fits(least: tuple[int, ...], have: tuple[int, ...]) -> bool:
    for need, free in zip(least, have, strict=True):  # noqa: SIM110 - this is the inner loop
        if need > free:
            return False
    return True


class _Kind(Generic[T]):
    """Items that need the same."""

    __slots__ = ("_heap", "_serial", "least", "numbers")

    def __init__(self, least: tuple[int, ...]) -> None:
        self.least = least
        #: Of each item.
        self.numbers: dict[T, int] = {}
        self._serial = itertools.count().__next__
        #: (number, tie-breaker, item), with some that hold no more, which have lower numbers.
        self._heap: list[tuple[int, int, T]] = []

    def put(self, item: T, number: int) -> None:
        self.numbers[item] = number
        heapq.heappush(self._heap, (number, self._serial(), item))

    def remove(self, item: T) -> bool:
        """Take an item out; whether it was the last one."""
        del self.numbers[item]
        return not self.numbers

    @property
    def first(self) -> int:
        """The lowest number."""
        heap = self._heap
        while self.numbers.get(heap[0][2]) != heap[0][0]:
            heapq.heappop(heap)
        return heap[0][0]

    @property
    def first_item(self) -> T:
        """The item that has it."""
        assert self.first is not None
        return self._heap[0][2]


class _Part(Generic[T]):
    """Part of a tree: kinds, or two parts that are divided at an amount of one resource."""

    __slots__ = ("at", "axis", "first", "kinds", "least", "sides", "size")

    def __init__(self, kinds: list[_Kind[T]]) -> None:
        self.size = len(kinds)
        #: Not above what any item within needs, of each resource.
        self.least = tuple(
            [min(amounts) for amounts in zip(*[k.least for k in kinds], strict=True)]
        )
        #: Not above the number of any item within.
        self.first = min([kind.first for kind in kinds])
        self.kinds: list[_Kind[T]] | None = kinds
        self.sides: tuple[_Part[T], _Part[T]] | None = None
        self.axis = self.at = 0
        if self.size > _LEAF:
            self._divide(kinds)

    def _divide(self, kinds: list[_Kind[T]]) -> None:
        """Make two parts: less, and not less, than an amount of the resource that varies most."""
        variety = [len(set(amounts)) for amounts in zip(*[k.least for k in kinds], strict=True)]
        self.axis = axis = variety.index(max(variety))
        amounts = sorted([kind.least[axis] for kind in kinds])
        at = amounts[len(amounts) // 2]
        if at == amounts[0]:
            at = next(amount for amount in amounts if amount > at)
        self.at = at
        self.kinds = None
        self.sides = (
            _Part([kind for kind in kinds if kind.least[axis] < at]),
            _Part([kind for kind in kinds if kind.least[axis] >= at]),
        )

    def inside(self) -> list[_Part[T]] | list[_Kind[T]]:
        """What there is in it."""
        if self.sides is None:
            return self.kinds or []
        return [side for side in self.sides if side.size]

    def all(self) -> list[_Kind[T]]:
        """Every kind in it."""
        found: list[_Kind[T]] = []
        parts = [self]
        while parts:
            part = parts.pop()
            if part.sides is None:
                found.extend(part.kinds or ())
            else:
                parts.extend(part.sides)
        return found

    def leans(self) -> bool:
        """Whether one side has outgrown the other one."""
        if self.sides is None:
            return False
        return max(side.size for side in self.sides) > _LEANING * self.size + _LEAF


class _Tree(Generic[T]):
    """Items that need the same resources."""

    __slots__ = ("_most", "kinds", "name", "names", "root")

    def __init__(self, names: tuple[str, ...], name: str) -> None:
        self.names = names
        #: The name under which the index has it.
        self.name = name
        self.kinds: dict[tuple[int, ...], _Kind[T]] = {}
        self.root: _Part[T]
        #: How many kinds there were at most since it was made anew.
        self._most = 0

    def add(self, needs: tuple[int, ...], item: T, number: int) -> _Kind[T]:
        kind = self.kinds.get(needs)
        is_new = kind is None
        if kind is None:
            kind = self.kinds[needs] = _Kind(needs)
        kind.put(item, number)
        if len(self.kinds) == 1:
            self.root = _Part([kind])
            self._most = 1
        else:
            self._enter(kind, number, is_new=is_new)
            self._most = max(self._most, len(self.kinds))
        return kind

    def _enter(self, kind: _Kind[T], number: int, *, is_new: bool) -> None:
        """Let the parts on the way to a kind know of an item, and of the kind if it is new."""
        leaning: _Part[T] | None = None
        part = self.root
        while True:
            part.first = min(part.first, number)
            if is_new:
                part.size += 1
                part.least = tuple(map(min, part.least, kind.least))
            if part.sides is None:
                break
            side = part.sides[kind.least[part.axis] >= part.at]
            if is_new and leaning is None and part.leans():
                leaning = part
            part = side
        if is_new:
            if not part.size - 1:  # it was emptied: nothing in it counts any more
                part.least, part.first = kind.least, number
            assert part.kinds is not None
            part.kinds.append(kind)
            if leaning is not None:
                _renew(leaning)
            elif part.size > _LEAF:
                _renew(part)

    def remove(self, kind: _Kind[T], item: T) -> None:
        if not kind.remove(item):
            return
        del self.kinds[kind.least]
        part = self.root
        while True:
            part.size -= 1
            if part.sides is None:
                break
            part = part.sides[kind.least[part.axis] >= part.at]
        assert part.kinds is not None
        part.kinds.remove(kind)
        if self.kinds and len(self.kinds) < self._most // 2:
            self._most = len(self.kinds)
            _renew(self.root)


def _renew(part: _Part[T]) -> None:
    """Divide a part anew."""
    _Part.__init__(part, part.all())
