"""Runs whose driver is killed, in a cluster that `miniray start` has started."""

from __future__ import annotations

import json
import os
import signal
import sys
from typing import TYPE_CHECKING, Any

import pytest
from cluster_helpers import is_alive, wait_until
from command_helpers import CommandLine, Started

import miniray
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
    Path(given["folder"], "driver").write_text(str(os.getpid()))
    miniray.init(address=given["address"])
    result = DataParallelTrainer(
        loop,
        train_loop_config={"folder": given["folder"], "steps": given.get("steps", 2)},
        scaling_config=ScalingConfig(num_workers=given.get("workers", 2)),
        run_config=RunConfig(
            name="run",
            storage_path=given["folder"] + "/results",
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
    return [a for a in list_actors() if a.class_name == "TrainController" and a.state != "DEAD"]


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
    driver = run.drive(UPLOADING)
    moment(run)
    kill(driver)
    run.until_gone()
    assert run.state() in (None, "INITIALIZING", "RUNNING")
    assert len(run.saved()) == (1 if uploads else 0)
    (run.folder / "go-on").touch()
    run.let(0, 1)
    expected = "began with step 1" if uploads else "began with step 0"
    assert result_of(run.drive(UPLOADING))["value"] == expected


def test_a_job_whose_program_is_killed_takes_its_run_up(run: Run) -> None:
    given = json.dumps({"folder": str(run.folder), "address": run.head.address})
    program = ("--", sys.executable, "-c", DRIVER, given)
    job = run.command.popen("miniray", "job", "submit", "--retries", "1", *program)
    run.let(0)
    run.until_saved(1)
    ranks = run.ranks()
    os.kill(int((run.folder / "driver").read_text()), signal.SIGKILL)
    wait_until(lambda: not any(map(is_alive, ranks)), PATIENCE, told=run.describe)
    run.let(1)
    assert result_of(job)["value"] == "began with step 1"
