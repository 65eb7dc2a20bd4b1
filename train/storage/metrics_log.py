"""Keeps the metrics of a run as files: JSON lines as they come, CSV at the end.

The JSON lines are the record; the CSV file is made from them. A row is known by its
number, so a row that was written twice counts once.
"""

from __future__ import annotations

import csv
import io
import itertools
import json
import math
import re
import time
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence

    from miniray.train.storage.storage import RunStorage

METRICS_FILE = "metrics.jsonl"
CSV_FILE = "metrics.csv"

#: Where a store that can't append gets new rows, in a file for each ``sync``.
_FOLDER = ".metrics"
#: Such a store gets new rows at most this often, in seconds.
SYNC_INTERVAL = 10.0

#: How a row begins that this module has written.
_BEGIN = re.compile(r'{"number": (?P<number>\d+),')

#: Limits of a run's display: rows, metrics of each, and characters of texts.
MAX_SHOWN, MAX_METRICS, MAX_TEXT = 1000, 200, 200


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
    parsed = (_parse(line) for line in _lines(storage))
    rows = {row["number"]: row for row in parsed if row is not None}
    return [rows[number] for number in sorted(rows)]


def _lines(storage: RunStorage) -> Iterator[str]:
    """Yield the lines of all files with rows. Some rows may come twice."""
    pieces = sorted(storage.files.names(_FOLDER))
    for name in (METRICS_FILE, *(f"{_FOLDER}/{name}" for name in pieces)):
        yield from storage.files.lines(name)


class History:
    """The rows of a run, few enough to be drawn: all, or every second one, every fourth, ..."""

    def __init__(self) -> None:
        self._rows: dict[int, dict[str, Any]] = {}
        self._every = 1
        #: The row of the highest number; number -1 if there is none.
        self.newest: Mapping[str, Any] = {"number": -1, "metrics": {}}

    def read(self, storage: RunStorage) -> None:
        """Add the rows that a run has stored."""
        highest, newest = -1, [""]  # two lines, as that of the highest number may be torn
        for line in _lines(storage):
            begin = _BEGIN.match(line)
            number = -1 if begin is None else int(begin["number"])
            if number >= highest:
                highest, newest = number, [newest[-1], line]
            # Others are parsed only if they are kept: there may be very many.
            if number % self._every == 0 or begin is None:
                self._add_line(line)
        for line in newest:
            self._add_line(line)

    def _add_line(self, line: str) -> None:
        if (row := _parse(line)) is not None:
            self.add(row)

    def add(self, row: Mapping[str, Any]) -> None:
        """Add a row, as ``MetricsLog`` has it."""
        if row["number"] >= self.newest["number"]:
            self.newest = row
        if row["number"] % self._every == 0:
            self._rows[row["number"]] = shown_row(row)
            while len(self._rows) > MAX_SHOWN:
                self._every *= 2
                self._rows = {n: kept for n, kept in self._rows.items() if n % self._every == 0}

    @property
    def reports(self) -> int:
        """How many reports the run has made."""
        return int(self.newest["number"]) + 1

    def shown(self) -> list[dict[str, Any]]:
        """Return the rows that are kept and the newest, as JSON values."""
        newest = self.newest
        rows = {**self._rows, newest["number"]: shown_row(newest)}  # another thread may add rows
        return [rows[number] for number in sorted(rows) if number >= 0]


def shown_row(row: Mapping[str, Any]) -> dict[str, Any]:
    """Return a row as JSON values that are not large: metrics by flat key, no number that is none.

    Text is cut, and of very many metrics the first are there.
    """
    metrics = itertools.islice(flatten(row["metrics"]).items(), MAX_METRICS)
    return {**row, "metrics": {key[:MAX_TEXT]: _shown(value) for key, value in metrics}}


def _shown(value: Any) -> Any:
    if isinstance(value, float) and not math.isfinite(value):
        return None
    if value is None or isinstance(value, bool | int | float):
        return value
    return str(value)[:MAX_TEXT]


def _text(lines: Iterable[str]) -> str:
    return "".join(f"{line}\n" for line in lines)


def _parse(line: str) -> dict[str, Any] | None:
    """Return a row; None if a process that was killed has left half a line."""
    try:
        row: dict[str, Any] = json.loads(line)
    except ValueError:
        return None
    whole = isinstance(row, dict) and isinstance(row.get("number"), int) and "metrics" in row
    return row if whole else None


def flatten(metrics: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Return nested dictionaries as one, with keys joined by ``/``."""
    flat: dict[str, Any] = {}
    for key, value in metrics.items():
        if isinstance(value, dict):
            flat.update(flatten(value, f"{prefix}{key}/"))
        else:
            flat[f"{prefix}{key}"] = value
    return flat


def flat_row(row: Mapping[str, Any]) -> dict[str, Any]:
    """Return a row with its metrics, by flat key, behind what else is in it."""
    return {**{key: row[key] for key in row if key != "metrics"}, **flatten(row.get("metrics", {}))}


def to_csv(rows: Iterable[Mapping[str, Any]]) -> str:
    """Return the rows as CSV: number, time, checkpoint, then a column for each metric."""
    table = [flat_row(row) for row in rows]
    columns = list(dict.fromkeys(key for row in table for key in row))
    text = io.StringIO()
    writer = csv.DictWriter(text, columns, lineterminator="\n")
    writer.writeheader()
    writer.writerows(table)
    return text.getvalue()
