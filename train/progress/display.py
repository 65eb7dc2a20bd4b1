"""Shows the driver's user how a run goes: a line that stays on a terminal, plain lines elsewhere.

An output that can't be written to does not end a run.
"""

from __future__ import annotations

import sys
import threading
import time
from typing import TYPE_CHECKING, TextIO

from miniray.logs.screen import (
    ERASE_BELOW,
    SCREEN,
    draw,
    is_terminal,
    stream,
    terminal_size,
    write,
)
from miniray.train.base.states import RunState
from miniray.train.config.run import ProgressCallback
from miniray.train.progress.meter import WORDS, ProgressMeter, format_row, format_status

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from miniray.train.config.run import Callback
    from miniray.train.progress.feed import Progress

#: Seconds between two looks of a driver at its run.
PAUSE = 0.1

#: Characters of the bar that tells how much of a run is done.
_BAR_WIDTH = 20


class PlainDisplay:
    """Writes each piece of news as a line."""

    def __init__(self, name: str, stream: TextIO, meter: ProgressMeter) -> None:
        self._name = name
        self._stream = stream
        self._meter = meter
        self._state: RunState | None = None

    def show(self, progress: Progress) -> None:
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
            lines.append(WORDS[progress.state])
        write(self._stream, "".join(f"[{self._name}] {line}\n" for line in lines))

    def close(self) -> None:
        """Nothing is held open."""


class LiveDisplay:
    """Keeps a run's line at the bottom of a terminal, above the progress bars of its workers.

    It is drawn when there is news, without a thread; notes and checkpoints stay above it.
    """

    def __init__(self, name: str, meter: ProgressMeter) -> None:
        self._name = name
        self._meter = meter
        self._line = name
        self._done: float | None = None
        self._news = ""
        self._bars: Sequence[str] = ()
        # The thread of the workers' output draws too; reentrant, as the lock of the screen is.
        self._lock = threading.RLock()
        SCREEN.hand_over(self)

    def show(self, progress: Progress) -> None:
        above = [*progress.notes]
        above += [format_row(row) for row in progress.rows if row.checkpoint is not None]
        if progress.rows:
            status = self._meter.update(progress.rows[-1], time.monotonic())
            self._done = status.done
            self._news = f", {format_status(status)}, {format_row(progress.rows[-1])}"
        if progress.state is RunState.FINISHED:
            self._done = 1.0
        # What changes comes first: the end may find no room.
        line = f"{_bar(self._done)}{WORDS[progress.state]}{self._news} ({self._name})"
        self._line = " ".join(line.split())  # a metric may be text of several lines
        self.print_above(above, self._bars)

    def close(self) -> None:
        """Leave the line as it is, without the bars below it."""
        SCREEN.take_back(self)
        write(stream(False), f"{ERASE_BELOW}{self._line}\n")

    def print_above(self, lines: Sequence[str], bars: Sequence[str]) -> None:
        """Print lines of workers above, and draw the run's line and these bars below."""
        with self._lock:
            self._bars = bars
            terminal = stream(False)
            text = "".join(f"{line}\n" for line in lines)
            if terminal is not None:
                below = draw([self._line, *bars], *terminal_size(terminal))
                write(terminal, f"{ERASE_BELOW}{text}{below}")


def _bar(done: float | None) -> str:
    """Return how much is done as a bar; nothing where nothing tells."""
    if done is None:
        return ""
    return f"[{'#' * round(done * _BAR_WIDTH):-<{_BAR_WIDTH}}] "


def make_display(
    name: str, callbacks: Iterable[Callback] = (), *, live: bool = True
) -> PlainDisplay | LiveDisplay:
    """Return the display that suits standard output, as the run's ProgressCallback wants it."""
    chosen = next((each for each in callbacks if isinstance(each, ProgressCallback)), None)
    meter = ProgressMeter(chosen)
    if live and is_terminal(sys.stdout):
        return LiveDisplay(name, meter)
    return PlainDisplay(name, sys.stdout, meter)
