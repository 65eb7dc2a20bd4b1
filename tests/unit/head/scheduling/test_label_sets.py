"""Bundles that share the value of a label: on one TPU slice, in one rack."""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING

import pytest
from hypothesis import given
from hypothesis import strategies as st

from miniray.common.labels import describe, parse_selector
from miniray.head.scheduling.bundles import GroupPlacement, GroupStatus, match, plan
from miniray.head.scheduling.demands import Demand
from miniray.head.scheduling.reasons import ReasonKind
from miniray.head.scheduling.resources import ResourcePool, node_pool
from miniray.head.scheduling.scheduler import ClusterScheduler

if TYPE_CHECKING:
    import random


def node(number: int, rack: str | None, cpus: float = 4) -> ResourcePool:
    labels = {} if rack is None else {"rack": rack}
    return node_pool(f"{number:032x}", {"CPU": cpus}, {}, labels)


def group(*sets: str, cpu: float = 4, strategy: str = "PACK") -> GroupPlacement:
    """A bundle for each letter, in the set of that name."""
    names = "".join(sets)
    selectors = [{"rack": f"same({name})"} for name in names]
    return GroupPlacement.of(b"g", [{"CPU": cpu}] * len(names), strategy, selectors)


def racks(state: GroupPlacement, nodes: list[ResourcePool]) -> list[str | None] | None:
    """The rack of each bundle, in a plan made for the nodes; None if there is none."""
    made = plan(state, nodes, None)
    if made is None:
        assert all(node.free == node.total for node in nodes)
        return None
    for pool, allocation in made.values():
        pool.release(allocation)
    return [made[index][0].labels.get("rack") for index in sorted(made)]


# --- what is said ----------------------------------------------------------------------------


def test_the_condition_is_read_and_written() -> None:
    [condition] = parse_selector({"rack": "same(a-1)"}, of_bundle=True)
    assert condition.same == "a-1"
    assert condition.matches({"rack": "any"})
    assert not condition.matches({})
    assert describe((condition,)) == "rack=same(a-1)"


@pytest.mark.parametrize("text", ["same()", "!same(a)", "same(a,b)", "same(a b)"])
def test_a_malformed_condition_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="the label selector"):
        parse_selector({"rack": text}, of_bundle=True)


def test_the_condition_is_for_bundles_only() -> None:
    with pytest.raises(ValueError, match=r"'rack' can't be 'same\(a\)', which is for bundles only"):
        Demand.of({"CPU": 1}, label_selector={"rack": "same(a)"})


@pytest.mark.parametrize(
    "selectors",
    [
        [{"rack": "same(a)"}, {}],
        [{"rack": "same(a)"}, {"zone": "same(a)"}],
        [{"rack": "same(a)", "zone": "same(a)"}, {"rack": "same(a)"}],
    ],
)
def test_conditions_that_cannot_be_met_one_after_the_other_are_refused(
    selectors: list[dict[str, str]],
) -> None:
    with pytest.raises(ValueError, match="on one label, and in the selector of every bundle"):
        GroupPlacement.of(b"g", [{"CPU": 1}] * 2, "PACK", selectors)


# --- what is planned -------------------------------------------------------------------------


def test_a_set_is_in_one_rack_even_where_another_node_is_emptier() -> None:
    nodes = [node(1, "x"), node(2, "y"), node(3, "y"), node(4, None, cpus=64)]
    assert racks(group("aa"), nodes) == ["y", "y"]


def test_sets_are_in_different_racks() -> None:
    nodes = [node(1, "x", cpus=64), node(2, "y")]
    assert racks(group("a", "b"), nodes) == ["x", "y"]
    assert racks(group("a", "b", "c"), nodes) is None


def test_a_set_makes_way_for_one_that_fits_nowhere_else() -> None:
    nodes = [node(1, "x"), node(2, "x"), node(3, "y")]
    assert racks(group("a", "bb"), nodes) == ["y", "x", "x"]


def test_nodes_without_the_label_take_no_part() -> None:
    assert racks(group("aa"), [node(1, None), node(2, None), node(3, "x")]) is None


def test_a_strategy_is_one_for_each_set() -> None:
    nodes = [node(n, rack, cpus=8) for n, rack in enumerate("xxyy")]
    packed = plan(group("aa", "bb", strategy="STRICT_PACK"), nodes, None)
    assert packed is not None
    where = [packed[index][0].node_id for index in range(4)]
    assert where[0] == where[1] != where[2] == where[3]
    for pool, allocation in packed.values():
        pool.release(allocation)
    spread = plan(group("aa", "bb", strategy="STRICT_SPREAD"), nodes, None)
    assert spread is not None
    assert len({pool.node_id for pool, _ in spread.values()}) == 4


def test_further_conditions_hold_too() -> None:
    nodes = [node(1, "x"), node(2, "y")]
    selectors = [{"rack": "same(a)", "tier": "!spot"}]
    nodes[0].labels = {"rack": "x", "tier": "spot"}
    state = GroupPlacement.of(b"g", [{"CPU": 1}], "PACK", selectors)
    assert racks(state, nodes) == ["y"]


# --- with the scheduler ----------------------------------------------------------------------


def test_a_set_that_lost_a_node_waits_for_one_with_the_same_value() -> None:
    scheduler = ClusterScheduler(reserve_after=10.0)
    for each in (node(1, "x"), node(2, "x"), node(3, "y"), node(4, "y")):
        scheduler.add_node(each, 0.0)
    state = group("aa")
    scheduler.create_group(state, 0.0)
    assert state.status is GroupStatus.CREATED
    lost = state.allocations[1].node_id
    kept = scheduler.nodes[state.allocations[0].node_id].labels["rack"]
    scheduler.remove_node(lost, 1.0)
    assert state.status is GroupStatus.RESCHEDULING
    assert set(state.allocations) == {0}
    scheduler.add_node(node(5, "z"), 2.0)
    assert set(state.allocations) == {0}
    scheduler.add_node(node(6, kept), 3.0)
    assert state.status is GroupStatus.CREATED
    assert scheduler.nodes[state.allocations[1].node_id].labels["rack"] == kept


def test_what_waits_says_whether_it_could_ever_be_placed() -> None:
    scheduler = ClusterScheduler(reserve_after=10.0)
    for each in (node(1, "x"), node(2, "y")):
        scheduler.add_node(each, 0.0)
    scheduler.create_group(group("aa"), 0.0)
    reason = scheduler.explain_group(b"g")
    assert reason is not None
    assert reason.kind is ReasonKind.NEVER_TOGETHER
    assert "PACK (each set on nodes with one value of rack) find no place" in reason.sentence()
    scheduler.add_node(node(3, "y"), 1.0)
    assert scheduler.explain_group(b"g") is None


# --- against brute force ---------------------------------------------------------------------


@given(st.dictionaries(st.sampled_from("abcde"), st.sets(st.sampled_from("vwxyz")), min_size=1))
def test_a_matching_is_found_where_there_is_one(wanted: dict[str, set[str]]) -> None:
    found = match({name: sorted(values) for name, values in wanted.items()})
    every = itertools.product(*(sorted(values) for values in wanted.values()))
    possible = any(len(set(choice)) == len(choice) for choice in every)
    assert (found is not None) == possible
    if found is not None:
        assert set(found) == set(wanted)
        assert len(set(found.values())) == len(found)
        assert all(found[name] in wanted[name] for name in wanted)


@given(st.randoms(use_true_random=False))
def test_a_group_is_placed_where_some_choice_of_racks_has_room(choice: random.Random) -> None:
    sizes = [choice.randint(1, 4) for _ in range(choice.randint(1, 4))]
    room = {rack: choice.randint(0, 4) for rack in "vwxyz"[: choice.randint(1, 5)]}
    numbers = itertools.count()
    nodes = [node(next(numbers), rack) for rack, count in room.items() for _ in range(count)]
    choice.shuffle(nodes)
    state = group(*(name * size for name, size in zip("abcd", sizes, strict=False)))
    possible = any(
        all(room[rack] >= size for rack, size in zip(order, sizes, strict=True))
        for order in itertools.permutations(room, len(sizes))
    )
    found = racks(state, nodes)
    assert (found is not None) == possible
    if found is not None:
        names = "".join(name * size for name, size in zip("abcd", sizes, strict=False))
        assert len(set(zip(names, found, strict=True))) == len(sizes)
        assert len(set(found)) == len(sizes)
