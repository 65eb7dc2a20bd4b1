"""The examples of Ray's page on accelerators, on logical devices of one node.

Each runs as a user of Ray would write it and asserts the ids and variables that the page
tells. AMD's and Intel's, which need devices to be found, are in ``test_accelerator_nodes.py``.
"""

from __future__ import annotations

import os
import sys
import types
from typing import TYPE_CHECKING, Any

import pytest
from cluster_helpers import is_alive, wait_for_file, wait_until

import miniray as ray
from miniray.util.accelerators import NVIDIA_H100, NVIDIA_TESLA_V100
from miniray.util.placement_group import placement_group, remove_placement_group
from miniray.util.scheduling_strategies import PlacementGroupSchedulingStrategy
from miniray.util.state import list_pending_demands

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = pytest.mark.usefixtures("cluster")

CLUSTER = {
    "num_cpus": 4,
    "num_gpus": 3,
    "resources": {
        "neuron_cores": 2,
        "TPU": 2,
        "HPU": 2,
        "NPU": 2,
        "accelerator_type:V100": 1,
    },
}

#: What a task asks for, the resource's name, and the variable that shows it its device.
FAMILIES = [
    pytest.param({"num_gpus": 1}, "GPU", "CUDA_VISIBLE_DEVICES", id="nvidia"),
    pytest.param(
        {"resources": {"neuron_cores": 1}}, "neuron_cores", "NEURON_RT_VISIBLE_CORES", id="neuron"
    ),
    pytest.param({"resources": {"TPU": 1}}, "TPU", "TPU_VISIBLE_CHIPS", id="tpu"),
    pytest.param({"resources": {"HPU": 1}}, "HPU", "HABANA_VISIBLE_MODULES", id="gaudi"),
    pytest.param({"resources": {"NPU": 1}}, "NPU", "ASCEND_RT_VISIBLE_DEVICES", id="ascend"),
]
VARIABLES = {family.values[2] for family in FAMILIES}


@pytest.fixture(autouse=True)
def _everything_is_given_back() -> Any:
    yield
    wait_until(lambda: ray.available_resources() == ray.cluster_resources())


def what_it_sees(resource: str) -> tuple[list[str], dict[str, str]]:
    """Its ids, and those of the families' variables that are set."""
    ids = ray.get_runtime_context().get_accelerator_ids()[resource]
    return ids, {name: os.environ[name] for name in VARIABLES if name in os.environ}


@ray.remote
class Actor:
    def ping(self, resource: str) -> tuple[list[str], dict[str, str]]:
        return what_it_sees(resource)


@ray.remote
def task(resource: str) -> tuple[list[str], dict[str, str]]:
    return what_it_sees(resource)


@pytest.mark.parametrize(("options", "resource", "variable"), FAMILIES)
def test_the_actor_uses_the_first_device_so_the_task_uses_the_second(
    options: dict[str, Any], resource: str, variable: str
) -> None:
    actor = Actor.options(**options).remote()
    assert ray.get(actor.ping.remote(resource), timeout=30) == (["0"], {variable: "0"})
    assert ray.get(task.options(**options).remote(resource), timeout=30) == (
        ["1"],
        {variable: "1"},
    )


def test_a_decorated_function_and_class_ask_as_those_with_options_do() -> None:
    @ray.remote(num_gpus=1)
    class GPUActor:
        def ping(self) -> list[str]:
            return ray.get_runtime_context().get_accelerator_ids()["GPU"]

    @ray.remote(resources={"NPU": 1})
    def npu_task() -> list[str]:
        return ray.get_runtime_context().get_accelerator_ids()["NPU"]

    actor = GPUActor.remote()
    assert ray.get(actor.ping.remote(), timeout=30) == ["0"]
    assert ray.get(npu_task.remote(), timeout=30) == ["0"]


# --- frameworks ------------------------------------------------------------------------------


def stand_in() -> Any:
    """A framework that looks at the variable once, as TensorFlow does, and keeps what it takes."""
    module = types.ModuleType("tensorflow_stand_in")
    exec(
        "import os\n"
        "DEVICES = [id for id in os.environ.get('CUDA_VISIBLE_DEVICES', '').split(',') if id]\n"
        "held = []\n"
        "class Session:\n"
        "    def __init__(self):\n"
        "        held.append(bytearray(1 << 20))\n"
        "        self.devices = list(DEVICES)\n",
        module.__dict__,
    )
    return sys.modules.setdefault(module.__name__, module)


def test_a_framework_restricts_itself_to_the_devices_of_its_task() -> None:
    @ray.remote(num_gpus=1)
    def gpu_task() -> list[str]:
        devices: list[str] = stand_in().Session().devices
        return devices

    actor = Actor.options(num_gpus=1).remote()
    ray.get(actor.ping.remote("GPU"), timeout=30)
    assert ray.get(gpu_task.remote(), timeout=30) == ["1"]


def leak() -> tuple[int, int, list[str]]:
    """Process, how often it has leaked in this process, and on which devices."""
    framework = stand_in()
    session = framework.Session()
    return os.getpid(), len(framework.held), session.devices


def test_a_worker_that_may_have_leaked_device_memory_is_not_used_again() -> None:
    leak_gpus = ray.remote(num_gpus=3)(leak)  # all there are: the second gets the same ones
    found = [ray.get(leak_gpus.remote(), timeout=30) for _ in range(2)]
    assert [(held, devices) for _, held, devices in found] == [(1, ["0", "1", "2"])] * 2
    assert found[0][0] != found[1][0]
    wait_until(lambda: not any(is_alive(pid) for pid, _, _ in found))


def test_max_calls_of_zero_asks_for_the_same_worker_again() -> None:
    leak_gpus = ray.remote(num_gpus=3, max_calls=0)(leak)
    first, second = (ray.get(leak_gpus.remote(), timeout=30) for _ in range(2))
    assert first[0] == second[0]
    assert (first[1], second[1]) == (1, 2)


def test_a_worker_with_devices_ends_after_max_calls_also_if_they_come_one_by_one() -> None:
    leak_gpus = ray.remote(num_gpus=3, max_calls=2)(leak)
    found = [ray.get(leak_gpus.remote(), timeout=30) for _ in range(3)]
    found += ray.get([leak_gpus.remote() for _ in range(3)], timeout=30)
    processes = [process for process, _, _ in found]
    assert [held for _, held, _ in found] == [1, 2, 1, 2, 1, 2]
    assert processes[::2] == processes[1::2]
    assert len(set(processes)) == 3
    wait_until(lambda: not any(map(is_alive, processes)))


# --- fractions -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "resource"),
    [({"num_gpus": 0.25}, "GPU"), ({"resources": {"NPU": 0.25}}, "NPU")],
    ids=["nvidia", "ascend"],
)
def test_four_tasks_share_a_device_at_the_same_time(
    options: dict[str, Any], resource: str, tmp_path: Path
) -> None:
    @ray.remote(**options)
    def f(number: int) -> list[str]:
        (tmp_path / f"running-{number}").touch()
        wait_for_file(tmp_path / "go")
        return ray.get_runtime_context().get_accelerator_ids()[resource]

    refs = [f.remote(number) for number in range(4)]
    wait_until(lambda: len(list(tmp_path.glob("running-*"))) == 4)
    (tmp_path / "go").touch()
    assert ray.get(refs, timeout=30) == [["0"]] * 4


@pytest.mark.parametrize("resource", ["neuron_cores", "TPU", "HPU"])
def test_families_without_fractions_refuse_them_at_once(resource: str) -> None:
    with pytest.raises(ValueError, match=rf"{resource}.*0\.5"):
        task.options(resources={resource: 0.5})
    with pytest.raises(ValueError, match=rf"{resource}.*0\.5"):
        ray.remote(resources={resource: 0.5})(what_it_sees)


def test_fractions_are_packed_on_a_device_before_the_next_one_is_opened() -> None:
    @ray.remote(num_gpus=0.5)
    class FractionalGPUActor:
        def ping(self) -> list[str]:
            return ray.get_runtime_context().get_accelerator_ids()["GPU"]

    actors = [FractionalGPUActor.remote() for _ in range(3)]
    found = ray.get([actor.ping.remote() for actor in actors], timeout=30)
    assert found == [["0"], ["0"], ["1"]]


# --- accelerator types -----------------------------------------------------------------------


def test_an_accelerator_type_is_a_thousandth_of_a_resource_of_the_node() -> None:
    @ray.remote(num_gpus=1, accelerator_type=NVIDIA_TESLA_V100)
    def train(data: int) -> tuple[int, dict[str, float]]:
        return data, ray.get_runtime_context().get_assigned_resources()

    data, assigned = ray.get(train.remote(1), timeout=30)
    assert data == 1
    assert assigned == {"CPU": 1, "GPU": 1, "accelerator_type:V100": 0.001}


def test_a_type_that_no_node_has_is_waited_for_with_a_reason() -> None:
    ref = task.options(num_gpus=1, accelerator_type=NVIDIA_H100).remote("GPU")
    wait_until(lambda: len(list_pending_demands()) == 1)
    [demand] = list_pending_demands()
    assert "no node has accelerator_type:H100" in demand["reason"]
    assert demand["infeasible"]
    ray.cancel(ref)
    wait_until(lambda: not list_pending_demands())


# --- what a task is told of itself -----------------------------------------------------------


def test_a_worker_is_told_what_it_holds_of_every_family() -> None:
    def told() -> tuple[Any, ...]:
        context = ray.get_runtime_context()
        return (
            context.get_accelerator_ids(),
            context.get_resource_ids(),
            ray.get_gpu_ids(),
            context.get_assigned_resources(),
        )

    wanted = {"num_cpus": 0.5, "num_gpus": 2, "resources": {"TPU": 2, "NPU": 0.5}}
    ids, same, gpus, assigned = ray.get(ray.remote(**wanted)(told).remote(), timeout=30)
    assert ids == {
        "GPU": ["0", "1"],
        "neuron_cores": [],
        "TPU": ["0", "1"],
        "HPU": [],
        "NPU": ["0"],
    }
    assert same == ids
    assert gpus == [0, 1]
    assert assigned == {"CPU": 0.5, "GPU": 2, "TPU": 2, "NPU": 0.5}


def test_tasks_hold_one_cpu_and_actors_none_unless_they_say_so() -> None:
    def held() -> dict[str, float]:
        return ray.get_runtime_context().get_assigned_resources()

    class Holder:
        def held(self) -> dict[str, float]:
            return ray.get_runtime_context().get_assigned_resources()

    assert ray.get(ray.remote(held).remote(), timeout=30) == {"CPU": 1}
    plain = ray.remote(Holder).remote()
    assert ray.get(plain.held.remote(), timeout=30) == {}
    half = ray.remote(num_cpus=2, num_gpus=0.5)(Holder).remote()
    assert ray.get(half.held.remote(), timeout=30) == {"CPU": 2, "GPU": 0.5}
    with pytest.raises(RuntimeError, match="driver"):
        ray.get_runtime_context().get_assigned_resources()


def test_in_a_bundle_a_worker_is_told_its_own_part_under_the_plain_names() -> None:
    group = placement_group([{"CPU": 1, "GPU": 1}])
    assert group.wait(30)

    @ray.remote(num_cpus=0, num_gpus=0.5)
    def told() -> tuple[list[str], list[int], dict[str, float]]:
        context = ray.get_runtime_context()
        return (
            context.get_accelerator_ids()["GPU"],
            ray.get_gpu_ids(),
            context.get_assigned_resources(),
        )

    strategy = PlacementGroupSchedulingStrategy(group, 0)
    ids, gpus, assigned = ray.get(told.options(scheduling_strategy=strategy).remote(), timeout=30)
    assert [str(id) for id in gpus] == ids
    assert len(ids) == 1
    assert assigned == {"GPU": 0.5}
    remove_placement_group(group)
