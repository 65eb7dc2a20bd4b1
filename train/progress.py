"""Shows the driver's user how a run goes: a live line on a terminal, plain lines elsewhere.

How fast it goes is measured in ``progress_meter.py``.
"""

from __future__ import annotations

import sys
import time
from typing import TYPE_CHECKING, Any, TextIO

from miniray.train.callbacks.progress import ProgressCallback
from miniray.train.metrics_log import flatten
from miniray.train.progress_meter import ProgressMeter, format_status
from miniray.train.state import RunState

if TYPE_CHECKING:
    from collections.abc import Iterable

    from miniray.train.callbacks import Callback
    from miniray.train.progress_feed import Progress, Row

_WORDS = {
    RunState.INITIALIZING: "opening the storage",
    RunState.SCHEDULING: "starting the workers",
    RunState.RUNNING: "training",
    RunState.RESTARTING: "starting the workers again",
    RunState.RESIZING: "starting more workers",
    RunState.FINISHED: "finished",
    RunState.ERRORED: "failed",
    RunState.ABORTED: "stopped",
}


def format_value(value: Any) -> str:
    """A metric as short text."""
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def format_row(row: Row) -> str:
    """A step as one line: its number, its metrics, its checkpoint."""
    parts = [f"{key}={format_value(value)}" for key, value in flatten(row.metrics).items()]
    if row.checkpoint is not None:
        parts.append(f"-> {row.checkpoint}")
    return f"report {row.number}: {' '.join(parts)}"


class PlainDisplay:
    """Writes each piece of news as a line."""

    def __init__(
        self, name: str, stream: TextIO | None = None, meter: ProgressMeter | None = None
    ) -> None:
        self._name = name
        self._stream = stream if stream is not None else sys.stdout
        self._meter = meter if meter is not None else ProgressMeter()
        self._state: RunState | None = None

    def show(self, progress: Progress) -> None:
        """Write what is new."""
        lines = [*progress.notes]
        if progress.skipped:
            lines.append(f"({progress.skipped} more reports)")
        lines += [format_row(row) for row in progress.rows]
        if progress.rows:
            status = self._meter.update(progress.rows[-1], time.monotonic())
            if self._meter.is_due(time.monotonic()):
                lines.append(format_status(status))
        if progress.state is not self._state:
            self._state = progress.state
            lines.append(_WORDS[progress.state])
        for line in lines:
            self._stream.write(f"[{self._name}] {line}\n")
        self._stream.flush()

    def close(self) -> None:
        """Nothing is held open."""


class LiveDisplay:
    """Keeps one line up to date at the bottom of a terminal, below what the workers print."""

    def __init__(self, name: str, meter: ProgressMeter | None = None) -> None:
        from rich.progress import Progress as RichProgress
        from rich.progress import SpinnerColumn, TextColumn, TimeElapsedColumn
        from rich.table import Column

        elapsed = TimeElapsedColumn(Column(no_wrap=True, min_width=7))
        text = TextColumn(
            "{task.description}",
            markup=False,
            table_column=Column(overflow="ellipsis", no_wrap=True),
        )
        self._bar = RichProgress(SpinnerColumn(), elapsed, text)
        self._name = name
        self._meter = meter if meter is not None else ProgressMeter()
        self._last = ""
        self._task = self._bar.add_task(name, total=None)
        self._bar.start()

    def show(self, progress: Progress) -> None:
        """Bring the line up to date; notes and checkpoints stay above it."""
        above = [*progress.notes]
        above += [format_row(row) for row in progress.rows if row.checkpoint is not None]
        for line in above:
            self._bar.console.print(line, markup=False, highlight=False)
        if progress.rows:
            status = format_status(self._meter.update(progress.rows[-1], time.monotonic()))
            self._last = f" · {status} · {format_row(progress.rows[-1])}"
        done = 1 if progress.state.terminal else None  # a full bar has no spinner
        line = f"{self._name}: {_WORDS[progress.state]}{self._last}"
        self._bar.update(self._task, description=line, total=done, completed=done)

    def close(self) -> None:
        """Leave the line as it is."""
        self._bar.stop()


def make_display(
    name: str, callbacks: Iterable[Callback] = (), *, live: bool = True
) -> PlainDisplay | LiveDisplay:
    """The display that suits standard output, as the run's ProgressCallback wants it.

    Args:
        name: Name of the run.
        callbacks: Its callbacks.
        live: Whether a terminal may be used for a live line.
    """
    chosen = next((each for each in callbacks if isinstance(each, ProgressCallback)), None)
    meter = ProgressMeter(chosen.goals) if chosen is not None else ProgressMeter()
    if live and sys.stdout.isatty():
        return LiveDisplay(name, meter)
    return PlainDisplay(name, meter=meter)


class Pace:
    """Says how long to wait before the next look, so that a run is looked at 10 times a second."""

    INTERVAL = 0.1  # seconds

    def __init__(self) -> None:
        self._last = 0.0

    def delay(self) -> float:
        """Seconds until the next look."""
        now = time.monotonic()
        wait = max(0.0, self._last + self.INTERVAL - now)
        self._last = now + wait
        return wait
