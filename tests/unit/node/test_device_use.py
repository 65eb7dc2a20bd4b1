"""What a node's metrics say of how much its devices are used."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

import pytest
from accelerator_helpers import FakeMachine, add_nvidia

from miniray.accelerators import resolve_node_accelerators
from miniray.accelerators.host import DetectionError
from miniray.node.metrics import DeviceUse

if TYPE_CHECKING:
    from pathlib import Path

TOLD = """0, GPU-9221d5d1-b60b-a624-bf14-0a1819cfda3b, 37, 1024, 81559
1, GPU-1c9ac9a1-0d1f-2a3b-4c5d-0a1819cfda3b, [N/A], 0, 81559
"""


@pytest.fixture
def machine(tmp_path: Path) -> FakeMachine:
    found = FakeMachine(tmp_path)
    add_nvidia(found, 2)
    return found


def use_on(machine: FakeMachine) -> DeviceUse:
    return DeviceUse(resolve_node_accelerators(None, {}, machine.host()), machine.host())


def test_use_and_memory_are_told_of_each_device_that_the_driver_knows(machine: FakeMachine) -> None:
    machine.tools["nvidia-smi"] = TOLD
    first, second = ({"resource": "GPU", "device": device} for device in "01")
    assert use_on(machine).sample() == [
        ("device_utilization_ratio", first, 0.37),
        ("device_memory_used_bytes", first, 1 << 30),
        ("device_memory_size_bytes", first, 81559 << 20),
        ("device_memory_used_bytes", second, 0),
        ("device_memory_size_bytes", second, 81559 << 20),
    ]


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
        assert use.sample() == []
    assert "is not told any more" in caplog.text
    asked = len(machine.calls)
    assert use.sample() == []
    assert len(machine.calls) == asked


def test_a_machine_without_the_tool_tells_nothing_and_logs_nothing(
    machine: FakeMachine, caplog: pytest.LogCaptureFixture
) -> None:
    assert use_on(machine).sample() == []
    assert caplog.text == ""
