"""``init``, ``shutdown`` and what lies between, several clusters one after another."""

from __future__ import annotations

import gc
import os
import signal
import subprocess
import sys
import textwrap
import threading
import weakref
from typing import TYPE_CHECKING, Any

import numpy as np
import psutil
import pytest
from cluster_helpers import is_alive, wait_until

import miniray
from miniray.cluster_utils import Cluster
from miniray.common.runtime import current_runtime
from miniray.exceptions import (
    ActorDiedError,
    NodeDiedError,
    NotInitializedError,
    ObjectLostError,
    RuntimeEnvSetupError,
)

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path


@pytest.fixture(autouse=True)
def nothing_runs_before_or_after(session_root: Path) -> Iterator[None]:
    assert not miniray.is_initialized()
    yield
    miniray.shutdown()


@miniray.remote
def pid() -> int:
    return os.getpid()


@miniray.remote
class Holder:
    def pid(self) -> int:
        return os.getpid()

    def hold(self) -> None:
        threading.Event().wait(60)


def test_init_starts_and_shutdown_ends() -> None:
    assert not miniray.is_initialized()
    miniray.init(num_cpus=1)
    assert miniray.is_initialized()
    worker = miniray.get(pid.remote())
    miniray.shutdown()
    assert not miniray.is_initialized()
    wait_until(lambda: not is_alive(worker))


def test_init_can_say_whose_the_gpus_are(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("ROCR_VISIBLE_DEVICES", raising=False)
    monkeypatch.delenv("HIP_VISIBLE_DEVICES", raising=False)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    miniray.init(num_cpus=1, num_gpus=2, gpu_family="amd")

    @miniray.remote(num_gpus=1)
    def seen() -> tuple[str | None, str | None]:
        return os.environ.get("ROCR_VISIBLE_DEVICES"), os.environ.get("CUDA_VISIBLE_DEVICES")

    assert miniray.get(seen.remote(), timeout=30) == ("0", None)


@miniray.remote(num_cpus=0)
class Left:
    def value(self) -> int:
        return 1


def test_what_is_of_a_cluster_that_was_left_starts_no_new_one() -> None:
    miniray.init(num_cpus=1)
    ref, actor = miniray.put(1), Left.remote()
    assert miniray.get(actor.value.remote()) == 1
    miniray.shutdown()
    uses = {
        "ref": [
            lambda: miniray.get(ref),
            lambda: miniray.get([ref]),
            lambda: miniray.wait([ref]),
            lambda: miniray.cancel(ref),
            ref.future,
        ],
        "actor handle": [actor.value.remote, lambda: miniray.kill(actor)],
    }
    for what, calls in uses.items():
        for call in calls:
            with pytest.raises(
                NotInitializedError, match=f"^This {what} belongs to a cluster that"
            ):
                call()
    assert not miniray.is_initialized()


SPAWNING = """
import multiprocessing
import miniray

@miniray.remote
def one():
    return 1

def child():
    assert miniray.get(one.remote()) == 1

if __name__ == "__main__":
    miniray.init(num_cpus=1)
    process = multiprocessing.get_context("spawn").Process(target=child)
    process.start()
    process.join()
    raise SystemExit(process.exitcode)
"""


def test_a_spawned_child_says_that_its_cluster_is_not_its_parents(tmp_path: Path) -> None:
    program = tmp_path / "spawning.py"
    program.write_text(SPAWNING)
    done = subprocess.run(
        [sys.executable, program], capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 0, done.stderr
    assert done.stderr.count("has started a cluster of its own") == 1


#: What both programs below begin with: an actor whose calls do not end.
GATE = """
import sys
import threading
import time
import miniray

@miniray.remote
class Gate:
    def wait(self):
        threading.Event().wait()

def waits(thread):
    frame = sys._current_frames().get(thread.ident)
    while frame is not None and frame.f_code.co_name not in ("get", "wait", "result"):
        frame = frame.f_back
    return frame is not None

miniray.init(num_cpus=1)
gate = Gate.remote()
"""

WAITING = """
ways = (miniray.get, lambda ref: miniray.wait([ref]), lambda ref: ref.future().result())
threads = [
    threading.Thread(target=wait, args=(gate.wait.remote(),), daemon=True) for wait in ways
]

for thread in threads:
    thread.start()
while not all(map(waits, threads)):
    time.sleep(0.01)
"""


def test_daemon_threads_that_wait_at_exit_print_no_errors(tmp_path: Path) -> None:
    program = tmp_path / "waiting.py"
    program.write_text(GATE + WAITING)
    done = subprocess.run(
        [sys.executable, program], capture_output=True, text=True, timeout=60, check=False
    )
    assert (done.returncode, done.stderr) == (0, "")


LEFT = """
def wait():
    try:
        miniray.get(gate.wait.remote())
    except RuntimeError as error:
        print(error)

def end():
    threading.main_thread().join()
    while not waits(waiting):
        time.sleep(0.01)
    miniray.shutdown()

waiting = threading.Thread(target=wait)
waiting.start()
threading.Thread(target=end).start()
"""


def test_threads_that_outlive_the_main_thread_are_told_of_a_shutdown(tmp_path: Path) -> None:
    program = tmp_path / "left.py"
    program.write_text(GATE + LEFT)
    done = subprocess.run(
        [sys.executable, program], capture_output=True, text=True, timeout=60, check=False
    )
    assert (done.returncode, done.stdout) == (0, "miniray.shutdown() was called.\n")


def test_a_program_that_shuts_down_keeps_no_object_of_the_cluster() -> None:
    miniray.init(num_cpus=1)
    table = weakref.ref(current_runtime().table)
    miniray.put(1)
    miniray.shutdown()
    gc.collect()
    assert table() is None


def test_shutdown_without_init_does_nothing() -> None:
    miniray.shutdown()
    miniray.shutdown()
    assert not miniray.is_initialized()


def test_a_second_init_is_an_error_unless_it_is_ignored() -> None:
    first = miniray.init(num_cpus=1)
    with pytest.raises(RuntimeError, match="ignore_reinit_error"):
        miniray.init(num_cpus=1)
    second = miniray.init(num_cpus=1, ignore_reinit_error=True)
    assert second.address_info["address"] == first.address_info["address"]


def test_the_context_ends_the_cluster() -> None:
    with miniray.init(num_cpus=1) as context:
        assert context.address_info["node_id"]
        worker = miniray.get(pid.remote())
    assert not miniray.is_initialized()
    wait_until(lambda: not is_alive(worker))


def test_remote_functions_and_classes_work_with_the_next_cluster() -> None:
    seen = set()
    for _ in range(2):
        miniray.init(num_cpus=1)
        seen.add(miniray.get(pid.remote()))
        seen.add(miniray.get(Holder.remote().pid.remote()))
        miniray.shutdown()
    assert len(seen) == 4


def test_a_ref_of_an_earlier_cluster_is_lost_wherever_it_is_used() -> None:
    @miniray.remote
    def take(value: Any) -> Any:
        return value

    miniray.init(num_cpus=1)
    ref = miniray.put("old")
    miniray.shutdown()
    miniray.init(num_cpus=1)
    with pytest.raises(ObjectLostError, match="not attached to its cluster any more"):
        miniray.get(ref, timeout=30)
    with pytest.raises(ObjectLostError, match="not attached to its cluster any more"):
        miniray.get(take.remote(ref), timeout=30)
    inside = miniray.get(take.remote([ref]), timeout=30)
    with pytest.raises(ObjectLostError):
        miniray.get(inside, timeout=30)


def test_an_actor_of_an_earlier_cluster_is_dead_with_a_word_on_why() -> None:
    miniray.init(num_cpus=1)
    holder = Holder.remote()
    miniray.get(holder.pid.remote())
    miniray.shutdown()
    miniray.init(num_cpus=1)
    with pytest.raises(ActorDiedError, match="one of another cluster, or ended long ago"):
        miniray.get(holder.pid.remote(), timeout=30)


def test_the_first_use_starts_a_cluster_by_itself() -> None:
    ref = miniray.put(1)
    assert miniray.is_initialized()
    assert miniray.get(ref) == 1


def test_an_init_that_fails_leaves_no_cluster_behind(tmp_path: Path) -> None:
    before = psutil.Process().children(recursive=True)
    with (tmp_path / "large").open("wb") as file:
        file.truncate(300 << 20)
    with pytest.raises(RuntimeEnvSetupError, match="250 MiB"):
        miniray.init(num_cpus=1, runtime_env={"working_dir": str(tmp_path)})
    assert psutil.Process().children(recursive=True) == before
    assert not [t.name for t in threading.enumerate() if t.name.startswith("miniray-")]
    miniray.init(num_cpus=1)
    assert miniray.get(pid.remote()) != os.getpid()


@pytest.mark.parametrize("wrong", [{"num_cpus": -1}, {"num_gpus": -1}, {"resources": {"x": -1}}])
def test_init_refuses_amounts_below_zero(wrong: dict[str, Any]) -> None:
    with pytest.raises((ValueError, TypeError)):
        miniray.init(**wrong)
    assert not miniray.is_initialized()


def test_an_address_where_nothing_runs_is_a_connection_error() -> None:
    with pytest.raises(ConnectionError):
        miniray.init(address="auto")


def test_detached_actors_end_with_an_embedded_cluster() -> None:
    miniray.init(num_cpus=1)
    actor = Holder.options(name="kept", lifetime="detached").remote()
    process = miniray.get(actor.pid.remote())
    miniray.shutdown()
    wait_until(lambda: not is_alive(process))


@pytest.mark.parametrize("count", [1, 50])
def test_shutdown_ends_the_waits_of_other_threads(count: int) -> None:
    miniray.init(num_cpus=1)
    holder = Holder.remote()
    miniray.get(holder.pid.remote())
    refs = [holder.hold.remote() for _ in range(count)]
    ended: list[BaseException] = []

    def wait() -> None:
        try:
            miniray.get(refs)
        except BaseException as error:
            ended.append(error)

    threads = [threading.Thread(target=wait) for _ in range(3)]
    for thread in threads:
        thread.start()
    wait_until(lambda: current_runtime().loop._serving.locked())  # type: ignore[attr-defined]
    miniray.shutdown()
    for thread in threads:
        thread.join(20)
    assert len(ended) == 3


def test_arrays_stay_what_they_are_after_shutdown_in_a_cluster_that_goes_on() -> None:
    with Cluster(initialize_head=True, head_node_args={"num_cpus": 2}) as cluster:
        miniray.init(address=cluster.address)
        ref = miniray.put(np.full(4 << 20, 7, dtype=np.uint8))
        array = miniray.get(ref)
        miniray.shutdown()
        miniray.init(address=cluster.address)
        kept = [miniray.put(np.full(4 << 20, 9, dtype=np.uint8)) for _ in range(5)]
        assert len(kept) == 5
        assert (array == 7).all()
        miniray.shutdown()


def test_a_cluster_of_several_nodes_is_waited_for_and_shut_down() -> None:
    with Cluster(initialize_head=True, connect=True, head_node_args={"num_cpus": 1}) as cluster:
        node = cluster.add_node(num_cpus=1)
        assert cluster.head_node is not None
        pids = [*cluster.head_node.pids.values(), *node.pids.values()]
        cluster.wait_for_nodes()
        os.kill(node.pids["node"], signal.SIGKILL)
        wait_until(lambda: sum(each["Alive"] for each in miniray.nodes()) == 1)
        with pytest.raises(TimeoutError, match="lists 1 living nodes, not 2"):
            cluster.wait_for_nodes(timeout=0.1)
        cluster.shutdown()
        assert not miniray.is_initialized()
        assert not any(map(is_alive, pids))
        with pytest.raises(RuntimeError, match="no head"):
            _ = cluster.address


def test_a_driver_whose_node_has_ended_is_told_by_every_call() -> None:
    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 2})
    miniray.init(address=cluster.address)
    holder = Holder.remote()
    miniray.get([pid.remote(), holder.pid.remote()])
    running = holder.hold.remote()
    os.kill(cluster.head_node.pids["node"], signal.SIGKILL)
    with pytest.raises(NodeDiedError, match="daemon ended"):
        miniray.get(running, timeout=30)
    for make in (pid.remote, holder.pid.remote, lambda: Holder.remote().pid.remote()):
        with pytest.raises(NodeDiedError, match=r"shutdown\(\)"):
            miniray.get(make(), timeout=30)
    miniray.shutdown()
    cluster.shutdown()
    miniray.init("local", num_cpus=1)
    assert miniray.get(pid.remote(), timeout=30) > 0


def test_an_embedded_cluster_starts_without_standard_streams(tmp_path: Path) -> None:
    done = tmp_path / "done"
    program = textwrap.dedent(f"""
        import miniray, pathlib
        miniray.init(num_cpus=1)
        pathlib.Path({str(done)!r}).write_text(str(len(miniray.nodes())))
    """)
    command = f"exec {sys.executable} -c '{program.replace(chr(39), chr(34))}' <&- >&- 2>&-"
    assert subprocess.run(["sh", "-c", command], timeout=60, check=False).returncode == 0
    assert done.read_text() == "1"
