from __future__ import annotations

from typing import TYPE_CHECKING, Any

from process_doubles import NODE, Caller

from miniray.client.object_reports import Holds
from miniray.common.names import call_site, describe
from miniray.common.state_types import PICKLED, order

if TYPE_CHECKING:
    from miniray.common.object_ref import ObjectRef


def put(own: Caller) -> ObjectRef[Any]:
    return own.table.create_with_value(own.table.new_id(), (0, b"value", ()), None)


def reasons(own: Caller, id: bytes, *seen: tuple[Any, str, list[ObjectRef[Any]]]) -> Any:
    holds = Holds([id])
    for kind, name, refs in seen:
        holds.see(kind, name, refs)
    entry = own.table.entry(id)
    assert entry is not None
    found = holds.of(entry, own.table.pickled.get(id, 0))
    return [(hold["kind"], hold["count"], hold["names"]) for hold in found]


def test_what_nothing_known_holds_is_held_by_user_code() -> None:
    own = Caller()
    ref = put(own)
    assert reasons(own, ref.binary()) == [("LOCAL_REFERENCE", 1, [])]


def test_a_ref_that_only_calls_hold_is_not_the_users() -> None:
    own = Caller()
    pins = [put(own)]
    id = pins[0].binary()
    seen = ("USED_BY_PENDING_TASK", "square", pins)
    assert reasons(own, id, seen) == [("USED_BY_PENDING_TASK", 1, ["square"])]


def test_one_ref_in_many_calls_is_counted_once_for_each() -> None:
    own = Caller()
    pins = [put(own)]
    more = [list(pins) for _ in range(9)]
    seen = [("USED_BY_PENDING_TASK", f"f{n % 5}", refs) for n, refs in enumerate([pins, *more])]
    [(kind, count, names)] = reasons(own, pins[0].binary(), *seen)
    assert (kind, count) == ("USED_BY_PENDING_TASK", 10)
    assert names == ["f0", "f1", "f2"]


def test_refs_of_one_object_are_told_apart() -> None:
    own = Caller()
    inside = [put(own)]
    id = inside[0].binary()
    users, _entry = own.table.adopt(id, NODE)
    seen = ("CAPTURED_IN_OBJECT", "outer", inside)
    assert reasons(own, id, seen) == [
        ("LOCAL_REFERENCE", 1, []),
        ("CAPTURED_IN_OBJECT", 1, ["outer"]),
    ]
    del users
    own.drain()
    assert reasons(own, id, seen) == [("CAPTURED_IN_OBJECT", 1, ["outer"])]


def test_refs_that_were_pickled_count_for_ever_and_are_told_apart() -> None:
    own = Caller()
    ref = put(own)
    id = ref.binary()
    own.table.pin(id)
    assert reasons(own, id) == [("LOCAL_REFERENCE", 1, []), ("LOCAL_REFERENCE", 1, [PICKLED])]
    del ref
    own.drain()
    assert reasons(own, id) == [("LOCAL_REFERENCE", 1, [PICKLED])]


def test_what_was_not_asked_for_is_passed_over() -> None:
    own = Caller()
    ref, other = put(own), put(own)
    assert reasons(own, ref.binary(), ("USED_BY_PENDING_TASK", "f", [other])) == [
        ("LOCAL_REFERENCE", 1, [])
    ]


def test_the_largest_come_first_and_equals_in_the_order_of_their_segments() -> None:
    keys = [order(5, 2, b"n"), order(9, 7, b"n"), order(5, 1, b"n"), order(5, 1, b"m")]
    assert sorted(keys) == [
        order(9, 7, b"n"),
        order(5, 1, b"m"),
        order(5, 1, b"n"),
        order(5, 2, b"n"),
    ]


def test_the_call_site_is_the_innermost_frame_of_user_code() -> None:
    namespace: dict[str, Any] = {"__name__": "miniray.train.loop", "call_site": call_site}
    exec("def inside():\n    return call_site()", namespace)
    file, line, function = namespace["inside"]()
    assert (file, line > 0) == (__file__, True)
    assert function.endswith("test_the_call_site_is_the_innermost_frame_of_user_code")
    assert describe(("a.py", 3, "main")) == "a.py:3 in main"
    assert (describe("square"), describe(None)) == ("square", "")
