"""What a node announces: choice of family, several families, custom devices."""

from __future__ import annotations

import threading
import time
from typing import TYPE_CHECKING

import pytest
from accelerator_helpers import FakeMachine, add_amd, add_gaudi, add_intel, add_nvidia, add_tpu

from miniray.accelerators import models
from miniray.accelerators.base import AcceleratorRequestError
from miniray.accelerators.node_resources import (
    NodeAccelerators,
    assigned_environment,
    resolve_node_accelerators,
)
from miniray.accelerators.registry import DEVICE_RESOURCES, check_amount, family_named
from miniray.util import accelerators as public_names

if TYPE_CHECKING:
    from collections.abc import Callable

    from miniray.accelerators.base import Detected
    from miniray.accelerators.host import Host

FPGA = {"FPGA": {"count": 4, "env": "FPGA_VISIBLE_DEVICES"}}


def test_logical_gpus_are_nvidias_unless_a_family_is_named(machine: FakeMachine) -> None:
    found = resolve_node_accelerators(2, {}, machine.host())
    assert found.devices["GPU"].family == "nvidia"
    assert found.devices["GPU"].variable == "CUDA_VISIBLE_DEVICES"
    named = resolve_node_accelerators(2, {}, machine.host(), gpu_family="amd")
    assert named.devices["GPU"].variable == "ROCR_VISIBLE_DEVICES"


def test_a_requested_number_of_gpus_is_of_the_family_that_is_there(machine: FakeMachine) -> None:
    add_amd(machine, 2)
    found = resolve_node_accelerators(8, {}, machine.host())
    assert found.devices["GPU"].family == "amd"
    assert found.devices["GPU"].detected == 2
    assert found.resources == {"accelerator_type:AMD-Instinct-MI300X-OAM": 1}


def test_of_two_families_of_gpus_the_first_with_visible_devices_is_announced(
    machine: FakeMachine,
) -> None:
    add_nvidia(machine, 1)
    add_intel(machine, 2)
    assert resolve_node_accelerators(None, {}, machine.host()).devices["GPU"].family == "nvidia"
    machine.environ["CUDA_VISIBLE_DEVICES"] = ""
    assert resolve_node_accelerators(None, {}, machine.host()).devices["GPU"].family == "intel"
    named = resolve_node_accelerators(None, {}, machine.host(), gpu_family="nvidia")
    assert named == NodeAccelerators()


@pytest.mark.parametrize("name", ["neuron", "voodoo", "NVIDIA"])
def test_an_unknown_family_of_gpus_is_refused(machine: FakeMachine, name: str) -> None:
    with pytest.raises(AcceleratorRequestError, match="use one of nvidia, amd, intel"):
        resolve_node_accelerators(2, {}, machine.host(), gpu_family=name)


def test_gpus_are_not_announced_among_resources(machine: FakeMachine) -> None:
    with pytest.raises(AcceleratorRequestError, match="announced with num_gpus"):
        resolve_node_accelerators(None, {"GPU": 2}, machine.host())


def test_a_node_can_have_several_kinds_of_accelerators(machine: FakeMachine) -> None:
    add_gaudi(machine)
    add_tpu(machine, 4)
    machine.metadata = {"accelerator-type": "v4-8"}
    add_nvidia(machine, 2, "NVIDIA H200")
    found = resolve_node_accelerators(None, {}, machine.host())
    assert {name: len(group.ids) for name, group in found.devices.items()} == {
        "GPU": 2,
        "TPU": 4,
        "HPU": 4,
    }
    assert found.resources == {
        "accelerator_type:H200": 1,
        "accelerator_type:TPU-V4": 1,
        "accelerator_type:Intel-GAUDI3": 1,
    }
    assert found.labels["ray.io/accelerator-type"] == "H200"
    variables = assigned_environment({"GPU": ["1"], "TPU": ["3"], "HPU": []}, found, {})
    assert variables["CUDA_VISIBLE_DEVICES"] == "1"
    assert variables["TPU_VISIBLE_CHIPS"] == "3"
    assert "HABANA_VISIBLE_MODULES" not in variables


def test_other_resources_are_the_callers(machine: FakeMachine) -> None:
    found = resolve_node_accelerators(None, {"disk": 3, "memory": 1e9}, machine.host())
    assert found == NodeAccelerators()


def test_declared_devices_are_handed_out_like_gpus(machine: FakeMachine) -> None:
    found = resolve_node_accelerators(None, FPGA, machine.host())
    assert found.devices["FPGA"].ids == ("0", "1", "2", "3")
    assert found.devices["FPGA"].fractional
    assert assigned_environment({"FPGA": ["1", "2"]}, found, {}) == {"FPGA_VISIBLE_DEVICES": "1,2"}


def test_declared_devices_follow_their_own_variable(machine: FakeMachine) -> None:
    machine.environ["FPGA_VISIBLE_DEVICES"] = "a,b"
    two = {"FPGA": {"count": 2, "env": "FPGA_VISIBLE_DEVICES", "fractional": False}}
    found = resolve_node_accelerators(None, two, machine.host())
    assert found.devices["FPGA"].ids == ("a", "b")
    assert not found.devices["FPGA"].fractional
    with pytest.raises(AcceleratorRequestError, match=r"4 FPGA are asked for.* names 2"):
        resolve_node_accelerators(None, FPGA, machine.host())
    machine.environ["MINIRAY_NOSET_FPGA_VISIBLE_DEVICES"] = "1"
    assert assigned_environment({"FPGA": ["a"]}, found, machine.environ) == {}


def test_declared_devices_need_no_variable(machine: FakeMachine) -> None:
    found = resolve_node_accelerators(None, {"slot": {"count": 2}}, machine.host())
    assert found.devices["slot"].ids == ("0", "1")
    assert assigned_environment({"slot": ["1"]}, found, {}) == {}


@pytest.mark.parametrize(
    ("declared", "message"),
    [
        ({"env": "FPGA_VISIBLE_DEVICES"}, "with the keys count, env, fractional"),
        ({"count": 1, "variable": "X"}, "with the keys count, env, fractional"),
        ({"count": 1, "env": "A=B"}, "must be the name of an environment variable"),
        ({"count": 1, "env": 7}, "must be the name of an environment variable"),
        ({"count": 1, "fractional": "no"}, "must be true or false"),
        ({"count": 1.5}, "must be a whole number"),
    ],
)
def test_a_wrong_declaration_is_refused(
    machine: FakeMachine, declared: dict[str, object], message: str
) -> None:
    with pytest.raises(AcceleratorRequestError, match=message):
        resolve_node_accelerators(None, {"FPGA": declared}, machine.host())


@pytest.mark.parametrize(
    ("resources", "message"),
    [
        ({"A": {"count": 2, "env": "X"}, "B": {"count": 1, "env": "X"}}, "of 'B' .* X, .* of 'A'"),
        ({"A": {"count": 2, "env": "CUDA_VISIBLE_DEVICES"}}, "CUDA_VISIBLE_DEVICES, .* of 'GPU'"),
    ],
)
def test_a_variable_cannot_name_the_devices_of_two_resources(
    machine: FakeMachine, resources: dict[str, object], message: str
) -> None:
    with pytest.raises(AcceleratorRequestError, match=message):
        resolve_node_accelerators(2, resources, machine.host())


def test_a_machine_without_accelerators_costs_little_and_starts_nothing(
    machine: FakeMachine,
) -> None:
    for name in ("null", "zero", "urandom", "tty", "kvm"):
        machine.file(f"/dev/{name}")
    host = machine.host()
    resolve_node_accelerators(None, {}, host)
    times = []
    for _ in range(5):
        start = time.process_time()  # of all threads, and not of what else runs here
        assert resolve_node_accelerators(None, {}, host) == NodeAccelerators()
        times.append(time.process_time() - start)
    assert min(times) < 0.020
    assert machine.calls == []
    assert machine.asked == []


def test_other_resources_and_gpus_can_be_asked_for_in_fractions() -> None:
    check_amount("GPU", 0.3)
    check_amount("disk", 0.5)


def test_the_resources_that_are_devices() -> None:
    assert DEVICE_RESOURCES == ("GPU", "neuron_cores", "TPU", "HPU", "NPU")


def test_every_model_name_is_public() -> None:
    names = {name for name in vars(models) if name.isidentifier() and name[0].isupper()}
    assert names <= set(vars(public_names))
    assert public_names.NVIDIA_TESLA_A100 == "A100"


def test_families_are_looked_for_at_the_same_time(
    machine: FakeMachine, monkeypatch: pytest.MonkeyPatch
) -> None:
    add_nvidia(machine, 2)
    add_gaudi(machine, 4)
    together = threading.Barrier(2, timeout=30)  # each waits until the other has begun
    for family in (family_named("nvidia"), family_named("gaudi")):
        detect = family.detect

        def wait_and_detect(host: Host, detect: Callable[[Host], Detected] = detect) -> Detected:
            together.wait()
            return detect(host)

        monkeypatch.setattr(family, "detect", wait_and_detect)
    found = resolve_node_accelerators(None, {}, machine.host())
    assert {name: len(group.ids) for name, group in found.devices.items()} == {"GPU": 2, "HPU": 4}
