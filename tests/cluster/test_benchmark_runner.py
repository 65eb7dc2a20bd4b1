"""The programs in ``benchmarks/`` leave no process behind, however they end."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from cluster_helpers import is_alive, processes_with, wait_until

if TYPE_CHECKING:
    from collections.abc import Iterator

ROOT = Path(__file__).resolve().parents[2]
#: The program of a row, the head, the daemon and the template.
PROCESSES = 4


@pytest.fixture
def base() -> Iterator[Path]:
    """A folder with a path so short that sockets are put there too."""
    with tempfile.TemporaryDirectory(prefix="mr-bm-", dir="/tmp") as folder:
        yield Path(folder)


@pytest.mark.timeout(120)
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_a_benchmark_that_is_ended_leaves_none_of_its_processes(
    number: signal.Signals, base: Path
) -> None:
    def started() -> set[int]:
        return {pid for at in base.iterdir() for pid in processes_with("MINIRAY_TMPDIR", str(at))}

    runner = subprocess.Popen(
        [sys.executable, str(ROOT / "benchmarks" / "micro.py"), "--only", "idle"],
        env={**os.environ, "PYTHONPATH": str(ROOT), "TMPDIR": str(base)},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    try:
        wait_until(lambda: len(started()) >= PROCESSES or runner.poll() is not None, 60)
        pids = started()
        assert len(pids) >= PROCESSES
    finally:
        runner.send_signal(number)
        code = runner.wait(30)
    assert code == {signal.SIGTERM: 128 + signal.SIGTERM}.get(number, -number)
    wait_until(lambda: not any(map(is_alive, pids)))
    if number != signal.SIGKILL:
        assert not list(base.iterdir())


@pytest.mark.timeout(120)
def test_a_user_is_served_while_strangers_flood_the_heads_port(base: Path) -> None:
    """The short mode of the program; what is longer than its own limits is a busy machine."""
    told = base / "figures.json"
    subprocess.run(
        [
            sys.executable,
            str(ROOT / "benchmarks" / "attacked.py"),
            *("--short", "--json", str(told), "--only", "pings", "mover", "stopped"),
        ],
        env={**os.environ, "PYTHONPATH": str(ROOT), "TMPDIR": str(base)},
        stdout=subprocess.DEVNULL,
        check=True,
    )
    for figure in json.loads(told.read_text())["figures"]:
        (value,) = figure["runs"]["miniray"]
        assert isinstance(value, (int, float)), value
        assert value < 10_000  # milliseconds, MiB or nodes
        if figure["unit"] != "ms" and figure["target"] is not None:
            assert value <= figure["target"], figure["figure"]
