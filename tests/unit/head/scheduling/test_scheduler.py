"""Which node and which devices a request gets."""

from __future__ import annotations

import pytest
from scheduling_harness import ask, cluster, granted, join, node_id, places

from miniray.common.specs import BundleAffinity, NodeAffinity, Spread
from miniray.head.scheduling.bundles import GroupPlacement
from miniray.head.scheduling.demands import Demand
from miniray.head.scheduling.reasons import ReasonKind
from miniray.head.scheduling.resources import node_pool
from miniray.head.scheduling.scheduler import ClusterScheduler


# --- policies --------------------------------------------------------------------------
def test_nodes_are_packed_to_half_in_order_and_then_used_evenly() -> None:
    scheduler = cluster({"CPU": 4}, {"CPU": 4})

    assert places(scheduler, Demand.of({"CPU": 1}), 9) == [0, 0, 1, 1, 0, 1, 0, 1, -1]


def test_work_without_accelerators_stays_off_accelerator_nodes_while_others_have_room() -> None:
    scheduler = ClusterScheduler()
    join(scheduler, 0, {"CPU": 4}, gpus=2)
    join(scheduler, 1, {"CPU": 2})

    assert places(scheduler, Demand.of({"CPU": 1}), 4) == [1, 1, 0, 0]
    assert places(scheduler, Demand.of({"CPU": 1, "GPU": 1}), 1) == [0]


def test_shares_of_devices_are_packed_over_the_whole_cluster_before_a_device_is_opened() -> None:
    scheduler = cluster({"CPU": 8}, {"CPU": 8}, gpus=2)
    assert places(scheduler, Demand.of({"GPU": 0.5}, placement=NodeAffinity(node_id(1))), 1) == [1]

    assert places(scheduler, Demand.of({"GPU": 0.25}), 3) == [1, 1, 0]


def test_a_device_that_others_made_fuller_is_preferred_from_then_on() -> None:
    scheduler = cluster({"CPU": 8}, {"CPU": 8}, gpus=2)
    assert places(scheduler, Demand.of({"GPU": 0.25}), 1) == [0]
    places(scheduler, Demand.of({"GPU": 0.7}, placement=NodeAffinity(node_id(1))), 1)

    assert places(scheduler, Demand.of({"GPU": 0.25}), 2) == [1, 0]


@pytest.mark.parametrize(("share", "count"), [(0.18, 80), (0.6, 10), (0.5, 32), (0.25, 64)])
def test_fractional_devices_that_fit_are_all_placed_on_several_nodes(
    share: float, count: int
) -> None:
    scheduler = cluster({"CPU": 100}, {"CPU": 100}, gpus=8)

    assert -1 not in places(scheduler, Demand.of({"GPU": share}), count)


def test_two_leases_that_need_a_whole_device_get_different_ones() -> None:
    scheduler = cluster({"CPU": 8}, gpus=2)
    ids = [ask(scheduler, Demand.of({"GPU": 1}))[1].grants[0].allocation for _ in range(2)]

    assert [allocation.device_ids("GPU") for allocation in ids] == [["0"], ["1"]]


def test_spread_uses_the_least_used_node_and_equals_take_turns() -> None:
    scheduler = cluster({"CPU": 4}, {"CPU": 4}, {"CPU": 4})
    spread = Demand.of({"CPU": 1}, placement=Spread())

    assert places(scheduler, spread, 6) == [0, 1, 2, 0, 1, 2]
    without_cpu = Demand.of({}, placement=Spread())
    assert places(scheduler, without_cpu, 3) == [0, 1, 2]


def test_actors_that_hold_no_cpu_do_not_all_land_on_one_node() -> None:
    scheduler = cluster({"CPU": 4}, {"CPU": 4})

    actor = Demand.of({}, placement_resources={"CPU": 1})
    assert sorted(places(scheduler, actor, 8)) == [0] * 4 + [1] * 4
    assert sorted(places(scheduler, Demand.of({}), 4)) == [0, 0, 1, 1]


def test_an_actor_that_holds_no_cpu_needs_one_free_to_be_placed() -> None:
    scheduler = cluster({"CPU": 1})
    lease, _ = ask(scheduler, Demand.of({"CPU": 1}))
    actor, out = ask(scheduler, Demand.of({}, placement_resources={"CPU": 1}))
    assert not out.grants

    assert granted(scheduler.release(lease, 1.0)) == [actor]
    assert scheduler.available_resources() == {"CPU": 1.0}


def test_the_requesters_node_is_preferred_while_it_is_as_good() -> None:
    scheduler = cluster({"CPU": 4}, {"CPU": 4})
    demand = Demand.of({"CPU": 1})
    near = [ask(scheduler, demand, near=node_id(1))[1].grants[0] for _ in range(3)]

    assert [int(grant.allocation.node_id, 16) for grant in near] == [1, 1, 0]


def test_the_node_of_the_data_is_preferred_until_it_is_full() -> None:
    scheduler = cluster({"CPU": 4}, {"CPU": 4})
    demand = Demand.of({"CPU": 1})
    near = [ask(scheduler, demand, near=node_id(1), fill=True)[1].grants[0] for _ in range(5)]

    assert [int(grant.allocation.node_id, 16) for grant in near] == [1, 1, 1, 1, 0]


def test_work_without_accelerators_stays_off_an_accelerator_node_that_has_its_data() -> None:
    scheduler = cluster({"CPU": 4})
    join(scheduler, 1, {"CPU": 4}, gpus=1)
    _, out = ask(scheduler, Demand.of({"CPU": 1}), near=node_id(1), fill=True)

    assert out.grants[0].allocation.node_id == node_id(0)


def test_labels_decide_which_nodes_are_used() -> None:
    scheduler = ClusterScheduler()
    join(scheduler, 0, {"CPU": 4}, labels={"zone": "a"})
    join(scheduler, 1, {"CPU": 4}, labels={"zone": "b"})

    assert places(scheduler, Demand.of({"CPU": 1}, label_selector={"zone": "b"}), 2) == [1, 1]
    assert places(scheduler, Demand.of({"CPU": 1}, label_selector={"zone": "!a"}), 2) == [1, 1]
    lease, out = ask(scheduler, Demand.of({"CPU": 1}, label_selector={"zone": "c"}))
    assert out.infeasible[0].reason.kind is ReasonKind.NO_LABELS
    assert granted(join(scheduler, 2, {"CPU": 1}, labels={"zone": "c"})) == [lease]


ZONES = [{"zone": "b"}, {"zone": "c"}]


def zones(*cpus: float) -> ClusterScheduler:
    scheduler = ClusterScheduler()
    for number, (zone, amount) in enumerate(zip("abc", cpus, strict=True)):
        join(scheduler, number, {"CPU": amount}, labels={"zone": zone})
    return scheduler


def test_nodes_of_a_fallback_are_used_where_better_ones_have_no_room() -> None:
    demand = Demand.of({"CPU": 1}, label_selector=ZONES[0], fallback_selectors=ZONES[1:])

    assert places(zones(4, 2, 2), demand, 5) == [1, 1, 2, 2, -1]


def test_what_waits_takes_the_node_of_any_of_its_selectors_that_has_room_first() -> None:
    scheduler = zones(4, 1, 1)
    demand = Demand.of({"CPU": 1}, label_selector=ZONES[0], fallback_selectors=ZONES[1:])
    (_, second), (waiting, _) = [ask(scheduler, demand) for _ in range(3)][1:]
    [grant] = second.grants

    assert granted(scheduler.release(grant.lease_id, 1.0)) == [waiting]


def test_with_a_fallback_to_anything_labels_are_a_wish() -> None:
    demand = Demand.of({"CPU": 1}, label_selector={"zone": "b"}, fallback_selectors=[{}])
    spread = Demand.of({"CPU": 1}, None, Spread(), {"zone": "b"}, [{}])

    assert places(zones(4, 2, 2), demand, 4) == [1, 1, 0, 0]
    assert places(zones(4, 2, 2), spread, 3) == [1, 1, 0]


def test_labels_that_no_node_has_are_told_with_all_that_would_do() -> None:
    scheduler = zones(1, 1, 1)
    lease, out = ask(
        scheduler,
        Demand.of({"CPU": 1}, label_selector={"zone": "d"}, fallback_selectors=[{"zone": "e"}]),
    )

    assert out.infeasible[0].reason.sentence() == "no node matches the labels zone=d or zone=e"
    assert granted(join(scheduler, 4, {"CPU": 1}, labels={"zone": "e"})) == [lease]


def test_two_conditions_on_one_label_hold_together() -> None:
    demand = Demand.of({"CPU": 1}, label_selector={"zone": "in(a,b)&!a"})

    assert places(zones(4, 1, 4), demand, 2) == [1, -1]


@pytest.mark.parametrize("soft", [False, True])
def test_affinity_waits_for_its_node(soft: bool) -> None:
    scheduler = cluster({"CPU": 1}, {"CPU": 1})
    there = Demand.of({"CPU": 1}, placement=NodeAffinity(node_id(1), soft=soft))
    first, _ = ask(scheduler, there)
    second, _ = ask(scheduler, there)

    assert scheduler.explain(second).sentence() == "needs CPU 1; node 00000000 has 0 of 1 free"
    assert granted(scheduler.release(first, 1.0)) == [second]


SOFT = NodeAffinity(node_id(1), soft=True)


def test_soft_affinity_to_a_node_that_could_never_hold_it_goes_elsewhere() -> None:
    scheduler = cluster({"CPU": 2}, {"CPU": 1})
    join(scheduler, 2, {"CPU": 1}, labels={"zone": "b"})

    assert places(scheduler, Demand.of({"CPU": 2}, placement=SOFT), 1) == [0]
    zone = Demand.of({"CPU": 1}, placement=SOFT, label_selector={"zone": "b"})
    assert places(scheduler, zone, 1) == [2]


@pytest.mark.parametrize("end", ["removed", "drained", "device out of service"])
def test_soft_affinity_goes_elsewhere_when_its_node_is_of_no_use_any_more(end: str) -> None:
    scheduler = cluster({"CPU": 2}, {"CPU": 2}, gpus=1)
    demand = Demand.of({"GPU": 1}, placement=SOFT)
    ask(scheduler, demand)
    waiting = [ask(scheduler, demand)[0] for _ in range(2)]
    if end == "removed":
        out = scheduler.remove_node(node_id(1), 1.0)
    elif end == "drained":
        out = scheduler.drain_node(node_id(1), 1.0)
    else:
        out = scheduler.set_device_in_service(node_id(1), "GPU", "0", False, 1.0)

    assert granted(out) == waiting[:1]
    assert scheduler.waiting() == waiting[1:]


def test_soft_affinity_to_a_node_that_is_not_there_goes_elsewhere() -> None:
    soft = Demand.of({"CPU": 1}, placement=NodeAffinity("ff", soft=True))

    assert places(cluster({"CPU": 1}), soft, 1) == [0]


@pytest.mark.parametrize(
    ("placement", "amount", "kind"),
    [
        (NodeAffinity("ff" * 16), 1, ReasonKind.NODE_GONE),
        (NodeAffinity(node_id(0)), 5, ReasonKind.NODE_TOO_SMALL),
    ],
)
def test_hard_affinity_that_can_never_be_met_fails_the_request(
    placement: NodeAffinity, amount: int, kind: ReasonKind
) -> None:
    scheduler = cluster({"CPU": 4})
    lease, out = ask(scheduler, Demand.of({"CPU": amount}, placement=placement))

    assert [(failure.lease_id, failure.reason.kind) for failure in out.failures] == [(lease, kind)]
    assert "hard" in out.failures[0].reason.sentence()
    assert scheduler.waiting() == []


def test_hard_affinity_to_a_node_without_the_labels_fails_the_request() -> None:
    scheduler = cluster({"CPU": 4})
    here = NodeAffinity(node_id(0))
    _, out = ask(scheduler, Demand.of({}, placement=here, label_selector={"zone": "in(a,b)"}))

    sentence = (
        "node 00000000 does not match the labels zone=in(a,b), and the affinity to it is hard"
    )
    assert [failure.reason.sentence() for failure in out.failures] == [sentence]


def test_hard_affinity_waits_for_a_device_that_is_out_of_service() -> None:
    scheduler = cluster({"CPU": 4}, gpus=1)
    scheduler.set_device_in_service(node_id(0), "GPU", "0", False, 0.0)
    lease, out = ask(scheduler, Demand.of({"GPU": 1}, placement=NodeAffinity(node_id(0))))

    assert not out.failures
    back = scheduler.set_device_in_service(node_id(0), "GPU", "0", True, 1.0)
    assert granted(back) == [lease]


# --- devices that a user declares --------------------------------------------------------
def with_fpgas(whole: bool) -> ClusterScheduler:
    scheduler = ClusterScheduler()
    pool = node_pool(node_id(0), {"CPU": 8}, {"FPGA": ["0", "1"]}, whole={"FPGA"} if whole else ())
    scheduler.add_node(pool, 0.0)
    return scheduler


def test_a_device_that_cannot_be_shared_is_given_whole_only() -> None:
    scheduler = with_fpgas(whole=True)
    _, share = ask(scheduler, Demand.of({"FPGA": 0.5}))

    assert [waiting.reason.sentence() for waiting in share.infeasible] == [
        "needs FPGA 0.5; the devices of FPGA can't be shared, ask for whole ones"
    ]
    assert places(scheduler, Demand.of({"FPGA": 1}), 3) == [0, 0, -1]


def test_hard_affinity_to_a_node_whose_devices_refuse_the_amount_is_told_the_rule() -> None:
    scheduler = with_fpgas(whole=True)
    _, out = ask(scheduler, Demand.of({"FPGA": 0.5}, placement=NodeAffinity(node_id(0))))

    assert [failure.reason.sentence() for failure in out.failures] == [
        "needs FPGA 0.5; the devices of FPGA can't be shared, ask for whole ones"
    ]


@pytest.mark.parametrize("whole", [False, True])
def test_a_part_of_more_than_one_device_can_never_be_had(whole: bool) -> None:
    scheduler = with_fpgas(whole)
    _, out = ask(scheduler, Demand.of({"FPGA": 1.5}))

    assert [waiting.reason.sentence() for waiting in out.infeasible] == [
        "needs FPGA 1.5; above 1 the amount of FPGA must be whole, as it is taken in whole devices"
    ]


def test_an_amount_that_devices_refuse_may_be_served_by_a_node_that_counts() -> None:
    scheduler = with_fpgas(whole=True)
    lease, _ = ask(scheduler, Demand.of({"FPGA": 1.5}))

    assert granted(join(scheduler, 1, {"FPGA": 2})) == [lease]


def test_a_bundle_keeps_to_the_rule_of_its_devices() -> None:
    scheduler = with_fpgas(whole=True)
    scheduler.create_group(GroupPlacement.of(b"group", [{"FPGA": 1}], "PACK"), 0.0)
    share = Demand.of({"FPGA": 0.5}, placement=BundleAffinity(b"group"))

    assert places(scheduler, share, 1) == [-1]
    assert places(scheduler, Demand.of({"FPGA": 1}, placement=BundleAffinity(b"group")), 1) == [0]
