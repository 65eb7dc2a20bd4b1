"""``benchmarks/gpu_check.py`` where the driver's files tell of GPUs: with a stand-in for PyTorch on
GPUs, whose device memory is real enough to be leaked, and with a PyTorch that cannot use them."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from accelerator_helpers import FakeMachine, add_nvidia

# A cluster for each check.
pytestmark = [
    pytest.mark.slow,
    pytest.mark.usefixtures("session_root"),
    pytest.mark.timeout(300),
]

ROOT = Path(__file__).resolve().parents[2]


def run(
    path: Path, gpus: int, *words: str, paths: tuple[str, ...] = (), **variables: str
) -> tuple[list[str], int]:
    """Lines that the program prints on a machine with so many GPUs, and its exit code."""
    machine = FakeMachine(path / "machine")
    add_nvidia(machine, gpus, "NVIDIA H200")
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join((*paths, *filter(None, sys.path))),
        "MINIRAY_DEVICE_ROOT": str(machine.root),
        **variables,
    }
    environment.pop("CUDA_VISIBLE_DEVICES", None)
    done = subprocess.run(
        [sys.executable, str(ROOT / "benchmarks/gpu_check.py"), *words],
        env=environment,
        capture_output=True,
        text=True,
        timeout=280,
    )
    assert done.stderr == ""
    return done.stdout.splitlines(), done.returncode


def with_stand_in(path: Path, gpus: int, *words: str, **variables: str) -> tuple[list[str], int]:
    memory = path / "memory"
    memory.mkdir()
    return run(
        path,
        gpus,
        *words,
        paths=(str(ROOT / "tests/stand_ins"),),
        STAND_IN_MEMORY=str(memory),
        STAND_IN_GPUS=str(gpus),
        **variables,
    )


@pytest.mark.parametrize("gpus", [1, 2])
def test_all_that_can_be_checked_with_a_stand_in_is_found_right(tmp_path: Path, gpus: int) -> None:
    lines, code = with_stand_in(tmp_path, gpus)
    assert code == 0, lines
    assert lines[0].startswith(
        f"ok       detection: {gpus} of family nvidia, accelerator_type:H200; so counts PyTorch"
    )
    assert lines[1].startswith("ok       visibility: CUDA_VISIBLE_DEVICES=0")
    assert lines[2].startswith("ok       sharing of a gpu by two halves: both on device 0, GPU-0")
    assert lines[3].startswith("ok       device memory is free after a task: 16.0 to 16.0 GiB free")
    assert lines[-1] == "13 checks: 8 ok, 0 FAILED, 5 skipped"


def test_device_memory_that_stays_is_found(tmp_path: Path) -> None:
    lines, code = with_stand_in(tmp_path, 1, "free after", STAND_IN_LEAKS="1")
    assert code == 1
    assert lines[-1] == "3 checks: 0 ok, 3 FAILED, 0 skipped"
    assert sum(line.startswith("AssertionError: free at the start") for line in lines) == 3


def test_a_variable_that_was_not_set_is_found_even_if_there_is_one_gpu(tmp_path: Path) -> None:
    lines, code = with_stand_in(tmp_path, 1, "visibility", MINIRAY_NOSET_CUDA_VISIBLE_DEVICES="1")
    assert code == 1
    assert "AssertionError: (None, ['0'], 1, True)" in lines


def test_detection_is_checked_and_the_rest_is_skipped_with_the_reason(tmp_path: Path) -> None:
    lines, code = run(tmp_path, 2)
    assert code == 0, lines
    assert lines[0].startswith(
        "ok       detection: 2 of family nvidia, accelerator_type:H200; not compared with PyTorch"
    )
    assert {line.split()[0] for line in lines[1:-1]} == {"skipped"}
    assert lines[-1] == "13 checks: 1 ok, 0 FAILED, 12 skipped"
