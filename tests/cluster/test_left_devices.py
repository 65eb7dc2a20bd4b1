"""Devices of a made-up machine that a process of an earlier node still has when a node starts."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from typing import TYPE_CHECKING, Any

import pytest
from accelerator_helpers import FakeMachine, add_nvidia
from cluster_helpers import is_alive, wait_until
from unkillable import ALLOW_TRACING, Unkillable, is_dying

import miniray
from miniray.cluster_utils import Cluster
from miniray.util.state import list_nodes

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path


@miniray.remote(num_cpus=0, num_gpus=1)
class Holder:
    def __init__(self) -> None:
        exec(ALLOW_TRACING)

    def pid(self) -> int:
        return os.getpid()

    def devices(self) -> str:
        return os.environ["CUDA_VISIBLE_DEVICES"]

    def start_child(self) -> int:
        code = f"{ALLOW_TRACING}; import time; print('ready', flush=True); time.sleep(1000)"
        child = subprocess.Popen(
            [sys.executable, "-c", code], stdout=subprocess.PIPE, text=True, start_new_session=True
        )
        assert child.stdout is not None
        assert child.stdout.readline() == "ready\n"
        return child.pid


@pytest.fixture(scope="module", autouse=True)
def nodes(session_root: Path) -> Iterator[Cluster]:
    """A cluster without GPUs, to which the machine with two comes again and again."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("MINIRAY_QUARANTINE_AFTER", "0.3")
        patch.setenv("MINIRAY_STOP_GRACE", "0.3")
        cluster = Cluster(
            initialize_head=True, connect=True, head_node_args={"num_cpus": 2, "num_gpus": 0}
        )
        yield cluster
        cluster.shutdown()
    assert list(session_root.glob("miniray-*/devices/*")) == []


@pytest.fixture(scope="module")
def machine(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Options of a node on it."""
    fake = FakeMachine(tmp_path_factory.mktemp("machine"))
    add_nvidia(fake, 2)
    return {"num_cpus": 2, "env_vars": {"MINIRAY_DEVICE_ROOT": str(fake.root)}}


def quarantined() -> list[dict[str, Any]]:
    return [each for node in list_nodes() if node.state == "ALIVE" for each in node.quarantined]


def gpus() -> float:
    return miniray.cluster_resources().get("GPU", 0)


@pytest.mark.parametrize("graceful", [True, False], ids=["stopped", "killed"])
def test_a_node_leaves_alone_what_a_process_of_an_earlier_one_has(
    nodes: Cluster, machine: dict[str, Any], graceful: bool
) -> None:
    first = nodes.add_node(**machine)
    holder = Holder.remote()
    pid = miniray.get(holder.pid.remote(), timeout=30)
    assert miniray.get(holder.devices.remote(), timeout=30) == "0"
    with Unkillable(pid):
        nodes.remove_node(first, allow_graceful=graceful)
        wait_until(lambda: gpus() == 0)
        second = nodes.add_node(**machine)
        wait_until(lambda: gpus() == 1)
        [found] = quarantined()
        assert (found["pids"], found["devices"]) == ([pid], {"GPU": ["0"]})
        assert found["names"] == ["Holder, of a node that is gone"]
        other = Holder.remote()
        assert miniray.get(other.devices.remote(), timeout=30) == "1"
    wait_until(lambda: gpus() == 2)
    assert not is_alive(pid)
    assert quarantined() == []
    third = Holder.remote()
    assert miniray.get(third.devices.remote(), timeout=30) == "0"
    nodes.remove_node(second)
    wait_until(lambda: gpus() == 0)


@pytest.mark.slow
def test_a_child_of_a_worker_is_ended_where_all_of_its_node_was_killed_at_once(
    nodes: Cluster, machine: dict[str, Any]
) -> None:
    """Nobody of the node could: the next one does, and waits for its end."""
    first = nodes.add_node(**machine)
    holder = Holder.remote()
    pid, child = miniray.get([holder.pid.remote(), holder.start_child.remote()], timeout=30)
    with Unkillable(child):
        every = {*first.pids.values(), pid}
        for number in (signal.SIGSTOP, signal.SIGKILL):
            for each in every:
                os.kill(each, number)
        wait_until(lambda: not any(map(is_alive, every)))
        assert is_alive(child)
        nodes.remove_node(first, allow_graceful=False)
        wait_until(lambda: gpus() == 0)
        second = nodes.add_node(**machine)
        wait_until(lambda: gpus() == 1)
        [found] = quarantined()
        assert (found["pids"], found["devices"]) == ([child], {"GPU": ["0"]})
        assert is_dying(child)
    wait_until(lambda: gpus() == 2)
    assert not is_alive(child)
    assert quarantined() == []
    nodes.remove_node(second)
    wait_until(lambda: gpus() == 0)


def test_nodes_that_run_at_the_same_time_share_the_machine(
    nodes: Cluster, machine: dict[str, Any]
) -> None:
    """It is the user who starts several there, as when each is restricted to other devices."""
    both = [nodes.add_node(**machine)]
    holder = Holder.remote()
    assert miniray.get(holder.devices.remote(), timeout=30) == "0"
    both.append(nodes.add_node(**machine))
    wait_until(lambda: gpus() == 4)
    assert quarantined() == []
    del holder
    for node in both:
        nodes.remove_node(node)
    wait_until(lambda: gpus() == 0)
