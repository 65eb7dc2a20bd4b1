"""What a node's metrics say of how much its devices are used."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

import pytest
from accelerator_helpers import (
    NPU_SMI_TWO_CHIPS,
    FakeMachine,
    add_amd,
    add_ascend,
    add_gaudi,
    add_nvidia,
)

from miniray.accelerators.host import DetectionError
from miniray.accelerators.node_resources import resolve_node_accelerators
from miniray.node.metrics import DeviceUse

if TYPE_CHECKING:
    from pathlib import Path

TOLD = """0, GPU-9221d5d1-b60b-a624-bf14-0a1819cfda3b, 37, 1024, 81559, 123.45, 41, 2, 0
1, GPU-1c9ac9a1-0d1f-2a3b-4c5d-0a1819cfda3b, [N/A], 0, 81559, [N/A], 30, [N/A], [N/A]
"""


@pytest.fixture
def machine(tmp_path: Path) -> FakeMachine:
    found = FakeMachine(tmp_path)
    add_nvidia(found, 2)
    return found


def use_on(machine: FakeMachine, **labels: str) -> DeviceUse:
    found = resolve_node_accelerators(None, {}, machine.host())
    return DeviceUse(found, {**found.labels, **labels}, machine.host())


def test_use_and_memory_are_told_of_each_device_that_the_driver_knows(machine: FakeMachine) -> None:
    machine.tools["nvidia-smi"] = TOLD
    first, second = ({"resource": "GPU", "device": device} for device in "01")
    assert list(use_on(machine).sample()) == [
        ("device_utilization_ratio", first, 0.37),
        ("device_memory_used_bytes", first, 1 << 30),
        ("device_memory_size_bytes", first, 81559 << 20),
        ("device_power_watts", first, 123.45),
        ("device_temperature_celsius", first, 41),
        ("device_errors_total", first | {"kind": "corrected"}, 2),
        ("device_errors_total", first | {"kind": "uncorrected"}, 0),
        ("device_memory_used_bytes", second, 0),
        ("device_memory_size_bytes", second, 81559 << 20),
        ("device_temperature_celsius", second, 30),
    ]


def test_devices_have_a_model_and_a_uuid_once_the_driver_has_told_it(machine: FakeMachine) -> None:
    use = use_on(machine)
    first, second = ({"resource": "GPU", "device": id, "model": "H100"} for id in "01")
    assert list(use.infos.values()) == [first | {"uuid": ""}, second | {"uuid": ""}]
    machine.tools["nvidia-smi"] = TOLD
    list(use.sample())
    assert list(use.infos.values()) == [
        first | {"uuid": "GPU-9221d5d1-b60b-a624-bf14-0a1819cfda3b"},
        second | {"uuid": "GPU-1c9ac9a1-0d1f-2a3b-4c5d-0a1819cfda3b"},
    ]


def test_the_model_of_devices_is_the_one_that_the_nodes_labels_have(machine: FakeMachine) -> None:
    use = use_on(machine, **{"miniray.io/accelerator-type": "A100"})
    assert {about["model"] for about in use.infos.values()} == {"A100"}


def test_devices_that_are_named_by_uuid_keep_their_names(machine: FakeMachine) -> None:
    machine.tools["nvidia-smi"] = TOLD
    machine.environ["CUDA_VISIBLE_DEVICES"] = "GPU-9221d5d1-b60b-a624-bf14-0a1819cfda3b"
    (_, labels, value), *_ = use_on(machine).sample()
    assert labels["device"] == "GPU-9221d5d1-b60b-a624-bf14-0a1819cfda3b"
    assert value == 0.37


@pytest.mark.parametrize("printed", [DetectionError("it gave no answer"), "No devices were found"])
def test_a_driver_that_has_failed_is_not_asked_again(
    machine: FakeMachine, caplog: pytest.LogCaptureFixture, printed: str | Exception
) -> None:
    machine.tools["nvidia-smi"] = printed
    use = use_on(machine)
    with caplog.at_level(logging.WARNING):
        assert list(use.sample()) == []
    assert "is no longer reported" in caplog.text
    asked = len(machine.calls)
    assert list(use.sample()) == []
    assert len(machine.calls) == asked


def test_a_machine_without_the_tool_tells_nothing_and_logs_nothing(
    machine: FakeMachine, caplog: pytest.LogCaptureFixture
) -> None:
    assert list(use_on(machine).sample()) == []
    assert caplog.text == ""


def figures(machine: FakeMachine) -> dict[tuple[str, str], float]:
    """By name, with the kind if there is one, and device."""
    return {
        (name.removeprefix("device_") + labels.get("kind", ""), labels["device"]): value
        for name, labels, value in use_on(machine).sample()
    }


def test_amds_files_tell_use_memory_power_and_errors(tmp_path: Path) -> None:
    machine = FakeMachine(tmp_path)
    add_amd(machine, 2)
    folder = "/sys/class/drm/renderD129/device"
    machine.file(f"{folder}/gpu_busy_percent", "63\n")
    machine.file(f"{folder}/mem_info_vram_used", "1048576\n")
    machine.file(f"{folder}/mem_info_vram_total", "206141652992\n")
    machine.file(f"{folder}/hwmon/hwmon4/power1_average", "250000000\n")
    machine.file(f"{folder}/hwmon/hwmon4/temp1_input", "47000\n")
    # Sensors that the driver lists, and can't read on this device.
    machine.file(f"{folder}/hwmon/hwmon3/power1_average/refused")
    machine.file(f"{folder}/hwmon/hwmon3/temp1_input/refused")
    machine.file(f"{folder}/ras/mmhub_err_count/refused")
    machine.file(f"{folder}/ras/umc_err_count", "ue: 1\nce: 7\n")
    machine.file(f"{folder}/ras/gfx_err_count", "ue: 0\nce: 2\n")
    assert figures(machine) == {
        ("utilization_ratio", "1"): 0.63,
        ("memory_used_bytes", "1"): 1 << 20,
        ("memory_size_bytes", "1"): 206141652992,
        ("power_watts", "1"): 250,
        ("temperature_celsius", "1"): 47,
        ("errors_totaluncorrected", "1"): 1,
        ("errors_totalcorrected", "1"): 9,
    }


def test_gaudis_tool_tells_use_memory_and_power(tmp_path: Path) -> None:
    machine = FakeMachine(tmp_path)
    add_gaudi(machine)
    use = use_on(machine)
    machine.tools["hl-smi"] = (
        "1, 12 %, 768 MiB, 131072 MiB, 239 W, 31 C\n0, 0 %, 0 MiB, 1 MiB, N/A, 30 C\n"
    )
    told = {(name, labels["device"]): value for name, labels, value in use.sample()}
    assert told["device_utilization_ratio", "1"] == 0.12
    assert told["device_memory_used_bytes", "1"] == 768 << 20
    assert told["device_power_watts", "1"] == 239
    assert ("device_power_watts", "0") not in told


def test_the_table_of_npu_smi_tells_use_memory_and_power(tmp_path: Path) -> None:
    machine = FakeMachine(tmp_path)
    add_ascend(machine, 1)
    assert figures(machine) == {
        ("power_watts", "0"): 96.7,
        ("temperature_celsius", "0"): 32,
        ("utilization_ratio", "0"): 0,
        ("memory_used_bytes", "0"): 60056 << 20,
        ("memory_size_bytes", "0"): 65536 << 20,
    }
    machine.tools["npu-smi"] = NPU_SMI_TWO_CHIPS
    assert figures(machine)["memory_used_bytes", "0"] == 3416 << 20
