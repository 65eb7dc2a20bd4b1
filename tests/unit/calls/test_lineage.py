"""What is remembered of finished tasks, and for how long."""

from __future__ import annotations

import weakref
from types import SimpleNamespace
from typing import Any

from miniray.calls.lineage import Lineage
from miniray.messages import protocol as p

NODE = b"n" * 8


def call(result: bytes, *, retries: int = 3, form: int = p.VALUE_PICKLE, **changes: Any) -> Any:
    facts = {
        "channel": None,
        "target": b"key",
        "name": "work",
        "return_ids": (result,),
        "arguments": (form, b"arguments", ()),
        "options": None,
        "retries": retries,
        "retry_exceptions": False,
        "origin": None,
        "stream": None,
    }
    return SimpleNamespace(**{**facts, **changes})


def shared(id: bytes) -> Any:
    return (0, id, NODE, (p.VALUE_SHARED, (NODE, 1, NODE, 10), ()))


def large(size: int) -> Any:
    return (p.VALUE_SHARED, (NODE, 7, NODE, size), ())


def pins(*ids: bytes) -> Any:
    """Refs that a test can see the end of."""
    return [Pin(id) for id in ids]


class Pin:
    def __init__(self, id: bytes) -> None:
        self._id = id

    def binary(self) -> bytes:
        return self._id


def test_a_task_is_remembered_while_its_result_is_in_use() -> None:
    lineage = Lineage(10, 1000)
    assert lineage.keep(call(b"a"), [], 1, None)
    assert lineage.find(b"a") is not None
    lineage.forget(b"a")
    assert lineage.find(b"a") is None
    assert len(lineage) == 0


def test_a_task_is_remembered_while_what_was_made_from_its_result_is_in_use() -> None:
    lineage = Lineage(10_000, 1 << 20)
    lineage.keep(call(b"0"), [], 1, None)
    for n in range(1, 3000):  # longer than the stack is deep
        lineage.keep(call(b"%d" % n), [shared(b"%d" % (n - 1))], 1, None)
        lineage.forget(b"%d" % (n - 1))
    assert len(lineage) == 3000
    lineage.forget(b"2999")
    assert len(lineage) == 0


def test_a_generator_is_remembered_while_one_of_its_items_is_in_use() -> None:
    lineage = Lineage(10, 1000)
    lineage.keep(call(b"source"), [], 1, None)
    items = [b"small"]
    origin = lineage.stream(call(b"none"), [shared(b"source")], items, None)
    assert origin is not None
    for id in (b"a", b"b"):
        items.append(id)
        lineage.keep_item(origin, id)
    lineage.forget(b"source")
    lineage.forget(b"a")
    assert lineage.find(b"b") is origin
    assert lineage.find(b"source") is not None
    lineage.forget(b"b")
    assert len(lineage) == 0
    lineage.keep_item(origin, b"c")  # it yields on
    assert lineage.find(b"c") is origin
    lineage.forget(b"c")
    assert len(lineage) == 0
    assert lineage.stream(call(b"none", retries=0), [], items, None) is None


def test_what_cannot_be_repeated_is_not_remembered() -> None:
    lineage = Lineage(10, 1000)
    assert not lineage.keep(call(b"a", retries=0), [], 1, None)
    assert not lineage.keep(call(b"b", form=p.VALUE_SHARED), [], 1, None)
    assert len(lineage) == 0


def test_the_oldest_are_given_up_when_there_are_too_many_or_they_are_too_large() -> None:
    lineage = Lineage(3, 1000)
    for id in (b"a", b"b", b"c", b"d"):
        lineage.keep(call(id), [], 1, None)
    assert lineage.find(b"a") is None
    assert len(lineage) == 3
    lineage.keep(call(b"e", arguments=(p.VALUE_PICKLE, bytes(990), ())), [], 1, None)
    assert len(lineage) == 2
    assert lineage.find(b"e") is not None


def test_small_arguments_are_kept_with_their_values_and_large_ones_by_name() -> None:
    lineage = Lineage(10, 1000)
    small = (1, b"small", NODE, (p.VALUE_PICKLE, b"value", ()))
    lineage.keep(call(b"a"), [shared(b"large"), small], 1, None)
    origin = lineage.find(b"a")
    assert origin is not None
    assert origin.refs == [(0, b"large", NODE, None), small]
    assert origin.needs == ((b"large", NODE),)


def test_runs_are_counted_down() -> None:
    lineage = Lineage(10, 1000)
    lineage.keep(call(b"a", retries=1), [], 1, None)
    lineage.keep(call(b"b", retries=-1), [], 1, None)
    once, often = lineage.find(b"a"), lineage.find(b"b")
    assert once is not None
    assert often is not None
    assert [lineage.spend(once) for _ in range(2)] == [True, False]
    assert all(lineage.spend(often) for _ in range(5))


# --- what no task can make again ---------------------------------------------------------
def test_what_no_task_can_make_again_is_kept_alive_until_the_result_goes() -> None:
    lineage = Lineage(10, 1000)
    lineage.keep(call(b"made"), [], 1, None)  # from nothing that could be lost
    work = call(b"a")
    refs = pins(b"put", b"made")
    lineage.keep(work, [shared(b"put"), shared(b"made")], 1, refs)
    put, made = map(weakref.ref, refs)
    del refs
    lineage.ended(work.origin)
    assert put() is not None
    assert made() is None  # it is made again
    lineage.forget(b"a")
    del work
    assert put() is None
    assert lineage.pinning() == []


def test_a_result_that_could_not_be_made_again_is_kept_alive_itself() -> None:
    """It was made on this node, from a value that is dropped, and used on another."""
    lineage = Lineage(10, 1000)
    lineage.keep(call(b"here"), [shared(b"put")], 1, None)
    refs = pins(b"here")
    lineage.keep(call(b"there"), [shared(b"here")], 1, refs)
    here = weakref.ref(refs.pop())
    assert here() is not None
    lineage.forget(b"there")
    assert here() is None


def test_large_arguments_are_kept_until_the_last_call_of_them_has_ended() -> None:
    lineage = Lineage(10, 1000)
    work = call(b"a", arguments=large(500))
    assert lineage.keep(work, [], 1, [])
    origin = work.origin
    lineage.ended(origin)
    assert lineage.run([origin])
    lineage.forget(b"a")  # while it runs again
    assert not lineage.unneeded
    lineage.ended(origin)
    assert list(lineage.unneeded) == [work.arguments]
    assert not lineage.run([origin])


def test_arguments_of_a_generator_are_kept_while_it_runs_or_an_item_is_in_use() -> None:
    lineage = Lineage(10, 1000)
    work = call(b"none", arguments=large(500))
    items: list[bytes] = []
    origin = lineage.stream(work, [], items, [])
    assert origin is not None
    for id in (b"a", b"b"):
        items.append(id)
        lineage.keep_item(origin, id)
        lineage.forget(id)
    assert len(lineage) == 0
    assert not lineage.unneeded  # it yields on
    lineage.keep_item(origin, b"c")
    lineage.ended(work.origin)
    assert not lineage.unneeded
    lineage.forget(b"c")
    assert list(lineage.unneeded) == [work.arguments]


def test_a_task_that_runs_again_after_it_was_given_up_is_remembered_with_what_it_has() -> None:
    lineage = Lineage(1, 1000)
    work = call(b"a", arguments=large(500))
    lineage.keep(work, [], 1, pins(b"put"))
    origin = work.origin
    lineage.ended(origin)
    assert lineage.run([origin])
    lineage.keep(call(b"b"), [], 1, None)
    assert lineage.find(b"a") is None
    again = call(b"a", arguments=work.arguments, origin=origin)
    assert lineage.keep(again, [], 1, [])
    assert lineage.find(b"a") is origin
    lineage.ended(origin)
    assert not lineage.unneeded
    lineage.forget(b"a")
    assert list(lineage.unneeded) == [work.arguments]
