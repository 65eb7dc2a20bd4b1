from __future__ import annotations

import math

import pytest

from miniray.common.amounts import UNIT, from_units, parse_needs, to_units
from miniray.common.specs import Allocation
from miniray.head.scheduling.resources import ResourcePool, node_pool


def make_node(gpus: int = 2, cpus: float = 8, **resources: float) -> ResourcePool:
    devices = {"GPU": [str(number) for number in range(gpus)]}
    return node_pool("ab" * 16, {"CPU": cpus, **resources}, devices)


@pytest.mark.parametrize(("amount", "units"), [(1, UNIT), (0.18, 1800), (0.0001, 1), (0, 0)])
def test_amounts_become_ten_thousandths(amount: float, units: int) -> None:
    assert to_units(amount) == units
    assert from_units(units) == amount


def test_bytes_of_memory_lose_nothing_in_fixed_point() -> None:
    assert from_units(to_units(2**40 + 1)) == 2**40 + 1


@pytest.mark.parametrize("amount", [-1, -0.5, math.nan, math.inf, 0.00001])
def test_an_amount_that_means_nothing_is_refused_by_name(amount: float) -> None:
    with pytest.raises(ValueError, match="the amount of licence is"):
        to_units(amount, "licence")


@pytest.mark.parametrize("name", ["neuron_cores", "TPU", "HPU"])
def test_devices_that_cannot_be_shared_are_given_whole_only(name: str) -> None:
    assert parse_needs({name: 2}) == ((name, 2 * UNIT),)
    with pytest.raises(ValueError, match="can't be shared"):
        parse_needs({name: 0.5})


@pytest.mark.parametrize("name", ["GPU", "NPU"])
def test_above_one_device_the_amount_must_be_whole(name: str) -> None:
    assert parse_needs({name: 0.5}) == ((name, UNIT // 2),)
    with pytest.raises(ValueError, match="ask for 1 or 2"):
        parse_needs({name: 1.25})


def test_zero_amounts_are_no_needs() -> None:
    assert parse_needs({"CPU": 0, "GPU": 0.0}) == ()


def test_a_share_goes_to_the_fullest_device_that_has_room() -> None:
    node = make_node(gpus=3)
    first = node.allocate(parse_needs({"GPU": 0.3}))
    node.allocate(parse_needs({"GPU": 1}))
    again = node.allocate(parse_needs({"GPU": 0.5}))

    assert first.device_ids("GPU") == again.device_ids("GPU") == ["0"]


def test_whole_devices_are_the_lowest_free_ids() -> None:
    node = make_node(gpus=4)
    node.allocate(parse_needs({"GPU": 0.5}))

    assert node.allocate(parse_needs({"GPU": 2})).device_ids("GPU") == ["1", "2"]


def test_release_gives_back_exactly_the_devices_held() -> None:
    node = make_node(gpus=2)
    zero = node.allocate(parse_needs({"GPU": 1, "CPU": 1}))
    node.allocate(parse_needs({"GPU": 1}))
    node.release(zero)

    assert node.devices["GPU"].free == [UNIT, 0]
    assert node.allocate(parse_needs({"GPU": 0.5})).device_ids("GPU") == ["0"]


def test_a_sum_that_no_device_has_does_not_fit() -> None:
    node = make_node(gpus=2)
    node.allocate(parse_needs({"GPU": 0.6}))
    node.allocate(parse_needs({"GPU": 0.6}))

    assert node.available()["GPU"] == 8000
    assert not node.fits(parse_needs({"GPU": 0.6}))


def test_a_custom_resource_with_devices_is_held_device_by_device() -> None:
    node = node_pool("ab", {"CPU": 1}, {"FPGA": ["x", "y"]})

    assert node.allocate(parse_needs({"FPGA": 0.7})).device_ids("FPGA") == ["x"]
    assert node.allocate(parse_needs({"FPGA": 0.7})).device_ids("FPGA") == ["y"]
    assert not node.could_fit((("FPGA", 15_000),))


def test_a_device_out_of_service_is_not_handed_out_and_comes_back_with_what_is_free() -> None:
    node = make_node(gpus=2)
    held = node.allocate(parse_needs({"GPU": 0.5}))
    node.set_in_service("GPU", "0", False)

    assert node.allocate(parse_needs({"GPU": 0.5})).device_ids("GPU") == ["1"]
    assert not node.could_fit(parse_needs({"GPU": 2}))
    node.release(held)
    assert not node.fits(parse_needs({"GPU": 1}))
    node.set_in_service("GPU", "0", True)
    assert node.allocate(parse_needs({"GPU": 1})).device_ids("GPU") == ["0"]


def test_a_resumed_task_puts_its_node_in_debt_and_the_node_grants_no_cpu_until_it_is_paid() -> None:
    node = make_node(cpus=1)
    node.allocate(parse_needs({"CPU": 1}))
    node.add_cpu(UNIT)
    other = node.allocate(parse_needs({"CPU": 1}))
    node.add_cpu(-UNIT)

    assert node.free["CPU"] == -UNIT
    assert node.available()["CPU"] == 0
    node.release(other)
    assert not node.fits(parse_needs({"CPU": 1}))
    assert node.fits(parse_needs({"GPU": 1}))


def test_an_adopted_allocation_is_counted_and_released_like_any_other() -> None:
    node = make_node(gpus=2)
    held = Allocation(node.node_id, (("CPU", UNIT),), (("GPU", (("1", UNIT),)),))
    node.adopt(held)

    assert node.allocate(parse_needs({"GPU": 1})).device_ids("GPU") == ["0"]
    node.release(held)
    assert node.devices["GPU"].free == [0, UNIT]


@pytest.mark.parametrize(
    ("held", "complaint"),
    [
        (Allocation("", (("licence", 1),)), "has no licence"),
        (Allocation("", (), (("GPU", (("9", UNIT),)),)), "no device '9'"),
        (Allocation("", (), (("GPU", (("1", UNIT),)), ("NPU", (("0", 6000),)))), "0.5 free"),
    ],
)
def test_an_allocation_that_cannot_be_is_not_adopted_in_part(
    held: Allocation, complaint: str
) -> None:
    node = node_pool("ab", {"CPU": 1}, {"GPU": ["0", "1"], "NPU": ["0"]})
    node.allocate(parse_needs({"NPU": 0.5}))
    with pytest.raises(ValueError, match=complaint):
        node.adopt(held)

    assert node.devices["GPU"].free == [UNIT, UNIT]


def test_a_node_does_not_name_a_device_twice() -> None:
    with pytest.raises(ValueError, match="must differ"):
        node_pool("ab", {}, {"GPU": ["0", "0"]})
