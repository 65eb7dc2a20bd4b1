"""The program of a run, which ends with it."""

from __future__ import annotations

from typing import TYPE_CHECKING

import psutil
import pytest
from cluster_helpers import wait_for_text, wait_until
from launch_helpers import PATIENCE

from miniray.launch.program import Program, ProgramError

if TYPE_CHECKING:
    from pathlib import Path

    from command_helpers import CommandLine


@pytest.mark.parametrize(
    "variables", [{}, {"MINIRAY_START_TIMEOUT": "0.001"}], ids=["", "its node does not start"]
)
def test_a_program_ends_with_its_run_however_early_that_is_killed(
    command: CommandLine, variables: dict[str, str]
) -> None:
    kills_its_parent = ("sh", "-c", "kill -s KILL $PPID; exec sleep 600")
    run = command.popen("miniray", "run", "--", *kills_its_parent, variables=variables)
    # The output is that of the program too, and so is open for as long as this runs.
    assert (run.communicate(timeout=PATIENCE)[0], run.returncode) == ("", -9)
    wait_until(lambda: not command.pids())
    command.leaves_nothing()


def test_what_a_program_has_started_ends_with_its_run_wherever_it_went(
    command: CommandLine, tmp_path: Path
) -> None:
    script = f"setsid sh -c 'echo $$ > {tmp_path / 'pid'}; sleep 600; true' & wait"
    run = command.popen("miniray", "run", "--", "sh", "-c", script)
    started = int(wait_for_text(tmp_path / "pid"))
    run.kill()
    run.communicate(timeout=PATIENCE)
    wait_until(lambda: not psutil.pid_exists(started) and not command.pids())
    command.leaves_nothing()


def test_a_program_that_cannot_be_started_is_named() -> None:
    with pytest.raises(ProgramError, match="/no/program cannot be started: No such file"):
        Program(["/no/program"], {}, stdin=False)
