"""``Queue``."""

from __future__ import annotations

import asyncio
import queue
from typing import Any

import pytest

import miniray
from miniray.exceptions import RayActorError
from miniray.util.queue import Empty, Full, Queue

pytestmark = pytest.mark.usefixtures("cluster")


def test_items_come_out_in_the_order_they_went_in() -> None:
    items = Queue()
    for n in range(5):
        items.put(n)
    assert [items.get() for _ in range(5)] == [0, 1, 2, 3, 4]


def test_the_size_is_told() -> None:
    items = Queue(maxsize=2)
    assert items.empty()
    assert not items.full()
    items.put("a")
    items.put("b")
    assert items.size() == items.qsize() == len(items) == 2
    assert items.full()
    assert not items.empty()


def test_a_queue_without_limit_is_never_full() -> None:
    items = Queue()
    items.put_nowait_batch(range(100))
    assert not items.full()
    assert items.size() == 100


def test_an_empty_queue_raises_empty() -> None:
    items = Queue()
    for take in (
        items.get_nowait,
        lambda: items.get(block=False),
        lambda: items.get(timeout=0.05),
    ):
        with pytest.raises(Empty):
            take()
    with pytest.raises(queue.Empty):
        items.get_nowait()


def test_a_full_queue_raises_full() -> None:
    items = Queue(maxsize=1)
    items.put(1)
    for put in (
        lambda: items.put_nowait(2),
        lambda: items.put(2, block=False),
        lambda: items.put(2, timeout=0.05),
    ):
        with pytest.raises(Full):
            put()
    with pytest.raises(queue.Full):
        items.put_nowait(2)
    assert items.size() == 1


def test_a_negative_timeout_is_refused() -> None:
    items = Queue()
    with pytest.raises(ValueError, match="timeout"):
        items.get(timeout=-1)
    with pytest.raises(ValueError, match="timeout"):
        items.put(1, timeout=-1)


def test_a_batch_goes_in_as_a_whole_or_not_at_all() -> None:
    items = Queue(maxsize=3)
    items.put_nowait_batch([1, 2])
    with pytest.raises(Full):
        items.put_nowait_batch([3, 4])
    assert items.size() == 2
    with pytest.raises(Empty):
        items.get_nowait_batch(3)
    assert items.get_nowait_batch(2) == [1, 2]
    assert items.get_nowait_batch(0) == []


def test_nonsense_batches_are_refused() -> None:
    items = Queue()
    with pytest.raises(TypeError):
        items.put_nowait_batch(1)  # type: ignore[arg-type]
    with pytest.raises(TypeError):
        items.get_nowait_batch("2")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="num_items"):
        items.get_nowait_batch(-1)


def test_tasks_share_a_queue() -> None:
    items = Queue()

    @miniray.remote
    def produce(target: Queue, start: int) -> None:
        for n in range(start, start + 5):
            target.put(n)

    @miniray.remote
    def consume(source: Queue, count: int) -> list[int]:
        return [source.get(timeout=30) for _ in range(count)]

    taken = consume.remote(items, 10)
    miniray.get([produce.remote(items, 0), produce.remote(items, 100)])
    assert sorted(miniray.get(taken)) == [*range(5), *range(100, 105)]


def test_get_waits_for_an_item() -> None:
    items = Queue()

    @miniray.remote
    def take(source: Queue) -> Any:
        return source.get()

    ref = take.remote(items)
    assert miniray.wait([ref], timeout=0.2) == ([], [ref])
    items.put("late")
    assert miniray.get(ref, timeout=30) == "late"


def test_put_waits_for_room() -> None:
    items = Queue(maxsize=1)
    items.put(1)

    @miniray.remote
    def add(target: Queue) -> None:
        target.put(2)

    ref = add.remote(items)
    assert miniray.wait([ref], timeout=0.2) == ([], [ref])
    assert items.get() == 1
    miniray.get(ref, timeout=30)
    assert items.get() == 2


def test_coroutines_put_and_get() -> None:
    items = Queue(maxsize=1)

    async def main() -> list[Any]:
        taking = asyncio.gather(*(items.get_async() for _ in range(3)))
        for n in range(3):
            await items.put_async(n)
        with pytest.raises(Empty):
            await items.get_async(block=False)
        with pytest.raises(Empty):
            await items.get_async(timeout=0.05)
        await items.put_async("x", block=False)
        with pytest.raises(Full):
            await items.put_async("y", timeout=0.05)
        return sorted(await taking)

    assert asyncio.run(main()) == [0, 1, 2]
    assert items.get() == "x"


def test_options_of_the_actor_can_be_given() -> None:
    items = Queue(actor_options={"name": "shared-queue", "num_cpus": 1})
    items.put(1)
    actor = miniray.get_actor("shared-queue")
    assert miniray.get(actor.qsize.remote()) == 1


@pytest.mark.parametrize("force", [False, True])
def test_shutdown_ends_the_actor(force: bool) -> None:
    items = Queue()
    actor = items.actor
    items.put(1)
    items.shutdown(force=force)
    items.shutdown()
    with pytest.raises(RayActorError):
        miniray.get(actor.qsize.remote())
