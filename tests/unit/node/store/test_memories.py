"""The pool of warm memory, and what writers have mapped of it."""

from __future__ import annotations

import asyncio
import os
import threading
from typing import TYPE_CHECKING

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule
from open_files import limit_memory, open_memory
from stores import Pushes, nobody

from miniray.exceptions import ObjectStoreFullError
from miniray.node.store import memories as memories_module
from miniray.node.store.memories import Memories, Memory

if TYPE_CHECKING:
    from collections.abc import Iterator

PAGE = 4096
CAPACITY = 64 * PAGE
A, B = b"process-a", b"process-b"


@pytest.fixture
def told() -> Pushes:
    return Pushes("give_up_memory")


@pytest.fixture
def memories(told: Pushes) -> Iterator[Memories]:
    memories = Memories(CAPACITY, told, asyncio.Event())
    yield memories
    memories.close()


def test_a_writer_gets_the_memory_that_it_has_mapped(memories: Memories) -> None:
    first, second = memories.take(4 * PAGE, A, 0), memories.take(4 * PAGE, A, 0)
    memories.mapped(second.number, B)
    memories.give_back(first)
    memories.give_back(second)
    assert memories.take(4 * PAGE, B, 0) is second
    assert memories.take(4 * PAGE, B, 0) is first


def test_mapped_memory_that_is_much_too_large_or_too_small_is_not_taken(
    memories: Memories,
) -> None:
    taken = [memories.take(pages * PAGE, A, 0) for pages in (1, 5)]
    for memory in taken:
        memories.mapped(memory.number, A)
        memories.give_back(memory)
    assert memories.take(2 * PAGE, A, 0) not in taken


def test_memory_that_is_in_use_is_not_taken_though_the_writer_has_it_mapped(
    memories: Memories,
) -> None:
    memory = memories.take(PAGE, A, 0)
    memories.mapped(memory.number, A)
    assert memories.take(PAGE, A, 0) is not memory


def test_memory_given_up_has_no_pages_though_processes_have_it_mapped(
    memories: Memories, told: Pushes
) -> None:
    memory = memories.take(CAPACITY // 2, A, 0)
    os.pwrite(memory.fd, b"x" * memory.capacity, 0)
    other = os.dup(memory.fd)  # as a mapping, it outlives the daemon's own
    for process in (A, B):
        memories.mapped(memory.number, process)
    memories.give_back(memory)  # too much for the pool of an idle node
    assert sorted(told) == [(A, (memory.number,)), (B, (memory.number,))]
    assert (memories.used, memories.pooled) == (0, 0)
    assert os.fstat(other).st_blocks == 0
    assert os.fstat(other).st_size == memory.capacity  # a late look is no SIGBUS
    os.close(other)
    memories.take(CAPACITY, A, 0)
    memories.unmapped([memory.number], A)  # its answer, which changes nothing


def test_memory_that_somebody_may_still_look_at_is_neither_used_again_nor_emptied(
    memories: Memories,
) -> None:
    memory = memories.take(PAGE, A, 0)
    os.pwrite(memory.fd, b"kept", 0)
    other = os.dup(memory.fd)
    memories.mapped(memory.number, B)
    memories.give_back(memory, again=False)
    assert (memories.used, memories.pooled) == (0, 0)
    assert os.pread(other, 4, 0) == b"kept"
    os.close(other)
    assert memories.take(PAGE, B, 0).number != memory.number


def test_memory_that_was_given_up_before_the_daemon_heard_of_its_mapping_is_to_be_unmapped(
    memories: Memories, told: Pushes
) -> None:
    memory = memories.take(CAPACITY // 2, A, 0)
    memories.give_back(memory)
    memories.mapped(memory.number, A)
    assert told == [(A, (memory.number,))]
    memories.unmapped([memory.number], A)  # its answer


def test_room_for_large_values_is_made_from_the_pool(memories: Memories, told: Pushes) -> None:
    memory = memories.take(4 * PAGE, A, 0)
    memories.mapped(memory.number, A)
    memories.give_back(memory)
    memories.take(CAPACITY, A, 0)
    assert told == [(A, (memory.number,))]


def test_a_lack_of_descriptors_costs_the_pool_one_piece(
    memories: Memories, monkeypatch: pytest.MonkeyPatch
) -> None:
    taken = [memories.take(pages * PAGE, A, 0) for pages in (32, 4, 1, 2)]
    for memory in taken[1:]:
        memories.give_back(memory)
    limit_memory(monkeypatch, 0)
    assert memories.take(9 * PAGE, A, 0).capacity == 9 * PAGE
    assert memories.pooled == 6 * PAGE  # the smallest went: that takes the least time


async def test_large_memory_is_closed_in_a_thread_and_counts_until_it_is(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    large, go_on = memories_module._LARGE, threading.Event()
    free = memories_module._free
    monkeypatch.setattr(memories_module, "_free", lambda *args: (go_on.wait(20), free(*args))[1])
    changed = asyncio.Event()
    memories = Memories(4 * large, nobody, changed)
    for memory in [memories.take(large, A, 0) for _ in range(4)]:
        memories.give_back(memory)
    pooled = memories.pooled
    assert memories.closing == 4 * large - pooled > 0
    with pytest.raises(ObjectStoreFullError):  # not before it is gone
        memories.take(4 * large, A, 0)
    assert memories.pooled == 0
    assert memories.closing == 4 * large
    assert open_memory() >= 4
    go_on.set()
    while memories.closing:
        changed.clear()
        await asyncio.wait_for(changed.wait(), 20)
    memories.take(4 * large, A, 0)
    memories.close()


def test_memory_that_does_not_fit_in_any_case_leaves_the_pool_as_it_is(memories: Memories) -> None:
    kept, pooled = memories.take(CAPACITY // 2, A, 0), memories.take(PAGE, A, 0)
    memories.give_back(pooled)
    with pytest.raises(ObjectStoreFullError):
        memories.take(CAPACITY, A, 0)
    assert memories.pooled == PAGE
    assert kept.fd >= 0


class Machine(RuleBasedStateMachine):
    """Random writers: the sums are right and no descriptor is left."""

    def __init__(self) -> None:
        super().__init__()
        self.before = open_memory()
        self.memories = Memories(CAPACITY, self.unmap, asyncio.Event())
        self.mapped: set[tuple[bytes, int]] = set()
        self.to_unmap: list[tuple[bytes, int]] = []
        self.used: list[Memory] = []

    def unmap(self, process: bytes, _topic: str, body: tuple[tuple[int, ...]]) -> None:
        (numbers,) = body
        self.to_unmap.extend((process, number) for number in numbers)

    @rule(pages=st.integers(1, 16), process=st.sampled_from([A, B]))
    def take(self, pages: int, process: bytes) -> None:
        try:
            memory = self.memories.take(pages * PAGE, process, 0)
        except ObjectStoreFullError:
            return
        assert memory.capacity >= pages * PAGE
        assert memory not in self.used
        self.used.append(memory)

    @rule(index=st.integers(0, 100), process=st.sampled_from([A, B]))
    def map(self, index: int, process: bytes) -> None:
        if self.used:
            number = self.used[index % len(self.used)].number
            self.memories.mapped(number, process)
            self.mapped.add((process, number))

    @rule(index=st.integers(0, 100), again=st.booleans())
    def give_back(self, index: int, again: bool) -> None:
        if self.used:
            self.memories.give_back(self.used.pop(index % len(self.used)), again=again)

    @rule()
    def answer(self) -> None:
        for process, number in self.to_unmap:
            self.memories.unmapped([number], process)
            self.mapped.discard((process, number))
        self.to_unmap.clear()

    @rule(process=st.sampled_from([A, B]))
    def die(self, process: bytes) -> None:
        self.memories.process_died(process)
        self.mapped = {(owner, number) for owner, number in self.mapped if owner != process}

    @invariant()
    def sums(self) -> None:
        memories = self.memories
        assert memories.used == sum(memory.capacity for memory in self.used)
        assert memories.used + memories.pooled <= CAPACITY
        live = memories._all.values()
        assert len(live) == len(self.used) + len(memories._pool)
        held = {(process, m.number) for m in live for process in m.writers}
        assert held == {(process, n) for process, n in self.mapped if n in memories._all}
        indexed = {(process, n) for process, ns in memories._mapped_by.items() for n in ns}
        assert indexed == held
        assert open_memory() == self.before + len(self.used) + len(memories._pool)

    def teardown(self) -> None:
        self.memories.close()
        assert open_memory() == self.before


TestMemories = Machine.TestCase
TestMemories.settings = settings(stateful_step_count=80)
