"""`miniray ssh` and a real `mpirun` on two hosts that real OpenSSH servers lead to."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import sys
from typing import TYPE_CHECKING

import psutil
import pytest
from cluster_helpers import processes_with, wait_for_file, wait_for_text, wait_until
from command_helpers import CommandLine, command_line
from launch_helpers import LOOKS_AND_SHOWS, PATIENCE
from needed_tools import find_tool
from ssh_hosts import Network, network

if TYPE_CHECKING:
    import subprocess
    from collections.abc import Iterator
    from pathlib import Path

PYTHON = sys.executable
SSH = ("miniray", "ssh", "hosta", "hostb", "--")
#: Seconds in which this end of a cut connection notices that, and after it the other one.
CABLE = 45.0


@pytest.fixture(scope="module")
def command() -> Iterator[CommandLine]:
    yield from command_line()


@pytest.fixture(scope="module")
def hosts(command: CommandLine, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Network]:
    """Tests of this module share them, and leave nothing there."""
    variables = {"MINIRAY_TMPDIR": str(command.root)}
    with network(tmp_path_factory.mktemp("hosts"), command.environment, variables) as found:
        yield found


@pytest.fixture(autouse=True)
def _what_a_failed_test_has_left_ends(hosts: Network, command: CommandLine) -> Iterator[None]:
    yield
    for pid in command.pids() - hosts.of_servers():
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    for path in command.files():
        shutil.rmtree(path) if path.is_dir() else path.unlink()


def end_of(process: subprocess.Popen[str]) -> tuple[int, str]:
    output, _ = process.communicate(timeout=PATIENCE)
    return process.returncode, output


def leaves_nothing(hosts: Network, command: CommandLine) -> None:
    """Wait until nothing but the servers is left."""
    wait_until(lambda: not command.pids() - hosts.of_servers() and not command.files())


def test_the_hosts_become_one_cluster_and_leave_nothing(
    hosts: Network, command: CommandLine
) -> None:
    names = "import os; print(os.uname().nodename)"
    run = hosts.popen(*SSH, PYTHON, "-c", f"{names}\n{LOOKS_AND_SHOWS}", "9")
    assert end_of(run) == (9, "hosta\n0 0\n['0', '1']\n")
    leaves_nothing(hosts, command)


def test_a_program_here_is_attached_to_the_hosts_from_outside(
    hosts: Network, command: CommandLine
) -> None:
    here = ("miniray", "ssh", "--here", "hosta", "hostb", "--")
    run = hosts.popen(*here, PYTHON, "-c", LOOKS_AND_SHOWS, "9")
    assert end_of(run) == (9, "0 0\n['0', '1']\n")
    leaves_nothing(hosts, command)


def test_a_folder_is_brought_along(hosts: Network, command: CommandLine, tmp_path: Path) -> None:
    folder = tmp_path / "mine"
    folder.mkdir()
    (folder / "data.bin").write_bytes(bytes(5_000_000))
    program = "import os, pathlib; print(os.uname().nodename, os.path.getsize('data.bin'))"
    run = hosts.popen(
        *("miniray", "ssh", "--working-dir", str(folder), "hosta", "hostb", "--"),
        *(PYTHON, "-c", program),
    )
    assert end_of(run) == (0, "hosta 5000000\n")
    leaves_nothing(hosts, command)


def test_when_the_clients_are_killed_nothing_is_left(
    hosts: Network, command: CommandLine, tmp_path: Path
) -> None:
    run = hosts.popen(*SSH, "sh", "-c", f"echo $$ > {tmp_path / 'pid'}; sleep 600")
    program = int(wait_for_text(tmp_path / "pid"))
    for client in psutil.Process(run.pid).children():
        client.kill()
    assert end_of(run)[0] != 0
    wait_until(lambda: not psutil.pid_exists(program))
    leaves_nothing(hosts, command)


def test_after_a_cut_cable_both_ends_end_and_a_run_that_lost_one_host_goes_on(
    hosts: Network, command: CommandLine, tmp_path: Path
) -> None:
    go, on = tmp_path / "go", tmp_path / "on"
    goes_on = f"echo > {on}-1; until [ -e {go} ]; do sleep .1; done; exit 6"
    run = ("miniray", "ssh", "--grace", "2")
    kept = hosts.popen(*run, "hosta", "hostb", "--", "sh", "-c", goes_on)
    waits = f"echo > {on}-2; sleep 600"
    lost = hosts.popen(*run, "hostb", "hosta", "--", "sh", "-c", waits)
    for number in (1, 2):
        wait_for_file(on.with_name(f"on-{number}"))
    with hosts.cut("hostb"):
        code, output = end_of(lost)
        assert code == 255, output
        wait_until(lambda: not processes_with("MINIRAY_MACHINE_ID", "hostb"), CABLE)
        go.touch()
        assert end_of(kept)[0] == 6
        leaves_nothing(hosts, command)


def test_a_real_mpirun_starts_one_part_on_each_host(
    hosts: Network, command: CommandLine, tmp_path: Path
) -> None:
    (tmp_path / "hosts").write_text("hosta slots=1\nhostb slots=1\n")
    mpirun = (
        *(find_tool("mpirun"), "--allow-run-as-root", "-N", "1"),
        *("--hostfile", str(tmp_path / "hosts"), "--mca", "plm_rsh_agent", "ssh"),
    )
    run = (PYTHON, "-m", "miniray", "run", "--rendezvous", str(tmp_path / "meet"), "--")
    shown = hosts.popen(*mpirun, *run, PYTHON, "-c", LOOKS_AND_SHOWS, "7")
    code, output = end_of(shown)
    assert (code, output.splitlines()[:2]) == (7, ["0 0", "['0', '1']"]), output
    assert list((tmp_path / "meet").iterdir()) == []
    leaves_nothing(hosts, command)
