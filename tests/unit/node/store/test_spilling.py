"""Room in a full store: what leaves memory, what comes back, who waits and who is refused."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import mmap
import os
import threading
from typing import TYPE_CHECKING

import pytest
from open_files import limit_memory
from stores import Pushes, new_store

from miniray.common.config import config
from miniray.exceptions import ObjectLostError, ObjectStoreFullError
from miniray.node.store import memories as memories_module
from miniray.node.store import spill_files, spilling
from miniray.node.store.segments import Copies
from miniray.node.store.spill_files import Disk, DiskPlace
from miniray.node.store.spilling import Spilling

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Coroutine, Iterator
    from pathlib import Path

    from miniray.node.store.segments import Segment

PAGE = 4096
CAPACITY = 8  # values of one page
NODE = b"node0000"
OWNER, READER, WRITER = b"owner000", b"reader00", b"writer00"


@pytest.fixture(autouse=True)
def short_timeout(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Let nobody wait long for what others have mapped while the disk is full."""
    monkeypatch.setenv("MINIRAY_STORE_FULL_TIMEOUT", "0.2")
    config.cache_clear()
    yield
    config.cache_clear()


class Node:
    """A store of eight pages that spills, without the rest of a daemon."""

    def __init__(self, folder: Path) -> None:
        self.told = Pushes("store_short")
        self.store = new_store(CAPACITY * PAGE, folder / "spilled", self.told)
        self._copies = Copies(self.store, lambda _node: True)
        self.spilling = Spilling(self._copies, lambda: "All held.", NODE)

    def add_copy(self, segment: Segment) -> None:
        """Count a segment as a copy of another node's."""
        self._copies.add((b"other", segment.number, b"other"), segment.number)

    async def create(self, pages: int = 1) -> Segment:
        """A value as a writer makes it; its content is its number."""
        size = pages * PAGE
        space = await self.spilling.reserve(size, WRITER)
        segment = self.store.create(size, 0, OWNER, WRITER, space)
        os.pwrite(segment.fd, content(segment), segment.offset)
        self.store.seal(segment.number)
        return segment

    async def fill(self) -> list[Segment]:
        return [await self.create() for _ in range(CAPACITY)]

    async def read(self, segment: Segment, reader: bytes = READER) -> bytes:
        """A value as a reader sees it, which has it mapped from then on, on disk if need be."""
        self.store.map(segment.number, reader)
        if not await self.spilling.restore(segment):
            assert segment.place is not None
        return os.pread(segment.fd, segment.size, segment.offset)


def content(segment: Segment) -> bytes:
    return segment.number.to_bytes(8, "little") * (segment.size // 8)


@contextlib.asynccontextmanager
async def a_node(folder: Path) -> AsyncIterator[Node]:
    node = Node(folder)
    yield node
    await node.spilling.close()
    node.store.close()


@pytest.fixture
def run(tmp_path: Path) -> Callable[[Callable[[Node], Coroutine[None, None, None]]], None]:
    """Runs a test's steps in an event loop, with a node."""

    def run(steps: Callable[[Node], Coroutine[None, None, None]]) -> None:
        async def whole() -> None:
            async with a_node(tmp_path) as node:
                await asyncio.wait_for(steps(node), 30)

        asyncio.run(whole())

    return run


Run = "Callable[[Callable[[Node], Coroutine[None, None, None]]], None]"


async def until(condition: Callable[[], object]) -> None:
    while not condition():
        await asyncio.sleep(0.001)


def test_the_least_recently_used_value_leaves_memory(run: Run) -> None:
    async def steps(node: Node) -> None:
        values = await node.fill()
        assert await node.read(values[0]) == content(values[0])
        node.store.unmap([values[0].number], READER)
        await node.create()
        assert [value.in_memory for value in values[:3]] == [True, False, True]
        assert node.store.used == CAPACITY * PAGE

    run(steps)


def test_values_come_back_when_they_are_read_and_take_the_place_of_others(run: Run) -> None:
    async def steps(node: Node) -> None:
        values = [await node.create() for _ in range(3 * CAPACITY)]
        assert node.store.used <= CAPACITY * PAGE
        for value in values + values[::-1]:
            assert await node.read(value) == content(value)
            node.store.unmap([value.number], READER)
            assert node.store.used <= CAPACITY * PAGE

    run(steps)


def test_a_value_that_was_written_once_leaves_memory_without_being_written_again(run: Run) -> None:
    async def steps(node: Node) -> None:
        values = [await node.create() for _ in range(CAPACITY + 1)]
        on_disk = node.spilling.spilled
        assert await node.read(values[0]) == content(values[0])
        node.store.unmap([values[0].number], READER)
        # All others were read or written later: it is the oldest again.
        for value in values[1:]:
            if value.in_memory:
                await node.read(value)
        await node.create()
        assert not values[0].in_memory
        assert node.spilling.spilled - on_disk <= PAGE  # the one that left for its return

    run(steps)


def test_the_disk_is_given_back_when_values_are_freed(run: Run) -> None:
    async def steps(node: Node) -> None:
        values = [await node.create() for _ in range(3 * CAPACITY)]
        assert node.spilling.spilled >= 2 * CAPACITY * PAGE
        for value in values:
            node.store.free(value.number)
        await until(lambda: node.spilling.spilled == 0)
        assert node.store.used == 0
        assert len(node.store) == 0

    run(steps)


def test_many_who_wait_for_a_value_share_one_reading(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    reads = []
    real = spill_files.read
    monkeypatch.setattr(spill_files, "read", lambda *args: (reads.append(args), real(*args))[1])

    async def steps(node: Node) -> None:
        value = await node.create()
        await node.fill()
        assert not value.in_memory
        readers = [b"reader%02d" % number for number in range(10)]
        found = await asyncio.gather(*(node.read(value, reader) for reader in readers))
        assert found == [content(value)] * 10
        assert len(reads) == 1

    run(steps)


def test_a_value_for_which_there_is_no_room_is_read_where_it_is(run: Run) -> None:
    async def steps(node: Node) -> None:
        values = [await node.create() for _ in range(3 * CAPACITY)]
        for value in values:
            assert await node.read(value) == content(value)
        assert node.store.used == CAPACITY * PAGE
        on_disk = [value for value in values if not value.in_memory]
        assert len(on_disk) == 2 * CAPACITY
        node.store.unmap([values[0].number], READER)
        assert await node.read(on_disk[0], WRITER) == content(on_disk[0])
        assert on_disk[0].in_memory  # there was space again

    run(steps)


def test_what_is_read_on_disk_stays_there_until_nobody_looks_at_it(run: Run) -> None:
    async def steps(node: Node) -> None:
        values = [await node.create() for _ in range(2 * CAPACITY)]
        for value in values:
            await node.read(value)
        on_disk = [value for value in values if not value.in_memory]
        for value in values:
            node.store.free(value.number)
        assert node.spilling.spilled >= len(on_disk) * PAGE
        for value in on_disk:
            assert os.pread(value.fd, value.size, value.offset) == content(value)
        node.store.process_died(READER)
        await until(lambda: node.spilling.spilled == 0)
        assert len(node.store) == 0

    run(steps)


def test_what_may_still_be_looked_at_on_disk_keeps_its_bytes(run: Run) -> None:
    """As by a driver after `shutdown`, or a child after its parent; whatever is freed around it."""

    async def steps(node: Node) -> None:
        values = [await node.create() for _ in range(2 * CAPACITY)]
        for value in values:
            await node.read(value)
        looked_at = values[-1]
        assert not looked_at.in_memory
        with mmap.mmap(looked_at.fd, PAGE, offset=looked_at.offset) as mapped:
            expected = content(looked_at)
            node.store.process_died(READER)
            for value in values:
                node.store.free(value.number)
            await node.fill()
            assert mapped[:] == expected

    run(steps)


def test_a_writer_for_whom_there_is_no_memory_is_given_disk(run: Run) -> None:
    async def steps(node: Node) -> None:
        for value in await node.fill():
            await node.read(value)
        space = await node.spilling.reserve(PAGE, WRITER)
        assert isinstance(space, DiskPlace)
        assert node.spilling.spilled == PAGE
        node.spilling.give_back(space)
        await until(lambda: node.spilling.spilled == 0)
        node.store.process_died(READER)
        space = await node.spilling.reserve(PAGE, WRITER)
        assert not isinstance(space, DiskPlace)
        node.spilling.give_back(space)

    run(steps)


def test_copies_that_nobody_looks_at_make_room_on_a_full_disk(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def steps(node: Node) -> None:
        for value in await node.fill():
            await node.read(value)
        copies = [await node.create() for _ in range(3)]
        for copy in copies:
            node.add_copy(copy)
        node.store.map(copies[0].number, READER)
        real = spill_files.allocate

        def full_above_three(place: DiskPlace) -> None:
            if node.spilling.spilled > 3 * PAGE:
                full_disk()
            real(place)

        monkeypatch.setattr(spill_files, "allocate", full_above_three)
        mine = [await node.create() for _ in range(2)]
        assert [node.store.has(copy) for copy in copies] == [True, False, False]
        with pytest.raises(ObjectStoreFullError, match="No space left on device"):
            await node.create()  # what is looked at stays, and what are no copies
        assert all(map(node.store.has, [copies[0], *mine]))

    run(steps)


def test_a_writer_waits_for_what_others_unmap_while_the_disk_is_full(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MINIRAY_STORE_FULL_TIMEOUT", "60")
    config.cache_clear()
    monkeypatch.setattr(spill_files, "allocate", full_disk)

    async def steps(node: Node) -> None:
        values = await node.fill()
        for value in values:
            await node.read(value)
        writers = [asyncio.ensure_future(node.create()) for _ in range(3)]
        await until(lambda: node.told)
        assert not any(writer.done() for writer in writers)
        for value in values[:3]:  # as a process does that is told that memory is short
            node.store.unmap([value.number], READER)
            node.store.free(value.number)
        assert [made.in_memory for made in await asyncio.gather(*writers)] == [True] * 3

    run(steps)


def test_a_writer_is_refused_when_memory_stays_mapped_and_the_disk_is_full(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(spill_files, "allocate", full_disk)

    async def steps(node: Node) -> None:
        values = await node.fill()
        for value in values:
            await node.read(value)
        with pytest.raises(ObjectStoreFullError, match="No space left on device"):
            await node.create()
        node.store.process_died(READER)
        node.store.free(values[0].number)
        assert (await node.create()).in_memory

    run(steps)


def test_requests_for_memory_are_served_first_in_first_out(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def steps(node: Node) -> None:
        await node.fill()
        slow = Slow(monkeypatch)
        large, small = (asyncio.ensure_future(node.create(pages)) for pages in (3, 1))
        await slow.begun.wait()
        assert node.spilling.waiting == 2
        slow.go_on.set()
        assert (await large).number < (await small).number

    run(steps)


def test_who_leaves_makes_way(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    async def steps(node: Node) -> None:
        await node.fill()
        slow = Slow(monkeypatch)
        large, small = (asyncio.ensure_future(node.create(pages)) for pages in (CAPACITY, 1))
        await slow.begun.wait()
        large.cancel()
        slow.go_on.set()
        assert (await small).in_memory
        assert not node.spilling.waiting

    run(steps)


def test_who_leaves_while_disk_is_set_aside_leaves_none_of_it(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun, go_on = threading.Event(), threading.Event()
    real = spill_files.allocate

    def slow(place: DiskPlace) -> None:
        begun.set()
        assert go_on.wait(20)
        real(place)

    monkeypatch.setattr(spill_files, "allocate", slow)

    async def steps(node: Node) -> None:
        for value in await node.fill():
            await node.read(value)
        waiting = asyncio.ensure_future(node.spilling.reserve(PAGE, WRITER))
        await until(begun.is_set)
        waiting.cancel()
        await asyncio.wait([waiting])
        assert node.spilling.spilled == PAGE  # a thread is at it
        go_on.set()
        await until(lambda: node.spilling.spilled == 0)

    run(steps)


def test_nobody_waits_for_a_value_that_was_freed(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    async def steps(node: Node) -> None:
        values = [await node.create() for _ in range(CAPACITY + 1)]
        slow = Slow(monkeypatch)  # what has to leave for it
        waiting = asyncio.ensure_future(node.read(values[0]))
        await slow.begun.wait()
        node.store.process_died(READER)
        node.store.free(values[0].number)
        slow.go_on.set()
        with pytest.raises(ObjectLostError):
            await waiting
        assert node.store.used == sum(value.in_memory for value in values) * PAGE

    run(steps)


class Slow:
    """Writing to disk that a test holds up."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self._real = spill_files.write
        self.begun = asyncio.Event()
        self.go_on = threading.Event()
        self._loop = asyncio.get_running_loop()
        monkeypatch.setattr(spill_files, "write", self)

    def __call__(self, *args: object) -> None:
        self._loop.call_soon_threadsafe(self.begun.set)
        assert self.go_on.wait(20)
        self._real(*args)  # type: ignore[arg-type]


def test_a_value_that_is_mapped_while_it_is_written_stays_in_memory(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def steps(node: Node) -> None:
        values = await node.fill()
        slow = Slow(monkeypatch)
        waiting = asyncio.ensure_future(node.create())
        await slow.begun.wait()
        for value in values:
            assert await node.read(value) == content(value)
        slow.go_on.set()
        await until(lambda: values[0].place is not None)
        assert values[0].in_memory
        assert not (await waiting).in_memory
        node.store.unmap([values[0].number], READER)
        await node.create()  # nothing has to be written again
        assert not values[0].in_memory

    run(steps)


def test_a_value_that_is_freed_while_it_is_written_leaves_nothing(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def steps(node: Node) -> None:
        values = await node.fill()
        slow = Slow(monkeypatch)
        waiting = asyncio.ensure_future(node.create())
        await slow.begun.wait()
        node.store.free(values[0].number)
        assert node.store.used == CAPACITY * PAGE  # its memory is being read
        slow.go_on.set()
        await waiting
        assert node.store.used == CAPACITY * PAGE
        await until(lambda: node.spilling.spilled == 0)

    run(steps)


def test_who_came_first_gets_the_room_that_is_made_for_it(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def steps(node: Node) -> None:
        await node.fill()
        slow = Slow(monkeypatch)
        large = asyncio.ensure_future(node.create(pages=2))
        await slow.begun.wait()
        slow.go_on.set()
        await large
        assert not node.spilling.waiting

    run(steps)


def test_a_copy_is_dropped_before_anything_is_written(run: Run) -> None:
    async def steps(node: Node) -> None:
        values = await node.fill()

        node.add_copy(values[0])
        await node.create()
        assert node.spilling.spilled == 0
        with pytest.raises(ObjectLostError):
            node.store.get(values[0].number)

    run(steps)


def test_processes_that_may_keep_values_mapped_are_told_that_memory_is_short(run: Run) -> None:
    async def steps(node: Node) -> None:
        values = await node.fill()
        for value in values:
            await node.read(value)
        await node.create()
        await node.create()
        assert node.told == [(READER,)]

    run(steps)


def test_a_value_larger_than_the_store_disturbs_nothing(run: Run) -> None:
    async def steps(node: Node) -> None:
        values = await node.fill()
        assert not (await node.create(CAPACITY + 1)).in_memory
        assert all(value.in_memory for value in values)

    run(steps)


def full_disk(*_args: object) -> None:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def test_a_full_disk_is_told_and_nothing_is_lost(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    async def steps(node: Node) -> None:
        values = await node.fill()
        real = spill_files.write
        monkeypatch.setattr(spill_files, "write", full_disk)
        monkeypatch.setattr(spill_files, "allocate", full_disk)
        with pytest.raises(ObjectStoreFullError, match="No space left on device") as caught:
            await node.create()
        assert "All held" in caught.value.details
        assert "of that disk, values of this node take 0 B, other files" in caught.value.details
        assert caught.value.node_id == NODE.hex()
        assert all(value.in_memory for value in values)
        await until(lambda: node.spilling.spilled == 0)
        monkeypatch.setattr(spill_files, "write", real)
        monkeypatch.setattr(spilling, "_AFTER_FAILURE", 0)
        await node.create()  # it is tried again
        assert await node.read(values[0]) == content(values[0])

    run(steps)


def test_values_on_a_disk_that_is_full_are_told_apart_from_other_files(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(spill_files, "look_at", lambda _folder: Disk(100 * PAGE, PAGE))

    async def steps(node: Node) -> None:
        for _ in range(2 * CAPACITY):
            await node.create()
        await until(lambda: node.spilling.spilled == CAPACITY * PAGE)
        monkeypatch.setattr(spill_files, "allocate", full_disk)
        for segment in list(node.store):  # memory fits only the mapped values
            if segment.in_memory:
                await node.read(segment, WRITER)
        with pytest.raises(ObjectStoreFullError) as caught:
            await node.spilling.reserve(PAGE, WRITER)
        told = "Of the 400 KiB of that disk, values of this node take 32 KiB, other files take 364"
        assert told in str(caught.value)

    run(steps)


def test_of_a_disk_that_is_broken_it_is_not_told_how_full_it_is(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*_args: object) -> None:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    async def steps(node: Node) -> None:
        await node.fill()
        monkeypatch.setattr(spill_files, "write", broken)
        monkeypatch.setattr(spill_files, "allocate", broken)
        with pytest.raises(ObjectStoreFullError, match="Input/output error") as caught:
            await node.create()
        assert "of that disk" not in str(caught.value)

    run(steps)


def test_what_is_on_a_full_disk_can_be_read(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    async def steps(node: Node) -> None:
        values = [await node.create() for _ in range(2 * CAPACITY)]
        await until(lambda: node.spilling.spilled == CAPACITY * PAGE)
        monkeypatch.setattr(spill_files, "write", full_disk)
        monkeypatch.setattr(spill_files, "allocate", full_disk)
        for value in [*values, *reversed(values)]:
            assert await node.read(value) == content(value)
            node.store.unmap([value.number], READER)
            assert node.store.used <= CAPACITY * PAGE
        with contextlib.suppress(ObjectStoreFullError):
            for _ in range(CAPACITY):  # what is on the disk already leaves space for some
                values.append(await node.create())
        assert len(values) < 3 * CAPACITY
        for value in values:
            assert await node.read(value) == content(value)
            node.store.unmap([value.number], READER)
            assert node.store.used <= CAPACITY * PAGE

    run(steps)


def test_a_value_that_cannot_be_read_back_is_lost_with_the_reason(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*_args: object) -> None:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    async def steps(node: Node) -> None:
        value = await node.create()
        await node.fill()
        monkeypatch.setattr(spill_files, "read", broken)
        with pytest.raises(ObjectLostError, match="Input/output error"):
            await node.read(value)
        node.store.unmap([value.number], READER)
        used = node.store.used
        node.store.free(value.number)
        assert node.store.used == used
        assert used <= CAPACITY * PAGE

    run(steps)


def test_a_lack_of_descriptors_is_no_failure_of_the_disk(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(spill_files, "limit", lambda: 0)

    async def steps(node: Node) -> None:
        values = [await node.create() for _ in range(2 * CAPACITY)]  # still written to disk
        assert not all(value.in_memory for value in values)

    run(steps)


def test_values_for_which_there_are_no_descriptors_leave_memory(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def steps(node: Node) -> None:
        limit_memory(monkeypatch, 5)
        values = [await node.create() for _ in range(CAPACITY)]
        assert sum(value.in_memory for value in values) <= 5
        for value in values:  # and they come back in the place of others
            assert await node.read(value) == content(value)
            node.store.unmap([value.number], READER)
        looked_at = [node.store.map(value.number, READER) for value in values if value.in_memory]
        assert looked_at

        async def create_and_look_at_it() -> None:
            for _ in range(CAPACITY):
                node.store.map((await node.create()).number, READER)

        with pytest.raises(OSError, match="Too many open files"):
            await create_and_look_at_it()
        node.store.process_died(READER)
        assert await node.read(values[0]) == content(values[0])

    run(steps)


def test_processes_are_told_that_memory_is_short_when_there_are_no_descriptors(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def steps(node: Node) -> None:
        value = await node.create()
        limit_memory(monkeypatch, 0)
        node.store.map(value.number, READER)
        with pytest.raises(OSError, match="Too many open files"):
            await node.create()
        assert node.told == [(READER,)]
        node.store.unmap([value.number], READER)
        assert (await node.create()).in_memory
        assert not value.in_memory

    run(steps)


def test_large_memory_goes_back_while_the_loop_goes_on(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(memories_module, "_LARGE", PAGE)
    blocked = threading.Event()
    free = memories_module._free
    monkeypatch.setattr(memories_module, "_free", lambda *args: (blocked.wait(20), free(*args))[1])

    async def steps(node: Node) -> None:
        for value in await node.fill():
            node.store.free(value.number)
        assert node.store.memories.closing
        waiting = asyncio.ensure_future(node.create(CAPACITY))
        await asyncio.sleep(0)
        assert not waiting.done()
        blocked.set()
        await waiting
        assert node.store.memories.closing == 0

    run(steps)


def test_what_exceeds_the_threshold_leaves_ahead_of_need(run: Run) -> None:
    async def steps(node: Node) -> None:
        for _ in range(CAPACITY):
            await node.create()
            node.spilling.spill_ahead()
        limit = config().spill_threshold * CAPACITY * PAGE
        await until(lambda: node.store.used <= limit)
        assert node.store.used > limit - PAGE

    run(steps)


def test_closing_does_not_wait_for_the_disk(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    async def steps(node: Node) -> None:
        await node.fill()
        slow = Slow(monkeypatch)
        waiting = asyncio.ensure_future(node.create())
        await slow.begun.wait()
        await asyncio.wait_for(node.spilling.close(), 10)
        waiting.cancel()
        slow.go_on.set()

    run(steps)
