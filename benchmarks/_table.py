"""Turns the outcomes of rows into a table or JSON."""

from __future__ import annotations

import json
import platform
import statistics
from typing import TYPE_CHECKING

from rich.table import Table

if TYPE_CHECKING:
    from _common import Figure, Row
    from _runner import Outcome, Results


def median(outcomes: list[Outcome], index: int) -> float | str:
    """The median over the runs that gave a figure, or why none did."""
    values = [outcome.figures[index] for outcome in outcomes if outcome.figures]
    return statistics.median(values) if values else f"failed: {outcomes[0].error}"


def text(value: float | str, unit: str) -> str:
    """A figure with its unit."""
    if isinstance(value, str):
        return value
    if unit == "x":  # times something else: a percent more or less matters
        return f"{value:.3f} x"
    digits = 0 if value >= 100 or not unit else 1 if value >= 10 else 2
    return f"{value:,.{digits}f}{unit if unit.startswith('/') else f' {unit}'}".rstrip()


def target(figure: Figure, value: float | str) -> str:
    """What is to be reached, in green if it is and in red if it is not."""
    if figure.target is None:
        return ""
    goal = f"{'≤' if figure.less_is_better else '≥'} {text(figure.target, figure.unit)}"
    if isinstance(value, str):
        return f"[red]{goal}[/]"
    met = value <= figure.target if figure.less_is_better else value >= figure.target
    return f"[green]{goal}[/]" if met else f"[red]{goal}[/]"


def ratio(figure: Figure, ours: float | str, theirs: float | str) -> str:
    """How many times better the first engine is."""
    if isinstance(ours, str) or isinstance(theirs, str) or not ours or not theirs:
        return ""
    return f"{theirs / ours if figure.less_is_better else ours / theirs:,.1f}x"


def draw(rows: list[Row], results: Results, engines: list[str]) -> Table:
    """All figures, one to a line."""
    two = len(engines) > 1
    drawn = Table("figure", *engines, *(["ratio"] if two else []), "target")
    for row in rows:
        for index, figure in enumerate(row.figures):
            values = [median(results[row.key][name], index) for name in engines]
            cells = [text(value, figure.unit) for value in values]
            if two:
                cells.append(ratio(figure, *values))
            drawn.add_row(figure.title, *cells, target(figure, values[0]))
    return drawn


def as_json(rows: list[Row], results: Results) -> str:
    """Every run of every figure, for other programs."""
    figures = [
        {
            "row": row.key,
            "figure": figure.title,
            "unit": figure.unit,
            "target": figure.target,
            "runs": {
                engine: [o.figures[index] if o.figures else o.error for o in outcomes]
                for engine, outcomes in results[row.key].items()
            },
        }
        for row in rows
        for index, figure in enumerate(row.figures)
    ]
    machine = {"python": platform.python_version(), "system": platform.platform()}
    return json.dumps({"machine": machine, "figures": figures}, indent=2)
