"""A node that is given up while it lives, and comes back with what runs on it."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from cluster_helpers import is_alive, wait_for_file, wait_until
from object_helpers import inventory
from running_cluster import running_cluster

import miniray
from miniray.util.placement_group import placement_group, remove_placement_group
from miniray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

if TYPE_CHECKING:
    from collections.abc import Iterator

    from miniray.cluster_utils import Cluster


@pytest.fixture(scope="module")
def nodes(session_root: Path) -> Iterator[Cluster]:
    """A head that gives a silent node up soon, and a node with the resource ``far``."""
    with running_cluster(
        {"num_cpus": 4},
        {"num_cpus": 4, "num_gpus": 1, "resources": {"far": 4}},
        variables={"MINIRAY_NODE_TIMEOUT": "3"},
    ) as cluster:
        yield cluster


@miniray.remote(num_cpus=0)
class Actor:
    def pid(self) -> int:
        return os.getpid()


def far_is_there() -> bool:
    return miniray.cluster_resources().get("far") == 4


def far_is_free() -> bool:
    free = miniray.available_resources()
    return free.get("far") == 4 and free.get("GPU") == 1


@pytest.mark.parametrize("removed", [False, True], ids=["group kept", "group removed"])
def test_a_node_comes_back_though_an_actor_in_a_placement_group_runs_there(
    nodes: Cluster, removed: bool
) -> None:
    group = placement_group([{"far": 1, "GPU": 1}])
    assert group.wait(30)
    there: Any = {
        "scheduling_strategy": PlacementGroupSchedulingStrategy(group),
        "num_gpus": 0.5,
    }
    lost = Actor.options(**there).remote()
    pid = miniray.get(lost.pid.remote())
    daemon = nodes.worker_nodes[0].pids["node"]
    os.kill(daemon, signal.SIGSTOP)
    try:
        wait_until(lambda: not far_is_there())
        if removed:
            remove_placement_group(group)
    finally:
        os.kill(daemon, signal.SIGCONT)
    wait_until(far_is_there)
    wait_until(lambda: not is_alive(pid))
    if not removed:
        assert group.wait(30)
        assert miniray.get(Actor.options(**there).remote().pid.remote(), timeout=30) != pid
        remove_placement_group(group)
    wait_until(far_is_free)


@miniray.remote(num_cpus=0, resources={"far": 1})
def copies_there() -> int:
    return int(inventory()["tables"]["copies"])


@pytest.mark.parametrize("freed", ["meanwhile", "later"])
def test_a_copy_on_a_node_that_comes_back_goes_with_its_value(nodes: Cluster, freed: str) -> None:
    @miniray.remote(num_cpus=0, resources={"far": 1})
    def read(value: bytes) -> int:
        return len(value)

    daemon = nodes.worker_nodes[0].pids["node"]
    value = miniray.put(bytes(1 << 20))
    assert miniray.get(read.remote(value)) == 1 << 20
    assert miniray.get(copies_there.remote()) == 1
    os.kill(daemon, signal.SIGSTOP)
    try:
        wait_until(lambda: not far_is_there())
        if freed == "meanwhile":
            del value
    finally:
        os.kill(daemon, signal.SIGCONT)
    wait_until(far_is_there)
    if freed == "later":
        assert miniray.get(copies_there.remote(), timeout=30) == 1
        del value
    wait_until(lambda: not miniray.get(copies_there.remote(), timeout=30))


@miniray.remote(num_cpus=0, resources={"far": 1})
def values_there() -> int:
    return sum(segment["size"] > 1 << 20 for segment in inventory()["segments"])


@miniray.remote(num_cpus=0, resources={"far": 1}, max_retries=0)
def make(size: int) -> bytes:
    return bytes(size)


@miniray.remote(num_cpus=0)
class Caller:
    """Owns what it has made on another node."""

    def __init__(self) -> None:
        self.results = [make.remote(2 << 20)]
        miniray.wait(self.results, fetch_local=False)

    def pid(self) -> int:
        return os.getpid()


@pytest.mark.parametrize("end", ["freed meanwhile", "freed later", "owner killed"])
def test_a_result_on_a_node_that_comes_back_goes_with_its_refs(nodes: Cluster, end: str) -> None:
    daemon = nodes.worker_nodes[0].pids["node"]
    caller = Caller.remote()
    owner = miniray.get(caller.pid.remote())
    result, kept = make.remote(2 << 20), make.remote(2 << 20)
    miniray.wait([result, kept], num_returns=2, fetch_local=False)
    assert miniray.get(values_there.remote()) == 3
    os.kill(daemon, signal.SIGSTOP)
    try:
        wait_until(lambda: not far_is_there())
        if end == "freed meanwhile":
            del result
        elif end == "owner killed":
            os.kill(owner, signal.SIGKILL)
            wait_until(lambda: not is_alive(owner))
    finally:
        os.kill(daemon, signal.SIGCONT)
    wait_until(far_is_there)
    if end == "freed later":
        assert miniray.get(values_there.remote(), timeout=30) == 3
        del result
    wait_until(lambda: miniray.get(values_there.remote(), timeout=30) == 2)
    assert miniray.get(kept) == bytes(2 << 20)


def test_a_head_that_hears_nobody_gives_nobody_up(nodes: Cluster) -> None:
    assert nodes.head_node is not None
    log = Path(nodes.head_node.session_dir) / "logs" / "head.log"
    actors = [Actor.remote(), Actor.options(resources={"far": 1}).remote()]
    pids = miniray.get([actor.pid.remote() for actor in actors])
    lost = log.read_text().count("is lost")
    daemons = [nodes.head_node.pids["node"], nodes.worker_nodes[0].pids["node"]]
    for daemon in daemons:
        os.kill(daemon, signal.SIGSTOP)
    try:
        wait_until(lambda: "no node was heard for 3 s" in log.read_text())
    finally:
        for daemon in daemons:
            os.kill(daemon, signal.SIGCONT)
    assert miniray.get([actor.pid.remote() for actor in actors], timeout=30) == pids
    assert log.read_text().count("is lost") == lost


OUTSIDE = """
import os, sys, time
from pathlib import Path
import miniray

def wait(folder, name):
    new = folder / f"new {name}"  # both may be repeated at the same time
    new.write_text(str(os.getpid()))
    new.rename(folder / name)
    while not (folder / "go").exists():
        time.sleep(0.01)
    return name

@miniray.remote(num_cpus=0, max_task_retries=-1)
class Waiter:
    def wait(self, folder, name):
        return wait(folder, name)

miniray.init(sys.argv[1])
folder = Path(sys.argv[2])
waiter = Waiter.options(name="waiter", lifetime="detached").remote()
calls = [waiter.wait.remote(folder, "actor")]
while not (folder / "actor").exists():
    time.sleep(0.01)
calls.append(miniray.remote(wait).remote(folder, "task"))
print(miniray.get(calls))
miniray.kill(waiter)
"""


def test_calls_of_a_driver_whose_node_was_given_up_are_repeated_when_it_is_back(
    nodes: Cluster, tmp_path: Path
) -> None:
    (tmp_path / "outside").mkdir()
    elsewhere = {"MINIRAY_TMPDIR": str(tmp_path / "outside"), "MINIRAY_TOKEN": nodes.token}
    driver = subprocess.Popen(
        [sys.executable, "-c", OUTSIDE, nodes.address, str(tmp_path)],
        env=os.environ | elsewhere,
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        wait_for_file(tmp_path / "task")
        worker = int((tmp_path / "task").read_text())
        children = Path(f"/proc/{driver.pid}/task/{driver.pid}/children").read_text().split()
        (daemon,) = map(int, children)
        os.kill(daemon, signal.SIGSTOP)
        try:
            wait_until(lambda: not is_alive(worker))
            (tmp_path / "go").touch()
        finally:
            os.kill(daemon, signal.SIGCONT)
        assert driver.communicate(timeout=40)[0].splitlines() == ["['actor', 'task']"]
    finally:
        driver.kill()
        driver.wait()
