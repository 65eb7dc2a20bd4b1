"""Work that goes on while workers, actors and whole nodes are killed around it."""

from __future__ import annotations

import contextlib
import os
import random
import signal
import subprocess
import sys
import threading
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from cluster_helpers import is_alive, wait_until
from running_cluster import running_cluster

import miniray
from miniray.exceptions import RayActorError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from miniray.cluster_utils import Cluster, Node

MIB = 1024 * 1024


@pytest.fixture(scope="module")
def nodes(session_root: Path) -> Iterator[Cluster]:
    """Two nodes that tell often what they store."""
    with running_cluster(
        {"num_cpus": 2},
        {"num_cpus": 2, "resources": {"far": 100}},
        variables={"MINIRAY_HEARTBEAT_INTERVAL": "0.05"},
    ) as cluster:
        yield cluster


pytestmark = pytest.mark.usefixtures("nodes")


def stores_are_empty() -> bool:
    return not any(n["ObjectStoreUsed"] for n in miniray.nodes() if n["Alive"])


def kill(node: Node) -> None:
    """The machine loses power."""
    os.kill(node.pids["node"], signal.SIGKILL)
    node.stop(graceful=False)


class Now_and_then:
    """Calls something again and again in a thread while the block runs."""

    def __init__(self, action: Callable[[], None], every: float) -> None:
        self._action = action
        self._every = every
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._run)

    def _run(self) -> None:
        while not self._over.wait(self._every):
            self._action()

    def __enter__(self) -> None:
        self._thread.start()

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._thread.join()


def workers() -> list[int]:
    """Pids of the workers that run."""
    from miniray.common.runtime import current_runtime

    rows = current_runtime().head.head_call("state", "workers")
    return [row["pid"] for row in rows if row["kind"] == "worker" and is_alive(row["pid"])]


@miniray.remote(num_cpus=0, max_restarts=-1, max_task_retries=-1)
class Squares:
    def of(self, n: int) -> int:
        return n * n

    def pid(self) -> int:
        return os.getpid()


def test_tasks_finish_while_their_workers_are_killed() -> None:
    @miniray.remote(max_retries=-1)
    def square(n: int) -> tuple[int, Any]:
        return n * n, np.full(MIB // 8, n % 251, dtype=np.uint8)

    refs: list[Any] = []
    killed: list[int] = []
    before = 0

    def kill_one() -> None:
        """The next worker is killed when something was done after the last one was."""
        nonlocal before
        asked = list(refs)
        done = len(miniray.wait(asked, num_returns=len(asked), timeout=0, fetch_local=False)[0])
        found = workers()
        if found and done != before:
            before = done
            with contextlib.suppress(ProcessLookupError):  # it has ended by itself
                killed.append(random.choice(found))
                os.kill(killed[-1], signal.SIGKILL)

    refs.append(miniray.put(0))
    with Now_and_then(kill_one, every=0.1):
        for _ in range(2):
            refs[:] = [square.remote(n) for n in range(150)]
            results = miniray.get(list(refs), timeout=60)
            assert [value for value, _ in results] == [n * n for n in range(150)]
            assert all((array == n % 251).all() for n, (_, array) in enumerate(results))
            del results
    assert killed
    refs.clear()
    wait_until(stores_are_empty)


@pytest.mark.parametrize("resources", [{}, {"far": 1}], ids=["here", "elsewhere"])
def test_calls_are_answered_while_their_actor_is_killed_and_restarts(resources: Any) -> None:
    actor = Squares.options(resources=resources).remote()
    for _ in range(4):
        pid = miniray.get(actor.pid.remote(), timeout=30)
        calls = [actor.of.remote(n) for n in range(300)]
        os.kill(pid, signal.SIGKILL)
        calls += [actor.of.remote(n) for n in range(300, 400)]
        assert miniray.get(calls, timeout=30) == [n * n for n in range(400)]


def test_a_pipeline_of_large_values_survives_nodes_that_come_and_die(nodes: Cluster) -> None:
    @miniray.remote(num_cpus=0.5, max_retries=-1, scheduling_strategy="SPREAD")
    def make(n: int) -> Any:
        return np.full(MIB, n, dtype=np.uint8)

    @miniray.remote(num_cpus=0.5, max_retries=-1, scheduling_strategy="SPREAD")
    def add(left: Any, right: Any) -> Any:
        return left + right

    for round in range(3):
        doomed = nodes.add_node(num_cpus=4)
        wait_until(lambda: miniray.cluster_resources()["CPU"] == 8)
        level = [make.remote(n) for n in range(16)]
        while len(level) > 1:
            level = [add.remote(*pair) for pair in zip(level[::2], level[1::2], strict=True)]
            if len(level) == 2**round:
                miniray.wait(level, fetch_local=False)
                kill(doomed)
        total = miniray.get(level[0], timeout=60)
        assert (total == sum(range(16))).all()
        nodes.remove_node(doomed)
        wait_until(lambda: miniray.cluster_resources()["CPU"] == 4)
        del total, level
    wait_until(stores_are_empty)


def test_a_reader_killed_while_it_fetches_leaves_nothing(nodes: Cluster) -> None:
    @miniray.remote(num_cpus=0, resources={"far": 1})
    class Reader:
        def pid(self) -> int:
            return os.getpid()

        def read(self, refs: list[Any]) -> int:
            return int(miniray.get(refs[0]).sum())

    for _ in range(3):
        reader = Reader.remote()
        pid = miniray.get(reader.pid.remote())
        ref = miniray.put(np.ones(64 * MIB, dtype=np.uint8))
        reading = reader.read.remote([ref])
        miniray.wait([reading], timeout=0.02)
        os.kill(pid, signal.SIGKILL)
        try:
            assert miniray.get(reading, timeout=30) == 64 * MIB
        except RayActorError:
            pass
        del ref, reading
    wait_until(stores_are_empty)


SCRIPT = """
import os, signal, sys, threading
import miniray
from miniray.cluster_utils import Cluster

@miniray.remote
def wait_for_ever():
    threading.Event().wait()

@miniray.remote
class Idle:
    def wait_for_ever(self):
        threading.Event().wait()

cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 4})
miniray.init(address=cluster.address)
refs = [wait_for_ever.remote(), Idle.remote().wait_for_ever.remote()]
miniray.wait(refs, timeout=0.5)
os.kill(cluster.head_node.pids["node"], signal.SIGKILL)
for ref in refs:
    try:
        miniray.get(ref, timeout=20)
    except miniray.exceptions.GetTimeoutError:
        sys.exit("it hangs")
    except miniray.exceptions.LocalRayletDiedError as error:
        print(type(error).__name__)
miniray.shutdown()
cluster.shutdown()
"""


def test_a_driver_whose_own_daemon_is_killed_gets_errors(session_root: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT], capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == ["NodeDiedError", "NodeDiedError"]


VALUES = """
import os, signal, time
import numpy as np
import miniray
from miniray.cluster_utils import Cluster

cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 2})
miniray.init(address=cluster.address)
small, seen, unseen = (miniray.put(np.ones(n, dtype=np.uint8)) for n in (10, 1 << 20, 1 << 20))
view = miniray.get(seen)
os.kill(cluster.head_node.pids["node"], signal.SIGKILL)

def attempt(name, work):
    begin = time.monotonic()
    try:
        print(name, work())
    except miniray.exceptions.MinirayError as error:
        print(name, type(error).__name__)
    assert time.monotonic() - begin < 30, name

attempt("view", lambda: view.sum())
attempt("seen", lambda: miniray.get(seen).sum())
attempt("small", lambda: miniray.get(small).sum())
attempt("unseen", lambda: miniray.get(unseen).sum())
attempt("put", lambda: miniray.put(np.ones(1 << 20)))
del view, seen, small, unseen
miniray.shutdown()
cluster.shutdown()
"""


def test_values_that_a_driver_has_stay_readable_when_its_daemon_is_killed(
    session_root: Path,
) -> None:
    done = subprocess.run(
        [sys.executable, "-c", VALUES], capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 0, done.stderr
    found = dict(line.split() for line in done.stdout.splitlines())
    assert (found["view"], found["seen"], found["small"]) == (str(1 << 20), str(1 << 20), "10")
    assert found["unseen"] in {"ObjectLostError", "NodeDiedError"}
    assert found["put"] == "NodeDiedError"
