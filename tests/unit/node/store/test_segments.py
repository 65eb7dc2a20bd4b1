from __future__ import annotations

import gc
import os
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule
from open_files import open_memory
from stores import Pushes, new_store

from miniray.exceptions import ObjectLostError, ObjectStoreFullError

if TYPE_CHECKING:
    from collections.abc import Iterator

    from miniray.node.store.segments import Segment, SegmentStore

PAGE = 4096
CAPACITY = 64 * PAGE
OWNER, READER, WRITER = b"owner000", b"reader00", b"writer00"


@pytest.fixture
def store() -> Iterator[SegmentStore]:
    store = new_store(CAPACITY)
    yield store
    store.close()


def written(store: SegmentStore, size: int, owner: bytes = OWNER) -> Segment:
    segment = store.create(size, 0, owner, WRITER)
    store.seal(segment.number)
    return segment


def test_a_segment_takes_whole_pages_until_it_is_freed(store: SegmentStore) -> None:
    segment = written(store, PAGE + 1)
    assert store.used == 2 * PAGE
    assert os.fstat(segment.fd).st_size == 2 * PAGE
    store.free(segment.number)
    assert store.used == 0
    assert len(store) == 0
    with pytest.raises(ObjectLostError):
        store.get(segment.number)


def test_a_freed_segment_stays_until_its_last_reader_has_unmapped_it(store: SegmentStore) -> None:
    segment = written(store, PAGE)
    store.map(segment.number, READER)
    store.map(segment.number, READER)
    store.map(segment.number, OWNER)
    store.free(segment.number)
    store.unmap([segment.number], OWNER)
    store.unmap([segment.number], READER)
    assert store.used == PAGE
    store.unmap([segment.number], READER)
    assert store.used == 0


def test_an_unmap_without_a_map_changes_nothing(store: SegmentStore) -> None:
    segment = written(store, PAGE)
    store.unmap([segment.number, 999], READER)
    store.map(segment.number, READER)
    store.unmap([segment.number, segment.number], READER)
    store.free(segment.number)
    store.free(segment.number)
    assert store.used == 0


def test_the_memory_of_a_freed_segment_serves_the_next_writer(store: SegmentStore) -> None:
    first = written(store, 4 * PAGE)
    inode = os.fstat(first.fd).st_ino
    store.free(first.number)
    second = written(store, 3 * PAGE)
    assert os.fstat(second.fd).st_ino == inode
    assert second.number != first.number
    assert store.used == 4 * PAGE


def test_memory_that_a_child_of_a_reader_has_mapped_serves_nobody_else(store: SegmentStore) -> None:
    first, other = written(store, 4 * PAGE), written(store, 4 * PAGE)
    inode = os.fstat(first.fd).st_ino
    with open(f"/proc/self/fd/{first.fd}", "rb") as child:
        os.pwrite(first.fd, b"theirs", 0)
        store.map(first.number, READER)
        store.leave_open(READER)
        store.unmap([first.number], READER)
        store.free(first.number)
        assert os.fstat(written(store, 4 * PAGE).fd).st_ino != inode
        assert child.read(6) == b"theirs"
    reused = os.fstat(other.fd).st_ino
    store.free(other.number)
    assert os.fstat(written(store, 4 * PAGE).fd).st_ino == reused


def test_a_segment_far_larger_than_the_value_is_not_taken_for_it(store: SegmentStore) -> None:
    first = written(store, 8 * PAGE)
    inode = os.fstat(first.fd).st_ino
    store.free(first.number)
    assert os.fstat(written(store, PAGE).fd).st_ino != inode


def test_a_full_store_says_so_with_its_numbers(store: SegmentStore) -> None:
    written(store, CAPACITY - PAGE)
    with pytest.raises(ObjectStoreFullError):
        store.create(2 * PAGE, 0, OWNER, WRITER)
    assert written(store, PAGE)


def test_warm_memory_makes_room_when_it_is_needed(store: SegmentStore) -> None:
    before = open_memory()
    kept = written(store, CAPACITY // 2)
    pooled = [written(store, PAGE * n) for n in (1, 2, 4)]
    for segment in pooled:
        store.free(segment.number)
    rest = written(store, CAPACITY // 2)
    assert store.used == CAPACITY
    store.free(kept.number)
    store.free(rest.number)
    store.close()
    assert open_memory() == before


def test_a_writer_that_dies_leaves_nothing(store: SegmentStore) -> None:
    store.create(PAGE, 0, OWNER, WRITER)
    assert store.process_died(WRITER) == []
    assert store.used == 0


def test_what_a_dead_process_owned_is_freed_and_what_it_mapped_unmapped(
    store: SegmentStore,
) -> None:
    owned, other = written(store, PAGE), written(store, PAGE, b"other000")
    store.map(owned.number, READER)
    store.map(other.number, OWNER)
    store.free(other.number)
    assert store.process_died(OWNER) == [owned.number]
    assert store.used == PAGE  # the reader still has it
    store.unmap([owned.number], READER)
    assert store.used == 0
    assert store.process_died(OWNER) == []


def test_a_store_forgets_processes_that_nothing_is_of_any_more(store: SegmentStore) -> None:
    segment = written(store, PAGE)
    store.map(segment.number, READER)
    store.map(segment.number, WRITER)
    store.change_owner(segment.number, b"other000")
    assert store.process_died(OWNER) == []
    store.unmap([segment.number], READER)
    store.unmap([segment.number], WRITER)
    assert store._of_process == {b"other000": {segment.number}, WRITER: {segment.number}}
    assert store.written_by(WRITER) == {b"other000": [segment.number]}
    assert store.process_died(b"other000") == [segment.number]
    assert not store._of_process


def test_an_owner_that_dies_before_its_value_is_written_leaves_nothing(
    store: SegmentStore,
) -> None:
    segment = store.create(PAGE, 0, OWNER, WRITER)
    store.process_died(OWNER)
    assert store.used == PAGE  # not under the writer's hands
    store.seal(segment.number)
    assert store.used == 0
    assert not store.process_died(WRITER)


def test_an_interrupted_write_is_sealed_and_freed_in_either_order(store: SegmentStore) -> None:
    for order in ((store.seal, store.free), (store.free, store.seal)):
        segment = store.create(PAGE, 0, OWNER, WRITER)
        for step in order:
            step(segment.number)
        assert store.used == 0


def test_an_idle_store_gives_its_memory_back() -> None:
    before = open_memory()
    store = new_store(CAPACITY)
    segments = [written(store, PAGE) for _ in range(64)]
    for segment in segments:
        store.free(segment.number)
    assert store.memories.pooled <= CAPACITY // 4
    assert open_memory() <= before + 16
    store.close()
    assert open_memory() == before


class Store(RuleBasedStateMachine):
    """Any sequence of requests keeps the sums right and leaks nothing."""

    processes = st.sampled_from([b"process%d" % number for number in range(3)])
    picks = st.integers(0, 1000)

    def __init__(self) -> None:
        super().__init__()
        gc.collect()
        self.before = open_memory()
        self.folder = tempfile.TemporaryDirectory()
        self.store = new_store(CAPACITY, Path(self.folder.name))
        self.files = self.store.files
        self.made: list[int] = []

    @rule(size=st.integers(1, 20 * PAGE), owner=processes, creator=processes)
    def create(self, size: int, owner: bytes, creator: bytes) -> None:
        try:
            self.made.append(self.store.create(size, 0, owner, creator).number)
        except ObjectStoreFullError:
            assert self.store.used + size > CAPACITY - PAGE

    @rule(pick=picks)
    def seal(self, pick: int) -> None:
        if self.made:
            self.store.seal(self.made[pick % len(self.made)])

    @rule(pick=picks)
    def free(self, pick: int) -> None:
        if self.made:
            self.store.free(self.made[pick % len(self.made)])

    @rule(pick=picks, process=processes)
    def map(self, pick: int, process: bytes) -> None:
        if self.made:
            number = self.made[pick % len(self.made)]
            try:
                self.store.map(number, process)
            except ObjectLostError:
                assert not self.store.has_number(number)

    @rule(pick=picks, process=processes)
    def unmap(self, pick: int, process: bytes) -> None:
        if self.made:
            self.store.unmap([self.made[pick % len(self.made)]], process)

    @rule(pick=picks, process=processes)
    def adopt(self, pick: int, process: bytes) -> None:
        if self.made:
            self.store.change_owner(self.made[pick % len(self.made)], process)

    @rule()
    def spill(self) -> None:
        """The least recently used one leaves memory."""
        segment = next(iter(self.store.idle()), None)
        if segment is not None:
            if segment.place is None:
                segment.place = self.files.reserve(segment.size)
            self.store.drop_memory(segment)

    @rule(pick=picks)
    def move(self, pick: int) -> None:
        """A segment begins to move, or comes to an end with that."""
        segments = list(self.store)
        if not segments:
            return
        segment = segments[pick % len(segments)]
        if segment.moves:
            if not segment.in_memory:
                try:
                    segment.memory = self.store.take(segment.size, b"process0")
                except ObjectStoreFullError:
                    return
            self.store.end_move(segment)
        elif self.store.is_idle(segment) or not segment.in_memory:
            self.store.begin_move(segment)

    @rule(process=processes)
    def die(self, process: bytes) -> None:
        self.store.process_died(process)

    @invariant()
    def sums_are_right(self) -> None:
        store = self.store
        segments = list(store)
        in_memory = [segment for segment in segments if segment.in_memory]
        assert store.used == sum(os.fstat(segment.fd).st_size for segment in in_memory)
        placed = [segment for segment in segments if segment.place is not None]
        assert self.files.used == sum(-(-segment.size // PAGE) * PAGE for segment in placed)
        assert all(segment.in_memory or segment.place is not None for segment in segments)
        assert store.memories.pooled == sum(capacity for capacity, _ in store.memories._pool)
        assert store.used + store.memories.pooled <= CAPACITY
        assert all(
            segment.mappers or not segment.sealed or segment.moves or not segment.freed
            for segment in segments
        )
        assert {segment.number for segment in store.idle()} == {
            segment.number
            for segment in in_memory
            if not (segment.mappers or not segment.sealed or segment.moves or segment.freed)
        }
        assert open_memory() == self.before + len(in_memory) + len(store.memories._pool)

    @invariant()
    def each_process_has_what_is_its(self) -> None:
        found: dict[bytes, set[int]] = {}
        for segment in self.store:
            for process in (segment.owner, segment.writer, *segment.mappers):
                found.setdefault(process, set()).add(segment.number)
        assert self.store._of_process == found

    def teardown(self) -> None:
        for process in (b"process0", b"process1", b"process2"):
            self.store.process_died(process)
        for segment in list(self.store):
            self.store.end_move(segment)
        assert len(self.store) == 0
        assert self.files.used == 0
        self.files.close()
        self.folder.cleanup()
        self.store.close()
        assert open_memory() == self.before


TestStore = Store.TestCase
TestStore.settings = settings(max_examples=15, stateful_step_count=40, derandomize=True)


def test_a_process_that_maps_a_segment_is_told_when_it_is_freed() -> None:
    told = Pushes("segment_freed")
    store = new_store(CAPACITY, push=told)
    segment = written(store, PAGE)
    store.map(segment.number, READER)
    store.free(segment.number)
    assert told == [(READER, segment.number)]
    assert store.used
    store.unmap([segment.number], READER)
    assert not store.used
    store.close()


def test_processes_are_told_once_that_memory_is_short_until_they_map_something_again() -> None:
    told = Pushes("store_short")
    store = new_store(CAPACITY, push=told)
    segment = written(store, PAGE)
    store.map(segment.number, READER)
    store.tell_short()
    store.tell_short()
    assert told == [(READER,)]
    store.map(segment.number, READER)
    store.tell_short()
    assert told == [(READER,), (READER,)]
    store.map(segment.number, READER)
    store.process_died(READER)
    store.tell_short()
    assert told == [(READER,), (READER,)]
    store.close()


def test_memory_that_a_process_had_mapped_when_it_left_is_not_written_again(
    store: SegmentStore,
) -> None:
    segment = written(store, PAGE, owner=READER)
    store.map(segment.number, READER)
    inode = os.fstat(segment.fd).st_ino
    store.process_died(READER)
    assert store.used == 0
    assert os.fstat(written(store, PAGE).fd).st_ino != inode


def test_memory_that_may_still_be_looked_at_is_not_written_again(store: SegmentStore) -> None:
    segment = written(store, PAGE)
    inode = os.fstat(segment.fd).st_ino
    store.map(segment.number, READER)
    store.free(segment.number)
    store.unmap([segment.number], READER, left_open=True)
    assert store.used == 0
    assert os.fstat(written(store, PAGE).fd).st_ino != inode
