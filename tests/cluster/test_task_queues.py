"""How tasks queue at leased workers: they spread, move on when one is long, and are shared out
fairly between shapes and drivers."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from cluster_helpers import wait_for_file, wait_until

import miniray
from miniray.cluster_utils import Cluster

if TYPE_CHECKING:
    from collections.abc import Iterator

CPUS = 8


@pytest.fixture(scope="module", autouse=True)
def nodes(session_root: Path) -> Iterator[Cluster]:
    """A node of eight logical CPUs. This driver keeps what it leases until it is asked for it."""
    with pytest.MonkeyPatch.context() as patch:
        cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": CPUS})
        patch.setenv("MINIRAY_LEASE_IDLE", "1000")
        miniray.config.config.cache_clear()
        cluster.connect()
        yield cluster
        cluster.shutdown()
    miniray.config.config.cache_clear()


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
    miniray.get([short.remote() for _ in range(10_000)])
    began = time.monotonic()
    pids = miniray.get([long.remote(1.0) for _ in range(CPUS)])
    took = time.monotonic() - began
    assert len(set(pids)) == CPUS
    assert took < 1.8, f"{took:.2f} s: some ran one after another"


def test_tasks_queued_behind_a_long_one_move_to_other_workers(tmp_path: Path) -> None:
    warm_up()
    first = until.remote(tmp_path / "go")
    others = [short.remote() for _ in range(500)]
    pids = set(miniray.get(others, timeout=30))
    (tmp_path / "go").touch()
    assert miniray.get(first) not in pids


def test_tasks_queued_behind_one_that_waits_for_another_move(tmp_path: Path) -> None:
    @miniray.remote
    def wait_for(refs: list[Any]) -> int:
        miniray.get(refs[0])
        return os.getpid()

    warm_up()
    awaited = until.options(num_cpus=0).remote(tmp_path / "go")
    waiting = [wait_for.remote([awaited]) for _ in range(CPUS)]
    assert len(miniray.get([short.remote() for _ in range(500)], timeout=30)) == 500
    assert miniray.wait(waiting, timeout=0)[0] == []
    (tmp_path / "go").touch()
    assert len(set(miniray.get(waiting, timeout=30))) == CPUS


def test_a_short_task_is_not_held_up_by_long_ones_of_another_shape(tmp_path: Path) -> None:
    warm_up()
    held = [until.remote(tmp_path / "go") for _ in range(CPUS - 1)]
    began = time.monotonic()
    miniray.get(short.options(num_cpus=0.5).remote(), timeout=30)
    assert time.monotonic() - began < 5
    (tmp_path / "go").touch()
    miniray.get(held)


# --- idle leases are taken back ------------------------------------------------------------------


def leases() -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = miniray.core.runtime.current_runtime().head_call(
        "state", "leases"
    )
    return found


def hold_all_cpus(tmp_path: Path) -> None:
    """Give this driver an idle lease of each CPU."""
    go = tmp_path / "warm"
    refs = [until.remote(go) for _ in range(CPUS)]
    wait_until(lambda: sum(bool(lease["worker_id"]) for lease in leases()) == CPUS)
    go.touch()
    miniray.get(refs)
    assert len(leases()) == CPUS


def test_idle_leases_are_kept_until_somebody_waits(tmp_path: Path) -> None:
    hold_all_cpus(tmp_path)
    time.sleep(0.5)
    assert len(leases()) == CPUS


@pytest.mark.parametrize("cpus", [0.5, CPUS])
def test_a_task_of_another_shape_gets_the_cpus_of_idle_leases(cpus: float, tmp_path: Path) -> None:
    hold_all_cpus(tmp_path)
    miniray.get(short.options(num_cpus=cpus).remote(), timeout=10)


def test_an_actor_gets_the_cpus_of_idle_leases(tmp_path: Path) -> None:
    @miniray.remote(num_cpus=CPUS)
    class Large:
        def ready(self) -> bool:
            return True

    hold_all_cpus(tmp_path)
    large = Large.remote()
    assert miniray.get(large.ready.remote(), timeout=10)
    miniray.kill(large)
    assert miniray.get(short.remote(), timeout=10)


def drive(code: str) -> subprocess.Popen[str]:
    """Start another driver of the cluster."""
    prelude = """
    import os, sys, time
    from pathlib import Path
    import miniray
    miniray.init("auto")

    @miniray.remote
    def work(seconds=0.0):
        time.sleep(seconds)
        return os.getpid()
    """
    program = textwrap.dedent(prelude) + textwrap.dedent(code)
    return subprocess.Popen(
        [sys.executable, "-c", program],
        env={**os.environ, "PYTHONPATH": str(Path(__file__).parent)},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )


def test_a_second_driver_gets_the_cpus_of_idle_leases(tmp_path: Path) -> None:
    hold_all_cpus(tmp_path)
    with drive("print(len(miniray.get([work.remote() for _ in range(100)], timeout=20)))") as other:
        out, _ = other.communicate(timeout=40)
    assert out == "100\n"


def test_a_driver_that_comes_later_gets_its_share() -> None:
    """The first driver alone needs 5 s; behind all of it the second would take as long."""
    seconds, many, few = 0.02, 2000, 100
    with drive(f"""
        print("attached", flush=True)
        sys.stdin.readline()  # until the other one has begun
        began = time.monotonic()
        miniray.get([work.remote({seconds}) for _ in range({few})], timeout=40)
        print(time.monotonic() - began)
        """) as other:
        assert other.stdin is not None
        assert other.stdout is not None
        assert other.stdout.readline() == "attached\n"
        refs = [long.remote(seconds) for _ in range(many)]
        miniray.wait(refs)
        other.stdin.write("\n")
        other.stdin.flush()
        took = float(other.stdout.readline())
        waiting = len(miniray.wait(refs, num_returns=many, timeout=0)[1])
    miniray.get(refs, timeout=50)
    assert waiting > 0, "the first driver was done before the second"
    assert took < 2.5


# --- many tasks, and tasks of tasks ---------------------------------------------------------------


@miniray.remote
def add(*numbers: int) -> int:
    return sum(numbers)


def test_a_chain_of_ten_thousand_tasks_runs_in_order() -> None:
    ref = add.remote(0)
    for _ in range(10_000):
        ref = add.remote(ref, 1)
    assert miniray.get(ref, timeout=50) == 10_000


def test_ten_thousand_results_flow_into_one() -> None:
    groups = [add.remote(*[add.remote(1) for _ in range(100)]) for _ in range(100)]
    assert miniray.get(add.remote(*groups), timeout=50) == 10_000


def test_a_thousand_tasks_that_wait_for_tasks_do_not_block_each_other(nodes: Cluster) -> None:
    """On two CPUs: those that wait give theirs to those that they wait for."""

    @miniray.remote
    def leaf(number: int) -> int:
        return number

    @miniray.remote(resources={"pair": 0.001})
    def parent(number: int) -> int:
        return sum(miniray.get([leaf.remote(number), leaf.remote(1)]))

    node = nodes.add_node(num_cpus=2, resources={"pair": 1})
    results = miniray.get([parent.remote(number) for number in range(1000)], timeout=50)
    assert results == [number + 1 for number in range(1000)]
    nodes.remove_node(node)


def test_nesting_deeper_than_there_are_cpus_does_not_block() -> None:
    @miniray.remote(num_cpus=CPUS)
    def descend(depth: int) -> int:
        return 0 if depth == 0 else 1 + miniray.get(descend.remote(depth - 1))

    assert miniray.get(descend.remote(10), timeout=50) == 10
