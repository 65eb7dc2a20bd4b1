"""Nodes of every accelerator family: found, restricted by a variable, beyond what exists.

AMD's and Intel's devices are found on made-up machines: folders with the files of their drivers.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

import pytest
from accelerator_helpers import FakeMachine, add_amd, add_intel
from cluster_helpers import wait_until

import miniray as ray
from miniray.cluster_utils import Cluster

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

# Five nodes start before the first test, beside other tests.
pytestmark = pytest.mark.timeout(180)

#: Variable by resource of the families that run on logical devices.
LOGICAL = {
    "GPU": "CUDA_VISIBLE_DEVICES",
    "neuron_cores": "NEURON_RT_VISIBLE_CORES",
    "TPU": "TPU_VISIBLE_CHIPS",
    "HPU": "HABANA_VISIBLE_MODULES",
    "NPU": "ASCEND_RT_VISIBLE_DEVICES",
}
ALL = {*LOGICAL.values(), "ROCR_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "ONEAPI_DEVICE_SELECTOR"}


@pytest.fixture(scope="module", autouse=True)
def nodes(session_root: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """A node for each way to have devices; the head's own has those that can be logical."""
    amd, intel = (FakeMachine(tmp_path_factory.mktemp(name)) for name in ("amd", "intel"))
    add_amd(amd, 2)
    add_intel(intel, 2, device="0x0bda")
    places: dict[str, dict[str, Any]] = {
        "restricted": {
            "num_gpus": 2,
            "resources": {name: 2 for name in LOGICAL if name != "GPU"},
            "env_vars": dict.fromkeys(LOGICAL.values(), "1,3"),
        },
        "amd": {
            "resources": {"HPU": 2},
            "env_vars": {
                "MINIRAY_DEVICE_ROOT": str(amd.root),
                "HABANA_VISIBLE_MODULES": "1,3",
                "MINIRAY_NOSET_HABANA_VISIBLE_MODULES": "1",
            },
        },
        "intel": {"env_vars": {"MINIRAY_DEVICE_ROOT": str(intel.root)}},
        # Two exist there, numbered 0 and 1: what a user names counts as if it existed.
        "amd-1-3": {
            "num_gpus": 2,
            "env_vars": {
                "MINIRAY_DEVICE_ROOT": str(amd.root),
                "ROCR_VISIBLE_DEVICES": "1,3",
            },
        },
        "intel-1-3": {
            "num_gpus": 2,
            "gpu_family": "intel",
            "env_vars": {"ONEAPI_DEVICE_SELECTOR": "1,3"},
        },
    }
    with pytest.MonkeyPatch.context() as patch, Cluster() as cluster:
        for variable in ALL:
            patch.delenv(variable, raising=False)
        for place, given in places.items():
            resources = {**given.pop("resources", {}), place: 10}
            cluster.add_node(num_cpus=4, resources=resources, **given)
        cluster.connect()
        cluster.wait_for_nodes()
        yield cluster


@pytest.fixture(autouse=True)
def _everything_is_given_back() -> Iterator[None]:
    yield
    wait_until(lambda: ray.available_resources() == ray.cluster_resources())


def what_it_sees(resource: str) -> tuple[list[str], dict[str, str]]:
    """Its ids, and those of the families' variables that are set."""
    ids = ray.get_runtime_context().get_accelerator_ids()[resource]
    return ids, {name: os.environ[name] for name in ALL if name in os.environ}


@ray.remote
class Actor:
    def ping(self, resource: str) -> tuple[list[str], dict[str, str]]:
        return what_it_sees(resource)


@ray.remote
def task(resource: str) -> tuple[list[str], dict[str, str]]:
    return what_it_sees(resource)


def on(place: str, amount: float = 1, resource: str = "GPU") -> dict[str, Any]:
    """Options for so much of a resource on the node of this name."""
    options: dict[str, Any] = {"resources": {place: 1}}
    if resource == "GPU":
        return {**options, "num_gpus": amount}
    options["resources"][resource] = amount
    return options


# --- found -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("place", "variable", "values"),
    [
        ("amd", "ROCR_VISIBLE_DEVICES", ["0", "1"]),
        ("intel", "ONEAPI_DEVICE_SELECTOR", ["level_zero:0", "level_zero:1"]),
    ],
)
def test_the_actor_uses_the_first_found_device_so_the_task_uses_the_second(
    place: str, variable: str, values: list[str]
) -> None:
    actor = Actor.options(**on(place)).remote()
    ids, variables = ray.get(actor.ping.remote("GPU"), timeout=30)
    assert (ids, variables[variable]) == (["0"], values[0])
    assert "CUDA_VISIBLE_DEVICES" not in variables
    ids, variables = ray.get(task.options(**on(place)).remote("GPU"), timeout=30)
    assert (ids, variables[variable]) == (["1"], values[1])


@pytest.mark.parametrize("place", ["amd", "intel"])
def test_quarters_share_the_first_found_device(place: str) -> None:
    quarters = [Actor.options(**on(place, 0.25)).remote() for _ in range(4)]
    found = ray.get([actor.ping.remote("GPU") for actor in quarters], timeout=30)
    assert [ids for ids, _ in found] == [["0"]] * 4


@pytest.mark.parametrize(
    ("place", "type"), [("amd", "AMD-Instinct-MI300X-OAM"), ("intel", "Intel-GPU-Max-1100")]
)
def test_the_type_of_what_was_found_can_be_asked_for(place: str, type: str) -> None:
    typed = task.options(num_gpus=1, accelerator_type=type)
    ids, _ = ray.get(typed.remote("GPU"), timeout=30)
    assert ids == ["0"]
    [node] = [node for node in ray.nodes() if place in node["Resources"]]
    assert node["Resources"]["GPU"] == 2
    assert node["Labels"]["ray.io/accelerator-type"] == type


# --- restricted ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("place", "variable", "value"),
    [
        ("amd-1-3", "ROCR_VISIBLE_DEVICES", "{}"),
        ("intel-1-3", "ONEAPI_DEVICE_SELECTOR", "level_zero:{}"),
    ],
)
def test_a_node_sees_the_gpus_that_its_variable_names_whether_they_exist_or_not(
    place: str, variable: str, value: str
) -> None:
    actor = Actor.options(**on(place)).remote()
    assert ray.get(actor.ping.remote("GPU"), timeout=30) == (["1"], {variable: value.format(1)})
    assert ray.get(task.options(**on(place)).remote("GPU"), timeout=30) == (
        ["3"],
        {variable: value.format(3)},
    )


@pytest.mark.parametrize(("resource", "variable"), LOGICAL.items())
def test_a_node_sees_only_the_devices_that_its_variable_names(resource: str, variable: str) -> None:
    options = on("restricted", 1, resource)
    actor = Actor.options(**options).remote()
    ids, variables = ray.get(actor.ping.remote(resource), timeout=30)
    assert (ids, variables[variable]) == (["1"], "1")
    ids, variables = ray.get(task.options(**options).remote(resource), timeout=30)
    assert (ids, variables[variable]) == (["3"], "3")


def test_who_has_no_accelerator_keeps_the_variables_of_the_node() -> None:
    ids, variables = ray.get(task.options(resources={"restricted": 1}).remote("GPU"), timeout=30)
    assert ids == []
    assert variables == dict.fromkeys(LOGICAL.values(), "1,3")


def test_who_has_one_kind_keeps_the_variables_of_the_others() -> None:
    _, variables = ray.get(task.options(**on("restricted", 2, "NPU")).remote("NPU"), timeout=30)
    assert variables == dict.fromkeys(LOGICAL.values(), "1,3")
    _, variables = ray.get(task.options(**on("restricted", 0.5, "NPU")).remote("NPU"), timeout=30)
    assert variables.pop("ASCEND_RT_VISIBLE_DEVICES") == "1"
    assert set(variables.values()) == {"1,3"}


def test_a_variable_that_the_user_wants_to_set_is_left_alone() -> None:
    ids, variables = ray.get(task.options(**on("amd", 1, "HPU")).remote("HPU"), timeout=30)
    assert ids == ["1"]
    assert variables == {"HABANA_VISIBLE_MODULES": "1,3"}


@pytest.mark.parametrize(
    ("given", "variable"),
    [
        ({"num_gpus": 3}, "CUDA_VISIBLE_DEVICES"),
        ({"num_gpus": 3, "gpu_family": "amd"}, "ROCR_VISIBLE_DEVICES"),
        ({"resources": {"HPU": 3}}, "HABANA_VISIBLE_MODULES"),
    ],
)
def test_a_node_that_asks_for_more_than_its_variable_names_does_not_start(
    nodes: Cluster, given: dict[str, Any], variable: str
) -> None:
    with pytest.raises(ValueError, match=rf"3 \w+ are asked for, but {variable}='1,3' names 2"):
        nodes.add_node(**given, env_vars={variable: "1,3"})


@pytest.mark.parametrize(
    ("given", "error"),
    [
        ({"gpu_family": "voodoo"}, ValueError),
        ({"num_gpus": -1}, ValueError),
        ({"resources": {"TPU": 1.5}}, ValueError),
        ({"resources": {"GPU": 1}}, ValueError),
        ({"env_vars": {"A": 1}}, TypeError),
        ({"env_vars": {"A=B": "1"}}, ValueError),
        ({"env_vars": {"A": "\0"}}, ValueError),
    ],
)
def test_nonsense_about_a_node_is_refused_before_anything_starts(
    nodes: Cluster, given: dict[str, Any], error: type[Exception]
) -> None:
    before = len(nodes.list_all_nodes())
    with pytest.raises(error):
        nodes.add_node(**given)
    assert len(nodes.list_all_nodes()) == before
