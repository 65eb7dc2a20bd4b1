"""Huawei Ascend: device nodes and the table of ``npu-smi``."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from accelerator_helpers import NPU_SMI, NPU_SMI_TWO_CHIPS, FakeMachine, add_ascend

from miniray.accelerators import check_amount
from miniray.accelerators.host import DetectionError
from miniray.accelerators.npu import AscendNPU

if TYPE_CHECKING:
    from pathlib import Path


@pytest.fixture
def machine(tmp_path: Path) -> FakeMachine:
    return FakeMachine(tmp_path)


@pytest.mark.parametrize(
    ("chip", "name"),
    [("910B4", "Ascend910B4"), ("310P3", "Ascend310P3"), ("Ascend910", "Ascend910")],
)
def test_a_chip_is_named_as_ray_names_it(machine: FakeMachine, chip: str, name: str) -> None:
    add_ascend(machine, 1)
    machine.tools["npu-smi"] = NPU_SMI.replace("910B3", chip)
    assert AscendNPU().detect(machine.host()).type == name


def test_each_chip_is_a_device_where_an_npu_has_two(machine: FakeMachine) -> None:
    add_ascend(machine, 2)
    machine.tools["npu-smi"] = NPU_SMI_TWO_CHIPS
    found = AscendNPU().detect(machine.host())
    assert (found.ids, found.type) == (("0", "1"), "Ascend910")


def test_a_container_numbers_its_devices_from_zero(machine: FakeMachine) -> None:
    machine.file("/dev/davinci5")
    machine.file("/dev/davinci6")
    assert AscendNPU().detect(machine.host()).ids == ("0", "1")


def test_devices_count_without_the_tool(machine: FakeMachine) -> None:
    add_ascend(machine, 2)
    del machine.tools["npu-smi"]
    found = AscendNPU().detect(machine.host())
    assert found.ids == ("0", "1")
    assert found.type is None


def test_a_tool_that_lists_nothing_is_an_error(machine: FakeMachine) -> None:
    # What the tool says where the driver and its firmware do not match.
    add_ascend(machine, 1)
    machine.tools["npu-smi"] = "dcmi module initialize failed. ret is -8005\n"
    with pytest.raises(DetectionError, match="listed no NPU: dcmi module initialize failed"):
        AscendNPU().detect(machine.host())


def test_an_npu_can_be_shared() -> None:
    check_amount("NPU", 0.25)
