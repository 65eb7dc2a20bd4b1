"""In which order the scheduler serves what waits, and what it sets aside or asks back for that."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from scheduling_harness import ask, cluster, granted, join, node_id, places

from miniray.common.amounts import UNIT
from miniray.common.specs import NodeAffinity
from miniray.head.scheduling.demands import Decisions, Demand, LeaseRequest
from miniray.head.scheduling.reasons import ReasonKind
from miniray.head.scheduling.resources import ResourcePool, node_pool
from miniray.head.scheduling.scheduler import ClusterScheduler

if TYPE_CHECKING:
    from miniray.common.amounts import Needs


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


def test_a_lease_that_is_emptied_gives_its_device_to_who_waits_and_ends_later() -> None:
    scheduler = cluster({"CPU": 2}, gpus=1)
    lease, _ = ask(scheduler, Demand.of({"CPU": 1, "GPU": 1}))
    following, out = ask(scheduler, Demand.of({"CPU": 1, "GPU": 1}))
    assert not out.grants
    scheduler.release_cpu(lease, 1.0)
    assert granted(scheduler.empty_lease(lease, 2.0)) == [following]
    assert not granted(scheduler.empty_lease(lease, 3.0))
    assert scheduler.available_resources() == {"CPU": 1.0, "GPU": 0.0}
    assert scheduler.leases_on(next(iter(scheduler.nodes))) == {lease, following}
    for each in (lease, following):
        scheduler.release(each, 4.0)
    assert scheduler.available_resources() == {"CPU": 2.0, "GPU": 1.0}


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


def test_the_next_deadline_comes_no_later_than_the_first_who_will_have_waited_long() -> None:
    scheduler = cluster({"CPU": 1}, reserve_after=10.0)
    ask(scheduler, Demand.of({"CPU": 1}))
    assert scheduler.next_deadline() is None
    first, *_ = [
        ask(scheduler, Demand.of({"CPU": 1 - number / 10}), now=1.0 + number)[0]
        for number in range(3)
    ]
    assert scheduler.next_deadline() == 11.0
    scheduler.cancel(first, 5.0)
    scheduler.advance(11.0)
    assert scheduler.next_deadline() == 12.0
    scheduler.advance(12.0)
    assert scheduler.next_deadline() == 13.0


def test_room_is_set_aside_for_a_demand_that_a_new_node_makes_feasible() -> None:
    scheduler = cluster({"CPU": 1}, reserve_after=10.0)
    large, _ = ask(scheduler, Demand.of({"CPU": 3}))
    scheduler.advance(11.0)
    assert granted(join(scheduler, 1, {"CPU": 4}, now=12.0)) == [large]
    following, _ = ask(scheduler, Demand.of({"CPU": 3}), now=12.0)
    ask(scheduler, Demand.of({"CPU": 0.5}), now=12.0)
    assert granted(scheduler.release(large, 13.0)) == [following]


def test_room_is_set_aside_for_a_demand_that_a_device_back_in_service_makes_feasible() -> None:
    scheduler = cluster({"CPU": 1}, gpus=2, reserve_after=10.0)
    scheduler.set_device_in_service(node_id(0), "GPU", "1", False, 0.0, "in quarantine")
    held, _ = ask(scheduler, Demand.of({"GPU": 1}))
    both, _ = ask(scheduler, Demand.of({"GPU": 2}))
    scheduler.advance(10.0)
    scheduler.set_device_in_service(node_id(0), "GPU", "1", True, 20.0)
    ask(scheduler, Demand.of({"GPU": 1}), now=21.0)
    assert granted(scheduler.release(held, 22.0)) == [both]


def test_a_demand_that_prefers_a_node_uses_others_while_that_one_is_drained() -> None:
    scheduler = cluster({"CPU": 1}, {"CPU": 1})
    held = [ask(scheduler, Demand.of({"CPU": 1}))[0] for _ in range(2)]
    wanted = Demand.of({"CPU": 1}, placement=NodeAffinity(node_id(0), soft=True))
    first, _ = ask(scheduler, wanted)
    assert not granted(scheduler.release(held[1], 1.0))
    assert granted(scheduler.drain_node(node_id(0), 2.0)) == [first]
    second, _ = ask(scheduler, wanted)
    scheduler.drain_node(node_id(0), 3.0, draining=False)
    assert not granted(scheduler.release(first, 4.0))
    assert granted(scheduler.release(held[0], 5.0)) == [second]
