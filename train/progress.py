"""Shows the driver's user how a run goes: a live line on a terminal, plain lines elsewhere.

How fast it goes is measured in ``progress_meter.py``. An output that can't be written to does not
end a run.
"""

from __future__ import annotations

import logging
import sys
import time
from typing import TYPE_CHECKING, Any, TextIO

from miniray.core.user_streams import is_terminal, write
from miniray.train.callbacks.progress import ProgressCallback
from miniray.train.metrics_log import flatten
from miniray.train.progress_meter import ProgressMeter, format_status
from miniray.train.state import RunState

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from miniray.train.callbacks import Callback
    from miniray.train.progress_feed import Progress, Row

logger = logging.getLogger(__name__)

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
        write(self._stream, "".join(f"[{self._name}] {line}\n" for line in lines))

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
        self._try(self._bar.start)

    def show(self, progress: Progress) -> None:
        """Bring the line up to date; notes and checkpoints stay above it."""
        self._try(lambda: self._show(progress))

    def close(self) -> None:
        """Leave the line as it is."""
        self._try(self._bar.stop)

    def _try(self, draw: Callable[[], None]) -> None:
        try:
            draw()
        except Exception:  # the terminal is gone, or a stand-in that may raise anything
            logger.debug("The progress of run %s can't be shown.", self._name, exc_info=True)

    def _show(self, progress: Progress) -> None:
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
    if live and is_terminal(sys.stdout) and _writes_unicode(sys.stdout):
        return LiveDisplay(name, meter)
    return PlainDisplay(name, meter=meter)


def _writes_unicode(stream: TextIO) -> bool:
    """Whether a stream can write the characters that a live line is drawn with."""
    encoding = getattr(stream, "encoding", None)  # a stand-in may have none
    return encoding is None or str(encoding).lower().startswith("utf")


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
