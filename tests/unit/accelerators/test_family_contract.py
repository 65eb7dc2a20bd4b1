"""What holds for every family, each on a machine with four (or two) of its devices."""

from __future__ import annotations

import dataclasses
import logging
from typing import TYPE_CHECKING

import pytest
from accelerator_helpers import (
    FakeMachine,
    add_amd,
    add_ascend,
    add_gaudi,
    add_intel,
    add_neuron,
    add_nvidia,
    add_tpu,
)

from miniray.accelerators.base import AcceleratorRequestError
from miniray.accelerators.host import DetectionError
from miniray.accelerators.node_resources import (
    NodeAccelerators,
    assigned_environment,
    needs_fresh_interpreter,
    resolve_node_accelerators,
)
from miniray.accelerators.registry import FAMILIES

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

FOUR = ("0", "1", "2", "3")
BROKEN = DetectionError("the tool failed with exit code 9: driver not loaded")
SLOW = DetectionError("the tool gave no answer within 10 s")


@dataclasses.dataclass(frozen=True)
class Case:
    family: str
    resource: str
    variable: str
    type: str | None
    build: Callable[[FakeMachine], None]
    #: Makes the vendor's tool, driver or files end in this error.
    spoil: Callable[[FakeMachine, DetectionError], None]
    value: str = "{}"  # how the variable names ids


def _spoil_proc(machine: FakeMachine, error: DetectionError) -> None:
    machine.file("/proc/driver/nvidia/gpus/0000:60:00.0/information", "Model: NVIDIA H100\n")


def _spoil_kfd(machine: FakeMachine, error: DetectionError) -> None:
    machine.file("/sys/class/kfd/kfd/topology/nodes/1/properties", "simd_count none\n")


def _spoil_drm(machine: FakeMachine, error: DetectionError) -> None:
    machine.file("/sys/class/drm/card0/device/vendor", "none\n")


def _spoil_vfio(machine: FakeMachine, error: DetectionError) -> None:
    for index in range(4):
        (machine.root / f"dev/accel{index}").unlink()
    machine.file("/dev/vfio/7")
    machine.folder("/sys/kernel/iommu_groups/7/devices/0000:00:04.0/vendor")  # unreadable


def _spoil_tool(name: str) -> Callable[[FakeMachine, DetectionError], None]:
    def spoil(machine: FakeMachine, error: DetectionError) -> None:
        machine.tools[name] = error

    return spoil


CASES = [
    Case("nvidia", "GPU", "CUDA_VISIBLE_DEVICES", "H100", lambda m: add_nvidia(m, 4), _spoil_proc),
    Case(
        "amd",
        "GPU",
        "ROCR_VISIBLE_DEVICES",
        "AMD-Instinct-MI300X-OAM",
        lambda m: add_amd(m, 4),
        _spoil_kfd,
    ),
    Case(
        "intel",
        "GPU",
        "ONEAPI_DEVICE_SELECTOR",
        "Intel-GPU-Flex-170",
        lambda m: add_intel(m, 4),
        _spoil_drm,
        "level_zero:{}",
    ),
    Case(
        "neuron",
        "neuron_cores",
        "NEURON_RT_VISIBLE_CORES",
        "aws-neuron-core",
        add_neuron,
        _spoil_tool("neuron-ls"),
    ),
    Case("tpu", "TPU", "TPU_VISIBLE_CHIPS", None, lambda m: add_tpu(m, 4), _spoil_vfio),
    Case(
        "gaudi", "HPU", "HABANA_VISIBLE_MODULES", "Intel-GAUDI3", add_gaudi, _spoil_tool("hl-smi")
    ),
    Case(
        "ascend",
        "NPU",
        "ASCEND_RT_VISIBLE_DEVICES",
        "Ascend910B3",
        lambda m: add_ascend(m, 4),
        _spoil_tool("npu-smi"),
    ),
]
each_family = pytest.mark.parametrize("case", CASES, ids=lambda case: case.family)


def resolve(
    machine: FakeMachine, case: Case, count: float | None = None, family: str | None = None
) -> NodeAccelerators:
    if case.resource == "GPU":
        return resolve_node_accelerators(count, {}, machine.host(), family)
    resources = {} if count is None else {case.resource: count}
    return resolve_node_accelerators(None, resources, machine.host())


@each_family
def test_devices_that_exist_are_found(machine: FakeMachine, case: Case) -> None:
    case.build(machine)
    found = resolve(machine, case)
    assert set(found.devices) == {case.resource}
    group = found.devices[case.resource]
    assert group.ids == FOUR
    assert group.family == case.family
    assert group.variable == case.variable
    assert group.detected == 4


@each_family
def test_the_type_of_what_is_found_is_a_resource_and_a_label(
    machine: FakeMachine, case: Case
) -> None:
    case.build(machine)
    found = resolve(machine, case)
    types = {name for name in found.resources if name.startswith("accelerator_type:")}
    assert types == ({f"accelerator_type:{case.type}"} if case.type else set())
    assert found.labels.get("miniray.io/accelerator-type") == case.type
    assert found.labels.get("ray.io/accelerator-type") == case.type


@each_family
def test_nothing_is_announced_where_there_is_nothing(machine: FakeMachine, case: Case) -> None:
    machine.environ[case.variable] = "0,1"
    assert resolve(machine, case) == NodeAccelerators()
    assert machine.calls == []
    assert machine.asked == []


@each_family
def test_the_variable_restricts_what_is_found(machine: FakeMachine, case: Case) -> None:
    case.build(machine)
    machine.environ[case.variable] = case.value.format("1,3")
    assert resolve(machine, case).devices[case.resource].ids == ("1", "3")


@each_family
@pytest.mark.parametrize("value", ["", "NoDevFiles", "-1"])
def test_the_variable_can_hide_everything(machine: FakeMachine, case: Case, value: str) -> None:
    case.build(machine)
    machine.environ[case.variable] = value
    assert resolve(machine, case) == NodeAccelerators()


@each_family
def test_numbers_that_the_machine_does_not_have_are_left_out(
    machine: FakeMachine, case: Case
) -> None:
    case.build(machine)
    machine.environ[case.variable] = case.value.format("3,9")
    assert resolve(machine, case).devices[case.resource].ids == ("3",)


@each_family
def test_the_user_can_announce_fewer_or_more_than_exist(machine: FakeMachine, case: Case) -> None:
    case.build(machine)
    assert resolve(machine, case, 2).devices[case.resource].ids == ("0", "1")
    assert resolve(machine, case, 6).devices[case.resource].ids == (*FOUR, "4", "5")
    assert resolve(machine, case, 0) == NodeAccelerators()


@each_family
def test_the_user_can_announce_devices_without_hardware(machine: FakeMachine, case: Case) -> None:
    found = resolve(machine, case, 2, case.family)
    assert found.devices[case.resource].ids == ("0", "1")
    assert found.devices[case.resource].detected == 0
    assert machine.calls == []


@each_family
def test_the_user_can_take_some_of_what_the_variable_names(
    machine: FakeMachine, case: Case
) -> None:
    case.build(machine)
    machine.environ[case.variable] = case.value.format("1,3")
    assert resolve(machine, case, 1).devices[case.resource].ids == ("1",)
    assert resolve(machine, case, 2).devices[case.resource].ids == ("1", "3")


@each_family
@pytest.mark.parametrize("exist", [True, False])
def test_asking_for_more_than_the_variable_names_is_refused_with_both_numbers(
    machine: FakeMachine, case: Case, exist: bool
) -> None:
    if exist:
        case.build(machine)
    machine.environ[case.variable] = case.value.format("1,3")
    with pytest.raises(AcceleratorRequestError) as refusal:
        resolve(machine, case, 5, case.family)
    text = str(refusal.value)
    assert text.startswith(f"5 {case.resource} are asked for")
    assert "names 2" in text
    assert case.variable in text


@each_family
@pytest.mark.parametrize("count", [-1, 0.5, float("inf"), "two", True])
def test_a_node_has_a_whole_number_of_devices(
    machine: FakeMachine, case: Case, count: float
) -> None:
    with pytest.raises(AcceleratorRequestError, match="must be a whole number"):
        resolve(machine, case, count)


@each_family
def test_a_device_named_twice_is_refused(machine: FakeMachine, case: Case) -> None:
    case.build(machine)
    machine.environ[case.variable] = case.value.format("1,0,1")
    with pytest.raises(AcceleratorRequestError, match="names device 1 twice"):
        resolve(machine, case)


@each_family
@pytest.mark.parametrize("error", [BROKEN, SLOW], ids=["broken", "slow"])
def test_a_broken_or_slow_driver_counts_as_none_and_is_logged_in_one_line(
    machine: FakeMachine, case: Case, error: DetectionError, caplog: pytest.LogCaptureFixture
) -> None:
    case.build(machine)
    case.spoil(machine, error)
    with caplog.at_level(logging.WARNING):
        assert resolve(machine, case) == NodeAccelerators()
    (record,) = caplog.records
    assert case.family in record.getMessage()
    assert "\n" not in record.getMessage()
    assert all(timeout <= 10 for _, timeout in machine.calls)


@each_family
def test_a_vendors_tool_has_ten_seconds_where_there_are_devices(
    machine: FakeMachine, case: Case
) -> None:
    case.build(machine)
    resolve(machine, case)
    limits = [timeout for _, timeout in machine.calls]
    assert limits == [10] * (case.family in {"neuron", "gaudi", "ascend"})


@each_family
def test_the_user_can_override_a_broken_driver(machine: FakeMachine, case: Case) -> None:
    case.build(machine)
    case.spoil(machine, BROKEN)
    assert resolve(machine, case, 2, case.family).devices[case.resource].ids == ("0", "1")


@each_family
def test_a_worker_sees_its_devices_under_the_names_of_the_daemon(
    machine: FakeMachine, case: Case
) -> None:
    case.build(machine)
    machine.environ[case.variable] = case.value.format("1,3")
    found = resolve(machine, case)
    variables = assigned_environment({case.resource: ["3"]}, found, machine.environ)
    assert variables[case.variable] == case.value.format("3")


@each_family
def test_a_worker_without_devices_keeps_what_it_inherits(machine: FakeMachine, case: Case) -> None:
    case.build(machine)
    found = resolve(machine, case)
    assert assigned_environment({case.resource: []}, found, machine.environ) == {}
    assert assigned_environment({}, found, machine.environ) == {}


@each_family
def test_the_user_can_keep_the_variable_from_being_set(machine: FakeMachine, case: Case) -> None:
    case.build(machine)
    machine.environ[f"MINIRAY_NOSET_{case.variable}"] = "1"
    found = resolve(machine, case)
    assert assigned_environment({case.resource: ["3"]}, found, machine.environ) == {}


@each_family
def test_rays_switch_for_the_variable_is_not_read(machine: FakeMachine, case: Case) -> None:
    case.build(machine)
    machine.environ[f"RAY_EXPERIMENTAL_NOSET_{case.variable}"] = "1"
    found = resolve(machine, case)
    variables = assigned_environment({case.resource: ["3"]}, found, machine.environ)
    assert variables[case.variable] == case.value.format("3")


def test_only_cuda_devices_or_those_without_a_variable_are_given_to_forks(tmp_path: Path) -> None:
    forked = {family.name for family in FAMILIES if family.read_late}
    assert forked == {"nvidia"}
    for declared, fresh in (({"count": 1, "env": "V"}, True), ({"count": 1}, False)):
        found = resolve_node_accelerators(
            0, {"FPGA": declared, "TPU": 1}, FakeMachine(tmp_path).host()
        )
        assert needs_fresh_interpreter({"FPGA": ["0"]}, found) is fresh
        assert needs_fresh_interpreter({"FPGA": [], "TPU": []}, found) is False
        assert needs_fresh_interpreter({"FPGA": ["0"], "TPU": ["0"]}, found) is True
