"""Resources as code sees them: devices, visibility, totals, nodes."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from cluster_helpers import wait_for_file, wait_until

import miniray

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = pytest.mark.usefixtures("cluster")

CLUSTER = {
    "num_cpus": 4,
    "num_gpus": 2,
    "resources": {"licence": 3},
    "labels": {"zone": "east"},
}


def seen() -> tuple[list[int], str | None]:
    return miniray.get_gpu_ids(), os.environ.get("CUDA_VISIBLE_DEVICES")


def resources_held() -> dict[str, float]:
    return miniray.get_runtime_context().get_assigned_resources()


@miniray.remote
class Seer:
    def see(self) -> tuple[list[int], str | None]:
        return miniray.get_gpu_ids(), os.environ.get("CUDA_VISIBLE_DEVICES")

    def accelerators(self) -> dict[str, list[str]]:
        return miniray.get_runtime_context().get_accelerator_ids()


def test_work_without_gpus_sees_none() -> None:
    ids, visible = miniray.get(miniray.remote(num_cpus=1)(seen).remote())
    assert ids == []
    assert not visible


def test_a_task_sees_the_gpus_it_was_given() -> None:
    ids, visible = miniray.get(miniray.remote(num_gpus=2)(seen).remote())
    assert sorted(ids) == [0, 1]
    assert sorted(str(visible).split(",")) == ["0", "1"]


def test_actors_with_a_gpu_each_see_different_ones() -> None:
    seers = [Seer.options(num_gpus=1).remote() for _ in range(2)]
    found = miniray.get([seer.see.remote() for seer in seers])
    assert sorted(found) == [([0], "0"), ([1], "1")]


def test_halves_of_a_gpu_are_packed_on_one_device() -> None:
    seers = [Seer.options(num_gpus=0.5).remote() for _ in range(4)]
    found = miniray.get([seer.see.remote() for seer in seers], timeout=30)
    assert sorted(ids for ids, _ in found) == [[0], [0], [1], [1]]


def test_accelerator_ids_are_texts_by_resource() -> None:
    ids = miniray.get(Seer.options(num_gpus=1).remote().accelerators.remote())
    assert ids["GPU"] in (["0"], ["1"])
    assert ids["TPU"] == []


def test_a_gpu_is_free_again_when_its_actor_ends() -> None:
    first = Seer.options(num_gpus=2).remote()
    miniray.get(first.see.remote())
    second = Seer.options(num_gpus=2).remote()
    waiting = second.see.remote()
    assert miniray.wait([waiting], timeout=0.3) == ([], [waiting])
    miniray.kill(first)
    assert sorted(miniray.get(waiting, timeout=30)[0]) == [0, 1]


def test_amounts_and_names_may_be_those_of_numpy() -> None:
    amounts = {"num_cpus": np.float64(0.5), "resources": {np.str_("licence"): np.float64(0.25)}}
    held = miniray.get(miniray.remote(resources_held).options(**amounts).remote(), timeout=30)
    assert held == {"CPU": 0.5, "licence": 0.25}

    seer = Seer.options(name=np.str_("seer"), num_gpus=np.float64(0.5)).remote()
    assert len(miniray.get(seer.see.remote(), timeout=30)[0]) == 1
    assert miniray.get_actor(np.str_("seer")) == seer

    group = miniray.util.placement_group([{"CPU": np.float64(0.5)}], name=np.str_("group"))
    assert group.wait(30)
    assert miniray.util.get_placement_group(np.str_("group")) == group
    miniray.util.remove_placement_group(group)


@pytest.mark.parametrize("gpus", [1.5, -1])
def test_an_amount_of_gpus_that_cannot_be_given_is_refused(gpus: float) -> None:
    with pytest.raises(ValueError, match=r"num_gpus|GPU|quantit"):
        miniray.remote(num_gpus=gpus)(seen).remote()


def test_a_custom_resource_limits_how_many_run(tmp_path: Path) -> None:
    @miniray.remote(num_cpus=0, resources={"licence": 2})
    def hold(started: Path, go: Path) -> None:
        started.touch()
        wait_for_file(go)

    first = hold.remote(tmp_path / "first", tmp_path / "go")
    wait_for_file(tmp_path / "first")
    second = hold.remote(tmp_path / "second", tmp_path / "go")
    assert miniray.wait([second], timeout=0.3) == ([], [second])
    assert not (tmp_path / "second").exists()
    (tmp_path / "go").touch()
    miniray.get([first, second], timeout=30)


def test_totals_and_what_is_free_are_told(tmp_path: Path) -> None:
    total = miniray.cluster_resources()
    assert (total["CPU"], total["GPU"], total["licence"]) == (4, 2, 3)
    assert total["memory"] > 0
    assert total["object_store_memory"] > 0
    wait_until(lambda: miniray.available_resources().get("GPU") == 2)

    @miniray.remote(num_cpus=3, num_gpus=1, resources={"licence": 1})
    def hold(path: Path) -> None:
        wait_for_file(path)

    ref = hold.remote(tmp_path / "go")

    def is_held() -> bool:
        free = miniray.available_resources()
        return (free.get("CPU"), free.get("GPU"), free.get("licence")) == (1, 1, 2)

    wait_until(is_held)
    (tmp_path / "go").touch()
    miniray.get(ref)
    wait_until(lambda: miniray.available_resources().get("CPU") == 4)


def test_memory_can_be_asked_for() -> None:
    task: Any = miniray.remote(memory=100 * 1024 * 1024)(seen)
    assert miniray.get(task.remote())[0] == []


def test_the_nodes_are_listed() -> None:
    [node] = miniray.nodes()
    assert node["Alive"] is True
    assert node["NodeID"] == miniray.get_runtime_context().get_node_id()
    assert node["Resources"]["CPU"] == 4
    assert node["Labels"]["zone"] == "east"
    assert f"node:{node['NodeManagerAddress']}" in node["Resources"]


def test_a_task_can_ask_for_the_resource_of_its_node() -> None:
    [node] = miniray.nodes()
    name = f"node:{node['NodeManagerAddress']}"
    task = miniray.remote(resources={name: 0.01})(seen)
    assert miniray.get(task.remote())[0] == []


def test_the_driver_has_no_gpus_of_its_own() -> None:
    assert miniray.get_gpu_ids() == []
    assert miniray.is_initialized()


def test_numerical_libraries_start_as_many_threads_as_a_worker_has_cpus() -> None:
    @miniray.remote
    def threads() -> str | None:
        return os.environ.get("OMP_NUM_THREADS")

    @miniray.remote
    class Reader:
        def threads(self) -> str | None:
            return os.environ.get("OMP_NUM_THREADS")

    mine = {"env_vars": {"OMP_NUM_THREADS": "7"}}
    asked = [
        threads.remote(),
        threads.options(num_cpus=2).remote(),
        threads.options(num_cpus=0.5).remote(),
        threads.options(num_cpus=2, runtime_env=mine).remote(),
        Reader.remote().threads.remote(),
        Reader.options(num_cpus=2).remote().threads.remote(),
    ]
    assert miniray.get(asked) == ["1", "2", "1", "7", "1", "2"]
