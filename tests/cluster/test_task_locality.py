"""Tasks run where most of what they read is, if there is room."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from cluster_helpers import wait_for_file
from running_cluster import running_cluster

import miniray
from miniray.calls import task_groups
from miniray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

MIB = 1 << 20


@pytest.fixture(scope="module", autouse=True)
def cluster(session_root: Path) -> Iterator[None]:
    """A head node, and one with the resource ``far``."""
    with running_cluster({"num_cpus": 4}, {"num_cpus": 4, "resources": {"far": 100}}):
        yield


@pytest.fixture
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tasks wait for workers that take long to start, as on a busy machine.

    And for room: what a lease of an earlier test holds is free when its daemon has said so.
    """
    monkeypatch.setattr(task_groups, "SHORTEST", 30.0)
    monkeypatch.setattr(task_groups, "LONGEST", 30.0)
    monkeypatch.setattr(task_groups, "FULL_FOR", 0.0)


@miniray.remote
def where(*_arguments: Any) -> str:
    return miniray.get_runtime_context().get_node_id()


@miniray.remote(num_returns=2, num_cpus=0, resources={"far": 1})
def make_there(size: int) -> tuple[str, Any]:
    return miniray.get_runtime_context().get_node_id(), np.ones(size, dtype=np.uint8)


@miniray.remote
def hold_a_cpu(begun: Path, until: Path) -> None:
    begun.touch()
    wait_for_file(until)


def here() -> str:
    return miniray.get_runtime_context().get_node_id()


@pytest.mark.usefixtures("patient")
def test_a_task_runs_where_its_argument_is() -> None:
    far, value = make_there.remote(4 * MIB)
    assert miniray.get(where.remote(value)) == miniray.get(far)


@pytest.mark.usefixtures("patient")
def test_a_task_runs_where_an_argument_will_be_that_is_not_made_yet() -> None:
    far, value = make_there.remote(4 * MIB)
    ran = where.remote(value)
    assert miniray.get(ran) == miniray.get(far)


@pytest.mark.usefixtures("patient")
def test_a_task_runs_where_most_of_what_it_reads_is_whatever_lease_is_idle() -> None:
    far, value = make_there.remote(32 * MIB)
    there = miniray.get(far)
    mine = miniray.put(bytes(64 * MIB))
    small = miniray.put(bytes(4 * MIB))
    for _ in range(3):
        assert miniray.get(where.remote(value, small)) == there
        assert miniray.get(where.remote(value, mine)) == here()


@pytest.mark.usefixtures("patient")
def test_a_task_runs_where_an_earlier_one_has_brought_what_it_reads() -> None:
    far, value = make_there.remote(8 * MIB)
    there = miniray.get(far)
    mine = miniray.put(bytes(8 * MIB))
    bring = where.options(scheduling_strategy=NodeAffinitySchedulingStrategy(there, soft=False))
    assert miniray.get(bring.remote(mine)) == there
    assert miniray.get(where.remote(value, mine)) == there


@pytest.mark.usefixtures("patient")
def test_each_of_many_tasks_runs_where_its_argument_is() -> None:
    far, values = zip(*[make_there.remote(16 * MIB) for _ in range(4)], strict=True)
    there = set(miniray.get(list(far)))
    mine = [miniray.put(bytes(16 * MIB)) for _ in range(4)]
    refs = [where.remote(value) for pair in zip(values, mine, strict=True) for value in pair]
    assert {*miniray.get(refs[::2])} == there
    assert {*miniray.get(refs[1::2])} == {here()}


def test_a_task_runs_elsewhere_if_the_node_of_its_argument_is_full(tmp_path: Path) -> None:
    go = tmp_path / "go"
    far, value = make_there.remote(4 * MIB)
    there = miniray.get(far)
    strategy = NodeAffinitySchedulingStrategy(there, soft=False)
    hold = hold_a_cpu.options(scheduling_strategy=strategy)
    begun = [tmp_path / str(number) for number in range(4)]
    busy = [hold.remote(path, go) for path in begun]
    for path in begun:
        wait_for_file(path)
    assert miniray.get(where.remote(value), timeout=30) == here()
    go.touch()
    miniray.get(busy)


def test_a_chosen_place_counts_for_more_than_arguments() -> None:
    _, value = make_there.remote(4 * MIB)
    chosen = where.options(scheduling_strategy=NodeAffinitySchedulingStrategy(here(), soft=False))
    assert miniray.get(chosen.remote(value)) == here()
