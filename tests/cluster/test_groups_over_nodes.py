"""Placement groups on nodes with labels, and those that outlive who made them."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from cluster_helpers import is_alive, wait_until

import miniray
from miniray.cluster_utils import Cluster
from miniray.exceptions import RayActorError
from miniray.util.placement_group import (
    PlacementGroup,
    get_placement_group,
    placement_group,
    placement_group_table,
    remove_placement_group,
)
from miniray.util.scheduling_strategies import PlacementGroupSchedulingStrategy
from miniray.util.state import list_pending_demands, list_placement_groups

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    Make = Callable[..., PlacementGroup]

NAMESPACE = "groups"


@pytest.fixture(scope="module", autouse=True)
def nodes(session_root: Path) -> Iterator[Cluster]:
    """Two nodes in different zones."""
    del session_root
    cluster = Cluster(
        initialize_head=True,
        head_node_args={"num_cpus": 2, "num_gpus": 1, "labels": {"zone": "a"}},
    )
    cluster.add_node(num_cpus=2, num_gpus=1, labels={"zone": "b", "disk": "fast"})
    miniray.init(address=cluster.address, namespace=NAMESPACE)
    yield cluster
    miniray.shutdown()
    cluster.shutdown()


@pytest.fixture(autouse=True)
def _everything_is_given_back() -> Iterator[None]:
    yield
    wait_until(lambda: miniray.available_resources() == miniray.cluster_resources())


@pytest.fixture
def make() -> Iterator[Make]:
    """Make groups that are removed when the test is done."""
    groups: list[PlacementGroup] = []

    def make_group(*args: Any, **kwargs: Any) -> PlacementGroup:
        groups.append(placement_group(*args, **kwargs))
        return groups[-1]

    yield make_group
    for group in groups:
        remove_placement_group(group)


@miniray.remote(num_cpus=1)
class Member:
    def where(self) -> tuple[str, str]:
        context = miniray.get_runtime_context()
        return context.get_node_id(), os.environ.get("CUDA_VISIBLE_DEVICES", "")

    def pid(self) -> int:
        return os.getpid()


def member(group: PlacementGroup, index: int, **options: Any) -> Any:
    strategy = PlacementGroupSchedulingStrategy(group, placement_group_bundle_index=index)
    return Member.options(scheduling_strategy=strategy, **options).remote()


def in_zone(zone: str) -> str:
    [found] = [n["NodeID"] for n in miniray.nodes() if n["Labels"].get("zone") == zone]
    return str(found)


# --- labels -----------------------------------------------------------------------------------


def test_each_bundle_is_where_its_selector_says(make: Make) -> None:
    zones = ["b", "a", "b"]
    group = make(
        [{"CPU": 0.5, "GPU": 0.3}] * 2 + [{"CPU": 0.5}],
        strategy="PACK",
        bundle_label_selector=[{"zone": zone} for zone in zones],
    )
    assert group.wait(30)
    members = [member(group, index, num_cpus=0.5) for index in range(3)]
    found = miniray.get([each.where.remote() for each in members], timeout=60)
    assert [node for node, _ in found] == [in_zone(zone) for zone in zones]
    table = placement_group_table(group)
    assert list(table["bundles_to_node_id"].values()) == [node for node, _ in found]


@pytest.mark.parametrize(
    ("selector", "zone"),
    [({"zone": "!a"}, "b"), ({"zone": "in(b,c)"}, "b"), ({"disk": "!in(fast)"}, "a")],
)
def test_a_selector_may_be_a_condition(make: Make, selector: dict[str, str], zone: str) -> None:
    group = make([{"CPU": 1}], bundle_label_selector=[selector])
    assert group.wait(30)
    node, _ = miniray.get(member(group, 0).where.remote(), timeout=60)
    assert node == in_zone(zone)


def test_a_group_whose_label_no_node_has_waits_for_one_that_joins(
    nodes: Cluster, make: Make
) -> None:
    group = make([{"CPU": 1}, {"CPU": 1}], bundle_label_selector=[{"zone": "c"}, {}])

    def why() -> list[str]:
        return [d.reason for d in list_pending_demands() if d.kind == "placement_group"]

    wait_until(lambda: why() == ["no node matches the labels zone=c"], told=why)
    assert miniray.available_resources() == miniray.cluster_resources()  # all of it or nothing
    node = nodes.add_node(num_cpus=1, labels={"zone": "c"})
    assert group.wait(30)
    assert placement_group_table(group)["bundles_to_node_id"][0] == node.node_id
    remove_placement_group(group)
    nodes.remove_node(node)
    nodes.wait_for_nodes()


def test_a_topology_strategy_keeps_all_bundles_on_one_value_of_a_label(
    make: Make, nodes: Cluster
) -> None:
    more = nodes.add_node(num_cpus=2, labels={"zone": "b"})
    wait_until(lambda: miniray.cluster_resources()["CPU"] == 6)
    spread = make([{"CPU": 1}] * 3, topology_strategy={"zone": "STRICT_PACK"})
    assert spread.wait(30)
    zones = {node["NodeID"]: node["Labels"].get("zone") for node in miniray.nodes()}
    placed = placement_group_table(spread)["bundles_to_node_id"].values()
    assert {zones[node_id] for node_id in placed} == {"b"}
    strict = {"zone": "STRICT_PACK", "ray.io/node-id": "STRICT_SPREAD"}
    too_many = make([{"CPU": 0.1}] * 3, topology_strategy=strict)
    wait_until(lambda: len(list_pending_demands()) == 1)
    assert "one value of zone" in list_pending_demands()[0].reason
    remove_placement_group(too_many)
    remove_placement_group(spread)
    nodes.remove_node(more)
    wait_until(lambda: miniray.cluster_resources()["CPU"] == 4)


def test_bundles_that_must_be_together_and_cannot_be_are_told(make: Make) -> None:
    selectors = [{"zone": "a"}, {"zone": "b"}]
    group = make([{"CPU": 1}] * 2, strategy="STRICT_PACK", bundle_label_selector=selectors)
    assert not group.wait(0.2)
    [demand] = [d for d in list_pending_demands() if d.kind == "placement_group"]
    assert demand.infeasible
    assert "zone" in demand.reason


def test_strict_pack_finds_room_for_shares_that_fit_in_one_way_only(
    nodes: Cluster, make: Make
) -> None:
    node = nodes.add_node(num_cpus=1, num_gpus=2, labels={"zone": "d"})
    shares = [0.6, 0.5, 0.5, 0.4]
    group = make(
        [{"GPU": share} for share in shares],
        strategy="STRICT_PACK",
        bundle_label_selector=[{"zone": "d"}] * 4,
    )
    assert group.wait(30)
    members = [
        member(group, index, num_cpus=0, num_gpus=share) for index, share in enumerate(shares)
    ]
    devices = [d for _, d in miniray.get([each.where.remote() for each in members], timeout=60)]
    assert devices[0] == devices[3] != devices[1] == devices[2]
    for each in members:
        miniray.kill(each)
    remove_placement_group(group)
    nodes.remove_node(node)
    nodes.wait_for_nodes()


# --- lifetimes --------------------------------------------------------------------------------

#: Makes a detached group with a detached actor in it, and a group that is not; prints their ids.
DRIVER = f"""
import json, os, sys
import miniray
from miniray.util.placement_group import placement_group
from miniray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

@miniray.remote(num_cpus=0, num_gpus=0.5)
class Keeper:
    def see(self):
        return os.getpid(), os.environ["CUDA_VISIBLE_DEVICES"]

miniray.init(address=sys.argv[1], namespace={NAMESPACE!r}, log_to_driver=False)
kept = placement_group([{{"CPU": 1, "GPU": 1}}], name="kept", lifetime="detached")
lost = placement_group([{{"CPU": 1}}], name="lost")
assert kept.wait(30) and lost.wait(30)
strategy = PlacementGroupSchedulingStrategy(kept, placement_group_bundle_index=0)
keeper = Keeper.options(name="keeper", lifetime="detached", scheduling_strategy=strategy).remote()
print(json.dumps([kept.id.hex(), lost.id.hex(), *miniray.get(keeper.see.remote())]))
"""


def run_driver(cluster: Cluster) -> tuple[str, str, int, str]:
    done = subprocess.run(
        [sys.executable, "-c", DRIVER, cluster.address],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    kept, lost, pid, device = json.loads(done.stdout.splitlines()[-1])
    return kept, lost, pid, device


def state_of(id: str) -> str:
    [state] = [group.state for group in list_placement_groups() if group.placement_group_id == id]
    return state


def test_a_detached_group_and_what_is_in_it_outlive_their_driver(nodes: Cluster) -> None:
    id, lost, pid, device = run_driver(nodes)
    wait_until(lambda: state_of(lost) == "REMOVED")
    assert state_of(id) == "CREATED"
    with pytest.raises(ValueError, match="lost"):
        get_placement_group("lost")
    group = get_placement_group("kept")
    keeper = miniray.get_actor("keeper")
    assert miniray.get(keeper.see.remote(), timeout=60) == (pid, device)
    # What is left of its bundle is there for others, who share the device.
    beside = member(group, 0, num_gpus=0.5)
    assert miniray.get(beside.where.remote(), timeout=60)[1] == device
    remove_placement_group(group)
    with pytest.raises(RayActorError):
        miniray.get(keeper.see.remote(), timeout=60)
    wait_until(lambda: not is_alive(pid))


def test_a_detached_group_outlives_the_head(nodes: Cluster) -> None:
    id, _, pid, device = run_driver(nodes)
    root = Path(os.environ["MINIRAY_TMPDIR"])
    records = [json.loads(path.read_text()) for path in root.glob("miniray-*/clusters/*.json")]
    [head] = [record["processes"]["head"]["pid"] for record in records if record["is_head"]]
    os.kill(head, signal.SIGKILL)
    wait_until(lambda: not is_alive(head))
    wait_until(lambda: state_of(id) == "CREATED")
    group = get_placement_group("kept")
    keeper = miniray.get_actor("keeper")
    assert miniray.get(keeper.see.remote(), timeout=60) == (pid, device)
    wait_until(lambda: miniray.available_resources().get("GPU") == 1)  # both nodes are back
    beside = member(group, 0, num_gpus=0.5)
    assert miniray.get(beside.where.remote(), timeout=60)[1] == device
    remove_placement_group(group)
    wait_until(lambda: not is_alive(pid))
