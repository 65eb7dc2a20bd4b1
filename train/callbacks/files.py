"""Callbacks that keep the reported metrics in a file: JSON lines, or CSV.

A file that exists is continued. Rows that a killed process has cut off are cut away.
"""

from __future__ import annotations

import csv
import json
import mmap
import os
import time
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING, Any, ClassVar, TextIO

from miniray.train.config.run import Callback
from miniray.train.storage.metrics_log import flat_row

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from miniray.train.base.states import RunState
    from miniray.train.config.run import RunContext
    from miniray.train.storage.checkpoint import Checkpoint


class JsonLinesFile:
    """Appends rows as lines of JSON; values that JSON does not know are written as text."""

    def __init__(self, path: Path) -> None:
        _cut_half_a_line(path)
        self._file = path.open("a", encoding="utf-8")

    def append(self, rows: Iterable[Mapping[str, Any]]) -> None:
        """Write rows; they are with the operating system when this returns."""
        self._file.writelines(f"{json.dumps(row, default=str)}\n" for row in rows)
        self._file.flush()

    def close(self) -> None:
        self._file.close()


class CsvFile:
    """Appends rows as CSV.

    A row with a key that had no column yet adds one: the file is written anew once, with empty
    cells in the rows before.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._part = path.with_name(f".{path.name}.part")
        _cut_half_a_line(path)
        with path.open(newline="", encoding="utf-8") as existing:
            self._columns = next(csv.reader(existing), [])
        self._open()

    def append(self, rows: Iterable[Mapping[str, Any]]) -> None:
        """Write rows; they are with the operating system when this returns."""
        for row in rows:
            # A line is a row, so that half a row can be told from whole ones.
            cells = {_one_line(key): _one_line(value) for key, value in flat_row(row).items()}
            added = [key for key in cells if key not in self._columns]
            if added:
                self._widen(added)
            self._writer.writerow(cells)
        self._file.flush()

    def close(self) -> None:
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


def _cut_half_a_line(path: Path) -> None:
    """Make the file if there is none, and remove what follows its last line break."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("ab+") as file:
        if file.tell() > 0:
            with mmap.mmap(file.fileno(), 0) as content:
                keep = content.rfind(b"\n") + 1
            file.truncate(keep)


class _FileCallback(Callback):
    """Writes a row for each report."""

    _kind: ClassVar[type[JsonLinesFile | CsvFile]]

    def __init__(self, path: str | os.PathLike[str], *, all_ranks: bool = False) -> None:
        name = type(self).__name__
        text = os.fspath(path)
        if "://" in text:
            raise ValueError(
                f"{name}({text!r}) must be a local path. What the run itself keeps, in the "
                f"storage path, has its metrics too."
            )
        self.path = Path(text).expanduser().absolute()
        if self.path.is_dir():
            raise ValueError(f"{name}({text!r}) is a folder; name the file to write.")
        self.all_ranks = all_ranks
        self._file: JsonLinesFile | CsvFile | None = None

    def on_start(self, run_context: RunContext) -> None:
        self._file = self._kind(self.path)

    def after_report(
        self,
        run_context: RunContext,
        metrics: list[dict[str, Any]],
        checkpoint: Checkpoint | None,
    ) -> None:
        assert self._file is not None
        about = {
            "number": run_context.report_number,
            "time": time.time(),
            "checkpoint": PurePosixPath(checkpoint.path).name if checkpoint else None,
        }
        self._file.append(
            {**about, **({"rank": rank} if self.all_ranks else {}), "metrics": values}
            for rank, values in enumerate(metrics if self.all_ranks else metrics[:1])
            if values or checkpoint is not None
        )

    def on_end(self, run_context: RunContext, state: RunState, error: str | None) -> None:
        if self._file is not None:
            self._file.close()
            self._file = None


class JSONCallback(_FileCallback):
    """Writes each report as a line of JSON: number, time, checkpoint, metrics.

    Args:
        path: A local path on the machine of the driver. A file that exists is continued.
        all_ranks: Write a row for each rank, with a column ``rank``; otherwise for rank 0 only.

    Raises:
        ValueError: The path is no file of this machine.
    """

    _kind = JsonLinesFile


class CSVCallback(_FileCallback):
    """Writes each report as a row of CSV, with a column for each metric.

    Keys of nested dictionaries are joined by ``/``. A metric that appears later gets a column
    then; rows before have nothing in it. The arguments are those of ``JSONCallback``.
    """

    _kind = CsvFile
