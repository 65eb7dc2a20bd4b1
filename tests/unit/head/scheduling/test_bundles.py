from __future__ import annotations

import itertools

import pytest

from miniray.common.specs import Allocation, BundleAffinity
from miniray.head.scheduling.bundles import GroupPlacement, GroupStatus, plan
from miniray.head.scheduling.demands import Decisions, Demand, LeaseRequest
from miniray.head.scheduling.reasons import ReasonKind
from miniray.head.scheduling.resources import ResourcePool, node_pool
from miniray.head.scheduling.scheduler import ClusterScheduler

_numbers = itertools.count()


def node(number: int, cpus: float = 4, gpus: int = 0, **labels: str) -> ResourcePool:
    devices = {"GPU": [str(device) for device in range(gpus)]} if gpus else {}
    return node_pool(f"{number:032x}", {"CPU": cpus}, devices, labels)


def cluster(*nodes: ResourcePool, reserve_after: float = 10.0) -> ClusterScheduler:
    scheduler = ClusterScheduler(reserve_after=reserve_after)
    for each in nodes:
        scheduler.add_node(each, 0.0)
    return scheduler


def group(
    *bundles: dict[str, float],
    strategy: str = "PACK",
    id: bytes = b"group",
    selectors: list[dict[str, str]] | None = None,
) -> GroupPlacement:
    return GroupPlacement.of(id, bundles, strategy, selectors)


def where(state: GroupPlacement) -> list[int]:
    """Node number of each placed bundle, in order of their indexes."""
    return [int(state.allocations[index].node_id, 16) for index in sorted(state.allocations)]


def lease(
    scheduler: ClusterScheduler, resources: dict[str, float], index: int = -1, id: bytes = b"group"
) -> tuple[bytes, Decisions]:
    demand = Demand.of(resources, placement=BundleAffinity(id, index))
    lease_id = b"lease%d" % next(_numbers)
    return lease_id, scheduler.submit(LeaseRequest(lease_id, demand), 0.0)


def hold(
    scheduler: ClusterScheduler,
    resources: dict[str, float],
    now: float = 0.0,
    *,
    lasting: bool = False,
) -> bytes:
    lease_id = b"lease%d" % next(_numbers)
    scheduler.submit(LeaseRequest(lease_id, Demand.of(resources, lasting=lasting)), now)
    return lease_id


# --- strategies ------------------------------------------------------------------------
def test_pack_uses_one_node_if_one_has_room() -> None:
    state = group({"CPU": 2}, {"CPU": 2}, {"CPU": 2})
    cluster(node(0), node(1, cpus=8)).create_group(state, 0.0)

    assert where(state) == [1, 1, 1]
    assert state.status is GroupStatus.CREATED


def test_pack_uses_few_nodes_where_one_does_not_do() -> None:
    state = group(*[{"CPU": 2}] * 5)
    cluster(*[node(number, cpus=6) for number in range(5)]).create_group(state, 0.0)

    assert len(set(where(state))) == 2


def test_strict_pack_waits_if_no_node_has_room_for_all() -> None:
    scheduler = cluster(node(0), node(1))
    state = group({"CPU": 3}, {"CPU": 3}, strategy="STRICT_PACK")
    assert not scheduler.create_group(state, 0.0).placed
    assert scheduler.available_resources() == {"CPU": 8.0}
    reason = scheduler.explain_group(b"group")
    assert reason is not None
    assert reason.sentence() == "needs CPU 6; the largest node, 00000000, has 4"

    assert scheduler.add_node(node(2, cpus=6), 1.0).placed[0] == b"group"
    assert where(state) == [2, 2]


def test_spread_uses_all_nodes_and_doubles_up_only_where_it_must() -> None:
    state = group(*[{"CPU": 1}] * 4, strategy="SPREAD")
    cluster(node(0), node(1), node(2)).create_group(state, 0.0)

    assert sorted(where(state)) == [0, 0, 1, 2]


def test_strict_spread_waits_for_as_many_nodes_as_bundles() -> None:
    scheduler = cluster(node(0), node(1))
    state = group(*[{"CPU": 1}] * 3, strategy="STRICT_SPREAD")
    assert not scheduler.create_group(state, 0.0).placed
    reason = scheduler.explain_group(b"group")
    assert reason is not None
    assert reason.kind is ReasonKind.NEVER_TOGETHER

    scheduler.add_node(node(2), 1.0)
    assert sorted(where(state)) == [0, 1, 2]


def test_strict_spread_finds_the_only_assignment_there_is() -> None:
    nodes = [node(0, cpus=1, gpus=1), node(1, cpus=2, gpus=1), node(2, cpus=3)]
    state = group({"CPU": 1}, {"GPU": 1}, {"CPU": 2}, strategy="STRICT_SPREAD")
    scheduler = cluster(*nodes)
    scheduler.create_group(state, 0.0)
    assert len(set(where(state))) == 3

    scheduler.remove_group(b"group", 0.0)
    tight = group({"CPU": 1}, {"CPU": 2, "GPU": 1}, {"GPU": 1}, strategy="STRICT_SPREAD")
    scheduler.create_group(tight, 0.0)
    assert where(tight) == [2, 1, 0]


def test_each_bundle_goes_where_its_labels_say() -> None:
    state = group(
        {"CPU": 1}, {"CPU": 1}, strategy="PACK", selectors=[{"zone": "b"}, {"zone": "!b"}]
    )
    cluster(node(0, zone="a"), node(1, zone="b")).create_group(state, 0.0)

    assert where(state) == [1, 0]


@pytest.mark.parametrize("strategy", ["PACK", "SPREAD", "STRICT_PACK", "STRICT_SPREAD"])
def test_a_group_that_does_not_fit_takes_nothing(strategy: str) -> None:
    nodes = [node(0, gpus=1), node(1, gpus=1)]
    state = group({"GPU": 1}, {"GPU": 0.6}, {"GPU": 0.6}, strategy=strategy)

    assert plan(state, nodes, None) is None
    assert [each.free["CPU"] for each in nodes] == [40_000, 40_000]
    assert [each.devices["GPU"].free for each in nodes] == [[10_000], [10_000]]


@pytest.mark.parametrize(
    ("bundles", "strategy", "complaint"),
    [
        ([{"GPU": 1.5}], "PACK", "bundle 0: GPU 1.5 is not possible"),
        ([{"CPU": 1}, {}], "PACK", "bundle 1 reserves nothing"),
        ([], "PACK", "at least one bundle"),
        ([{"CPU": 1}], "NEAR", "'NEAR' is not one of PACK"),
    ],
)
def test_a_group_that_means_nothing_is_refused(
    bundles: list[dict[str, float]], strategy: str, complaint: str
) -> None:
    with pytest.raises(ValueError, match=complaint):
        GroupPlacement.of(b"group", bundles, strategy)


def test_label_selectors_are_one_per_bundle() -> None:
    with pytest.raises(ValueError, match="1 entries for 2 bundles"):
        group({"CPU": 1}, {"CPU": 1}, selectors=[{}])


# --- leases in groups -------------------------------------------------------------------
def test_two_half_leases_share_the_device_of_their_bundle() -> None:
    scheduler = cluster(node(0, gpus=4))
    scheduler.create_group(group({"GPU": 1}, {"GPU": 1}), 0.0)
    ids = [
        lease(scheduler, {"GPU": 0.5}, 1)[1].grants[0].allocation.device_ids("GPU")
        for _ in range(2)
    ]

    assert ids == [["1"], ["1"]]
    assert not lease(scheduler, {"GPU": 0.5}, 1)[1].grants


def test_a_bundle_of_half_a_device_keeps_to_that_device() -> None:
    scheduler = cluster(node(0, gpus=2))
    scheduler.create_group(group({"GPU": 0.5}), 0.0)
    outside = scheduler.submit(LeaseRequest(b"outside", Demand.of({"GPU": 1})), 0.0)
    inside = lease(scheduler, {"GPU": 0.5})[1].grants[0].allocation

    assert outside.grants[0].allocation.device_ids("GPU") == ["1"]
    assert inside.device_ids("GPU") == ["0"]
    assert inside.bundle == (b"group", 0)


def test_any_bundle_with_room_serves_a_lease_that_names_none() -> None:
    scheduler = cluster(node(0))
    scheduler.create_group(group({"CPU": 1}, {"CPU": 1}), 0.0)
    bundles = [lease(scheduler, {"CPU": 1})[1].grants[0].allocation.bundle for _ in range(2)]

    assert bundles == [(b"group", 0), (b"group", 1)]
    waiting, out = lease(scheduler, {"CPU": 1})
    assert not out.grants
    reason = scheduler.explain(waiting)
    assert reason is not None
    assert reason.sentence() == "needs CPU 1; bundle 0 on node 00000000 has 0 of 1 free"


def test_work_in_a_group_leaves_bundles_with_more_to_those_who_need_that() -> None:
    large = node_pool("0" * 32, {"CPU": 8, "tape": 1}, {"GPU": ["0", "1"]})
    scheduler = cluster(large)
    wanted = [{"CPU": 1, "GPU": 1}, {"CPU": 1, "tape": 1}, {"GPU": 1}, {"CPU": 1}, {"CPU": 1}]
    scheduler.create_group(group(*wanted), 0.0)

    def bundle_for(resources: dict[str, float]) -> int:
        [grant] = lease(scheduler, resources)[1].grants
        assert grant.allocation.bundle is not None
        return grant.allocation.bundle[1]

    assert [bundle_for({"CPU": 1}) for _ in range(3)] == [3, 4, 1]
    assert bundle_for({"GPU": 1}) == 2
    assert bundle_for({"CPU": 1, "GPU": 1}) == 0


def test_a_blocked_task_gives_its_cpu_to_its_bundle_only() -> None:
    scheduler = cluster(node(0, cpus=1))
    scheduler.create_group(group({"CPU": 1}), 0.0)
    blocked, _ = lease(scheduler, {"CPU": 1})
    outside = hold(scheduler, {"CPU": 1})
    inside, _ = lease(scheduler, {"CPU": 1})

    assert [grant.lease_id for grant in scheduler.release_cpu(blocked, 1.0).grants] == [inside]
    assert scheduler.waiting() == [outside]


def test_leases_wait_for_their_group_and_are_granted_with_it() -> None:
    scheduler = cluster(node(0))
    held = hold(scheduler, {"CPU": 4})
    scheduler.create_group(group({"CPU": 2}), 0.0)
    waiting, _ = lease(scheduler, {"CPU": 1}, 0)
    reason = scheduler.explain(waiting)
    assert reason is not None
    assert "is not placed: needs CPU 2; node 00000000 has 0 of 4 free" in reason.sentence()

    out = scheduler.release(held, 1.0)
    assert out.placed == [b"group"]
    assert [grant.lease_id for grant in out.grants] == [waiting]


@pytest.mark.parametrize(
    ("resources", "index", "id", "told"),
    [
        ({"CPU": 1}, 0, b"other", "placement group 6f746865-0 does not exist or was removed"),
        ({"CPU": 1}, 2, b"group", "placement group 67726f75-0 has 2 bundles, and none 2"),
        (
            {"CPU": 3},
            -1,
            b"group",
            "needs CPU 3; no bundle of placement group 67726f75-0 has as much",
        ),
        (
            {"CPU": 2, "GPU": 1},
            1,
            b"group",
            "needs CPU 2, GPU 1; bundle 1 of placement group 67726f75-0 has CPU 1",
        ),
    ],
)
def test_a_lease_that_its_group_can_never_hold_fails_and_says_what_is_missing(
    resources: dict[str, float], index: int, id: bytes, told: str
) -> None:
    scheduler = cluster(node(0))
    scheduler.create_group(group({"CPU": 2}, {"CPU": 1}), 0.0)

    assert lease(scheduler, resources, index, id)[1].failures[0].reason.sentence() == told


def test_who_needs_a_cpu_by_default_in_a_group_without_one_is_told_so() -> None:
    scheduler = cluster(node(0, gpus=1))
    scheduler.create_group(group({"GPU": 1}), 0.0)

    (failure,) = lease(scheduler, {"CPU": 1, "GPU": 1}, 0, b"group")[1].failures
    assert "bundle 0 of placement group 67726f75-0 has GPU 1 (tasks need 1 CPU" in (
        failure.reason.sentence()
    )


# --- the life of a group ---------------------------------------------------------------
def test_a_removed_group_ends_its_leases_and_returns_bundles_when_they_ended() -> None:
    scheduler = cluster(node(0, gpus=1))
    scheduler.create_group(group({"GPU": 1}, {"CPU": 1}), 0.0)
    running, _ = lease(scheduler, {"GPU": 0.5})
    waiting, _ = lease(scheduler, {"GPU": 1})
    other = hold(scheduler, {"GPU": 0.5})
    out = scheduler.remove_group(b"group", 1.0)

    assert out.to_end == [running]
    assert [failure.lease_id for failure in out.failures] == [waiting]
    assert scheduler.available_resources() == {"CPU": 4.0, "GPU": 0.0}
    assert scheduler.group(b"group") is None
    freed = scheduler.release(running, 2.0)
    assert [grant.lease_id for grant in freed.grants] == [other]


def test_a_group_that_waits_is_placed_when_another_is_removed() -> None:
    scheduler = cluster(node(0))
    scheduler.create_group(group({"CPU": 4}, id=b"first"), 0.0)
    states = [group({"CPU": 2}, id=b"waits%d" % number) for number in range(3)]
    for state in states:
        scheduler.create_group(state, 0.0)
    out = scheduler.remove_group(b"first", 1.0)

    assert out.placed == [b"waits0", b"waits1"]
    assert states[2].status is GroupStatus.PENDING


def test_bundles_of_a_dead_node_are_placed_again_and_the_others_stay() -> None:
    scheduler = cluster(node(0), node(1))
    state = group({"CPU": 2}, {"CPU": 2}, strategy="STRICT_SPREAD")
    scheduler.create_group(state, 0.0)
    lost, _ = lease(scheduler, {"CPU": 1}, 0)
    kept, _ = lease(scheduler, {"CPU": 1}, 1)
    out = scheduler.remove_node(f"{0:032x}", 1.0)
    assert out.lost == [lost]
    assert state.status is GroupStatus.RESCHEDULING
    again, _ = lease(scheduler, {"CPU": 1}, 0)

    out = scheduler.add_node(node(2), 2.0)
    assert out.placed == [state.group_id]
    assert [grant.lease_id for grant in out.grants] == [again]
    assert where(state) == [2, 1]
    assert state.status is GroupStatus.CREATED
    assert scheduler.lease(kept) is not None


def test_bundles_reported_after_a_restart_stay_where_they_are() -> None:
    state = group({"CPU": 2}, {"GPU": 1})
    before = cluster(node(0), node(1, gpus=1))
    before.create_group(state, 0.0)
    running, out = lease(before, {"GPU": 0.5}, 1)

    after = ClusterScheduler()
    restored = group({"CPU": 2}, {"GPU": 1})
    restored.awaited = dict(state.allocations)
    after.create_group(restored, 0.0)
    after.add_node(node(2, gpus=4), 0.0)
    assert not restored.allocations
    for each in (node(0), node(1, gpus=1)):
        after.add_node(
            each,
            1.0,
            bundles=[
                ((b"group", index), held)
                for index, held in state.allocations.items()
                if held.node_id == each.node_id
            ],
            leases=[
                (running, grant.allocation)
                for grant in out.grants
                if grant.allocation.node_id == each.node_id
            ],
        )
    assert restored.allocations == state.allocations
    assert restored.status is GroupStatus.CREATED
    assert not lease(after, {"GPU": 1}, 1)[1].grants
    assert after.release(running, 2.0).grants


def test_awaited_bundles_of_a_node_that_never_reports_are_placed_elsewhere() -> None:
    scheduler = cluster(node(1))
    state = group({"CPU": 1})
    state.awaited = {0: Allocation(f"{0:032x}", (("CPU", 10_000),))}
    scheduler.create_group(state, 0.0)
    assert not state.allocations

    assert scheduler.remove_node(f"{0:032x}", 15.0).placed
    assert where(state) == [1]


def test_groups_of_a_lost_node_wait_in_the_order_in_which_they_were_made() -> None:
    scheduler = cluster(node(0, cpus=3))
    held = hold(scheduler, {"CPU": 2})
    older, younger = group({"CPU": 2}, id=b"older"), group({"CPU": 1}, id=b"younger")
    scheduler.create_group(older, 0.0)
    scheduler.create_group(younger, 0.0)
    scheduler.release(held, 1.0)
    assert (where(older), where(younger)) == ([0], [0])
    scheduler.remove_node(f"{0:032x}", 2.0)

    assert scheduler.add_node(node(1, cpus=2), 3.0).placed[0] == older.group_id
    assert younger.status is GroupStatus.RESCHEDULING


def test_a_large_group_that_waited_long_is_not_starved_by_leases() -> None:
    scheduler = cluster(node(0, cpus=2), node(1, cpus=2), reserve_after=10.0)
    held = [hold(scheduler, {"CPU": 1}) for _ in range(4)]
    state = group({"CPU": 2}, {"CPU": 2}, strategy="STRICT_SPREAD")
    scheduler.create_group(state, 0.0)
    late = [hold(scheduler, {"CPU": 1}, now=1.0) for _ in range(4)]
    assert scheduler.next_deadline() == 10.0
    scheduler.advance(10.0)
    outs = [scheduler.release(lease_id, 11.0) for lease_id in held]

    assert not any(out.grants for out in outs)
    assert outs[-1].placed
    out = scheduler.remove_group(b"group", 12.0)
    assert [grant.lease_id for grant in out.grants] == late


def test_devices_beside_an_actor_do_not_stand_idle_for_a_group_that_needs_the_whole_node() -> None:
    scheduler = cluster(node(0, cpus=16, gpus=8), reserve_after=10.0)
    hold(scheduler, {"GPU": 0.6}, lasting=True)
    state = group(*[{"GPU": 1}] * 8, strategy="STRICT_PACK")
    scheduler.create_group(state, 0.0)
    scheduler.advance(10.0)

    held = [hold(scheduler, {"GPU": 1}) for _ in range(8)]
    assert [scheduler.lease(lease_id) is not None for lease_id in held] == [True] * 7 + [False]


def test_devices_out_of_service_are_out_of_service_in_bundles_too() -> None:
    scheduler = cluster(node(0, gpus=1))
    scheduler.create_group(group({"GPU": 1}), 0.0)
    scheduler.set_device_in_service(f"{0:032x}", "GPU", "0", False, 0.0)
    waiting, out = lease(scheduler, {"GPU": 0.5})
    assert not out.grants

    back = scheduler.set_device_in_service(f"{0:032x}", "GPU", "0", True, 1.0)
    assert [grant.lease_id for grant in back.grants] == [waiting]


NEVER = "the 3 bundles of {} find no place on the 2 nodes of the cluster, even if all were idle"


@pytest.mark.parametrize(
    ("strategy", "bundles", "sentence"),
    [
        (
            "STRICT_SPREAD",
            [{"CPU": 1}] * 3,
            NEVER.format("STRICT_SPREAD"),
        ),
        (
            "PACK",
            [{"CPU": 3}, {"CPU": 3}, {"CPU": 2}],
            NEVER.format("PACK"),
        ),
        (
            "SPREAD",
            [{"CPU": 3}] * 3,
            "the 3 bundles need CPU 9 in all; the nodes of the cluster have 8",
        ),
        (
            "STRICT_PACK",
            [{"CPU": 3}] * 2,
            "needs CPU 6; the largest node, 00000000, has 4",
        ),
    ],
)
def test_a_group_that_the_cluster_can_never_hold_says_so(
    strategy: str, bundles: list[dict[str, float]], sentence: str
) -> None:
    scheduler = cluster(node(0), node(1))
    hold(scheduler, {"CPU": 4})
    scheduler.create_group(group(*bundles, strategy=strategy), 0.0)
    reason = scheduler.explain_group(b"group")

    assert reason is not None
    assert reason.infeasible
    assert reason.sentence() == sentence


def test_a_group_that_waits_for_others_to_end_is_not_called_infeasible() -> None:
    scheduler = cluster(node(0), node(1))
    hold(scheduler, {"CPU": 2})
    scheduler.create_group(group({"CPU": 3}, {"CPU": 3}, strategy="STRICT_SPREAD"), 0.0)
    reason = scheduler.explain_group(b"group")

    assert reason is not None
    assert not reason.infeasible
