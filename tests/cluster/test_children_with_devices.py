"""A device is free when all who had it are gone, however their driver ended.

Programs of their own are the drivers, and a locked file stands in for the device's memory: who
gets the device finds it locked as long as a process of before has it open. What Ray's users hit
is told in ray-project/ray issues 31451, 9528 and 2005.
"""

from __future__ import annotations

import fcntl
import os
import signal
import subprocess
import sys
from typing import TYPE_CHECKING

import pytest
from cluster_helpers import is_alive, wait_until
from unkillable import ALLOW_TRACING, Unkillable

import miniray
from miniray.cluster_utils import Cluster

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

#: A driver whose work has a device and a child that holds it; it prints their pids.
DRIVER = f"""
import fcntl, os, subprocess, sys, time
import miniray

HOLD = '''
import fcntl, sys, time
{ALLOW_TRACING}
file = open(sys.argv[1], "w")
fcntl.flock(file, fcntl.LOCK_EX)
print("held", flush=True)
time.sleep(1000)
'''

def start_child(path):
    child = subprocess.Popen(
        [sys.executable, "-c", HOLD, path], stdout=subprocess.PIPE, start_new_session=True, env={{}}
    )
    child.stdout.readline()
    return [os.getpid(), child.pid]

@miniray.remote(num_cpus=1, num_gpus=1)
class Trainer:
    def start_child(self, path):
        return start_child(path)
    def train(self):
        time.sleep(1000)

@miniray.remote(num_cpus=1, num_gpus=1, max_calls=0)
def task(path, told=None):
    pids = start_child(path)
    if told is not None:
        with open(told + ".part", "w") as file:
            print(*pids, file=file)
        os.rename(told + ".part", told)
        time.sleep(1000)
    return pids

@miniray.remote(num_cpus=1)
def idle():
    time.sleep(0.1)
    return os.getpid()

miniray.init(address=sys.argv[1], log_to_driver=False)
path = sys.argv[2]
"""
IN_ACTOR = """
trainer = Trainer.remote()
print(*miniray.get(trainer.start_child.remote(path)), flush=True)
miniray.get(trainer.train.remote())
"""
IN_TASK = """
told = path + ".pids"
running = task.remote(path, told)
while not os.path.exists(told):
    time.sleep(0.01)
print(open(told).read(), end="", flush=True)
miniray.get(running)
"""
#: Its worker is kept for the next task, with the child that the first one left.
IDLE = """
far = idle.options(num_cpus=0, resources={"far": 1})
pids = set(miniray.get([idle.remote() for _ in range(8)] + [far.remote() for _ in range(4)]))
print(*pids, *miniray.get(task.remote(path)), flush=True)
time.sleep(1000)
"""


@pytest.fixture(scope="module", autouse=True)
def nodes(session_root: Path) -> Iterator[Cluster]:
    """A node with one GPU, and another one; both go on when their drivers end."""
    del session_root
    cluster = Cluster(
        initialize_head=True, connect=True, head_node_args={"num_cpus": 4, "num_gpus": 1}
    )
    cluster.add_node(num_cpus=1, resources={"far": 2})
    yield cluster
    cluster.shutdown()


class Driver:
    """A program at work in a session of its own, as in a terminal."""

    def __init__(self, cluster: Cluster, source: str, lock: Path) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-c", DRIVER + source, cluster.address, str(lock)],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        assert line[:1].isdigit(), line + self._process.communicate(timeout=10)[0]
        #: Its workers; the last one is the child of user code.
        self.pids = [int(pid) for pid in line.split()]

    def end(self, number: int) -> None:
        """Ctrl-C (SIGINT to the group), or SIGKILL."""
        os.killpg(self._process.pid, number)
        self._process.communicate(timeout=60)


@miniray.remote(num_cpus=0, num_gpus=1)
class Next:
    """Gets the device after it."""

    def __init__(self, lock: str, pids: list[int]) -> None:
        self.alive = [pid for pid in pids if is_alive(pid)]
        with open(lock, "w") as file:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)

    def left(self) -> list[int]:
        return self.alive


ENDS = pytest.mark.parametrize("end", [signal.SIGINT, signal.SIGKILL], ids=["Ctrl-C", "SIGKILL"])


@ENDS
@pytest.mark.parametrize("source", [IN_ACTOR, IN_TASK], ids=["actor", "task"])
def test_a_device_is_not_handed_out_while_a_child_of_an_ended_driver_holds_it(
    nodes: Cluster, tmp_path: Path, source: str, end: signal.Signals
) -> None:
    lock = tmp_path / "device"
    driver = Driver(nodes, source, lock)
    *workers, child = driver.pids
    waiting = Next.remote(str(lock), driver.pids)
    with Unkillable(child):  # it takes as long to end as this test wants
        driver.end(end)
        wait_until(lambda: not any(map(is_alive, workers)))
        assert miniray.wait([waiting.left.remote()], timeout=0.3)[0] == []
    assert miniray.get(waiting.left.remote(), timeout=60) == []


@ENDS
def test_idle_workers_do_not_live_on_when_their_driver_ends(
    nodes: Cluster, tmp_path: Path, end: signal.Signals
) -> None:
    lock = tmp_path / "device"
    driver = Driver(nodes, IDLE, lock)
    assert len(driver.pids) >= 3
    assert all(map(is_alive, driver.pids))
    driver.end(end)
    wait_until(lambda: not any(map(is_alive, driver.pids)))
    following = Next.remote(str(lock), driver.pids)
    assert miniray.get(following.left.remote(), timeout=60) == []


def test_a_device_that_an_idle_worker_still_has_is_handed_out_after_it_is_gone(
    nodes: Cluster, tmp_path: Path
) -> None:
    """With ``max_calls=0`` a worker is kept with its device; the next job takes that from it."""
    lock = tmp_path / "device"
    driver = Driver(nodes, IDLE, lock)
    following = Next.remote(str(lock), driver.pids[-2:])
    assert miniray.get(following.left.remote(), timeout=60) == []
    driver.end(signal.SIGKILL)
