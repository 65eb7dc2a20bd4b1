"""What a run does when workers hang or are lost at their start, and when its driver is stopped."""

from __future__ import annotations

import ctypes
import dataclasses
import logging
import os
import re
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from cluster_helpers import count_up, is_alive, wait_until
from running_cluster import running_cluster

import miniray
from miniray import train
from miniray.train import (
    DataParallelTrainer,
    FailureConfig,
    Result,
    RunConfig,
    ScalingConfig,
    WorkerGroupError,
    WorkerHungError,
)
from miniray.train.controller.run_spec import STOPPING
from miniray.util.state import list_actors, list_placement_groups

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from miniray.cluster_utils import Cluster

pytestmark = pytest.mark.usefixtures("nodes")


@pytest.fixture(scope="module")
def nodes(session_root: Path) -> Iterator[Cluster]:
    """One node, which other drivers can join."""
    with running_cluster({"num_cpus": 3}) as cluster:
        yield cluster


@pytest.fixture
def fit(fit: Any, tmp_path: Path) -> Callable[..., Result]:
    """Runs a train loop on some workers, in the run ``tmp_path / "results" / "run"``."""

    def run(loop: Any, workers: int = 1, backend_config: Any = None, **failure_options: Any) -> Any:
        config = {"folder": str(tmp_path), "driver": str(os.getpid())}
        given, failures = {"backend_config": backend_config}, FailureConfig(**failure_options)
        return fit(loop, config, workers, given=given, name="run", failure_config=failures)

    return run


def pids(folder: Path) -> list[int]:
    return [int(path.name.removeprefix("pid")) for path in folder.glob("pid*")]


def test_the_stacks_of_ranks_that_hang_are_kept_and_the_run_goes_on(
    fit: Any, tmp_path: Path
) -> None:
    def wait_for_the_other() -> None:
        signal.pause()

    def loop(config: dict[str, str]) -> str:
        rank = train.get_context().get_world_rank()
        if count_up(Path(config["folder"], f"runs{rank}")) > 1:
            return "done"
        train.report({"n": 1})
        if rank == 1:
            ctypes.PyDLL(None).sleep(100)  # native code that keeps Python's lock
        wait_for_the_other()
        return "hung"

    # A busy machine may take long to start the second group, which counts as no progress.
    assert fit(loop, workers=2, hang_timeout_s=3, max_failures=1).return_value == "done"
    stacks = (tmp_path / "results" / "run" / "stacks_attempt_1.txt").read_text()
    first, second = stacks.split("=== rank 1 ===")
    assert "wait_for_the_other" in first
    assert "(the GIL)" in second


def test_the_error_of_a_hung_run_shows_where_it_hangs(fit: Any) -> None:
    def wait_for_nobody() -> None:
        signal.pause()

    def loop() -> None:
        train.report({})
        wait_for_nobody()

    with pytest.raises(WorkerGroupError, match="wait_for_nobody") as caught:
        fit(loop, hang_timeout_s=3)
    assert isinstance(caught.value.worker_failures[0], WorkerHungError)
    assert "for 3 s" in str(caught.value)


def test_a_worker_that_is_lost_at_its_start_is_no_failure_of_the_loop(
    fit: Any, tmp_path: Path
) -> None:
    @dataclasses.dataclass
    class Lost(train.BackendConfig):
        folder: str = ""

        def make_backend(self) -> train.Backend:
            return LostBackend(self.folder)

    class LostBackend(train.Backend):
        def __init__(self, folder: str) -> None:
            self.folder = folder

        def on_start(self, member: Any) -> None:
            if count_up(Path(self.folder, "starts")) == 1:
                os.kill(os.getpid(), signal.SIGKILL)

    assert fit(lambda: "done", backend_config=Lost(str(tmp_path))).return_value == "done"
    (tmp_path / "starts").unlink()
    with pytest.raises(WorkerGroupError, match="SIGKILL"):
        fit(lambda: "done", backend_config=Lost(str(tmp_path)), controller_failure_limit=0)


def report_while(folder: str, during_upload: Callable[[], None]) -> None:
    """Report a checkpoint, and do something in the midst of its upload."""
    Path(folder, f"pid{os.getpid()}").touch()
    files = Path(folder, "files")
    files.mkdir()
    (files / "model").write_text("x")

    def upload(checkpoint: Any, name: str) -> Any:
        during_upload()
        target = Path(train.get_context().get_storage().path, name)
        target.mkdir(exist_ok=True)
        (target / "model").write_text("x")
        return train.Checkpoint.from_directory(target)

    train.report({}, train.Checkpoint.from_directory(files), checkpoint_upload_fn=upload)


def test_ctrl_c_lets_an_upload_end_and_the_checkpoint_is_complete(fit: Any, tmp_path: Path) -> None:
    def loop(config: dict[str, str]) -> None:
        def interrupt_and_go_on() -> None:
            os.kill(int(config["driver"]), signal.SIGINT)
            time.sleep(1)  # an upload that takes its time

        report_while(config["folder"], interrupt_and_go_on)
        signal.pause()

    with pytest.raises(KeyboardInterrupt):
        fit(loop)
    result = Result.from_path(tmp_path / "results" / "run")
    assert result.checkpoint is not None
    assert Path(result.checkpoint.path, "model").read_text() == "x"
    wait_until(lambda: not any(is_alive(pid) for pid in pids(tmp_path)), timeout=10)


class InterruptAgain(logging.Handler):
    """Presses Ctrl-C as soon as the user is told that this stops at once."""

    def emit(self, record: logging.LogRecord) -> None:
        if record.msg == STOPPING:
            signal.raise_signal(signal.SIGINT)


def test_ctrl_c_twice_waits_for_no_upload(fit: Any, tmp_path: Path) -> None:
    def loop(config: dict[str, str]) -> None:
        def interrupt_and_stay() -> None:
            os.kill(int(config["driver"]), signal.SIGINT)
            signal.pause()

        report_while(config["folder"], interrupt_and_stay)

    told, again = logging.getLogger("miniray.train.run.driver"), InterruptAgain()
    told.addHandler(again)
    try:
        with pytest.raises(KeyboardInterrupt):
            fit(loop)
    finally:
        told.removeHandler(again)
    (pid,) = pids(tmp_path)
    wait_until(lambda: not is_alive(pid), timeout=10)
    result = Result.from_path(tmp_path / "results" / "run")
    assert "was stopped" in str(result.error)
    assert result.checkpoint is None


def test_ctrl_c_ends_a_run_whose_controller_waits_for_resources(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("miniray.train.run.driver.ANSWER_TIMEOUT", 0.2)
    trainer = DataParallelTrainer(
        lambda: None,
        scaling_config=ScalingConfig(trainer_resources={"nowhere": 1}),
        run_config=RunConfig(storage_path=tmp_path),
    )

    def waits() -> bool:
        actors = [each for each in list_actors() if each.class_name == "TrainController"]
        return "PENDING_CREATION" in {each.state for each in actors}

    def interrupt() -> None:
        wait_until(waits, timeout=60)
        # From another process: one of its own may come just before this one's main thread sleeps.
        subprocess.run(["kill", "-INT", str(os.getpid())], check=True)

    interrupting = threading.Thread(target=interrupt)
    interrupting.start()
    with pytest.raises(KeyboardInterrupt):
        trainer.fit()
    interrupting.join()
    wait_until(lambda: not waits(), timeout=30)


DRIVER = """
import os, signal, sys
from pathlib import Path
import miniray
from miniray.train import DataParallelTrainer, RunConfig, ScalingConfig

def loop(config):
    Path(config["folder"], f"pid{os.getpid()}").touch()
    signal.pause()

miniray.init(address=sys.argv[2])
folder = sys.argv[1]
DataParallelTrainer(
    loop,
    train_loop_config={"folder": folder},
    # There is room for three, so it waits for more: that wait has to end as well.
    scaling_config=ScalingConfig(num_workers=(2, 5), elastic_resize_monitor_interval_s=0),
    run_config=RunConfig(storage_path=folder + "/results"),
).fit()
"""


def all_is_free() -> bool:
    return miniray.available_resources().get("CPU") == miniray.cluster_resources()["CPU"]


def test_a_run_whose_driver_is_killed_leaves_nothing(nodes: Cluster, tmp_path: Path) -> None:
    wait_until(all_is_free, timeout=30)
    driver = subprocess.Popen([sys.executable, "-c", DRIVER, str(tmp_path), nodes.address])
    try:
        wait_until(lambda: len(pids(tmp_path)) >= 2, timeout=60)
    finally:
        driver.kill()
        driver.wait()
    wait_until(lambda: not any(is_alive(pid) for pid in pids(tmp_path)), timeout=30)
    wait_until(all_is_free, timeout=30)
    wait_until(
        lambda: {group.state for group in list_placement_groups()} == {"REMOVED"},
        timeout=30,
        told=lambda: str(list_placement_groups()),
    )


def test_a_rank_that_is_killed_for_memory_is_told_as_that_and_the_run_goes_on(
    fit: Any, memory_group: str, capfd: pytest.CaptureFixture[str]
) -> None:
    def loop(config: dict[str, str]) -> str:
        if train.get_context().get_world_rank() == 0:
            train.collective.barrier()
            return "done"
        if count_up(Path(config["folder"], "runs")) == 1:
            if not memory_group:  # nothing limits memory here, so the kernel's part is played
                os.kill(os.getpid(), signal.SIGKILL)
            Path(memory_group, "cgroup.procs").write_text(str(os.getpid()))
            bytearray(b"x") * (1 << 30)
        train.collective.barrier()
        return "done"

    assert fit(loop, workers=2, max_failures=1).return_value == "done"
    told = capfd.readouterr().out
    assert "Starting the workers again, since some failed:\n" in told
    (reason,) = re.findall(r"^\[Rank 1\] .*ActorDiedError: (.*)", told, re.MULTILINE)
    assert "SIGKILL; the kernel sends it when memory runs out" in reason
    if memory_group:
        assert "the kernel killed a process of this machine because memory ran out" in reason


def test_ranks_that_raise_the_same_are_told_with_one_traceback(fit: Any) -> None:
    def loop() -> None:
        train.collective.barrier()
        raise ValueError("out of data")

    with pytest.raises(WorkerGroupError) as caught:
        fit(loop, workers=3)
    text = str(caught.value)
    # Some are told of another's failure before they can fail themselves.
    assert re.search(r"\[Ranks? \d(, \d)?( and \d)?\] ValueError: out of data\nTraceback", text)
    assert text.count("Traceback") == 1
