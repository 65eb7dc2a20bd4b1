"""Detached runs, and what is left of a run when drivers, controllers and nodes are killed.

In a cluster that `miniray start` has started; drivers are programs of their own.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import sys
from typing import TYPE_CHECKING, Any

import pytest
from cluster_helpers import is_alive, wait_until
from command_helpers import CommandLine, Started

import miniray
from miniray.train import Result
from miniray.util.state import list_actors, list_placement_groups

if TYPE_CHECKING:
    import subprocess
    from collections.abc import Callable, Iterator
    from pathlib import Path

PATIENCE = 60.0  # seconds, on a machine that does much else

pytestmark = pytest.mark.timeout(240)

#: A run whose rank 0 reports a checkpoint in each step, as soon as the test lets it.
DRIVER = """
import json, os, signal, sys, tempfile, time
signal.signal(signal.SIGHUP, signal.SIG_DFL)  # the tests may run under nohup
from pathlib import Path
import miniray
from miniray import train
from miniray.train import Checkpoint, DataParallelTrainer, FailureConfig, RunConfig, ScalingConfig

given = json.loads(sys.argv[1])

def loop(config):
    folder = Path(config["folder"])
    rank = train.get_context().get_world_rank()
    (folder / f"pid{os.getpid()}").write_text(str(rank))
    checkpoint, first = train.get_checkpoint(), 0
    if checkpoint is not None:
        first = int(Path(checkpoint.path, "step").read_text()) + 1
    print(f"rank {rank} begins with step {first}")
    for step in range(first, config["steps"]):
        while not (folder / f"go{step}").exists():
            time.sleep(0.01)
        with tempfile.TemporaryDirectory() as local:
            Path(local, "step").write_text(str(step))
            saved = Checkpoint.from_directory(local) if rank == 0 else None
            train.report({"step": step}, checkpoint=saved)
    return f"began with step {first}"

if __name__ == "__main__":
    miniray.init(address=given["address"])
    result = DataParallelTrainer(
        loop,
        train_loop_config={"folder": given["folder"], "steps": given.get("steps", 2)},
        scaling_config=ScalingConfig(num_workers=given.get("workers", 2)),
        run_config=RunConfig(
            name="run",
            storage_path=given["folder"] + "/results",
            detached=given.get("detached", True),
            failure_config=FailureConfig(**given.get("failures", {})),
        ),
    ).fit()
    print(json.dumps({"value": result.return_value, "metrics": result.metrics}))
"""


class Run:
    """One run in a folder of its own: its drivers, its ranks and what it has stored."""

    def __init__(self, command: CommandLine, head: Started, folder: Path) -> None:
        self.command = command
        self.head = head
        self.folder = folder
        self.path = folder / "results" / "run"

    def drive(self, source: str = DRIVER, **given: Any) -> subprocess.Popen[str]:
        """Start a driver of the run."""
        given = {"folder": str(self.folder), "address": self.head.address, **given}
        return self.command.popen(sys.executable, "-c", source, json.dumps(given))

    def let(self, *steps: int) -> None:
        """Let ranks go on to and through these steps."""
        for step in steps:
            (self.folder / f"go{step}").touch()

    def ranks(self) -> list[int]:
        """Pids of the ranks that live."""
        pids = [int(path.name.removeprefix("pid")) for path in self.folder.glob("pid*")]
        return [pid for pid in pids if is_alive(pid)]

    def facts(self) -> Any:
        file = self.path / "run.json"
        return json.loads(file.read_text()) if file.exists() else {}

    def state(self) -> Any:
        return self.facts().get("state")

    def saved(self) -> list[str]:
        """Names of the complete checkpoints."""
        return sorted(path.stem for path in (self.path / ".manifests").glob("*.json"))

    def until_running(self, workers: int = 2) -> None:
        wait_until(lambda: len(self.ranks()) == workers, PATIENCE, told=self.describe)

    def until_saved(self, count: int) -> None:
        wait_until(lambda: len(self.saved()) >= count, PATIENCE, told=self.describe)

    def until_gone(self) -> None:
        """Wait until nothing of it is left in the cluster."""
        wait_until(lambda: not controllers(), PATIENCE, told=self.describe)
        wait_until(lambda: not self.ranks(), PATIENCE, told=self.describe)
        wait_until(
            lambda: all(group.state == "REMOVED" for group in list_placement_groups()),
            PATIENCE,
            told=lambda: str(list_placement_groups()),
        )
        wait_until(
            lambda: miniray.available_resources().get("CPU") == miniray.cluster_resources()["CPU"],
            PATIENCE,
            told=lambda: str(miniray.available_resources()),
        )

    def describe(self) -> str:
        return f"{self.facts()} {self.saved()} {self.ranks()} {controllers()}"


def controllers() -> list[Any]:
    """The controllers that live or are to be started."""
    classes = ("DetachedController", "TrainController")
    return [a for a in list_actors() if a.class_name in classes and a.state != "DEAD"]


def controller_pid() -> int:
    wait_until(lambda: any(a.state == "ALIVE" for a in controllers()), PATIENCE)
    return next(int(a.pid) for a in controllers() if a.state == "ALIVE")


def end_of(driver: subprocess.Popen[str]) -> str:
    """What a driver has printed until its end."""
    output, _ = driver.communicate(timeout=PATIENCE)
    return output


def told_by(output: str) -> Any:
    """The result that a driver has printed; what workers print may come behind it."""
    return json.loads([line for line in output.splitlines() if line.startswith("{")][-1])


def result_of(driver: subprocess.Popen[str]) -> Any:
    output = end_of(driver)
    assert driver.returncode == 0, output
    return told_by(output)


def kill(driver: subprocess.Popen[str], number: int = signal.SIGKILL) -> None:
    driver.send_signal(number)
    end_of(driver)
    assert driver.returncode == -number


@pytest.fixture(scope="module")
def head(session_root: Path) -> Iterator[tuple[CommandLine, Started]]:
    """A started cluster of one node, to which the tests are attached, to look at it."""
    command = CommandLine(session_root)
    started = command.start_head("--num-cpus", "3")
    miniray.init(address=started.address, log_to_driver=False)
    yield command, started
    miniray.shutdown()
    command.run("stop", "--force")
    command.leaves_nothing()


@pytest.fixture
def run(head: tuple[CommandLine, Started], tmp_path: Path) -> Iterator[Run]:
    """A run, of which nothing may be left when its test is over."""
    found = Run(*head, tmp_path)
    yield found
    found.until_gone()


# --- drivers come and go -----------------------------------------------------------------


@pytest.mark.parametrize(
    "number",
    [
        signal.SIGKILL,
        pytest.param(signal.SIGTERM, marks=pytest.mark.slow),
        pytest.param(signal.SIGHUP, marks=pytest.mark.slow),
    ],
)
def test_a_detached_run_goes_on_when_its_driver_is_killed(run: Run, number: int) -> None:
    driver = run.drive()
    run.let(0)
    run.until_saved(1)
    ranks = run.ranks()
    kill(driver, number)
    run.let(1)
    wait_until(lambda: run.state() == "FINISHED", PATIENCE, told=run.describe)
    run.until_gone()
    assert len(ranks) == 2
    assert len(list(run.folder.glob("pid*"))) == 2  # they are the same to the end
    result = Result.from_path(run.path)
    assert result.error is None
    assert result.return_value == "began with step 0"
    assert result.metrics == {"step": 1}
    assert len(run.saved()) == 2
    assert "rank 1 begins" in (run.path / "logs" / "attempt_001" / "rank_1.out").read_text()


def test_a_driver_of_the_same_name_follows_the_run_that_goes_on(run: Run) -> None:
    first = run.drive()
    run.until_running()
    others = [run.drive(), run.drive()]
    for driver in others:
        wait_for_line(driver, "follows it and does not start another one")
    kill(first)
    shown = run.command.run("status")
    assert "train:run:" in shown.stdout
    run.let(0)
    run.until_saved(1)
    run.let(1)
    assert [result_of(driver)["value"] for driver in others] == 2 * ["began with step 0"]
    assert len(list(run.folder.glob("pid*"))) == 2


def test_a_run_of_the_name_of_one_that_has_finished_takes_it_up(run: Run) -> None:
    run.let(0, 1, 2)
    assert result_of(run.drive())["value"] == "began with step 0"
    assert result_of(run.drive(steps=3))["value"] == "began with step 2"
    assert Result.from_path(run.path).return_value == "began with step 2"


def test_a_failure_of_a_detached_run_is_kept_for_later(run: Run) -> None:
    source = DRIVER.replace('return f"began', 'raise ValueError("out of data"); return f"began')
    driver = run.drive(source)
    run.until_running()
    kill(driver)
    run.let(0, 1)
    wait_until(lambda: run.state() == "ERRORED", PATIENCE, told=run.describe)
    error = Result.from_path(run.path).error
    assert "ValueError: out of data" in str(error)
    assert isinstance(error.worker_failures[0], ValueError)


def test_ctrl_c_in_a_driver_that_follows_a_run_stops_it(run: Run) -> None:
    first = run.drive()
    run.until_running()
    second = run.drive()
    run.let(0)
    run.until_saved(1)
    wait_for_line(second, "follows it")
    second.send_signal(signal.SIGINT)
    assert "KeyboardInterrupt" in end_of(second)
    assert "was stopped" in end_of(first)
    assert run.state() == "ABORTED"
    assert len(run.saved()) == 1


def wait_for_line(program: subprocess.Popen[str], text: str) -> None:
    """Read what a program prints until a line has this text."""
    assert program.stdout is not None
    for line in program.stdout:
        if text in line:
            return
    raise AssertionError(f"the program has ended and never printed {text!r}")


def test_a_detached_run_is_stopped_by_its_name(run: Run) -> None:
    driver = run.drive()
    run.until_running()
    kill(driver)
    miniray.train.stop_run("run", run.folder / "results")
    assert run.state() == "ABORTED"
    with pytest.raises(ValueError, match="No detached run named 'run'"):
        miniray.train.stop_run("run", run.folder / "results")


@pytest.mark.slow
def test_a_run_whose_controller_waits_for_resources_is_stopped(run: Run) -> None:
    source = DRIVER.replace("ScalingConfig(", 'ScalingConfig(trainer_resources={"nowhere": 1}, ')
    driver = run.drive(source)
    wait_until(controllers, PATIENCE)
    miniray.train.stop_run("run", run.folder / "results")
    output = end_of(driver)
    assert "ControllerError" in output
    assert "killed" in output


@pytest.mark.slow
def test_what_a_run_needs_outlives_its_driver(run: Run) -> None:
    package = run.folder / "package"
    package.mkdir()
    (package / "of_the_run.py").write_text("WORD = 'packed'\n")
    source = """
import json, os, sys, time
from pathlib import Path
import numpy as np, pyarrow as pa
import miniray
from miniray import train
from miniray.train import DataParallelTrainer, FailureConfig, RunConfig, ScalingConfig

given = json.loads(sys.argv[1])
weights = np.arange(100_000)

def loop(config):
    folder = Path(config["folder"])
    (folder / f"pid{os.getpid()}").touch()
    while not (folder / "go0").exists():
        time.sleep(0.01)
    from of_the_run import WORD
    batches = train.get_dataset_shard("table").iter_batches(batch_size=10_000)
    rows = sum(len(batch["x"]) for batch in batches)
    return [WORD, rows, int(weights.sum())]

if __name__ == "__main__":
    miniray.init(address=given["address"])
    DataParallelTrainer(
        loop,
        train_loop_config={"folder": given["folder"]},
        datasets={"table": pa.table({"x": np.arange(50_000)})},
        scaling_config=ScalingConfig(num_workers=2),
        run_config=RunConfig(
            name="run",
            storage_path=given["folder"] + "/results",
            detached=True,
            worker_runtime_env={"working_dir": given["folder"] + "/package"},
            failure_config=FailureConfig(max_failures=1),
        ),
    ).fit()
"""
    driver = run.drive(source)
    run.until_running()
    kill(driver)
    shutil.rmtree(package)
    # All that the first workers had is used again, by others.
    os.kill(run.ranks()[0], signal.SIGKILL)
    wait_until(lambda: len(list(run.folder.glob("pid*"))) == 4, PATIENCE, told=run.describe)
    run.let(0)
    wait_until(lambda: run.state() in ("FINISHED", "ERRORED"), PATIENCE, told=run.describe)
    result = Result.from_path(run.path)
    assert result.return_value == ["packed", 25_000, 4_999_950_000], result


# --- controllers are killed ---------------------------------------------------------------


def test_a_detached_run_goes_on_when_its_controller_is_killed(run: Run) -> None:
    driver = run.drive()
    run.let(0)
    run.until_saved(1)
    os.kill(controller_pid(), signal.SIGKILL)
    wait_until(lambda: len(list(run.folder.glob("pid*"))) == 4, PATIENCE, told=run.describe)
    run.until_running()
    run.let(1)
    output = end_of(driver)
    assert told_by(output)["value"] == "began with step 1", output
    assert "controller was lost and was started again" in output
    assert run.facts()["attempts"] == 2
    assert Result.from_path(run.path).return_value == "began with step 1"


@pytest.mark.parametrize(
    "detached", [pytest.param(True, marks=pytest.mark.slow), False], ids=["detached", "not"]
)
def test_a_run_whose_controller_is_lost_ends_and_is_taken_up_later(
    run: Run, detached: bool
) -> None:
    given = {"detached": detached, "failures": {"controller_failure_limit": 0}}
    driver = run.drive(**given)
    run.let(0)
    run.until_saved(1)
    os.kill(controller_pid(), signal.SIGKILL)
    output = end_of(driver)
    assert "ControllerError" in output
    assert "SIGKILL" in output
    run.until_gone()
    assert run.state() == "RUNNING"
    assert "goes on, or was killed" in str(Result.from_path(run.path))
    run.let(1)
    assert result_of(run.drive(**given))["value"] == "began with step 1"


def test_a_controller_that_is_killed_after_the_end_does_not_run_again(run: Run) -> None:
    driver = run.drive()
    run.until_running()
    pid = controller_pid()
    kill(driver)
    run.let(0, 1)
    outcome = run.path / "outcome.json"
    wait_until(lambda: outcome.exists() or not is_alive(pid), PATIENCE, told=run.describe)
    if is_alive(pid):
        os.kill(pid, signal.SIGKILL)
    run.until_gone()
    assert run.state() == "FINISHED"
    assert run.facts()["attempts"] == 1


# --- drivers without a detached controller are killed --------------------------------------


UPLOADING = DRIVER.replace(
    'train.report({"step": step}, checkpoint=saved)',
    """
            def upload(given, name):
                target = Path(train.get_context().get_storage().path, name)
                target.mkdir(exist_ok=True)
                (target / "step").write_text(str(step))
                (folder / f"uploading{step}").touch()
                while step == 1 and not (folder / "go-on").exists():
                    time.sleep(0.01)
                return Checkpoint.from_directory(target)
            train.report({"step": step}, checkpoint=saved, checkpoint_upload_fn=upload)
""",
)


def when_it_exists(run: Run) -> None:
    controller_pid()


def when_it_has_a_folder(run: Run) -> None:
    wait_until(lambda: run.state() is not None, PATIENCE)


def when_it_runs(run: Run) -> None:
    run.until_running()


EARLY = (when_it_exists, when_it_has_a_folder, when_it_runs)


def when_it_uploads(run: Run) -> None:
    run.until_saved(1)  # rank 0 goes on before the other one has reported the step before
    wait_until((run.folder / "uploading1").exists, PATIENCE, told=run.describe)


@pytest.mark.parametrize(
    "moment",
    [
        *(pytest.param(moment, marks=pytest.mark.slow) for moment in EARLY),
        when_it_uploads,
    ],
)
def test_a_run_whose_driver_is_killed_ends_and_is_taken_up_later(
    run: Run, moment: Callable[[Run], None]
) -> None:
    uploads = moment is when_it_uploads
    if uploads:
        run.let(0, 1)
    driver = run.drive(UPLOADING, detached=False)
    moment(run)
    kill(driver)
    run.until_gone()
    assert run.state() in (None, "INITIALIZING", "RUNNING")
    assert len(run.saved()) == (1 if uploads else 0)
    (run.folder / "go-on").touch()
    run.let(0, 1)
    expected = "began with step 1" if uploads else "began with step 0"
    assert result_of(run.drive(UPLOADING, detached=False))["value"] == expected


# --- where there can be none ----------------------------------------------------------------


def test_a_detached_run_needs_a_cluster_that_outlives_its_driver(run: Run) -> None:
    output = end_of(run.drive(address="local"))
    assert "ValueError: RunConfig(detached=True) needs a cluster that outlives" in output
    assert "miniray start --head" in output


# --- nodes ------------------------------------------------------------------------------------


@pytest.mark.slow
def test_a_detached_run_goes_on_elsewhere_when_the_node_of_its_controller_is_lost(
    head: tuple[CommandLine, Started], tmp_path: Path
) -> None:
    command, started = head
    # Room for controller and workers is only on nodes that join.
    joined = command.join(started, "--num-cpus", "0", "--resources", json.dumps({"slot": 3}))
    assert joined.address == started.address
    run = Run(command, started, tmp_path)
    source = DRIVER.replace(
        'ScalingConfig(num_workers=given.get("workers", 2))',
        'ScalingConfig(num_workers=2, resources_per_worker={"slot": 1}, '
        'trainer_resources={"slot": 1})',
    )
    driver = run.drive(source)
    run.let(0)
    run.until_saved(1)
    daemon = command.records()[-1]["processes"]["boot"]["pid"]
    before = controller_pid()
    kill(driver)
    os.kill(daemon, signal.SIGKILL)
    wait_until(lambda: not is_alive(before), PATIENCE)
    command.join(started, "--num-cpus", "0", "--resources", json.dumps({"slot": 3}))
    run.let(1)
    wait_until(lambda: run.state() == "FINISHED", PATIENCE, told=run.describe)
    assert Result.from_path(run.path).return_value == "began with step 1"
    run.until_gone()
