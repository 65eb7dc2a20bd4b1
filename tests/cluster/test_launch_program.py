"""The program of a run, and what guards it."""

from __future__ import annotations

import subprocess
import sys

import pytest

from miniray.launch import program
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


#: Has a child that is gone, and waited for, once the guard has stopped it.
PARENT = """
import signal, subprocess, time
signal.signal(signal.SIGCHLD, signal.SIG_IGN)
print(subprocess.Popen(["sleep", "600"]).pid, flush=True)
time.sleep(600)
"""
GOES_WHEN_STOPPED = """
kill() {
    [ "$2$3" != "STOP$goes" ] || command kill -s KILL "$3"
    while [ "$2$3" = "STOP$goes" ] && [ -e "/proc/$3" ]; do sleep 0.01; done
    command kill "$@"
}
"""


def test_a_descendant_that_ends_while_its_parent_is_being_killed_holds_nothing_up() -> None:
    with subprocess.Popen([sys.executable, "-c", PARENT], stdout=subprocess.PIPE) as parent:
        assert parent.stdout is not None
        child = parent.stdout.readline().strip().decode()
        guard = ["/bin/sh", "-c", GOES_WHEN_STOPPED + program._GUARD]
        guarded = b"%d\n" % parent.pid
        try:
            subprocess.run(guard, input=guarded, env={"goes": child}, timeout=20, check=False)
            assert parent.wait(20) == -9
        finally:
            parent.kill()
