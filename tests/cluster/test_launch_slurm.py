"""`srun miniray run` on nodes of a real Slurm, each a slurmd of this machine.

Two hosts wherever a third one would show nothing more: each is two programs that start.
"""

from __future__ import annotations

import contextlib
import getpass
import json
import os
import signal
import sys
from typing import TYPE_CHECKING

import psutil
import pytest
from cluster_helpers import undisturbed_clock, wait_for_file, wait_for_text, wait_until
from launch_helpers import LOOKS_AND_SHOWS, PATIENCE, SAVES_AT_SIGTERM, SHOW_RANKS
from needed_tools import missing
from slurm_cluster import Slurm, slurm_cluster

if TYPE_CHECKING:
    import subprocess
    from collections.abc import Iterator
    from pathlib import Path

    from command_helpers import CommandLine

PYTHON = sys.executable
RUN = ("miniray", "run", "--host", "127.0.0.1")
#: Seconds in which each failure has to be decided, on a machine that has nothing else to do.
DECIDED = 10.0


@pytest.fixture(scope="module")
def slurm() -> Iterator[Slurm]:
    with slurm_cluster() as cluster:
        yield cluster


class Steps:
    """Starts steps of jobs for one test, and ends what they leave when it fails."""

    def __init__(self, slurm: Slurm, command: CommandLine, home: Path) -> None:
        self.slurm = slurm
        self.command = command
        self.home = home
        self.variables = {**slurm.variables, "HOME": str(home)}

    def srun(self, *words: str, hosts: int = 2) -> subprocess.Popen[str]:
        """Start a job of one step; the working directory is the test's."""
        return self.command.popen(
            "srun", f"-N{hosts}", *words, variables=self.variables, cwd=self.home
        )

    def on_each(self, script: str, *words: str, hosts: int = 2) -> subprocess.Popen[str]:
        """The same, where a script prepares `miniray run`; $SLURM_NODEID tells it which host."""
        return self.srun("sh", "-c", f'{script}\nexec "$@"', "sh", *words, hosts=hosts)

    def running(self) -> str:
        """The id of the only job."""
        wait_until(lambda: self.slurm.ask("squeue", "--noheader", "--states=R"))
        return self.slurm.ask("squeue", "--noheader", "--format=%A").split()[0]

    def leave_nothing(self, *kept: str) -> None:
        """Wait for that: no process, no job, and of a run whose hosts had all joined no file."""
        self.command.leaves_nothing()
        assert {path.name for path in self.home.glob(".miniray/run/*/*")} <= {*kept}
        assert bool(kept) or not list(self.home.glob(".miniray/run/*"))
        wait_until(lambda: not self.slurm.ask("squeue", "--noheader"))


@pytest.fixture
def steps(slurm: Slurm, command: CommandLine, tmp_path: Path) -> Iterator[Steps]:
    found = Steps(slurm, command, tmp_path)
    yield found
    # Not by their ids: one that has ended since it was listed is an error then.
    slurm.ask("scancel", "--signal=KILL", f"--user={getpass.getuser()}")


def end_of(step: subprocess.Popen[str]) -> tuple[int, str]:
    output, _ = step.communicate(timeout=PATIENCE)
    return step.returncode, output


def test_three_hosts_become_one_cluster_and_the_programs_code_is_that_of_srun(steps: Steps) -> None:
    """The secret is in no argument and no environment."""
    steps.variables["MINIRAY_TOKEN"] = f"mr1.{'A' * 43}.{'B' * 43}"  # nor is one that was given
    step = steps.srun(*RUN, "--", PYTHON, "-c", LOOKS_AND_SHOWS, "7", hosts=3)
    code, output = end_of(step)
    assert (code, output.splitlines()[:2]) == (7, ["0 0", "['0', '1', '2']"])
    # The other hosts end with 0: Slurm would take anything else for a failure of theirs.
    assert output.splitlines()[2:] == ["srun: error: n1: task 0: Exited with exit code 7"]
    steps.leave_nothing()


def test_the_secret_travels_encrypted_by_the_munge_of_slurm(steps: Steps) -> None:
    # The nodes share a munged, which reads a credential once: there is one host to read it.
    folder = steps.slurm.folder / "bin"
    steps.variables["PATH"] = f"{folder}{os.pathsep}{steps.command.environment['PATH']}"
    script = "while [ $SLURM_NODEID != 0 ] && [ ! -e seen ]; do sleep .05; done"
    run = (*RUN, "--rendezvous", "munge", "--", PYTHON, "-c", SHOW_RANKS, "0")
    step = steps.on_each(script, *run)
    (join,) = wait_for_match(steps.home, ".miniray/run/*/join")
    assert join.read_text().startswith("MUNGE:")
    (steps.home / "seen").touch()
    assert end_of(step) == (0, "['0', '1']\n")
    steps.leave_nothing()


def wait_for_match(folder: Path, pattern: str) -> list[Path]:
    wait_until(lambda: list(folder.glob(pattern)))
    return list(folder.glob(pattern))


def test_two_runs_side_by_side_on_the_same_nodes_do_not_meet(steps: Steps) -> None:
    script = f'echo > "$1"; until [ -e "$2" ]; do sleep .05; done; exec {PYTHON} -c "$0" "$3"'
    pairs = [("a", "b", "3"), ("b", "a", "4")]  # each goes on when the other one has started
    run = ("--nodelist=n1,n2", *RUN, "--", "sh", "-c", script, SHOW_RANKS)
    both = [steps.srun(*run, *names) for names in pairs]
    ends = [end_of(step) for step in both]
    assert [(code, output.splitlines()[0]) for code, output in ends] == [
        (3, "['0', '1']"),
        (4, "['0', '1']"),
    ]
    steps.leave_nothing()


# --- failures, each of which is decided in ten seconds -----------------------------------


@contextlib.contextmanager
def decided_in_time() -> Iterator[None]:
    began = undisturbed_clock()
    yield
    assert undisturbed_clock() - began < DECIDED


def test_a_host_that_never_comes_is_named(steps: Steps) -> None:
    # The other host waits as long as it takes: it may start well before the first one.
    script = f"case $SLURM_NODEID in 2) exit;; 1) set -- {' '.join(RUN)} -- true;; esac"
    step = steps.on_each(script, *RUN, "--wait", "3", "--", "true", hosts=3)
    wait_for_match(steps.home, ".miniray/run/*/join")
    with decided_in_time():
        code, output = end_of(step)
    assert code == 1
    assert "of 3 hosts joined within 3 s: " in output
    assert "host 2 has not been heard of." in output
    steps.leave_nothing("end", "n1")


#: With no byte left: a node that can write its first file joins before it fails at the next one.
FULL_DISK = """set -- unshare --mount sh -c '
    mount -t tmpfs -o size=4k none full && head -c 4096 /dev/zero > full/rest &&
    MINIRAY_TMPDIR="$PWD/full" exec "$@"' sh "$@\""""
#: What prepares a host so that it cannot join, and what it says then.
CANNOT_JOIN = {
    "no folder": ('export MINIRAY_TMPDIR="$PWD/folder/job"', "Not a directory"),
    "a full disk": (FULL_DISK, "No space left on device"),
    "another version": ('export PYTHONPATH="$PWD/other"', "miniray 0.0.1"),
    "another Python": ('export PYTHONPATH="$PWD/python"', "Python 3.99.0"),
    "no route": ('set -- unshare --net "$@"', "cannot be reached: Network is unreachable"),
}
#: What an interpreter begins with that is told to be of another version.
BEGINS = {
    "other": "import miniray.version; miniray.version.VERSION = '0.0.1'",
    "python": "import miniray.version; miniray.version.PYTHON_VERSION = '3.99.0'",
}


@pytest.mark.parametrize("name", CANNOT_JOIN)
def test_a_host_that_cannot_join_says_why(steps: Steps, name: str) -> None:
    prepare, expected = CANNOT_JOIN[name]
    if "unshare" in prepare and os.geteuid() != 0:
        missing("namespaces are not available to this user")
    (steps.home / "folder").touch()
    (steps.home / "full").mkdir()
    for folder, statement in BEGINS.items():
        (steps.home / folder).mkdir()
        (steps.home / folder / "sitecustomize.py").write_text(statement)
    script = f"if [ $SLURM_NODEID = 1 ]; then {prepare}; fi"
    step = steps.on_each(script, *RUN, "--wait", "300", "--", "true")
    (told,) = wait_for_match(steps.home, ".miniray/run/*/n1")
    wait_until(lambda: json.loads(told.read_text())["failure"])  # it has tried, and failed
    with decided_in_time():
        code, output = end_of(step)
    assert code == 1
    line = next(each for each in output.splitlines() if "of 2 hosts joined within" in each)
    assert f"host 1 ({os.uname().nodename}) cannot join: " in line
    assert expected in line
    steps.leave_nothing("end", "n1")


def test_a_program_that_does_not_exist_ends_the_run(steps: Steps) -> None:
    with decided_in_time():
        code, output = end_of(steps.srun(*RUN, "--", "no-such-program"))
    assert code == 127
    assert "There is no program 'no-such-program'." in output
    steps.leave_nothing("end")


#: Tells the process of each `miniray run`.
TELL_PID = 'echo $$ > "$SLURMD_NODENAME"'


@pytest.mark.parametrize(("options", "expected"), [((), 6), (("--strict",), 128 + signal.SIGTERM)])
def test_a_host_is_lost_and_the_run_goes_on_or_ends_with_strict(
    steps: Steps, options: tuple[str, ...], expected: int
) -> None:
    program = ("sh", "-c", "echo > running; until [ -e go ]; do sleep .05; done; exit 6")
    step = steps.on_each(TELL_PID, *RUN, *options, "--", *program, hosts=3)
    wait_for_file(steps.home / "running")
    with decided_in_time():
        os.kill(int(wait_for_text(steps.home / "n3")), signal.SIGKILL)
        wait_until(lambda: len(steps.command.records()) == 2)
        if not options:
            (steps.home / "go").touch()
        assert f"n1: task 0: Exited with exit code {expected}" in end_of(step)[1]
    steps.leave_nothing()


def test_when_the_first_host_is_killed_nothing_of_the_run_is_left(steps: Steps) -> None:
    step = steps.on_each(TELL_PID, *RUN, "--", "sh", "-c", "sleep 600 & echo $! > pid; wait")
    sleeper = int(wait_for_text(steps.home / "pid"))
    with decided_in_time():
        os.kill(int(wait_for_text(steps.home / "n1")), signal.SIGKILL)
        wait_until(lambda: not steps.command.pids() and not psutil.pid_exists(sleeper))
        assert "n1: task 0: Killed" in end_of(step)[1]
    steps.leave_nothing()


# --- what Slurm does to jobs ------------------------------------------------------------


def test_hosts_hold_through_scancel_until_the_program_has_saved(steps: Steps) -> None:
    step = steps.srun(*RUN, "--", PYTHON, "-c", SAVES_AT_SIGTERM, ".")
    wait_for_file(steps.home / "running")
    assert list(steps.home.glob(".miniray/run/*")) == []  # nor is the secret on the shared disk
    with decided_in_time():
        steps.slurm.ask("scancel", steps.running())
        assert "n1: task 0: Exited with exit code 5" in end_of(step)[1]
    assert (steps.home / "checkpoint").read_text() == "saved on the other host"
    steps.leave_nothing()


def test_hosts_hold_where_slurm_signals_all_processes_that_a_step_has_started(
    command: CommandLine, tmp_path: Path
) -> None:
    """It finds them by names without spaces, and the names of miniray's have one."""
    with slurm_cluster("linuxproc") as cluster:
        steps = Steps(cluster, command, tmp_path)
        step = steps.srun(*RUN, "--", PYTHON, "-c", SAVES_AT_SIGTERM, ".")
        wait_for_file(tmp_path / "running")
        cluster.ask("scancel", steps.running())
        assert "n1: task 0: Exited with exit code 5" in end_of(step)[1]
        assert (tmp_path / "checkpoint").read_text() == "saved on the other host"
        steps.leave_nothing()


def test_scancel_with_sigkill_leaves_nothing(steps: Steps) -> None:
    step = steps.srun(*RUN, "--", "sh", "-c", "sleep 600 & echo $! > pid; wait")
    sleeper = int(wait_for_text(steps.home / "pid"))
    with decided_in_time():
        steps.slurm.ask("scancel", "--signal=KILL", steps.running())
        assert end_of(step)[0] != 0
        wait_until(lambda: not steps.command.pids() and not psutil.pid_exists(sleeper))
    steps.leave_nothing()


def test_a_warning_of_slurm_reaches_the_program_alone(steps: Steps) -> None:
    program = "trap 'exit 4' USR2; echo > running; while :; do sleep .05; done"
    step = steps.srun(*RUN, "--", "sh", "-c", program)
    wait_for_file(steps.home / "running")
    with decided_in_time():
        steps.slurm.ask("scancel", "--signal=USR2", steps.running())
        assert end_of(step)[0] == 4
    steps.leave_nothing()


def test_a_job_that_is_requeued_runs_again(steps: Steps) -> None:
    """The batch script is the printed one; its first run leaves a secret on the shared disk."""
    program = 'echo > "run-$SLURM_RESTART_COUNT"; [ -n "$SLURM_RESTART_COUNT" ] || sleep 600'
    printed = steps.command.run(
        "slurm", "script", "-N2", "--cpus-per-task=1", "--", "sh", "-c", program
    )
    assert printed.returncode == 0, printed.stderr
    (steps.home / "job").write_text(printed.stdout)
    submit = steps.command.popen(
        "sbatch", "--parsable", "job", variables=steps.variables, cwd=steps.home
    )
    job = end_of(submit)[1].strip()
    wait_for_file(steps.home / "run-")
    steps.slurm.ask("scontrol", "requeue", job)
    wait_until(lambda: "BeginTime" in steps.slurm.ask("squeue", "--noheader", "--format=%r"))
    steps.slurm.ask("scontrol", "update", f"JobId={job}", "StartTime=now")  # else in two minutes
    wait_for_file(steps.home / "run-1")
    steps.leave_nothing()
