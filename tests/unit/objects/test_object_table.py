from __future__ import annotations

import threading
from typing import Any

import pytest
from kept import kept
from process_doubles import NODE, Outside

from miniray.common.object_ref import ObjectIds, hooks, new_id
from miniray.messages import protocol as p
from miniray.objects.objects import ObjectTable

VALUE = (p.VALUE_SHARED, (NODE, 1, NODE, 1000), ())
OTHER = (p.VALUE_SHARED, (NODE, 2, NODE, 1000), ())
BORROWER, SECOND = b"borrower", b"second00"


class Fixture:
    def __init__(self) -> None:
        hooks.dropped.clear()
        self.process_id = new_id()
        self.ids = ObjectIds(self.process_id)
        self.outside = Outside()
        self.table = ObjectTable(self.process_id, NODE, self.outside)

    def drain(self) -> None:
        while hooks.dropped:
            self.table.drop([hooks.dropped.popleft()])


@pytest.fixture
def own() -> Fixture:
    return Fixture()


def test_an_object_is_freed_with_its_last_ref(own: Fixture) -> None:
    id = own.table.new_id()
    refs = [own.table.create_with_value(id, VALUE, None), own.table.adopt(id, NODE)[0]]
    refs.pop()
    own.drain()
    assert own.table.entry(id) is not None
    refs.pop()
    own.drain()
    assert len(own.table) == 0
    assert own.outside.freed == [VALUE]


def test_a_pinned_object_stays(own: Fixture) -> None:
    ref = own.table.create_with_value(own.table.new_id(), VALUE, None)
    own.table.pin(ref.binary())
    del ref
    own.drain()
    assert len(own.table) == 1


def test_an_object_without_value_is_forgotten_and_its_late_value_refused(own: Fixture) -> None:
    id = own.table.new_id()
    ref = own.table.create(id)
    del ref
    own.drain()
    assert own.table.set_value(id, VALUE) is False
    assert own.outside.freed == []


def test_waiters_hear_once_and_the_first_value_stays(own: Fixture) -> None:
    ref = own.table.create(own.table.new_id())
    entry = own.table.entry(ref.binary())
    assert entry is not None
    heard: list[Any] = []
    assert own.table.when_ready(entry, lambda entry: heard.append(entry.value)) is False
    assert own.table.set_value(ref.binary(), VALUE) is True
    assert own.table.set_value(ref.binary(), OTHER) is False
    assert own.table.set_value(ref.binary(), VALUE) is True  # the same one: not to be freed
    assert heard == [VALUE]
    assert own.table.when_ready(entry, lambda _entry: heard.append("again")) is True
    assert heard == [VALUE]


def test_a_waiter_that_fails_does_not_keep_the_others_waiting(own: Fixture) -> None:
    ref = own.table.create(own.table.new_id())
    entry = own.table.entry(ref.binary())
    assert entry is not None
    heard: list[int] = []
    own.table.when_ready(entry, lambda _entry: 1 // 0)  # type: ignore[arg-type]
    own.table.when_ready(entry, lambda _entry: heard.append(1))
    assert own.table.set_value(ref.binary(), VALUE) is True
    assert heard == [1]


def test_a_dropped_waiter_is_not_called(own: Fixture) -> None:
    ref = own.table.create(own.table.new_id())
    entry = own.table.entry(ref.binary())
    assert entry is not None
    heard: list[Any] = []
    own.table.when_ready(entry, heard.append)
    own.table.drop_waiter(entry, heard.append)
    own.table.set_value(ref.binary(), VALUE)
    own.table.drop_waiter(entry, heard.append)
    assert heard == []


def test_refs_inside_a_value_live_as_long_as_the_value(own: Fixture) -> None:
    inner = own.table.create_with_value(own.table.new_id(), VALUE, None)
    outer = own.table.create_with_value(own.table.new_id(), OTHER, [inner])
    del inner
    own.drain()
    assert len(own.table) == 2
    del outer
    own.drain()
    assert len(own.table) == 0
    assert own.outside.freed == [OTHER, VALUE]


def test_a_borrowed_object_is_freed_when_its_borrower_lets_go(own: Fixture) -> None:
    ref = own.table.create_with_value(own.table.new_id(), VALUE, None)
    id = ref.binary()
    assert own.table.borrow(id, BORROWER)
    del ref
    own.drain()
    assert own.outside.freed == []
    own.table.unborrow(id, BORROWER)
    assert own.outside.freed == [VALUE]
    assert not kept(own.table)


def test_a_release_may_overtake_the_borrow_that_it_ends(own: Fixture) -> None:
    """A third process reports the borrow, the borrower itself releases it."""
    ref = own.table.create_with_value(own.table.new_id(), VALUE, None)
    id = ref.binary()
    own.table.borrow(id, SECOND)  # who will report
    del ref
    own.drain()
    own.table.unborrow(id, BORROWER)
    assert own.table.entry(id) is not None
    own.table.borrow(id, BORROWER)
    assert own.table.entry(id) is not None
    own.table.unborrow(id, SECOND)
    assert own.outside.freed == [VALUE]
    assert not kept(own.table)


def test_a_late_borrow_that_evens_out_an_early_release_frees_the_object(own: Fixture) -> None:
    ref = own.table.create_with_value(own.table.new_id(), VALUE, None)
    id = ref.binary()
    own.table.unborrow(id, BORROWER)
    del ref
    own.drain()
    assert own.outside.freed == []
    assert own.table.borrow(id, BORROWER)
    assert own.outside.freed == [VALUE]
    assert len(own.table) == 0


def test_a_release_whose_borrow_died_with_its_reporter_holds_nothing(own: Fixture) -> None:
    ref = own.table.create_with_value(own.table.new_id(), VALUE, None)
    id = ref.binary()
    own.table.borrow(id, SECOND)
    own.table.unborrow(id, BORROWER)
    del ref
    own.drain()
    assert own.outside.freed == []
    own.table.borrower_died(SECOND)
    assert own.outside.freed == [VALUE]
    assert not kept(own.table)


def test_a_borrow_of_what_is_gone_says_so(own: Fixture) -> None:
    assert own.table.borrow(own.table.new_id(), BORROWER) is False
    own.table.unborrow(own.table.new_id(), BORROWER)
    assert not kept(own.table)


def test_the_death_of_a_borrower_releases_all_that_it_held(own: Fixture) -> None:
    refs = [own.table.create_with_value(own.table.new_id(), VALUE, None) for _ in range(5)]
    for ref in refs:
        own.table.borrow(ref.binary(), BORROWER)
        own.table.borrow(ref.binary(), BORROWER)
    own.table.borrow(refs[0].binary(), SECOND)
    first = refs[0].binary()
    del refs, ref
    own.drain()
    own.table.borrower_died(BORROWER)
    assert [entry.id for entry in own.table.snapshot()] == [first]
    own.table.borrower_died(BORROWER)
    own.table.borrower_died(SECOND)
    assert len(own.table) == 0


def test_a_borrower_tells_the_owner_only_what_the_owner_knows(own: Fixture) -> None:
    foreign = new_id() + b"12345678"
    ref, entry = own.table.adopt(foreign, b"node0001")
    del ref
    own.drain()
    assert own.outside.unborrowed == []
    ref, entry = own.table.adopt(foreign, b"node0001")
    entry.registered = True
    del ref
    own.drain()
    assert own.outside.unborrowed == [foreign]
    assert len(own.table) == 0


def test_the_last_handle_of_an_actor_is_told(own: Fixture) -> None:
    ref = own.table.create_actor(own.table.new_id())
    id = ref.binary()
    own.table.borrow(id, BORROWER)
    del ref
    own.drain()
    assert own.outside.unreferenced == []
    own.table.unborrow(id, BORROWER)
    assert own.outside.unreferenced == [id]
    assert own.outside.freed == []


def test_a_finalizer_may_use_refs_inside_a_section_of_the_table(own: Fixture) -> None:
    """A garbage collection, and so user code, may run while the lock is held."""
    with own.table.lock:
        ref = own.table.create_with_value(own.table.new_id(), VALUE, None)
        own.table.adopt(ref.binary(), NODE)
        del ref
        own.drain()
    assert len(own.table) == 0


def test_threads_that_adopt_and_drop_lose_no_count(own: Fixture) -> None:
    ref = own.table.create_with_value(own.table.new_id(), VALUE, None)
    id = ref.binary()

    def churn() -> None:
        for _ in range(500):
            own.table.adopt(id, NODE)
            own.table.borrow(id, BORROWER)
            own.table.unborrow(id, BORROWER)

    threads = [threading.Thread(target=churn) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    own.drain()
    entry = own.table.entry(id)
    assert entry is not None
    assert entry.local == 1
    del ref
    own.drain()
    assert len(own.table) == 0
