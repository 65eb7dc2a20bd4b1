from __future__ import annotations

import gc
import os
import threading
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from open_files import open_files
from process_doubles import NODE, FakeLink
from process_doubles import shared_memory as store_of

from miniray.common.object_ref import hooks
from miniray.exceptions import ObjectStoreFullError
from miniray.messages.protocol import VALUE_SHARED
from miniray.objects import shared_memory, waiting
from miniray.values.serialization import deserialize, serialize

if TYPE_CHECKING:
    from miniray.objects.shared_memory import SharedMemory

OWNER = b"owner000"


@pytest.fixture
def memory(link: FakeLink) -> SharedMemory:
    return store_of(link)


def load(memory: SharedMemory, value: Any) -> Any:
    form, block = memory.map(value[1])
    return deserialize(form, memoryview(block).cast("B"), mapped=True)


@pytest.mark.parametrize("value", [b"x" * 300_000, "y" * 300_000, list(range(50_000))], ids=type)
def test_values_come_back_from_shared_memory(memory: SharedMemory, value: Any) -> None:
    before = open_files()
    stored = memory.write(serialize(value), OWNER, NODE)
    assert stored[0] == VALUE_SHARED
    assert stored[1][0] == NODE
    assert load(memory, stored) == value
    assert (open_files() - before).total() == 1  # the segment itself, which is the daemon's


def test_a_value_of_many_pieces_is_written_whole(memory: SharedMemory) -> None:
    arrays = [np.full(1000 + n, n) for n in range(1500)]  # more than one pwritev takes
    stored = memory.write(serialize(arrays), OWNER, NODE)
    back = load(memory, stored)
    assert all((a == b).all() for a, b in zip(back, arrays, strict=True))


def test_short_writes_are_continued(memory: SharedMemory, monkeypatch: pytest.MonkeyPatch) -> None:
    real = os.pwritev

    def short(fd: int, buffers: list[Any], offset: int) -> int:
        return real(fd, [memoryview(buffers[0])[:7777]], offset)

    monkeypatch.setattr(os, "pwritev", short)
    arrays = [np.arange(20_000), np.arange(3_000)]
    back = load(memory, memory.write(serialize(arrays), OWNER, NODE))
    assert (back[0] == arrays[0]).all()
    assert (back[1] == arrays[1]).all()


def test_a_value_is_sealed_when_it_is_complete(memory: SharedMemory, link: FakeLink) -> None:
    stored = memory.write(serialize(b"x" * 300_000), OWNER, NODE)
    assert link.noticed("seal_segment") == [(stored[1][1], "")]


def test_a_write_that_is_interrupted_gives_its_room_back(
    memory: SharedMemory, link: FakeLink, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = open_files()

    def interrupted(*_args: Any) -> int:
        raise KeyboardInterrupt

    monkeypatch.setattr(shared_memory, "write_all", interrupted)
    with pytest.raises(KeyboardInterrupt):
        memory.write(serialize(b"x" * 300_000), OWNER, NODE)
    assert link.noticed("discard_segment") == [(1,)]
    assert not link.noticed("seal_segment")
    assert (open_files() - before).total() == 1


def test_readers_see_their_own_copy_of_what_they_write(
    memory: SharedMemory, link: FakeLink
) -> None:
    stored = memory.write(serialize(b"x" * 300_000), OWNER, NODE)
    (_, one), (_, two) = memory.map(stored[1]), store_of(link).map(stored[1])
    one[0] = b"Z"
    assert one[:1] == b"Z"
    assert two[:1] == b"x"


def test_a_mapping_lasts_as_long_as_somebody_looks_at_it(memory: SharedMemory) -> None:
    location = memory.write(serialize(b"x" * 300_000), OWNER, NODE)[1]
    _, block = memory.map(location)
    view = memoryview(block)[5:10]
    del block
    assert memory.map(location)[1] is view.obj
    del view
    assert memory.mapped(location) is None


def test_the_last_view_of_a_value_unmaps_it_and_the_next_report_says_so(
    memory: SharedMemory, link: FakeLink
) -> None:
    stored = memory.write(serialize(np.arange(50_000)), OWNER, NODE)
    array = load(memory, stored)
    part = array[10:20]
    del array
    gc.collect()
    memory.report_unmapped()
    assert link.noticed("unmapped") == []
    assert part[0] == 10
    del part
    memory.report_unmapped()
    memory.report_unmapped()
    assert link.noticed("unmapped") == [([stored[1][1]],)]


def test_the_end_of_a_view_wakes_the_runtime_as_a_dropped_ref_does(
    memory: SharedMemory, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A process that then does nothing more must not keep the memory from others."""
    woken: list[int] = []
    _, block = memory.map(memory.write(serialize(b"x" * 300_000), OWNER, NODE)[1])
    hooks.dropped.clear()
    monkeypatch.setattr(hooks, "woken", False)
    monkeypatch.setattr(hooks, "wake", lambda: woken.append(1))
    del block
    assert woken == [1]
    assert hooks.dropped


def test_what_is_unmapped_is_reported_before_more_room_is_asked_for(
    memory: SharedMemory, link: FakeLink
) -> None:
    stored = memory.write(serialize(b"x" * 300_000), OWNER, NODE)
    memory.map(stored[1])
    memory.write(serialize(b"x" * 300_000), OWNER, NODE)
    assert link.noticed("unmapped") == [([stored[1][1]],)]


def test_a_failed_mapping_is_an_error_and_counts_as_unmapped(
    memory: SharedMemory, link: FakeLink
) -> None:
    stored = memory.write(serialize(b"x" * 300_000), OWNER, NODE)
    before = open_files()
    node, segment, home, _size = stored[1]
    with pytest.raises(OSError, match="could not map"):
        memory.map((node, segment, home, 1 << 62))
    memory.report_unmapped()
    assert link.noticed("unmapped") == [([segment],)]
    assert not open_files() - before


def test_mapped_values_survive_the_segment_of_the_daemon(
    memory: SharedMemory, link: FakeLink
) -> None:
    array = load(memory, memory.write(serialize(np.arange(50_000)), OWNER, NODE))
    link.close()
    link.segments.clear()
    assert array.sum() == sum(range(50_000))


def test_freeing_names_the_segment_and_its_node(memory: SharedMemory, link: FakeLink) -> None:
    memory.free((VALUE_SHARED, (b"node0007", 42, b"node0007", 10), ()))
    assert link.noticed("free_segment") == [(b"node0007", 42, b"node0007")]


def test_what_is_read_again_stays_mapped_until_its_owner_frees_it(
    memory: SharedMemory, link: FakeLink
) -> None:
    stored = memory.write(serialize(np.arange(50_000)), OWNER, NODE)
    segment = stored[1][1]
    for reading in range(4):
        assert load(memory, stored)[7] == 7
        memory.report_unmapped()
        assert len(link.noticed("unmapped")) == min(reading, 1) + (reading == 0)
    memory.on_freed(99)
    memory.on_freed(segment)
    memory.report_unmapped()
    assert link.noticed("unmapped") == [([segment],), ([segment],)]


def test_a_view_of_what_was_freed_stays_good(memory: SharedMemory, link: FakeLink) -> None:
    stored = memory.write(serialize(np.arange(50_000)), OWNER, NODE)
    load(memory, stored)
    array = load(memory, stored)
    memory.on_freed(stored[1][1])
    memory.report_unmapped()
    assert array[49_999] == 49_999
    del array
    memory.report_unmapped()
    assert len(link.noticed("unmapped")) == 2


def test_what_is_kept_goes_when_its_owner_here_frees_it(
    memory: SharedMemory, link: FakeLink
) -> None:
    stored = memory.write(serialize(np.arange(50_000)), OWNER, NODE)
    load(memory, stored)
    load(memory, stored)
    memory.report_unmapped()
    memory.free(stored)
    told = [notice[0] for notice in link.notices if notice[0] in {"unmapped", "free_segment"}]
    assert told == ["unmapped", "unmapped", "free_segment"]  # so that nobody need be told of it


def test_what_is_kept_goes_when_memory_is_short_unless_it_is_looked_at(
    memory: SharedMemory, link: FakeLink
) -> None:
    values = [memory.write(serialize(np.arange(50_000)), OWNER, NODE) for _ in range(2)]
    for value in values:
        load(memory, value)
    arrays = [load(memory, value) for value in values]
    array = arrays[0]  # kept, and looked at
    arrays.clear()
    memory.report_unmapped()
    link.notices.clear()
    memory.on_short()
    assert link.noticed("unmapped") == [([values[1][1][1]],)]
    assert array[7] == 7
    del array
    memory.report_unmapped()
    assert link.noticed("unmapped")[1:] == [([values[0][1][1]],)]


def test_only_so_many_values_stay_mapped_though_nobody_uses_them(
    memory: SharedMemory, link: FakeLink, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shared_memory, "_KEPT", 2)
    values = [memory.write(serialize(b"x" * 300_000), OWNER, NODE) for _ in range(3)]
    for value in values:
        for _ in range(2):
            memory.map(value[1])
    memory.report_unmapped()
    gone = [number for (numbers,) in link.noticed("unmapped") for number in numbers]
    first = values[0][1][1]
    assert gone.count(first) == 2
    assert len(gone) == 4


def test_a_value_that_was_mapped_when_memory_became_short_is_not_kept(
    memory: SharedMemory, link: FakeLink, monkeypatch: pytest.MonkeyPatch
) -> None:
    stored = memory.write(serialize(np.arange(50_000)), OWNER, NODE)
    load(memory, stored)
    real = link.node_request

    def request(method: str, args: tuple[Any, ...], **how: Any) -> Any:
        answer = real(method, args, **how)
        memory.on_short()  # it is read before this thread goes on with the answer
        return answer

    monkeypatch.setattr(link, "node_request", request)
    load(memory, stored)
    memory.report_unmapped()
    assert len([number for (numbers,) in link.noticed("unmapped") for number in numbers]) == 2


def test_a_full_store_is_asked_again_if_this_process_had_something_to_return(
    link: FakeLink,
) -> None:
    garbage: list[Any] = []

    def make_room() -> None:
        link.room = 1 << 40
        garbage.clear()

    memory = store_of(link, make_room)
    stored = memory.write(serialize(bytes(300_000)), OWNER, NODE)
    garbage.append(memory.map(stored[1]))
    link.room = 0
    assert memory.write(serialize(bytes(300_000)), OWNER, NODE)[0] == VALUE_SHARED


def test_a_full_store_is_asked_again_if_another_thread_returned_something_meanwhile(
    link: FakeLink,
) -> None:
    """The I/O thread has the ends of mappings in hand and tells of them only after the request."""
    memory = store_of(link)
    stored = memory.write(serialize(b"x" * 300_000), OWNER, NODE)
    held = [memory.map(stored[1])]
    notice, request = link.node_notice, link.node_request
    reporting = threading.Thread(target=lambda: (held.clear(), memory.report_unmapped()))
    popped, told = threading.Event(), threading.Event()

    def slow(*args: Any) -> None:
        if args[0] == "unmapped":
            popped.set()
            assert told.wait(10)
        notice(*args)

    asked = []

    def full_once(method: str, args: tuple[Any, ...], **how: Any) -> Any:
        asked.append(method)
        if len(asked) == 1:
            told.set()
            reporting.join(10)
            raise ObjectStoreFullError(needed=1, used=1, capacity=1)
        return request(method, args, **how)

    link.node_notice = slow  # type: ignore[method-assign]
    link.node_request = full_once  # type: ignore[method-assign]
    reporting.start()
    assert popped.wait(10)
    memory.write(serialize(b"y" * 300_000), OWNER, NODE)
    assert len(asked) == 2


def test_a_full_store_is_asked_again_if_a_value_was_only_held_by_garbage(link: FakeLink) -> None:
    def make_room() -> None:
        link.room = 1 << 40
        memory.free((VALUE_SHARED, (NODE, 7, NODE, 300_000), ()))

    link.room = 0
    memory = store_of(link, make_room)
    assert memory.write(serialize(bytes(300_000)), OWNER, NODE)[0] == VALUE_SHARED


def test_garbage_is_returned_before_the_next_request_when_memory_is_short(link: FakeLink) -> None:
    looked: list[int] = []
    memory = store_of(link, lambda: looked.append(1))
    memory.on_short()
    assert not looked
    for _ in range(2):
        memory.write(serialize(bytes(300_000)), OWNER, NODE)
    assert looked == [1]


def test_a_writer_into_a_full_store_looks_for_garbage_a_small_part_of_the_time(
    link: FakeLink, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = [100.0]
    monkeypatch.setattr(shared_memory.time, "monotonic", lambda: now[0])
    link.room = 0
    looked: list[float] = []

    def make_room() -> None:
        looked.append(now[0])
        now[0] += 1

    memory = store_of(link, make_room)
    for _ in range(40):
        with pytest.raises(ObjectStoreFullError):
            memory.write(serialize(bytes(300_000)), OWNER, NODE)
        now[0] += 0.5
    assert looked == [100, 111]


def test_a_full_store_is_not_asked_twice_for_all_of_the_time_that_a_reader_has(
    link: FakeLink, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = [100.0]
    given: list[float] = []

    def request(_method: str, _args: Any, *, timeout: float, **_how: Any) -> Any:
        given.append(timeout)
        now[0] += 3.0
        raise ObjectStoreFullError(needed=1, used=2, capacity=2)

    monkeypatch.setattr(waiting.time, "monotonic", lambda: now[0])
    monkeypatch.setattr(link, "node_request", request)
    memory = store_of(link, lambda: memory._gone(7))
    with pytest.raises(ObjectStoreFullError):
        memory.map((NODE, 1, NODE, 10), 5.0)
    assert given == [5.0, 2.0]


def test_a_store_that_stays_full_says_so_once(link: FakeLink) -> None:
    link.room = 0
    memory = store_of(link)
    with pytest.raises(ObjectStoreFullError) as info:
        memory.write(serialize(bytes(300_000)), OWNER, NODE)
    assert info.value.__context__ is None
