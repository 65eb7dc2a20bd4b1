"""Placement groups: bundles, readiness, use, removal."""

from __future__ import annotations

import os
import threading
from typing import TYPE_CHECKING, Any, cast

import pytest
from cluster_helpers import is_alive, wait_for_file, wait_until

import miniray
from miniray.common.runtime import current_runtime
from miniray.exceptions import (
    ActorDiedError,
    GetTimeoutError,
    TaskPlacementGroupRemoved,
    TaskUnschedulableError,
    WorkerCrashedError,
)
from miniray.util.placement_group import (
    PlacementGroup,
    get_current_placement_group,
    get_placement_group,
    placement_group,
    placement_group_table,
    remove_placement_group,
)
from miniray.util.scheduling_strategies import (
    NodeAffinitySchedulingStrategy,
    PlacementGroupSchedulingStrategy,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from miniray.client.cluster_runtime import ClusterRuntime

    Make = Callable[..., PlacementGroup]

pytestmark = pytest.mark.usefixtures("cluster")

CLUSTER = {"num_cpus": 4, "num_gpus": 2, "resources": {"disk": 2}}


@pytest.fixture
def make() -> Iterator[Callable[..., PlacementGroup]]:
    """Make groups that are removed when the test is done."""
    groups: list[PlacementGroup] = []

    def make_group(*args: Any, **kwargs: Any) -> PlacementGroup:
        groups.append(placement_group(*args, **kwargs))
        return groups[-1]

    yield make_group
    for group in groups:
        remove_placement_group(group)
    wait_until(lambda: miniray.available_resources().get("CPU") == 4)


def in_group(group: PlacementGroup, index: int = -1, **more: Any) -> Any:
    return PlacementGroupSchedulingStrategy(group, placement_group_bundle_index=index, **more)


@miniray.remote(num_cpus=1)
def assigned() -> dict[str, Any]:
    return miniray.get_runtime_context().get_assigned_resources()


@miniray.remote(num_cpus=1)
class Worker:
    def pid(self) -> int:
        return os.getpid()

    def wait_for(self, path: Path) -> None:
        wait_for_file(path)


def test_a_group_that_fits_becomes_ready(make: Make) -> None:
    group = make([{"CPU": 1}, {"CPU": 1, "GPU": 1}], strategy="PACK")
    miniray.get(group.ready(), timeout=30)
    assert group.wait(timeout_seconds=30)
    assert group.bundle_count == 2
    assert [dict(bundle) for bundle in group.bundle_specs] == [{"CPU": 1}, {"CPU": 1, "GPU": 1}]


@pytest.mark.parametrize("strategy", ["PACK", "SPREAD", "STRICT_PACK"])
def test_each_strategy_places_on_one_node_what_fits(make: Make, strategy: str) -> None:
    assert make([{"CPU": 1}] * 3, strategy=strategy).wait(30)


def test_strict_spread_waits_for_more_nodes(make: Make) -> None:
    group = make([{"CPU": 1}] * 2, strategy="STRICT_SPREAD")
    assert not group.wait(timeout_seconds=0.3)


def test_a_group_reserves_what_it_asks_for(make: Make) -> None:
    group = make([{"CPU": 2, "disk": 1}, {"GPU": 1}])
    assert group.wait(30)
    wait_until(lambda: miniray.available_resources().get("CPU") == 2)
    available = miniray.available_resources()
    assert available["GPU"] == 1
    assert available["disk"] == 1


def test_all_bundles_are_reserved_or_none(make: Make) -> None:
    group = make([{"CPU": 3}, {"CPU": 3}])
    with pytest.raises(GetTimeoutError):
        miniray.get(group.ready(), timeout=0.3)
    assert miniray.available_resources()["CPU"] == 4


def test_a_waiting_group_is_placed_when_another_is_removed(make: Make) -> None:
    first = make([{"CPU": 4}])
    assert first.wait(30)
    second = make([{"CPU": 4}])
    assert not second.wait(timeout_seconds=0.2)
    remove_placement_group(first)
    assert second.wait(30)


def test_a_task_in_a_group_runs_on_what_the_group_reserved(make: Make) -> None:
    group = make([{"CPU": 4}])
    assert group.wait(30)
    outside = assigned.remote()
    inside = assigned.options(scheduling_strategy=in_group(group)).remote()
    assert miniray.get(inside, timeout=30)["CPU"] == 1
    assert miniray.wait([outside], timeout=0.3) == ([], [outside])
    remove_placement_group(group)
    miniray.get(outside, timeout=30)


def test_a_group_can_be_given_as_an_option(make: Make) -> None:
    @miniray.remote(num_cpus=1)
    def group_id() -> Any:
        current = get_current_placement_group()
        return None if current is None else current.id.hex()

    group = make([{"CPU": 1}, {"CPU": 1}])
    assert group.wait(30)
    task = group_id.options(placement_group=group, placement_group_bundle_index=1)
    assert miniray.get(task.remote(), timeout=30) == group.id.hex()
    mixed = make([{"CPU": 1}, {"CPU": 1, "GPU": 1}])
    with_gpu = group_id.options(num_gpus=1, placement_group=mixed, placement_group_bundle_index=1)
    assert miniray.get(with_gpu.remote(), timeout=30) == mixed.id.hex()
    with pytest.raises(ValueError, match="bundle 0"):
        with_gpu.options(placement_group_bundle_index=0).remote()


def test_a_bundle_serves_no_more_than_it_has(make: Make, tmp_path: Path) -> None:
    group = make([{"CPU": 1}, {"CPU": 1}])
    strategy = in_group(group, 0)
    first = Worker.options(scheduling_strategy=strategy).remote()
    second = Worker.options(scheduling_strategy=strategy).remote()
    other = Worker.options(scheduling_strategy=in_group(group, 1)).remote()
    miniray.get([first.pid.remote(), other.pid.remote()], timeout=30)
    waiting = second.pid.remote()
    assert miniray.wait([waiting], timeout=0.3) == ([], [waiting])
    miniray.kill(first)
    assert miniray.get(waiting, timeout=30) > 0


def test_removing_a_group_ends_what_runs_in_it(make: Make, tmp_path: Path) -> None:
    group = make([{"CPU": 1}])
    worker = Worker.options(scheduling_strategy=in_group(group, 0)).remote()
    pid = miniray.get(worker.pid.remote(), timeout=30)
    pending = worker.wait_for.remote(tmp_path / "never")
    remove_placement_group(group)
    wait_until(lambda: not is_alive(pid))
    with pytest.raises(ActorDiedError, match="placement group was removed"):
        miniray.get(pending, timeout=30)


def test_a_task_is_told_that_it_ended_with_its_group(make: Make, tmp_path: Path) -> None:
    @miniray.remote(max_retries=0)
    def run(started: Path) -> None:
        started.touch()
        threading.Event().wait()

    group = make([{"CPU": 1}])
    running = run.options(scheduling_strategy=in_group(group)).remote(tmp_path / "started")
    wait_for_file(tmp_path / "started")
    remove_placement_group(group)
    with pytest.raises(WorkerCrashedError, match="placement group that it ran in") as caught:
        miniray.get(running, timeout=30)
    assert "memory" not in str(caught.value)


def test_a_task_that_waits_in_a_removed_group_fails(make: Make) -> None:
    group = make([{"CPU": 1}])
    worker = Worker.options(scheduling_strategy=in_group(group)).remote()
    miniray.get(worker.pid.remote(), timeout=30)
    waiting = assigned.options(scheduling_strategy=in_group(group)).remote()
    assert miniray.wait([waiting], timeout=0.3)[0] == []
    remove_placement_group(group)
    with pytest.raises(TaskPlacementGroupRemoved, match=group.id.hex()):
        miniray.get(waiting, timeout=30)


def test_the_gpus_of_a_bundle_are_seen_by_what_runs_in_it(make: Make) -> None:
    @miniray.remote(num_cpus=0, num_gpus=1)
    class Seer:
        def see(self) -> tuple[list[int], str]:
            return miniray.get_gpu_ids(), os.environ["CUDA_VISIBLE_DEVICES"]

    group = make([{"GPU": 1}, {"GPU": 1}])
    seers = [Seer.options(scheduling_strategy=in_group(group, i)).remote() for i in range(2)]
    seen = miniray.get([seer.see.remote() for seer in seers], timeout=30)
    assert sorted(seen) == [([0], "0"), ([1], "1")]


def test_children_of_a_task_stay_in_its_group_only_if_it_is_captured(make: Make) -> None:
    @miniray.remote(num_cpus=1)
    def parent_group() -> Any:
        def group_of_child() -> Any:
            current = get_current_placement_group()
            return None if current is None else current.id.hex()

        mine = group_of_child()
        child = miniray.remote(num_cpus=0)(group_of_child)
        return mine, miniray.get(child.remote())

    group = make([{"CPU": 2}])
    captured = in_group(group, placement_group_capture_child_tasks=True)
    mine, child = miniray.get(
        parent_group.options(scheduling_strategy=captured).remote(), timeout=30
    )
    assert mine == child == group.id.hex()
    _, child = miniray.get(
        parent_group.options(scheduling_strategy=in_group(group)).remote(), timeout=30
    )
    assert child is None
    assert get_current_placement_group() is None


def test_a_child_that_names_no_group_leaves_the_one_that_captures_it(make: Make) -> None:
    @miniray.remote(num_cpus=1)
    def parent() -> list[Any]:
        def where() -> Any:
            return get_current_placement_group()

        child = miniray.remote(num_cpus=0)(where)
        groups: tuple[Any, ...] = (None, "default")
        return miniray.get([child.options(placement_group=group).remote() for group in groups])

    group = make([{"CPU": 2}])
    captured = in_group(group, placement_group_capture_child_tasks=True)
    found = miniray.get(parent.options(scheduling_strategy=captured).remote(), timeout=30)
    assert found == [None, group]


def group_of_child(**options: Any) -> Any:
    """The group of a child that inherits it; both run in workers that had other tasks before."""
    child = miniray.remote(**options)(get_current_placement_group)
    return miniray.get(child.remote())


def test_children_of_a_worker_do_not_go_into_the_group_of_an_earlier_task(make: Make) -> None:
    assert make([{"CPU": 2}]).wait(30)  # on the rest, the same workers run all of it
    # Leases with custom resources go back at once: the workers outlive the group.
    options: dict[str, Any] = {"num_cpus": 1, "resources": {"disk": 0.1}, "max_calls": 0}
    parent = miniray.remote(**options)(group_of_child)
    for _ in range(4):
        group = make([{"CPU": 2, "disk": 1}])
        captured = in_group(group, placement_group_capture_child_tasks=True)
        task = parent.options(scheduling_strategy=captured)
        assert miniray.get(task.remote(**options), timeout=30) == group
        remove_placement_group(group)


@pytest.mark.parametrize("needs", [0, 1])  # that has room outside the group, or waits for ever
def test_a_child_is_captured_though_its_worker_had_tasks_without_a_group(
    make: Make, needs: int
) -> None:
    assert make([{"CPU": 2}]).wait(30)  # on the rest, the same workers run all of it
    parent = miniray.remote(num_cpus=1)(group_of_child)
    for _ in range(4):
        assert miniray.get(parent.remote(num_cpus=needs), timeout=30) is None
    group = make([{"CPU": 2}])
    captured = in_group(group, placement_group_capture_child_tasks=True)
    task = parent.options(scheduling_strategy=captured)
    for _ in range(4):
        assert miniray.get(task.remote(num_cpus=needs), timeout=30) == group


@pytest.mark.engine("miniray")
def test_a_task_that_is_sooner_than_word_of_its_lease_runs_in_its_own_group(make: Make) -> None:
    """The word comes from the worker's daemon, the task straight from its owner."""

    @miniray.remote(num_cpus=1)
    def delay_word_of_next_lease() -> int:
        runtime = cast("ClusterRuntime", current_runtime())
        told = runtime.on_topic["lease"]

        def later(assignment: dict[str, Any]) -> None:
            runtime.on_topic["lease"] = told
            runtime.loop.call_later(0.3, lambda: told(assignment))

        runtime.on_topic["lease"] = later
        return os.getpid()

    @miniray.remote(num_cpus=1)
    def where() -> Any:
        return os.getpid(), get_current_placement_group()

    group = make([{"CPU": 1}])
    assert group.wait(30)
    pid = miniray.get(delay_word_of_next_lease.remote())
    wait_until(lambda: miniray.available_resources().get("CPU") == 3)  # its worker is idle
    found = miniray.get(where.options(scheduling_strategy=in_group(group)).remote(), timeout=30)
    assert found == (pid, group)


def test_a_name_that_is_taken_is_refused_at_once(make: Make) -> None:
    group = make([{"CPU": 1}], name="mine")
    with pytest.raises(ValueError, match="'mine' is taken"):
        placement_group([{"CPU": 1}], name="mine")
    assert get_placement_group("mine") == miniray.get(group.ready(), timeout=30)
    states = [table["state"] for table in placement_group_table().values()]
    assert "PENDING" not in states


def test_a_named_group_is_found_by_its_name(make: Make) -> None:
    group = make([{"CPU": 1}], name="mine")
    assert group.wait(30)
    found = get_placement_group("mine")
    assert found == group
    assert found.id.hex() == group.id.hex()
    with pytest.raises(ValueError, match="other"):
        get_placement_group("other")


def test_the_table_tells_what_a_group_is_and_how_it_stands(make: Make) -> None:
    group = make([{"CPU": 1}, {"GPU": 1}], strategy="SPREAD", name="told")
    assert group.wait(30)
    table = placement_group_table(group)
    assert table["name"] == "told"
    assert table["strategy"] == "SPREAD"
    assert table["state"] == "CREATED"
    assert table["bundles"] == {0: {"CPU": 1.0}, 1: {"GPU": 1.0}}
    assert group.id.hex() in placement_group_table()
    remove_placement_group(group)
    assert placement_group_table(group)["state"] == "REMOVED"


def test_what_is_asked_after_a_removal_finds_nothing_of_the_group(make: Make) -> None:
    for number in range(20):
        group = make([{"CPU": 4}], name="again" if number % 2 else "")
        assert group.wait(30)
        remove_placement_group(group)
        assert miniray.available_resources()["CPU"] == 4


@pytest.mark.parametrize("options", [{"lifetime": "detached"}, {"name": "told"}])
def test_a_group_that_others_may_know_is_removed_when_that_is_answered(
    make: Make, options: dict[str, Any]
) -> None:
    @miniray.remote(num_cpus=0)
    def state_of(group: PlacementGroup) -> Any:
        return placement_group_table(group)["state"]

    @miniray.remote(num_cpus=0)
    def removed(group: PlacementGroup) -> None:
        remove_placement_group(group)

    known = make([{"CPU": 1}], **options)
    assert known.wait(30)
    remove_placement_group(known)
    assert miniray.get(state_of.remote(known), timeout=30) == "REMOVED"
    of_another = make([{"CPU": 1}])
    miniray.get(removed.remote(of_another), timeout=30)
    assert placement_group_table(of_another)["state"] == "REMOVED"


def test_a_group_can_be_passed_to_tasks(make: Make) -> None:
    @miniray.remote(num_cpus=0)
    def run_in(group: PlacementGroup) -> Any:
        return miniray.get(assigned.options(scheduling_strategy=in_group(group)).remote())

    group = make([{"CPU": 1}])
    assert miniray.get(run_in.remote(group), timeout=30)["CPU"] == 1


@pytest.mark.parametrize(
    ("bundles", "strategy"),
    [
        ([], "PACK"),
        ([{}], "PACK"),
        ([{"CPU": 0}], "PACK"),
        ([{"CPU": 1}], "NEAR"),
        ("CPU", "PACK"),
    ],
)
def test_nonsense_is_refused(bundles: Any, strategy: str) -> None:
    with pytest.raises((ValueError, TypeError)):
        placement_group(bundles, strategy=strategy)


def test_a_negative_amount_is_refused() -> None:
    with pytest.raises(ValueError, match="CPU"):
        placement_group([{"CPU": -1}])


def test_a_demand_that_no_bundle_can_serve_is_refused(make: Make) -> None:
    group = make([{"CPU": 1}])
    assert group.wait(30)
    with pytest.raises(ValueError, match="bundle"):
        assigned.options(num_cpus=2, scheduling_strategy=in_group(group)).remote()
    with pytest.raises(ValueError, match="index"):
        assigned.options(scheduling_strategy=in_group(group, 5)).remote()


def test_an_affinity_to_a_node_runs_there() -> None:
    @miniray.remote
    def node() -> str:
        return miniray.get_runtime_context().get_node_id()

    here = miniray.get_runtime_context().get_node_id()
    strategy = NodeAffinitySchedulingStrategy(node_id=here, soft=False)
    assert miniray.get(node.options(scheduling_strategy=strategy).remote()) == here
    assert miniray.get(node.options(scheduling_strategy="SPREAD").remote()) == here


def test_an_affinity_to_a_node_that_does_not_exist_fails_unless_it_is_soft() -> None:
    missing = "a" * len(miniray.get_runtime_context().get_node_id())
    hard = NodeAffinitySchedulingStrategy(node_id=missing, soft=False)
    soft = NodeAffinitySchedulingStrategy(node_id=missing, soft=True)
    assert miniray.get(assigned.options(scheduling_strategy=soft).remote())["CPU"] == 1
    with pytest.raises(TaskUnschedulableError, match=missing[:8]):
        miniray.get(assigned.options(scheduling_strategy=hard).remote(), timeout=30)
