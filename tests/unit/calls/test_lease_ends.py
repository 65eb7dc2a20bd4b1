"""When a task client gives leases back."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
from process_doubles import NODE

from miniray.common.config import config
from miniray.common.specs import LeaseSpec, Spread
from miniray.messages import protocol as p

if TYPE_CHECKING:
    from task_world import TaskWorld

# --- the end of leases ----------------------------------------------------------------


@pytest.mark.parametrize(("max_calls", "left"), [(0, 0), (1, 0), (3, 2)])
@pytest.mark.parametrize("placement", [None, Spread()])
def test_a_lease_goes_back_with_the_number_of_calls_that_its_worker_has_left(
    world: TaskWorld, max_calls: int, left: int, placement: Any
) -> None:
    spec = LeaseSpec(name="", resources={"GPU": 1}, max_calls=max_calls, placement=placement)
    group = world.client.group("gpu", lambda: spec)
    call = world.call(group=group)
    world.reply(world.grant(group), call)
    assert world.link.head_heard("return_lease") == [(1, False, left)]


def test_an_idle_lease_goes_back_after_a_while(world: TaskWorld) -> None:
    call = world.call()
    peer = world.grant()
    world.reply(peer, call)
    assert world.returned == []
    for lease in world.group().leases.values():
        lease.idle_since -= config().lease_idle
    world.me.loop.fire()
    assert world.returned == [1]
    assert not world.group().leases
    assert world.group().asked == 0


def test_a_busy_lease_survives_the_sweep(world: TaskWorld) -> None:
    first = world.call()
    peer = world.grant()
    world.reply(peer, first)
    second = world.call()
    world.me.loop.fire()
    assert world.returned == []
    world.reply(peer, second)
    assert world.me.loop.timers  # looked at again


def test_leases_with_devices_go_back_at_once(world: TaskWorld) -> None:
    group = world.group("gpu", GPU=1)
    call = world.call(group=group)
    peer = world.grant(group)
    world.reply(peer, call)
    assert world.returned == [1]


def test_a_lease_that_nobody_needs_any_more_is_not_asked_for(world: TaskWorld) -> None:
    calls = [world.call(), world.call()]
    peer = world.grant()
    world.reply(peer, calls[0], seconds=0.05)
    world.reply(peer, calls[1], seconds=0.05)
    assert world.wanted[-1] == 1


def test_a_revoked_lease_goes_back_after_the_task_that_runs(world: TaskWorld) -> None:
    world.fast()
    first, second = world.call(), world.call()
    peer = world.grant()
    world.client.on_revoked(1, world.group().id)
    assert peer.of_kind(p.PEER_LEASE_END) == [(p.PEER_LEASE_END, 1)]
    world.recall(peer, second)
    assert world.returned == []
    world.reply(peer, first)
    assert world.returned == [1]
    assert world.wanted[-1] == 1  # for the one that came back


def test_a_revoked_lease_whose_last_tasks_are_handed_back_goes_back(world: TaskWorld) -> None:
    """The worker may have been between two tasks when the word reached it."""
    world.fast()
    first, second = world.call(), world.call()
    peer = world.grant()
    world.client.on_revoked(1, world.group().id)
    world.reply(peer, first, seconds=0.0001)
    assert world.returned == []
    world.recall(peer, second)
    assert world.returned == [1]
    assert world.grant().calls == [second.number]


def test_an_idle_lease_that_is_revoked_goes_back_at_once(world: TaskWorld) -> None:
    call = world.call()
    world.reply(world.grant(), call)
    world.client.on_revoked(1, world.group().id)
    world.client.on_revoked(1, world.group().id)
    assert world.returned == [1]


def test_a_grant_for_an_unknown_group_goes_back(world: TaskWorld) -> None:
    world.client.on_granted(999, 7, NODE, b"worker99", 0)
    assert world.returned == [7]


def test_a_worker_of_few_calls_gets_no_more_than_those(world: TaskWorld) -> None:
    group = world.group("few", max_calls=2)
    group.duration = 0.0001
    calls = [world.call(group=group) for _ in range(3)]
    peer = world.grant(group)
    assert peer.calls == [call.number for call in calls[:2]]
    world.reply(peer, calls[0], 0.0001)
    world.reply(peer, calls[1], 0.0001)
    assert world.returned == [1]
    assert world.grant(group).calls == [calls[2].number]


def test_tasks_that_come_back_leave_their_part_of_few_calls(world: TaskWorld) -> None:
    group = world.group("few", max_calls=2)
    group.duration = 0.0001
    calls = [world.call(group=group) for _ in range(2)]
    peer = world.grant(group)
    world.recall(peer, calls[1])
    world.reply(peer, calls[0])
    assert world.returned == []
    assert peer.calls == [calls[0].number, calls[1].number, calls[1].number]
    world.reply(peer, calls[1])
    assert world.returned == [1]
