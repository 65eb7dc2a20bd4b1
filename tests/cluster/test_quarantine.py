"""Devices of processes that SIGKILL does not end: real processes, which the kernel holds on their
way out until the test lets them go."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from cluster_helpers import is_alive, wait_until
from unkillable import ALLOW_TRACING, Unkillable, is_dying

import miniray
from miniray.cluster_utils import Cluster
from miniray.exceptions import RayActorError, WorkerCrashedError
from miniray.util.state import list_nodes, list_pending_demands

if TYPE_CHECKING:
    from collections.abc import Iterator


@miniray.remote(num_cpus=1, num_gpus=1)
class Holder:
    """Has one of the two GPUs."""

    def __init__(self) -> None:
        exec(ALLOW_TRACING)

    def pid(self) -> int:
        return os.getpid()

    def devices(self) -> str:
        return os.environ["CUDA_VISIBLE_DEVICES"]

    def wait(self) -> None:
        time.sleep(1000)

    def start_thread(self) -> int:
        """Id by which the kernel knows it."""
        thread = threading.Thread(target=time.sleep, args=(1000,), daemon=True)
        thread.start()
        assert thread.native_id is not None
        return thread.native_id

    def crash(self) -> None:
        os._exit(1)

    def start_child(self) -> int:
        code = f"{ALLOW_TRACING}; import time; print('ready', flush=True); time.sleep(1000)"
        child = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
        assert child.stdout is not None
        assert child.stdout.readline() == "ready\n"
        return child.pid


@pytest.fixture(scope="module", autouse=True)
def nodes(session_root: Path) -> Iterator[Cluster]:
    """One node with two GPUs that gives a process up soon after it was killed."""
    del session_root
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("MINIRAY_QUARANTINE_AFTER", "0.3")
        patch.setenv("MINIRAY_STOP_GRACE", "0.3")
        patch.setenv("MINIRAY_PENDING_WARNING", "0.1")
        cluster = Cluster(
            initialize_head=True, connect=True, head_node_args={"num_cpus": 2, "num_gpus": 2}
        )
        yield cluster
        cluster.shutdown()


@pytest.fixture(autouse=True)
def _everything_is_back() -> Iterator[None]:
    yield
    # While a device is quarantined, it is in neither.
    wait_until(lambda: miniray.cluster_resources().get("GPU") == 2)
    wait_until(lambda: miniray.available_resources() == miniray.cluster_resources())
    assert quarantined() == []


def quarantined() -> list[dict[str, Any]]:
    [node] = [node for node in list_nodes() if node.state == "ALIVE"]
    return node.quarantined


def reasons() -> list[str]:
    return [demand.reason for demand in list_pending_demands()]


def test_a_device_is_quarantined_while_its_process_cannot_be_killed() -> None:
    holder = Holder.remote()
    pid = miniray.get(holder.pid.remote())
    node = list_nodes()[0].node_id[:8]
    with Unkillable(pid):
        running = holder.wait.remote()
        miniray.kill(holder)
        with pytest.raises(RayActorError):
            miniray.get(running, timeout=30)
        wait_until(quarantined)
        [found] = quarantined()
        assert is_dying(pid)
        assert (found["pids"], found["names"]) == ([pid], ["Holder"])
        assert found["devices"] == {"GPU": ["0"]}
        assert time.time() - 30 < found["since"] <= time.time()
        assert miniray.cluster_resources()["GPU"] == 1
        wait_until(lambda: miniray.available_resources()["CPU"] == 2)  # only the device is kept

        other = Holder.remote()
        assert miniray.get(other.devices.remote(), timeout=30) == "1"
        third = Holder.remote()
        why = f"GPU 0 of node {node} is quarantined: pid {pid} (Holder) could not be killed"
        wait_until(lambda: any(why in reason for reason in reasons()), told=reasons)
    assert miniray.get(third.devices.remote(), timeout=30) == "0"
    assert not is_alive(pid)
    assert quarantined() == []


def test_a_child_that_cannot_be_killed_keeps_the_device_of_its_worker() -> None:
    holder = Holder.remote()
    pid, child = miniray.get([holder.pid.remote(), holder.start_child.remote()])
    both = Holder.options(num_gpus=2).remote()
    with Unkillable(child):
        os.kill(pid, signal.SIGKILL)
        wait_until(quarantined)
        [found] = quarantined()
        assert (found["pids"], found["devices"]) == ([child], {"GPU": ["0"]})
        assert found["names"][0].startswith("python")
        assert not is_alive(pid)
        wait_until(lambda: any(f"pid {child} (python" in reason for reason in reasons()))
    assert miniray.get(both.devices.remote(), timeout=30) == "0,1"


def test_a_process_that_ends_by_itself_and_hangs_on_its_way_is_noticed() -> None:
    """One thread stays in the kernel, and keeps the files of the process open."""
    holder = Holder.remote()
    pid, thread = miniray.get([holder.pid.remote(), holder.start_thread.remote()])
    with Unkillable(thread):
        with pytest.raises(RayActorError):
            miniray.get(holder.crash.remote(), timeout=30)
        [found] = quarantined()
        assert (found["pids"], found["devices"]) == ([pid], {"GPU": ["0"]})
        other = Holder.remote()
        assert miniray.get(other.devices.remote(), timeout=30) == "1"
    wait_until(lambda: not quarantined())


def test_an_actor_restarts_on_another_device() -> None:
    holder = Holder.options(max_restarts=1).remote()
    pid = miniray.get(holder.pid.remote())
    with Unkillable(pid):
        miniray.kill(holder, no_restart=False)
        wait_until(quarantined)
        assert miniray.get(holder.devices.remote(), timeout=30) == "1"
    wait_until(lambda: not quarantined())


def test_a_task_whose_worker_cannot_be_killed_fails(tmp_path: Path) -> None:
    @miniray.remote(num_gpus=1, max_retries=0)
    def work() -> None:
        exec(ALLOW_TRACING)
        (tmp_path / "pid.part").write_text(str(os.getpid()))
        (tmp_path / "pid.part").rename(tmp_path / "pid")
        time.sleep(1000)

    running = work.remote()
    wait_until((tmp_path / "pid").exists)
    with Unkillable(int((tmp_path / "pid").read_text())):
        miniray.cancel(running, force=True)
        with pytest.raises((WorkerCrashedError, miniray.exceptions.TaskCancelledError)):
            miniray.get(running, timeout=30)
        wait_until(quarantined)
    wait_until(lambda: not quarantined())


@pytest.mark.parametrize("kind", ["task", "actor"])
def test_what_was_to_get_a_device_of_an_idle_worker_that_stays_goes_elsewhere(kind: str) -> None:
    @miniray.remote(num_cpus=0, num_gpus=1, max_calls=0)
    def work() -> int:
        exec(ALLOW_TRACING)
        return os.getpid()

    @miniray.remote(num_cpus=0, num_gpus=0.5)
    def devices() -> str:
        return os.environ["CUDA_VISIBLE_DEVICES"]

    pid = miniray.get(work.remote())
    with Unkillable(pid):
        wait_until(lambda: miniray.available_resources().get("GPU") == 2)  # it is idle
        if kind == "task":
            found = devices.remote()
        else:
            holder = Holder.remote()
            found = holder.devices.remote()
        assert miniray.get(found, timeout=30) == "1"
        assert [each["pids"] for each in quarantined()] == [[pid]]
    wait_until(lambda: not quarantined())


def test_the_driver_is_warned(capfd: pytest.CaptureFixture[str]) -> None:
    holder = Holder.remote()
    pid = miniray.get(holder.pid.remote())
    printed: list[str] = []

    def warned() -> bool:
        printed.extend(capfd.readouterr())
        return f"pid {pid} (Holder) could not be killed. GPU 0 will not be" in "".join(printed)

    with Unkillable(pid):
        miniray.kill(holder)
        wait_until(warned, told=lambda: printed)
    wait_until(lambda: not quarantined())


def test_a_quarantine_outlives_the_head() -> None:
    holder = Holder.remote()
    pid = miniray.get(holder.pid.remote())
    with Unkillable(pid):
        miniray.kill(holder)
        wait_until(quarantined)
        before = quarantined()
        kill_head()
        wait_until(lambda: quarantined() == before, told=quarantined)
        other = Holder.remote()
        assert miniray.get(other.devices.remote(), timeout=30) == "1"
        assert miniray.cluster_resources()["GPU"] == 1
    wait_until(lambda: not quarantined())


def kill_head() -> None:
    """SIGKILL to the head; its node starts another one."""
    root = Path(os.environ["MINIRAY_TMPDIR"])
    records = [json.loads(path.read_text()) for path in root.glob("miniray-*/clusters/*.json")]
    [pid] = [r["processes"]["head"]["pid"] for r in records if r["is_head"]]
    os.kill(pid, signal.SIGKILL)
    wait_until(lambda: not is_alive(pid))
