"""Shows the driver how a run goes: a line that stays on a terminal, plain lines elsewhere.

How far a run is, and when it will end, is measured from its reports. An output that can't be
written to does not end a run.
"""

from __future__ import annotations

import collections
import dataclasses
import sys
import threading
import time
from typing import TYPE_CHECKING, Any, TextIO

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
from miniray.train.storage.metrics_log import flatten

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from miniray.train.config.run import Callback
    from miniray.train.controller.feed import Progress, Row


WORDS = {
    RunState.INITIALIZING: "opening the storage",
    RunState.SCHEDULING: "starting the workers",
    RunState.RUNNING: "training",
    RunState.RESTARTING: "starting the workers again",
    RunState.RESIZING: "starting more workers",
    RunState.FINISHED: "finished",
    RunState.ERRORED: "failed",
    RunState.ABORTED: "stopped",
}


#: Epochs and steps are below it, which a NaN is not.
_MOST = 2**53

#: Characters of a value that are shown.
_WIDTH = 200


def format_value(value: Any) -> str:
    return f"{value:.4g}" if isinstance(value, float) else shorten(str(value))


def shorten(text: str) -> str:
    return text if len(text) <= _WIDTH else f"{text[:_WIDTH]} ..."


def format_row(row: Row) -> str:
    parts = [f"{key}={format_value(value)}" for key, value in flatten(row.metrics).items()]
    if row.checkpoint is not None:
        parts.append(f"-> {row.checkpoint}")
    return f"report {row.number}: {' '.join(parts)}"


#: Seconds over which steps per second are measured.
WINDOW = 30.0

#: Seconds between two lines of status where there is no terminal.
LINE_EVERY = 10.0


@dataclasses.dataclass(frozen=True)
class ProgressStatus:
    """How far a run is.

    Attributes:
        goals: How far it is to go.
        time: When that was known, in seconds.
        step: Steps made.
        epoch: As reported last; None if it is not reported.
        rate: Steps per second; None before there are two reports.
        left: Seconds until the end; None if unknown.
    """

    goals: ProgressCallback
    time: float
    step: int
    epoch: float | None
    rate: float | None = None
    left: float | None = None

    @property
    def done(self) -> float | None:
        """Share of the run that is done, from 0 to 1; None if unknown."""
        if self.goals.total_steps is not None:
            return min(1.0, self.step / self.goals.total_steps)
        if self.goals.total_epochs is None or self.epoch is None:
            return None
        return self.epochs_done / self.goals.total_epochs

    @property
    def epochs_done(self) -> float:
        """Epochs that are over: they are reported at their end, and counted from 0."""
        done = 0.0 if self.epoch is None else self.epoch + 1
        total = self.goals.total_epochs
        return done if total is None else min(done, total)


class ProgressMeter:
    """Measures over the last ``WINDOW`` seconds, so that a slow start is soon forgotten."""

    def __init__(self, goals: ProgressCallback | None = None) -> None:
        self._goals = goals if goals is not None else ProgressCallback()
        self._samples: collections.deque[ProgressStatus] = collections.deque()
        self._next_line = 0.0

    def update(self, row: Row, now: float) -> ProgressStatus:
        """Take the newest report, which was known at this time; return how far the run is."""
        values = flatten(row.metrics)
        step = _number(values.get(self._goals.step_key))
        epoch = _number(values.get(self._goals.epoch_key))
        steps = row.number + 1 if step is None else int(step)
        status = ProgressStatus(self._goals, now, steps, epoch)
        self._add(status)
        first = self._samples[0]
        elapsed = now - first.time
        if elapsed <= 0:
            return status
        rate, left = (steps - first.step) / elapsed, None
        done, before = status.done, first.done
        if done is not None and before is not None and done > before:
            left = (1 - done) * elapsed / (done - before)
        return dataclasses.replace(status, rate=rate, left=left)

    def is_due(self, now: float) -> bool:
        """Return whether another line of status is due where lines are not overwritten."""
        if self._next_line == 0.0:
            self._next_line = now + LINE_EVERY
        if now < self._next_line:
            return False
        self._next_line = now + LINE_EVERY
        return True

    def _add(self, sample: ProgressStatus) -> None:
        last = self._samples[-1] if self._samples else None
        if last is not None and sample.step < last.step:
            self._samples.clear()  # the workers began again from an older checkpoint
        self._samples.append(sample)
        while len(self._samples) > 2 and self._samples[1].time <= sample.time - WINDOW:
            self._samples.popleft()


def format_status(status: ProgressStatus) -> str:
    parts = []
    if status.epoch is not None:
        total = f"/{status.goals.total_epochs}" if status.goals.total_epochs is not None else ""
        parts.append(f"epoch {status.epochs_done:g}{total}" if total else f"epoch {status.epoch:g}")
    total = f"/{status.goals.total_steps}" if status.goals.total_steps is not None else ""
    parts.append(f"step {status.step}{total}")
    if status.rate is not None:
        parts.append(f"{status.rate:.3g} steps/s")
    if status.left is not None:
        parts.append(f"{format_seconds(status.left)} left")
    return ", ".join(parts)


def format_seconds(seconds: float) -> str:
    """Return a duration as ``1:02:03``, or ``2:03`` below an hour."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"


def _number(value: Any) -> float | None:
    """Return a metric that can be counted with; None for others, and for one that is no number."""
    counts = isinstance(value, int | float) and not isinstance(value, bool)
    return value if counts and -_MOST < value < _MOST else None


#: Seconds between two looks of a driver at its run.
PAUSE = 0.1

#: Characters of the bar that shows how much of a run is done.
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
        # What changes comes first: the end may be cut off.
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
    """Return how much is done as a bar; empty where the total is unknown."""
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
