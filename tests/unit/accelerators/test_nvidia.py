"""NVIDIA GPUs: the driver's files and tool, names of models and of devices."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest
from accelerator_helpers import NVIDIA_INFORMATION, FakeMachine, add_nvidia

from miniray.accelerators.host import DetectionError
from miniray.accelerators.node_resources import assigned_environment, resolve_node_accelerators
from miniray.accelerators.nvidia import NvidiaGPU, accelerator_type


# Product names as the driver reports them; types as Ray spells them.
@pytest.mark.parametrize(
    ("model", "name"),
    [
        ("Tesla V100-SXM2-16GB", "V100"),
        ("Tesla P100-PCIE-16GB", "P100"),
        ("Tesla T4", "T4"),
        ("Tesla K80", "K80"),
        ("NVIDIA A10G", "A10G"),
        ("NVIDIA L4", "L4"),
        ("NVIDIA L40S", "L40S"),
        ("NVIDIA A100-SXM4-40GB", "A100"),
        ("A100-SXM4-80GB", "A100-SXM4-80GB"),
        ("NVIDIA H100 80GB HBM3", "H100"),
        ("NVIDIA H200", "H200"),
        ("NVIDIA H20", "H20"),
        ("NVIDIA B200", "B200"),
        ("NVIDIA GB200", "GB200"),
        ("NVIDIA GH200 480GB", "GH200"),
        ("NVIDIA RTX PRO 6000 Blackwell Server Edition", "RTX-PRO-6000"),
        ("Quadro RTX 6000", "RTX-6000"),
        ("NVIDIA GeForce RTX 5090", "GeForce-RTX-5090"),
        ("NVIDIA GeForce GTX 1080 Ti", "GeForce-GTX-1080-Ti"),
        ("NVIDIA TITAN V", "TITAN-V"),
        ("", None),
    ],
)
def test_a_model_is_named_as_ray_names_it(model: str, name: str | None) -> None:
    assert accelerator_type(model) == name


def test_uuids_and_mig_instances_are_devices(machine: FakeMachine) -> None:
    add_nvidia(machine, 1)
    names = "MIG-4b0f0c5e-1d39-5b4e-8c3c-0d1f2a3b4c5d,GPU-9221d5d1-b60b-a624-bf14-0a1819cfda3b"
    machine.environ["CUDA_VISIBLE_DEVICES"] = names
    found = resolve_node_accelerators(None, {}, machine.host())
    mig, whole = names.split(",")
    assert found.devices["GPU"].ids == (mig, whole)
    variables = assigned_environment({"GPU": [mig]}, found, machine.environ)
    assert variables == {"CUDA_VISIBLE_DEVICES": mig}


def test_devices_after_a_negative_number_are_hidden(machine: FakeMachine) -> None:
    add_nvidia(machine, 4)
    machine.environ["CUDA_VISIBLE_DEVICES"] = "2, 1,-1,0"
    found = resolve_node_accelerators(None, {}, machine.host())
    assert found.devices["GPU"].ids == ("2", "1")


def test_a_container_counts_the_gpus_that_it_was_given(machine: FakeMachine) -> None:
    add_nvidia(machine, 4)
    for minor in (0, 2):
        (machine.root / f"dev/nvidia{minor}").unlink()
    assert NvidiaGPU().detect(machine.host()).ids == ("0", "1")


@pytest.mark.parametrize("with_files", [True, False])
def test_a_gpu_that_a_control_group_refuses_is_not_counted(
    machine: FakeMachine, monkeypatch: pytest.MonkeyPatch, with_files: bool
) -> None:
    """Slurm shows a job the nodes of all GPUs; access() asks its control group."""
    add_nvidia(machine, 2)
    if not with_files:
        shutil.rmtree(machine.root / "proc/driver/nvidia")
    monkeypatch.setattr(os, "access", lambda path, mode: Path(path).name != "nvidia0")
    assert NvidiaGPU().detect(machine.host()).ids == ("0",)


def test_a_gpu_that_the_driver_excludes_is_not_counted(machine: FakeMachine) -> None:
    add_nvidia(machine, 2)
    text = NVIDIA_INFORMATION.format(model="NVIDIA H200", bus="61", minor=1, excluded="Yes")
    machine.file("/proc/driver/nvidia/gpus/0000:61:00.0/information", text)
    assert NvidiaGPU().detect(machine.host()).ids == ("0",)


def test_device_nodes_are_counted_where_the_driver_hides_its_files(machine: FakeMachine) -> None:
    for minor in range(2):
        machine.file(f"/dev/nvidia{minor}")
    found = NvidiaGPU().detect(machine.host())
    assert found.ids == ("0", "1")
    assert found.type is None


def test_a_file_without_a_device_minor_is_an_error(machine: FakeMachine) -> None:
    add_nvidia(machine, 1)
    machine.file("/proc/driver/nvidia/gpus/0000:60:00.0/information", "Model: NVIDIA H200\n")
    with pytest.raises(DetectionError, match=r"0000:60:00\.0 no device minor"):
        NvidiaGPU().detect(machine.host())


def test_the_tool_is_asked_where_the_driver_hides_its_files(machine: FakeMachine) -> None:
    """WSL has one device for all GPUs; sandboxes pass the devices through, without their files."""
    machine.file("/dev/dxg")
    machine.tools["nvidia-smi"] = "0, NVIDIA H200\n1, NVIDIA H200\n"
    found = NvidiaGPU().detect(machine.host())
    assert (found.ids, found.type) == (("0", "1"), "H200")


def test_the_tool_is_not_asked_where_there_is_no_device(machine: FakeMachine) -> None:
    machine.tools["nvidia-smi"] = "0, NVIDIA H200\n"
    assert NvidiaGPU().detect(machine.host()).ids == ()
    assert machine.calls == []


@pytest.mark.parametrize(
    ("printed", "ids"),
    [
        ("No devices were found\n", ()),
        ("0, NVIDIA T4\nWARNING: infoROM is corrupted at gpu 0000:00:1E.0\n", ("0",)),
    ],
)
def test_what_the_tool_says_beside_its_table_is_no_gpu(
    machine: FakeMachine, printed: str, ids: tuple[str, ...]
) -> None:
    machine.file("/dev/dxg")
    machine.tools["nvidia-smi"] = printed
    assert NvidiaGPU().detect(machine.host()).ids == ids
