"""Values of other nodes that a process wants on its own."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Any

import pytest
from process_doubles import NODE, FakeLoop

from miniray.common.object_ref import ObjectIds
from miniray.exceptions import ObjectLostError
from miniray.messages.protocol import VALUE_BYTES, VALUE_SHARED
from miniray.objects import waiting
from miniray.objects.borrowing import Borrowing
from miniray.objects.objects import ObjectTable
from miniray.objects.waiting import ValueFetches

if TYPE_CHECKING:
    from collections.abc import Callable

    from miniray.messages.value import Value
    from miniray.objects.objects import Entry

PROCESS = b"process0"
FAR: Any = (VALUE_SHARED, (b"far node", 7, b"far node", 100_000), ())


class Link:
    """A daemon that answers when a test says so."""

    def __init__(self) -> None:
        self.asked: list[tuple[Any, ...]] = []
        self.answers: list[Callable[[Any, Any, int], None]] = []
        self.notices: list[tuple[Any, ...]] = []
        self.here: set[tuple[bytes, int, bytes]] = set()

    def node_request_async(self, method: str, args: tuple[Any, ...], answer: Any) -> None:
        assert method == "fetch_segment"
        self.asked.append(args)
        self.answers.append(answer)

    def node_request(self, method: str, args: tuple[Any, ...]) -> tuple[Any, int]:
        assert method == "are_here"
        return [tuple(place) in self.here for place in args[0]], -1

    def node_notice(self, *notice: Any) -> None:
        self.notices.append(notice)


class Outside:
    def free_shared(self, value: Value) -> None:
        pass


@pytest.fixture
def link() -> Link:
    return Link()


@pytest.fixture
def fetches(link: Link) -> ValueFetches:
    return fetches_of(link, lambda _entry: None)


def fetches_of(link: Link, lost: Callable[[Entry], object]) -> ValueFetches:
    return ValueFetches(link, NODE, lambda entry, _value, _error: lost(entry) and None)  # type: ignore[arg-type]


@pytest.fixture
def table() -> ObjectTable:
    return ObjectTable(PROCESS, NODE, Outside())  # type: ignore[arg-type]


def entries(table: ObjectTable, *values: Any) -> list[Entry]:
    ids = ObjectIds(PROCESS)
    found = []
    for value in values:
        entry = table.adopt(ids.new(), NODE)[1]
        if value is not None:
            table.set_value(entry.id, value)
        found.append(entry)
    return found


def plain(wait: Callable[[float | None], bool], timeout: float | None) -> bool:
    return wait(timeout)


def wait(
    table: ObjectTable, fetches: ValueFetches, pending: list[Entry], needed: int, timeout: float
) -> bool:
    loop: Any = FakeLoop()
    peers: Any = None  # all objects are of this process
    borrowing = Borrowing(table, peers, lambda _id, _payload: None)
    waits = waiting.Waits(loop, table, borrowing, plain)
    return waits.for_values(pending, needed, timeout, fetches)


def test_a_value_of_this_node_or_in_a_message_is_here(
    fetches: ValueFetches, table: ObjectTable
) -> None:
    here = (VALUE_SHARED, (NODE, 3, NODE, 100_000), ())
    for entry in entries(table, here, (VALUE_BYTES, b"", ())):
        assert fetches.is_here(entry)


def test_a_value_of_another_node_is_here_when_the_daemon_says_so(
    fetches: ValueFetches, table: ObjectTable, link: Link
) -> None:
    [entry] = entries(table, FAR)
    assert not wait(table, fetches, [entry], 1, 0.01)
    assert not wait(table, fetches, [entry], 1, 0.01)
    assert len(link.asked) == 1, "it was on its way"
    assert not entry.fetch or not entry.fetch.waiters, "nobody waits any more"
    link.answers[0](None, None, -1)
    assert fetches.is_here(entry)
    assert wait(table, fetches, [entry], 1, 0)


@pytest.mark.parametrize("count", [2, 20], ids=["few", "many"])
def test_who_waits_goes_on_when_enough_values_are_here(
    fetches: ValueFetches, table: ObjectTable, link: Link, count: int
) -> None:
    far = [(VALUE_SHARED, (b"far node", n, b"far node", 100_000), ()) for n in range(count)]
    pending = entries(table, *far[1:], None)
    done: list[bool] = []
    waiter = threading.Thread(target=lambda: done.append(wait(table, fetches, pending, count, 10)))
    waiter.start()
    while len(link.answers) < count - 1:
        pass
    table.set_value(pending[-1].id, far[0])
    assert len(link.answers) == count, "a value that comes while we wait is fetched as well"
    for answer in link.answers:
        assert not done
        answer(None, None, -1)
    waiter.join(10)
    assert done == [True]


@pytest.mark.parametrize("count", [1, 20], ids=["few", "many"])
def test_a_value_that_is_lost_on_the_way_and_made_again_counts_when_that_is_here(
    fetches: ValueFetches, table: ObjectTable, link: Link, count: int
) -> None:
    pending = entries(table, FAR, *[(VALUE_BYTES, b"", ())] * (count - 1))
    fetches = fetches_of(link, lambda entry: table.forget_value(entry.id))
    done: list[bool] = []
    waiter = threading.Thread(target=lambda: done.append(wait(table, fetches, pending, count, 10)))
    waiter.start()
    while not link.answers:
        pass
    link.answers[0](ObjectLostError("it", "gone"), None, -1)
    assert not done
    table.set_value(pending[0].id, (VALUE_SHARED, (b"far node", 8, b"far node", 100_000), ()))
    assert [args[1] for args in link.asked] == [7, 8]
    assert not done
    link.answers[1](None, None, -1)
    waiter.join(10)
    assert done == [True]


def test_a_value_that_cannot_be_made_again_counts_as_ready(
    fetches: ValueFetches, table: ObjectTable, link: Link
) -> None:
    [entry] = entries(table, FAR)
    assert not wait(table, fetches, [entry], 1, 0)
    link.answers[0](ObjectLostError("it", "gone"), None, -1)
    assert wait(table, fetches, [entry], 1, 0)


def test_the_last_ref_ends_a_fetch(fetches: ValueFetches, table: ObjectTable, link: Link) -> None:
    [entry] = entries(table, FAR)
    assert not wait(table, fetches, [entry], 1, 0)
    table.drop([entry.id])
    assert link.notices == [("withdraw", [link.asked[0][-1]])]
    link.answers[0](ObjectLostError("it", "nobody waits"), None, -1)


def test_a_look_brings_nothing(fetches: ValueFetches, table: ObjectTable, link: Link) -> None:
    there, here = entries(table, FAR, (VALUE_SHARED, (b"far node", 8, b"far node", 100_000), ()))
    link.here.add((b"far node", 8, b"far node"))
    fetches.look([there, here])
    assert not fetches.is_here(there)
    assert fetches.is_here(here)
    assert not link.asked


def test_each_value_of_another_node_is_asked_for_once(fetches: ValueFetches, link: Link) -> None:
    numbers = fetches.prefetch([FAR, (VALUE_BYTES, b"", ()), FAR])
    assert link.notices == [("prefetch", [(*FAR[1], numbers[0])])]
    assert fetches.prefetch([(VALUE_BYTES, b"", ())]) == []
    assert len(link.notices) == 1
