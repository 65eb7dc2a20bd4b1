"""``multiprocessing.Pool`` on actors."""

from __future__ import annotations

import itertools
import logging
import multiprocessing
import os
import queue
import sys
import threading
import time
from typing import TYPE_CHECKING, Any

import pytest
from cluster_helpers import is_alive, wait_for_file, wait_until

from miniray.exceptions import ActorDiedError, TaskCancelledError
from miniray.util.multiprocessing import Pool
from miniray.util.multiprocessing import TimeoutError as PoolTimeoutError

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

pytestmark = pytest.mark.usefixtures("cluster")


@pytest.fixture(scope="module")
def pool(cluster: Any) -> Iterator[Pool]:
    with Pool(2) as shared:
        yield shared


def square(n: int) -> int:
    return n * n


def add(a: int, b: int = 1) -> int:
    return a + b


def pid(_: Any = None) -> int:
    return os.getpid()


def picky(n: int) -> int:
    if n == 3:
        raise ValueError("three")
    return n


def wait_and_return(path: Path) -> str:
    wait_for_file(path)
    return path.name


def test_apply_returns_the_result(pool: Pool) -> None:
    assert pool.apply(add, (1,)) == 2
    assert pool.apply(add, (1,), {"b": 5}) == 6
    assert pool.apply(add, kwargs={"a": 3}) == 4


def test_that_a_context_has_no_effect_is_told_once(
    cluster: Any, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(logging.getLogger("miniray"), "propagate", True)
    for _ in range(2):
        with Pool(1, context=multiprocessing.get_context()):
            pass
    assert caplog.text.count("context") == 1


def test_apply_raises_what_the_function_raised(pool: Pool) -> None:
    with pytest.raises(ValueError, match="three"):
        pool.apply(picky, (3,))


def test_apply_async_gives_a_result_that_can_be_asked(pool: Pool, tmp_path: Path) -> None:
    result = pool.apply_async(wait_and_return, (tmp_path / "go",))
    assert not result.ready()
    with pytest.raises(ValueError, match="not ready"):
        result.successful()
    with pytest.raises(PoolTimeoutError):
        result.get(timeout=0.05)
    result.wait(timeout=0.05)
    (tmp_path / "go").touch()
    assert result.get(timeout=30) == "go"
    assert result.ready()
    assert result.successful()


def test_a_failed_result_says_so(pool: Pool) -> None:
    result = pool.apply_async(picky, (3,))
    result.wait(30)
    assert not result.successful()
    with pytest.raises(ValueError, match="three"):
        result.get()


def test_callbacks_get_the_result_or_the_error(pool: Pool) -> None:
    good: queue.Queue[Any] = queue.Queue()
    bad: queue.Queue[Any] = queue.Queue()
    pool.apply_async(square, (3,), callback=good.put, error_callback=bad.put).get()
    pool.map_async(square, range(4), callback=good.put, error_callback=bad.put).get()
    assert [good.get(timeout=30), good.get(timeout=30)] == [9, [0, 1, 4, 9]]
    assert bad.empty()
    pool.map_async(picky, range(6), callback=good.put, error_callback=bad.put).wait(30)
    assert isinstance(bad.get(timeout=30), Exception)
    assert good.empty()


@pytest.mark.parametrize("chunksize", [None, 1, 3, 100])
def test_map_keeps_the_order(pool: Pool, chunksize: int | None) -> None:
    assert pool.map(square, range(10), chunksize=chunksize) == [n * n for n in range(10)]
    assert pool.map(square, iter([1, 2]), chunksize=chunksize) == [1, 4]


def test_map_of_nothing_is_nothing(pool: Pool) -> None:
    assert pool.map(square, []) == []


def test_map_raises_the_first_error(pool: Pool) -> None:
    with pytest.raises(ValueError, match="three"):
        pool.map(picky, range(6))


def test_map_async_can_be_waited_for(pool: Pool) -> None:
    assert pool.map_async(square, range(5)).get(timeout=30) == [0, 1, 4, 9, 16]


def test_starmap_unpacks_the_elements(pool: Pool) -> None:
    assert pool.starmap(add, [(1, 2), (3, 4), (5,)]) == [3, 7, 6]
    assert pool.starmap_async(add, zip(range(3), range(3), strict=True)).get() == [0, 2, 4]


def test_imap_keeps_the_order(pool: Pool, tmp_path: Path) -> None:
    (tmp_path / "fast").touch()
    results = pool.imap(wait_and_return, [tmp_path / "slow", tmp_path / "fast"])
    with pytest.raises(PoolTimeoutError):
        results.next(timeout=0.2)
    (tmp_path / "slow").touch()
    assert list(results) == ["slow", "fast"]


def test_imap_unordered_gives_what_is_ready(pool: Pool, tmp_path: Path) -> None:
    (tmp_path / "fast").touch()
    results = pool.imap_unordered(wait_and_return, [tmp_path / "slow", tmp_path / "fast"])
    assert results.next(timeout=30) == "fast"
    (tmp_path / "slow").touch()
    assert list(results) == ["slow"]


@pytest.mark.parametrize("chunksize", [1, 4])
def test_imap_reads_an_endless_iterable_only_as_far_as_needed(pool: Pool, chunksize: int) -> None:
    read = []

    def endless() -> Iterator[int]:
        for n in itertools.count():
            read.append(n)
            yield n

    results = pool.imap(square, endless(), chunksize=chunksize)
    assert [next(results) for _ in range(10)] == [n * n for n in range(10)]
    # What came may be twice what was taken, and as much more is read; more where this process
    # waits for a processor while results come.
    assert len(read) < 200 * chunksize


def test_imap_of_a_list_in_chunks_gives_every_element(pool: Pool) -> None:
    assert sorted(pool.imap_unordered(square, range(11), chunksize=3)) == [n * n for n in range(11)]
    assert list(pool.imap(square, range(11), chunksize=4)) == [n * n for n in range(11)]


def test_imap_raises_an_error_in_its_place_and_goes_on(pool: Pool) -> None:
    results = pool.imap(picky, [1, 3, 5])
    assert next(results) == 1
    with pytest.raises(ValueError, match="three"):
        next(results)
    assert next(results) == 5
    with pytest.raises(StopIteration):
        next(results)


def test_the_work_is_shared_by_all_processes(tmp_path: Path) -> None:
    def meet(folder: Path) -> int:
        (folder / str(os.getpid())).touch()
        wait_until(lambda: len(list(folder.iterdir())) == 2)
        return os.getpid()

    with Pool(2) as both:
        pids = set(both.map(meet, [tmp_path] * 2, chunksize=1))
    assert len(pids) == 2
    assert os.getpid() not in pids


def test_the_initializer_runs_in_every_process(tmp_path: Path) -> None:
    def prepare(folder: Path, suffix: str) -> None:
        (folder / f"{os.getpid()}{suffix}").touch()

    with Pool(2, initializer=prepare, initargs=(tmp_path, ".ready")) as prepared:
        pids = set(prepared.map(pid, range(8), chunksize=1))
    assert {path.name for path in tmp_path.iterdir()} == {f"{n}.ready" for n in pids}


def test_a_process_is_replaced_after_maxtasksperchild() -> None:
    with Pool(1, maxtasksperchild=2) as short:
        pids = [short.apply(pid) for _ in range(4)]
    assert pids[0] == pids[1] != pids[2] == pids[3]


def test_nothing_is_kept_of_processes_that_were_replaced() -> None:
    with Pool(1, maxtasksperchild=1) as short:
        for _ in range(4):
            short.apply(pid)
        wait_until(lambda: bool(short.apply(pid)) and len(short._dispatcher._ending) < 3)


def test_a_closed_pool_finishes_its_work_and_takes_no_more(tmp_path: Path) -> None:
    closing = Pool(2)
    with pytest.raises(ValueError, match="running"):
        closing.join()
    result = closing.map_async(wait_and_return, [tmp_path / "go"])
    process = closing.apply(pid)
    closing.close()
    with pytest.raises(ValueError, match="not running"):
        closing.apply(square, (1,))
    (tmp_path / "go").touch()
    closing.join()
    assert result.get(timeout=30) == ["go"]
    wait_until(lambda: not is_alive(process))


def test_terminate_ends_the_processes_at_once(tmp_path: Path) -> None:
    with Pool(1) as stopped:
        process = stopped.apply(pid)
        result = stopped.apply_async(wait_and_return, (tmp_path / "never",))
        stopped.terminate()
    wait_until(lambda: not is_alive(process))
    with pytest.raises(Exception, match=r".+"):
        result.get(timeout=30)
    stopped.join()


@pytest.mark.parametrize("processes", [0, -1, 1000])
def test_a_number_of_processes_that_the_cluster_has_not_is_refused(processes: int) -> None:
    with pytest.raises(ValueError, match=r"[Pp]rocesses"):
        Pool(processes)


def test_threads_share_a_pool(pool: Pool) -> None:
    found: dict[int, Any] = {}

    def use(n: int) -> None:
        found[n] = pool.map(square, range(n))

    threads = [threading.Thread(target=use, args=(n,)) for n in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == {n: [i * i for i in range(n)] for n in range(4)}


def crash(path: Path) -> None:
    (path / str(os.getpid())).touch()
    os._exit(3)


def refuse(n: int) -> Any:
    """A number, or what cannot be pickled."""
    return n if n % 10 else threading.Lock()


class Secretive:
    """Cannot be pickled if it is told so."""

    def __init__(self, pickles: bool) -> None:
        self.pickles = pickles

    def __reduce__(self) -> tuple[type, tuple[bool]]:
        if not self.pickles:
            raise ValueError("it is secret")
        return Secretive, (True,)


def test_a_long_call_does_not_hold_up_the_others(pool: Pool, tmp_path: Path) -> None:
    long = pool.apply_async(wait_and_return, (tmp_path / "go",))
    assert pool.map(square, range(20), chunksize=1) == [n * n for n in range(20)]
    assert [r.get(30) for r in [pool.apply_async(square, (n,)) for n in range(20)]] == [
        n * n for n in range(20)
    ]
    assert not long.ready()
    (tmp_path / "go").touch()
    assert long.get(timeout=30) == "go"


def test_calls_that_wait_go_together_once_they_are_known_to_be_short(tmp_path: Path) -> None:
    def batch(_: int) -> int:
        frame: Any = sys._getframe()
        while frame.f_code.co_name != "run":
            frame = frame.f_back
        return len(frame.f_locals["units"])

    with Pool(1) as single:
        assert single.apply(batch, (0,)) == 1
        first = single.apply_async(wait_and_return, (tmp_path / "go",))
        others = [single.apply_async(square, (n,)) for n in range(100)]
        sizes = [single.apply_async(batch, (n,)) for n in range(2)]
        (tmp_path / "go").touch()
        assert first.get(30) == "go"
        assert [r.get(30) for r in others] == [n * n for n in range(100)]
        assert [r.get(30) for r in sizes] == [2, 2]


def test_what_cannot_be_pickled_fails_its_own_call_only(pool: Pool, tmp_path: Path) -> None:
    pool.map(refuse, [1, 2])  # from here on they are known to be short
    blocked = [pool.apply_async(wait_and_return, (tmp_path / "go",)) for _ in range(2)]
    results = [pool.apply_async(refuse, (n,)) for n in range(20)]
    arguments = [pool.apply_async(type, (Secretive(n != 3),)) for n in range(6)]
    (tmp_path / "go").touch()
    for result in blocked:
        assert result.get(30) == "go"
    for n, result in enumerate(results):
        if n % 10:
            assert result.get(30) == n
        else:
            with pytest.raises(TypeError, match="pickle"):
                result.get(30)
    for n, result in enumerate(arguments):
        if n != 3:
            assert result.get(30).__name__ == "Secretive"
        else:
            with pytest.raises(TypeError, match="secret"):
                result.get(30)


def test_a_process_that_dies_is_replaced(tmp_path: Path) -> None:
    with Pool(1) as fragile:
        for _ in range(2):
            with pytest.raises(ActorDiedError):
                fragile.apply(crash, (tmp_path,))
            assert fragile.apply(square, (3,)) == 9
    assert len(list(tmp_path.iterdir())) == 2


def test_what_waits_for_a_process_of_a_terminated_pool_fails(tmp_path: Path) -> None:
    stopped = Pool(1)
    running = stopped.apply_async(wait_and_return, (tmp_path / "never",))
    waiting = stopped.apply_async(square, (2,))
    iterator = stopped.imap(square, range(9))
    stopped.terminate()
    with pytest.raises(TaskCancelledError):
        list(iterator)
    with pytest.raises(TaskCancelledError):
        waiting.get(timeout=30)
    with pytest.raises(ActorDiedError):
        running.get(timeout=30)
    stopped.join()


def test_an_iterator_gives_all_results_of_a_pool_that_was_closed() -> None:
    closing = Pool(1)
    ordered = closing.imap(square, range(20))
    unordered = closing.imap_unordered(square, range(20), chunksize=3)
    closing.close()
    closing.join()
    assert list(ordered) == sorted(unordered) == [n * n for n in range(20)]


def test_join_waits_for_callbacks() -> None:
    closing = Pool(1)
    told: list[int] = []
    for n in range(5):
        closing.apply_async(square, (n,), callback=told.append)
    closing.close()
    closing.join()
    assert sorted(told) == [n * n for n in range(5)]


def doze(seconds: float) -> int:
    time.sleep(seconds)
    return os.getpid()


def test_calls_that_turn_out_long_are_shared_out_anew() -> None:
    with Pool(2) as both:
        both.map(doze, [0] * 100)  # from here on they are known to be short
        assert len(set(both.map(doze, [0.05] * 100, chunksize=1))) == 2
