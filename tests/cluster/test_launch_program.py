"""The program of a run, and what guards it."""

from __future__ import annotations

import subprocess
import sys

import pytest

from miniray.launch.program import Program, ProgramError

#: Ends who has started it before it does anything else, and stays.
KILLS_ITS_PARENT = "kill -s KILL $PPID; exec sleep 600"
STARTS = f"""
from miniray.launch.program import Program
Program(["/bin/sh", "-c", {KILLS_ITS_PARENT!r}], {{}}, stdin=False).finish()
"""


def test_a_program_ends_with_who_has_started_it_however_early_that_is_killed() -> None:
    # The output is that of the program too, and so is open for as long as this runs.
    done = subprocess.run(
        [sys.executable, "-c", STARTS], capture_output=True, timeout=60, check=False
    )
    assert (done.returncode, done.stdout, done.stderr) == (-9, b"", b"")


def test_a_program_that_cannot_be_started_is_named() -> None:
    with pytest.raises(ProgramError, match="/no/program cannot be started: No such file"):
        Program(["/no/program"], {}, stdin=False)
