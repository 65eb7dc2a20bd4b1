from __future__ import annotations

import pickle
import threading
from typing import TYPE_CHECKING, Any

import pytest
from process_doubles import Caller, FakePeer, packed

from miniray.calls.call import Channel, serialize_call
from miniray.common.object_ref import ObjectRef, hooks
from miniray.exceptions import ObjectLostError, TaskCancelledError, TaskError
from miniray.messages import protocol as p
from miniray.messages.value import error_value
from miniray.values.serialization import collector

if TYPE_CHECKING:
    from miniray.calls.call import Call

BIG = b"x" * 200_000


class Noting(Channel):
    """Notes what it is told."""

    def __init__(self) -> None:
        #: Whether each call could be sent when it was submitted.
        self.sent: list[bool] = []
        self.told: list[tuple[str, Call]] = []

    def submit(self, call: Call, ready: bool) -> None:
        self.sent.append(ready)

    def ready(self, call: Call) -> None:
        self.told.append(("ready", call))

    def answered(self, call: Call, seconds: float | None) -> None:
        self.told.append(("answered", call))

    def put_back(self, call: Call) -> None:
        self.told.append(("put_back", call))


class Odd(Exception):
    """Can be pickled, but not unpickled."""

    def __reduce__(self) -> Any:
        return (_fail, ())


def _fail() -> None:
    raise RuntimeError("its module is not there")


@pytest.fixture
def me() -> Caller:
    return Caller()


@pytest.fixture
def channel() -> Noting:
    return Noting()


def error_of(me: Caller, call: Call) -> BaseException:
    value = me.result_of(call)
    assert value[0] == p.VALUE_ERROR
    error = pickle.loads(value[1])
    assert isinstance(error, BaseException)
    return error


# --- arguments ---------------------------------------------------------------------


def test_top_level_refs_are_taken_out_of_the_arguments(me: Caller) -> None:
    first, second = (me.table.create(me.table.new_id()) for _ in range(2))
    serialized, refs, pins = serialize_call((1, first), {"a": second, "b": 2})
    value = me.calls.store(serialized)
    assert pickle.loads(value[1]) == ((1, None), {"a": None, "b": 2})
    assert [(where, id) for where, id, _, _ in refs] == [
        (1, first.binary()),
        ("a", second.binary()),
    ]
    assert pins == [first, second]


def test_nested_refs_stay_inside_and_are_named_beside_the_arguments(
    me: Caller, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(hooks, "serialized", lambda ref: collector.refs.append(ref))  # type: ignore[union-attr]
    inner = me.table.create(me.table.new_id())
    serialized, refs, pins = serialize_call(([inner],), {})
    value = me.calls.store(serialized)
    assert refs == []
    assert value[2] == ((inner.binary(), me.table.node_id),)
    assert pins == [inner]


def test_large_arguments_go_into_shared_memory_and_are_freed_with_the_call(
    me: Caller, channel: Noting
) -> None:
    call = me.call(channel, BIG)
    assert call.arguments[0] == p.VALUE_SHARED
    me.calls.submit(call)
    assert channel.sent == [True]
    peer = FakePeer(b"executor")
    call.peer = peer  # type: ignore[assignment]
    me.reply(peer, call)
    assert me.link.noticed("free_segment") == [call.arguments[1][:-1]]
    me.link.close()


def test_a_wait_for_calls_is_not_over_before_all_of_them_are_known(
    me: Caller, channel: Noting
) -> None:
    """The first may end in one thread while another one still looks which there are."""
    first, second = (me.call(channel) for _ in range(2))
    peer = FakePeer(b"executor")
    for call in (first, second):
        me.calls.submit(call)
        call.peer = peer  # type: ignore[assignment]
    over: list[str] = []

    def is_awaited(call: Call) -> bool:
        if call is second:
            me.reply(peer, first)
        return True

    assert not me.calls.when_ended(is_awaited, lambda: over.append("over"))
    assert not over
    me.reply(peer, second)
    assert over == ["over"]


# --- dependencies -------------------------------------------------------------------


def test_a_call_waits_for_its_refs_and_its_channel_hears_once(me: Caller, channel: Noting) -> None:
    refs = [me.table.create(me.table.new_id()) for _ in range(3)]
    call = me.call(channel, *refs, refs[0])
    me.calls.submit(call)
    assert channel.sent == [False]
    for ref in refs:
        assert channel.told == []
        me.table.set_value(ref.binary(), packed(1))
    assert channel.told == [("ready", call)]
    resolved, error = me.calls.resolved_refs(call)
    assert error is None
    assert [value for _, _, _, value in resolved] == [packed(1)] * 4


def test_a_call_with_refs_that_are_there_can_be_sent_at_once(me: Caller, channel: Noting) -> None:
    ref = me.table.create_with_value(me.table.new_id(), packed(1), None)
    me.calls.submit(me.call(channel, ref))
    assert channel.sent == [True]
    assert channel.told == []


def test_either_the_submitter_or_the_channel_sends_a_call_never_both(me: Caller) -> None:
    """Values may arrive in another thread while the call is opened."""
    for _ in range(300):
        channel = Noting()
        refs = [me.table.create(me.table.new_id()) for _ in range(2)]
        call = me.call(channel, *refs)

        def arrive(refs: list[ObjectRef[Any]] = refs) -> None:
            for ref in refs:
                me.table.set_value(ref.binary(), packed(1))

        thread = threading.Thread(target=arrive)
        thread.start()
        me.calls.submit(call)
        thread.join()
        assert sum(channel.sent) + len(channel.told) == 1


def test_the_error_of_a_dependency_is_the_calls(me: Caller, channel: Noting) -> None:
    failed = error_value(ZeroDivisionError("why"))
    ref = me.table.create_with_value(me.table.new_id(), failed, None)
    call = me.call(channel, ref)
    me.calls.submit(call)
    assert me.calls.resolved_refs(call)[1] == failed


def test_a_call_whose_argument_is_lost_is_named_in_its_error(me: Caller, channel: Noting) -> None:
    lost = error_value(ObjectLostError("ab", "its node died"))
    ref = me.table.create_with_value(me.table.new_id(), lost, None)
    call = me.call(channel, 1, ref)
    me.calls.submit(call)
    _, value = me.calls.resolved_refs(call)
    assert value is not None
    error = pickle.loads(value[1]).as_instanceof_cause()
    assert isinstance(error, ObjectLostError)
    assert isinstance(error, TaskError)
    assert "Test.method() did not run: this is the error of its argument 2" in str(error)


def test_so_is_one_whose_executor_finds_the_argument_lost(me: Caller, channel: Noting) -> None:
    shared = (p.VALUE_SHARED, (b"othernod", 77, b"othernod", 10), ())
    ref = me.table.create_with_value(me.table.new_id(), shared, None)
    call = me.call(channel, 1, ref)
    me.calls.submit(call)
    call.peer = peer = FakePeer(b"executor")  # type: ignore[assignment]
    me.recover = lambda _entry, _value: "nothing can make it again"
    lost = ((ref.binary(), shared[1]),)
    me.answer(peer, call, p.STATUS_LOST, lost)
    error = error_of(me, call)
    assert isinstance(error, TaskError)
    assert isinstance(error.cause, ObjectLostError)
    assert error.cause.object_id == ref.hex()
    assert "Test.method() did not run: this is the error of its argument 2" in str(error)


def test_refs_of_others_are_asked_for(me: Caller, channel: Noting) -> None:
    ref, _ = me.table.adopt(b"owner000" + b"12345678", me.table.node_id)
    me.calls.submit(me.call(channel, ref))
    wanted = [(ref.binary(), None)]
    assert me.peers.made[b"owner000"].of_kind(p.PEER_WANT) == [(p.PEER_WANT, wanted)]


# --- replies -----------------------------------------------------------------------


def test_a_reply_gives_the_result_and_ends_the_call(me: Caller, channel: Noting) -> None:
    pinned = me.table.create_with_value(me.table.new_id(), packed(0), None)
    call = me.call(channel, [pinned])
    me.calls.submit(call)
    call.peer = peer = FakePeer(b"executor")  # type: ignore[assignment]
    me.reply(peer, call, 42)
    assert me.result_of(call) == packed(42)
    assert channel.told == [("answered", call)]
    assert me.calls.open == {}
    assert call.pins is None


def test_the_executor_counts_as_free_before_anybody_sees_the_result(
    me: Caller, channel: Noting
) -> None:
    """Who waits for it may send the next call at once, which must not ask for another worker."""
    call = me.call(channel)
    me.calls.submit(call)
    call.peer = peer = FakePeer(b"executor")  # type: ignore[assignment]
    told: list[Any] = []
    entry = me.table.entry(call.return_ids[0])
    assert entry is not None
    me.table.when_ready(entry, lambda _entry: told.extend(channel.told))
    me.reply(peer, call, 42)
    assert told == [("answered", call)]


def test_a_second_reply_is_ignored_and_its_memory_freed(me: Caller, channel: Noting) -> None:
    call = me.call(channel)
    me.calls.submit(call)
    call.peer = peer = FakePeer(b"executor")  # type: ignore[assignment]
    me.reply(peer, call, 1)
    shared = (p.VALUE_SHARED, (me.table.node_id, 77, me.table.node_id, 10), ())
    me.answer(peer, call, p.STATUS_OK, (shared,))
    assert me.result_of(call) == packed(1)
    assert me.link.noticed("free_segment") == [(me.table.node_id, 77, me.table.node_id)]


def test_an_unwanted_reply_lets_the_executor_drop_the_refs_inside(
    me: Caller, channel: Noting
) -> None:
    peer = FakePeer(b"executor")
    value = (p.VALUE_PICKLE, b"x", ((b"owner000" + b"12345678", me.table.node_id),))
    me.calls.on_reply(peer, (p.PEER_REPLY, 5, p.STATUS_OK, (value,), None, 0.0, 7))  # type: ignore[arg-type]
    assert peer.sent == [(p.PEER_RELEASE, [7])]


def test_a_reply_of_an_earlier_attempt_does_not_count(me: Caller, channel: Noting) -> None:
    call = me.call(channel)
    me.calls.submit(call)
    call.peer = now = FakePeer(b"executor")  # type: ignore[assignment]
    me.reply(FakePeer(b"earlier0"), call, "old")
    assert me.result_of(call) is None
    me.reply(now, call, "new")
    assert me.result_of(call) == packed("new")


def test_refs_in_a_result_are_counted_before_the_executor_may_drop_them(
    me: Caller, channel: Noting
) -> None:
    call = me.call(channel)
    me.calls.submit(call)
    call.peer = peer = FakePeer(b"executor")  # type: ignore[assignment]
    value = (p.VALUE_PICKLE, b"x", ((b"owner000" + b"12345678", me.table.node_id),))
    me.answer(peer, call, p.STATUS_OK, (value,), pin=7)
    assert peer.sent == []
    owner = me.peers.made[b"owner000"]
    ((_, number, _),) = owner.of_kind(p.PEER_BORROW)
    me.borrowing.on_ack(owner, (p.PEER_ACK, number))  # type: ignore[arg-type]
    assert peer.sent == [(p.PEER_RELEASE, [7])]


def test_a_result_nobody_waits_for_any_more_is_freed(me: Caller, channel: Noting) -> None:
    call = me.call(channel)
    me.calls.submit(call)
    me.results.clear()
    me.drain()
    call.peer = peer = FakePeer(b"executor")  # type: ignore[assignment]
    shared = (p.VALUE_SHARED, (me.table.node_id, 77, me.table.node_id, 10), ())
    me.answer(peer, call, p.STATUS_OK, (shared,))
    assert me.link.noticed("free_segment") == [(me.table.node_id, 77, me.table.node_id)]


# --- errors ------------------------------------------------------------------------


def reply_error(me: Caller, call: Call, error: BaseException) -> None:
    peer: Any = call.peer
    me.fails(peer, call, error)


@pytest.mark.parametrize(
    ("which", "raised", "again"),
    [
        (True, ValueError(), True),
        ((ValueError,), ValueError(), True),
        ((ValueError,), KeyError(), False),
        ((ValueError,), Odd(), False),
        (False, ValueError(), False),
    ],
)
def test_errors_are_tried_again_as_the_options_say(
    me: Caller, channel: Noting, which: Any, raised: BaseException, again: bool
) -> None:
    call = me.call(channel, retries=1, retry_exceptions=which)
    me.calls.submit(call)
    call.peer = FakePeer(b"executor")  # type: ignore[assignment]
    reply_error(me, call, raised)
    assert channel.told == [("answered", call)]  # its place is free meanwhile
    me.loop.fire()
    if again:
        assert channel.told[1:] == [("put_back", call), ("ready", call)]
        assert call.retries == 0
        reply_error(me, call, raised)
        assert channel.told[-1] == ("answered", call)
    assert me.result_of(call)[0] == p.VALUE_ERROR


def test_the_runs_of_a_call_that_raises_are_half_a_second_and_then_a_second_apart(
    me: Caller, channel: Noting
) -> None:
    call = me.call(channel, retries=-1, retry_exceptions=True)
    me.calls.submit(call)
    pauses = []
    for _ in range(4):
        call.peer = FakePeer(b"executor")  # type: ignore[assignment]
        reply_error(me, call, ValueError())
        assert call.peer is None
        pauses += [delay for delay, _ in me.loop.timers]
        me.loop.fire()
    assert pauses == [0.5, 1.0, 1.0, 1.0]
    assert call.retries == -1


def test_a_call_that_ended_before_its_next_run_does_not_run(me: Caller, channel: Noting) -> None:
    call = me.call(channel, retries=-1, retry_exceptions=True)
    me.calls.submit(call)
    reply_error(me, call, ValueError())
    me.calls.fail(call, TaskCancelledError("it"))
    me.loop.fire()
    assert ("ready", call) not in channel.told


def test_a_cancelled_call_ends_as_cancelled_whatever_its_error(me: Caller, channel: Noting) -> None:
    for error in (ValueError(), TaskCancelledError("it"), Odd()):
        call = me.call(channel, retries=3, retry_exceptions=True)
        me.calls.submit(call)
        call.peer = FakePeer(b"executor")  # type: ignore[assignment]
        call.cancelled = True
        reply_error(me, call, error)
        assert isinstance(error_of(me, call), TaskCancelledError)


def test_find_gives_the_open_call_of_an_object(me: Caller, channel: Noting) -> None:
    calls = [me.call(channel) for _ in range(3)]
    for call in calls:
        me.calls.submit(call)
    assert me.calls.find(calls[1].return_ids[0]) is calls[1]
    assert me.calls.find(me.table.new_id()) is None


# --- finding and forgetting ------------------------------------------------------------


def test_calls_are_found_by_what_they_make_until_they_have_ended(
    me: Caller, channel: Noting
) -> None:
    calls = [me.call(channel) for _ in range(3)]
    for call in calls[:2]:
        me.calls.submit(call)
    assert me.calls.find(calls[0].return_ids[0]) is calls[0]
    me.calls.submit(calls[2])  # after the first look
    assert me.calls.find(calls[2].return_ids[0]) is calls[2]
    for call in calls:
        me.calls.fail(call, TaskCancelledError("it"))
        assert me.calls.find(call.return_ids[0]) is None
    assert not me.calls._by_id


def test_looking_for_many_calls_looks_at_all_of_them_once(me: Caller, channel: Noting) -> None:
    looks: list[int] = []

    class Watched(dict[int, Any]):
        def values(self) -> Any:
            looks.append(1)
            return super().values()

    me.calls.open = Watched()
    calls = [me.call(channel) for _ in range(10)]
    for call in calls:
        me.calls.submit(call)
    assert [me.calls.find(call.return_ids[0]) for call in calls] == calls
    assert looks == [1]


def test_a_call_that_has_ended_is_no_child_of_the_one_that_made_it(
    me: Caller, channel: Noting
) -> None:
    children: dict[int, Call] = {}
    for _ in range(3):
        call = me.call(channel)
        call.siblings = children
        children[call.number] = call
        me.calls.submit(call)
    me.calls.fail(children[min(children)], TaskCancelledError("it"))
    assert len(children) == 2
    me.calls.fail(call, TaskCancelledError("it"))
    assert len(children) == 1
