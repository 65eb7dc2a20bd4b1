"""Streaming generators of tasks and actors."""

from __future__ import annotations

import asyncio
import os
import signal
import threading
import weakref
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from cluster_helpers import count_up, wait_for_file, wait_until
from object_helpers import inventory

import miniray
from miniray.exceptions import RayError, TaskCancelledError, WorkerCrashedError

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Iterator
    from pathlib import Path

pytestmark = pytest.mark.usefixtures("cluster")


@miniray.remote
def count(n: int) -> Iterator[int]:
    for i in range(n):  # noqa: UP028 - the plain form, which every engine runs
        yield i


@miniray.remote
def gated(path: Path) -> Iterator[str]:
    yield "first"
    wait_for_file(path)
    yield "second"


@miniray.remote
def failing() -> Iterator[int]:
    yield 1
    raise ValueError("halfway")


@miniray.remote
class Streamer:
    def count(self, n: int) -> Iterator[int]:
        for i in range(n):  # noqa: UP028 - as above
            yield i

    def failing(self) -> Iterator[int]:
        yield 1
        raise ValueError("halfway")

    def fine(self) -> str:
        return "fine"


@miniray.remote
class AsyncStreamer:
    def __init__(self) -> None:
        self.event = asyncio.Event()

    async def count(self, n: int) -> AsyncIterator[int]:
        for i in range(n):
            await asyncio.sleep(0)
            yield i

    async def gated(self) -> AsyncIterator[str]:
        yield "first"
        await self.event.wait()
        yield "second"

    async def open(self) -> None:
        self.event.set()

    async def failing(self) -> AsyncIterator[int]:
        yield 1
        raise ValueError("halfway")


def test_a_generator_function_streams_refs() -> None:
    stream = count.remote(5)
    assert isinstance(stream, miniray.ObjectRefGenerator)
    refs = list(stream)
    assert all(isinstance(ref, miniray.ObjectRef) for ref in refs)
    assert miniray.get(refs) == [0, 1, 2, 3, 4]


def test_an_empty_generator_ends_at_once() -> None:
    assert list(count.remote(0)) == []


def test_values_can_be_read_before_the_generator_has_finished(tmp_path: Path) -> None:
    stream = gated.remote(tmp_path / "go")
    assert miniray.get(next(stream)) == "first"
    (tmp_path / "go").touch()
    assert miniray.get(next(stream)) == "second"
    with pytest.raises(StopIteration):
        next(stream)


def test_an_error_comes_after_the_values_before_it() -> None:
    stream = failing.remote()
    assert miniray.get(next(stream)) == 1
    with pytest.raises(ValueError, match="halfway"):
        miniray.get(next(stream))
    with pytest.raises(StopIteration):
        next(stream)


def test_large_values_are_streamed() -> None:
    @miniray.remote
    def arrays() -> Iterator[Any]:
        for i in range(4):
            yield np.full(500_000, i)

    for i, ref in enumerate(arrays.remote()):
        assert (miniray.get(ref) == i).all()


@pytest.mark.parametrize("how", ["dropped", "cancelled"])
def test_a_generator_dropped_or_cancelled_early_stops_the_task(tmp_path: Path, how: str) -> None:
    @miniray.remote(_generator_backpressure_num_objects=2)
    def endless(path: Path) -> Iterator[int]:
        try:
            n = 0
            while True:
                yield n
                n += 1
        finally:
            path.touch()

    stream = endless.remote(tmp_path / "closed")
    assert miniray.get(next(stream)) == 0
    if how == "cancelled":
        miniray.cancel(stream)
    else:
        del stream
    wait_until((tmp_path / "closed").exists)


def test_backpressure_holds_the_generator_until_values_are_taken(tmp_path: Path) -> None:
    @miniray.remote(_generator_backpressure_num_objects=2)
    def marked(folder: Path) -> Iterator[int]:
        for n in range(10):
            (folder / str(n)).touch()
            yield n

    stream = marked.remote(tmp_path)
    assert miniray.get(next(stream)) == 0
    wait_until(lambda: (tmp_path / "1").exists())
    assert len(list(tmp_path.iterdir())) <= 4
    assert miniray.get(list(stream)) == list(range(1, 10))
    assert len(list(tmp_path.iterdir())) == 10


@pytest.mark.engine("miniray")
@pytest.mark.parametrize("allowed", [1, 3])
def test_no_more_large_values_of_a_stream_are_in_memory_than_are_allowed(allowed: int) -> None:
    size, count = 2_000_000, 12

    @miniray.remote(_generator_backpressure_num_objects=allowed)
    def arrays() -> Iterator[Any]:
        for number in range(count):
            yield np.full(size // 8, number)

    def stored() -> int:
        return sum(each["size"] >= size for each in inventory()["segments"])

    wait_until(lambda: not stored())
    stream = arrays.remote()
    for number in range(count):
        # Nothing is taken meanwhile: one too many would still be there the next time.
        wait_until(lambda left=count - number: stored() == min(allowed, left))
        ref = next(stream)
        assert (miniray.get(ref) == number).all()
        del ref
    wait_until(lambda: not stored())


def test_completed_tells_when_the_whole_generator_has_finished(tmp_path: Path) -> None:
    stream = gated.remote(tmp_path / "go")
    done = stream.completed()
    assert miniray.wait([done], timeout=0.1) == ([], [done])
    (tmp_path / "go").touch()
    miniray.get(done, timeout=30)
    assert miniray.get(list(stream)) == ["first", "second"]


def test_completed_raises_what_else_than_the_generator_has_ended_the_call() -> None:
    @miniray.remote(max_retries=0)
    def crashing() -> Iterator[int]:
        yield 1
        os._exit(1)

    stream = crashing.remote()
    with pytest.raises(WorkerCrashedError):
        miniray.get(stream.completed(), timeout=30)
    with pytest.raises(WorkerCrashedError):
        miniray.get(list(stream)[-1])
    stream = failing.remote()
    miniray.get(stream.completed(), timeout=30)
    with pytest.raises(ValueError, match="halfway"):
        miniray.get(list(stream)[-1])


def test_a_generator_that_is_passed_on_is_refused_with_what_to_do() -> None:
    with pytest.raises(TypeError, match=r"argument .*ObjectRefGenerator.* Pass the refs") as info:
        miniray.remote(len).remote(count.remote(1))
    assert "_state" not in str(info.value)


def test_a_generator_tells_whether_it_has_an_item_and_whether_it_is_finished(
    tmp_path: Path,
) -> None:
    stream = gated.remote(tmp_path / "go")
    wait_until(stream.next_ready)
    assert not stream.is_finished()
    assert miniray.get(next(stream)) == "first"
    assert not stream.next_ready()
    assert not stream.is_finished()
    (tmp_path / "go").touch()
    assert miniray.get(next(stream)) == "second"
    wait_until(stream.is_finished)
    assert not stream.next_ready()


def test_a_generator_task_has_an_id_of_its_own() -> None:
    @miniray.remote
    def ids() -> Iterator[str | None]:
        yield miniray.get_runtime_context().get_task_id()

    found = {miniray.get(next(ids.remote())) for _ in range(2)}
    assert len(found) == 2
    assert all(bytes.fromhex(id) for id in found if id is not None)
    assert None not in found


def test_wait_takes_generators_along_with_refs(tmp_path: Path) -> None:
    stream = gated.remote(tmp_path / "go")
    ready, _ = miniray.wait([stream], timeout=30)
    assert ready == [stream]
    assert miniray.get(next(stream)) == "first"
    assert miniray.wait([stream], timeout=0.1) == ([], [stream])
    (tmp_path / "go").touch()
    assert miniray.get(next(stream)) == "second"


def test_a_generator_can_be_read_with_async_for() -> None:
    async def main() -> list[int]:
        return [await ref async for ref in count.remote(4)]

    assert asyncio.run(main()) == [0, 1, 2, 3]


def test_a_method_that_is_a_generator_streams() -> None:
    actor = Streamer.remote()
    assert miniray.get(list(actor.count.remote(3))) == [0, 1, 2]
    stream = actor.failing.remote()
    assert miniray.get(next(stream)) == 1
    with pytest.raises(ValueError, match="halfway"):
        miniray.get(next(stream))
    assert miniray.get(actor.fine.remote()) == "fine"


def test_an_async_generator_method_streams() -> None:
    actor = AsyncStreamer.remote()
    assert miniray.get(list(actor.count.remote(4))) == [0, 1, 2, 3]
    stream = actor.gated.remote()
    assert miniray.get(next(stream)) == "first"
    miniray.get(actor.open.remote())
    assert miniray.get(next(stream)) == "second"


def test_an_async_generator_that_fails_says_so() -> None:
    stream = AsyncStreamer.remote().failing.remote()
    assert miniray.get(next(stream)) == 1
    with pytest.raises(ValueError, match="halfway"):
        miniray.get(next(stream))


@pytest.fixture(params=["task", "method", "method in a thread"])
def counting(request: pytest.FixtureRequest) -> Any:
    """A generator of a task or an actor, by the number of its results."""
    if request.param == "task":
        return lambda n: count.options(num_returns=n)
    threads = 2 if "thread" in request.param else 1
    streamer = Streamer.options(max_concurrency=threads).remote()
    return lambda n: streamer.count.options(num_returns=n)


def test_a_generator_with_a_fixed_number_of_returns_gives_refs(counting: Any) -> None:
    assert miniray.get(counting(3).remote(3)) == [0, 1, 2]
    assert miniray.get(counting(1).remote(1)) == 0


def test_a_generator_with_a_fixed_number_of_returns_may_yield_more(counting: Any) -> None:
    assert miniray.get(counting(2).remote(5)) == [0, 1]
    assert miniray.get(counting(1).remote(5)) == 0


def test_results_that_a_generator_does_not_make_are_errors(counting: Any) -> None:
    first, second, third = counting(3).remote(2)
    assert miniray.get([first, second]) == [0, 1]
    with pytest.raises(ValueError, match=r"num_returns=3 but returned 2 |returned 2 .*_returns=3"):
        miniray.get(third)
    with pytest.raises(ValueError, match="returned 0 "):
        miniray.get(counting(1).remote(0))


def test_a_generator_that_fails_halfway_keeps_the_results_before() -> None:
    first, *others = failing.options(num_returns=3).remote()
    assert miniray.get(first) == 1
    for ref in others:
        with pytest.raises(ValueError, match="halfway") as caught:
            miniray.get(ref)
        assert "raise ValueError" in str(caught.value)


def test_a_generator_that_fails_halfway_is_repeated_as_a_whole(tmp_path: Path) -> None:
    @miniray.remote(num_returns=2, retry_exceptions=[ValueError])
    def fails_once() -> Iterator[Any]:
        yield np.full(300_000, 1)
        if count_up(tmp_path / "runs") == 1:
            raise ValueError("halfway")
        yield 2

    large, small = fails_once.remote()
    assert miniray.get(small) == 2
    assert miniray.get(large).sum() == 300_000
    del large
    wait_until(lambda: not inventory()["segments"])


@pytest.mark.parametrize("num_returns", [4, "streaming"])
def test_values_of_a_generator_leave_its_memory_one_by_one(num_returns: Any) -> None:
    @miniray.remote(num_returns=num_returns)
    def make() -> Iterator[Any]:
        class Large:
            def __init__(self) -> None:
                self.data = bytes(300_000)
                self.others = len(living)
                living.add(self)

        living: weakref.WeakSet[Large] = weakref.WeakSet()
        for _ in range(4):
            yield Large()

    assert [large.others for large in miniray.get(list(make.remote()))] == [0, 0, 0, 0]


def test_an_error_between_a_fixed_number_of_values_keeps_its_traceback() -> None:
    @miniray.remote(num_returns=2)
    def broken() -> Iterator[int]:
        yield 1
        raise ValueError("in the middle")

    first, second = broken.remote()
    assert miniray.get(first) == 1
    with pytest.raises(ValueError, match=r"in broken\n(.|\n)*in the middle"):
        miniray.get(second)


def test_a_task_may_read_the_generator_of_another_task() -> None:
    @miniray.remote
    def total(n: int) -> int:
        return sum(miniray.get(ref) for ref in count.remote(n))

    assert miniray.get(total.remote(5)) == 10


def test_a_cancelled_generator_ends_with_an_error(tmp_path: Path) -> None:
    stream = gated.remote(tmp_path / "never")
    assert miniray.get(next(stream)) == "first"
    miniray.cancel(stream)
    with pytest.raises((TaskCancelledError, RayError)):
        miniray.get(list(stream), timeout=30)


@miniray.remote(num_returns="dynamic")
def dynamic(count: int, fails: bool = False) -> Iterator[Any]:
    for number in range(count):
        yield np.full(1 << 18, number, dtype=np.uint8) if number % 2 else number
    if fails:
        raise ValueError("that was all")


def first_of(value: Any) -> int:
    return int(np.ravel(value)[0])


def test_a_dynamic_generator_is_the_value_of_one_ref() -> None:
    @miniray.remote
    def total(numbers: Any) -> tuple[int, int]:
        return len(numbers), sum(first_of(miniray.get(ref)) for ref in numbers)

    ref = dynamic.remote(4)
    assert isinstance(ref, miniray.ObjectRef)
    assert miniray.get(total.remote(ref), timeout=30) == (4, 6)
    found = miniray.get(ref)
    assert isinstance(found, miniray.DynamicObjectRefGenerator)
    assert miniray.get(total.remote(found), timeout=30) == (4, 6)
    assert len(found) == 4
    assert [first_of(miniray.get(item)) for item in found] == [0, 1, 2, 3]
    assert len(found) == 0  # taken, so that they may be freed
    assert len(miniray.get(dynamic.remote(0), timeout=30)) == 0


def test_a_dynamic_generator_of_an_actor_may_fail_after_some_values() -> None:
    @miniray.remote
    class Counting:
        @miniray.method(num_returns="dynamic")
        def count(self) -> Iterator[int]:
            yield 1
            raise ValueError("no more")

    one, error = miniray.get(Counting.remote().count.remote(), timeout=30)
    assert miniray.get(one) == 1
    with pytest.raises(ValueError, match="no more"):
        miniray.get(error)


def test_a_dynamic_generator_whose_process_ends_fails() -> None:
    @miniray.remote(num_returns="dynamic", max_retries=0)
    def crash() -> Iterator[int]:
        yield 1
        os._exit(1)

    with pytest.raises(WorkerCrashedError):
        miniray.get(crash.remote(), timeout=30)


def test_a_dynamic_generator_can_be_cancelled(tmp_path: Path) -> None:
    @miniray.remote(num_returns="dynamic")
    def wait() -> Iterator[int]:
        (tmp_path / "begun").touch()
        wait_for_file(tmp_path / "never")
        yield 1

    ref = wait.remote()
    wait_for_file(tmp_path / "begun")
    miniray.cancel(ref)
    with pytest.raises(TaskCancelledError):
        miniray.get(list(miniray.get(ref, timeout=30)))


def test_refs_and_generators_are_found_where_rays_programs_import_them() -> None:
    from miniray import _raylet

    assert _raylet.ObjectRef is miniray.ObjectRef
    assert _raylet.ObjectRefGenerator is miniray.ObjectRefGenerator
    assert _raylet.DynamicObjectRefGenerator is miniray.DynamicObjectRefGenerator


def test_ctrl_c_while_a_generator_is_waited_for_is_told_alone() -> None:
    @miniray.remote
    def held() -> Iterator[int]:
        threading.Event().wait()
        yield 1

    refs = held.remote()
    timer = threading.Timer(0.2, os.kill, (os.getpid(), signal.SIGINT))
    with pytest.raises(KeyboardInterrupt) as caught:  # noqa: PT012 - it may come before the wait
        timer.start()
        miniray.wait([refs], timeout=30)
    assert caught.value.__context__ is None
    miniray.cancel(refs)
