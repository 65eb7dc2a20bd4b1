"""``as_completed`` and ``map_unordered``: what they wait for, and what they refuse."""

from __future__ import annotations

import itertools
import weakref
from typing import TYPE_CHECKING, Any

import pytest
from fake_runtime import FakeRuntime, fake_runtime

import miniray
from miniray.util import as_completed, map_unordered

if TYPE_CHECKING:
    from collections.abc import Iterator


@pytest.fixture(autouse=True)
def runtime() -> Iterator[FakeRuntime]:
    with fake_runtime() as fake:
        yield fake


@miniray.remote
def double(number: int) -> int:
    return 2 * number


@pytest.mark.parametrize("chunk_size", [1, 2, 10])
def test_every_value_comes_once(chunk_size: int) -> None:
    refs = [double.remote(number) for number in range(5)]
    assert sorted(as_completed(refs, chunk_size=chunk_size)) == [0, 2, 4, 6, 8]
    assert len(refs) == 5  # the list that was given is left alone


def test_a_ref_that_was_taken_is_let_go(runtime: FakeRuntime) -> None:
    """Else the results of all would stay in the object store until the last one has come."""
    refs = [double.remote(number) for number in range(3)]
    alive = [weakref.ref(ref) for ref in refs]
    values = as_completed(refs, chunk_size=1)
    del refs
    for left in (3, 2, 1):  # of which one is being looked at
        next(values)
        runtime.asked.clear()
        assert sum(ref() is not None for ref in alive) <= left


def test_nothing_gives_nothing() -> None:
    assert list(as_completed([])) == []
    assert list(map_unordered(double, [])) == []


def test_refs_can_be_had_instead_of_values() -> None:
    refs = [double.remote(number) for number in range(3)]
    assert set(as_completed(refs, yield_obj_refs=True)) == set(refs)
    made = list(map_unordered(double, range(3), yield_obj_refs=True))
    assert sorted(miniray.get(made)) == [0, 2, 4]


def test_a_task_runs_for_each_item() -> None:
    assert sorted(map_unordered(double, range(25), chunk_size=4)) == list(range(0, 50, 2))


def test_items_are_read_as_far_as_there_is_room(runtime: FakeRuntime) -> None:
    results = map_unordered(double, itertools.count(), backpressure_size=3, chunk_size=1)
    assert [next(results) for _ in range(4)] == [0, 2, 4, 6]
    assert sum(call.kind == "task" for call in runtime.asked) <= 7


def test_without_backpressure_all_tasks_start_first(runtime: FakeRuntime) -> None:
    next(map_unordered(double, range(200), backpressure_size=None))
    assert sum(call.kind == "task" for call in runtime.asked) == 200


def test_an_error_reaches_the_loop() -> None:
    @miniray.remote
    def fail(_number: int) -> None:
        raise KeyError("here")

    with pytest.raises(KeyError):
        list(map_unordered(fail, [1]))


@pytest.mark.parametrize(
    ("arguments", "error", "told"),
    [
        ({"chunk_size": 0}, ValueError, "chunk_size must be a whole number of at least 1, not 0"),
        ({"chunk_size": 1.5}, TypeError, "chunk_size"),
        ({"backpressure_size": 0}, ValueError, "backpressure_size"),
        ({"fn": len}, TypeError, "remote function"),
    ],
)
def test_what_makes_no_sense_is_refused_at_once(
    arguments: dict[str, Any], error: type[Exception], told: str
) -> None:
    with pytest.raises(error, match=told):
        map_unordered(**{"fn": double, "items": [1], **arguments})
    if "chunk_size" in arguments:
        with pytest.raises(error, match=told):
            as_completed([], **arguments)
