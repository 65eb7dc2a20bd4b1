"""The command line that the benchmark programs share."""

from __future__ import annotations

import argparse
import compileall
from pathlib import Path
from typing import TYPE_CHECKING

from _runner import ROOT, interpreters, measure
from _table import as_json, draw
from rich.console import Console

if TYPE_CHECKING:
    from _common import Row


def parser(description: str) -> argparse.ArgumentParser:
    """A parser with the options that all benchmark programs have."""
    made = argparse.ArgumentParser(description=description)
    made.add_argument(
        "--against", choices=["ray"], help="run the same on this engine, taking turns"
    )
    made.add_argument("--alone", action="store_true", help="run only the engine given by --against")
    made.add_argument(
        "--ray-python", type=Path, help="interpreter that has Ray; default .venv-ray/bin/python"
    )
    made.add_argument("--only", nargs="+", metavar="ROW", help="run only these rows; see --list")
    made.add_argument("--repeats", type=int, default=3, help="runs of each row (default 3)")
    made.add_argument("--json", type=Path, metavar="FILE", help="write every run to a file")
    made.add_argument("--list", action="store_true", help="list the rows and end")
    return made


def run(rows: dict[str, Row], args: argparse.Namespace, environment: dict[str, str]) -> None:
    """Do what the command line says with these rows and print the table."""
    if args.list:
        for row in rows.values():
            print(f"{row.key:18}{', '.join(figure.title for figure in row.figures)}")
        return
    unknown = sorted(set(args.only or []) - rows.keys())
    if unknown:
        raise SystemExit(f"There is no row {', '.join(unknown)}. Rows: {', '.join(rows)}")
    wanted = [row for row in rows.values() if row.key in (args.only or rows)]
    try:
        pythons = interpreters(args.against, args.alone, args.ray_python)
    except FileNotFoundError as error:
        raise SystemExit(str(error)) from None
    if "miniray" in pythons:
        # As pip does with what it installs, Ray for one. A checkout may be without bytecode, and
        # stay so where PYTHONDONTWRITEBYTECODE is set: each process would compile it all again.
        for package in ("miniray", "train"):
            compileall.compile_dir(str(ROOT / package), quiet=1)
    notes = Console(stderr=True)
    with notes.status("") as status:
        results = measure(wanted, pythons, args.repeats, environment, status.update)
    output = Console()
    if not output.is_terminal:
        output.width = 140  # failures should not be cut in a file
    output.print(draw(wanted, results, list(pythons)))
    if args.json:
        args.json.write_text(as_json(wanted, results) + "\n")
