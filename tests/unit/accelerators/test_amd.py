"""AMD GPUs: the compute driver's topology and its two variables."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

import pytest
from accelerator_helpers import FakeMachine, add_amd

from miniray.accelerators import assigned_environment, resolve_node_accelerators
from miniray.accelerators.amd import TYPES, AmdGPU
from miniray.accelerators.host import Host

if TYPE_CHECKING:
    from pathlib import Path


@pytest.fixture
def machine(tmp_path: Path) -> FakeMachine:
    machine = FakeMachine(tmp_path)
    add_amd(machine, 4)
    return machine


def test_hip_visible_devices_is_used_where_the_daemon_has_it(machine: FakeMachine) -> None:
    machine.environ["HIP_VISIBLE_DEVICES"] = "1,3"
    found = resolve_node_accelerators(None, {}, machine.host())
    assert found.devices["GPU"].ids == ("1", "3")
    variables = assigned_environment({"GPU": ["3"]}, found, machine.environ)
    assert variables == {"HIP_VISIBLE_DEVICES": "3"}


def test_hip_visible_devices_governs_where_the_daemon_has_both(machine: FakeMachine) -> None:
    machine.environ.update(ROCR_VISIBLE_DEVICES="2,3", HIP_VISIBLE_DEVICES="0,1")
    found = resolve_node_accelerators(None, {}, machine.host())
    assert found.devices["GPU"].ids == ("0", "1")
    variables = assigned_environment({"GPU": ["1"]}, found, machine.environ)
    assert variables == {"HIP_VISIBLE_DEVICES": "1"}


def test_a_refusal_names_the_variable_that_governs(machine: FakeMachine) -> None:
    machine.environ["HIP_VISIBLE_DEVICES"] = "1"
    with pytest.raises(ValueError, match="HIP_VISIBLE_DEVICES='1' names 1"):
        resolve_node_accelerators(2, {}, machine.host())


def test_gpus_are_counted_in_the_order_of_their_numbers(tmp_path: Path) -> None:
    machine = FakeMachine(tmp_path)
    add_amd(machine, 12)
    assert AmdGPU().detect(machine.host()).ids == tuple(map(str, range(12)))


def test_a_gpu_of_another_container_is_not_counted(machine: FakeMachine) -> None:
    class Container(Host):
        def read(self, path: str) -> str:
            if "/nodes/2/" in path:
                raise PermissionError(1, "Operation not permitted", path)
            return super().read(path)

    host = machine.host()
    inside = Container(**{f.name: getattr(host, f.name) for f in dataclasses.fields(host)})
    assert AmdGPU().detect(inside).ids == ("0", "1", "2")


def test_a_gpu_without_its_render_node_is_not_counted(machine: FakeMachine) -> None:
    (machine.root / "dev/dri/renderD129").unlink()
    assert AmdGPU().detect(machine.host()).ids == ("0", "1", "2")


def test_an_unknown_model_has_no_type(tmp_path: Path) -> None:
    machine = FakeMachine(tmp_path)
    add_amd(machine, 1, device=0x1234)
    found = AmdGPU().detect(machine.host())
    assert found.ids == ("0",)
    assert found.type is None


@pytest.mark.parametrize("device", [0x740F, 0x74A2, 0x679A])
def test_a_model_is_told_by_its_device_id(tmp_path: Path, device: int) -> None:
    machine = FakeMachine(tmp_path)
    add_amd(machine, 1, device)
    assert AmdGPU().detect(machine.host()).type == TYPES[device]


def test_a_machine_with_the_driver_and_no_gpu_has_none(tmp_path: Path) -> None:
    machine = FakeMachine(tmp_path)
    add_amd(machine, 0)
    assert AmdGPU().detect(machine.host()).ids == ()
