from __future__ import annotations

import copy
import gc
import pickle
import sys
import threading
from typing import TYPE_CHECKING

import pytest

from miniray.common.object_ref import (
    PROCESS_ID_LENGTH,
    ObjectIds,
    ObjectRef,
    hooks,
    new_id,
    owner_of,
    rebuild_ref,
    short_id,
)

if TYPE_CHECKING:
    from collections.abc import Iterator

ID, OTHER = b"owner000" + b"\0" * 7 + b"\1", b"owner000" + b"\0" * 7 + b"\2"
NODE = b"node0000"


@pytest.fixture(autouse=True)
def quiet_hooks(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    gc.collect()
    hooks.dropped.clear()
    for name in ("wake", "serialized", "deserialized"):
        monkeypatch.setattr(hooks, name, None)
    monkeypatch.setattr(hooks, "woken", False)
    yield
    hooks.dropped.clear()


def test_refs_compare_hash_and_sort_by_their_id() -> None:
    assert ObjectRef(ID, NODE) == ObjectRef(ID, b"")
    assert ObjectRef(ID, NODE) != ObjectRef(OTHER, NODE)
    assert ObjectRef(ID, NODE) != ID
    assert len({ObjectRef(ID, NODE), ObjectRef(ID, NODE), ObjectRef(OTHER, NODE)}) == 2
    assert sorted([ObjectRef(OTHER, NODE), ObjectRef(ID, NODE)])[0].binary() == ID
    assert ObjectRef(ID, NODE).hex() == ID.hex()
    assert repr(ObjectRef(ID, NODE)) == f"ObjectRef({ID.hex()})"


def test_a_ref_is_always_that_of_a_value() -> None:
    assert not ObjectRef(ID, NODE).is_nil()


@pytest.mark.parametrize(
    ("name", "told"),
    [
        ("task_id", r"get_task_id\(\)"),
        ("job_id", r"get_job_id\(\)"),
        ("owner_address", r"list_objects\(\)"),
        ("call_site", r"list_objects\(\)"),
        ("size", r"len\(ref\.binary\(\)\)"),
        ("from_binary", "pass the ref itself"),
        ("from_hex", "pass the ref itself"),
        ("from_random", r"put\(\)"),
        ("nil", "use None"),
    ],
)
def test_what_only_rays_refs_have_says_what_to_do_instead(name: str, told: str) -> None:
    for where in (ObjectRef, ObjectRef(ID, NODE)):
        with pytest.raises(AttributeError, match=f"ObjectRef has no '{name}' in miniray: .*{told}"):
            getattr(where, name)
        assert not hasattr(where, name)


def test_a_dropped_ref_is_queued_and_wakes_the_runtime_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    woken: list[int] = []
    monkeypatch.setattr(hooks, "wake", lambda: woken.append(1))
    for _ in range(3):
        ObjectRef(ID, NODE)
    assert list(hooks.dropped) == [ID] * 3
    assert woken == [1]


def test_a_ref_that_nobody_counts_goes_silently() -> None:
    ObjectRef(ID, b"")
    assert not hooks.dropped


def test_a_ref_may_go_when_there_is_no_runtime() -> None:
    ObjectRef(ID, NODE)
    assert list(hooks.dropped) == [ID]


def test_pickling_tells_the_runtime_on_both_sides(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[object] = []
    ref = ObjectRef[int](ID, NODE)
    monkeypatch.setattr(hooks, "serialized", seen.append)
    blob = pickle.dumps(ref)
    assert seen == [ref]
    monkeypatch.setattr(hooks, "deserialized", ObjectRef)
    back = pickle.loads(blob)
    assert back == ref
    assert back._owner_node == NODE


def test_a_ref_unpickled_without_a_runtime_is_not_counted() -> None:
    assert rebuild_ref(ID, NODE)._owner_node == b""


def test_copies_of_a_ref_are_the_ref_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    """A pickled copy would keep the object for the life of the process."""
    seen: list[object] = []
    monkeypatch.setattr(hooks, "serialized", seen.append)
    ref = ObjectRef[int](ID, NODE)
    assert copy.copy(ref) is ref
    assert copy.deepcopy({"a": [ref]})["a"][0] is ref
    assert seen == []


def test_a_ref_that_could_not_be_made_is_dropped_without_a_word(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    ignored: list[object] = []
    monkeypatch.setattr(sys, "unraisablehook", lambda args: ignored.append(args.exc_type))
    with pytest.raises(TypeError, match="owner_node"):
        ObjectRef(ID)  # type: ignore[call-arg]
    gc.collect()
    assert not ignored


def test_ids_are_random_and_of_one_length() -> None:
    ids = {new_id() for _ in range(1000)}
    assert len(ids) == 1000
    assert {len(id) for id in ids} == {PROCESS_ID_LENGTH}


def test_an_object_id_tells_its_owner() -> None:
    process = new_id()
    id = ObjectIds(process).new()
    assert len(id) == 2 * PROCESS_ID_LENGTH
    assert owner_of(id) == process


def test_the_short_ids_of_what_one_process_made_are_distinct() -> None:
    ids = ObjectIds(bytes.fromhex("a132706d00112233"))
    assert [short_id(ids.new().hex()) for _ in range(17)][15:] == ["a132706d-16", "a132706d-17"]


def test_threads_never_get_the_same_id() -> None:
    ids = ObjectIds(new_id())
    found: list[bytes] = []

    def take() -> None:
        found.extend([ids.new() for _ in range(5000)])

    threads = [threading.Thread(target=take) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(set(found)) == len(found) == 20_000


def test_ids_sort_in_the_order_they_were_made() -> None:
    ids = ObjectIds(b"12345678")
    made = [ids.new() for _ in range(600)]
    assert made == sorted(made)
