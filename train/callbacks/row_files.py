"""Files that grow by a row at a time: JSON lines, and CSV whose columns may grow too.

Both go on with a file that exists. A process that is killed while it writes leaves at
most half a row, which the next one removes.
"""

from __future__ import annotations

import csv
import json
import os
from typing import TYPE_CHECKING, Any, BinaryIO, TextIO

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping
    from pathlib import Path


class JsonLinesFile:
    """Appends rows as lines of JSON; values that JSON does not know are written as text.

    Args:
        path: The file; it and its folder are made if they are missing.
    """

    def __init__(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("ab+") as file:
            _cut_half_a_line(file)
        self._file = path.open("a", encoding="utf-8")

    def append(self, rows: Iterable[Mapping[str, Any]]) -> None:
        """Write rows; they are with the operating system when this returns."""
        self._file.writelines(f"{json.dumps(row, default=str)}\n" for row in rows)
        self._file.flush()

    def close(self) -> None:
        """Close the file."""
        self._file.close()


class CsvFile:
    """Appends rows as CSV.

    A row with a key that had no column yet adds one: the file is written anew once, with empty
    cells in the rows before.

    Args:
        path: The file; it and its folder are made if they are missing.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._part = path.with_name(f".{path.name}.part")
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("ab+") as file:
            _cut_half_a_line(file)
        with path.open(newline="", encoding="utf-8") as existing:
            self._columns = next(csv.reader(existing), [])
        self._open()

    def append(self, rows: Iterable[Mapping[str, Any]]) -> None:
        """Write rows; they are with the operating system when this returns."""
        for row in rows:
            # A line is a row, so that half a row can be told from whole ones.
            cells = {_one_line(key): _one_line(value) for key, value in row.items()}
            added = [key for key in cells if key not in self._columns]
            if added:
                self._widen(added)
            self._writer.writerow(cells)
        self._file.flush()

    def close(self) -> None:
        """Close the file."""
        self._file.close()

    def _open(self) -> None:
        self._file: TextIO = self._path.open("a", newline="", encoding="utf-8")
        self._writer = csv.DictWriter(self._file, self._columns, lineterminator="\n")

    def _widen(self, added: list[str]) -> None:
        """Give the file more columns; a reader sees the old file or the new one."""
        self._file.close()
        self._columns = [*self._columns, *added]
        with (
            self._path.open(newline="", encoding="utf-8") as old,
            self._part.open("w", newline="", encoding="utf-8") as new,
        ):
            writer = csv.DictWriter(new, self._columns, lineterminator="\n")
            writer.writeheader()
            writer.writerows(csv.DictReader(old))
        self._part.replace(self._path)
        self._open()


def _one_line(value: Any) -> Any:
    if not isinstance(value, str):
        return value
    return value.replace("\\", "\\\\").replace("\n", "\\n") if "\n" in value else value


def _cut_half_a_line(file: BinaryIO) -> None:
    """Remove what follows the last line break."""
    end = file.seek(0, os.SEEK_END)
    keep = 0
    step = 4096
    for start in range(max(0, end - step), -step, -step):
        file.seek(max(0, start))
        found = file.read(min(step, end)).rfind(b"\n")
        if found >= 0:
            keep = max(0, start) + found + 1
            break
    if keep < end:
        file.truncate(keep)
