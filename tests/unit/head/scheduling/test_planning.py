"""Bundles put on several nodes, beside a search through every way, and when a group is planned."""

from __future__ import annotations

import itertools
import sys
from typing import TYPE_CHECKING

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from miniray.common.amounts import UNIT
from miniray.common.specs import NodeAffinity
from miniray.head.scheduling import groups
from miniray.head.scheduling.bundles import GroupPlacement, plan
from miniray.head.scheduling.demands import Demand, LeaseRequest
from miniray.head.scheduling.resources import ResourcePool, node_pool
from miniray.head.scheduling.scheduler import ClusterScheduler

if TYPE_CHECKING:
    from collections.abc import Sequence

AMOUNTS = st.one_of(
    st.fixed_dictionaries({"CPU": st.integers(1, 3)}),
    st.sampled_from([{"GPU": 0.3}, {"GPU": 0.5, "CPU": 1}, {"GPU": 0.6}, {"GPU": 1}]),
    st.just({"GPU": 2, "CPU": 1}),
)
SIZES = st.tuples(st.integers(1, 4), st.integers(0, 2))


def make(number: int, size: tuple[int, int], **labels: str) -> ResourcePool:
    cpus, gpus = size
    devices = {"GPU": [str(device) for device in range(gpus)]} if gpus else {}
    pool = node_pool(f"{number:032x}", {"CPU": cpus}, devices, labels)
    pool.order = number
    return pool


def fits_on(node: ResourcePool, wanted: Sequence[dict[str, float]]) -> bool:
    """Whether any way to put these on the devices of a node works."""
    if sum(each.get("CPU", 0) for each in wanted) > node.total["CPU"] / UNIT:
        return False
    gpus = sorted(each["GPU"] for each in wanted if each.get("GPU"))
    count = len(node.devices["GPU"].ids) if "GPU" in node.devices else 0
    whole = sum(int(gpu) for gpu in gpus if gpu >= 1)
    shares = [gpu for gpu in gpus if gpu < 1]
    if not gpus:
        return True
    return whole <= count and any(
        all(
            sum(share for share, at in zip(shares, places, strict=True) if at == device) <= 1
            for device in range(count - whole)
        )
        for places in itertools.product(range(count - whole), repeat=len(shares))
    )


def fits_somehow(nodes: list[ResourcePool], bundles: list[dict[str, float]]) -> bool:
    return any(
        all(
            fits_on(node, [b for b, at in zip(bundles, places, strict=True) if at == number])
            for number, node in enumerate(nodes)
        )
        for places in itertools.product(range(len(nodes)), repeat=len(bundles))
    )


@given(
    st.lists(SIZES, min_size=1, max_size=3),
    st.lists(AMOUNTS, min_size=1, max_size=5),
    st.sampled_from(["PACK", "SPREAD"]),
)
def test_bundles_are_placed_where_there_is_a_way_and_else_nothing_is_taken(
    sizes: list[tuple[int, int]], bundles: list[dict[str, float]], strategy: str
) -> None:
    nodes = [make(number, size) for number, size in enumerate(sizes)]
    before = [(dict(node.free), [d.free for d in node.copy().devices.values()]) for node in nodes]
    made = plan(GroupPlacement.of(b"group", bundles, strategy), nodes, None)
    if made is None:  # unequal ones may miss the way, as in Ray
        assert len({str(each) for each in bundles}) > 1 or not fits_somehow(nodes, bundles)
    else:
        assert set(made) == set(range(len(bundles)))
    for node, allocation in (made or {}).values():
        node.release(allocation)
    after = [(dict(node.free), [d.free for d in node.copy().devices.values()]) for node in nodes]
    assert after == before


@pytest.mark.parametrize("strategy", ["PACK", "SPREAD"])
def test_those_with_few_places_come_first_and_then_the_large_ones(strategy: str) -> None:
    nodes = [make(0, (4, 1)), make(1, (7, 0))]
    bundles = [{"CPU": 1.0}, {"CPU": 2.0}, {"CPU": 4.0}, {"CPU": 3.0, "GPU": 1.0}, {"CPU": 1.0}]
    made = plan(GroupPlacement.of(b"group", bundles, strategy), nodes, None)
    assert made is not None
    assert made[3][0] is nodes[0]
    assert [node.free["CPU"] for node in nodes] == [0, 0]


@given(st.lists(st.integers(1, 9), min_size=1, max_size=4), st.integers(1, 5), st.integers(1, 6))
@example([2, 4, 4], 1, 8)  # the first is idle, the others are half in use
def test_pack_puts_equal_bundles_on_the_fewest_nodes_there_are(
    free: list[int], cpus: int, count: int
) -> None:
    nodes = [make(number, (size, 0)) for number, size in enumerate(free)]
    named: list[dict[str, float]] = [{"CPU": cpus}] * count
    made = plan(GroupPlacement.of(b"group", named, "PACK"), nodes, None)
    if made is None:
        return
    used = {node.order for node, _ in made.values()}
    for node, allocation in made.values():
        node.release(allocation)
    for fewer in itertools.combinations(nodes, len(used) - 1):
        assert not fits_somehow(list(fewer), named)


def test_labels_are_heeded() -> None:
    nodes = [make(0, (4, 0), zone="a"), make(1, (4, 0), zone="b")]
    bundles = [{"CPU": cpus} for cpus in (4.0, 2.0, 2.0)]
    labels: list[dict[str, str]] = [{}, {"zone": "b"}, {"zone": "b"}]
    for strategy in ("PACK", "SPREAD"):
        made = plan(GroupPlacement.of(b"group", bundles, strategy, labels), nodes, None)
        assert made is not None
        assert {index: node.order for index, (node, _) in made.items()} == {0: 0, 1: 1, 2: 1}
        for node, allocation in made.values():
            node.release(allocation)
    three = GroupPlacement.of(b"group", bundles[1:] * 2, "SPREAD", labels[1:] * 2)
    assert plan(three, nodes, None) is None
    assert [node.free["CPU"] for node in nodes] == [4 * UNIT, 4 * UNIT]


def test_work_grows_with_bundles_times_nodes_where_none_are_alike() -> None:
    count = 100
    nodes = [make(number, (4, 1)) for number in range(count)]
    bundles: list[dict[str, float]] = [{"GPU": 1, "CPU": 1 + n / 1000} for n in range(count)]
    calls = 0

    def note(_frame: object, event: str, _argument: object) -> None:
        nonlocal calls
        calls += event == "call"

    sys.setprofile(note)
    try:
        made = plan(GroupPlacement.of(b"group", bundles, "PACK"), nodes, None)
    finally:
        sys.setprofile(None)
    assert made is not None
    assert calls < 40 * count * count


# --- when it is planned again ------------------------------------------------------------------


class Plans:
    """Counts plans of groups."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.made = 0

        def counted(*arguments: object) -> object:
            self.made += 1
            return plan(*arguments)  # type: ignore[arg-type]

        monkeypatch.setattr(groups, "plan", counted)


def scheduler_of(*sizes: tuple[int, int]) -> ClusterScheduler:
    scheduler = ClusterScheduler()
    for number, size in enumerate(sizes):
        scheduler.add_node(make(number, size), 0.0)
    return scheduler


def hold(scheduler: ClusterScheduler, id: bytes, at: int | None = None, **resources: float) -> None:
    placement = None if at is None else NodeAffinity(f"{at:032x}")
    demand = Demand.of(resources, placement=placement, lasting=True)
    assert scheduler.submit(LeaseRequest(id, demand), 0.0).grants


def test_a_group_that_lacks_one_kind_is_planned_again_when_there_is_enough_of_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    scheduler = scheduler_of((4, 2), (4, 2))
    for number in range(4):
        hold(scheduler, b"gpu%d" % number, GPU=1)
    for number in range(8):
        hold(scheduler, b"cpu%d" % number, CPU=1)
    state = GroupPlacement.of(b"group", [{"CPU": 1}, {"GPU": 2}, {"GPU": 2}], "SPREAD")
    scheduler.create_group(state, 0.0)
    plans = Plans(monkeypatch)
    for number in range(8):
        assert not scheduler.release(b"cpu%d" % number, 1.0).placed
    for number in range(3):
        assert not scheduler.release(b"gpu%d" % number, 1.0).placed
    assert plans.made == 0
    assert scheduler.release(b"gpu3", 1.0).placed
    assert plans.made == 1


def test_a_group_whose_bundles_fit_alone_is_planned_again_when_a_node_has_more_than_it_had(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    scheduler = scheduler_of((5, 0), (5, 0))
    for number in range(2):
        hold(scheduler, b"hold%d" % number, number, CPU=1)
    state = GroupPlacement.of(b"group", [{"CPU": 3}, {"CPU": 3}, {"CPU": 2}], "PACK")
    assert not scheduler.create_group(state, 0.0).placed
    plans = Plans(monkeypatch)
    for number in range(20):  # what comes and goes changes nothing
        hold(scheduler, b"task%d" % number, CPU=1)
        assert not scheduler.release(b"task%d" % number, 1.0).placed
    assert plans.made == 0
    assert scheduler.release(b"hold1", 1.0).placed
    assert plans.made == 1


def test_a_node_that_is_used_again_counts_as_more(monkeypatch: pytest.MonkeyPatch) -> None:
    scheduler = scheduler_of((4, 0), (4, 0))
    scheduler.drain_node(f"{1:032x}", 0.0)
    state = GroupPlacement.of(b"group", [{"CPU": 2}, {"CPU": 3}], "PACK")
    assert not scheduler.create_group(state, 0.0).placed
    plans = Plans(monkeypatch)
    assert scheduler.drain_node(f"{1:032x}", 1.0, False).placed
    assert plans.made == 1


def test_a_group_for_one_node_is_planned_again_once_for_each_node_that_has_got_room(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    scheduler = scheduler_of(*[(4, 1)] * 20)
    for number in range(20):
        hold(scheduler, b"most%d" % number, number, GPU=0.5)
        hold(scheduler, b"cpus%d" % number, number, CPU=3)
    bundles = [{"CPU": 2}, {"GPU": 0.4}, {"GPU": 0.4}]
    state = GroupPlacement.of(b"group", bundles, "STRICT_PACK")
    assert not scheduler.create_group(state, 0.0).placed
    plans = Plans(monkeypatch)
    for number in range(5):
        assert not scheduler.release(b"cpus%d" % number, 1.0).placed
    for number in range(10, 15):
        assert not scheduler.release(b"most%d" % number, 1.0).placed
    assert plans.made <= 10
    assert scheduler.release(b"most3", 1.0).placed
