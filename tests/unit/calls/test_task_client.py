"""How tasks are sent, fail, come back and are cancelled."""

from __future__ import annotations

import pickle
import threading
from typing import TYPE_CHECKING

from kept import kept
from process_doubles import NODE, FakePeer, packed

from miniray.common.specs import LeaseSpec
from miniray.exceptions import TaskCancelledError, WorkerCrashedError
from miniray.messages import protocol as p
from miniray.messages.value import error_value

if TYPE_CHECKING:
    from task_world import TaskWorld


def test_shapes_that_nobody_uses_any_more_are_forgotten(world: TaskWorld) -> None:
    used = world.group("used")
    world.call(group=used)
    peer = world.grant(used)
    ref = world.me.table.create(world.me.table.new_id())
    waits = world.group("waits")
    late = world.call(ref, group=waits)
    before = kept(world.client)
    groups = [world.group(f"group {number}") for number in range(2000)]
    assert world.group("group 0") is not groups[0]
    assert kept(world.client) < before + 1000
    assert world.group("used") is used
    world.me.table.set_value(ref.binary(), packed(1))
    assert world.grant(waits).calls == [late.number]
    assert len(peer.calls) == 1


# --- sending -----------------------------------------------------------------------


def test_leases_are_asked_for_as_tasks_come(world: TaskWorld) -> None:
    for _ in range(3):
        world.call()
    assert world.wanted == [1, 2, 3]


def test_leases_are_asked_for_in_the_name_of_the_first_task_that_waits(world: TaskWorld) -> None:
    """Functions with the same needs share leases, and people are told who waits for them."""
    world.call(name="first")
    world.grant()
    world.call(name="second")
    world.call(name="third")
    names = [
        LeaseSpec.from_wire(spec).name for _, spec, _, _ in world.link.head_heard("want_leases")
    ]
    assert names == ["first", "second", "second"]


def test_long_tasks_go_one_to_a_lease_and_short_ones_many(world: TaskWorld) -> None:
    calls = [world.call() for _ in range(4)]
    first, second = world.grant(), world.grant()
    assert first.calls == [calls[0].number]
    assert second.calls == [calls[1].number]
    world.reply(first, calls[0], seconds=0.0001)
    assert first.calls == [call.number for call in (calls[0], calls[2], calls[3])]


def test_a_task_that_did_not_run_says_nothing_of_how_long_tasks_take(world: TaskWorld) -> None:
    peer = world.grant()
    world.fast()
    call = world.call()
    world.me.answer(peer, call, p.STATUS_LOST, (), seconds=30.0)  # it waited for its arguments
    assert world.group().duration == 0.0001


def test_a_task_is_sent_once_its_values_are_there(world: TaskWorld) -> None:
    ref = world.me.table.create(world.me.table.new_id())
    call = world.call(ref)
    assert world.wanted == []
    world.me.table.set_value(ref.binary(), packed(1))
    assert world.wanted == [1]
    peer = world.grant()
    assert peer.calls == [call.number]
    assert peer.sent[-1][4][0][3] == packed(1)


def test_the_error_of_an_argument_is_the_tasks(world: TaskWorld) -> None:
    ref = world.me.table.create_with_value(
        world.me.table.new_id(), error_value(ZeroDivisionError()), None
    )
    call = world.call(ref)
    peer = world.grant()
    world.me.loop.run()
    assert isinstance(world.error_of(call), ZeroDivisionError)
    assert peer.calls == []


# --- recalled tasks -------------------------------------------------------------------


def test_recalled_tasks_go_to_others_in_their_order(world: TaskWorld) -> None:
    world.fast()
    calls = [world.call() for _ in range(4)]
    first = world.grant()
    assert first.calls == [call.number for call in calls]
    world.recall(first, *calls[1:])
    second = world.grant()
    assert second.calls == [calls[1].number]  # a long one: no window for more
    assert world.wanted[-1] == 4


def test_a_task_that_was_cancelled_when_it_came_back_does_not_run(world: TaskWorld) -> None:
    world.fast()
    first, second = world.call(), world.call()
    peer = world.grant()
    second.cancelled = True
    world.client.cancel(second, False, True)
    world.recall(peer, second)
    assert isinstance(world.error_of(second), TaskCancelledError)
    world.reply(peer, first)
    assert peer.calls == [first.number, second.number]


def test_a_recall_of_what_has_ended_changes_nothing(world: TaskWorld) -> None:
    call = world.call()
    peer = world.grant()
    world.reply(peer, call)
    world.recall(peer, call)
    assert peer.calls == [call.number]
    assert not world.group().queue


# --- failures ------------------------------------------------------------------------


def test_only_the_task_that_had_begun_pays_for_a_crash(world: TaskWorld) -> None:
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


def test_the_error_of_a_crash_says_how_the_process_ended(world: TaskWorld) -> None:
    call = world.call()
    world.lose(world.grant())
    error = world.error_of(call)
    assert isinstance(error, WorkerCrashedError)
    assert (error.exit_code, error.pid, error.function_name) == (-9, 7, call.name)


def test_the_error_of_a_crash_does_not_wait_for_a_head_that_does_not_know(world: TaskWorld) -> None:
    world.link.hears_of_ends = False
    call = world.call()
    world.lose(world.grant())
    assert world.me.result_of(call) is None
    world.me.loop.fire()
    error = world.error_of(call)
    assert isinstance(error, WorkerCrashedError)
    assert error.exit_code is None


def test_a_cancelled_task_behind_a_crash_is_cancelled(world: TaskWorld) -> None:
    world.fast()
    first, second = world.call(retries=-1), world.call()
    peer = world.grant()
    second.cancelled = True
    world.lose(peer)
    assert isinstance(world.error_of(second), TaskCancelledError)
    assert world.grant().calls == [first.number]


def test_a_task_that_raised_leaves_its_lease_before_it_runs_again(world: TaskWorld) -> None:
    call = world.call(retries=1, retry_exceptions=True)
    peer = world.grant()
    world.fail(peer, call, ValueError())
    (lease,) = world.group().leases.values()
    assert not lease.calls
    world.client.ready(call)  # after a while
    assert peer.calls == [call.number, call.number]
    world.reply(peer, call)
    assert not lease.calls


def test_a_task_whose_process_crashes_runs_again_at_once_and_then_after_a_while(
    world: TaskWorld,
) -> None:
    call, other = world.call(retries=2), world.call()
    world.lose(world.grant())
    again = world.grant()
    assert again.calls == [call.number]
    world.lose(again)
    third = world.grant()
    assert third.calls == [other.number]
    world.reply(third, other)
    world.client.ready(call)
    assert third.calls == [other.number, call.number]


def test_a_cancelled_task_that_is_to_run_again_does_not(world: TaskWorld) -> None:
    call = world.call(retries=-1, retry_exceptions=True)
    peer = world.grant()
    world.fail(peer, call, ValueError())
    call.cancelled = True
    world.client.cancel(call, force=False, recursive=True)
    assert isinstance(world.error_of(call), TaskCancelledError)
    world.me.loop.fire()
    assert peer.calls == [call.number]


def test_a_task_whose_cancel_crosses_its_error_does_not_run_again(world: TaskWorld) -> None:
    call = world.call(retries=-1, retry_exceptions=True)
    peer = world.grant()
    world.me.calls.run_later(call, 1.0)
    call.cancelled = True  # its worker was asked, which had answered already
    world.me.loop.fire()
    assert isinstance(world.error_of(call), TaskCancelledError)
    assert peer.calls == [call.number]


def test_a_retry_elsewhere_does_not_keep_the_first_lease_busy(world: TaskWorld) -> None:
    first, second = world.call(retries=1, retry_exceptions=True), world.call()
    one = world.grant()
    world.client.on_revoked(1, world.group().id)
    world.fail(one, first, ValueError())
    assert world.returned == [1]
    other = world.grant()
    assert other.calls == [second.number]
    world.client.ready(first)  # after a while
    world.reply(other, second)
    assert other.calls == [second.number, first.number]


def test_a_shape_that_can_never_be_had_fails_its_tasks(world: TaskWorld) -> None:
    calls = [world.call(), world.call()]
    world.client.on_failed(world.group().id, pickle.dumps(ValueError("infeasible")))
    assert all(isinstance(world.error_of(call), ValueError) for call in calls)
    world.call()
    assert world.wanted[-1] == 1


def test_a_worker_that_was_lost_before_its_lease_came_is_replaced(world: TaskWorld) -> None:
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


def test_a_queued_task_is_withdrawn_and_its_lease_too(world: TaskWorld) -> None:
    call = world.call()
    world.client.cancel(call, False, True)
    assert isinstance(world.error_of(call), TaskCancelledError)
    assert world.wanted[-1] == 0


def test_a_task_cancelled_while_it_waits_for_values_never_runs(world: TaskWorld) -> None:
    ref = world.me.table.create(world.me.table.new_id())
    call = world.call(ref)
    call.cancelled = True
    world.client.cancel(call, False, True)
    world.me.table.set_value(ref.binary(), packed(1))
    assert world.wanted == []
    assert not world.group().queue
    assert isinstance(world.error_of(call), TaskCancelledError)


def test_a_task_cancelled_just_as_its_values_arrive_never_runs(world: TaskWorld) -> None:
    """Its cancel may come in one thread while another one is about to queue it."""
    peer = world.grant()
    ref = world.me.table.create(world.me.table.new_id())
    call = world.call(ref)
    lock = world.client._lock

    class CancelComesFirst:
        def __enter__(self) -> None:
            world.client._lock = lock
            world.me.calls.cancel_call(call)
            lock.acquire()

        def __exit__(self, *_: object) -> None:
            lock.release()

    world.client._lock = CancelComesFirst()  # type: ignore[assignment]
    world.me.table.set_value(ref.binary(), packed(1))
    assert not peer.calls
    assert isinstance(world.error_of(call), TaskCancelledError)


def test_a_sent_task_is_cancelled_at_its_worker(world: TaskWorld) -> None:
    call = world.call()
    peer = world.grant()
    world.client.cancel(call, True, False)
    assert peer.of_kind(p.PEER_CANCEL) == [(p.PEER_CANCEL, call.number, True, False)]


def test_tasks_submitted_while_their_values_arrive_are_sent_once(world: TaskWorld) -> None:
    for _ in range(200):
        ref = world.me.table.create(world.me.table.new_id())
        thread = threading.Thread(target=world.me.table.set_value, args=(ref.binary(), packed(1)))
        thread.start()
        call = world.call(ref)
        thread.join()
        numbers = [queued.number for queued in world.group().queue]
        assert numbers == [call.number]
        world.group().queue.clear()


# --- a head that comes back -------------------------------------------------------------


def test_a_head_that_comes_back_hears_what_is_held_and_wanted(world: TaskWorld) -> None:
    for _ in range(3):
        world.call()
    world.grant()
    world.client.on_head_back()
    assert world.link.head_heard("hold_leases") == [([1],)]
    assert world.wanted[-1] == 2  # beyond the one that it does not count


def test_a_head_that_comes_back_is_not_asked_for_what_nobody_waits_for(world: TaskWorld) -> None:
    call = world.call()
    peer = world.grant()
    asked = len(world.wanted)
    world.client.on_head_back()
    assert len(world.wanted) == asked
    world.reply(peer, call)
    world.call()
    assert peer.calls
