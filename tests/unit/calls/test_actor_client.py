from __future__ import annotations

import functools
import pickle
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest
from process_doubles import NODE, Caller, FakePeer, packed

from miniray.calls.actor_client import ActorClient
from miniray.common.object_ref import ObjectRef
from miniray.common.series import COUNTED
from miniray.common.state_types import ALIVE, DEAD, RESTARTING
from miniray.exceptions import (
    ActorDiedError,
    ActorUnavailableError,
    DeathCause,
    PendingCallsLimitExceededError,
    TaskCancelledError,
)
from miniray.messages import protocol as p
from miniray.messages.value import error_value

if TYPE_CHECKING:
    from miniray.calls.call import Call

ACTOR, PROCESS = b"caller00actor001", b"process1"


class Fixture:
    def __init__(self, max_pending: int = -1) -> None:
        self.me = Caller()
        self.client = self.make_client(max_pending)

    def make_client(self, max_pending: int = -1) -> ActorClient:
        return ActorClient(
            ACTOR,
            "Test",
            self.me.calls,
            self.me.peers,
            max_pending,
        )

    def call(self, *args: Any, **how: Any) -> Call:
        call = self.me.call(self.client, *args, **how)
        self.me.calls.submit(call)
        return call

    def alive(self, epoch: int = 0, process: bytes = PROCESS) -> FakePeer:
        self.client.on_state(ALIVE, NODE, process, epoch, None)
        return self.me.peers.get(NODE, process)

    def restarting(self) -> None:
        died = functools.partial(ActorDiedError, DeathCause.EXITED, exit_code=7)
        self.client.on_state(RESTARTING, b"", b"", 0, died)

    def dead(self, *, at_once: bool = False) -> None:
        self.client.on_state(
            DEAD, b"", b"", 0, lambda: ActorDiedError(actor_id=ACTOR.hex()), at_once=at_once
        )

    def lose(self, peer: FakePeer) -> None:
        peer.lost = True
        self.client.on_peer_lost(peer)  # type: ignore[arg-type]

    def error_of(self, call: Call) -> BaseException | None:
        value = self.me.result_of(call)
        if value is None or value[0] != p.VALUE_ERROR:
            return None
        error: BaseException = pickle.loads(value[1])
        return error

    def pending_ref(self) -> Any:
        return self.me.table.create(self.me.table.new_id())


@pytest.fixture
def world() -> Fixture:
    return Fixture()


def test_calls_wait_for_the_actor_and_go_in_order(world: Fixture) -> None:
    calls = [world.call(n) for n in range(5)]
    peer = world.alive()
    calls += [world.call(n) for n in range(5)]
    assert peer.calls == [call.number for call in calls]
    for call in calls:
        world.me.reply(peer, call, "done")
    assert not world.me.calls.open
    assert all(world.me.result_of(call) == packed("done") for call in calls)


def test_a_call_that_waits_for_a_value_holds_back_those_behind_it(world: Fixture) -> None:
    peer = world.alive()
    ref = world.pending_ref()
    first, second = world.call(ref), world.call()
    assert peer.calls == []
    world.me.table.set_value(ref.binary(), packed(1))
    assert peer.calls == [first.number, second.number]


def test_a_call_that_runs_again_goes_before_one_that_waits_for_its_result(world: Fixture) -> None:
    peer = world.alive()
    first = world.call(retries=1, retry_exceptions=True)
    second = world.call(ObjectRef(first.return_ids[0], NODE))
    world.me.fails(peer, first, ValueError("not now"))
    assert peer.calls == [first.number]
    world.me.loop.fire()
    assert peer.calls == [first.number, first.number]
    world.me.reply(peer, first, 1)
    assert peer.calls == [first.number, first.number, second.number]


def repeated(world: Fixture, *args: Any) -> Call:
    """A call that makes a lost value again."""
    call = world.me.call(world.client, *args)
    origin: Any = SimpleNamespace(of_stream=False, uses=2)
    call.origin = origin
    world.me.calls.submit(call)
    return call


def test_a_call_that_makes_a_lost_value_again_overtakes_those_that_wait(world: Fixture) -> None:
    world = Fixture(max_pending=1)
    ref = world.pending_ref()
    waiting = world.call(ref)
    needs = world.pending_ref()
    last, first = repeated(world, needs), repeated(world)
    peer = world.alive()
    assert peer.calls == [first.number]
    world.me.table.set_value(needs.binary(), packed(1))
    assert peer.calls == [first.number, last.number]
    world.me.table.set_value(ref.binary(), packed(1))
    assert peer.calls == [first.number, last.number, waiting.number]


def test_a_value_cannot_be_made_again_by_an_actor_that_has_ended(world: Fixture) -> None:
    waits, goes = repeated(world, world.pending_ref()), repeated(world)
    world.dead()
    for call in (waits, goes):
        assert isinstance(world.error_of(call), ActorDiedError)


def test_a_call_whose_argument_was_lost_keeps_its_place(world: Fixture) -> None:
    peer = world.alive()
    first = world.call()
    second = world.call(ObjectRef(first.return_ids[0], NODE))
    world.me.answer(peer, first, p.STATUS_LOST, ())
    world.me.reply(peer, first, 1)
    assert peer.calls == [first.number, first.number, second.number]


def test_cancelling_the_call_that_others_wait_behind_lets_them_go(world: Fixture) -> None:
    peer = world.alive()
    first, second = world.call(world.pending_ref()), world.call()
    first.cancelled = True
    world.client.cancel(first, False, True)
    assert isinstance(world.error_of(first), TaskCancelledError)
    assert peer.calls == [second.number]


def test_cancelling_a_sent_call_asks_the_actor(world: Fixture) -> None:
    peer = world.alive()
    call = world.call()
    world.client.cancel(call, True, False)
    assert peer.of_kind(p.PEER_CANCEL) == [(p.PEER_CANCEL, call.number, True, False)]


def test_a_cancelled_call_is_not_sent_when_its_value_comes(world: Fixture) -> None:
    peer = world.alive()
    ref = world.pending_ref()
    call = world.call(ref)
    call.cancelled = True
    world.client.cancel(call, False, True)
    world.me.table.set_value(ref.binary(), packed(1))
    assert peer.calls == []


def test_the_error_of_an_argument_fails_the_call_and_not_the_next(world: Fixture) -> None:
    peer = world.alive()
    ref = world.pending_ref()
    first, second = world.call(ref), world.call()
    world.me.table.set_value(ref.binary(), error_value(ZeroDivisionError()))
    assert isinstance(world.error_of(first), ZeroDivisionError)
    assert peer.calls == [second.number]


def test_what_waits_for_a_failed_call_is_told_without_the_clients_lock(world: Fixture) -> None:
    """It may be a call of another client: two locks taken in both orders would block."""
    held: list[bool] = []
    call = world.call()
    entry = world.me.table.entry(call.return_ids[0])
    assert entry is not None
    world.me.table.when_ready(
        entry,
        lambda _entry: held.append(world.client._lock._is_owned()),  # type: ignore[attr-defined]
    )
    world.dead()
    assert held == [False]


def test_calls_fail_when_the_actor_dies_and_afterwards(world: Fixture) -> None:
    queued = world.call(world.pending_ref())
    peer = world.alive()
    world.client.cancel(queued, False, True)
    sent = world.call()
    world.dead()
    late = world.call()
    assert isinstance(world.error_of(late), ActorDiedError)
    world.lose(peer)
    assert isinstance(world.error_of(sent), ActorDiedError)
    assert peer.calls == [sent.number]
    assert not world.me.calls.open
    world.alive(epoch=5)
    assert world.client.state == DEAD


def test_replies_that_come_after_word_of_the_actors_death_count(world: Fixture) -> None:
    peer = world.alive()
    finished, unfinished = world.call(), world.call()
    world.dead()
    assert world.client.settling
    world.me.reply(peer, finished, 1)
    assert world.me.result_of(finished) == packed(1)
    assert world.me.result_of(unfinished) is None
    world.lose(peer)
    assert isinstance(world.error_of(unfinished), ActorDiedError)
    assert not world.me.calls.open
    assert not world.client.settling


def test_calls_fail_at_once_when_nothing_is_awaited_of_the_actor(world: Fixture) -> None:
    world.alive()
    call = world.call()
    world.dead(at_once=True)
    assert isinstance(world.error_of(call), ActorDiedError)


def test_a_reply_after_word_of_a_restart_keeps_the_call_from_running_twice(world: Fixture) -> None:
    old = world.alive()
    finished, again = world.call(retries=1), world.call(retries=1)
    world.restarting()
    new = world.alive(epoch=1, process=b"process2")
    later = world.call()
    assert new.calls == []
    world.me.reply(old, finished, 1)
    world.lose(old)
    assert new.calls == [again.number, later.number]
    assert world.me.result_of(finished) == packed(1)


@pytest.mark.parametrize("lost_first", [False, True])
def test_a_method_that_is_to_be_tried_again_fails_if_its_actor_is_dead(
    lost_first: bool, world: Fixture
) -> None:
    peer = world.alive()
    call = world.call(retries=-1, retry_exceptions=True)
    world.dead()
    if lost_first:
        world.lose(peer)
    else:
        world.me.fails(peer, call, ValueError("not now"))
        world.me.loop.fire()
    assert isinstance(world.error_of(call), ActorDiedError)
    assert not world.me.calls.open


def test_a_call_that_waits_for_a_lost_argument_again_fails_if_its_actor_is_dead(
    world: Fixture,
) -> None:
    peer = world.alive()
    call = world.call()
    world.dead()
    world.client.answered(call, 0.0)
    world.client.put_back(call)
    world.lose(peer)
    world.client.ready(call)
    assert isinstance(world.error_of(call), ActorDiedError)


def test_calls_in_flight_wait_for_the_heads_word_when_the_connection_breaks(
    world: Fixture,
) -> None:
    peer = world.alive()
    safe, unsafe = world.call(retries=1), world.call()
    world.lose(peer)
    later = world.call()
    assert world.me.result_of(safe) is world.me.result_of(unsafe) is None
    world.restarting()
    assert isinstance(error := world.error_of(unsafe), ActorUnavailableError)
    assert "its process exited with code 7 while" in str(error)
    again = world.alive(epoch=1, process=b"process2")
    assert again.calls == [safe.number, later.number]
    assert safe.retries == 0
    world.lose(again)
    world.restarting()
    assert isinstance(error := world.error_of(safe), ActorUnavailableError)
    assert "It was tried 2 times (max_task_retries=1)." in str(error)


def test_an_end_of_which_the_head_has_not_told_is_not_given_the_cause_of_an_earlier_one(
    world: Fixture,
) -> None:
    world.lose(world.alive())
    world.restarting()
    peer = world.alive(epoch=1, process=b"process2")
    call = world.call()
    world.lose(peer)
    world.alive(epoch=2, process=b"process3")  # by a new head, which missed the end
    assert "its process ended while" in str(world.error_of(call))


def test_a_call_that_is_sent_once_more_after_a_restart_counts_as_retried(world: Fixture) -> None:
    counted = ("counter", "task_retries_total", "", ()), (("function", "Test.method"),)
    before = COUNTED.values(*counted)[0]
    peer = world.alive()
    world.call(retries=1)
    world.lose(peer)
    world.restarting()
    assert COUNTED.values(*counted)[0] == before + 1


def test_calls_without_limit_of_retries_survive_every_restart(world: Fixture) -> None:
    calls = [world.call(n, retries=-1) for n in range(3)]
    for epoch in range(4):
        peer = world.alive(epoch, b"process%d" % epoch)
        assert peer.calls == [call.number for call in calls]
        world.lose(peer)
        world.restarting()


def test_calls_go_on_at_once_when_only_the_way_to_the_actor_had_broken(world: Fixture) -> None:
    peer = world.alive()
    safe, unsafe = world.call(retries=1), world.call()
    peer.unreachable = True
    world.lose(peer)
    assert isinstance(world.error_of(unsafe), ActorUnavailableError)
    again = world.me.peers.get(NODE, PROCESS)
    assert again is not peer
    assert again.calls == [safe.number]
    later = world.call()
    assert again.calls == [safe.number, later.number]


def test_a_lost_connection_then_death_fails_everything(world: Fixture) -> None:
    peer = world.alive()
    calls = [world.call(retries=-1), world.call()]
    world.lose(peer)
    calls.append(world.call())
    world.dead()
    assert all(isinstance(world.error_of(call), ActorDiedError) for call in calls)


def test_the_loss_of_an_earlier_process_does_not_touch_the_new_one(world: Fixture) -> None:
    old = world.alive()
    world.restarting()
    new = world.alive(epoch=1, process=b"process2")
    call = world.call()
    world.lose(old)
    world.me.reply(new, call, 1)
    assert world.me.result_of(call) == packed(1)


def test_old_news_is_ignored(world: Fixture) -> None:
    peer = world.alive(epoch=3)
    world.client.on_state(ALIVE, NODE, b"process0", 2, None)
    world.client.on_state(ALIVE, NODE, PROCESS, 3, None)
    call = world.call()
    assert peer.calls == [call.number]


def test_a_cancelled_call_is_not_repeated_after_a_restart(world: Fixture) -> None:
    peer = world.alive()
    call = world.call(retries=-1)
    call.cancelled = True
    world.client.cancel(call, False, True)
    world.lose(peer)
    world.restarting()
    assert isinstance(world.error_of(call), TaskCancelledError)


def test_a_method_that_raised_is_sent_again_behind_the_others(world: Fixture) -> None:
    peer = world.alive()
    first, second = world.call(retries=1, retry_exceptions=True), world.call()
    world.me.fails(peer, first, ValueError())
    world.me.loop.fire()
    assert peer.calls == [first.number, second.number, first.number]
    world.me.fails(peer, first, ValueError())
    assert isinstance(world.error_of(first), ValueError)


def test_a_retry_while_the_actor_is_away_waits_for_it(world: Fixture) -> None:
    peer = world.alive()
    call = world.call(retries=-1, retry_exceptions=True)
    world.restarting()  # the reply is the last that is read from the connection
    world.me.fails(peer, call, ValueError())
    world.lose(peer)
    world.me.loop.fire()
    again = world.alive(epoch=1, process=b"process2")
    assert again.calls == [call.number]


def test_a_cancelled_method_that_is_to_be_tried_again_is_not(world: Fixture) -> None:
    peer = world.alive()
    call = world.call(retries=-1, retry_exceptions=True)
    world.me.fails(peer, call, ValueError("not now"))
    call.cancelled = True
    world.client.cancel(call, force=False, recursive=True)
    assert isinstance(world.error_of(call), TaskCancelledError)
    world.me.loop.fire()
    assert peer.calls == [call.number]
    assert not world.me.calls.open


def test_too_many_pending_calls_are_refused_and_leave_nothing_behind() -> None:
    world = Fixture(max_pending=2)
    calls = [world.call(), world.call()]
    with pytest.raises(PendingCallsLimitExceededError):
        world.call(b"x" * 200_000)
    assert len(world.me.link.noticed("free_segment")) == 1
    assert len(world.me.calls.open) == 2
    peer = world.alive()
    with pytest.raises(PendingCallsLimitExceededError):
        world.call()
    world.me.reply(peer, calls[0])
    world.call()
    world.me.link.close()


def test_a_cancelled_call_whose_argument_was_lost_ends_as_cancelled(world: Fixture) -> None:
    peer = world.alive()
    call = world.call()
    call.cancelled = True
    world.client.cancel(call, False, True)
    world.me.answer(peer, call, p.STATUS_LOST, ())
    assert peer.calls == [call.number]
    assert isinstance(world.error_of(call), TaskCancelledError)
