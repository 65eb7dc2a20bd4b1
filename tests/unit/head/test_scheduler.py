from __future__ import annotations

import itertools
from typing import TYPE_CHECKING

import pytest

from miniray.core.runtime import BundleAffinity, NodeAffinity, Spread
from miniray.head.amounts import UNIT
from miniray.head.bundles import PlacementGroupState
from miniray.head.demands import Decisions, Demand, LeaseRequest
from miniray.head.reasons import ReasonKind
from miniray.head.resources import ResourcePool, node_pool
from miniray.head.scheduler import ClusterScheduler

if TYPE_CHECKING:
    from miniray.head.amounts import Needs

_numbers = itertools.count()


def node_id(number: int) -> str:
    return f"{number:032x}"


def cluster(*nodes: dict[str, float], gpus: int = 0, **kwargs: float) -> ClusterScheduler:
    scheduler = ClusterScheduler(**kwargs)
    for number, resources in enumerate(nodes):
        join(scheduler, number, resources, gpus)
    return scheduler


def join(
    scheduler: ClusterScheduler,
    number: int,
    resources: dict[str, float],
    gpus: int = 0,
    labels: dict[str, str] | None = None,
    now: float = 0.0,
) -> Decisions:
    devices = {"GPU": [str(device) for device in range(gpus)]} if gpus else {}
    return scheduler.add_node(node_pool(node_id(number), resources, devices, labels), now)


def ask(
    scheduler: ClusterScheduler,
    demand: Demand,
    now: float = 0.0,
    near: str | None = None,
    fill: bool = False,
) -> tuple[bytes, Decisions]:
    lease_id = b"lease%d" % next(_numbers)
    return lease_id, scheduler.submit(LeaseRequest(lease_id, demand, near, fill), now)


def places(scheduler: ClusterScheduler, demand: Demand, count: int) -> list[int]:
    """Node numbers of that many grants in a row; -1 for one that waits."""
    found = []
    for _ in range(count):
        _, out = ask(scheduler, demand)
        found.append(int(out.grants[0].allocation.node_id, 16) if out.grants else -1)
    return found


def granted(out: Decisions) -> list[bytes]:
    return [grant.lease_id for grant in out.grants]


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


# --- queues ----------------------------------------------------------------------------
def test_requests_of_one_shape_are_served_in_order_of_arrival() -> None:
    scheduler = cluster({"CPU": 1})
    held, _ = ask(scheduler, Demand.of({"CPU": 1}))
    first, _ = ask(scheduler, Demand.of({"CPU": 1}))
    second, _ = ask(scheduler, Demand.of({"CPU": 1}))

    assert scheduler.waiting() == [first, second]
    assert granted(scheduler.release(held, 1.0)) == [first]
    assert granted(scheduler.release(first, 2.0)) == [second]


def test_room_goes_to_the_oldest_shape_that_fits() -> None:
    scheduler = cluster({"CPU": 2})
    held = [ask(scheduler, Demand.of({"CPU": 1}))[0] for _ in range(2)]
    large, _ = ask(scheduler, Demand.of({"CPU": 2}))
    small, _ = ask(scheduler, Demand.of({"CPU": 0.5}))

    assert granted(scheduler.release(held[0], 1.0)) == [small]
    scheduler.release(small, 2.0)
    assert granted(scheduler.release(held[1], 3.0)) == [large]


def test_a_cancelled_request_is_never_granted() -> None:
    scheduler = cluster({"CPU": 1})
    held, _ = ask(scheduler, Demand.of({"CPU": 1}))
    first, _ = ask(scheduler, Demand.of({"CPU": 1}))
    second, _ = ask(scheduler, Demand.of({"CPU": 1}))
    scheduler.cancel(first, 0.5)

    assert granted(scheduler.release(held, 1.0)) == [second]
    assert scheduler.cancel(first, 1.0) == Decisions()


def test_a_freed_device_is_handed_out_again() -> None:
    scheduler = cluster({"CPU": 8}, gpus=1)
    for _ in range(3):
        lease, out = ask(scheduler, Demand.of({"GPU": 1}))
        assert out.grants[0].allocation.device_ids("GPU") == ["0"]
        scheduler.release(lease, 0.0)


def test_an_id_is_not_used_twice() -> None:
    scheduler = cluster({"CPU": 1})
    request = LeaseRequest(b"x", Demand.of({"CPU": 1}))
    scheduler.submit(request, 0.0)
    with pytest.raises(ValueError, match="exists already"):
        scheduler.submit(request, 0.0)


def test_a_blocked_task_lends_its_cpu_and_takes_it_back_into_debt() -> None:
    scheduler = cluster({"CPU": 1})
    blocked, _ = ask(scheduler, Demand.of({"CPU": 1}))
    child, _ = ask(scheduler, Demand.of({"CPU": 1}))

    assert granted(scheduler.release_cpu(blocked, 1.0)) == [child]
    scheduler.take_cpu(blocked)
    waiting, out = ask(scheduler, Demand.of({"CPU": 1}))
    assert not out.grants
    assert "owes 1 to resumed tasks" in scheduler.explain(waiting).sentence()
    assert not scheduler.release(child, 2.0).grants
    assert granted(scheduler.release(blocked, 3.0)) == [waiting]


def test_a_lease_that_ends_while_blocked_returns_its_cpu_once() -> None:
    scheduler = cluster({"CPU": 2})
    lease, _ = ask(scheduler, Demand.of({"CPU": 1}))
    scheduler.release_cpu(lease, 0.0)
    scheduler.release_cpu(lease, 0.0)
    scheduler.release(lease, 0.0)

    assert scheduler.available_resources() == {"CPU": 2.0}


# --- nodes -----------------------------------------------------------------------------
def test_what_no_node_can_serve_is_told_at_once_and_placed_when_one_joins() -> None:
    scheduler = cluster({"CPU": 4})
    lease, out = ask(scheduler, Demand.of({"FPGA": 1}))
    assert out.infeasible[0].lease_id == lease
    assert out.infeasible[0].reason.sentence() == "needs FPGA 1; no node has FPGA"

    assert granted(join(scheduler, 1, {"FPGA": 1})) == [lease]


def test_a_node_that_is_gone_takes_its_leases_along() -> None:
    scheduler = cluster({"CPU": 1}, {"CPU": 1})
    lost, _ = ask(scheduler, Demand.of({"CPU": 1}))
    kept, _ = ask(scheduler, Demand.of({"CPU": 1}))
    bound, _ = ask(scheduler, Demand.of({"CPU": 1}, placement=NodeAffinity(node_id(0))))
    out = scheduler.remove_node(node_id(0), 1.0)

    assert out.lost == [lost]
    assert [failure.lease_id for failure in out.failures] == [bound]
    assert scheduler.release(lost, 2.0) == Decisions()
    assert scheduler.lease(kept) is not None
    assert scheduler.total_resources() == {"CPU": 1.0}


def test_leases_of_a_lost_node_are_told_in_the_order_in_which_they_were_granted() -> None:
    scheduler = cluster({"CPU": 8})
    leases = [ask(scheduler, Demand.of({"CPU": 1}))[0] for _ in range(8)]

    assert scheduler.remove_node(node_id(0), 1.0).lost == leases


def test_requests_left_without_a_node_that_could_serve_them_are_told() -> None:
    scheduler = cluster({"CPU": 1}, {"CPU": 2})
    ask(scheduler, Demand.of({"CPU": 2}))
    waiting, out = ask(scheduler, Demand.of({"CPU": 2}))
    assert not out.infeasible

    assert [each.lease_id for each in scheduler.remove_node(node_id(1), 1.0).infeasible] == [
        waiting
    ]


def test_a_draining_node_grants_nothing_until_it_is_back() -> None:
    scheduler = cluster({"CPU": 2})
    scheduler.drain_node(node_id(0), 0.0)
    lease, out = ask(scheduler, Demand.of({"CPU": 1}))
    assert not out.grants
    assert "draining" in scheduler.explain(lease).sentence()

    assert granted(scheduler.drain_node(node_id(0), 1.0, draining=False)) == [lease]


def test_a_quarantined_device_is_not_handed_out_until_it_is_back() -> None:
    scheduler = cluster({"CPU": 8}, gpus=1)
    scheduler.set_device_in_service(node_id(0), "GPU", "0", False, 0.0)
    lease, out = ask(scheduler, Demand.of({"GPU": 0.5}))
    assert out.infeasible
    assert scheduler.total_resources()["GPU"] == 0

    back = scheduler.set_device_in_service(node_id(0), "GPU", "0", True, 1.0)
    assert granted(back) == [lease]


def test_leases_reported_after_a_restart_are_counted_before_anything_is_granted() -> None:
    before = cluster({"CPU": 1}, gpus=2)
    lease, out = ask(before, Demand.of({"CPU": 1, "GPU": 1}))
    allocation = out.grants[0].allocation

    after = ClusterScheduler()
    after.await_nodes()
    waiting, _ = ask(after, Demand.of({"CPU": 1}, placement=NodeAffinity(node_id(0))))
    assert "has not reported" in after.explain(waiting).sentence()
    node = node_pool(node_id(0), {"CPU": 1}, {"GPU": ["0", "1"]})
    assert not after.add_node(node, 0.0, leases=[(lease, allocation)]).grants
    assert ask(after, Demand.of({"GPU": 1}))[1].grants[0].allocation.device_ids("GPU") == ["1"]
    assert granted(after.release(lease, 1.0)) == [waiting]


def test_a_node_whose_report_contradicts_itself_is_not_added() -> None:
    _, out = ask(cluster({"CPU": 1}, gpus=1), Demand.of({"GPU": 1}))
    allocation = out.grants[0].allocation
    scheduler = ClusterScheduler()
    node = node_pool(node_id(0), {"CPU": 1}, {"GPU": ["0"]})
    with pytest.raises(ValueError, match="0 free"):
        scheduler.add_node(node, 0.0, leases=[(b"a", allocation), (b"b", allocation)])

    assert dict(scheduler.nodes) == {}
    assert scheduler.lease(b"a") is None


# --- waiting long ----------------------------------------------------------------------
def test_a_large_demand_that_waited_long_is_not_starved_by_small_ones() -> None:
    scheduler = cluster({"CPU": 4}, reserve_after=10.0)
    small = Demand.of({"CPU": 1})
    held = [ask(scheduler, small)[0] for _ in range(4)]
    large, _ = ask(scheduler, Demand.of({"CPU": 4}), now=0.0)
    late = [ask(scheduler, small, now=1.0)[0] for _ in range(8)]
    assert scheduler.next_deadline() == 10.0
    assert granted(scheduler.release(held[0], 5.0)) == [late[0]]

    scheduler.advance(10.0)
    for lease in (*held[1:], late[0]):
        last = scheduler.release(lease, 11.0)
    assert granted(last) == [large]
    assert granted(scheduler.release(large, 12.0)) == late[1:5]


def test_room_set_aside_on_one_node_leaves_the_others_alone() -> None:
    scheduler = cluster({"CPU": 2}, {"CPU": 2}, reserve_after=10.0)
    held = [ask(scheduler, Demand.of({"CPU": 1}))[0] for _ in range(4)]
    ask(scheduler, Demand.of({"CPU": 2}), now=0.0)
    scheduler.advance(10.0)
    small = [ask(scheduler, Demand.of({"CPU": 1}), now=10.0)[0] for _ in range(2)]
    freed = [granted(scheduler.release(lease, 11.0)) for lease in held]

    assert small == [lease for leases in freed for lease in leases if lease in small]


def test_room_set_aside_is_free_again_when_the_demand_is_cancelled() -> None:
    scheduler = cluster({"CPU": 2}, reserve_after=10.0)
    held = [ask(scheduler, Demand.of({"CPU": 1}))[0] for _ in range(2)]
    large, _ = ask(scheduler, Demand.of({"CPU": 2}), now=0.0)
    scheduler.advance(10.0)
    small, _ = ask(scheduler, Demand.of({"CPU": 1}), now=10.0)
    assert not scheduler.release(held[0], 11.0).grants
    assert scheduler.explain(small).kind is ReasonKind.RESERVED

    assert granted(scheduler.cancel(large, 12.0)) == [small]


def test_demands_that_no_node_can_serve_do_not_keep_others_from_their_turn() -> None:
    scheduler = cluster({"CPU": 2}, reserve_after=10.0)
    held = [ask(scheduler, Demand.of({"CPU": 1}))[0] for _ in range(2)]
    for number in range(40):
        ask(scheduler, Demand.of({"CPU": 1, f"absent{number}": 1}))
    large, _ = ask(scheduler, Demand.of({"CPU": 2}))
    ask(scheduler, Demand.of({"CPU": 1}), now=10.0)
    scheduler.advance(10.0)

    freed = [granted(scheduler.release(lease, 11.0)) for lease in held]
    assert freed == [[], [large]]


def test_an_unmet_need_elsewhere_does_not_block_what_is_to_spare() -> None:
    scheduler = cluster({"CPU": 8, "licence": 1}, reserve_after=10.0)
    ask(scheduler, Demand.of({"licence": 1}))
    ask(scheduler, Demand.of({"CPU": 2, "licence": 1}), now=0.0)
    scheduler.advance(10.0)

    assert places(scheduler, Demand.of({"CPU": 1}), 8) == [0] * 6 + [-1] * 2


def test_what_actors_hold_is_not_waited_for_with_idle_room_beside_it() -> None:
    scheduler = cluster({"CPU": 4}, reserve_after=10.0)
    ask(scheduler, Demand.of({"CPU": 1}, lasting=True))
    ask(scheduler, Demand.of({"CPU": 4}), now=0.0)
    scheduler.advance(10.0)

    assert places(scheduler, Demand.of({"CPU": 1}), 4) == [0, 0, 0, -1]


def test_a_share_that_fits_beside_a_demand_for_a_whole_device_is_placed() -> None:
    scheduler = cluster({"CPU": 8}, gpus=2, reserve_after=10.0)
    for _ in range(2):
        ask(scheduler, Demand.of({"GPU": 0.6}, lasting=True))
    whole, _ = ask(scheduler, Demand.of({"GPU": 1}), now=0.0)
    scheduler.advance(10.0)
    small, out = ask(scheduler, Demand.of({"GPU": 0.3}), now=11.0)

    assert granted(out) == [small]
    assert scheduler.explain(whole).kind is ReasonKind.BUSY


def test_only_the_device_that_is_waited_for_is_set_aside() -> None:
    scheduler = cluster({"CPU": 8}, gpus=3, reserve_after=10.0)
    actor, _ = ask(scheduler, Demand.of({"GPU": 0.9}, lasting=True))
    task, _ = ask(scheduler, Demand.of({"GPU": 0.8}))
    other, _ = ask(scheduler, Demand.of({"GPU": 0.7}, lasting=True))
    whole, _ = ask(scheduler, Demand.of({"GPU": 1}), now=0.0)
    scheduler.advance(10.0)
    small = Demand.of({"GPU": 0.1})
    placed = [ask(scheduler, small, now=11.0) for _ in range(5)]

    shares = [out.grants[0].allocation.devices[0][1] for _, out in placed if out.grants]
    assert [device for ((device, _),) in shares] == ["0", "2", "2", "2"]
    assert scheduler.explain(placed[4][0]).kind is ReasonKind.RESERVED
    assert granted(scheduler.release(task, 12.0)) == [whole]
    assert granted(scheduler.release(whole, 13.0)) == [placed[4][0]]
    assert scheduler.lease(actor) is not None
    assert scheduler.lease(other) is not None


def test_the_devices_that_are_free_already_are_set_aside_first() -> None:
    scheduler = cluster({"CPU": 8}, gpus=4, reserve_after=10.0)
    tasks = [ask(scheduler, Demand.of({"GPU": 1}))[0] for _ in range(4)]
    scheduler.release(tasks[3], 0.0)
    scheduler.release(tasks[1], 0.0)
    wide, _ = ask(scheduler, Demand.of({"GPU": 3}), now=0.0)
    scheduler.advance(10.0)
    reservation = scheduler.nodes[node_id(0)].reservation

    assert reservation is not None
    assert list(reservation.devices["GPU"]) == [UNIT, UNIT, 0, UNIT]
    assert granted(scheduler.release(tasks[0], 11.0)) == [wide]


def test_room_is_looked_for_again_when_actors_may_have_ended() -> None:
    scheduler = cluster({"CPU": 4}, reserve_after=10.0)
    actors = [ask(scheduler, Demand.of({"CPU": 2}, lasting=True))[0] for _ in range(2)]
    large, _ = ask(scheduler, Demand.of({"CPU": 4}), now=0.0)
    scheduler.advance(10.0)
    assert scheduler.next_deadline() == 20.0
    scheduler.release(actors[0], 11.0)
    small = [ask(scheduler, Demand.of({"CPU": 1}), now=12.0)[0] for _ in range(4)]
    assert granted(scheduler.release(actors[1], 13.0)) == small[2:]
    scheduler.advance(20.0)
    late, out = ask(scheduler, Demand.of({"CPU": 1}), now=21.0)

    assert not out.grants
    assert [granted(scheduler.release(lease, 22.0)) for lease in small] == [[], [], [], [large]]
    assert granted(scheduler.release(large, 23.0)) == [late]


# --- asking leases back -----------------------------------------------------------------
def test_the_fewest_idle_leases_that_make_room_are_asked_back() -> None:
    scheduler = cluster({"CPU": 2}, {"CPU": 4})
    small = [ask(scheduler, Demand.of({"CPU": 1}))[0] for _ in range(6)]
    wide, _ = ask(scheduler, Demand.of({"CPU": 2}))
    chosen = scheduler.revocation_candidates(wide, small)
    assert len(chosen) == 2

    scheduler.release(chosen[0], 1.0)
    assert granted(scheduler.release(chosen[1], 1.0)) == [wide]


def test_a_lease_that_turns_out_not_to_be_needed_is_not_asked_back() -> None:
    scheduler = cluster({"CPU": 3}, gpus=4)
    devices, _ = ask(scheduler, Demand.of({"CPU": 1, "GPU": 4}))
    plain, _ = ask(scheduler, Demand.of({"CPU": 2}))
    waiting, _ = ask(scheduler, Demand.of({"CPU": 2}))

    assert scheduler.revocation_candidates(waiting, [devices, plain]) == [plain]


def test_leases_that_make_no_room_are_not_asked_back() -> None:
    scheduler = cluster({"CPU": 8}, gpus=1)
    busy, _ = ask(scheduler, Demand.of({"GPU": 0.5}))
    idle, _ = ask(scheduler, Demand.of({"GPU": 0.5}))
    other, _ = ask(scheduler, Demand.of({"CPU": 1}))
    whole, _ = ask(scheduler, Demand.of({"GPU": 1}))

    assert scheduler.revocation_candidates(whole, [idle, other]) == []
    assert set(scheduler.revocation_candidates(whole, [idle, other, busy])) == {idle, busy}


# --- cost ------------------------------------------------------------------------------
@pytest.mark.parametrize(("nodes", "queued"), [(10, 0), (400, 0), (400, 5000)])
def test_a_decision_looks_at_few_pools_whatever_the_cluster_and_the_queue(
    nodes: int, queued: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    scheduler = cluster(*[{"CPU": 4}] * nodes, gpus=2)
    shapes = [Demand.of({"CPU": 1}), Demand.of({"GPU": 0.25}), Demand.of({"CPU": 1, "GPU": 1})]
    for demand in [*shapes, *[Demand.of({"CPU": 3, "FPGA": 1})] * queued]:
        ask(scheduler, demand)
    looks = 0
    real = ResourcePool.fits

    def counted(pool: ResourcePool, needs: Needs) -> bool:
        nonlocal looks
        looks += 1
        return real(pool, needs)

    monkeypatch.setattr(ResourcePool, "fits", counted)
    leases = [ask(scheduler, shapes[number % 3])[0] for number in range(12)]
    for lease in leases:
        scheduler.release(lease, 1.0)

    assert looks < 12 * 6


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
    scheduler.create_group(PlacementGroupState.of(b"group", [{"FPGA": 1}], "PACK"), 0.0)
    share = Demand.of({"FPGA": 0.5}, placement=BundleAffinity(b"group"))

    assert places(scheduler, share, 1) == [-1]
    assert places(scheduler, Demand.of({"FPGA": 1}, placement=BundleAffinity(b"group")), 1) == [0]
