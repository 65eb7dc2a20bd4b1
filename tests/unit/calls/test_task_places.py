"""Which worker a task goes to: one near what it reads."""

from __future__ import annotations

import pickle
from typing import TYPE_CHECKING, Any

import pytest
from process_doubles import NODE

from miniray.calls.task_groups import RATE, TaskGroup
from miniray.common.config import config
from miniray.common.specs import LeaseSpec, NodeAffinity, Spread

if TYPE_CHECKING:
    from task_world import TaskWorld

    from miniray.calls.call import Call
    from miniray.calls.task_groups import HeldLease

FAR = b"far away"
LARGE = 200 << 20


def test_a_lease_is_asked_for_where_most_of_what_the_task_reads_is(world: TaskWorld) -> None:
    world.call(world.stored(NODE, LARGE), world.stored(FAR, LARGE // 2), world.stored(FAR, LARGE))
    assert world.asked_near == [FAR]


def test_a_task_that_comes_later_has_its_own_node_asked_for_when_it_is_the_first(
    world: TaskWorld,
) -> None:
    world.call()
    second = world.call(world.stored(FAR, LARGE))
    assert world.asked_near == [b"", FAR]
    world.grant()
    assert world.grant(node=FAR).calls == [second.number]


@pytest.mark.parametrize("placement", [Spread(), NodeAffinity("ff")])
def test_a_task_whose_place_was_chosen_goes_there(world: TaskWorld, placement: Any) -> None:
    group = world.client.group(
        "there", lambda: LeaseSpec(name="", resources={"CPU": 1}, placement=placement)
    )
    world.call(world.stored(FAR, LARGE), group=group)
    assert world.asked_near == [b""]


def test_a_task_runs_where_its_values_are_although_another_lease_is_idle(world: TaskWorld) -> None:
    world.reply(world.grant(), world.call())
    call = world.call(world.stored(FAR, LARGE))
    assert (world.wanted[-1], world.asked_near[-1]) == (2, FAR)
    assert world.grant(node=FAR).calls == [call.number]


def test_a_task_waits_for_a_node_as_long_as_moving_its_values_would_take(world: TaskWorld) -> None:
    idle = world.grant()
    call = world.call(world.stored(FAR, LARGE))
    ((delay, _),) = [timer for timer in world.me.loop.timers if timer[0] < config().lease_idle]
    assert delay == pytest.approx(LARGE / RATE)
    world.now += delay
    world.me.loop.fire()
    assert idle.calls == [call.number]
    later = world.call(world.stored(FAR, LARGE))  # does not wait for that node just now
    world.reply(idle, call)
    assert idle.calls == [call.number, later.number]


def test_a_task_with_less_patience_than_the_one_before_it_does_not_wait_longer(
    world: TaskWorld,
) -> None:
    world.fast()
    idle = world.grant()
    world.call(world.stored(FAR, 10 * LARGE))
    small = world.call(world.stored(FAR, LARGE))
    world.now += LARGE / RATE
    world.me.loop.fire()
    assert small.number in idle.calls


def test_a_task_whose_wait_ends_while_a_lease_is_refused_to_it_is_looked_at_again(
    world: TaskWorld, monkeypatch: pytest.MonkeyPatch
) -> None:
    idle = world.grant()
    take = TaskGroup.take

    def take_late(group: TaskGroup, lease: HeldLease) -> Call | None:
        taken = take(group, lease)
        world.now += LARGE / RATE
        return taken

    monkeypatch.setattr(TaskGroup, "take", take_late)
    call = world.call(world.stored(FAR, LARGE))
    assert idle.calls == []
    world.me.loop.fire()
    assert idle.calls == [call.number]


def test_a_busy_worker_gets_first_what_its_node_has(world: TaskWorld) -> None:
    running, far, near = (
        world.call(),
        world.call(world.stored(FAR, LARGE)),
        world.call(world.stored(NODE, LARGE)),
    )
    peer = world.grant()
    world.reply(peer, running)
    assert peer.calls == [running.number, near.number]
    world.now += 1
    world.me.loop.fire()
    world.reply(peer, near)
    assert peer.calls == [running.number, near.number, far.number]


def test_a_task_that_is_handed_back_still_goes_where_its_values_are(world: TaskWorld) -> None:
    world.fast()
    running, call = world.call(), world.call(world.stored(NODE, LARGE))
    peer = world.grant()
    assert peer.calls == [running.number, call.number]
    world.recall(peer, call)
    assert world.grant(node=FAR).calls == []
    world.reply(peer, running)
    assert peer.calls == [running.number, call.number, call.number]


def test_a_task_that_an_idle_lease_leaves_to_a_busy_one_goes_there_in_time(
    world: TaskWorld,
) -> None:
    world.call()
    world.grant(node=FAR)
    idle = world.grant()
    call = world.call(world.stored(FAR, LARGE), world.stored(NODE, 1 << 18))
    assert idle.calls == []
    world.now += LARGE / RATE
    world.me.loop.fire()
    assert idle.calls == [call.number]


def test_a_lease_in_place_of_one_that_is_over_is_asked_for_where_the_next_task_reads(
    world: TaskWorld,
) -> None:
    group = world.group("once", max_calls=1)
    calls = [world.call(world.stored(FAR, LARGE), group=group) for _ in range(2)]
    world.reply(world.grant(group, FAR), calls[0])
    assert world.returned == [1]
    assert set(world.asked_near) == {FAR}


def test_a_cancelled_task_leaves_no_wish(world: TaskWorld) -> None:
    call = world.call(world.stored(FAR, LARGE))
    world.client.cancel(call, force=False, recursive=True)
    world.call(world.stored(FAR, LARGE))
    world.client.on_failed(world.group().id, pickle.dumps(ValueError("never")))
    assert not world.group().wishes
