"""Keeps the metrics of a run as files: JSON lines as they come, CSV at the end.

The file of JSON lines is the record; the CSV file is made from it.
"""

from __future__ import annotations

import csv
import io
import json
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from miniray.train.storage import RunStorage

METRICS_FILE = "metrics.jsonl"
CSV_FILE = "metrics.csv"


class MetricsLog:
    """Writes one row for each step of a run.

    A filesystem that can't append gets the whole file at each ``sync``.
    """

    def __init__(self, storage: RunStorage) -> None:
        self._storage = storage
        self._unwritten = ""
        self._behind = False

    def append(self, rows: Sequence[Mapping[str, Any]]) -> None:
        """Add rows of JSON values; other values are written as text."""
        lines = [json.dumps(row, default=str) for row in rows]
        if self._storage.append_lines(METRICS_FILE, lines):
            return
        if not self._unwritten:
            self._unwritten = self._storage.read_text(METRICS_FILE)
        self._unwritten += "".join(f"{line}\n" for line in lines)
        self._behind = True

    def sync(self) -> None:
        """Bring the file of JSON lines up to date."""
        if self._behind:
            self._storage.write_text(METRICS_FILE, self._unwritten)
            self._behind = False

    def close(self) -> None:
        """Bring both files up to date."""
        self.sync()
        rows = read_rows(self._storage)
        if rows:
            self._storage.write_text(CSV_FILE, to_csv(rows))


def read_rows(storage: RunStorage) -> list[dict[str, Any]]:
    """All rows of a run, in the order of the reports."""
    lines = storage.read_text(METRICS_FILE).splitlines()
    # A process that was killed may have left half a line at the end.
    return [row for line in lines if (row := _parse(line)) is not None]


def _parse(line: str) -> dict[str, Any] | None:
    try:
        row: dict[str, Any] = json.loads(line)
    except ValueError:
        return None
    return row


def flatten(metrics: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Nested dictionaries as one, with keys joined by ``/``."""
    flat: dict[str, Any] = {}
    for key, value in metrics.items():
        if isinstance(value, dict):
            flat.update(flatten(value, f"{prefix}{key}/"))
        else:
            flat[f"{prefix}{key}"] = value
    return flat


def to_csv(rows: Iterable[Mapping[str, Any]]) -> str:
    """The rows as CSV: number, time, checkpoint, then a column for each metric."""
    table = [
        {**{key: row[key] for key in row if key != "metrics"}, **flatten(row["metrics"])}
        for row in rows
    ]
    columns = list(dict.fromkeys(key for row in table for key in row))
    text = io.StringIO()
    writer = csv.DictWriter(text, columns, lineterminator="\n")
    writer.writeheader()
    writer.writerows(table)
    return text.getvalue()
