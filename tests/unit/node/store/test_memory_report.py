from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
from stores import new_store

from miniray.messages import protocol as p
from miniray.node.objects.memory_service import (
    adopted_report,
    chosen,
    describe_holders,
    segment_rows,
    store_totals,
)

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from miniray.common.state_types import ObjectRow
    from miniray.node.store.segments import Segment, SegmentStore

PAGE = 4096
NODE, OTHER = b"node0000", b"node1111"
OWNER, READER, WRITER = b"owner000", b"reader00", b"writer00"
NAMES = {OWNER: "driver (pid 1)", READER: "Reader (pid 2)", WRITER: "square (pid 3)"}


@pytest.fixture
def store(tmp_path: Path) -> Iterator[SegmentStore]:
    store = new_store(1 << 30, tmp_path)
    yield store
    store.close()


def written(store: SegmentStore, size: int, owner: bytes = OWNER) -> Segment:
    segment = store.create(size, 0, owner, WRITER)
    store.seal(segment.number, f"made {size}")
    return segment


def row(size: int, *, owner: bytes = OWNER, process: bytes = OWNER, segment: int = 1) -> ObjectRow:
    return {
        "id": b"id",
        "owner": owner,
        "process": process,
        "size": size,
        "node": NODE,
        "segment": segment,
        "status": "NIL",
        "call_site": "",
        "holds": [],
        "borrowers": [],
    }


def test_every_byte_of_a_store_is_counted_once(store: SegmentStore) -> None:
    written(store, PAGE)
    store.create(2 * PAGE, 0, OWNER, WRITER)
    freed = written(store, 3 * PAGE)
    store.map(freed.number, READER)
    store.map(freed.number, READER)
    store.free(freed.number)
    gone = written(store, 4 * PAGE)
    store.free(gone.number)
    assert store_totals(store, store) == {
        "capacity": 1 << 30,
        "used": 6 * PAGE,
        "pooled": 4 * PAGE,
        "freed": 3 * PAGE,
        "writing": 2 * PAGE,
        "spilled": 0,
        "segments": 3,
        "freed_by": {READER: 3 * PAGE},
    }


def test_segments_are_told_with_what_they_are_for(store: SegmentStore) -> None:
    held = written(store, PAGE - 1)
    store.map(held.number, READER)
    [told] = segment_rows(NODE, store, 10)
    assert told == {
        "number": held.number,
        "size": PAGE - 1,
        "allocated": PAGE,
        "owner": OWNER,
        "writer": WRITER,
        "state": "HELD",
        "call_site": f"made {PAGE - 1}",
        "mappers": [READER],
        "source_node": b"",
        "source": 0,
        "spilled": False,
    }


def test_the_largest_segments_are_told_and_of_equal_ones_the_oldest(store: SegmentStore) -> None:
    for size in (1, 3, 2, 3, 3):
        written(store, size * PAGE)
    assert [told["number"] for told in segment_rows(NODE, store, 3)] == [2, 4, 5]


def test_a_copy_has_the_place_of_what_it_is_a_copy_of(store: SegmentStore) -> None:
    ninth, _, first = (written(store, PAGE, NODE) for _ in range(3))
    ninth.copy_of, first.copy_of = (OTHER, 9, OTHER), (OTHER, 1, OTHER)
    rows = segment_rows(NODE, store, 2)
    assert [(told["number"], told["source_node"], told["source"]) for told in rows] == [
        (3, OTHER, 1),
        (2, b"", 0),
    ]


def test_objects_without_their_owner_are_told_by_the_daemon() -> None:
    shared: Any = (p.VALUE_SHARED, (NODE, 7, NODE, 5000), ())
    small: Any = (p.VALUE_PICKLE, b"value", ())
    held: list[Any] = [
        (OWNER + b"00000001", shared, [READER], 0),
        (OWNER + b"00000002", small, [], 1),
    ]
    told = adopted_report(NODE, held, 10, detail=False)
    assert (told["inline"], told["inline_bytes"]) == (1, 5)
    [only] = told["objects"]
    assert (only["owner"], only["process"], only["segment"]) == (OWNER, NODE, 7)
    assert (only["borrowers"], only["holds"]) == ([READER], [])
    _, inner = adopted_report(NODE, held, 10, detail=True)["objects"]
    assert inner["holds"] == [{"kind": "CAPTURED_IN_OBJECT", "count": 1, "names": []}]


def test_arguments_of_a_detached_actor_are_told_as_held_for_it() -> None:
    actor_id = OWNER + b"\0" * 7 + b"\x09"
    shared: Any = (p.VALUE_SHARED, (NODE, 7, NODE, 5000), ())
    held: list[Any] = [(NODE + actor_id, shared, [actor_id], 0)]
    [only] = adopted_report(NODE, held, 10, detail=False)["objects"]
    assert (only["id"], only["owner"], only["process"]) == (b"", NODE, NODE)
    assert only["borrowers"] == []  # the actor is no process
    [hold] = only["holds"]
    assert hold["kind"] == "USED_BY_PENDING_TASK"
    assert hold["names"] == [f"the detached actor {OWNER.hex()[:8]}-9"]


def test_of_each_object_the_owner_tells_first_and_a_few_others() -> None:
    crowd = [row(9, process=b"reader%02d" % number) for number in range(50)]
    rows = [*crowd, row(9), row(8, segment=2), row(7, segment=3)]
    found = chosen(rows, 2)
    assert found[0]["process"] == OWNER
    assert len([each for each in found if each["size"] == 9]) == 10
    assert {each["size"] for each in found} == {9, 8}


def test_holders_are_named_by_how_much_they_own_and_still_map(store: SegmentStore) -> None:
    written(store, 3 << 20, READER)
    written(store, 5 << 20)
    written(store, 1 << 20)
    freed = written(store, 2 << 20, WRITER)
    store.map(freed.number, READER)
    store.free(freed.number)
    assert describe_holders(store, NAMES.__getitem__) == (
        "6 MiB by driver (pid 1), 3 MiB by Reader (pid 2); "
        "freed but still mapped: 2 MiB by Reader (pid 2)"
    )


def test_what_is_on_disk_is_told_by_who_owns_it(store: SegmentStore) -> None:
    written(store, 1 << 20)
    for size, owner, in_memory in ((3, OWNER, True), (2, OWNER, False), (4, READER, False)):
        segment = written(store, size << 20, owner)
        segment.place = store.files.reserve(segment.size)
        if not in_memory:
            store.drop_memory(segment)
    assert describe_holders(store, NAMES.__getitem__) == (
        "4 MiB by driver (pid 1); on disk: 5 MiB by driver (pid 1), 4 MiB by Reader (pid 2)"
    )
    store.files.close()


def test_holders_of_little_are_summed_up(store: SegmentStore) -> None:
    for number in range(6):
        written(store, (1 + number) << 20, b"process%d" % number)
    assert describe_holders(store, bytes.decode) == (
        "6 MiB by process5, 5 MiB by process4, 4 MiB by process3, 6 MiB by 3 others"
    )


def test_an_empty_store_has_no_holders(store: SegmentStore) -> None:
    assert describe_holders(store, bytes.decode) == ""
