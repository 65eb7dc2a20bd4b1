"""Many objects: what they cost goes with their number, and nothing of them stays."""

from __future__ import annotations

import gc
import os
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from cluster_helpers import wait_until
from object_helpers import inventory, node_tables, process_tables

import miniray
from miniray.common.runtime import current_runtime

if TYPE_CHECKING:
    from collections.abc import Callable

pytestmark = pytest.mark.usefixtures("cluster")

MIB = 1024 * 1024


@miniray.remote(num_cpus=0)
class Borrower:
    """Holds refs."""

    def __init__(self) -> None:
        self.refs: list[Any] = []

    def hold(self, refs: list[Any]) -> int:
        self.refs = refs
        return len(refs)

    def drop(self) -> None:
        self.refs = []

    def sum(self) -> int:
        return sum(miniray.get(self.refs))

    def tables(self) -> dict[str, int]:
        return process_tables()


@miniray.remote(num_cpus=0)
def same(number: int) -> int:
    return number


def memory_of(pid: int) -> int:
    """Bytes of memory that a process has, in common with others or not.

    Not its share of what is in common: that grows when one of the others ends.
    """
    for line in Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines():
        if line.startswith("Rss:"):
            return int(line.split()[1]) * 1024
    raise AssertionError


def daemon_pid() -> int:
    """The daemon of the cluster: the process behind this one's socket to it."""
    return int(inventory()["pid"])


def wait_until_equal(found: Callable[[], dict[str, int]], before: dict[str, int]) -> None:
    """Until the tables have no more entries than before; fails with those that do."""
    more: dict[str, tuple[int, int]] = {}

    def equal() -> bool:
        more.clear()
        more.update({k: (n, before[k]) for k, n in found().items() if n > before[k]})
        return not more

    try:
        wait_until(equal, timeout=20)
    except AssertionError:
        raise AssertionError(f"entries (now, before): {more}") from None


@pytest.mark.parametrize(
    "count",
    [
        50_000,
        pytest.param(1_000_000, marks=[pytest.mark.slow, pytest.mark.timeout(900)]),
    ],
)
def test_small_objects_put_held_and_dropped_leave_memory_as_it_was(count: int) -> None:
    miniray.get([miniray.put(n) for n in range(100)])
    gc.collect()
    tables, there = process_tables(), node_tables()
    pids = {"driver": os.getpid(), "daemon": daemon_pid()}
    after: list[dict[str, int]] = []
    for _ in range(3):
        refs = [miniray.put(n) for n in range(count)]
        assert miniray.get(refs[-1]) == count - 1
        del refs
        wait_until_equal(process_tables, tables)
        wait_until_equal(node_tables, there)
        gc.collect()
        after.append({name: memory_of(pid) for name, pid in pids.items()})
    first = after[0]
    for later in after[1:]:
        for name, size in later.items():
            assert size < first[name] * 1.05 + 2 * MIB, after


@pytest.mark.parametrize(
    "count",
    [
        5_000,
        pytest.param(100_000, marks=[pytest.mark.slow, pytest.mark.timeout(900)]),
    ],
)
def test_objects_that_others_borrow_leave_no_entry_anywhere(count: int) -> None:
    borrower = Borrower.remote()
    miniray.get(borrower.hold.remote([miniray.put(0)]))
    miniray.get(borrower.drop.remote())
    there = miniray.get(borrower.tables.remote())
    here, node = process_tables(), node_tables()
    for _ in range(3):
        refs = [miniray.put(n) for n in range(count)]
        assert miniray.get(borrower.hold.remote(refs)) == count
        del refs
        assert miniray.get(borrower.sum.remote()) == sum(range(count))
        miniray.get(borrower.drop.remote())
        wait_until_equal(lambda: miniray.get(borrower.tables.remote()), there)
        wait_until_equal(process_tables, here)
        wait_until_equal(node_tables, node)


def test_results_of_many_tasks_leave_no_entry() -> None:
    tables, node = process_tables(), node_tables()
    for _ in range(3):
        assert miniray.get([same.remote(n) for n in range(3_000)]) == list(range(3_000))
        wait_until_equal(process_tables, tables)
        wait_until_equal(node_tables, node)


# --- cost goes with the number ------------------------------------------------------------
FEW, MANY = 10_000, 20_000


def get_puts(count: int) -> Callable[[], object]:
    refs = [miniray.put(n) for n in range(count)]
    return lambda: miniray.get(refs)


def get_borrowed(count: int) -> Callable[[], object]:
    borrower = Borrower.remote()
    refs = [miniray.put(n) for n in range(count)]
    miniray.get(borrower.hold.remote(refs))
    return lambda: miniray.get(borrower.sum.remote())


def wait_for_all(count: int) -> Callable[[], object]:
    refs = [miniray.put(n) for n in range(count)]
    return lambda: miniray.wait(refs, num_returns=count)


def put_in_one_value(count: int) -> Callable[[], object]:
    refs = [miniray.put(n) for n in range(count)]

    def nest() -> None:
        assert len(miniray.get(miniray.put(refs))) == count

    return nest


def pass_in_one_value(count: int) -> Callable[[], object]:
    borrower = Borrower.remote()
    refs = [miniray.put(n) for n in range(count)]
    return lambda: miniray.get(borrower.hold.remote(refs))


def put_and_drop(count: int) -> Callable[[], object]:
    def put() -> None:
        refs = [miniray.put(n) for n in range(count)]
        del refs
        current_runtime().refs.settle()  # type: ignore[attr-defined]

    return put


@pytest.mark.parametrize(
    "prepare",
    [
        get_puts,
        get_borrowed,
        wait_for_all,
        put_in_one_value,
        pass_in_one_value,
        put_and_drop,
    ],
)
def test_twice_as_many_refs_cost_no_more_than_thrice_as_much(prepare: Any) -> None:
    few, many = prepare(FEW), prepare(MANY)
    best = {few: float("inf"), many: float("inf")}
    # What else runs on the machine makes single times longer, never shorter: so what is not
    # quadratic shows it sooner or later.
    deadline = time.monotonic() + 30
    while time.monotonic() < deadline:
        for work in (few, many):
            begin = time.perf_counter()
            work()
            best[work] = min(best[work], time.perf_counter() - begin)
        if best[many] < 3 * best[few]:
            return
    raise AssertionError(f"{FEW}: {best[few]:.4f} s, {MANY}: {best[many]:.4f} s")
