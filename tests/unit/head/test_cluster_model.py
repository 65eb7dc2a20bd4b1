"""Whatever is lost or dies: no device is booked twice, and in the end nothing is held."""

from __future__ import annotations

import pytest
from cluster_model import World


@pytest.mark.parametrize(
    ("seed", "steps"),
    [
        *[(seed, 300) for seed in range(12)],
        *[pytest.param(seed, 1000, marks=pytest.mark.slow) for seed in range(100, 200)],
    ],
)
def test_nothing_is_held_when_all_has_ended_whatever_was_lost_meanwhile(
    seed: int, steps: int
) -> None:
    world = World(seed)
    for _ in range(steps):
        world.step()
    world.release_all()

    assert world.wrong == []
    assert [daemon.leases for daemon in world.daemons if daemon.leases] == []
    for pool in world.head.cluster.scheduler.nodes.values():
        assert (pool.free, pool.leases, pool.reservation) == (pool.total, {}, None)
        assert pool.devices["GPU"].free == pool.devices["GPU"].capacity
    assert not world.head.cluster.grants.waiting
    for kind in ("actors", "leases"):
        assert all(each["state"] == "DEAD" for each in world.head.state.listing(kind))
    assert world.head.cluster.placement_groups.all() == []
