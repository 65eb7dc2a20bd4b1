"""Several times what their stores hold moves between two nodes at once, and nobody starves."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from cluster_helpers import wait_until
from running_cluster import running_cluster

import miniray

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from miniray.cluster_utils import Cluster

MIB = 1024 * 1024
VALUE = MIB
#: Each node's store: eight values.
CAPACITY = 8 * VALUE
#: Seconds that everything takes on a busy machine; who waits for memory in vain takes longer.
LONG = 50


@pytest.fixture(scope="module")
def nodes(session_root: Path) -> Iterator[Cluster]:
    """A head node, and one with a resource, that tell often what they store."""
    small = {"num_cpus": 4, "object_store_memory": CAPACITY}
    with running_cluster(
        small,
        {**small, "resources": {"far": 100}},
        variables={"MINIRAY_HEARTBEAT_INTERVAL": "0.05"},
    ) as cluster:
        yield cluster


def stores_are_empty() -> bool:
    alive = [node for node in miniray.nodes() if node["Alive"]]
    return not any(node["ObjectStoreUsed"] + node["ObjectStoreSpilled"] for node in alive)


@pytest.fixture(autouse=True)
def nothing_is_left(nodes: Cluster) -> Iterator[None]:
    """Whatever a test does, memory and disk of both nodes are empty after it."""
    yield
    wait_until(stores_are_empty, timeout=20)


def value_of(number: int) -> Any:
    return np.full(VALUE // 8, number, dtype=np.int64)


@miniray.remote
def make(number: int) -> Any:
    return value_of(number)


@miniray.remote
def total_of(*values: Any) -> int:
    """The sum of what the values are made of, if each is whole."""
    assert all((value == value[0]).all() for value in values)
    return sum(int(value[0]) for value in values)


def picks(count: int, of: int, each: int) -> list[list[int]]:
    """Which values each of so many tasks reads: all are read, in no particular order."""
    return [[(start * 5 + step * 7) % of for step in range(each)] for start in range(count)]


def test_tasks_with_several_arguments_of_another_node_do_not_starve_each_other() -> None:
    """Four at a time need six values each, where eight fit, and none of them is there."""
    refs = [miniray.put(value_of(number)) for number in range(12)]
    far = total_of.options(resources={"far": 1})
    chosen = picks(16, 12, 6)
    sums = [far.remote(*(refs[pick] for pick in some)) for some in chosen]
    assert miniray.get(sums, timeout=LONG) == [sum(some) for some in chosen]


def test_three_times_the_stores_moves_both_ways_at_once() -> None:
    count = 3 * CAPACITY // VALUE
    far_away = {"far": 1}
    near = [miniray.put(value_of(number)) for number in range(count)]
    far = [make.options(resources=far_away).remote(number) for number in range(count)]
    failed: list[BaseException] = []

    def get_all() -> None:
        for number, ref in enumerate(far):
            assert (miniray.get(ref, timeout=LONG) == number).all()

    def put_and_get() -> None:
        mine = [miniray.put(value_of(number)) for number in range(count)]
        for number, ref in enumerate(mine):
            assert (miniray.get(ref, timeout=LONG) == number).all()

    def read(refs: list[Any], where: dict[str, float]) -> None:
        chosen = picks(count, count, 4)
        task = total_of.options(resources=where)
        sums = [task.remote(*(refs[pick] for pick in some)) for some in chosen]
        assert miniray.get(sums, timeout=LONG) == [sum(some) for some in chosen]

    def tried(work: Callable[[], None]) -> None:
        try:
            work()
        except BaseException as error:
            failed.append(error)

    steps = [get_all, put_and_get, lambda: read(near, far_away), lambda: read(far, {})]
    threads = [threading.Thread(target=tried, args=(work,)) for work in steps]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for error in failed:
        raise error


def test_a_node_reads_more_of_another_than_its_store_holds() -> None:
    """All of it at once, and it is dropped when its owner has dropped it."""

    @miniray.remote(num_cpus=0, resources={"far": 1})
    class Far:
        def read(self, refs: list[Any]) -> int:
            self.values = miniray.get(refs)
            return sum(int(value[-1]) for value in self.values)

        def again(self) -> int:
            return sum(int(value[0]) for value in self.values)

    count = 3 * CAPACITY // VALUE
    refs = [miniray.put(value_of(number)) for number in range(count)]
    far = Far.remote()
    assert miniray.get(far.read.remote(refs), timeout=LONG) == sum(range(count))
    large = miniray.put(np.full(CAPACITY // 10, 7, dtype=np.int64))
    assert miniray.get(total_of.options(resources={"far": 1}).remote(large), timeout=LONG) == 7
    del refs
    assert miniray.get(far.again.remote(), timeout=LONG) == sum(range(count))
