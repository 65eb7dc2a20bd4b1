"""Intel GPUs: discrete cards, tiles, and the forms of the device selector."""

from __future__ import annotations

import pytest
from accelerator_helpers import FakeMachine, add_intel

from miniray.accelerators.base import AcceleratorRequestError
from miniray.accelerators.intel_gpu import IntelGPU
from miniray.accelerators.node_resources import assigned_environment, resolve_node_accelerators


def add_card(machine: FakeMachine, number: int, slot: str, vendor: str, device: str) -> None:
    """One card as the kernel lists it."""
    machine.file(f"/dev/dri/card{number}")
    pci = f"/sys/devices/pci0000:00/{slot}"
    machine.file(f"{pci}/vendor", f"{vendor}\n")
    machine.file(f"{pci}/device", f"{device}\n")
    machine.folder(f"{pci}/drm/card{number}")
    machine.link(f"{pci}/drm/card{number}/device", pci)
    machine.link(f"/sys/class/drm/card{number}", f"{pci}/drm/card{number}")


def test_a_server_with_a_management_card_and_four_gpus(machine: FakeMachine) -> None:
    # https://github.com/intel/xpumanager/issues/147: an ASPEED card and four of Intel's.
    add_card(machine, 0, "0000:55:00.0", "0x1a03", "0x2000")
    for number, bus in enumerate(("0d", "64", "90", "a6"), 1):
        add_card(machine, number, f"0000:{bus}:00.0", "0x8086", "0xe223")
    machine.folder("/sys/class/drm/card0-VGA-1")
    machine.folder("/sys/class/drm/card1-DP-1")
    assert IntelGPU().detect(machine.host()).ids == ("0", "1", "2", "3")


def test_a_desktop_with_integrated_graphics_and_a_flex_card(machine: FakeMachine) -> None:
    # https://github.com/intel-gpu/intel-gpu-i915-backports/issues/167: UHD 770 and Flex 140.
    add_card(machine, 0, "0000:00:02.0", "0x8086", "0x4680")
    add_card(machine, 1, "0000:03:00.0", "0x8086", "0x56c1")
    found = IntelGPU().detect(machine.host())
    assert (found.ids, found.type) == (("0",), "Intel-GPU-Flex-140")


def test_four_cards_of_two_tiles_are_eight_devices(machine: FakeMachine) -> None:
    # https://github.com/intel/intel-extension-for-pytorch/issues/622: sycl-ls lists eight.
    add_intel(machine, 4, device="0x0bd5")
    for card in range(4):
        for tile in range(2):
            machine.folder(f"/sys/class/drm/card{card}/gt/gt{tile}")
    found = IntelGPU().detect(machine.host())
    assert (len(found.ids), found.type) == (8, "Intel-GPU-Max-1550")


def test_integrated_graphics_is_no_gpu(machine: FakeMachine) -> None:
    add_intel(machine, 1, device="0xa7a0", slot="0000:00:02.{}")
    assert IntelGPU().detect(machine.host()).ids == ()


def test_a_data_centre_card_counts_wherever_a_virtual_machine_puts_it(
    machine: FakeMachine,
) -> None:
    add_intel(machine, 1, device="0x0bda", slot="0000:00:02.{}")
    found = IntelGPU().detect(machine.host())
    assert found.ids == ("0",)
    assert found.type == "Intel-GPU-Max-1100"


def test_a_card_of_unknown_model_has_no_type(machine: FakeMachine) -> None:
    add_intel(machine, 1, device="0xe20b")
    found = IntelGPU().detect(machine.host())
    assert found.ids == ("0",)
    assert found.type is None


def test_cards_of_other_vendors_are_not_counted(machine: FakeMachine) -> None:
    add_intel(machine, 2)
    machine.file("/sys/class/drm/card0/device/vendor", "0x1a03\n")
    assert IntelGPU().detect(machine.host()).ids == ("0",)


@pytest.mark.parametrize("tile", ["/device/tile{}", "/gt/gt{}"], ids=["xe", "i915"])
def test_each_tile_of_a_max_1550_is_a_device(machine: FakeMachine, tile: str) -> None:
    add_intel(machine, 2, device="0x0bd5")
    for card in range(2):
        for number in range(2):
            machine.folder(f"/sys/class/drm/card{card}{tile.format(number)}")
    assert IntelGPU().detect(machine.host()).ids == ("0", "1", "2", "3")
    machine.environ["ZE_FLAT_DEVICE_HIERARCHY"] = "COMPOSITE"
    assert IntelGPU().detect(machine.host()).ids == ("0", "1")


def test_a_media_unit_is_no_tile(machine: FakeMachine) -> None:
    add_intel(machine, 1, device="0xe20b")
    machine.folder("/sys/class/drm/card0/gt/gt0")
    machine.folder("/sys/class/drm/card0/gt/gt1")
    assert IntelGPU().detect(machine.host()).ids == ("0",)


@pytest.mark.parametrize(
    ("selector", "ids"),
    [
        ("level_zero:0,1", ["0", "1"]),
        ("0,1", ["0", "1"]),
        ("*:1", ["1"]),
        ("level_zero:0.0,0.1", ["0.0", "0.1"]),
        ("level_zero:1;opencl:cpu", ["1"]),
        ("level_zero:0;level_zero:2", ["0", "2"]),
        ("opencl:gpu", []),
        ("", []),
        ("level_zero:*", None),
        ("level_zero:gpu", None),
        ("*:gpu", None),
        ("*", None),
        (None, None),
    ],
)
def test_forms_of_the_selector(selector: str | None, ids: list[str] | None) -> None:
    environ = {} if selector is None else {"ONEAPI_DEVICE_SELECTOR": selector}
    assert IntelGPU().visible_ids(environ) == ids


def test_a_selector_that_leaves_out_is_refused() -> None:
    with pytest.raises(AcceleratorRequestError, match="name the GPUs to use instead"):
        IntelGPU().visible_ids({"ONEAPI_DEVICE_SELECTOR": "!level_zero:0"})


@pytest.mark.parametrize("selector", [None, "level_zero:*"])
def test_an_affinity_mask_is_used_where_the_daemon_has_it(
    machine: FakeMachine, selector: str | None
) -> None:
    add_intel(machine, 4)
    machine.environ["ZE_AFFINITY_MASK"] = "2,3"
    if selector is not None:
        machine.environ["ONEAPI_DEVICE_SELECTOR"] = selector
    found = resolve_node_accelerators(None, {}, machine.host())
    assert found.devices["GPU"].ids == ("2", "3")
    variables = assigned_environment({"GPU": ["3"]}, found, machine.environ)
    assert variables == {"ZE_AFFINITY_MASK": "3"}


def test_plain_ids_become_a_selector_for_the_worker(machine: FakeMachine) -> None:
    add_intel(machine, 4)
    machine.environ["ONEAPI_DEVICE_SELECTOR"] = "1,3"
    found = resolve_node_accelerators(None, {}, machine.host())
    variables = assigned_environment({"GPU": ["1", "3"]}, found, machine.environ)
    assert variables == {"ONEAPI_DEVICE_SELECTOR": "level_zero:1,3"}
