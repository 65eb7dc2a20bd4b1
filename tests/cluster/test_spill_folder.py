"""Whoever starts a node hears at once that values cannot leave its memory."""

from __future__ import annotations

import os
import subprocess
from typing import TYPE_CHECKING

import pytest
from command_helpers import PATIENCE, CommandLine, one_line

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

INIT = "import miniray; miniray.init(num_cpus=1); miniray.shutdown()"
CLUSTER = """
from miniray.cluster_utils import Cluster
Cluster(initialize_head=True, head_node_args={"num_cpus": 1}).shutdown()
"""
#: Mounts a file system with the options $0 at $1, for the rest of the command only.
MOUNT = 'mount -t tmpfs -o "$0" tmpfs "$1" && shift && exec "$@"'


def run_mounted(
    command: CommandLine, folder: Path, options: str, program: Sequence[str]
) -> subprocess.CompletedProcess[str]:
    """Run something whose spill folder is a file system with these options of mount(8)."""
    alone = ["unshare", "--mount"] if os.geteuid() == 0 else ["unshare", "-Urm"]
    if subprocess.run([*alone, "true"], capture_output=True, check=False).returncode != 0:
        pytest.skip("mount namespaces are not available to this user")
    return subprocess.run(
        [*alone, "sh", "-c", MOUNT, options, str(folder), *program],
        env={**command.environment, "MINIRAY_SPILL_FOLDER": str(folder)},
        capture_output=True,
        text=True,
        timeout=PATIENCE,
        check=False,
    )


def test_a_node_does_not_start_with_a_chosen_folder_that_cannot_be_used(
    command: CommandLine, tmp_path: Path
) -> None:
    (tmp_path / "file").touch()
    unusable = str(tmp_path / "file" / "folder")
    line = one_line(command.run("start", "--head", "--port", "0", MINIRAY_SPILL_FOLDER=unusable))
    told = f"MINIRAY_SPILL_FOLDER is '{unusable}', and no file can be made there: Not a directory"
    assert told in line
    assert told in command.failing_python(INIT, MINIRAY_SPILL_FOLDER=unusable)
    assert not command.records()


def test_a_chosen_folder_that_is_read_only_is_refused(command: CommandLine, tmp_path: Path) -> None:
    done = run_mounted(command, tmp_path, "ro", ["python", "-c", INIT])
    assert done.returncode != 0
    assert "no file can be made there: Read-only file system" in done.stderr.splitlines()[-1]


@pytest.mark.parametrize(
    "program",
    [
        ["miniray", "start", "--head", "--port", "0"],
        ["python", "-c", INIT],
        ["python", "-c", CLUSTER],
    ],
    ids=["start", "init", "Cluster"],
)
def test_who_starts_a_node_is_warned_that_the_disk_has_no_room_for_a_file(
    command: CommandLine, tmp_path: Path, program: list[str]
) -> None:
    done = run_mounted(command, tmp_path, "nr_inodes=1", program)
    assert done.returncode == 0, done.stderr
    assert f"No file can be made in {tmp_path}, where values go" in done.stderr
    assert "No space left on device" in done.stderr
    [log] = command.root.glob("miniray-*/session_*/logs/node.log")
    assert "WARNING miniray.node.store.spill_files: No file can be made in " in log.read_text()
