"""AMD GPUs: the compute driver's topology and its two variables."""

from __future__ import annotations

import dataclasses
import re
from typing import TYPE_CHECKING

import pytest
from accelerator_helpers import FakeMachine, add_amd

from miniray.accelerators.amd import TYPES, AmdGPU
from miniray.accelerators.host import Host
from miniray.accelerators.node_resources import assigned_environment, resolve_node_accelerators

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


@pytest.mark.parametrize(
    ("rocr", "hip", "ids"),
    [
        # As told in https://github.com/lumi-ai-factory/laifs-container-recipes/issues/13.
        ("0,3,4,7", "0,1", ["0", "1"]),
        ("2,3", "0,1", ["0", "1"]),
        ("2,3", "1,0", ["1", "0"]),
        ("2,3", "0,3", ["0"]),  # ROCR leaves two
        ("1", "1", []),  # https://github.com/mcmonkeyprojects/SwarmUI/issues/565
        ("2,9", "0,1", ["0"]),  # there is no 9 on this machine
        ("", "0,1", []),
        ("2,3", "", []),
        ("GPU-4b2c1a9f8d3e6f7a,3", "0,1", ["0", "1"]),
    ],
)
def test_ids_of_hip_count_among_what_rocr_leaves(
    tmp_path: Path, rocr: str, hip: str, ids: list[str]
) -> None:
    machine = FakeMachine(tmp_path)
    add_amd(machine, 8)
    machine.environ.update(ROCR_VISIBLE_DEVICES=rocr, HIP_VISIBLE_DEVICES=hip)
    found = resolve_node_accelerators(None, {}, machine.host())
    assert list(found.devices["GPU"].ids if found.devices else ()) == ids
    for id in ids:  # ROCR's variable is inherited and stays: the worker's ids count within it
        variables = assigned_environment({"GPU": [id]}, found, machine.environ)
        assert variables == {"HIP_VISIBLE_DEVICES": id}


def test_more_gpus_than_both_variables_leave_are_refused_with_both_of_them(
    machine: FakeMachine,
) -> None:
    machine.environ.update(ROCR_VISIBLE_DEVICES="2,3", HIP_VISIBLE_DEVICES="0,1,2")
    told = (
        "3 GPU are asked for, but HIP_VISIBLE_DEVICES='0,1,2' within "
        "ROCR_VISIBLE_DEVICES='2,3' names 2"
    )
    with pytest.raises(ValueError, match=re.escape(told)):
        resolve_node_accelerators(3, {}, machine.host())
    found = resolve_node_accelerators(2, {}, machine.host())
    assert found.devices["GPU"].ids == ("0", "1")


def test_hip_reads_cudas_variable_where_its_own_is_not_set(machine: FakeMachine) -> None:
    # "HIP_VISIBLE_DEVICES or CUDA_VISIBLE_DEVICES": https://rocm.docs.amd.com/projects/HIP/en/
    # latest/reference/env_variables.html. A worker with ROCR's set beside it would see nothing.
    machine.environ["CUDA_VISIBLE_DEVICES"] = "1,3"
    found = resolve_node_accelerators(None, {}, machine.host())
    assert found.devices["GPU"].ids == ("1", "3")
    variables = assigned_environment({"GPU": ["3"]}, found, machine.environ)
    assert variables == {"CUDA_VISIBLE_DEVICES": "3"}
    machine.environ["HIP_VISIBLE_DEVICES"] = "2"
    assert resolve_node_accelerators(None, {}, machine.host()).devices["GPU"].ids == ("2",)


def test_an_empty_variable_of_cuda_hides_no_amd_gpu(machine: FakeMachine) -> None:
    machine.environ["CUDA_VISIBLE_DEVICES"] = ""
    found = resolve_node_accelerators(None, {}, machine.host())
    assert found.devices["GPU"].variable == "ROCR_VISIBLE_DEVICES"
    assert len(found.devices["GPU"].ids) == 4


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


def test_a_machine_whose_properties_were_captured(tmp_path: Path) -> None:
    # An MI350X: https://github.com/ROCm/rocm-systems/pull/10274 quotes these lines of its file.
    machine = FakeMachine(tmp_path)
    add_amd(machine, 0)
    machine.file(
        "/sys/class/kfd/kfd/topology/nodes/5/properties",
        "simd_count 1024\narray_count 32\nsimd_arrays_per_engine 1\ncu_per_simd_array 9\n"
        "simd_per_cu 4\ndevice_id 30112\nnum_sdma_engines 2\nnum_sdma_xgmi_engines 14\n"
        "num_cp_queues 24\nmax_engine_clk_fcompute 2200\ncapability 2889327232\ncapability2 1\n"
        "debug_prop 1494\n",
    )
    found = AmdGPU().detect(machine.host())
    assert (found.ids, found.type) == (("0",), "AMD-Instinct-MI350X-OAM")


def test_a_machine_with_the_driver_and_no_gpu_has_none(tmp_path: Path) -> None:
    machine = FakeMachine(tmp_path)
    add_amd(machine, 0)
    assert AmdGPU().detect(machine.host()).ids == ()
