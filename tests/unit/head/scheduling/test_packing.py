"""Bundles of one node on its devices, beside a search through every way."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from miniray.common.amounts import UNIT
from miniray.common.specs import Allocation
from miniray.head.scheduling.bundles import GroupPlacement, plan
from miniray.head.scheduling.resources import Reservation, node_pool


def fits_somehow(free: list[int], shares: list[int]) -> bool:
    """Whether any way to put shares on devices works."""
    for places in itertools.product(range(len(free)), repeat=len(shares)):
        left = list(free)
        for share, place in zip(shares, places, strict=True):
            left[place] -= share
        if min(left) >= 0:
            return True
    return False


amounts = st.one_of(st.sampled_from([1, 2]), st.integers(1, 9).map(lambda tenths: tenths / 10))


@given(
    st.lists(amounts, min_size=1, max_size=6),
    st.lists(st.integers(1, 9).map(lambda tenths: tenths / 10), max_size=3),
)
@example([0.5, 0.5, 0.3, 0.3], [0.4])  # only a search would find the way, and they wait
def test_strict_pack_gives_each_bundle_its_devices_where_they_fit_on_a_node(
    bundles: list[float], held: list[float]
) -> None:
    node = node_pool("ab", {"CPU": 9}, {"GPU": ["0", "1", "2"]})
    for amount in held:
        units = ("GPU", round(amount * UNIT))
        if node.fits((units,)):
            node.allocate((units,))
    free = list(node.devices["GPU"].free)
    named = [{"CPU": 1, "GPU": amount} for amount in bundles]
    state = GroupPlacement.of(b"group", named, "STRICT_PACK")
    made = plan(state, [node], None)

    # Whole devices are those that nobody holds a part of: which of them is all the same.
    whole = int(sum(amount for amount in bundles if amount >= 1))
    shares = [round(amount * UNIT) for amount in bundles if amount < 1]
    unheld = [position for position, units in enumerate(free) if units == UNIT]
    possible = len(unheld) >= whole
    for position in unheld[:whole] if possible else ():
        free[position] = 0
    possible = possible and fits_somehow(free, shares)
    if len(set(shares)) < 2:
        assert (made is not None) == possible
    else:  # the largest goes first, to the fullest device that has room for it
        assert made is None or possible
    assert min(node.devices["GPU"].free) >= 0
    if made is not None:
        check(made.values(), bundles)


@pytest.mark.parametrize("amounts", [[0.4, 0.5, 0.5, 0.6], [0.4, 0.3, 0.3, 0.5, 0.5]])
def test_strict_pack_fills_devices_with_unequal_shares(amounts: list[float]) -> None:
    node = node_pool("ab", {}, {"GPU": ["0", "1"]})
    state = GroupPlacement.of(b"group", [{"GPU": amount} for amount in amounts], "STRICT_PACK")
    made = plan(state, [node], None)
    assert made is not None
    assert node.devices["GPU"].free == [0, 0]


def test_strict_pack_places_the_largest_shares_first_whatever_else_bundles_need() -> None:
    node = node_pool("ab", {"CPU": 10}, {"GPU": ["0", "1"]})
    named = [{"CPU": 4, "GPU": 0.4}, {"CPU": 4, "GPU": 0.4}, {"GPU": 0.6}, {"GPU": 0.6}]
    made = plan(GroupPlacement.of(b"group", named, "STRICT_PACK"), [node], None)
    assert made is not None
    assert node.devices["GPU"].free == [0, 0]


def check(made: object, bundles: list[float]) -> None:
    """Each bundle has what it asked for: one device's share, or whole ones."""
    for (_, allocation), amount in zip(made, bundles, strict=False):  # type: ignore[call-overload]
        assert isinstance(allocation, Allocation)
        total = sum(units for _, shares in allocation.devices for _, units in shares)
        assert total in {round(amount * UNIT) for amount in bundles}
        assert all(len(shares) == max(1, total // UNIT) for _, shares in allocation.devices)


def test_strict_pack_leaves_alone_what_is_set_aside_for_others() -> None:
    node = node_pool("ab", {"CPU": 9}, {"GPU": ["0", "1"]})
    node.reservation = Reservation("another", {}, {"GPU": [0, UNIT]})
    shares = [{"GPU": 0.6}, {"GPU": 0.4}, {"GPU": 0.5}, {"GPU": 0.5}]
    four = GroupPlacement.of(b"four", shares, "STRICT_PACK")
    two = GroupPlacement.of(b"two", shares[:2], "STRICT_PACK")
    assert plan(four, [node], None) is None
    assert plan(two, [node], None) is not None


@pytest.mark.parametrize("nodes", [1, 50])
def test_a_group_that_fits_nowhere_is_found_so_in_bounded_work(nodes: int) -> None:
    pools = [node_pool(f"{n:032x}", {}, {"GPU": list("01234567")}) for n in range(nodes)]
    bundles = [{"GPU": 0.5001 + number / 10_000} for number in range(9)]
    state = GroupPlacement.of(b"group", bundles, "STRICT_PACK")
    assert plan(state, pools, None) is None
    assert all(pool.devices["GPU"].free == [UNIT] * 8 for pool in pools)
