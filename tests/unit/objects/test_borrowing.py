from __future__ import annotations

import pickle
import time
from typing import Any

import pytest
from kept import kept
from process_doubles import NODE, Caller, FakePeer

from miniray.common.object_ref import new_id
from miniray.exceptions import ObjectLostError, OwnerDiedError
from miniray.messages import protocol as p

OWNER, OTHER = b"owner000", b"other000"


def foreign(number: int = 1, owner: bytes = OWNER) -> tuple[bytes, bytes]:
    return owner + number.to_bytes(8, "big"), NODE


@pytest.fixture
def me() -> Caller:
    return Caller()


def owner_of(me: Caller, owner: bytes = OWNER) -> FakePeer:
    return me.peers.get(NODE, owner)


def acknowledge(me: Caller, owner: bytes = OWNER) -> None:
    """The owner answers all registrations so far."""
    peer = owner_of(me, owner)
    for _, number, _ in peer.of_kind(p.PEER_BORROW):
        me.borrowing.on_ack(peer, (p.PEER_ACK, number))  # type: ignore[arg-type]


def test_a_ref_is_registered_with_its_owner_once(me: Caller) -> None:
    refs = me.borrowing.hold([foreign(1), foreign(2), foreign(1)])
    refs += me.borrowing.hold([foreign(1)])
    ((_, _, held),) = owner_of(me).of_kind(p.PEER_BORROW)
    assert held == [(foreign(n)[0], me.process_id, NODE) for n in (1, 2)]


def test_own_objects_and_uncounted_refs_are_not_registered(me: Caller) -> None:
    own = me.table.create(me.table.new_id())
    refs = me.borrowing.hold([(own.binary(), NODE), (foreign()[0], b"")])
    assert len(refs) == 2
    assert me.peers.made == {}


def test_a_release_waits_until_the_registration_is_acknowledged(me: Caller) -> None:
    refs = me.borrowing.hold([foreign()])
    refs.clear()
    me.drain()
    assert me.outside.unborrowed == [foreign()[0]]
    me.borrowing.unborrow(*foreign())
    peer = owner_of(me)
    assert peer.of_kind(p.PEER_UNBORROW) == []
    acknowledge(me)
    assert peer.of_kind(p.PEER_UNBORROW) == [(p.PEER_UNBORROW, [foreign()[0]])]


def test_what_is_deferred_waits_for_the_registrations_before_it_and_no_later_ones(
    me: Caller,
) -> None:
    done: list[str] = []
    first = me.borrowing.hold([foreign(1)])
    me.borrowing.defer(lambda: done.append("after first"))
    second = me.borrowing.hold([foreign(2, OTHER)])
    me.borrowing.defer(lambda: done.append("after both"))
    acknowledge(me)
    assert done == ["after first"]
    acknowledge(me, OTHER)
    assert done == ["after first", "after both"]
    me.borrowing.defer(lambda: done.append("at once"))
    assert done[-1] == "at once"
    del first, second


def test_acknowledgements_in_another_order_release_nothing_early(me: Caller) -> None:
    done: list[str] = []
    refs = me.borrowing.hold([foreign(1)]) + me.borrowing.hold([foreign(2, OTHER)])
    me.borrowing.defer(lambda: done.append("done"))
    acknowledge(me, OTHER)
    assert done == []
    acknowledge(me)
    assert done == ["done"]
    del refs


def test_the_death_of_an_owner_ends_the_wait_for_it(me: Caller) -> None:
    done: list[str] = []
    refs = me.borrowing.hold([foreign()])
    me.borrowing.defer(lambda: done.append("done"))
    me.borrowing.owner_lost(OWNER)
    assert done == ["done"]
    del refs


def test_a_call_that_kept_refs_reports_those_only(me: Caller) -> None:
    own = me.table.create(me.table.new_id())
    held = [me.table.adopt(*foreign(n))[0] for n in (1, 2)] + [own]
    kept = me.table.adopt(*foreign(2))[0]
    assert me.borrowing.keep_of(held) == [foreign(2)]
    assert me.borrowing.keep_of(held) == []  # the owner is being told already
    del kept


def test_a_report_about_an_own_object_is_counted_here(me: Caller) -> None:
    ref = me.table.create(me.table.new_id())
    executor = FakePeer(b"executor")
    me.borrowing.report_for(executor, [(ref.binary(), NODE)])  # type: ignore[arg-type]
    entry = me.table.entry(ref.binary())
    assert entry is not None
    assert entry.borrowers == {b"executor": 1}


def test_what_protects_a_reported_ref_ends_only_after_the_owner_has_counted_it(
    me: Caller,
) -> None:
    """This process runs a call with a ref that it has passed on: its own reply has to wait,
    or its caller's release might overtake the report."""
    done: list[str] = []
    executor = FakePeer(b"executor")
    me.borrowing.report_for(executor, [foreign()])  # type: ignore[arg-type]
    ((_, _, held),) = owner_of(me).of_kind(p.PEER_BORROW)
    assert held == [(foreign()[0], b"executor", NODE)]
    me.borrowing.defer(lambda: done.append("reply"))
    assert done == []
    acknowledge(me)
    assert done == ["reply"]


def test_refs_that_a_call_kept_are_reported_together_to_each_owner(me: Caller) -> None:
    executor = FakePeer(b"executor")
    kept = [foreign(1), foreign(2, OTHER), foreign(3)]
    me.borrowing.report_for(executor, kept)  # type: ignore[arg-type]
    ((_, _, held),) = owner_of(me).of_kind(p.PEER_BORROW)
    assert held == [(foreign(n)[0], b"executor", NODE) for n in (1, 3)]
    ((_, _, held),) = owner_of(me, OTHER).of_kind(p.PEER_BORROW)
    assert held == [(foreign(2, OTHER)[0], b"executor", NODE)]


def test_many_registrations_are_answered_in_a_time_that_grows_with_their_number(
    me: Caller,
) -> None:
    def seconds(count: int) -> float:
        refs = [me.borrowing.hold([foreign(n)]) for n in range(1, count + 1)]
        peer = owner_of(me)
        numbers = [number for _, number, _ in peer.of_kind(p.PEER_BORROW)]
        begun = time.process_time()
        for number in numbers:
            me.borrowing.on_ack(peer, (p.PEER_ACK, number))  # type: ignore[arg-type]
        taken = time.process_time() - begun
        assert len(refs) == len(numbers) == count
        refs.clear()
        me.drain()
        peer.sent.clear()
        return taken

    # Of eight times as many, each took eight times as long: sixty-four times in all.
    assert seconds(40_000) < 24 * max(seconds(5_000), 0.002)


def test_values_are_asked_for_once_and_given_to_who_waits(me: Caller) -> None:
    ref, entry = me.table.adopt(*foreign())
    before = kept(me.borrowing)
    me.borrowing.want([entry])
    me.borrowing.want([entry])
    peer = owner_of(me)
    assert peer.of_kind(p.PEER_WANT) == [(p.PEER_WANT, [(ref.binary(), None)])]
    value = (p.VALUE_PICKLE, b"x", ())
    me.borrowing.on_value(peer, (p.PEER_VALUE, [(ref.binary(), value)]))  # type: ignore[arg-type]
    assert entry.value == value
    assert kept(me.borrowing) == before


def test_refs_inside_a_value_that_came_are_registered_with_their_owners(me: Caller) -> None:
    ref, entry = me.table.adopt(*foreign())
    me.borrowing.want([entry])
    value = (p.VALUE_PICKLE, b"x", (foreign(7, OTHER),))
    me.borrowing.on_value(owner_of(me), (p.PEER_VALUE, [(ref.binary(), value)]))  # type: ignore[arg-type]
    assert len(owner_of(me, OTHER).of_kind(p.PEER_BORROW)) == 1
    assert entry.contained is not None
    assert entry.contained[0].binary() == foreign(7, OTHER)[0]


def test_values_of_a_dead_owner_become_its_death(me: Caller) -> None:
    refs = [me.table.adopt(*foreign(n)) for n in range(3)]
    me.borrowing.want([entry for _, entry in refs])
    me.borrowing.owner_lost(OWNER)
    for _, entry in refs:
        assert entry.value is not None
        assert isinstance(pickle.loads(entry.value[1]), OwnerDiedError)


def test_an_owner_that_hangs_up_as_it_is_asked_is_asked_again_at_its_daemon(me: Caller) -> None:
    """At a planned exit: the daemon has what it owned, and its socket closes at any moment."""
    ending = owner_of(me)

    def send(message: tuple[Any, ...]) -> None:
        ending.lost = True
        me.borrowing.peer_lost(ending)  # type: ignore[arg-type]

    ending.send = send  # type: ignore[method-assign]
    [ref] = me.borrowing.hold([foreign()])
    daemon = owner_of(me)
    assert len(daemon.of_kind(p.PEER_BORROW)) == 1
    done: list[str] = []
    me.borrowing.defer(lambda: done.append("counted"))
    assert not done
    daemon.send = ending.send  # type: ignore[method-assign]
    ending = daemon
    entry = me.table.entry(ref.binary())
    assert entry is not None
    me.borrowing.want([entry])
    assert owner_of(me).of_kind(p.PEER_WANT) == [(p.PEER_WANT, [(ref.binary(), None)])]
    assert entry.value is None


def test_an_owner_that_is_gone_for_good_is_not_asked_without_end(me: Caller) -> None:
    before = kept(me.borrowing)
    refs = me.borrowing.hold([foreign()])
    for _ in range(2):  # the daemon that the owner may have left it to says that it is gone
        relayed = owner_of(me)
        relayed.direct = False
        relayed.sent.clear()
        me.borrowing.peer_lost(relayed)  # type: ignore[arg-type]
    assert refs
    assert owner_of(me).of_kind(p.PEER_BORROW) == []
    refs.clear()
    me.drain()
    assert kept(me.borrowing) == before


def test_an_owner_answers_now_later_or_that_it_is_too_late(me: Caller) -> None:
    there = me.table.create_with_value(me.table.new_id(), (p.VALUE_PICKLE, b"x", ()), None)
    coming = me.table.create(me.table.new_id())
    gone = me.table.new_id()
    peer = FakePeer(b"borrower")
    wanted = [(id, None) for id in (there.binary(), coming.binary(), gone)]
    me.borrowing.on_want(peer, (p.PEER_WANT, wanted))  # type: ignore[arg-type]
    ((_, values),) = peer.of_kind(p.PEER_VALUE)
    assert [id for id, _ in values] == [there.binary(), gone]
    assert isinstance(pickle.loads(values[1][1][1]), ObjectLostError)
    me.table.set_value(coming.binary(), (p.VALUE_PICKLE, b"y", ()))
    assert peer.sent[-1][1][0][0] == coming.binary()


def test_an_answer_with_many_values_travels_in_several_messages(me: Caller) -> None:
    value = (p.VALUE_PICKLE, b"x" * 100_000, ())
    refs = [me.table.create_with_value(me.table.new_id(), value, None) for _ in range(50)]
    peer = FakePeer(b"borrower")
    me.borrowing.on_want(peer, (p.PEER_WANT, [(ref.binary(), None) for ref in refs]))  # type: ignore[arg-type]
    answers = peer.of_kind(p.PEER_VALUE)
    assert [id for _, values in answers for id, _ in values] == [ref.binary() for ref in refs]
    assert all(sum(len(value[1]) for _, value in values) < 2 << 20 for _, values in answers)
    assert len(answers) >= 4


def test_an_owner_counts_and_acknowledges(me: Caller) -> None:
    ref = me.table.create(me.table.new_id())
    borrower = FakePeer(b"borrower")
    entries = [(ref.binary(), b"borrower", NODE), (new_id() + b"12345678", b"borrower", NODE)]
    me.borrowing.on_borrow(borrower, (p.PEER_BORROW, 9, entries))  # type: ignore[arg-type]
    assert borrower.sent == [(p.PEER_ACK, 9)]
    assert b"borrower" in me.peers.made  # so that its death will be heard of
    me.borrowing.on_unborrow(borrower, (p.PEER_UNBORROW, [ref.binary()]))  # type: ignore[arg-type]
    entry = me.table.entry(ref.binary())
    assert entry is not None
    assert not entry.borrowers
