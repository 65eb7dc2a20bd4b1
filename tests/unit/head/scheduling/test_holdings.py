from __future__ import annotations

import pytest

from miniray.common.specs import Allocation
from miniray.head.scheduling.groups import sort_out
from miniray.head.scheduling.resources import ResourcePool, node_pool

NODE = "00"
KEY, OTHER = (b"group", 0), (b"other", 0)


@pytest.fixture
def node() -> ResourcePool:
    return node_pool(NODE, {"CPU": 2}, {"GPU": ["0", "1"]})


def gpu(device: str, units: int, bundle: tuple[bytes, int] | None = None) -> Allocation:
    return Allocation(NODE, (), (("GPU", ((device, units),)),), bundle)


def test_a_lease_draws_on_its_bundle(node: ResourcePool) -> None:
    bundle = gpu("0", 5_000)
    assert sort_out(node, {KEY: bundle}, {1: gpu("0", 4_000, KEY)}) == ({KEY: bundle}, set())


def test_a_lease_of_a_bundle_that_was_placed_again_on_another_device_is_homeless(
    node: ResourcePool,
) -> None:
    bundle = gpu("0", 5_000)
    assert sort_out(node, {KEY: bundle}, {1: gpu("1", 4_000, KEY)}) == ({KEY: bundle}, {1})


def test_a_lease_that_a_bundle_has_no_room_for_beside_a_later_one_is_homeless(
    node: ResourcePool,
) -> None:
    bundle = gpu("0", 5_000)
    running = {1: gpu("0", 4_000, KEY), 2: gpu("0", 4_000, KEY)}
    assert sort_out(node, {KEY: bundle}, running) == ({KEY: bundle}, {1})


def test_a_bundle_gives_way_to_what_runs_and_its_leases_are_homeless(node: ResourcePool) -> None:
    bundles = {KEY: gpu("0", 6_000), OTHER: gpu("1", 5_000)}
    running = {1: gpu("0", 5_000), 2: gpu("0", 4_000, KEY)}
    assert sort_out(node, bundles, running) == ({OTHER: bundles[OTHER]}, {2})


def test_leases_that_hold_more_than_the_node_has_are_refused(node: ResourcePool) -> None:
    with pytest.raises(ValueError, match="free"):
        sort_out(node, {}, {1: gpu("0", 6_000), 2: gpu("0", 6_000)})
