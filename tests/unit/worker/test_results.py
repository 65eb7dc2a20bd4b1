"""What a worker keeps, and what it leaves, of the results that it sends."""

from __future__ import annotations

import contextlib
import threading
import types
from typing import TYPE_CHECKING, Any

import pytest

from miniray.common.object_ref import ObjectIds, ObjectRef, new_id
from miniray.exceptions import TaskCancelledError
from miniray.messages import protocol as p
from miniray.worker.generators import Generators
from miniray.worker.replies import Results

if TYPE_CHECKING:
    from collections.abc import Iterator

    from miniray.messages.value import Value
    from miniray.values.serialization import Serialized

LARGE = b"x" * 200_000


class Store:
    """Shared memory that remembers what was written and freed."""

    def __init__(self) -> None:
        self.written: list[Value] = []
        self.freed: list[Value] = []
        self.room = 10

    def write(self, value: Serialized, _owner: bytes, node: bytes, _made: str) -> Value:
        if len(self.written) == self.room:
            raise MemoryError("the store is full")
        contained = tuple((ref.binary(), ref._owner_node) for ref in value.refs)
        self.written.append(
            (p.VALUE_SHARED, (node, len(self.written), node, value.size), contained)
        )
        return self.written[-1]


class Peer:
    def __init__(self) -> None:
        self.process_id, self.node_id, self.lost = new_id(), new_id(), False


def call(caller: Peer | None = None, count: int = 1, *, again: bool = False) -> Any:
    """A call of f() with so many results."""
    ids = tuple(new_id() for _ in range(count))
    return types.SimpleNamespace(caller=caller or Peer(), name="f", return_ids=ids, again=again)


@pytest.fixture
def store() -> Store:
    return Store()


@pytest.fixture
def results(store: Store) -> Any:
    return Results(types.SimpleNamespace(shared_memory=store, free_shared=store.freed.append))  # type: ignore[arg-type]


def generators(results: Results) -> Generators:
    """Takes what generators yield; no call is cancelled."""
    return Generators(results, contextlib.nullcontext, {}, lambda wait, timeout: wait(timeout))


@pytest.fixture
def refs(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """Makes refs as a worker's runtime does: those that are pickled in values are collected."""
    from miniray.common.object_ref import hooks
    from miniray.values.serialization import collector

    ids = ObjectIds(new_id())
    monkeypatch.setattr(hooks, "serialized", lambda ref: collector.refs.append(ref))  # type: ignore[union-attr]
    yield lambda: ObjectRef(ids.new(), b"node0000")
    hooks.dropped.clear()


def kept(results: Results) -> list[ObjectRef[Any]]:
    return [ref for _, held in results.holds() for ref in held]


def test_a_release_of_one_item_leaves_the_refs_of_the_others(results: Results, refs: Any) -> None:
    caller, made = Peer(), [refs() for _ in range(3)]
    pins = [results.value([ref], call(caller))[1] for ref in made]
    results.release(caller, [pins[1]])  # type: ignore[arg-type]
    assert kept(results) == [made[0], made[2]]
    results.release(caller, [pins[0], pins[2]])  # type: ignore[arg-type]
    assert kept(results) == []


def test_a_value_without_refs_needs_no_release(results: Results) -> None:
    assert results.value([1], call())[1] == 0
    assert results.values((1, None), call(count=2))[1] == 0


@pytest.mark.parametrize("last", [threading.Lock(), LARGE])
def test_a_call_that_fails_after_its_first_result_leaves_nothing(
    results: Results, store: Store, refs: Any, last: Any
) -> None:
    store.room = 2
    with pytest.raises((TypeError, MemoryError)):
        results.values(([refs(), LARGE], [LARGE], last), call(count=3))
    assert len(store.written) == 2
    assert store.freed == store.written
    assert kept(results) == []


def test_a_generator_that_is_cut_off_leaves_nothing(
    results: Results, store: Store, refs: Any
) -> None:
    def items() -> Iterator[Any]:
        yield [refs(), LARGE]
        raise TaskCancelledError("f")

    with pytest.raises(TaskCancelledError):
        generators(results).store(items(), call(count=2))
    assert store.freed == store.written
    assert kept(results) == []


def test_results_of_a_generator_that_are_not_sent_are_dropped(
    results: Results, store: Store, refs: Any
) -> None:
    caller: Any = Peer()
    items = (item for item in ([refs(), LARGE], LARGE))
    stored = generators(results).store(items, call(caller, 2))
    assert len(kept(results)) == 1
    results.drop(stored, caller)
    assert store.freed == store.written
    assert kept(results) == []


@pytest.mark.parametrize("more", [False, True])
def test_what_a_generator_yields_after_its_results_is_told_if_these_are_all(
    results: Results, more: bool, caplog: pytest.LogCaptureFixture
) -> None:
    items = (item for item in (1, 2, 3))
    stored = generators(results).store(items, call(count=2, again=more))
    assert len(stored.values) == 2
    assert ("f has num_returns=2 and yielded more values" in caplog.text) is not more
    assert items.gi_frame is None  # it is closed


def test_a_result_that_finds_no_room_keeps_no_refs(
    results: Results, store: Store, refs: Any
) -> None:
    store.room = 0
    with pytest.raises(MemoryError):
        results.value([refs(), LARGE], call())
    assert kept(results) == []


def test_nothing_is_kept_for_a_caller_that_is_gone(results: Results, refs: Any) -> None:
    gone, living = Peer(), Peer()
    first, second = refs(), refs()
    results.value([first], call(gone))
    results.value([second], call(living))
    gone.lost = True
    results.caller_gone(gone)  # type: ignore[arg-type]
    results.value([first], call(gone))
    assert kept(results) == [second]


def test_who_waits_until_all_is_counted_is_called_by_the_last_release_or_death(
    results: Results, refs: Any
) -> None:
    called: list[bool] = []
    first, second = Peer(), Peer()
    assert results.when_counted(lambda: called.append(True))
    pin = results.value([refs()], call(first))[1]
    results.value([refs()], call(second))
    assert not results.when_counted(lambda: called.append(True))
    results.release(first, [pin])  # type: ignore[arg-type]
    assert called == []
    results.caller_gone(second)  # type: ignore[arg-type]
    assert called == [True]
