"""Keeps the metrics of a run as files: JSON lines as they come, CSV at the end.

The JSON lines are the record; the CSV file is made from them. A row is known by its
number, so a row that was written twice counts once.
"""

from __future__ import annotations

import csv
import io
import json
import time
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from miniray.train.storage.storage import RunStorage

METRICS_FILE = "metrics.jsonl"
CSV_FILE = "metrics.csv"

#: Where a store that can't append gets new rows, in a file for each ``sync``.
_FOLDER = ".metrics"
#: Such a store gets new rows at most this often, in seconds.
SYNC_INTERVAL = 10.0


class MetricsLog:
    """Writes one row for each step of a run."""

    def __init__(self, storage: RunStorage) -> None:
        self._storage = storage
        self._files = storage.files
        self._unwritten: list[str] = []
        self._first = 0  # number of the first row that is not written
        self._synced = 0.0

    def append(self, rows: Sequence[Mapping[str, Any]]) -> None:
        """Add rows of JSON values, each with a ``number``; other values are written as text."""
        if not rows:
            return
        lines = [json.dumps(row, default=str) for row in rows]
        if self._files.append(METRICS_FILE, _text(lines)):
            return
        if not self._unwritten:
            self._first = rows[0]["number"]
        self._unwritten += lines
        if time.monotonic() - self._synced >= SYNC_INTERVAL:
            self.sync()

    def sync(self) -> None:
        """Write what is not yet written."""
        if self._unwritten:
            self._files.write(f"{_FOLDER}/{self._first:012d}.jsonl", _text(self._unwritten))
            self._unwritten = []
        self._synced = time.monotonic()

    def close(self) -> None:
        """Write what is not yet written, all rows into one file, and the CSV file."""
        self.sync()
        rows = read_rows(self._storage)
        if not rows:
            return
        pieces = self._files.names(_FOLDER)
        if pieces:
            text = _text([json.dumps(row, default=str) for row in rows])
            # A write may be cut off, so another file has all of it meanwhile.
            whole = f"{rows[0]['number']:012d}-all.jsonl"
            self._files.write(f"{_FOLDER}/{whole}", text)
            self._files.write(METRICS_FILE, text)
            for piece in {*pieces, whole}:
                self._files.delete(f"{_FOLDER}/{piece}")
        self._files.write(CSV_FILE, to_csv(rows))


def read_rows(storage: RunStorage) -> list[dict[str, Any]]:
    pieces = sorted(storage.files.names(_FOLDER))
    names = [METRICS_FILE, *(f"{_FOLDER}/{name}" for name in pieces)]
    rows: dict[int, dict[str, Any]] = {}
    for name in names:
        for line in storage.read_text(name).splitlines():
            # A process that was killed may have left half a line.
            if (row := _parse(line)) is not None:
                rows[row["number"]] = row
    return [rows[number] for number in sorted(rows)]


def _text(lines: Iterable[str]) -> str:
    return "".join(f"{line}\n" for line in lines)


def _parse(line: str) -> dict[str, Any] | None:
    try:
        row: dict[str, Any] = json.loads(line)
    except ValueError:
        return None
    whole = isinstance(row, dict) and isinstance(row.get("number"), int) and "metrics" in row
    return row if whole else None


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
    """Return the rows as CSV: number, time, checkpoint, then a column for each metric."""
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
