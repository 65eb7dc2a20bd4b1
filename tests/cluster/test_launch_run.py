"""`miniray run` on several hosts, each of which is a process here with a scheduler's variables."""

from __future__ import annotations

import contextlib
import json
import os
import pty
import signal
import subprocess
import sys
from typing import TYPE_CHECKING

import psutil
import pytest
from cluster_helpers import wait_for_file, wait_for_text, wait_until
from command_helpers import CommandLine, one_line
from launch_helpers import SAVES_AT_SIGTERM, SHOW_RANKS, hosts, hydra, open_mpi, slurm
from needed_tools import missing

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

PYTHON = sys.executable


@pytest.mark.parametrize("scheduler", [slurm, open_mpi, hydra])
def test_all_hosts_become_one_cluster_and_the_first_ends_with_the_programs_code(
    command: CommandLine, tmp_path: Path, scheduler: Callable[[int, int], dict[str, str]]
) -> None:
    with hosts(command, tmp_path, 2, scheduler=scheduler) as run:
        run.start_all(PYTHON, "-c", SHOW_RANKS, "7")
        assert [run.end_of(rank) for rank in (0, 1)] == [(7, "['0', '1']\n"), (0, "")]
    command.leaves_nothing()
    assert list(tmp_path.iterdir()) == []


def test_on_a_laptop_the_same_command_is_a_cluster_of_this_machine(command: CommandLine) -> None:
    done = command.run("run", "--", PYTHON, "-c", SHOW_RANKS, "3")
    assert (done.returncode, done.stdout, done.stderr) == (3, "['0']\n", "")
    command.leaves_nothing()


#: Says how often Ctrl-C has reached it, when a signal has come the same way after the first time.
COUNTS_INTERRUPTS = """
import os, signal, sys
seen = []
def interrupted(*_):
    seen.append(1)
    if len(seen) == 1:
        os.kill(os.getppid(), signal.SIGUSR1)
def end(*_):
    print("interrupts:", len(seen))
    sys.exit(3)
signal.signal(signal.SIGINT, interrupted)
signal.signal(signal.SIGUSR1, end)
print("ready")
while True:
    signal.pause()
"""


def test_ctrl_c_at_a_terminal_reaches_the_program_once(command: CommandLine) -> None:
    pid, terminal = pty.fork()
    if pid == 0:
        program = ("miniray", "run", "--", PYTHON, "-u", "-c", COUNTS_INTERRUPTS)
        os.execvpe(program[0], program, command.environment)
    try:
        shown = b""
        while b"ready" not in shown:
            shown += os.read(terminal, 4096)
        os.write(terminal, b"\x03")
        with contextlib.suppress(OSError):  # once nobody has the terminal any more
            while data := os.read(terminal, 4096):
                shown += data
    finally:
        os.close(terminal)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 3
    assert b"interrupts: 1\r\n" in shown
    command.leaves_nothing()


def test_a_program_at_a_terminal_ends_with_its_children_when_its_run_is_killed(
    command: CommandLine, tmp_path: Path
) -> None:
    pid, terminal = pty.fork()
    if pid == 0:
        child = f"sleep 600 & echo $$ $! > {tmp_path / 'pids'}; wait"
        script = f"trap '' HUP; sh -c '{child}' & wait"
        os.execvpe("miniray", ("miniray", "run", "--", "sh", "-c", script), command.environment)
    try:
        pids = [int(each) for each in wait_for_text(tmp_path / "pids").split()]
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
        wait_until(lambda: not any(map(psutil.pid_exists, pids)))
    finally:
        os.close(terminal)
    command.leaves_nothing()


def test_signals_that_come_while_a_run_exits_do_not_change_its_code(
    command: CommandLine, tmp_path: Path
) -> None:
    running, go = tmp_path / "running", tmp_path / "go"
    script = f"trap '' TERM; echo > {running}; until [ -e {go} ]; do sleep .05; done; exit 5"
    run = command.popen("miniray", "run", "--", "sh", "-c", script)
    wait_for_file(running)
    go.touch()
    while run.poll() is None:
        run.send_signal(signal.SIGTERM)
        with contextlib.suppress(subprocess.TimeoutExpired):
            run.wait(timeout=0.002)
    assert run.returncode == 5
    command.leaves_nothing()


def test_a_program_that_does_not_exist_ends_the_run_on_all_hosts(
    command: CommandLine, tmp_path: Path
) -> None:
    with hosts(command, tmp_path, 2) as run:
        run.start_all("no-such-program")
        code, output = run.end_of(0)
        assert code == 127
        assert "There is no program 'no-such-program'." in output
        code, output = run.end_of(1)
        assert code == 1
        assert "The first host has ended the run: There is no program" in output
    command.leaves_nothing()


def test_a_run_that_is_stopped_while_it_waits_leaves_nothing(
    command: CommandLine, tmp_path: Path
) -> None:
    with hosts(command, tmp_path, 2) as run:
        first = run.start(0, "true")
        wait_for_file(tmp_path / "slurm-4711-0-0" / "join")
        first.send_signal(signal.SIGTERM)
        code, output = run.end_of(0)
        assert (code, output) == (
            128 + signal.SIGTERM,
            "miniray: The run was stopped by SIGTERM.\n",
        )
        assert [path.name for path in (tmp_path / "slurm-4711-0-0").iterdir()] == ["end"]
        run.start(1, "true")
        code, output = run.end_of(1)
        assert code == 1
        assert "ended the run: it was stopped by SIGTERM before all hosts had joined." in output
    command.leaves_nothing()


def test_what_keeps_a_host_from_joining_is_told_once_while_the_first_one_waits(
    command: CommandLine, tmp_path: Path
) -> None:
    folder = tmp_path / "slurm-4711-0-0"
    with hosts(command, tmp_path, 2) as run:
        first = run.start(0, "true")
        wait_for_file(folder / "join")
        trouble = "No answer from 10.0.0.1:6379 within 5 s."
        (folder / "n1").write_text(json.dumps({"host": "cut-off", "trouble": trouble}))
        told = f"miniray: Still waiting for host 1 (cut-off): {trouble}\n"
        assert first.stdout is not None
        assert first.stdout.readline() == told
        first.send_signal(signal.SIGTERM)
        code, output = run.end_of(0)
        assert (code, output) == (
            128 + signal.SIGTERM,
            "miniray: The run was stopped by SIGTERM.\n",
        )


def test_the_other_hosts_hold_through_sigterm_until_the_program_has_saved(
    command: CommandLine, tmp_path: Path
) -> None:
    with hosts(command, tmp_path / "meet", 2) as run:
        run.start_all(PYTHON, "-c", SAVES_AT_SIGTERM, str(tmp_path))
        wait_for_file(tmp_path / "running")
        run.signal_all(signal.SIGTERM)
        assert run.end_of(0)[0] == 5
        assert (tmp_path / "checkpoint").read_text() == "saved on the other host"
        assert run.end_of(1)[0] == 0
    command.leaves_nothing()


IGNORES = "trap '' TERM; echo > {}; while :; do sleep 1; done"


def test_a_program_that_ignores_sigterm_is_killed_when_the_grace_is_over(
    command: CommandLine, tmp_path: Path
) -> None:
    with hosts(command, tmp_path / "meet", 2, "--grace", "1") as run:
        run.start_all("sh", "-c", IGNORES.format(tmp_path / "running"))
        wait_for_file(tmp_path / "running")
        run.signal_all(signal.SIGTERM)
        assert run.codes() == [128 + signal.SIGKILL, 0]
    command.leaves_nothing()


def test_a_node_does_not_hold_longer_than_the_grace(command: CommandLine, tmp_path: Path) -> None:
    with hosts(command, tmp_path / "meet", 2, "--grace", "0.5") as run:
        run.start_all("sh", "-c", IGNORES.format(tmp_path / "running"))
        wait_for_file(tmp_path / "running")
        run.processes[1].send_signal(signal.SIGTERM)
        code, output = run.end_of(1)
        assert code == 0
        assert "The run did not end within 0.5 s: this node does." in output
        run.processes[0].send_signal(signal.SIGTERM)
        assert run.end_of(0)[0] == 128 + signal.SIGKILL
    command.leaves_nothing()


@pytest.mark.parametrize("number", [signal.SIGUSR1, signal.SIGUSR2])
def test_a_schedulers_warning_reaches_the_program_alone(
    command: CommandLine, tmp_path: Path, number: signal.Signals
) -> None:
    script = f"trap 'exit 4' {number.name[3:]}; echo > {tmp_path / 'running'}"
    script += "; while :; do sleep .1; done"
    with hosts(command, tmp_path / "meet", 2) as run:
        run.start_all("sh", "-c", script)
        wait_for_file(tmp_path / "running")
        run.signal_all(number)
        assert run.codes() == [4, 0]
    command.leaves_nothing()


def test_a_host_without_munge_is_told(command: CommandLine, tmp_path: Path) -> None:
    done = command.run(
        *("run", "--rendezvous", "munge", "--host", "127.0.0.1", "--", PYTHON),
        **slurm(0, 2),
        HOME=str(tmp_path),
        PATH=os.path.dirname(PYTHON),
    )
    assert done.returncode == 1
    assert "There is no program 'munge' here: give --rendezvous a folder." in done.stderr
    command.leaves_nothing()


def test_a_batch_script_without_srun_is_told_what_to_write(command: CommandLine) -> None:
    alone = {"SLURM_JOB_ID": "1", "SLURM_NNODES": "4"}
    line = one_line(command.run("run", "--", "true", **alone))
    assert "You have 4 nodes and this runs on one: write `srun miniray run -- ...`." in line


def test_a_step_with_fewer_cpus_than_the_job_is_told(command: CommandLine) -> None:
    few = {**slurm(0, 1), "SLURM_JOB_CPUS_PER_NODE": "640"}
    done = command.run("run", "--", "true", **few)
    assert done.returncode == 0
    assert " of the 640 CPUs that the job has on this host" in done.stderr
    assert "srun --cpus-per-task=640" in done.stderr
    command.leaves_nothing()


@pytest.mark.parametrize(
    "module", ["miniray", "miniray.head.main", "miniray.node.node_main", "miniray.worker.main"]
)
def test_the_runtime_does_not_import_the_launchers(command: CommandLine, module: str) -> None:
    shown = f"import sys, {module}; print(any('miniray.launch' in name for name in sys.modules))"
    done = command.popen(PYTHON, "-c", shown)
    assert done.communicate(timeout=60)[0] == "False\n"


IMPORTS = """
import sys
from miniray.cli.main import main
main(["run", "--help"], standalone_mode=False)
print([name in sys.modules for name in ("miniray.cli.run", "miniray.cli.status", "asyncio")])
"""


def test_only_what_the_called_command_needs_is_imported(command: CommandLine) -> None:
    output, _ = command.popen(PYTHON, "-c", IMPORTS).communicate(timeout=60)
    assert output.splitlines()[-1] == "[True, False, False]"


LEAVES_ORPHAN = """
import os, pathlib, signal, sys, time
folder = pathlib.Path(sys.argv[1])
read, write = os.pipe()
if (parent := os.fork()) == 0:
    if (orphan := os.fork()) == 0:  # it ends as soon as it is one
        while os.getppid() != 1:
            time.sleep(0.01)
    else:
        os.write(write, b"%d" % orphan)
    os._exit(0)
os.waitpid(parent, 0)
orphan = int(os.read(read, 100))
while os.path.exists(f"/proc/{orphan}"):
    time.sleep(0.01)
signal.signal(signal.SIGTERM, lambda *_: sys.exit(4))
(folder / "on").touch()
signal.pause()
"""


def test_the_first_process_of_a_container_reaps_orphans_and_passes_signals_on(
    command: CommandLine, tmp_path: Path
) -> None:
    container = ["unshare", "--pid", "--fork", "--mount-proc", "--kill-child"]
    if subprocess.run([*container, "true"], capture_output=True, check=False).returncode != 0:
        missing("process namespaces are not available to this user")
    program = (PYTHON, "-c", LEAVES_ORPHAN, str(tmp_path))
    run = command.popen(*container, "miniray", "run", "--", *program)
    wait_for_file(tmp_path / "on")
    (first,) = psutil.Process(run.pid).children()
    first.send_signal(signal.SIGTERM)
    output, _ = run.communicate(timeout=60)
    assert (run.returncode, output) == (4, "")
    command.leaves_nothing()


#: Finds the actor of another program of the run: in this process, in a child, and in one of a task.
SHARES = """
import multiprocessing, os, subprocess, sys, miniray
def find():
    miniray.init(os.environ["MINIRAY_ADDRESS"], namespace="n")
    print(miniray.get(miniray.get_actor("kept").name.remote()), flush=True)
if __name__ == "__main__":
    find()
    if len(sys.argv) == 1:
        process = multiprocessing.get_context("spawn").Process(target=find)
        process.start()
        process.join()
        task = miniray.remote(subprocess.check_output).remote([sys.executable, *sys.argv, "child"])
        print(miniray.get(task).decode(), end="")
"""
LEAVES = """
import miniray
miniray.init(address="auto", namespace="n")
@miniray.remote(num_cpus=0)
class Kept:
    def name(self):
        return "found"
kept = Kept.options(name="kept", lifetime="detached").remote()
print(miniray.get(kept.name.remote()), flush=True)
"""


def test_all_programs_and_commands_of_a_run_on_a_laptop_share_its_cluster(
    command: CommandLine, tmp_path: Path
) -> None:
    shares, nodes = tmp_path / "shares.py", tmp_path / "nodes"
    shares.write_text(SHARES)
    line = 'miniray list nodes > "$0"; "$1" -c "$2"; "$1" "$3"'
    done = command.run("run", "--", "sh", "-c", line, str(nodes), PYTHON, LEAVES, str(shares))
    assert (done.returncode, done.stdout, done.stderr) == (0, "found\n" * 4, "")
    assert nodes.read_text().startswith("1 node\n")
    command.leaves_nothing()


def test_a_program_runs_while_its_cluster_starts_and_is_ended_if_that_fails(
    command: CommandLine,
) -> None:
    program = ("sh", "-c", "trap 'echo ended; exit 5' TERM; echo runs; while :; do sleep .1; done")
    done = command.run("run", "--", *program, MINIRAY_START_TIMEOUT="0.001")
    assert (done.returncode, done.stdout) == (5, "runs\nended\n")
    assert done.stderr.startswith("miniray: ")
    command.leaves_nothing()
