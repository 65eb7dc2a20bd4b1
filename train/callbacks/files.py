"""Callbacks that keep the reported metrics in a file: JSON lines, or CSV."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from miniray.train.callbacks.base import Callback
from miniray.train.storage.metrics_log import flatten

if TYPE_CHECKING:
    from miniray.train.base.state import RunState
    from miniray.train.callbacks.base import RunContext
    from miniray.train.callbacks.row_files import CsvFile, JsonLinesFile
    from miniray.train.storage.checkpoint import Checkpoint


class _FileCallback(Callback):
    """Writes a row for each report.

    Args:
        path: A local path on the machine of the driver. A file that exists is continued.
        all_ranks: Write a row for each rank, with a column ``rank``; otherwise for rank 0 only.

    Raises:
        ValueError: The path is no file of this machine.
    """

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

    def after_report(
        self,
        run_context: RunContext,
        metrics: list[dict[str, Any]],
        checkpoint: Checkpoint | None,
    ) -> None:
        """Write the rows of this report."""
        assert self._file is not None
        about = {
            "number": run_context.report_number,
            "time": time.time(),
            "checkpoint": checkpoint.path.rstrip("/").rpartition("/")[2] if checkpoint else None,
        }
        if not self.all_ranks:
            if metrics[0] or checkpoint is not None:
                self._file.append([{**about, **self._values(metrics[0])}])
            return
        self._file.append(
            {**about, "rank": rank, **self._values(values)}
            for rank, values in enumerate(metrics)
            if values or checkpoint is not None
        )

    def on_end(self, run_context: RunContext, state: RunState, error: str | None) -> None:
        """Close the file."""
        if self._file is not None:
            self._file.close()
            self._file = None

    def _values(self, metrics: dict[str, Any]) -> dict[str, Any]:
        """What a row holds of the metrics."""
        raise NotImplementedError


class JSONCallback(_FileCallback):
    """Writes each report as a line of JSON: number, time, checkpoint, metrics.

    Args:
        path: A local path on the machine of the driver. A file that exists is continued.
        all_ranks: Write a row for each rank, with a column ``rank``; otherwise for rank 0 only.

    Raises:
        ValueError: The path is no file of this machine.
    """

    def on_start(self, run_context: RunContext) -> None:
        """Open the file."""
        from miniray.train.callbacks.row_files import JsonLinesFile

        self._file = JsonLinesFile(self.path)

    def _values(self, metrics: dict[str, Any]) -> dict[str, Any]:
        return {"metrics": metrics}


class CSVCallback(_FileCallback):
    """Writes each report as a row of CSV, with a column for each metric.

    Keys of nested dictionaries are joined by ``/``. A metric that appears later gets a column
    then; rows before have nothing in it.

    Args:
        path: A local path on the machine of the driver. A file that exists is continued.
        all_ranks: Write a row for each rank, with a column ``rank``; otherwise for rank 0 only.

    Raises:
        ValueError: The path is no file of this machine.
    """

    def on_start(self, run_context: RunContext) -> None:
        """Open the file."""
        from miniray.train.callbacks.row_files import CsvFile

        self._file = CsvFile(self.path)

    def _values(self, metrics: dict[str, Any]) -> dict[str, Any]:
        return flatten(metrics)
