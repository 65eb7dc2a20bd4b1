"""AWS Neuron cores: the tool's list, the driver's files, ranges."""

from __future__ import annotations

import pytest
from accelerator_helpers import NEURON_LS, FakeMachine, add_neuron

from miniray.accelerators.base import AcceleratorRequestError
from miniray.accelerators.host import DetectionError
from miniray.accelerators.neuron import NeuronCore
from miniray.accelerators.node_resources import resolve_node_accelerators
from miniray.accelerators.registry import check_amount


def test_the_cores_of_a_single_device_are_counted(machine: FakeMachine) -> None:
    add_neuron(machine, NEURON_LS)
    assert NeuronCore().detect(machine.host()).ids == ("0", "1")


def test_the_tool_is_taken_from_amazons_folder(machine: FakeMachine) -> None:
    add_neuron(machine)
    machine.file("/opt/aws/neuron/bin/neuron-ls")
    NeuronCore().detect(machine.host())
    ((command, _),) = machine.calls
    assert command == [f"{machine.root}/opt/aws/neuron/bin/neuron-ls", "--json-output"]


def test_the_drivers_files_are_read_where_the_tool_is_missing(machine: FakeMachine) -> None:
    # The tree of AWS's "Neuron Sysfs User Guide".
    for device in range(2):
        machine.file(f"/dev/neuron{device}")
        machine.file(f"/sys/devices/virtual/neuron_device/neuron{device}/core_count", "2\n")
    assert NeuronCore().detect(machine.host()).ids == ("0", "1", "2", "3")


@pytest.mark.parametrize("listing", ["", "no devices", "{}x", '{"nc_count": 2}', "[{}]", "[1]"])
def test_a_listing_that_is_none_is_an_error(machine: FakeMachine, listing: str) -> None:
    add_neuron(machine, listing)
    with pytest.raises(DetectionError, match="neuron-ls printed no list of devices"):
        NeuronCore().detect(machine.host())


@pytest.mark.parametrize(
    ("value", "cores"),
    [
        ("0-3", ["0", "1", "2", "3"]),
        ("0, 4-5 ,7", ["0", "4", "5", "7"]),
        ("2-2", ["2"]),
        ("", []),
    ],
)
def test_the_variable_may_hold_ranges(value: str, cores: list[str]) -> None:
    assert NeuronCore().visible_ids({"NEURON_RT_VISIBLE_CORES": value}) == cores


@pytest.mark.parametrize("value", ["3-1", "0-x", "1-"])
def test_a_range_that_is_none_is_refused(value: str) -> None:
    with pytest.raises(AcceleratorRequestError, match="write the lower core first"):
        NeuronCore().visible_ids({"NEURON_RT_VISIBLE_CORES": value})


def test_logical_cores_have_the_one_type_too(machine: FakeMachine) -> None:
    found = resolve_node_accelerators(None, {"neuron_cores": 2}, machine.host())
    assert found.resources == {"accelerator_type:aws-neuron-core": 1}


def test_a_core_is_not_shared() -> None:
    check_amount("neuron_cores", 2.0)
    with pytest.raises(AcceleratorRequestError, match=r"whole number, not 0\.5"):
        check_amount("neuron_cores", 0.5)
