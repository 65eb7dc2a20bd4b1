"""Tasks and actors that start and wait for others: nothing waits for itself."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
from cluster_helpers import wait_until

import miniray
from miniray.exceptions import GetTimeoutError
from miniray.util import state

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = pytest.mark.usefixtures("cluster")

CLUSTER = {"num_cpus": 2}


@miniray.remote
def depth(n: int) -> int:
    return 0 if n == 0 else 1 + miniray.get(depth.remote(n - 1))


@miniray.remote
def tree(levels: int) -> int:
    if levels == 0:
        return 1
    return sum(miniray.get([tree.remote(levels - 1) for _ in range(2)]))


def test_tasks_that_wait_for_tasks_need_no_more_cpus_than_there_are() -> None:
    assert miniray.get(depth.remote(6), timeout=50) == 6


def test_a_tree_of_tasks_finishes_on_two_cpus() -> None:
    assert miniray.get(tree.remote(3), timeout=50) == 8


def test_a_task_that_waits_with_wait_gives_its_cpu_away() -> None:
    @miniray.remote(num_cpus=2)
    def whole() -> str:
        return "whole"

    @miniray.remote(num_cpus=2)
    def parent() -> str:
        ready, _ = miniray.wait([whole.remote()])
        return miniray.get(ready[0])

    assert miniray.get(parent.remote(), timeout=30) == "whole"


def test_a_method_that_waits_gives_its_cpu_away() -> None:
    @miniray.remote(num_cpus=2)
    class Holder:
        def run(self) -> int:
            return miniray.get(depth.options(num_cpus=2).remote(0))

    holder = Holder.remote()
    try:
        assert miniray.get(holder.run.remote(), timeout=30) == 0
    finally:
        miniray.kill(holder)


def test_a_task_may_start_actors_and_wait_for_them() -> None:
    @miniray.remote
    class Adder:
        def __init__(self, start: int) -> None:
            self.start = start

        def add(self, n: int) -> int:
            return self.start + n

    @miniray.remote
    def parent() -> list[int]:
        adders = [Adder.remote(n) for n in range(3)]
        return miniray.get([adder.add.remote(10) for adder in adders])

    assert miniray.get(parent.remote(), timeout=30) == [10, 11, 12]


def test_actors_may_call_each_other_back() -> None:
    @miniray.remote(max_concurrency=2)
    class Peer:
        def ping(self, other: Any, me: Any, n: int) -> int:
            return n if n == 0 else miniray.get(other.ping.remote(me, other, n - 1)) + 1

    one, two = Peer.remote(), Peer.remote()
    assert miniray.get(one.ping.remote(two, one, 2), timeout=30) == 2


def test_a_chain_of_refs_given_as_arguments_runs_in_order() -> None:
    @miniray.remote
    def step(values: list[int], n: int) -> list[int]:
        return [*values, n]

    ref = miniray.put([])
    for n in range(50):
        ref = step.remote(ref, n)
    assert miniray.get(ref, timeout=50) == list(range(50))


def test_a_worker_that_ends_gives_its_cpu_to_what_it_waits_for() -> None:
    """Both workers hold a CPU, and can end only when their children, which need one, have run."""

    @miniray.remote(max_calls=1)
    def make() -> Any:
        return [depth.remote(0)]

    for _ in range(3):
        nested = miniray.get([make.remote() for _ in range(2)], timeout=30)
        assert miniray.get([refs[0] for refs in nested], timeout=30) == [0, 0]


def test_the_results_of_a_task_that_ended_can_be_used(tmp_path: Path) -> None:
    @miniray.remote(max_calls=1)
    def make() -> Any:
        return [miniray.put("owned by a task that ended"), depth.remote(1)]

    refs = miniray.get(make.remote())
    try:
        assert miniray.get(refs, timeout=30) == ["owned by a task that ended", 1]
    except GetTimeoutError as error:
        waiting, workers = state.list_pending_demands(), state.list_workers()
        raise AssertionError(f"{error} waiting: {waiting}, workers: {workers}") from None


def test_a_task_left_behind_by_its_parent_still_runs(tmp_path: Path) -> None:
    @miniray.remote
    def mark(path: Path) -> None:
        path.touch()

    @miniray.remote
    def parent(path: Path) -> None:
        mark.remote(path)

    miniray.get(parent.remote(tmp_path / "done"))
    wait_until((tmp_path / "done").exists)
