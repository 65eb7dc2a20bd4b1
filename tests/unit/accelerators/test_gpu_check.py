"""``benchmarks/gpu_check.py`` on a machine without a GPU."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

PROGRAM = Path(__file__).resolve().parents[3] / "benchmarks" / "gpu_check.py"


def test_a_machine_without_a_gpu_is_told_and_is_no_failure(tmp_path: Path) -> None:
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(path for path in sys.path if path),
        "MINIRAY_DEVICE_ROOT": str(tmp_path),
    }
    done = subprocess.run(
        [sys.executable, str(PROGRAM)], env=environment, capture_output=True, text=True, timeout=50
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "no GPU\n", "")


def program(*lines: str) -> subprocess.CompletedProcess[str]:
    """Run the program with other checks, on a machine that seems to have a GPU."""
    source = [
        "import importlib.util, sys, time",
        f"spec = importlib.util.spec_from_file_location('gpu_check', {str(PROGRAM)!r})",
        "program = importlib.util.module_from_spec(spec)",
        "sys.modules['gpu_check'] = program",
        "spec.loader.exec_module(program)",
        "program.miniray.init = program.miniray.shutdown = lambda **options: None",
        "found = program.NodeAccelerators({'GPU': None})",
        "program.resolve_node_accelerators = lambda *given: found",
        *lines,
        "sys.exit(program.main())",
    ]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
    return subprocess.run(
        [sys.executable, "-c", "\n".join(source)],
        env=environment,
        capture_output=True,
        text=True,
        timeout=50,
    )


def test_each_check_gets_a_verdict_and_a_failure_is_the_exit_code() -> None:
    done = program(
        "def first(found): return 'as it should be'",
        "def second_one(found): raise program.SkippedError('there is no such thing')",
        "def third(found): assert 1 == 2, 'not equal'",
        "program.CHECKS = (first, second_one, third)",
    )
    lines = done.stdout.splitlines()
    assert lines[0].startswith("ok       first: as it should be (")
    assert lines[1] == "skipped  second one: there is no such thing"
    assert lines[2] == "FAILED   third: Traceback (most recent call last):"
    assert lines[-1] == "3 checks: 1 ok, 1 skipped, 1 FAILED"
    assert done.returncode == 1


def test_without_a_failure_the_exit_code_is_0() -> None:
    done = program(
        "def first(found): return 'fine'",
        "def second(found): raise program.SkippedError('no')",
        "program.CHECKS = (first, second)",
    )
    assert (done.returncode, done.stderr) == (0, "")


def test_a_check_that_does_not_end_is_a_failure_and_ends_the_program() -> None:
    done = program(
        "def hang(found): time.sleep(1000)",
        "program.CHECKS = (hang,)",
        "program._CHECK_LIMIT = 0.1",
    )
    assert done.stdout == "FAILED   hang: not done within 0.1 s\n"
    assert "in hang" in done.stderr
    assert done.returncode == 1
