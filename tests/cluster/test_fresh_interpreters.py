"""Workers with accelerators whose variable may be read before user code runs: new interpreters,
which are otherwise like all workers."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from cluster_helpers import is_alive, wait_until

import miniray
from miniray.cluster_utils import Cluster, Node
from miniray.system.boot_options import BootOptions
from miniray.system.launch import launch

if TYPE_CHECKING:
    from collections.abc import Iterator

#: Options of a task, and what its variables are.
FAMILIES: dict[str, tuple[dict[str, Any], dict[str, str]]] = {
    "TPU": (
        {"resources": {"TPU": 1}},
        {"TPU_VISIBLE_CHIPS": "0", "TPU_CHIPS_PER_HOST_BOUNDS": "1,1,1"},
    ),
    "Neuron": ({"resources": {"neuron_cores": 2}}, {"NEURON_RT_VISIBLE_CORES": "0,1"}),
    "Gaudi": ({"resources": {"HPU": 1}}, {"HABANA_VISIBLE_MODULES": "0"}),
    "Ascend": ({"resources": {"NPU": 0.5}}, {"ASCEND_RT_VISIBLE_DEVICES": "0"}),
    "AMD": ({"num_gpus": 0.5, "resources": {"amd": 1}}, {"ROCR_VISIBLE_DEVICES": "0"}),
    "custom": ({"resources": {"FPGA": 2}}, {"FPGAS": "0,1"}),
}


@pytest.fixture(scope="module", autouse=True)
def nodes(session_root: Path) -> Iterator[Cluster]:
    """A node with logical devices of many families, and one with GPUs of AMD."""
    del session_root
    resources = {
        "TPU": 4,
        "neuron_cores": 2,
        "HPU": 1,
        "NPU": 1,
        "FPGA": {"count": 2, "env": "FPGAS"},
        "PLAIN": {"count": 1},
        "first": 100,
    }
    with pytest.MonkeyPatch.context() as patch:
        for _, variables in FAMILIES.values():
            for name in variables:
                patch.delenv(name, raising=False)
        patch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
        cluster = Cluster(
            initialize_head=True,
            connect=True,
            head_node_args={"num_cpus": 4, "num_gpus": 1, "resources": resources},
        )
        other = gpu_node(cluster, "amd")
        yield cluster
        other.stop()
        cluster.shutdown()


def gpu_node(cluster: Cluster, family: str) -> Node:
    """A further node with two logical GPUs of a family."""
    options = BootOptions(
        head=False,
        address=cluster.address,
        token=cluster.token,
        num_cpus=2,
        num_gpus=2,
        gpu_family=family,
        resources={family: 100},
        parent_pid=os.getpid(),
    )
    return Node(launch(options))


def at_start() -> dict[str, str]:
    """The environment with which the program of this process was started."""
    items = Path("/proc/self/environ").read_bytes().split(b"\0")
    return dict(item.decode().split("=", 1) for item in items if item)


def look(names: list[str]) -> tuple[list[str | None], list[str | None], int]:
    """Values at the program's start, and now; and the pid."""
    start = at_start()
    return [start.get(n) for n in names], [os.environ.get(n) for n in names], os.getpid()


@miniray.remote(num_cpus=0)
class Holder:
    def look(self, names: list[str]) -> tuple[list[str | None], list[str | None], int]:
        return look(names)

    def say(self, text: str) -> None:
        print(text)

    def start_child(self) -> int:
        """A process that hides: a session of its own, and nothing of its parent's environment."""
        child = subprocess.Popen(
            [sys.executable, "-c", "import time; time.sleep(1000)"],
            env={},
            start_new_session=True,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        return child.pid


@pytest.mark.parametrize("family", FAMILIES)
def test_the_variable_is_set_before_the_interpreter_starts(family: str) -> None:
    options, variables = FAMILIES[family]
    task = miniray.remote(num_cpus=0)(look).options(**options)
    start, now, _ = miniray.get(task.remote(list(variables)), timeout=60)
    assert start == list(variables.values())
    assert now == start


@pytest.mark.parametrize(
    ("options", "variable"),
    [({"num_gpus": 1}, "CUDA_VISIBLE_DEVICES"), ({"resources": {"PLAIN": 1}}, "FPGAS")],
    ids=["CUDA", "a device without a variable"],
)
def test_other_workers_are_forked(options: dict[str, Any], variable: str) -> None:
    options = {"resources": {"first": 1}, **options}
    task = miniray.remote(num_cpus=0)(look).options(**options)
    start, now, _ = miniray.get(task.remote([variable, "MINIRAY_WORKER_ID"]), timeout=60)
    assert start == [None, None]
    assert now[0] == ("0" if variable == "CUDA_VISIBLE_DEVICES" else None)
    assert now[1] is not None


def test_what_it_prints_reaches_the_driver(capfd: pytest.CaptureFixture[str]) -> None:
    holder = Holder.options(resources={"TPU": 1}).remote()
    miniray.get(holder.say.remote("said on a TPU"), timeout=60)
    printed: list[str] = []

    def shown() -> bool:
        printed.extend(capfd.readouterr())
        return any("(Holder" in line and "said on a TPU" in line for line in printed)

    wait_until(shown, told=lambda: printed)


def test_its_device_is_free_when_its_children_are_gone() -> None:
    names = ["TPU_VISIBLE_CHIPS"]
    first = Holder.options(resources={"TPU": 4}).remote()
    _, _, pid = miniray.get(first.look.remote(names), timeout=60)
    child = miniray.get(first.start_child.remote())

    @miniray.remote(num_cpus=0, resources={"TPU": 4})
    def left() -> list[int]:
        return [each for each in (pid, child) if is_alive(each)]

    waiting = left.remote()
    miniray.kill(first)
    assert miniray.get(waiting, timeout=60) == []


def test_it_ends_with_its_daemon(nodes: Cluster) -> None:
    node = nodes.add_node(num_cpus=1, resources={"TPU": 4, "doomed": 1})
    holder = Holder.options(resources={"TPU": 1, "doomed": 1}).remote()
    _, _, pid = miniray.get(holder.look.remote([]), timeout=60)
    child = miniray.get(holder.start_child.remote())
    nodes.remove_node(node, allow_graceful=False)
    wait_until(lambda: not is_alive(pid) and not is_alive(child))


def test_a_file_in_the_folder_of_the_daemon_is_not_taken_for_miniray(
    nodes: Cluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "miniray.py").write_text("raise SystemExit('the wrong one')")
    monkeypatch.chdir(tmp_path)
    node = nodes.add_node(num_cpus=1, resources={"HPU": 1, "elsewhere": 1})
    task = miniray.remote(num_cpus=0)(look).options(resources={"HPU": 1, "elsewhere": 1})
    assert miniray.get(task.remote(["HABANA_VISIBLE_MODULES"]), timeout=60)[0] == ["0"]
    nodes.remove_node(node)


def test_a_worker_that_is_kept_serves_the_next_task() -> None:
    task = miniray.remote(num_cpus=0, max_calls=0)(look).options(resources={"FPGA": 2})
    pids = {miniray.get(task.remote([]), timeout=60)[2] for _ in range(3)}
    assert len(pids) == 1
