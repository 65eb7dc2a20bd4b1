"""The index of waiting items by what they need, beside a list that is searched."""

from __future__ import annotations

import random
from typing import TYPE_CHECKING

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from miniray.head.scheduling import fit_index
from miniray.head.scheduling.fit_index import FitIndex

if TYPE_CHECKING:
    from miniray.common.amounts import Needs

NAMES = ("CPU", "GPU", "memory", "special")


class Both:
    """An index and the list that it must agree with."""

    def __init__(self) -> None:
        self.index: FitIndex[int] = FitIndex()
        self.needs: dict[int, Needs] = {}
        self.numbers: dict[int, int] = {}
        self.last = 0

    def next_number(self) -> int:
        self.last += 1
        return self.last

    def add(self, needs: Needs) -> None:
        item = number = self.next_number()
        self.needs[item], self.numbers[item] = needs, number
        self.index.add(item, needs, number)

    def discard(self, item: int) -> None:
        del self.needs[item], self.numbers[item]
        self.index.discard(item)

    def renumber(self, item: int) -> None:
        self.numbers[item] = self.next_number()
        self.index.renumber(item, self.numbers[item])

    def check(self, room: dict[str, int]) -> None:
        found = list(self.index.oldest_first(room, lambda name: room.get(name, 0)))
        fitting = [
            (self.numbers[item], item)
            for item, needs in self.needs.items()
            if all(units <= room.get(name, 0) for name, units in needs)
        ]
        assert found == sorted(fitting)
        assert bool(self.index) == bool(self.needs)


steps = st.lists(
    st.tuples(
        st.integers(0, 9),
        st.dictionaries(st.sampled_from(NAMES), st.integers(1, 12), max_size=3),
    ),
    max_size=150,
)


@settings(max_examples=150)
@given(steps, st.randoms(use_true_random=False))
def test_it_finds_what_a_search_of_all_finds_in_the_same_order(
    actions: list[tuple[int, dict[str, int]]], rng: random.Random
) -> None:
    both = Both()
    for action, amounts in actions:
        if action < 5 or not both.needs:
            both.add(tuple(sorted(amounts.items())))
        elif action < 7:
            both.discard(rng.choice(sorted(both.needs)))
        elif action < 8:
            both.renumber(rng.choice(sorted(both.needs)))
        else:
            both.check(amounts)
    both.check(dict.fromkeys(NAMES, 12))


@pytest.mark.parametrize("order", ["up", "down", "random"])
def test_it_looks_at_few_of_many_items_however_they_came(
    order: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    amounts = list(range(1, 4001))
    if order == "down":
        amounts.reverse()
    elif order == "random":
        random.Random(1).shuffle(amounts)
    index: FitIndex[int] = FitIndex()
    for number, amount in enumerate(amounts):
        # What needs little of the one needs much of the other.
        index.add(amount, (("CPU", amount), ("memory", 5000 - amount)), number)
    looks = 0
    fits = fit_index._fits

    def counted(least: tuple[int, ...], have: tuple[int, ...]) -> bool:
        nonlocal looks
        looks += 1
        return fits(least, have)

    monkeypatch.setattr(fit_index, "_fits", counted)
    room = {"CPU": 2500, "memory": 2500}
    assert [item for _, item in index.oldest_first(room, room.__getitem__)] == [2500]
    room = {"CPU": 2499, "memory": 2500}
    assert not list(index.oldest_first(room, room.__getitem__))
    assert looks < 300
    for amount in amounts:
        if amount % 100:
            index.discard(amount)
    looks = 0
    room = {"CPU": 4000, "memory": 5000}
    found = [item for _, item in index.oldest_first(room, room.__getitem__)]
    assert found == [amount for amount in amounts if amount % 100 == 0]
    assert looks < 200


def test_items_of_other_resources_are_not_looked_at(monkeypatch: pytest.MonkeyPatch) -> None:
    index: FitIndex[int] = FitIndex()
    for number in range(1000):
        index.add(number, (("CPU", 1), (f"node:10.0.0.{number}", 1)), number)
    looked: list[object] = []
    fits = fit_index._fits
    monkeypatch.setattr(
        fit_index, "_fits", lambda least, have: bool(looked.append(least)) or fits(least, have)
    )
    room = {"CPU": 4, "node:10.0.0.7": 1}
    assert list(index.oldest_first(room, lambda name: room.get(name, 0))) == [(7, 7)]
    assert len(looked) < 5
