"""`miniray ssh`, with a program that stands for ssh; `test_launch_servers.py` has real servers."""

from __future__ import annotations

import os
import signal
import sys
from typing import TYPE_CHECKING

import psutil
import pytest
from cluster_helpers import wait_for_file, wait_for_text, wait_until
from command_helpers import CommandLine, command_line
from launch_helpers import LOOKS_AND_SHOWS, PATIENCE, SHOW_RANKS

from miniray.security.token import JoinToken, make_secret

if TYPE_CHECKING:
    import subprocess
    from collections.abc import Iterator
    from pathlib import Path

#: Stands for ssh: a shell of this machine is the host. Its end is that of the connection.
SSH = """#!/bin/sh
while [ "$1" != "--" ]; do shift; done
host=$2; shift 2
case $host in unknown*)
    echo "ssh: Could not resolve hostname $host" >&2; exit 255
esac
case $host in loud*) echo "Welcome to $host."; esac
export MINIRAY_MACHINE_ID=$host PATH=/usr/bin:/bin
exec sh -c "$*"
"""


@pytest.fixture
def hosts(tmp_path: Path) -> Iterator[CommandLine]:
    """A command line for which every name is a host."""
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin/ssh").write_text(SSH)
    (tmp_path / "bin/ssh").chmod(0o755)
    for command in command_line():
        path = command.environment["PATH"]
        command.environment["PATH"] = f"{tmp_path / 'bin'}{os.pathsep}{path}"
        yield command


def end_of(process: subprocess.Popen[str]) -> tuple[int, str]:
    output, _ = process.communicate(timeout=PATIENCE)
    return process.returncode, output


def test_the_hosts_become_one_cluster_show_nobody_the_secret_and_leave_nothing(
    hosts: CommandLine,
) -> None:
    run = hosts.popen(
        "miniray", "ssh", "a", "user@b", "--", sys.executable, "-c", LOOKS_AND_SHOWS, "9"
    )
    assert end_of(run) == (9, "0 0\n['0', '1']\n")
    hosts.leaves_nothing()


def test_python_is_the_one_that_runs_miniray_there(hosts: CommandLine) -> None:
    run = hosts.popen("miniray", "ssh", "a", "--", "python", "-c", "import sys; print(sys.prefix)")
    assert end_of(run) == (0, f"{sys.prefix}\n")


def test_hosts_come_from_a_file_too(hosts: CommandLine, tmp_path: Path) -> None:
    (tmp_path / "names").write_text("b\n\nc\n")
    names = str(tmp_path / "names")
    run = hosts.popen(
        "miniray", "ssh", "--hosts", names, "a", "--", sys.executable, "-c", SHOW_RANKS, "0"
    )
    assert end_of(run) == (0, "['0', '1', '2']\n")


#: Prints what a task of the other host reads of the program's folder, and where that is.
USES_FILES = """
import os, sys, miniray
from miniray.util.scheduling_strategies import NodeAffinitySchedulingStrategy as On
import helper
miniray.init()
other = next(n["NodeID"] for n in miniray.nodes() if n["Labels"].get("rank") == "1")
read = miniray.remote(helper.read).options(scheduling_strategy=On(other, soft=False))
print(miniray.get(read.remote()), os.getcwd())
sys.exit(4)
"""


@pytest.mark.parametrize("options", [(), ("--here",)], ids=["on the first host", "here"])
def test_a_folder_is_brought_along_and_gone_afterwards(
    hosts: CommandLine, tmp_path: Path, options: tuple[str, ...]
) -> None:
    folder, place = tmp_path / "mine", tmp_path / "tmp"
    folder.mkdir()
    place.mkdir()
    (folder / "train.py").write_text(USES_FILES)
    (folder / "helper.py").write_text("def read():\n    return open('data.txt').read()\n")
    (folder / "data.txt").write_text("brought along")
    run = hosts.popen(
        *("miniray", "ssh", *options, "--working-dir", str(folder), "a", "b", "--"),
        *("python", "train.py" if not options else str(folder / "train.py")),
        variables={"TMPDIR": str(place)},
    )
    code, output = end_of(run)
    assert (code, output.startswith("brought along /")) == (4, True), output
    if not options:
        assert output.startswith(f"brought along {place}/")
    assert list(place.iterdir()) == []
    hosts.leaves_nothing()


def test_a_folder_is_gone_when_the_session_of_ssh_was_ended(
    hosts: CommandLine, tmp_path: Path
) -> None:
    folder, place = tmp_path / "mine", tmp_path / "tmp"
    folder.mkdir()
    place.mkdir()
    script = f"echo $$ > {tmp_path / 'pid'}; sleep 600"
    run = hosts.popen(
        *("miniray", "ssh", "--working-dir", str(folder), "a", "--", "sh", "-c", script),
        variables={"TMPDIR": str(place)},
    )
    program = int(wait_for_text(tmp_path / "pid"))
    for process in psutil.Process(program).parents():
        if process.pid == run.pid:
            break
        process.terminate()
    end_of(run)
    wait_until(lambda: not list(place.iterdir()))
    hosts.leaves_nothing()


def test_a_program_here_is_attached_from_outside_and_shows_nobody_the_secret(
    hosts: CommandLine,
) -> None:
    run = hosts.popen(
        "miniray", "ssh", "--here", "a", "b", "--", sys.executable, "-c", LOOKS_AND_SHOWS, "9"
    )
    assert end_of(run) == (9, "0 0\n['0', '1']\n")
    hosts.leaves_nothing()


#: Runs what follows in a process of its own, which has no descriptor of this one.
BELOW = (
    "import subprocess, sys; sys.exit(subprocess.run([sys.executable, *sys.argv[1:]]).returncode)"
)


def test_a_program_here_may_be_one_that_starts_the_driver(hosts: CommandLine) -> None:
    run = hosts.popen(
        *("miniray", "ssh", "--here", "a", "--"),
        *(sys.executable, "-c", BELOW, "-c", SHOW_RANKS, "9"),
    )
    assert end_of(run) == (9, "['0']\n")
    hosts.leaves_nothing()


def test_a_program_here_does_not_get_the_token_of_another_cluster(hosts: CommandLine) -> None:
    run = hosts.popen(
        *("miniray", "ssh", "--here", "a", "--", "sh", "-c", "echo [$MINIRAY_TOKEN]"),
        variables={"MINIRAY_TOKEN": str(JoinToken(bytes(32), make_secret()))},
    )
    assert end_of(run) == (0, "[]\n")
    hosts.leaves_nothing()


def test_ctrl_c_reaches_a_program_here(hosts: CommandLine, tmp_path: Path) -> None:
    script = f"trap 'echo caught; exit 6' INT; echo > {tmp_path / 'on'}; while :; do sleep .1; done"
    run = hosts.popen("miniray", "ssh", "--here", "a", "--", "bash", "-c", script)
    wait_for_file(tmp_path / "on")
    run.send_signal(signal.SIGINT)
    assert end_of(run) == (6, "caught\n")
    hosts.leaves_nothing()


def test_a_program_here_that_does_not_end_is_killed_after_the_grace(
    hosts: CommandLine, tmp_path: Path
) -> None:
    script = f"trap '' TERM; echo > {tmp_path / 'on'}; while :; do sleep .1; done"
    run = hosts.popen(
        *("miniray", "ssh", "--here", "--grace", "1", "a", "--", "bash", "-c", script)
    )
    wait_for_file(tmp_path / "on")
    run.terminate()
    assert end_of(run) == (137, "")
    hosts.leaves_nothing()


def test_a_program_here_that_does_not_exist_is_named(hosts: CommandLine) -> None:
    code, output = end_of(hosts.popen("miniray", "ssh", "--here", "a", "--", "no-such-program"))
    assert code == 127
    assert "no-such-program cannot be started" in output
    hosts.leaves_nothing()


def test_when_the_cluster_ends_a_program_here_is_ended(hosts: CommandLine, tmp_path: Path) -> None:
    script = f"trap 'echo told; exit 3' TERM; echo > {tmp_path / 'on'}; while :; do sleep .1; done"
    run = hosts.popen("miniray", "ssh", "--here", "a", "--", "bash", "-c", script)
    wait_for_file(tmp_path / "on")
    for client in psutil.Process(run.pid).children():
        if "miniray" in " ".join(client.cmdline()):  # the host, not the program
            client.kill()
    code, output = end_of(run)
    assert (code, "told" in output) == (3, True), output
    hosts.leaves_nothing()


def test_a_host_that_cannot_be_reached_is_named_with_what_ssh_says(hosts: CommandLine) -> None:
    code, output = end_of(hosts.popen("miniray", "ssh", "a", "unknown1", "--", "true"))
    assert code == 1
    assert "host 1 (unknown1) cannot join: ssh ended with exit code 255" in output
    assert "Could not resolve hostname unknown1" in output
    hosts.leaves_nothing()


def test_what_a_hosts_shell_prints_as_it_begins_is_shown(hosts: CommandLine) -> None:
    run = hosts.popen(
        "miniray", "ssh", "loud1", "loud2", "--", sys.executable, "-c", SHOW_RANKS, "0"
    )
    code, output = end_of(run)
    assert code == 0
    assert sorted(output.splitlines()) == [
        "['0', '1']",
        "loud1: Welcome to loud1.",
        "loud2: Welcome to loud2.",
    ]


def test_hosts_without_that_python_are_told(hosts: CommandLine) -> None:
    code, output = end_of(hosts.popen("miniray", "ssh", "--python", "/no/py", "a", "--", "true"))
    assert code == 127
    assert "/no/py" in output
    hosts.leaves_nothing()


def test_ctrl_c_reaches_the_program(hosts: CommandLine, tmp_path: Path) -> None:
    script = f"trap 'echo caught; exit 6' INT; echo > {tmp_path / 'on'}; while :; do sleep .1; done"
    run = hosts.popen("miniray", "ssh", "a", "b", "--", "bash", "-c", script)
    wait_for_file(tmp_path / "on")
    run.send_signal(signal.SIGINT)
    assert end_of(run) == (6, "caught\n")
    hosts.leaves_nothing()


def test_a_second_ctrl_c_cuts_the_connections(hosts: CommandLine, tmp_path: Path) -> None:
    script = f"trap '' INT; echo > {tmp_path / 'on'}; while :; do sleep .1; done"
    run = hosts.popen("miniray", "ssh", "--grace", "1", "a", "b", "--", "bash", "-c", script)
    wait_for_file(tmp_path / "on")
    run.send_signal(signal.SIGINT)
    run.send_signal(signal.SIGTERM)
    code, output = end_of(run)
    assert code != 0
    assert "The connections are cut." in output
    hosts.leaves_nothing()


def test_when_this_end_is_killed_nothing_is_left_on_the_hosts(
    hosts: CommandLine, tmp_path: Path
) -> None:
    run = hosts.popen(
        *("miniray", "ssh", "a", "b", "--"),
        *("sh", "-c", f"echo $$ > {tmp_path / 'pid'}; sleep 600"),
    )
    program = int(wait_for_text(tmp_path / "pid"))
    run.kill()
    run.communicate(timeout=PATIENCE)
    wait_until(lambda: not hosts.pids() and not psutil.pid_exists(program))
    hosts.leaves_nothing()


#: A host whose program prints more than pipes hold, and that counts the signs of life.
PRINTS = """#!{python}
import os, pathlib, sys, threading
print('{{"token": "x"}}', flush=True)
threading.Thread(target=os.write, args=(1, b"x" * (1 << 20)), daemon=True).start()
for _ in range(100):
    sys.stdin.readline()
pathlib.Path("{folder}/alive").touch()
sys.stdin.read()
"""
RUNS = """
from miniray.launch import ssh
ssh.BEAT = 0.01
ssh.run_over_ssh(ssh.SshRun(("a",), ("true",)), print)
"""


def test_hosts_hear_of_this_end_while_nobody_reads_what_it_prints(
    hosts: CommandLine, tmp_path: Path
) -> None:
    (tmp_path / "bin/ssh").write_text(PRINTS.format(python=sys.executable, folder=tmp_path))
    run = hosts.popen(sys.executable, "-c", RUNS)
    try:
        wait_for_file(tmp_path / "alive")
    finally:
        run.kill()
        run.communicate(timeout=PATIENCE)
