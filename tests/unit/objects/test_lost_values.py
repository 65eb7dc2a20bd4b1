"""Values whose node is gone, in the process that owns them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from kept import kept

from miniray.common.ids import ObjectIds, new_id
from miniray.messages import protocol as p
from miniray.objects.lost_values import LostValues
from miniray.objects.objects import ObjectTable

if TYPE_CHECKING:
    from collections.abc import Callable

    from miniray.common.object_ref import ObjectRef
    from miniray.messages.value import Value
    from miniray.objects.objects import Entry

NODE, GONE, OTHER = b"node0000", b"node-was", b"node0001"


class Link:
    """A daemon that answers when the test says so."""

    def __init__(self) -> None:
        self.asked: list[tuple[bytes, Callable[..., None]]] = []
        self.freed: list[tuple[bytes, int]] = []

    def node_request_async(
        self, method: str, args: tuple[bytes], answer: Callable[..., None]
    ) -> None:
        assert method == "left_copies"
        self.asked.append((args[0], answer))

    def node_notice(self, method: str, node: bytes, number: int) -> None:
        assert method == "free_segment"
        self.freed.append((node, number))


class Outside:
    def __getattr__(self, name: str) -> Any:
        return lambda *_args: None


class Process:
    def __init__(self) -> None:
        process_id = new_id()
        self.table = ObjectTable(process_id, NODE, Outside())
        self.link = Link()
        self.given_up: list[bytes] = []
        self.values = LostValues(self.table, self.link, self._give_up)  # type: ignore[arg-type]
        self._ids = ObjectIds(process_id)

    def _give_up(self, id: bytes, _value: Value) -> None:
        self.given_up.append(id)

    def stored(self, number: int, node: bytes = GONE) -> tuple[ObjectRef[Any], Entry]:
        value = (p.VALUE_SHARED, (node, number, 100), ())
        ref = self.table.create_with_value(self._ids.new(), value, [])
        entry = self.table.entry(ref.binary())
        assert entry is not None
        return ref, entry

    def payload(self, entry: Entry) -> Any:
        assert entry.value is not None
        return entry.value[1]


def test_a_value_is_where_its_copy_is() -> None:
    process = Process()
    _ref, entry = process.stored(7)
    _elsewhere, unmoved = process.stored(7, OTHER)
    inside = entry.contained
    process.values.on_copies(GONE, OTHER, [(7, 1)])
    assert process.payload(entry) == (OTHER, 1, 100)
    assert entry.contained is inside
    assert process.payload(unmoved) == (OTHER, 7, 100)
    assert not process.link.freed


def test_further_copies_and_those_that_nobody_wants_are_freed() -> None:
    process = Process()
    ref, entry = process.stored(7)
    process.values.on_copies(GONE, OTHER, [(7, 1), (9, 3)])
    process.values.on_copies(GONE, NODE, [(7, 2)])
    assert process.payload(entry) == (OTHER, 1, 100)
    process.table.drop([ref.binary()])
    assert process.link.freed == [(OTHER, 3), (NODE, 2)]


def test_who_could_not_read_a_value_waits_for_word_of_a_copy() -> None:
    process = Process()
    _ref, entry = process.stored(7)
    read: list[Any] = []
    assert entry.value is not None
    assert process.values.wait(entry, entry.value)
    assert not process.table.when_ready(entry, lambda entry: read.append(process.payload(entry)))
    process.values.on_copies(GONE, OTHER, [(7, 1)])
    assert read == [(OTHER, 1, 100)]
    [(node, answer)] = process.link.asked
    assert node == GONE
    answer(None, True, -1)
    assert not process.given_up


def test_what_nobody_has_is_given_up_when_all_have_told() -> None:
    process = Process()
    entries = [process.stored(number)[1] for number in (7, 8)]
    for entry in entries:
        assert entry.value is not None
        assert process.values.wait(entry, entry.value)
    [(_node, answer)] = process.link.asked  # one question for all
    process.table.drop([entries[1].id])
    answer(None, True, -1)
    assert process.given_up == [entries[0].id]
    _ref, late = process.stored(9)
    assert late.value is not None
    assert not process.values.wait(late, late.value)  # no need to ask again


def test_a_lost_value_of_a_node_that_lives_says_nothing_of_others_there() -> None:
    process = Process()
    _ref, entry = process.stored(7)
    _other, other = process.stored(8)
    assert entry.value is not None
    assert other.value is not None
    assert process.values.wait(entry, entry.value)
    process.link.asked.pop()[1](None, False, -1)
    assert process.values.wait(entry, entry.value)
    process.link.asked.pop()[1](None, False, -1)
    assert not process.values.wait(entry, entry.value)
    assert process.values.wait(other, other.value)  # that node may have died meanwhile
    process.values.on_copies(GONE, OTHER, [(8, 1)])
    process.link.asked.pop()[1](None, True, -1)
    assert process.payload(other) == (OTHER, 1, 100)
    assert process.given_up == [entry.id]  # which nobody has read since


def test_all_values_that_were_lost_with_a_node_are_given_up_when_the_first_is_read() -> None:
    process = Process()
    ref, entry = process.stored(7)
    unread, _ = process.stored(8)
    _elsewhere = process.stored(9, OTHER)
    assert entry.value is not None
    assert process.values.wait(entry, entry.value)
    process.link.asked.pop()[1](None, True, -1)
    assert process.given_up == [ref.binary(), unread.binary()]


def test_nothing_is_remembered_of_values_that_were_freed() -> None:
    process = Process()
    before = kept(process.values)
    for number in range(2000):
        ref, entry = process.stored(number)
        assert entry.value is not None
        assert process.values.wait(entry, entry.value)
        process.link.asked.pop()[1](None, False, -1)
        process.table.drop([ref.binary()])
    assert kept(process.values) < before + 1000


def test_a_value_stays_where_it_is_if_its_node_lives() -> None:
    process = Process()
    _ref, entry = process.stored(7)
    value = entry.value
    assert value is not None
    assert process.values.wait(entry, value)
    process.link.asked.pop()[1](None, False, -1)
    assert entry.value == value
    assert process.values.wait(entry, value)
    process.link.asked.pop()[1](None, False, -1)
    assert entry.value == value
    assert not process.given_up
    assert not process.values.wait(entry, value)  # it was tried three times


def test_what_could_not_be_read_once_has_its_copy_waited_for_when_its_node_dies() -> None:
    process = Process()
    _ref, entry = process.stored(7)
    value = entry.value
    assert value is not None
    assert process.values.wait(entry, value)
    process.link.asked.pop()[1](None, False, -1)
    assert entry.value == value  # and is read
    assert process.values.wait(entry, value)  # but not the next time
    process.values.on_copies(GONE, OTHER, [(7, 1)])
    process.link.asked.pop()[1](None, True, -1)
    assert process.payload(entry) == (OTHER, 1, 100)
    assert not process.given_up
