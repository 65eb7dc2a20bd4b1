"""Huawei Ascend: device nodes, the table of ``npu-smi``, and what the device library answers."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest
from accelerator_helpers import NPU_SMI, NPU_SMI_TWO_CHIPS, FakeMachine, add_ascend

from miniray.accelerators import ascendcl
from miniray.accelerators.host import TOOL_TIMEOUT, DetectionError
from miniray.accelerators.npu import AscendNPU
from miniray.accelerators.registry import check_amount


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
    machine.tools["npu-smi"] = NPU_SMI
    assert AscendNPU().detect(machine.host()).ids == ("0", "1")


@pytest.mark.parametrize(("said", "type"), [("Ascend910B3\n", "Ascend910B3"), ("", None)])
def test_the_device_library_names_the_chip_where_the_tool_is_missing(
    machine: FakeMachine, said: str, type: str | None
) -> None:
    add_ascend(machine, 2)
    del machine.tools["npu-smi"]
    machine.tools[Path(sys.executable).name] = said
    found = AscendNPU().detect(machine.host())
    assert (found.ids, found.type) == (("0", "1"), type)
    assert machine.calls[-1][1] == TOOL_TIMEOUT


class FakeLibrary:
    """Stands in for libascendcl.so."""

    error = 0

    def __init__(self, path: str) -> None:
        if path == "libascendcl.so":
            raise OSError(f"{path}: cannot open shared object file: No such file or directory")
        assert path == "/opt/cann/lib64/libascendcl.so"
        assert "ASCEND_RT_VISIBLE_DEVICES" not in os.environ

    def aclrtGetDeviceCount(self, _count: object) -> int:
        return self.error

    @staticmethod
    def aclrtGetSocName() -> bytes:
        return b"Ascend910B3"


def test_the_library_is_asked_where_the_toolkit_is(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("ASCEND_HOME_PATH", "/opt/cann")
    monkeypatch.setenv("ASCEND_RT_VISIBLE_DEVICES", "0")
    monkeypatch.setattr("ctypes.CDLL", FakeLibrary)
    ascendcl.main()
    assert capsys.readouterr().out == "Ascend910B3"


def test_a_library_whose_driver_is_broken_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ASCEND_HOME_PATH", "/opt/cann")
    monkeypatch.setattr("ctypes.CDLL", FakeLibrary)
    monkeypatch.setattr(FakeLibrary, "error", 507899)  # ACL_ERROR_RT_DRV_INTERNAL_ERROR
    with pytest.raises(SystemExit, match="failed with error 507899"):
        ascendcl.main()


def test_a_tool_that_lists_nothing_is_an_error(machine: FakeMachine) -> None:
    # What the tool says where the driver and its firmware do not match.
    add_ascend(machine, 1)
    machine.tools["npu-smi"] = "dcmi module initialize failed. ret is -8005\n"
    with pytest.raises(DetectionError, match="listed no NPU: dcmi module initialize failed"):
        AscendNPU().detect(machine.host())


def test_an_npu_can_be_shared() -> None:
    check_amount("NPU", 0.25)
