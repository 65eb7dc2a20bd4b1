"""TPU slices on logical chips: two slices of two hosts, and a host by itself."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

import pytest
from cluster_helpers import wait_until

import miniray as ray
from miniray.cluster_utils import Cluster
from miniray.util import tpu
from miniray.util.placement_group import placement_group, remove_placement_group
from miniray.util.scheduling_strategies import PlacementGroupSchedulingStrategy
from miniray.util.tpu import SlicePlacementGroup, slice_placement_group

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

# Five nodes start before the first test, beside other tests.
pytestmark = pytest.mark.timeout(180)

SLICES = ("slice-a", "slice-b")
VARIABLES = ("TPU_VISIBLE_CHIPS", "TPU_CHIPS_PER_HOST_BOUNDS", "TPU_HOST_BOUNDS")


def host_variables(slice_name: str, kind: str, topology: str, worker: int) -> dict[str, str]:
    """What GKE sets in the pod of one host of a slice."""
    return {
        "TPU_NAME": slice_name,
        "TPU_ACCELERATOR_TYPE": kind,
        "TPU_TOPOLOGY": topology,
        "TPU_WORKER_ID": str(worker),
    }


@pytest.fixture(scope="module", autouse=True)
def nodes(session_root: Path) -> Iterator[Cluster]:
    """The head's node is the host by itself."""
    with pytest.MonkeyPatch.context() as patch, Cluster() as cluster:
        for variable in (*host_variables("", "", "", 0), *VARIABLES):
            patch.delenv(variable, raising=False)
        cluster.add_node(
            num_cpus=8,
            resources={"TPU": 8, "alone": 10},
            env_vars=host_variables("slice-c", "v6e-8", "2x4", 0),
        )
        for name in SLICES:
            for worker in range(2):
                cluster.add_node(
                    num_cpus=8,
                    resources={"TPU": 4},
                    env_vars=host_variables(name, "v4-16", "2x2x2", worker),
                )
        cluster.connect()
        cluster.wait_for_nodes()
        yield cluster


@pytest.fixture(autouse=True)
def _everything_is_given_back() -> Iterator[None]:
    yield
    wait_until(lambda: ray.available_resources() == ray.cluster_resources())


def slices_of(group: Any) -> list[str | None]:
    """Names of the slices that a group's bundles are on."""
    by_id = {node["NodeID"]: node for node in ray.nodes()}
    table = ray.util.placement_group_table(group)
    return [
        tpu.get_tpu_slice_name_from_node(by_id[node_id])
        for node_id in table["bundles_to_node_id"].values()
    ]


def hosts_of(group: Any) -> list[str]:
    return list(ray.util.placement_group_table(group)["bundles_to_node_id"].values())


@ray.remote
def about_host() -> tuple[str | None, int | None, int]:
    return (
        tpu.get_current_pod_name(),
        tpu.get_current_pod_worker_count(),
        tpu.get_num_tpu_chips_on_node(),
    )


@ray.remote(num_cpus=0)
class Holder:
    def variables(self) -> dict[str, str]:
        return {name: os.environ[name] for name in VARIABLES if name in os.environ}


# --- what nodes know -------------------------------------------------------------------------


def test_hosts_announce_their_slice_as_ray_does() -> None:
    total = ray.cluster_resources()
    assert (total["TPU"], total["TPU-v4-16-head"], total["TPU-v6e-8-head"]) == (24, 2, 1)
    assert (total["slice-a"], total["slice-b"], total["slice-c"]) == (2, 2, 1)
    members = tpu.get_tpu_nodes_for_slice("slice-a")
    assert sorted(node["Labels"]["ray.io/tpu-worker-id"] for node in members) == ["0", "1"]
    for node in members:
        assert node["Labels"]["ray.io/tpu-topology"] == "2x2x2"
        assert node["Labels"]["ray.io/tpu-pod-type"] == "v4-16"
        assert node["Labels"]["ray.io/accelerator-type"] == "TPU-V4"


def test_a_program_starts_on_host_0_and_fans_out_over_its_slice() -> None:
    """The way of Ray's documentation: by the head's resource and the slice's name."""

    @ray.remote(resources={"TPU-v4-16-head": 1})
    def on_head() -> list[tuple[str | None, int | None, int]]:
        name, count = tpu.get_current_pod_name(), tpu.get_current_pod_worker_count()
        assert name is not None
        assert count is not None
        each = about_host.options(resources={"TPU": 4, name: 1})
        return ray.get([each.remote() for _ in range(count)])

    found = ray.get(on_head.remote(), timeout=60)
    assert len(set(found)) == 1
    assert found[0] in {(name, 2, 4) for name in SLICES}


def test_slices_are_counted_whole_and_idle() -> None:
    assert tpu.get_num_tpu_slices("2x2x2", "TPU-V4") == 2
    assert tpu.get_num_ready_tpu_slices("2x2x2", "TPU-V4") == 2
    assert tpu.get_num_tpu_slices("2x4", "v6e") == 1
    assert tpu.get_num_tpu_slices("4x4", "v6e") == 0
    holder = Holder.options(resources={"TPU": 1, "slice-b": 0.1}).remote()
    ray.get(holder.variables.remote(), timeout=30)
    assert tpu.get_num_tpu_slices("2x2x2", "TPU-V4") == 2
    assert tpu.get_num_ready_tpu_slices("2x2x2", "TPU-V4") == 1


# --- a slice as one --------------------------------------------------------------------------


def test_all_bundles_are_on_one_slice_and_the_next_ones_on_the_other() -> None:
    first = SlicePlacementGroup("2x2x2", "v4")
    second = slice_placement_group("2x2x2", "TPU-V4")
    for each in (first, second):
        assert (each.num_hosts, each.num_bundles, each.chips_per_host) == (2, 2, 4)
        assert each.bundle_resources == {"CPU": 1, "TPU": 4}
        assert each.slice_placement_group is not None
        assert each.slice_placement_group.wait(30)
        assert len(set(hosts_of(each.slice_placement_group))) == 2
        assert ray.available_resources().get("TPU-v4-16-head") in (1, None)
        [name] = {selector["ray.io/tpu-slice-name"] for selector in each.bundle_label_selector}
        assert slices_of(each.slice_placement_group) == [name, name]
    assert first.bundle_label_selector != second.bundle_label_selector
    with pytest.raises(TimeoutError, match=r"of such slices 2 are there, 2 .* all hosts, 0 idle"):
        SlicePlacementGroup("2x2x2", "v4", head_reservation_timeout_s=0.2)
    first.release_head_pgs()  # the first bundle holds the head: nothing to give back
    assert first.head_placement_groups == []
    second.shutdown()
    second.shutdown()
    assert second.slice_placement_group is None
    third = SlicePlacementGroup("2x2x2", "v4", head_reservation_timeout_s=30)
    assert third.bundle_label_selector == second.bundle_label_selector
    for each in (first, third):
        each.shutdown()


def test_the_first_bundle_is_on_host_0_and_nobody_else_gets_the_head() -> None:
    both = SlicePlacementGroup("2x2x2", "v4", num_slices=2)
    assert both.placement_group is not None
    by_id = {node["NodeID"]: node for node in ray.nodes()}
    workers = [
        by_id[node_id]["Labels"]["ray.io/tpu-worker-id"]
        for node_id in hosts_of(both.placement_group)
    ]
    assert workers == ["0", "1", "0", "1"]
    with pytest.raises(TimeoutError, match="1 TPU slice v4-16 could not be reserved within"):
        tpu.reserve_tpu_slice("2x2x2", "v4", timeout_s=0.2)
    both.shutdown()


def test_several_slices_are_one_group_or_one_each() -> None:
    both = SlicePlacementGroup("2x2x2", "v4", num_slices=2)
    group = both.placement_group
    assert group is not None
    assert group.wait(30)
    assert sorted(map(str, slices_of(group))) == ["slice-a", "slice-a", "slice-b", "slice-b"]
    with pytest.raises(ValueError, match="slice_placement_group"):
        both.slice_placement_groups  # noqa: B018
    both.shutdown()
    wait_until(lambda: ray.available_resources() == ray.cluster_resources())

    each = SlicePlacementGroup("2x2x2", "v4", {"TPU": 2}, num_slices=2, pg_per_slice=True)
    assert each.num_bundles == 8
    assert all(group.wait(30) for group in each.slice_placement_groups)
    names = [set(slices_of(group)) for group in each.slice_placement_groups]
    assert sorted(map(sorted, names)) == [["slice-a"], ["slice-b"]]  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="slice_placement_groups"):
        each.slice_placement_group  # noqa: B018
    each.shutdown()


def test_a_slice_with_a_busy_host_is_left_while_another_is_idle() -> None:
    for name in SLICES:
        busy = Holder.options(resources={"TPU": 1, name: 0.1}).remote()
        ray.get(busy.variables.remote(), timeout=30)
        free, head = tpu.reserve_tpu_slice("2x2x2", "TPU-V4", timeout_s=30)
        assert {free, name} == set(SLICES)
        remove_placement_group(head)
        ray.kill(busy)
        wait_until(lambda: ray.available_resources() == ray.cluster_resources())


def test_a_slice_can_be_chosen_by_its_name() -> None:
    for name in SLICES:
        found, head = tpu.reserve_tpu_slice("2x2x2", "v4", 30, slice_name=name)
        assert found == name
        assert tpu.fetch_tpu_slice_name_from_pg(head) == name
        remove_placement_group(head)
    chosen = SlicePlacementGroup(
        "2x2x2", "v4", bundle_label_selector=[{"ray.io/tpu-slice-name": "slice-b"}] * 2
    )
    for wrong in ({}, {"ray.io/tpu-slice-name": "in(slice-a,slice-b)"}):
        with pytest.raises(ValueError, match="of every bundle, or of none"):
            SlicePlacementGroup(
                "2x2x2", "v4", bundle_label_selector=[{"ray.io/tpu-slice-name": "slice-b"}, wrong]
            )
    assert chosen.head_placement_groups == []
    assert chosen.placement_group is not None
    assert chosen.placement_group.wait(30)
    assert slices_of(chosen.placement_group) == ["slice-b"] * 2
    chosen.shutdown()


def test_a_reservation_stays_with_its_slice_when_host_0_is_lost(nodes: Cluster) -> None:
    name, head = tpu.reserve_tpu_slice("2x2x2", "v4", 30)
    [host] = [node for node in nodes.worker_nodes if [node.node_id] == hosts_of(head)]
    nodes.remove_node(host, allow_graceful=False)
    wait_until(lambda: ray.util.placement_group_table(head)["state"] == "RESCHEDULING")
    assert ray.available_resources()["TPU-v4-16-head"] == 1  # that of the other slice
    nodes.add_node(
        num_cpus=8, resources={"TPU": 4}, env_vars=host_variables(name, "v4-16", "2x2x2", 0)
    )
    wait_until(lambda: ray.util.placement_group_table(head)["state"] == "CREATED")
    assert slices_of(head) == [name]
    remove_placement_group(head)


def test_a_function_runs_on_every_host() -> None:
    own = SlicePlacementGroup("2x2x2", "v4", pg_per_slice=True)
    found = ray.get(tpu.run_on_slice(about_host, tpu_slice=own, slice_index=0), timeout=30)
    assert found == [(own.bundle_label_selector[0]["ray.io/tpu-slice-name"], 2, 4)] * 2
    with pytest.raises(ValueError, match="slice_index must be from 0 to 0, not 1"):
        tpu.run_on_slice(about_host, tpu_slice=own, slice_index=1)
    own.shutdown()
    with pytest.raises(ValueError, match="was given back"):
        tpu.run_on_slice(about_host, tpu_slice=own)
    with pytest.raises(ValueError, match="Say which slice"):
        tpu.run_on_slice(about_host)
    with pytest.raises(TypeError, match="remote function"):
        tpu.run_on_slice(len, tpu_slice=own)


def test_a_host_that_is_in_use_is_told_and_nothing_stays_reserved() -> None:
    holders = [
        Holder.options(resources={"TPU": 1, name: 0.1}).remote() for name in (*SLICES, "slice-c")
    ]
    ray.get([holder.variables.remote() for holder in holders], timeout=30)
    with pytest.raises(TimeoutError, match=r"within 0\.2 s: .* 2 of them with all hosts, 0 idle"):
        tpu.run_on_slice(
            about_host, topology="2x2x2", accelerator_version="v4", pg_ready_timeout_s=0.2
        )
    assert "PENDING" not in {group["state"] for group in ray.util.placement_group_table().values()}


# --- a host by itself ------------------------------------------------------------------------


def test_a_slice_of_one_host_is_not_a_host_of_a_larger_slice() -> None:
    one = SlicePlacementGroup("2x4", "v6e")
    assert one.head_placement_groups == []
    assert one.placement_group is not None
    assert one.placement_group.wait(30)
    assert slices_of(one.placement_group) == ["slice-c"]
    one.shutdown()
    none = SlicePlacementGroup("2x2x1", "v4")  # four chips, as each host of slice-a has
    assert none.placement_group is not None
    assert not none.placement_group.wait(0.3)
    none.shutdown()


def test_several_bundles_of_a_slice_of_one_host_are_on_that_host() -> None:
    parts = SlicePlacementGroup("2x4", "v6e", {"TPU": 2})
    assert parts.placement_group is not None
    assert parts.placement_group.wait(30)
    assert len(hosts_of(parts.placement_group)) == 4
    assert len(set(hosts_of(parts.placement_group))) == 1
    holders = [
        Holder.options(
            resources={"TPU": 2},
            scheduling_strategy=PlacementGroupSchedulingStrategy(parts.placement_group, index),
        ).remote()
        for index in range(4)
    ]
    found = ray.get([holder.variables.remote() for holder in holders], timeout=30)
    assert sorted(each["TPU_VISIBLE_CHIPS"] for each in found) == ["0,1", "2,3", "4,5", "6,7"]
    parts.shutdown()
    with pytest.raises(ValueError, match="STRICT_SPREAD can't place the 4 bundles"):
        SlicePlacementGroup("2x4", "v6e", {"TPU": 2}, strategy="STRICT_SPREAD")


def test_parts_of_a_host_are_blocks_of_its_grid_with_their_bounds() -> None:
    def hold(chips: int) -> Any:
        return Holder.options(resources={"TPU": chips, "alone": 1}).remote()

    one, four, two = hold(1), hold(4), hold(2)
    found = ray.get([holder.variables.remote() for holder in (one, four, two)], timeout=30)
    assert [tuple(each.values()) for each in found] == [
        ("0", "1,1,1", "1,1,1"),
        ("4,5,6,7", "2,2,1", "1,1,1"),
        ("2,3", "1,2,1", "1,1,1"),
    ]
    ray.kill(one)
    # Chip 0 is free again and chip 1 always was: they are neighbours.
    again = hold(2)
    assert ray.get(again.variables.remote(), timeout=30)["TPU_VISIBLE_CHIPS"] == "0,1"


def test_chips_that_are_no_neighbours_are_not_put_together() -> None:
    from miniray.util.state import list_pending_demands

    singles = [Holder.options(resources={"TPU": 1, "alone": 1}).remote() for _ in range(8)]
    chips = ray.get([holder.variables.remote() for holder in singles], timeout=30)
    at = {each["TPU_VISIBLE_CHIPS"]: holder for each, holder in zip(chips, singles, strict=True)}
    ray.kill(at["1"])
    ray.kill(at["2"])
    wait_until(lambda: ray.available_resources().get("TPU") == 16 + 2)
    pair = Holder.options(resources={"TPU": 2, "alone": 1}).remote()
    seen = pair.variables.remote()
    wait_until(lambda: bool(list_pending_demands()))
    assert "in one block of neighbours; the largest free one" in list_pending_demands()[0]["reason"]
    ray.kill(at["3"])
    assert ray.get(seen, timeout=30)["TPU_VISIBLE_CHIPS"] == "2,3"
    del at
    singles.clear()


def test_a_bundle_keeps_to_its_block() -> None:
    group = placement_group([{"TPU": 4, "alone": 1}, {"TPU": 4, "alone": 1}])
    assert group.wait(30)

    def in_bundle(index: int) -> Any:
        strategy = PlacementGroupSchedulingStrategy(group, index)
        return Holder.options(resources={"TPU": 2}, scheduling_strategy=strategy).remote()

    holders = [in_bundle(index) for index in (1, 0, 1, 0)]
    found = ray.get([holder.variables.remote() for holder in holders], timeout=30)
    chips = [each["TPU_VISIBLE_CHIPS"] for each in found]
    assert sorted(chips) == ["0,1", "2,3", "4,5", "6,7"]
    assert {chips[0], chips[2]} in ({"0,1", "2,3"}, {"4,5", "6,7"})
    remove_placement_group(group)


@pytest.mark.parametrize("chips", [3, 5, 16, 0.5])
def test_a_number_of_chips_that_is_no_block_is_refused_at_once(chips: float) -> None:
    with pytest.raises(ValueError, match="groups of 1, 2, 4, 8"):
        Holder.options(resources={"TPU": chips})
