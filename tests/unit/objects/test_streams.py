from __future__ import annotations

import asyncio
import threading
import time
from typing import TYPE_CHECKING

import pytest
from kept import kept
from process_doubles import Caller, eventually, packed

from miniray.common.object_ref import hooks
from miniray.messages import protocol as p
from miniray.messages.value import error_value
from miniray.objects.object_ref_generator import ObjectRefGenerator, StreamState

if TYPE_CHECKING:
    from collections.abc import Callable


class Fixture:
    def __init__(self, limit: int = -1) -> None:
        self.me = Caller()
        self.consumed: list[int] = []
        self.abandoned = 0
        self.state = StreamState(
            self.me.table.new_id(),
            self.me.table,
            self.consumed.append,
            self._abandon,
            limit,
        )
        self.generator: ObjectRefGenerator[object] = ObjectRefGenerator(self.state, self._block)

    def _abandon(self) -> None:
        self.abandoned += 1

    @staticmethod
    def _block(when: Callable[[Callable[[], None]], bool]) -> None:
        gate = threading.Event()
        if not when(gate.set):
            assert gate.wait(10)

    def item(self, index: int) -> bool:
        return self.state.item(index, packed(index), None)

    def value(self, ref: object) -> object:
        entry = self.me.table.entry(ref.binary())  # type: ignore[attr-defined]
        assert entry is not None
        return entry.value


@pytest.fixture
def stream() -> Fixture:
    return Fixture()


def test_items_come_in_order_and_then_the_end(stream: Fixture) -> None:
    assert all(stream.item(index) for index in range(3))
    stream.state.end(None)
    assert [stream.value(ref) for ref in stream.generator] == [packed(n) for n in range(3)]
    assert stream.consumed == [1, 2, 3]
    assert stream.state.finished


def test_an_error_is_the_last_item(stream: Fixture) -> None:
    stream.item(0)
    stream.state.end(error_value(ValueError()))
    stream.state.end(error_value(KeyError()))  # too late
    first, last = stream.generator
    assert stream.value(first) == packed(0)
    assert stream.value(last)[0] == p.VALUE_ERROR  # type: ignore[index]


def test_a_thread_waits_for_the_next_item_and_for_the_end(stream: Fixture) -> None:
    taken: list[object] = []
    thread = threading.Thread(target=lambda: taken.extend(stream.generator))
    thread.start()
    for index in range(20):
        stream.item(index)
    eventually(lambda: len(taken) == 20)
    stream.state.end(None)
    thread.join(10)
    assert not thread.is_alive()


def test_an_event_loop_waits_without_blocking(stream: Fixture) -> None:
    async def main() -> list[object]:
        asyncio.get_running_loop().call_later(0.01, stream.item, 0)
        asyncio.get_running_loop().call_later(0.02, stream.state.end, None)
        return [ref async for ref in stream.generator]

    assert len(asyncio.run(main())) == 1


def test_a_closed_event_loop_does_not_keep_others_from_the_item(stream: Fixture) -> None:
    woken: list[int] = []

    def closed() -> None:
        raise RuntimeError("Event loop is closed")

    stream.state.when_changed(closed)
    stream.state.when_changed(lambda: woken.append(1))
    assert stream.item(0)
    assert woken == [1]


def test_items_of_a_repeated_run_are_refused_and_its_executor_told_how_far_the_reader_is() -> None:
    """Or it would wait for a reader who waits for the items that come after."""
    stream = Fixture(limit=2)
    kept = [stream.item(index) and stream.state.take() for index in range(5)]
    stream.consumed.clear()
    assert stream.item(0) is False
    assert stream.consumed == [5]
    assert stream.item(5) is True
    assert len(kept) == 5


def test_closing_frees_what_was_not_taken_and_stops_the_executor(stream: Fixture) -> None:
    stream.item(0)
    stream.item(1)
    stream.generator.close()
    stream.generator.close()
    stream.me.drain()
    assert stream.abandoned == 1
    assert len(stream.me.table) == 0
    assert stream.item(2) is False
    with pytest.raises(StopIteration):
        next(stream.generator)


def test_closing_wakes_who_waits(stream: Fixture) -> None:
    thread = threading.Thread(target=lambda: list(stream.generator))
    before = kept(stream.state)
    thread.start()
    eventually(lambda: kept(stream.state) > before)
    stream.generator.close()
    thread.join(10)
    assert not thread.is_alive()


def test_dropping_the_generator_closes_it(stream: Fixture, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hooks, "wake", lambda: None)  # there is a runtime
    stream.item(0)
    del stream.generator
    assert stream.abandoned == 1


def test_a_finished_generator_is_not_stopped(stream: Fixture) -> None:
    stream.state.end(None)
    stream.generator.close()
    assert stream.abandoned == 0


def test_a_collection_in_the_middle_of_an_item_may_close_the_stream(stream: Fixture) -> None:
    with stream.state._lock:
        stream.generator.close()
    assert stream.item(0) is False


def test_completed_is_ready_at_the_end_not_before(stream: Fixture) -> None:
    before = stream.generator.completed()
    assert stream.value(before) is None
    stream.item(0)
    assert stream.value(before) is None
    stream.state.end(None)
    assert stream.value(before) is not None
    assert stream.value(stream.generator.completed()) is not None


def test_next_ready_holds_nothing_once_it_is_dropped(stream: Fixture) -> None:
    ref = stream.state.next_ref()
    del ref
    stream.me.drain()
    assert len(stream.me.table) == 0
    assert stream.item(0)  # what is called for it finds nobody


def test_two_threads_take_every_item_once(stream: Fixture) -> None:
    taken: list[object] = []
    threads = [threading.Thread(target=lambda: taken.extend(stream.generator)) for _ in range(3)]
    for thread in threads:
        thread.start()
    for index in range(300):
        stream.item(index)
        if index % 50 == 0:
            time.sleep(0)
    stream.state.end(None)
    for thread in threads:
        thread.join(10)
    assert len({ref.binary() for ref in taken}) == 300  # type: ignore[attr-defined]
    assert stream.consumed == list(range(1, 301))


def test_a_generator_cannot_be_passed_on(stream: Fixture) -> None:
    import pickle

    with pytest.raises(TypeError, match="Pass the refs"):
        pickle.dumps(stream.generator)


def test_who_waits_for_the_next_item_again_and_again_leaves_nothing(stream: Fixture) -> None:
    before = len(stream.me.table)
    ref = stream.generator._next_ref()
    once = kept(stream.state)
    for _ in range(5):
        ref = stream.generator._next_ref()
    assert kept(stream.state) == once
    assert len(stream.me.table) == before + 1
    assert stream.value(ref) is None
    assert stream.item(0)
    assert stream.value(ref) is not None
    ready = stream.generator._next_ref()
    assert stream.value(ready) is not None
    next(stream.generator)
    again = stream.generator._next_ref()
    assert stream.value(again) is None
    stream.state.end(None)
    assert stream.value(again) is not None


def test_a_consumer_that_is_cancelled_leaves_nothing(stream: Fixture) -> None:
    async def give_up() -> None:
        for _ in range(5):
            with pytest.raises(asyncio.TimeoutError):
                await asyncio.wait_for(stream.generator.__anext__(), 0.001)

    before = kept(stream.state)
    asyncio.run(give_up())
    assert kept(stream.state) == before
