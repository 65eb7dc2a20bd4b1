"""How tasks queue at leased workers: they spread, move on when one is long, and are shared out
fairly between shapes and drivers."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import textwrap
import time
from typing import TYPE_CHECKING, Any

import pytest
from cluster_helpers import takes_less_than, wait_for_file, wait_until
from running_cluster import running_cluster

import miniray
from miniray.util.state import list_workers

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from miniray.cluster_utils import Cluster

CPUS = 8


@pytest.fixture(scope="module", autouse=True)
def nodes(session_root: Path) -> Iterator[Cluster]:
    """A node of eight logical CPUs."""
    with running_cluster({"num_cpus": CPUS}, variables={"MINIRAY_RESERVE_AFTER": "1"}) as cluster:
        yield cluster


@miniray.remote
def short() -> int:
    return os.getpid()


@miniray.remote
def long(seconds: float) -> int:
    time.sleep(seconds)
    return os.getpid()


@miniray.remote
def until(path: Path) -> int:
    wait_for_file(path)
    return os.getpid()


def warm_up(count: int = 2000) -> None:
    """Let the client learn that tasks are short, so that it queues many at each worker."""
    miniray.get([short.remote() for _ in range(count)])


# --- behind others --------------------------------------------------------------------------------


def test_long_tasks_run_side_by_side_after_ten_thousand_short_ones() -> None:
    def run_long_ones() -> float:
        miniray.get([short.remote() for _ in range(10_000)])
        began = time.monotonic()
        pids = miniray.get([long.remote(1.0) for _ in range(CPUS)])
        assert len(set(pids)) == CPUS
        return time.monotonic() - began

    takes_less_than(1.8, run_long_ones)  # two of them one after another take 2 s


def test_tasks_queued_behind_a_long_one_move_to_other_workers(tmp_path: Path) -> None:
    warm_up()
    first = until.remote(tmp_path / "go")
    others = [short.remote() for _ in range(500)]
    pids = set(miniray.get(others, timeout=30))
    (tmp_path / "go").touch()
    assert miniray.get(first) not in pids


def test_tasks_queued_behind_one_that_waits_for_another_move(tmp_path: Path) -> None:
    @miniray.remote
    def wait_for(refs: list[Any], begun: Path) -> int:
        begun.touch()
        miniray.get(refs[0])
        return os.getpid()

    warm_up()
    awaited = until.options(num_cpus=0).remote(tmp_path / "go")
    begun = [tmp_path / f"begun{n}" for n in range(CPUS)]
    waiting = [wait_for.remote([awaited], path) for path in begun]
    assert len(miniray.get([short.remote() for _ in range(500)], timeout=30)) == 500
    wait_until(lambda: all(path.exists() for path in begun))
    assert miniray.wait(waiting, timeout=0)[0] == []
    (tmp_path / "go").touch()
    assert len(set(miniray.get(waiting, timeout=30))) == CPUS


def test_a_short_task_is_not_held_up_by_long_ones_of_another_shape(tmp_path: Path) -> None:
    warm_up()
    held = [until.remote(tmp_path / "go") for _ in range(CPUS - 1)]
    miniray.get(short.options(num_cpus=0.5).remote(), timeout=30)
    (tmp_path / "go").touch()
    miniray.get(held)


# --- tasks that take nothing ----------------------------------------------------------------------


def worker_pids() -> set[int]:
    return {worker.pid for worker in list_workers(limit=10_000)}


def test_a_burst_of_short_tasks_that_take_nothing_is_done_by_a_few_workers() -> None:
    before = worker_pids()
    miniray.get([short.options(num_cpus=0).remote() for _ in range(2500)], timeout=60)
    assert len(worker_pids() - before) <= 60


def test_tasks_that_take_nothing_all_run_at_once_if_they_are_long(tmp_path: Path) -> None:
    @miniray.remote(num_cpus=0)
    def meet(number: int, count: int) -> int:
        (tmp_path / str(number)).touch()
        wait_until(lambda: len(list(tmp_path.iterdir())) == count, timeout=120)
        return os.getpid()

    count = 40
    pids = miniray.get([meet.remote(number, count) for number in range(count)], timeout=120)
    assert len(set(pids)) == count


# --- idle leases are taken back ------------------------------------------------------------------


@contextlib.contextmanager
def drive(code: str, **variables: str) -> Iterator[subprocess.Popen[str]]:
    """Another driver of the cluster; it may talk with the test by its standard streams."""
    prelude = """
    import os, sys, time
    from pathlib import Path
    import miniray
    miniray.init("auto")

    @miniray.remote
    def work(seconds=0.0):
        time.sleep(seconds)
        return os.getpid()

    def say(text):
        print(text, flush=True)
    """
    driver = subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(prelude) + textwrap.dedent(code)],
        env={**os.environ, **variables},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    with driver:
        try:
            yield driver
        finally:
            driver.kill()


def hear(driver: subprocess.Popen[str]) -> str:
    """The next line that a driver says."""
    assert driver.stdout is not None
    return driver.stdout.readline().strip()


def tell(driver: subprocess.Popen[str], text: str = "") -> None:
    """Send a driver a line."""
    assert driver.stdin is not None
    driver.stdin.write(f"{text}\n")
    driver.stdin.flush()


HOARD = f"""
while len(set(miniray.get([work.remote(0.1) for _ in range({CPUS})]))) < {CPUS}:
    pass
say("all are idle")
sys.stdin.readline()
"""


@pytest.fixture
def hoarder() -> Iterator[subprocess.Popen[str]]:
    """A driver with an idle lease of each CPU, which it keeps until it is asked for it."""
    wait_until(lambda: miniray.available_resources().get("CPU") == CPUS)
    code = f"""{HOARD}
say(len(miniray.get([work.remote() for _ in range(20)], timeout=20)))
"""
    with drive(code, MINIRAY_LEASE_IDLE="1000") as driver:
        assert hear(driver) == "all are idle"
        yield driver
        tell(driver)
        assert hear(driver) == "20"  # it gets leases again


def test_idle_leases_are_kept_while_nobody_waits(hoarder: subprocess.Popen[str]) -> None:
    time.sleep(1.0)  # twice as long as leases are kept by default
    assert miniray.available_resources().get("CPU", 0) == 0


@pytest.mark.parametrize("cpus", [0.5, 1, CPUS])
def test_a_task_gets_the_cpus_of_idle_leases(hoarder: subprocess.Popen[str], cpus: float) -> None:
    miniray.get(short.options(num_cpus=cpus).remote(), timeout=10)


def test_an_actor_gets_the_cpus_of_idle_leases(hoarder: subprocess.Popen[str]) -> None:
    @miniray.remote(num_cpus=3)
    class Large:
        def ready(self) -> bool:
            return True

    large = Large.remote()
    assert miniray.get(large.ready.remote(), timeout=10)
    miniray.kill(large)


def test_other_shapes_of_the_same_driver_get_the_cpus_of_its_idle_leases() -> None:
    wait_until(lambda: miniray.available_resources().get("CPU") == CPUS)
    code = f"""{HOARD}
for cpus in (0.5, {CPUS}, 2):
    miniray.get(work.options(num_cpus=cpus).remote(), timeout=10)
say("done")
"""
    with drive(code, MINIRAY_LEASE_IDLE="1000") as driver:
        assert hear(driver) == "all are idle"
        tell(driver)
        assert hear(driver) == "done"


def test_an_idle_lease_goes_back_while_others_are_in_use(tmp_path: Path) -> None:
    """Seven of eight leases run a task without end; it is the eighth that others wait for."""
    wait_until(lambda: miniray.available_resources().get("CPU") == CPUS)
    code = f"""{HOARD}

@miniray.remote
def hold(path):
    Path(path).touch()
    time.sleep(1000)

folder = Path({str(tmp_path)!r})
refs = [hold.remote(folder / str(number)) for number in range({CPUS - 1})]
while len(list(folder.iterdir())) < {CPUS - 1}:
    time.sleep(0.01)
say("in use")
sys.stdin.readline()
"""
    with drive(code) as driver:
        assert hear(driver) == "all are idle"
        tell(driver)
        assert hear(driver) == "in use"
        for cpus in (1, 0.5):
            miniray.get(short.options(num_cpus=cpus).remote(), timeout=10)


# --- fairness between drivers -------------------------------------------------------------------


def test_a_driver_that_comes_later_gets_its_share() -> None:
    """The first driver alone needs 5 s; behind all of it the second would take as long."""
    code = """
say("attached")
sys.stdin.readline()
miniray.get([work.remote(0.02) for _ in range(100)], timeout=40)
say("done")
"""
    with drive(code) as other:
        assert hear(other) == "attached"
        refs = [long.remote(0.02) for _ in range(2000)]
        miniray.wait(refs)
        tell(other)
        assert hear(other) == "done"
        waiting = miniray.wait(refs, num_returns=len(refs), timeout=0)[1]
        assert len(waiting) > len(refs) / 2
    miniray.get(refs, timeout=50)


def test_two_drivers_with_as_much_to_do_end_together() -> None:
    code = """
say("attached")
sys.stdin.readline()
began = time.monotonic()
refs = [work.remote(0.02) for _ in range(600)]
miniray.get(refs, timeout=40)
say(time.monotonic() - began)
"""
    wait_until(lambda: miniray.available_resources().get("CPU") == CPUS)
    with drive(code) as one, drive(code) as two:
        for driver in (one, two):
            assert hear(driver) == "attached"
        for driver in (one, two):
            tell(driver)
        times = sorted(float(hear(driver)) for driver in (one, two))
    assert times[1] / times[0] < 1.6, times


# --- many tasks, and tasks of tasks ---------------------------------------------------------------


@miniray.remote
def add(*numbers: int) -> int:
    return sum(numbers)


def test_a_chain_of_three_thousand_tasks_runs_in_order() -> None:
    ref = add.remote(0)
    for _ in range(3000):
        ref = add.remote(ref, 1)
    assert miniray.get(ref, timeout=30) == 3000


def test_ten_thousand_results_flow_into_one() -> None:
    groups = [add.remote(*[add.remote(1) for _ in range(100)]) for _ in range(100)]
    assert miniray.get(add.remote(*groups), timeout=30) == 10_000


def test_hundreds_of_tasks_that_wait_for_tasks_do_not_block_each_other(nodes: Cluster) -> None:
    """On two CPUs: those that wait give theirs to those that they wait for."""

    @miniray.remote
    def leaf(number: int) -> int:
        return number

    @miniray.remote(resources={"pair": 0.001})
    def parent(number: int) -> int:
        return sum(miniray.get([leaf.remote(number), leaf.remote(1)]))

    node = nodes.add_node(num_cpus=2, resources={"pair": 1})
    results = miniray.get([parent.remote(number) for number in range(300)], timeout=30)
    assert results == [number + 1 for number in range(300)]
    nodes.remove_node(node)


def test_nesting_deeper_than_there_are_cpus_does_not_block() -> None:
    @miniray.remote(num_cpus=CPUS)
    def descend(depth: int) -> int:
        return 0 if depth == 0 else 1 + miniray.get(descend.remote(depth - 1))

    assert miniray.get(descend.remote(10), timeout=30) == 10
