"""What a process records of itself."""

from __future__ import annotations

import threading
import time
from typing import TYPE_CHECKING

import pytest

from miniray.profiling import inside

if TYPE_CHECKING:
    from collections.abc import Iterator

#: Far more than one interval of the sampler, and short for a test.
SECONDS = 0.6


@pytest.fixture
def end() -> Iterator[threading.Event]:
    """Set when the test is over: threads end then."""
    end = threading.Event()
    before = set(threading.enumerate())
    yield end
    end.set()
    for thread in set(threading.enumerate()) - before:
        thread.join()


def costs(samples: inside.Samples) -> dict[str, float]:
    """Seconds by function, of those that the samples have anywhere."""
    found: dict[str, float] = {}
    for frames, cost in samples:
        for name in {frame.partition(" (")[0].rpartition(".")[2] for frame in frames}:
            found[name] = found.get(name, 0.0) + cost
    return found


def test_what_computes_has_its_cpu_time_and_what_waits_has_none(end: threading.Event) -> None:
    used = []

    def computes() -> None:
        while not end.is_set():
            sum(range(1000))
        used.append(time.thread_time())

    def waits() -> None:
        end.wait()

    threads = [threading.Thread(target=target) for target in (computes, waits)]
    for thread in threads:
        thread.start()
    found = costs(inside._sample(None, SECONDS))
    end.set()
    threads[0].join()
    assert 0.3 * used[0] < found["computes"] <= used[0]
    assert found.get("waits", 0.0) < 0.05


def test_native_code_that_holds_the_lock_is_weighted_by_what_it_used(end: threading.Event) -> None:
    begun = threading.Event()

    def native() -> None:
        begun.set()
        while not end.is_set():
            sum(range(10_000_000))  # no other thread runs meanwhile: a handful of samples

    thread = threading.Thread(target=native)
    thread.start()
    begun.wait()
    before = time.process_time()
    found = costs(inside._sample(None, SECONDS))
    used = time.process_time() - before
    assert found["native"] > 0.3 * used  # a tenth, if each sample counted as much as another


def test_allocations_are_recorded_by_memray_into_a_file(tmp_path: object) -> None:
    path = f"{tmp_path}/allocations"
    way, samples = inside._record(None, 0.05, path, leaks=False)
    assert (way, samples) == ("memray", [])
    with open(path, "rb") as file:
        assert file.read(1)


def test_without_memray_python_counts_and_says_what_it_misses(
    monkeypatch: pytest.MonkeyPatch, end: threading.Event
) -> None:
    monkeypatch.setitem(__import__("sys").modules, "memray", None)
    kept = []

    def allocates() -> None:
        while not end.wait(0.01):
            kept.append(bytearray(100_000))

    threading.Thread(target=allocates).start()
    way, samples = inside._record(None, 0.3, "", leaks=False)
    assert "Python's own allocations" in way
    assert max(cost for _, cost in samples) > 100_000
