"""Processes that are killed while they, or others on their behalf, are being started."""

from __future__ import annotations

import contextlib
import json
import os
import signal
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from cluster_helpers import is_alive, wait_until
from running_cluster import running_cluster

import miniray

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from miniray.cluster_utils import Cluster, Node


# Nodes and heads start here one after the other, beside other tests.
pytestmark = [pytest.mark.slow, pytest.mark.timeout(180)]


@pytest.fixture(scope="module")
def nodes(session_root: Path) -> Iterator[Cluster]:
    with running_cluster({"num_cpus": 2}) as cluster:
        yield cluster


@pytest.fixture
def add_node(nodes: Cluster) -> Iterator[Callable[[], Node]]:
    """Adds nodes with the resource ``there``, which end with the test."""
    added: list[Node] = []

    def add() -> Node:
        added.append(nodes.add_node(num_cpus=1, resources={"there": 1}))
        return added[-1]

    yield add
    for node in added:
        nodes.remove_node(node)
    wait_until(lambda: "there" not in miniray.cluster_resources())


@miniray.remote(num_cpus=0, resources={"there": 1}, max_retries=0)
def task() -> str:
    return miniray.get_runtime_context().get_node_id()


def test_a_task_whose_worker_a_node_could_not_start_any_more_runs_on_another(
    add_node: Callable[[], Node],
) -> None:
    """The template is killed before it has forked the worker."""
    first = add_node()
    os.kill(first.pids["template"], signal.SIGSTOP)
    ref = task.remote()
    wait_until(lambda: "there" not in miniray.available_resources())
    os.kill(first.pids["template"], signal.SIGKILL)
    wait_until(lambda: "there" not in miniray.cluster_resources())
    second = add_node()
    assert miniray.get(ref, timeout=50) == second.node_id


def head_of(nodes: Cluster) -> int:
    """Pid of the head that serves."""
    root = Path(os.environ["MINIRAY_TMPDIR"])
    records = [json.loads(path.read_text()) for path in root.glob("miniray-*/clusters/*.json")]
    [head] = [record["processes"]["head"]["pid"] for record in records if record["is_head"]]
    return int(head)


def children(pid: int) -> set[int]:
    found: set[int] = set()
    for path in Path(f"/proc/{pid}/task").glob("*/children"):
        with contextlib.suppress(OSError):  # the thread has ended while we looked
            found.update(map(int, path.read_text().split()))
    return found


def has_open(pid: int, name: str) -> bool:
    """Whether a process has opened a file of this name."""
    for path in Path(f"/proc/{pid}/fd").iterdir():
        with contextlib.suppress(OSError):  # closed while we looked
            if path.readlink().name == name:
                return True
    return False


def heads_that_served() -> int:
    """How often a head of the cluster has said so in its log."""
    logs = Path(os.environ["MINIRAY_TMPDIR"]).glob("miniray-*/*/logs/head.log")
    return sum(log.read_text().count("the head listens") for log in logs)


def test_a_head_that_is_killed_before_it_serves_is_followed_by_another(
    nodes: Cluster, add_node: Callable[[], Node]
) -> None:
    assert nodes.head_node is not None
    node = nodes.head_node.pids["node"]
    first = head_of(nodes)
    before = children(node)
    os.kill(first, signal.SIGKILL)
    wait_until(lambda: children(node) - before)
    (second,) = children(node) - before
    os.kill(second, signal.SIGKILL)
    wait_until(lambda: not is_alive(second))
    wait_until(lambda: head_of(nodes) not in (first, second))
    there = add_node()
    assert miniray.get(task.remote(), timeout=50) == there.node_id


def test_a_head_that_is_killed_before_its_own_node_is_back_is_followed_by_another(
    nodes: Cluster,
) -> None:
    assert nodes.head_node is not None
    node = nodes.head_node.pids["node"]
    first = head_of(nodes)
    before, served = children(node), heads_that_served()
    os.kill(first, signal.SIGKILL)
    wait_until(lambda: children(node) - before)
    (second,) = children(node) - before
    wait_until(lambda: has_open(second, "head.log"))  # it has been told all that it needs
    os.kill(node, signal.SIGSTOP)
    try:
        wait_until(lambda: heads_that_served() > served)
        os.kill(second, signal.SIGKILL)
        wait_until(lambda: not is_alive(second))
    finally:
        os.kill(node, signal.SIGCONT)
    wait_until(lambda: heads_that_served() > served + 1)
    wait_until(lambda: head_of(nodes) not in (first, second))
    assert miniray.cluster_resources()["CPU"] == 2
