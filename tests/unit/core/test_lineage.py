"""What is remembered of finished tasks, and for how long."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from miniray.core import protocol as p
from miniray.core.lineage import Lineage

NODE = b"n" * 8


def call(result: bytes, *, retries: int = 3, form: int = p.VALUE_PICKLE, **changes: Any) -> Any:
    facts = {
        "target": b"key",
        "name": "work",
        "return_ids": (result,),
        "arguments": (form, b"arguments", ()),
        "options": None,
        "retries": retries,
        "retry_exceptions": False,
    }
    return SimpleNamespace(**{**facts, **changes})


def shared(id: bytes) -> Any:
    return (0, id, NODE, (p.VALUE_SHARED, (NODE, 1, 10), ()))


def test_a_task_is_remembered_while_its_result_is_in_use() -> None:
    lineage = Lineage(10, 1000)
    assert lineage.keep(call(b"a"), [], 1)
    assert lineage.find(b"a") is not None
    lineage.forget(b"a")
    assert lineage.find(b"a") is None
    assert len(lineage) == 0


def test_a_task_is_remembered_while_what_was_made_from_its_result_is_in_use() -> None:
    lineage = Lineage(10_000, 1 << 20)
    lineage.keep(call(b"0"), [], 1)
    for n in range(1, 3000):  # longer than the stack is deep
        lineage.keep(call(b"%d" % n), [shared(b"%d" % (n - 1))], 1)
        lineage.forget(b"%d" % (n - 1))
    assert len(lineage) == 3000
    lineage.forget(b"2999")
    assert len(lineage) == 0


def test_a_generator_is_remembered_while_one_of_its_items_is_in_use() -> None:
    lineage = Lineage(10, 1000)
    lineage.keep(call(b"source"), [], 1)
    items = [b"small"]
    origin = lineage.stream(call(b"none"), [shared(b"source")], items)
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
    assert lineage.stream(call(b"none", retries=0), [], items) is None


def test_what_cannot_be_repeated_is_not_remembered() -> None:
    lineage = Lineage(10, 1000)
    assert not lineage.keep(call(b"a", retries=0), [], 1)
    assert not lineage.keep(call(b"b", form=p.VALUE_SHARED), [], 1)
    assert len(lineage) == 0


def test_the_oldest_are_given_up_when_there_are_too_many_or_they_are_too_large() -> None:
    lineage = Lineage(3, 1000)
    for id in (b"a", b"b", b"c", b"d"):
        lineage.keep(call(id), [], 1)
    assert lineage.find(b"a") is None
    assert len(lineage) == 3
    lineage.keep(call(b"e", arguments=(p.VALUE_PICKLE, bytes(990), ())), [], 1)
    assert len(lineage) == 2
    assert lineage.find(b"e") is not None


def test_small_arguments_are_kept_with_their_values_and_large_ones_by_name() -> None:
    lineage = Lineage(10, 1000)
    small = (1, b"small", NODE, (p.VALUE_PICKLE, b"value", ()))
    lineage.keep(call(b"a"), [shared(b"large"), small], 1)
    origin = lineage.find(b"a")
    assert origin is not None
    assert origin.refs == [(0, b"large", NODE, None), small]
    assert origin.needs == ((b"large", NODE),)


def test_runs_are_counted_down() -> None:
    lineage = Lineage(10, 1000)
    lineage.keep(call(b"a", retries=1), [], 1)
    lineage.keep(call(b"b", retries=-1), [], 1)
    once, often = lineage.find(b"a"), lineage.find(b"b")
    assert once is not None
    assert often is not None
    assert [lineage.spend(once) for _ in range(2)] == [True, False]
    assert all(lineage.spend(often) for _ in range(5))
