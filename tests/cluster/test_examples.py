"""The programs of ``examples/`` run as a reader would run them, and print what they should.

``train_digits.py`` and ``train_jax.py`` have their tests beside those of the train layer.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from cluster_helpers import processes_with, wait_until

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

ROOT = Path(__file__).resolve().parent.parent.parent
EXAMPLES = ROOT / "examples"
TESTED_ELSEWHERE = {"train_digits.py", "train_jax.py"}

EXPECTED = {
    "actors.py": [
        "three calls: [2, 4, 6]",
        "after four tasks: 46",
        "found by name: 102",
        "after kill: ActorDiedError",
    ],
    "tasks.py": [
        "squares: [0, 1, 4, 9, 16]",
        "their sum: 30",
        "counting down: [3, 2, 1]",
        "first awake: 0.1 still asleep: 1",
    ],
    "gpus.py": [
        "GPU 0: 4 actors",
        "GPU 1: 4 actors",
        "free: 0",
        "waiting for two whole GPUs: True",
        "got GPUs: [0, 1]",
    ],
    "several_nodes.py": [
        "nodes: 2 CPUs: 4.0",
        "on the second node: True",
        "tasks ran on nodes: 2 stored MiB: 2",
    ],
}


@pytest.fixture
def run() -> Iterator[Callable[[str], subprocess.CompletedProcess[str]]]:
    """Runs an example with a folder for session files of its own; nothing may stay of it."""
    # Not tmp_path: a socket's path has at most 107 bytes.
    base = Path(tempfile.mkdtemp(prefix="mr-test-", dir="/tmp"))
    environment = {**os.environ, "MINIRAY_TMPDIR": str(base), "PYTHONPATH": str(ROOT)}
    environment.pop("MINIRAY_ADDRESS", None)

    def run_example(name: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [sys.executable, EXAMPLES / name],
            env=environment,
            capture_output=True,
            text=True,
            timeout=50,
            check=False,
        )

    try:
        yield run_example
        wait_until(lambda: not processes_with("MINIRAY_TMPDIR", str(base)), timeout=10)
        sockets = list(base.glob("mr-*"))
    finally:
        shutil.rmtree(base, ignore_errors=True)
    assert not sockets, f"sockets are left on disk: {sockets}"


@pytest.mark.parametrize("name", sorted(EXPECTED))
def test_the_example_prints_what_it_should(
    name: str, run: Callable[[str], subprocess.CompletedProcess[str]]
) -> None:
    result = run(name)
    assert result.returncode == 0, result.stderr
    assert result.stdout.splitlines() == EXPECTED[name], result.stderr
    assert result.stderr == ""


def test_every_example_is_tested() -> None:
    there = {path.name for path in EXAMPLES.glob("*.py")}
    assert there == EXPECTED.keys() | TESTED_ELSEWHERE
