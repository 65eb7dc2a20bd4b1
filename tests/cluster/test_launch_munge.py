"""A rendezvous whose secret is encrypted, by a real munged with a key of the test."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from typing import TYPE_CHECKING

import pytest
from cluster_helpers import wait_until
from launch_helpers import PATIENCE, SHOW_RANKS, slurm

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from command_helpers import CommandLine


def find(program: str) -> str:
    path = shutil.which(program, path=f"{os.environ['PATH']}:/usr/sbin")
    if path is None:
        pytest.skip(f"{program} is not installed")
    return path


@pytest.fixture
def munge(tmp_path: Path) -> Iterator[str]:
    """A folder of ``munge`` and ``unmunge`` that use a daemon of the test's."""
    folder = tmp_path / "munge"
    folder.mkdir(mode=0o755)
    (folder / "key").write_bytes(os.urandom(64))
    (folder / "key").chmod(0o600)
    for program in ("munge", "unmunge"):
        (folder / program).write_text(f'#!/bin/sh\nexec {find(program)} -S {folder}/s "$@"\n')
        (folder / program).chmod(0o755)
    files = [f"--{what}-file={folder / what}" for what in ("key", "log", "pid", "seed")]
    daemon = subprocess.Popen(
        [find("munged"), "--foreground", "--force", f"--socket={folder}/s", *files],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    try:
        wait_until(lambda: (folder / "s").exists() or daemon.poll() is not None)
        assert daemon.poll() is None
        yield str(folder)
    finally:
        daemon.terminate()
        daemon.wait(PATIENCE)


def test_the_hosts_meet_where_munge_keeps_the_secret(
    command: CommandLine, tmp_path: Path, munge: str
) -> None:
    environment = {
        "HOME": str(tmp_path),
        "PATH": f"{munge}{os.pathsep}{command.environment['PATH']}",
    }
    run = ("miniray", "run", "--host", "127.0.0.1", "--rendezvous", "munge", "--")
    first = command.popen(
        *(*run, sys.executable, "-c", SHOW_RANKS, "7"),
        variables={**environment, **slurm(0, 2), "MINIRAY_MACHINE_ID": "n0"},
    )
    join = tmp_path / ".miniray/run/slurm-4711-0-0/join"
    wait_until(join.exists)
    assert join.read_text().startswith("MUNGE:")
    other = command.popen(
        *(*run, "true"), variables={**environment, **slurm(1, 2), "MINIRAY_MACHINE_ID": "n1"}
    )
    assert [part.communicate(timeout=PATIENCE)[0] for part in (first, other)] == [
        "['0', '1']\n",
        "",
    ]
    assert [first.returncode, other.returncode] == [7, 0]
    command.leaves_nothing()


def test_a_host_without_munge_is_told(command: CommandLine, tmp_path: Path) -> None:
    done = command.run(
        *("run", "--rendezvous", "munge", "--host", "127.0.0.1", "--", sys.executable),
        **slurm(0, 2),
        HOME=str(tmp_path),
        PATH=os.path.dirname(sys.executable),
    )
    assert done.returncode == 1
    assert "There is no program 'munge' here: give --rendezvous a folder." in done.stderr
    command.leaves_nothing()
