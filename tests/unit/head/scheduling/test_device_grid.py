"""Chips of a TPU host: several at once are a rectangle of the host's grid."""

from __future__ import annotations

import random
from typing import TYPE_CHECKING

import pytest
from hypothesis import given
from hypothesis import strategies as st

from miniray.common.amounts import UNIT, parse_needs
from miniray.common.labels import parse_selector
from miniray.head.scheduling.bundles import GroupPlacement, plan
from miniray.head.scheduling.devices import DeviceGrid, aligned_blocks
from miniray.head.scheduling.reasons import ReasonKind, explain
from miniray.head.scheduling.resources import ResourcePool, node_pool

if TYPE_CHECKING:
    from collections.abc import Sequence

ANYWHERE = parse_selector(None)


def make_node(ids: Sequence[str] = tuple("01234567")) -> ResourcePool:
    return node_pool("ab" * 16, {"CPU": 8}, {"TPU": list(ids)}, whole={"TPU"})


def take(node: ResourcePool, count: int) -> list[str]:
    return node.allocate(parse_needs({"TPU": count})).device_ids("TPU")


def hold(node: ResourcePool, *ids: str) -> None:
    node.devices["TPU"].take_exactly(tuple((id, UNIT) for id in ids))


@pytest.mark.parametrize(
    ("ids", "size", "blocks"),
    [
        ("0123", 2, [(0, 1), (2, 3)]),
        ("01234567", 4, [(0, 1, 2, 3), (4, 5, 6, 7)]),
        ("01234567", 8, [(0, 1, 2, 3, 4, 5, 6, 7)]),
        ("3210", 2, [(3, 2), (1, 0)]),  # positions, in the order of the numbers
        ("13", 2, []),
        ("12", 2, []),
        ("23", 2, [(0, 1)]),
        ("0123", 3, []),
        ("0123", 8, []),
        ("ab", 2, []),
        ("ab", 1, [(0,), (1,)]),
    ],
)
def test_blocks_are_numbered_from_a_multiple_of_their_size(
    ids: str, size: int, blocks: list[tuple[int, ...]]
) -> None:
    assert list(aligned_blocks(list(ids), size)) == blocks


def test_chips_one_by_one_are_the_lowest_ones() -> None:
    node = make_node("0123")
    assert [take(node, 1) for _ in range(4)] == [["0"], ["1"], ["2"], ["3"]]


def test_two_chips_are_never_taken_across_the_grid() -> None:
    node = make_node("0123")
    hold(node, "0")
    assert take(node, 2) == ["2", "3"]


def test_two_chips_that_are_no_neighbours_do_not_serve_a_demand_for_two() -> None:
    node = make_node("0123")
    hold(node, "0", "2")
    assert not node.fits(parse_needs({"TPU": 2}))
    reason = explain(parse_needs({"TPU": 2}), ANYWHERE, [node], None)
    assert reason.kind is ReasonKind.BUSY
    assert reason.sentence() == (
        "needs TPU 2 in one block of neighbours; the largest free one of node abababab has 1"
    )


def test_a_node_without_such_neighbours_can_never_serve_them() -> None:
    node = make_node("13")
    assert not node.could_fit(parse_needs({"TPU": 2}), repaired=True)
    reason = explain(parse_needs({"TPU": 2}), ANYWHERE, [node], None)
    assert reason.infeasible
    assert "in one block of neighbours; the largest node, abababab, has 1" in reason.sentence()


def test_one_chip_is_taken_where_its_neighbour_is_in_use() -> None:
    node = make_node()
    hold(node, "4")
    assert take(node, 1) == ["5"]
    assert take(node, 4) == ["0", "1", "2", "3"]


def test_what_is_given_back_merges() -> None:
    node = make_node()
    held = [node.allocate(parse_needs({"TPU": 1})) for _ in range(8)]
    for allocation in random.Random(3).sample(held, 8):
        node.release(allocation)
    assert take(node, 8) == list("01234567")


def test_a_chip_out_of_service_breaks_its_blocks() -> None:
    node = make_node("0123")
    node.set_in_service("TPU", "1", in_service=False)
    assert not node.could_fit(parse_needs({"TPU": 4}))
    assert node.could_fit(parse_needs({"TPU": 4}), repaired=True)
    assert take(node, 2) == ["2", "3"]
    assert node.totals()["TPU"] == 3 * UNIT


def test_the_block_to_wait_for_is_the_freest_of_those_that_will_be_free() -> None:
    grid = DeviceGrid([(id, UNIT) for id in "01234567"], divisible=False)
    grid.take_exactly(tuple((id, UNIT) for id in "01346"))
    later = grid.copy()
    later.put((("0", UNIT), ("1", UNIT), ("6", UNIT)))
    assert [id for id, _ in grid.soonest(2 * UNIT, later)] == ["6", "7"]


def test_bundles_get_blocks_and_parts_of_a_bundle_are_blocks_of_it() -> None:
    node = make_node()
    group = GroupPlacement.of(b"g", [{"TPU": 1}, {"TPU": 4}, {"TPU": 2}, {"TPU": 1}])
    placed = plan(group, [node], None)
    assert placed is not None
    ids = {index: allocation.device_ids("TPU") for index, (_, allocation) in placed.items()}
    assert ids[1] == ["0", "1", "2", "3"]
    assert ids[2] == ["4", "5"]
    assert sorted([*ids[0], *ids[3]]) == ["6", "7"]


@given(st.sampled_from(["0123", "01234567", "1235", "24567"]), st.randoms(use_true_random=False))
def test_every_demand_that_a_free_block_could_serve_is_served_by_one(
    ids: str, choice: random.Random
) -> None:
    """Against the definition: a run of as many numbers, from a multiple of the count on."""
    node = make_node(ids)
    free = {int(id) for id in ids}
    held = []
    for _ in range(40):
        if held and choice.random() < 0.45:
            allocation = held.pop(choice.randrange(len(held)))
            node.release(allocation)
            free |= {int(id) for id in allocation.device_ids("TPU")}
            continue
        count = choice.choice([1, 1, 2, 2, 4, 8])
        runs = [set(range(start, start + count)) for start in range(0, 8, count)]
        needs = parse_needs({"TPU": count})
        assert node.fits(needs) == any(run <= free for run in runs)
        if node.fits(needs):
            allocation = node.allocate(needs)
            chips = {int(id) for id in allocation.device_ids("TPU")}
            assert chips in runs
            assert chips <= free
            free -= chips
            held.append(allocation)
    for allocation in held:
        node.release(allocation)
    assert node.devices["TPU"].free == [UNIT] * len(ids)
