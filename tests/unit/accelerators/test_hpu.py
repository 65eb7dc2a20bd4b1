"""Intel Gaudi: module ids, names, and what else is an accel device."""

from __future__ import annotations

import pytest
from accelerator_helpers import FakeMachine, add_gaudi

from miniray.accelerators.base import AcceleratorRequestError
from miniray.accelerators.host import DetectionError
from miniray.accelerators.hpu import GaudiHPU
from miniray.accelerators.node_resources import resolve_node_accelerators
from miniray.accelerators.registry import check_amount


def test_devices_are_named_by_their_module_id(machine: FakeMachine) -> None:
    add_gaudi(machine, 2, "5, HL-225\n4, HL-225\n")
    assert GaudiHPU().detect(machine.host()).ids == ("4", "5")


def test_logical_devices_fill_up_module_ids(machine: FakeMachine) -> None:
    add_gaudi(machine, 2, "5, HL-225\n4, HL-225\n")
    found = resolve_node_accelerators(None, {"HPU": 4}, machine.host())
    assert found.devices["HPU"].ids == ("4", "5", "0", "1")


@pytest.mark.parametrize(
    ("code", "name"),
    [
        ("HL-205", "Intel-GAUDI"),
        ("HL-225", "Intel-GAUDI2"),
        ("HL-288", "Intel-GAUDI2"),
        ("HL-325L", "Intel-GAUDI3"),
        ("HL-100", None),
    ],
)
def test_a_product_code_is_named_as_ray_names_it(
    machine: FakeMachine, code: str, name: str | None
) -> None:
    add_gaudi(machine, 1, f"0, {code}\n")
    assert GaudiHPU().detect(machine.host()).type == name


def test_device_nodes_are_counted_where_the_tool_is_missing(machine: FakeMachine) -> None:
    add_gaudi(machine, 3)
    del machine.tools["hl-smi"]
    found = GaudiHPU().detect(machine.host())
    assert found.ids == ("0", "1", "2")
    assert found.type is None


def test_device_nodes_of_older_drivers_are_known(machine: FakeMachine) -> None:
    machine.file("/dev/hl0")
    machine.file("/dev/hl_controlD0")
    assert GaudiHPU().detect(machine.host()).ids == ("0",)


def test_a_desktop_processors_npu_is_no_gaudi(machine: FakeMachine) -> None:
    machine.file("/dev/accel/accel0")
    machine.file("/sys/class/accel/accel0/device/vendor", "0x8086\n")
    assert resolve_node_accelerators(None, {}, machine.host()).devices == {}
    assert machine.calls == []


def test_other_output_of_the_tool_is_an_error(machine: FakeMachine) -> None:
    add_gaudi(machine, 1, "ERROR: no devices were found\n")
    with pytest.raises(DetectionError, match="instead of a module id and a name"):
        GaudiHPU().detect(machine.host())


def test_a_gaudi_is_not_shared() -> None:
    with pytest.raises(AcceleratorRequestError, match="HPU can't be shared"):
        check_amount("HPU", 0.5)
