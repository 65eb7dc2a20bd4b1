"""Runs rows in child processes, with a time limit, and leaves no process behind."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import signal
import subprocess
import sys
import tempfile
import uuid
from pathlib import Path
from typing import TYPE_CHECKING

import _processes

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from types import FrameType

    from _common import Row

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent


@dataclasses.dataclass(frozen=True)
class Outcome:
    """What one run of a row gave: a value per figure, or why it failed."""

    figures: tuple[float, ...] = ()
    error: str = ""


Results = dict[str, dict[str, list[Outcome]]]  # by row and engine


def interpreters(against: str | None, alone: bool, python: Path | None) -> dict[str, str]:
    """The interpreter of each engine to run; FileNotFoundError if one is missing."""
    found = {} if alone else {"miniray": sys.executable}
    if against == "ray":
        python = python or ROOT / ".venv-ray" / "bin" / "python"
        if not python.exists():
            raise FileNotFoundError(
                f"There is no interpreter with Ray at {python}. Make one with"
                " 'python -m venv .venv-ray' and '.venv-ray/bin/pip install \"ray[default,train]\""
                " torch numpy', or name another with --ray-python."
            )
        found["ray"] = str(python)
    return found


def measure(
    rows: list[Row],
    pythons: dict[str, str],
    repeats: int,
    environment: dict[str, str],
    tell: Callable[[str], None],
) -> Results:
    """Run all rows, the engines taking turns; ``tell`` hears what runs now."""
    results: Results = {}
    with ended_by_signals():
        for row in rows:
            results[row.key] = {engine: [] for engine in pythons}
            count = 1 if row.once else repeats
            for number in range(count):
                for engine, python in pythons.items():
                    tell(f"{row.key}: {engine}, {number + 1} of {count}")
                    results[row.key][engine].append(run_row(engine, python, row, environment))
    return results


@contextlib.contextmanager
def ended_by_signals() -> Iterator[None]:
    """SIGTERM and SIGHUP end this program as Ctrl-C does: with all that it has started."""

    def end(number: int, _frame: FrameType | None) -> None:
        raise SystemExit(128 + number)

    before = {number: signal.signal(number, end) for number in (signal.SIGTERM, signal.SIGHUP)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def run_row(engine: str, python: str, row: Row, environment: dict[str, str]) -> Outcome:
    """Run a row once in a fresh process and cluster."""
    tag = uuid.uuid4().hex
    with tempfile.TemporaryDirectory(prefix="benchmark-") as folder:
        file, log = Path(folder, "outcome.json"), Path(folder, "output.txt")
        variables = {**os.environ, **environment, **_environment(engine, tag, folder)}
        process: subprocess.Popen[bytes] | None = None
        grace = 0.0
        try:  # a signal may come before the child is known
            with log.open("wb") as output:
                process = subprocess.Popen(
                    [python, str(HERE / "_child.py"), engine, row.module, row.key, str(file)],
                    env={**variables, _processes.STARTER: str(os.getpid())},
                    stdout=output,
                    stderr=subprocess.STDOUT,
                    start_new_session=True,
                )
            try:
                process.wait(row.limit)
            except subprocess.TimeoutExpired:
                return Outcome(error=f"no result within {row.limit:.0f} s")
            grace = 5.0
        finally:
            _processes.end(tag, grace)
            if process is not None:
                process.wait()
        if not file.exists():
            lines = log.read_text(errors="replace").strip().splitlines() or ["no output"]
            return Outcome(error=f"exit code {process.returncode}: {lines[-1]}")
        outcome = json.loads(file.read_text())
    if "error" in outcome:
        return Outcome(error=outcome["error"].strip().splitlines()[0])
    return Outcome(figures=tuple(outcome["figures"]))


def _environment(engine: str, tag: str, folder: str) -> dict[str, str]:
    """Variables that mark a run's processes and keep its files apart."""
    variables = {_processes.TAG: tag}
    if engine == "miniray":
        return {**variables, "MINIRAY_TMPDIR": folder, "PYTHONPATH": str(ROOT)}
    # The second variable silences a warning.
    return {**variables, "RAY_TMPDIR": folder, "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0"}
