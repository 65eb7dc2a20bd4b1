from __future__ import annotations

import pickle
import threading
from typing import TYPE_CHECKING, Any

import pytest
from core_doubles import NODE, Caller, FakePeer, packed

from miniray.config import config
from miniray.core import protocol as p
from miniray.core.borrowing import error_value
from miniray.core.locality import RATE
from miniray.core.task_client import TaskClient
from miniray.exceptions import TaskCancelledError, WorkerCrashedError

if TYPE_CHECKING:
    from miniray.core.call import Call
    from miniray.core.lease_groups import LeaseGroup


class Fixture:
    """A task client, and a head that grants when it is told to."""

    def __init__(self) -> None:
        self.me = Caller()
        self.link = self.me.link
        self.client = TaskClient(
            self.me.calls,
            self.me.peers,  # type: ignore[arg-type]
            self.link,  # type: ignore[arg-type]
            self.me.loop,  # type: ignore[arg-type]
            clock=lambda: self.now,
        )
        self.now = 100.0
        self.leases = 0

    def group(self, key: str = "cpu", max_calls: int = 0, **resources: float) -> LeaseGroup:
        spec = {
            "resources": resources or {"CPU": 1},
            "max_calls": max_calls,
            "placement": None,
        }
        return self.client.group(key, lambda: spec)

    def call(self, *args: Any, group: LeaseGroup | None = None, **how: Any) -> Call:
        name = how.pop("name", None)
        call = self.me.call(self.client, *args, options=group or self.group(), **how)
        call.name = name or call.name
        self.client.submit(call)
        return call

    def grant(self, group: LeaseGroup | None = None, node: bytes = NODE) -> FakePeer:
        self.leases += 1
        process = b"worker%02d" % self.leases
        group = group or self.group()
        limit = group.spec["max_calls"]
        self.client.on_granted(group.id, self.leases, node, process, limit)
        return self.me.peers.get(node, process)

    def reply(self, peer: FakePeer, call: Call, seconds: float = 0.05) -> None:
        """As the runtime hands a reply on."""
        self.client.observe(call, seconds)
        self.me.reply(peer, call, "done")

    def fail(self, peer: FakePeer, call: Call, error: BaseException) -> None:
        message = (p.PEER_REPLY, call.number, p.STATUS_ERROR, (error_value(error),), None)
        self.me.calls.on_reply(peer, message)  # type: ignore[arg-type]

    def lose(self, peer: FakePeer) -> None:
        peer.lost = True
        self.client.on_peer_lost(peer)  # type: ignore[arg-type]

    def recall(self, peer: FakePeer, *calls: Call) -> None:
        self.client.on_recalled(peer, [call.number for call in calls])  # type: ignore[arg-type]

    def fast(self) -> None:
        """Let tasks be so short that many go down one lease."""
        self.group().duration = 0.0001

    def stored(self, node: bytes, size: int) -> Any:
        """A ref of a value in the memory of a node."""
        value = (p.VALUE_SHARED, (node, self.me.calls.next_number(), size), ())
        return self.me.table.create_with_value(self.me.ids.new(), value, None)

    @property
    def wanted(self) -> list[int]:
        return [wanted for _, _, wanted, _ in self.link.head_heard("want_leases")]

    @property
    def asked_near(self) -> list[bytes]:
        return [near for *_, near in self.link.head_heard("want_leases")]

    @property
    def returned(self) -> list[int]:
        return [notice[0] for notice in self.link.head_heard("return_lease")]

    def error_of(self, call: Call) -> BaseException | None:
        value = self.me.result_of(call)
        if value is None or value[0] != p.VALUE_ERROR:
            return None
        error: BaseException = pickle.loads(value[1])
        return error


@pytest.fixture
def world() -> Fixture:
    return Fixture()


# --- sending -----------------------------------------------------------------------


def test_leases_are_asked_for_as_tasks_come(world: Fixture) -> None:
    for _ in range(3):
        world.call()
    assert world.wanted == [1, 2, 3]


def test_leases_are_asked_for_in_the_name_of_the_first_task_that_waits(world: Fixture) -> None:
    """Functions with the same needs share leases, and people are told who waits for them."""
    world.call(name="first")
    world.grant()
    world.call(name="second")
    world.call(name="third")
    names = [spec["name"] for _, spec, _, _ in world.link.head_heard("want_leases")]
    assert names == ["first", "second", "second"]


def test_long_tasks_go_one_to_a_lease_and_short_ones_many(world: Fixture) -> None:
    calls = [world.call() for _ in range(4)]
    first, second = world.grant(), world.grant()
    assert first.calls == [calls[0].number]
    assert second.calls == [calls[1].number]
    world.reply(first, calls[0], seconds=0.0001)
    assert first.calls == [call.number for call in (calls[0], calls[2], calls[3])]


def test_a_task_is_sent_once_its_values_are_there(world: Fixture) -> None:
    ref = world.me.table.create(world.me.ids.new())
    call = world.call(ref)
    assert world.wanted == []
    world.me.table.set_value(ref.binary(), packed(1))
    assert world.wanted == [1]
    peer = world.grant()
    assert peer.calls == [call.number]
    assert peer.sent[-1][5][0][3] == packed(1)


def test_the_error_of_an_argument_is_the_tasks(world: Fixture) -> None:
    ref = world.me.table.create_with_value(
        world.me.ids.new(), error_value(ZeroDivisionError()), None
    )
    call = world.call(ref)
    peer = world.grant()
    world.me.loop.run()
    assert isinstance(world.error_of(call), ZeroDivisionError)
    assert peer.calls == []


# --- what is next ---------------------------------------------------------------------
def far_away(world: Fixture) -> Any:
    """A ref of a value in the memory of another node, too small for going there."""
    return world.stored(b"far away", 1 << 18)


def told_ahead(peer: FakePeer) -> list[tuple[int, int]]:
    """Calls that a worker was told of, and how many values of each it is to fetch."""
    return [(number, len(values)) for _, number, values in peer.of_kind(p.PEER_AHEAD)]


def test_the_next_task_of_a_busy_worker_has_its_arguments_moved_there(world: Fixture) -> None:
    refs = [far_away(world), far_away(world)]
    first, second, third = (world.call(*refs) for _ in range(3))
    peer = world.grant()
    assert (peer.calls, told_ahead(peer)) == ([first.number], [(second.number, 2)])
    world.reply(peer, first)
    assert peer.calls == [first.number, second.number]
    assert told_ahead(peer) == [(second.number, 2), (third.number, 2)]
    assert world.wanted == [1, 2, 3]  # as if all waited in the queue


def test_tasks_whose_arguments_are_there_stay_in_the_queue(world: Fixture) -> None:
    ref = world.stored(NODE, 1 << 20)
    for _ in range(3):
        world.call(ref)
    assert told_ahead(world.grant()) == []
    assert len(world.group().queue) == 2


def test_a_worker_that_comes_free_runs_what_was_next_at_another_one(world: Fixture) -> None:
    calls = [world.call(far_away(world)) for _ in range(2)]
    busy = world.grant()
    assert told_ahead(busy) == [(calls[1].number, 1)]
    free = world.grant()
    assert free.calls == [calls[1].number]
    assert told_ahead(busy) == [(calls[1].number, 1), (calls[1].number, 0)]
    world.reply(busy, calls[0])
    assert busy.calls == [calls[0].number]


def test_what_was_next_at_a_worker_that_others_get_is_the_first_that_waits(
    world: Fixture,
) -> None:
    calls = [world.call(far_away(world)) for _ in range(3)]
    peer = world.grant()
    world.client.on_revoked(1, world.group().id)
    assert told_ahead(peer) == [(calls[1].number, 1), (calls[1].number, 0)]
    world.reply(peer, calls[0])
    assert world.returned == [1]
    assert world.grant().calls == [calls[1].number]


def test_what_was_next_at_a_worker_that_died_runs_elsewhere(world: Fixture) -> None:
    calls = [world.call(far_away(world), retries=1) for _ in range(2)]
    world.lose(world.grant())
    peer = world.grant()
    assert peer.calls == [calls[0].number]
    assert told_ahead(peer) == [(calls[1].number, 1)]


def test_a_task_can_be_cancelled_when_it_is_next(world: Fixture) -> None:
    calls = [world.call(far_away(world)) for _ in range(2)]
    peer = world.grant()
    assert world.client.cancel(calls[1], force=False, recursive=True)
    assert isinstance(world.error_of(calls[1]), TaskCancelledError)
    assert told_ahead(peer) == [(calls[1].number, 1), (calls[1].number, 0)]
    world.reply(peer, calls[0])
    assert peer.calls == [calls[0].number]


def test_tasks_that_can_never_run_fail_also_if_they_are_next(world: Fixture) -> None:
    calls = [world.call(far_away(world)) for _ in range(3)]
    world.grant()
    world.client.on_failed(world.group().id, pickle.dumps(ValueError("never")))
    assert [type(world.error_of(call)) for call in calls] == [type(None), ValueError, ValueError]


# --- near what is read ----------------------------------------------------------------
FAR = b"far away"
LARGE = 200 << 20


def test_a_lease_is_asked_for_where_most_of_what_the_task_reads_is(world: Fixture) -> None:
    world.call(world.stored(NODE, LARGE), world.stored(FAR, LARGE // 2), world.stored(FAR, LARGE))
    assert world.asked_near == [FAR]


def test_a_task_that_comes_later_has_its_own_node_asked_for_when_it_is_the_first(
    world: Fixture,
) -> None:
    world.call()
    second = world.call(world.stored(FAR, LARGE))
    assert world.asked_near == [b"", FAR]
    world.grant()
    assert world.grant(node=FAR).calls == [second.number]


@pytest.mark.parametrize("placement", [("spread",), ("node", b"other", False)])
def test_a_task_whose_place_was_chosen_goes_there(world: Fixture, placement: Any) -> None:
    group = world.client.group(
        "there", lambda: {"resources": {"CPU": 1}, "max_calls": 0, "placement": placement}
    )
    world.call(world.stored(FAR, LARGE), group=group)
    assert world.asked_near == [b""]


def test_a_task_runs_where_its_values_are_although_another_lease_is_idle(world: Fixture) -> None:
    world.reply(world.grant(), world.call())
    call = world.call(world.stored(FAR, LARGE))
    assert (world.wanted[-1], world.asked_near[-1]) == (2, FAR)
    assert world.grant(node=FAR).calls == [call.number]


def test_a_task_does_not_wait_for_a_node_without_room(world: Fixture) -> None:
    idle = world.grant()
    call = world.call(world.stored(FAR, LARGE))
    assert idle.calls == []
    world.client.on_no_room(world.group().id, FAR)
    assert idle.calls == [call.number]
    later = world.call(world.stored(FAR, LARGE))
    assert told_ahead(idle) == [(later.number, 1)]


def test_a_task_waits_for_a_busy_lease_on_its_node_if_there_is_no_room_for_another(
    world: Fixture,
) -> None:
    calls = [world.call(world.stored(FAR, LARGE)) for _ in range(2)]
    there, idle = world.grant(node=FAR), world.grant()
    world.client.on_no_room(world.group().id, FAR)
    assert idle.calls == []
    world.reply(there, calls[0])
    assert there.calls == [call.number for call in calls]


def test_a_task_waits_for_a_node_as_long_as_moving_its_values_would_take(world: Fixture) -> None:
    idle = world.grant()
    call = world.call(world.stored(FAR, LARGE))
    ((delay, _),) = [timer for timer in world.me.loop.timers if timer[0] < config().lease_idle]
    assert delay == pytest.approx(LARGE / RATE)
    world.now += delay
    world.me.loop.fire()
    assert idle.calls == [call.number]


def test_a_task_with_less_patience_than_the_one_before_it_does_not_wait_longer(
    world: Fixture,
) -> None:
    world.fast()
    idle = world.grant()
    world.call(world.stored(FAR, 10 * LARGE))
    small = world.call(world.stored(FAR, LARGE))
    world.now += LARGE / RATE
    world.me.loop.fire()
    assert small.number in idle.calls


def test_a_busy_worker_gets_first_what_its_node_has(world: Fixture) -> None:
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
    assert told_ahead(peer) == [(far.number, 1)]


def test_a_task_that_is_handed_back_still_goes_where_its_values_are(world: Fixture) -> None:
    world.fast()
    running, call = world.call(), world.call(world.stored(NODE, LARGE))
    peer = world.grant()
    assert peer.calls == [running.number, call.number]
    world.recall(peer, call)
    assert world.grant(node=FAR).calls == []
    world.reply(peer, running)
    assert peer.calls == [running.number, call.number, call.number]


def test_a_task_that_an_idle_lease_leaves_to_a_busy_one_goes_there_in_time(world: Fixture) -> None:
    world.call()
    there = world.grant(node=FAR)
    idle = world.grant()
    call = world.call(world.stored(FAR, LARGE), far_away(world), world.stored(NODE, 1 << 18))
    assert idle.calls == told_ahead(there) == []
    world.now += LARGE / RATE
    world.me.loop.fire()
    assert idle.calls == [call.number]


def test_a_lease_that_may_not_take_what_is_first_takes_what_is_next_at_another(
    world: Fixture,
) -> None:
    _running, next_one = world.call(), world.call(far_away(world))
    busy = world.grant()
    assert told_ahead(busy) == [(next_one.number, 1)]
    world.call(world.stored(FAR, LARGE))
    assert world.grant(node=b"third").calls == [next_one.number]


def test_no_more_leases_are_asked_for_than_tasks_wait_where_there_is_no_room(
    world: Fixture,
) -> None:
    for _ in range(2):
        world.call(world.stored(FAR, LARGE))
    world.grant(node=FAR)
    world.client.on_no_room(world.group().id, FAR)
    assert world.grant().calls == []
    assert world.wanted == [1, 2]
    world.call(world.stored(FAR, LARGE))
    assert world.wanted == [1, 2, 3]


def test_a_node_without_room_keeps_no_lease_from_being_asked_for_on_another(
    world: Fixture,
) -> None:
    first = world.call(world.stored(FAR, LARGE))
    world.call(world.stored(FAR, LARGE))
    far, _idle = world.grant(node=FAR), world.grant()
    world.client.on_no_room(world.group().id, FAR)
    world.reply(far, first)
    call = world.call(world.stored(b"third", LARGE))
    assert (world.wanted[-1], world.asked_near[-1]) == (3, b"third")
    assert world.grant(node=b"third").calls == [call.number]


def test_a_lease_that_goes_back_is_not_waited_for(world: Fixture) -> None:
    calls = [world.call(world.stored(FAR, LARGE)) for _ in range(2)]
    world.grant(node=FAR)
    idle = world.grant()
    world.client.on_revoked(1, world.group().id)
    assert idle.calls == []
    world.client.on_no_room(world.group().id, FAR)
    assert idle.calls == [calls[1].number]


def test_a_lease_in_place_of_one_that_is_over_is_asked_for_where_the_next_task_reads(
    world: Fixture,
) -> None:
    group = world.group("once", max_calls=1)
    calls = [world.call(world.stored(FAR, LARGE), group=group) for _ in range(2)]
    world.reply(world.grant(group, FAR), calls[0])
    assert world.returned == [1]
    assert set(world.asked_near) == {FAR}


def test_a_cancelled_task_leaves_no_wish(world: Fixture) -> None:
    call = world.call(world.stored(FAR, LARGE))
    world.client.cancel(call, force=False, recursive=True)
    world.call(world.stored(FAR, LARGE))
    world.client.on_failed(world.group().id, pickle.dumps(ValueError("never")))
    assert not world.group().wishes.by_number


# --- the end of leases ----------------------------------------------------------------


@pytest.mark.parametrize(("max_calls", "left"), [(0, 0), (1, 0), (3, 2)])
@pytest.mark.parametrize("placement", [None, ("spread",)])
def test_a_lease_goes_back_with_the_number_of_calls_that_its_worker_has_left(
    world: Fixture, max_calls: int, left: int, placement: Any
) -> None:
    spec = {"resources": {"GPU": 1}, "max_calls": max_calls, "placement": placement}
    group = world.client.group("gpu", lambda: spec)
    call = world.call(group=group)
    world.reply(world.grant(group), call)
    assert world.link.head_heard("return_lease") == [(1, False, left)]


def test_an_idle_lease_goes_back_after_a_while(world: Fixture) -> None:
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


def test_a_busy_lease_survives_the_sweep(world: Fixture) -> None:
    first = world.call()
    peer = world.grant()
    world.reply(peer, first)
    second = world.call()
    world.me.loop.fire()
    assert world.returned == []
    world.reply(peer, second)
    assert world.me.loop.timers  # looked at again


def test_leases_with_devices_go_back_at_once(world: Fixture) -> None:
    group = world.group("gpu", GPU=1)
    call = world.call(group=group)
    peer = world.grant(group)
    world.reply(peer, call)
    assert world.returned == [1]


def test_a_lease_that_nobody_needs_any_more_is_not_asked_for(world: Fixture) -> None:
    calls = [world.call(), world.call()]
    peer = world.grant()
    world.reply(peer, calls[0], seconds=0.05)
    world.reply(peer, calls[1], seconds=0.05)
    assert world.wanted[-1] == 1


def test_a_revoked_lease_goes_back_after_the_task_that_runs(world: Fixture) -> None:
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


def test_a_revoked_lease_whose_last_tasks_are_handed_back_goes_back(world: Fixture) -> None:
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


def test_an_idle_lease_that_is_revoked_goes_back_at_once(world: Fixture) -> None:
    call = world.call()
    world.reply(world.grant(), call)
    world.client.on_revoked(1, world.group().id)
    world.client.on_revoked(1, world.group().id)
    assert world.returned == [1]


def test_an_idle_lease_goes_back_in_place_of_a_revoked_one_that_is_in_use(world: Fixture) -> None:
    first, second = world.call(), world.call()
    busy, idle = world.grant(), world.grant()
    world.reply(idle, second)
    world.client.on_revoked(1, world.group().id)
    assert world.returned == [2]
    assert busy.of_kind(p.PEER_LEASE_END) == []
    world.reply(busy, first)
    assert world.returned == [2]  # the first one is kept


def test_a_grant_for_an_unknown_group_goes_back(world: Fixture) -> None:
    world.client.on_granted(999, 7, NODE, b"worker99", 0)
    assert world.returned == [7]


def test_a_worker_of_few_calls_gets_no_more_than_those(world: Fixture) -> None:
    group = world.group("few", max_calls=2)
    group.duration = 0.0001
    calls = [world.call(group=group) for _ in range(3)]
    peer = world.grant(group)
    assert peer.calls == [call.number for call in calls[:2]]
    world.reply(peer, calls[0], 0.0001)
    world.reply(peer, calls[1], 0.0001)
    assert world.returned == [1]
    assert world.grant(group).calls == [calls[2].number]


def test_tasks_that_come_back_leave_their_part_of_few_calls(world: Fixture) -> None:
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


# --- recalled tasks -------------------------------------------------------------------


def test_recalled_tasks_go_to_others_in_their_order(world: Fixture) -> None:
    world.fast()
    calls = [world.call() for _ in range(4)]
    first = world.grant()
    assert first.calls == [call.number for call in calls]
    world.recall(first, *calls[1:])
    second = world.grant()
    assert second.calls == [calls[1].number]  # a long one: no window for more
    assert world.wanted[-1] == 4


def test_a_task_that_was_cancelled_when_it_came_back_does_not_run(world: Fixture) -> None:
    world.fast()
    first, second = world.call(), world.call()
    peer = world.grant()
    second.cancelled = True
    assert not world.client.cancel(second, False, True)
    world.recall(peer, second)
    assert isinstance(world.error_of(second), TaskCancelledError)
    world.reply(peer, first)
    assert peer.calls == [first.number, second.number]


def test_a_recall_of_what_has_ended_changes_nothing(world: Fixture) -> None:
    call = world.call()
    peer = world.grant()
    world.reply(peer, call)
    world.recall(peer, call)
    assert peer.calls == [call.number]
    assert not world.group().queue


# --- failures ------------------------------------------------------------------------


def test_only_the_task_that_had_begun_pays_for_a_crash(world: Fixture) -> None:
    world.fast()
    first, second, third = world.call(retries=1), world.call(), world.call()
    peer = world.grant()
    world.lose(peer)
    assert world.returned == [1]
    again = world.grant()
    assert again.calls == [first.number, second.number, third.number]
    world.lose(again)
    assert isinstance(world.error_of(first), WorkerCrashedError)
    assert world.me.result_of(second) is None
    last = world.grant()
    assert last.calls == [second.number, third.number]


def test_the_error_of_a_crash_says_how_the_process_ended(world: Fixture) -> None:
    call = world.call()
    world.lose(world.grant())
    error = world.error_of(call)
    assert isinstance(error, WorkerCrashedError)
    assert (error.exit_code, error.pid, error.function_name) == (-9, 7, call.name)


def test_the_error_of_a_crash_does_not_wait_for_a_head_that_does_not_know(world: Fixture) -> None:
    world.link.hears_of_ends = False
    call = world.call()
    world.lose(world.grant())
    assert world.me.result_of(call) is None
    world.me.loop.fire()
    error = world.error_of(call)
    assert isinstance(error, WorkerCrashedError)
    assert error.exit_code is None


def test_a_cancelled_task_behind_a_crash_is_cancelled(world: Fixture) -> None:
    world.fast()
    first, second = world.call(retries=-1), world.call()
    peer = world.grant()
    second.cancelled = True
    world.lose(peer)
    assert isinstance(world.error_of(second), TaskCancelledError)
    assert world.grant().calls == [first.number]


def test_a_task_that_raised_leaves_its_lease_before_it_runs_again(world: Fixture) -> None:
    call = world.call(retries=1, retry_exceptions=True)
    peer = world.grant()
    world.fail(peer, call, ValueError())
    assert peer.calls == [call.number, call.number]
    world.reply(peer, call)
    (lease,) = world.group().leases.values()
    assert not lease.calls


def test_a_retry_elsewhere_does_not_keep_the_first_lease_busy(world: Fixture) -> None:
    first, second = world.call(retries=1, retry_exceptions=True), world.call()
    one = world.grant()
    world.client.on_revoked(1, world.group().id)
    world.fail(one, first, ValueError())
    assert world.returned == [1]
    other = world.grant()
    assert other.calls == [second.number]
    world.reply(other, second)
    assert other.calls == [second.number, first.number]


def test_a_shape_that_can_never_be_had_fails_its_tasks(world: Fixture) -> None:
    calls = [world.call(), world.call()]
    world.client.on_failed(world.group().id, pickle.dumps(ValueError("infeasible")))
    assert all(isinstance(world.error_of(call), ValueError) for call in calls)
    world.call()
    assert world.wanted[-1] == 1


def test_a_worker_that_was_lost_before_its_lease_came_is_replaced(world: Fixture) -> None:
    call = world.call()
    made = world.me.peers.get

    def lost(node_id: bytes, process_id: bytes) -> FakePeer:
        peer = made(node_id, process_id)
        peer.lost = True
        return peer

    world.me.peers.get = lost  # type: ignore[method-assign]
    world.client.on_granted(world.group().id, 50, NODE, b"worker50", 0)
    world.me.peers.get = made  # type: ignore[method-assign]
    assert isinstance(world.error_of(call), WorkerCrashedError)
    assert world.returned == [50]


# --- cancelling -----------------------------------------------------------------------


def test_a_queued_task_is_withdrawn_and_its_lease_too(world: Fixture) -> None:
    call = world.call()
    assert world.client.cancel(call, False, True)
    assert isinstance(world.error_of(call), TaskCancelledError)
    assert world.wanted[-1] == 0


def test_a_task_cancelled_while_it_waits_for_values_never_runs(world: Fixture) -> None:
    ref = world.me.table.create(world.me.ids.new())
    call = world.call(ref)
    call.cancelled = True
    assert world.client.cancel(call, False, True)
    world.me.table.set_value(ref.binary(), packed(1))
    assert world.wanted == []
    assert not world.group().queue
    assert isinstance(world.error_of(call), TaskCancelledError)


def test_a_sent_task_is_cancelled_at_its_worker(world: Fixture) -> None:
    call = world.call()
    peer = world.grant()
    assert not world.client.cancel(call, True, False)
    assert peer.of_kind(p.PEER_CANCEL) == [(p.PEER_CANCEL, call.number, True, False)]


def test_tasks_submitted_while_their_values_arrive_are_sent_once(world: Fixture) -> None:
    for _ in range(200):
        ref = world.me.table.create(world.me.ids.new())
        thread = threading.Thread(target=world.me.table.set_value, args=(ref.binary(), packed(1)))
        thread.start()
        call = world.call(ref)
        thread.join()
        numbers = [queued.number for queued in world.group().queue]
        assert numbers == [call.number]
        world.group().queue.clear()


# --- a head that comes back -------------------------------------------------------------


def test_a_head_that_comes_back_hears_what_is_held_and_wanted(world: Fixture) -> None:
    for _ in range(3):
        world.call()
    world.grant()
    world.client.on_head_back()
    assert world.link.head_heard("hold_leases") == [([1],)]
    assert world.wanted[-1] == 2  # beyond the one that it does not count


def test_a_head_that_comes_back_is_not_asked_for_what_nobody_waits_for(world: Fixture) -> None:
    call = world.call()
    peer = world.grant()
    asked = len(world.wanted)
    world.client.on_head_back()
    assert len(world.wanted) == asked
    world.reply(peer, call)
    world.call()
    assert peer.calls
