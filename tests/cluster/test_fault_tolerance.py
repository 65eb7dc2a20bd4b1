"""What is lost, and what comes back, when processes die."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from cluster_helpers import count_up, is_alive, processes_with, wait_for_file, wait_until

import miniray
from miniray.exceptions import (
    ActorDiedError,
    OwnerDiedError,
    RayActorError,
    RayError,
    WorkerCrashedError,
)

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = pytest.mark.usefixtures("cluster")

MIB = 1024 * 1024


@miniray.remote
def wait_for(path: Path) -> None:
    wait_for_file(path)


@miniray.remote
class Holder:
    def __init__(self) -> None:
        self.ref: Any = None

    def hold(self, refs: list[Any]) -> None:
        self.ref = refs[0]

    def read(self) -> Any:
        return miniray.get(self.ref)

    def start(self, go: Path) -> list[Any]:
        return [wait_for.remote(go)]

    def array(self, size: int) -> Any:
        return np.ones(size, dtype=np.uint8)

    def pid(self) -> int:
        return os.getpid()


@miniray.remote(max_retries=0)
def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


@miniray.remote
def identity(value: Any) -> Any:
    return value


def test_a_crash_does_not_harm_other_tasks() -> None:
    refs = [identity.remote(n) for n in range(50)]
    crash = die.remote()
    refs += [identity.remote(n) for n in range(50)]
    with pytest.raises(WorkerCrashedError):
        miniray.get(crash)
    assert miniray.get(refs, timeout=50) == [*range(50), *range(50)]


def test_a_task_that_crashes_each_time_says_how_often_it_was_tried_and_is_told_once(
    capfd: pytest.CaptureFixture[str],
) -> None:
    with pytest.raises(WorkerCrashedError) as crashed:
        miniray.get(die.options(max_retries=2).remote(), timeout=50)
    assert "It was tried 3 times (max_retries=2)." in str(crashed.value)
    assert "max_retries lets" not in str(crashed.value)
    assert crashed.value.tries == 3
    printed = ""

    def told() -> bool:
        nonlocal printed
        printed += capfd.readouterr().err
        return "runs again" in printed

    wait_until(told)
    with pytest.raises(WorkerCrashedError):
        miniray.get(die.options(max_retries=1).remote(), timeout=50)
    told()
    [line] = [line for line in printed.splitlines() if "runs again" in line]
    assert line.startswith("miniray: die runs again (attempt 2 of 3): its worker ")
    assert "signal 9 (SIGKILL" in line
    with pytest.raises(WorkerCrashedError, match="max_retries lets such a task run again"):
        miniray.get(die.remote(), timeout=50)


def test_many_crashes_one_after_another_use_nothing_up() -> None:
    for _ in range(8):
        with pytest.raises(WorkerCrashedError):
            miniray.get(die.remote(), timeout=30)
    wait_until(lambda: miniray.available_resources().get("CPU") == 4)


def test_a_value_in_shared_memory_outlives_the_task_that_made_it() -> None:
    @miniray.remote(max_calls=1)
    def make() -> tuple[Any, int]:
        return np.ones(MIB, dtype=np.uint8), os.getpid()

    array, pid = make.options(num_returns=2).remote()
    wait_until(lambda: not is_alive(miniray.get(pid)))
    assert miniray.get(array).sum() == MIB


def test_a_value_made_by_an_actor_outlives_the_actor() -> None:
    holder = Holder.remote()
    ref = holder.array.remote(MIB)
    miniray.wait([ref])
    miniray.kill(holder)
    with pytest.raises(RayActorError):
        miniray.get(holder.pid.remote())
    assert miniray.get(ref).sum() == MIB


def test_a_result_whose_owner_was_killed_is_lost_with_a_reason(tmp_path: Path) -> None:
    holder = Holder.remote()
    [inner] = miniray.get(holder.start.remote(tmp_path / "go"))
    miniray.kill(holder)
    with pytest.raises(RayActorError):
        miniray.get(holder.pid.remote())
    try:
        with pytest.raises(OwnerDiedError):
            miniray.get(inner, timeout=30)
    finally:
        (tmp_path / "go").touch()


def test_a_borrowed_value_lives_as_long_as_its_borrower() -> None:
    holder = Holder.remote()
    ref = miniray.put(np.full(MIB, 3, dtype=np.uint8))
    miniray.get(holder.hold.remote([ref]))
    del ref
    for _ in range(3):
        miniray.get(miniray.put(np.zeros(MIB, dtype=np.uint8)))
    assert (miniray.get(holder.read.remote()) == 3).all()


def test_a_task_that_needs_a_lost_worker_runs_again(tmp_path: Path) -> None:
    @miniray.remote(max_retries=1)
    def victim(path: Path) -> int:
        runs = count_up(path)
        if runs == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        return runs

    refs = [victim.remote(tmp_path / str(n)) for n in range(4)]
    assert miniray.get(refs, timeout=50) == [2] * 4


def test_an_actor_that_always_dies_in_its_constructor_is_given_up(tmp_path: Path) -> None:
    @miniray.remote(max_restarts=2)
    class Doomed:
        def __init__(self, path: Path) -> None:
            count_up(path)
            os.kill(os.getpid(), signal.SIGKILL)

        def hello(self) -> None:
            pass

    actor = Doomed.remote(tmp_path / "starts")
    with pytest.raises(RayActorError):
        miniray.get(actor.hello.remote(), timeout=50)
    assert (tmp_path / "starts").stat().st_size == 3


def test_the_constructor_arguments_of_a_restarted_actor_are_kept() -> None:
    @miniray.remote(max_restarts=1, max_task_retries=1)
    class Keeper:
        def __init__(self, array: Any, inner: list[Any]) -> None:
            self.total = int(array.sum()) + int(miniray.get(inner[0]))

        def state(self) -> tuple[int, int]:
            return self.total, os.getpid()

    keeper = Keeper.remote(miniray.put(np.ones(MIB, dtype=np.uint8)), [miniray.put(1)])
    total, pid = miniray.get(keeper.state.remote())
    os.kill(pid, signal.SIGKILL)
    again, other = miniray.get(keeper.state.remote(), timeout=50)
    assert again == total == MIB + 1
    assert other != pid


def test_a_call_to_an_actor_while_it_restarts_waits_if_it_may_be_retried() -> None:
    holder = Holder.options(max_restarts=5, max_task_retries=-1).remote()
    for _ in range(3):
        os.kill(miniray.get(holder.pid.remote(), timeout=50), signal.SIGKILL)
    assert miniray.get(holder.pid.remote(), timeout=50) > 0


def test_an_error_of_a_dead_actor_names_the_class() -> None:
    holder = Holder.remote()
    miniray.get(holder.pid.remote())
    miniray.kill(holder)
    with pytest.raises(ActorDiedError, match="Holder"):
        miniray.get(holder.pid.remote())


def test_a_child_process_of_a_task_may_not_use_the_api_but_does_no_harm() -> None:
    @miniray.remote
    def forks() -> int:
        pid = os.fork()
        if pid == 0:
            os._exit(7)
        return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])

    assert miniray.get(forks.remote(), timeout=30) == 7
    assert miniray.get(identity.remote(1), timeout=30) == 1


def test_a_killed_driver_takes_its_cluster_along(tmp_path: Path) -> None:
    code = (
        "import miniray, os, sys, time\n"
        "miniray.init(num_cpus=1)\n"
        "task = miniray.remote(lambda: os.getpid())\n"
        "print(miniray.get(task.remote()), flush=True)\n"
        "time.sleep(600)\n"
    )
    environment = {**os.environ, "MINIRAY_TMPDIR": str(tmp_path), "DRIVER_TAG": str(tmp_path)}
    driver = subprocess.Popen(
        [sys.executable, "-c", code], env=environment, stdout=subprocess.PIPE, text=True
    )
    assert driver.stdout is not None
    with driver, driver.stdout:
        pid = int(driver.stdout.readline())
        assert is_alive(pid)
        driver.kill()
    wait_until(lambda: not is_alive(pid))
    wait_until(lambda: not processes_with("DRIVER_TAG", str(tmp_path)))


def test_the_families_of_errors_are_told_apart() -> None:
    assert not issubclass(WorkerCrashedError, RayActorError)
    assert issubclass(WorkerCrashedError, RayError)
