"""Nodes that join, leave, and die with what runs on them; calls between nodes."""

from __future__ import annotations

import os
import signal
import subprocess
import sysconfig
import threading
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from cluster_helpers import count_up, wait_for_file, wait_until

import miniray
from miniray.cluster_utils import Cluster
from miniray.exceptions import ActorDiedError, DeathCause, RayActorError, WorkerCrashedError
from miniray.util.placement_group import (
    placement_group,
    placement_group_table,
    remove_placement_group,
)
from miniray.util.scheduling_strategies import (
    NodeAffinitySchedulingStrategy,
    PlacementGroupSchedulingStrategy,
)
from miniray.util.state import list_pending_demands

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from miniray.cluster_utils import Node

KIB, MIB = 1024, 1024 * 1024


@pytest.fixture(scope="module")
def nodes(session_root: Path) -> Iterator[Cluster]:
    """A head node, and one with the resource ``far``."""
    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 4})
    cluster.add_node(num_cpus=4, resources={"far": 100})
    cluster.wait_for_nodes()
    assert not miniray.is_initialized(), "a program that waits for nodes need not be attached"
    miniray.init(address=cluster.address)
    cluster.wait_for_nodes()
    yield cluster
    miniray.shutdown()
    cluster.shutdown()


@pytest.fixture
def third(nodes: Cluster) -> Iterator[Node]:
    """A node for one test, with the resource ``third``, that it may kill."""
    node = nodes.add_node(num_cpus=2, resources={"third": 100})
    wait_until(lambda: miniray.cluster_resources().get("third") == 100)
    yield node
    if node in nodes.worker_nodes:
        nodes.remove_node(node)
    wait_until(lambda: "third" not in miniray.cluster_resources())


pytestmark = pytest.mark.usefixtures("nodes")


def kill(node: Node) -> None:
    """The machine loses power."""
    os.kill(node.pids["node"], signal.SIGKILL)
    node.stop(graceful=False)


def softly_on(node: Node) -> dict[str, Any]:
    """Options of what runs there as long as that node lives."""
    return {"scheduling_strategy": NodeAffinitySchedulingStrategy(node.node_id, soft=True)}


@miniray.remote(num_cpus=0)
class Actor:
    def __init__(self) -> None:
        self.log: list[Any] = []

    def node(self) -> str:
        return miniray.get_runtime_context().get_node_id()

    def pid(self) -> int:
        return os.getpid()

    def note(self, value: Any) -> int:
        self.log.append(value)
        return len(self.log)

    def noted(self) -> list[Any]:
        return self.log

    def length(self, value: bytes) -> int:
        return len(value)

    def stand_still(self) -> None:
        os.kill(os.getpid(), signal.SIGSTOP)

    def wait_for(self, path: Path) -> str:
        wait_for_file(path)
        return self.node()


FarActor = Actor.options(resources={"far": 1})


# --- deaths ----------------------------------------------------------------------------
def test_calls_of_an_actor_fail_with_its_node(third: Node, tmp_path: Path) -> None:
    actor = Actor.options(resources={"third": 1}).remote()
    assert miniray.get(actor.node.remote()) == third.node_id
    calls = [actor.wait_for.remote(tmp_path / "never"), *(actor.note.remote(n) for n in range(50))]
    kill(third)
    for call in calls:
        with pytest.raises(ActorDiedError) as info:
            miniray.get(call, timeout=30)
        assert info.value.cause is DeathCause.NODE_LOST
    with pytest.raises(ActorDiedError):
        miniray.get(actor.note.remote(0), timeout=30)


def test_an_actor_restarts_elsewhere_while_it_is_called(third: Node) -> None:
    actor = Actor.options(max_restarts=1, max_task_retries=-1, **softly_on(third)).remote()
    assert miniray.get(actor.node.remote()) == third.node_id
    calls = [actor.note.remote(n) for n in range(200)]
    kill(third)
    calls += [actor.note.remote(n) for n in range(200, 400)]
    assert len(miniray.get(calls, timeout=30)) == 400
    assert miniray.get(actor.node.remote()) != third.node_id
    noted = miniray.get(actor.noted.remote())
    assert noted == sorted(noted)


def test_tasks_of_a_node_that_dies_run_again(third: Node, tmp_path: Path) -> None:
    go = tmp_path / "go"

    @miniray.remote(num_cpus=1, max_retries=1)
    def work(n: int) -> tuple[int, str]:
        count_up(tmp_path / str(n))
        if miniray.get_runtime_context().get_node_id() == doomed:
            wait_for_file(go)
        return n, miniray.get_runtime_context().get_node_id()

    doomed = third.node_id
    refs = [work.options(**softly_on(third)).remote(n) for n in range(2)]
    wait_until(lambda: all((tmp_path / str(n)).exists() for n in range(2)))
    kill(third)
    results = miniray.get(refs, timeout=30)
    assert [n for n, _ in results] == [0, 1]
    assert doomed not in {node for _, node in results}


def test_a_task_that_may_not_run_again_fails_with_its_node(third: Node, tmp_path: Path) -> None:
    @miniray.remote(num_cpus=0, resources={"third": 1}, max_retries=0)
    def work() -> None:
        count_up(tmp_path / "began")
        wait_for_file(tmp_path / "never")

    ref = work.remote()
    wait_for_file(tmp_path / "began")
    kill(third)
    with pytest.raises(WorkerCrashedError):
        miniray.get(ref, timeout=30)


def test_a_driver_call_from_a_dying_actor_does_not_end_the_one_called(third: Node) -> None:
    target = FarActor.remote()
    pid = miniray.get(target.pid.remote())
    caller = Actor.options(resources={"third": 1}).remote()

    @miniray.remote(num_cpus=0, resources={"third": 1}, max_retries=0)
    def call_on() -> None:
        while True:
            miniray.get(target.note.remote("x"))

    ref = call_on.remote()
    wait_until(lambda: len(miniray.get(target.noted.remote())) > 10)
    kill(third)
    with pytest.raises(WorkerCrashedError):
        miniray.get(ref, timeout=30)
    with pytest.raises(RayActorError):
        miniray.get(caller.pid.remote(), timeout=30)
    assert miniray.get(target.pid.remote()) == pid


def test_a_placement_group_is_placed_again_when_a_node_of_it_dies(
    nodes: Cluster, third: Node
) -> None:
    group = placement_group([{"third": 1}, {"far": 1}], strategy="SPREAD")
    assert group.wait(30)
    actor = Actor.options(
        scheduling_strategy=PlacementGroupSchedulingStrategy(group, 0), max_restarts=1,
        max_task_retries=-1,
    ).remote()  # fmt: skip
    assert miniray.get(actor.node.remote()) == third.node_id
    kill(third)
    wait_until(lambda: placement_group_table(group)["state"] == "RESCHEDULING")
    other = nodes.add_node(num_cpus=1, resources={"third": 100})
    wait_until(lambda: placement_group_table(group)["state"] == "CREATED")
    assert miniray.get(actor.node.remote(), timeout=30) == other.node_id
    remove_placement_group(group)
    nodes.remove_node(other)


def test_an_actor_that_was_killed_stays_dead_when_its_node_dies(third: Node) -> None:
    actor = Actor.options(resources={"third": 1}, max_restarts=-1).remote()
    miniray.get(actor.pid.remote())
    os.kill(third.pids["node"], signal.SIGSTOP)  # it never hears that the actor is to end
    miniray.kill(actor)
    kill(third)
    wait_until(lambda: "third" not in miniray.cluster_resources())
    with pytest.raises(ActorDiedError) as info:
        miniray.get(actor.pid.remote(), timeout=30)
    assert info.value.cause is DeathCause.KILLED


# --- joining and leaving ------------------------------------------------------------------
def test_what_waits_for_a_node_runs_as_soon_as_it_joins(nodes: Cluster) -> None:
    actor = Actor.options(resources={"new": 1}).remote()
    task = miniray.remote(num_cpus=0, resources={"new": 1})(os.getpid).remote()
    assert miniray.wait([actor.pid.remote(), task], timeout=0.2)[0] == []
    added = nodes.add_node(num_cpus=1, resources={"new": 2})
    assert miniray.get(actor.node.remote(), timeout=10) == added.node_id
    assert miniray.get(task, timeout=10) > 0
    nodes.remove_node(added)


def test_a_drained_node_finishes_what_it_runs_and_gets_nothing_new(
    nodes: Cluster, third: Node
) -> None:
    def drain(*args: str) -> str:
        miniray_command = os.path.join(sysconfig.get_path("scripts"), "miniray")
        command = [miniray_command, "drain", third.node_id[:12], *args, "--address", nodes.address]
        return subprocess.run(command, check=True, capture_output=True, text=True).stdout

    there = Actor.options(resources={"third": 1})
    first = there.remote()
    pid = miniray.get(first.pid.remote())

    @miniray.remote(num_cpus=0, resources={"third": 0.01})
    def short() -> None:
        """Runs on a lease that its driver has there."""

    miniray.get([short.remote() for _ in range(100)], timeout=30)
    assert "Nothing new is placed" in drain()
    # Its driver hears a moment later that it is to give that lease back.
    wait_until(lambda: miniray.wait([short.remote()], timeout=0.5)[0] == [])
    assert miniray.get(first.pid.remote(), timeout=30) == pid
    softly = Actor.options(**softly_on(third)).remote()
    assert miniray.get(softly.node.remote(), timeout=30) != third.node_id
    waits = there.remote().pid.remote()
    assert miniray.wait([waits], timeout=0.5)[0] == []
    assert all("is draining" in demand["reason"] for demand in list_pending_demands())
    miniray.kill(first)
    assert "Nothing runs there any more." in drain("--wait", "--timeout", "30")
    assert "in service again" in drain("--undo")
    assert miniray.get(waits, timeout=30) != pid


def test_a_node_that_is_removed_ends_its_processes(nodes: Cluster) -> None:
    added = nodes.add_node(num_cpus=1, resources={"new": 2})
    wait_until(lambda: miniray.cluster_resources().get("new") == 2)
    actor = Actor.options(resources={"new": 1}).remote()
    pid = miniray.get(actor.pid.remote())
    nodes.remove_node(added)
    wait_until(lambda: not os.path.exists(f"/proc/{pid}"))
    wait_until(lambda: "new" not in miniray.cluster_resources())
    [row] = [n for n in miniray.nodes() if n["NodeID"] == added.node_id]
    assert not row["Alive"]
    assert row["DeathReasonMessage"]


def test_six_nodes_work_together(nodes: Cluster) -> None:
    added = [nodes.add_node(num_cpus=1, resources={f"node{n}": 2}) for n in range(4)]
    nodes.wait_for_nodes()
    actors = [Actor.options(resources={f"node{n}": 1}).remote() for n in range(4)]
    places = miniray.get([actor.node.remote() for actor in actors], timeout=60)
    assert places == [node.node_id for node in added]
    value = miniray.put(np.ones(MIB, dtype=np.uint8))

    @miniray.remote(num_cpus=0)
    def ask_all(others: list[Any], ref: list[Any]) -> int:
        return sum(miniray.get([other.length.remote(ref[0]) for other in others]))

    asked = [ask_all.options(resources={f"node{n}": 1}).remote(actors, [value]) for n in range(4)]
    assert miniray.get(asked, timeout=60) == [4 * MIB] * 4
    for node in added[:2]:
        kill(node)
    for node in added:
        nodes.remove_node(node)
    nodes.wait_for_nodes()
    assert miniray.get(FarActor.remote().note.remote(1)) == 1


# --- calls between nodes ------------------------------------------------------------------------
def test_ten_thousand_calls_to_another_node_keep_their_order() -> None:
    actor = FarActor.remote()
    calls = [actor.note.remote(n) for n in range(10_000)]
    assert miniray.get(calls) == list(range(1, 10_001))
    assert miniray.get(actor.noted.remote()) == list(range(10_000))


def test_calls_of_all_sizes_to_another_node_keep_their_order() -> None:
    actor = FarActor.remote()
    sizes = [(n * 7919) % (90 * KIB) for n in range(400)]
    assert miniray.get([actor.length.remote(bytes(size)) for size in sizes]) == sizes


def test_an_actor_that_stands_still_does_not_hold_up_its_neighbours(nodes: Cluster) -> None:
    still, lively = FarActor.remote(), FarActor.remote()
    pid = miniray.get(still.pid.remote())
    miniray.get(lively.pid.remote())
    still.stand_still.remote()
    daemons = [node.pids["node"] for node in nodes.list_all_nodes()]
    before = sum(map(resident_bytes, daemons))
    block = bytes(90 * KIB)
    waiting = [still.length.remote(block) for _ in range(3000)]  # 264 MiB
    assert miniray.get([lively.length.remote(block) for _ in range(100)], timeout=30)
    # What it does not take waits at the caller: the daemons hold no more than a window.
    assert sum(map(resident_bytes, daemons)) - before < 160 * MIB
    os.kill(pid, signal.SIGCONT)
    assert miniray.get(waiting, timeout=60) == [len(block)] * 3000


def resident_bytes(pid: int) -> int:
    with open(f"/proc/{pid}/statm") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def test_two_actors_of_two_nodes_may_send_each_other_much_at_once() -> None:
    near, far = Actor.remote(), FarActor.remote()

    def flood(_self: Any, other: Any, count: int) -> int:
        block = bytes(90 * KIB)
        return sum(miniray.get([other.length.remote(block) for _ in range(count)]))

    # Each runs a flood in a task of its own node, so that the actors stay free to answer.
    @miniray.remote(num_cpus=0)
    def from_here(other: Any) -> int:
        return flood(None, other, 400)

    here = from_here.remote(far)
    there = from_here.options(resources={"far": 1}).remote(near)
    assert miniray.get([here, there], timeout=60) == [400 * 90 * KIB] * 2


def test_a_node_that_stands_still_for_a_while_loses_nothing(nodes: Cluster) -> None:
    actor = FarActor.remote()
    miniray.get(actor.pid.remote())
    daemon = nodes.worker_nodes[0].pids["node"]
    os.kill(daemon, signal.SIGSTOP)
    timer = threading.Timer(1.0, os.kill, (daemon, signal.SIGCONT))
    timer.start()
    assert miniray.get([actor.note.remote(n) for n in range(100)], timeout=30)[-1] == 100
    timer.join()
