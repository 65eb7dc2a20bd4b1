"""Devices that a user declares: handed out by their ids, like GPUs."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

import pytest
from cluster_helpers import is_alive, wait_until

import miniray
from miniray.cluster_utils import Cluster
from miniray.util.placement_group import placement_group, remove_placement_group

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

VARIABLE = "FPGA_VISIBLE_DEVICES"


@pytest.fixture(scope="module", autouse=True)
def nodes(session_root: Path) -> Iterator[Cluster]:
    """A node with four devices, and one with two that cannot be shared."""
    with pytest.MonkeyPatch.context() as patch:
        patch.delenv(VARIABLE, raising=False)
        fpgas = {"FPGA": {"count": 4, "env": VARIABLE}}
        cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 8, "resources": fpgas})
        cluster.add_node(
            num_cpus=8, resources={"ASIC": {"count": 2, "env": "ASICS", "fractional": False}}
        )
        miniray.init(address=cluster.address)
        cluster.wait_for_nodes()
        yield cluster
        miniray.shutdown()
        cluster.shutdown()


def seen(variable: str = VARIABLE) -> tuple[dict[str, list[str]], str | None, int]:
    ids = miniray.get_runtime_context().get_accelerator_ids()
    return ids, os.environ.get(variable), os.getpid()


@miniray.remote(num_cpus=0)
class Actor:
    def see(self, variable: str = VARIABLE) -> tuple[dict[str, list[str]], str | None, int]:
        return seen(variable)


def test_the_devices_are_resources_of_the_cluster() -> None:
    resources = miniray.cluster_resources()
    assert (resources["FPGA"], resources["ASIC"]) == (4, 2)


def test_each_sees_its_own_devices() -> None:
    actors = [Actor.options(resources={"FPGA": amount}).remote() for amount in (1, 2, 0.5, 0.5)]
    found = [visible for _, visible, _ in miniray.get([actor.see.remote() for actor in actors])]
    assert found == ["0", "1,2", "3", "3"]
    ids, _, _ = miniray.get(actors[1].see.remote())
    assert ids["FPGA"] == ["1", "2"]


def test_who_has_none_has_no_variable() -> None:
    ids, visible, _ = miniray.get(miniray.remote(seen).remote())
    assert visible is None
    assert not ids.get("FPGA")


def test_the_worker_of_a_task_that_had_one_ends_and_its_device_is_used_again() -> None:
    task = miniray.remote(resources={"FPGA": 4})(seen)
    pids = [miniray.get(task.remote(), timeout=30)[2] for _ in range(3)]
    assert len(set(pids)) == 3
    wait_until(lambda: not any(map(is_alive, pids)))


def test_a_worker_is_kept_where_the_user_says_so() -> None:
    task = miniray.remote(resources={"FPGA": 4}, max_calls=0)(seen)
    assert len({miniray.get(task.remote(), timeout=30)[2] for _ in range(3)}) == 1


def test_a_device_that_cannot_be_shared_is_not() -> None:
    actors = [Actor.options(resources={"ASIC": 1}).remote() for _ in range(2)]
    found = [visible for _, visible, _ in miniray.get([a.see.remote("ASICS") for a in actors])]
    assert sorted(map(str, found)) == ["0", "1"]
    del actors
    wait_until(lambda: miniray.available_resources().get("ASIC") == 2)
    ref = Actor.options(resources={"ASIC": 0.5}).remote().see.remote()
    from miniray.util.state import list_pending_demands

    wait_until(list_pending_demands)
    [demand] = list_pending_demands()
    assert "can't be shared" in demand["reason"]
    assert miniray.wait([ref], timeout=0)[0] == []


def test_halves_of_a_bundle_share_its_device() -> None:
    group = placement_group([{"FPGA": 1}, {"FPGA": 1}])
    assert group.wait(30)
    there: list[dict[str, Any]] = [
        {"placement_group": group, "placement_group_bundle_index": index} for index in (0, 0, 1)
    ]
    actors = [Actor.options(resources={"FPGA": 0.5}, **where).remote() for where in there]
    found = [visible for _, visible, _ in miniray.get([actor.see.remote() for actor in actors])]
    assert found[0] == found[1] != found[2]
    remove_placement_group(group)
