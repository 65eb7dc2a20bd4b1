"""Shows the driver's user how a run goes: a live line on a terminal, plain lines elsewhere.

How fast it goes is measured from the reports. An output that can't be written to does not
end a run.
"""

from __future__ import annotations

import collections
import dataclasses
import sys
import time
from typing import TYPE_CHECKING, Any, TextIO

from miniray.logs.screen import is_terminal, write
from miniray.train.base.policies import RunState
from miniray.train.callbacks.progress import ProgressCallback, ProgressGoals
from miniray.train.storage.metrics_log import flatten

if TYPE_CHECKING:
    from collections.abc import Iterable

    from miniray.train.callbacks import Callback
    from miniray.train.progress.feed import Progress, Row
    from miniray.train.progress.live_display import LiveDisplay

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


#: Characters of a value that are shown.
_WIDTH = 200


def format_value(value: Any) -> str:
    """A metric as short text."""
    return f"{value:.4g}" if isinstance(value, float) else shorten(str(value))


def shorten(text: str) -> str:
    """The beginning of a text, if it is long."""
    return text if len(text) <= _WIDTH else f"{text[:_WIDTH]} ..."


def format_row(row: Row) -> str:
    """A step as one line: its number, its metrics, its checkpoint."""
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
        epoch: As reported last; None if it is not reported.
        total_epochs: Epochs in all; None if unknown.
        step: Steps made.
        total_steps: Steps in all; None if unknown.
        rate: Steps per second; None before there are two reports.
        left: Seconds until the end; None if nothing tells.
    """

    epoch: float | None
    total_epochs: int | None
    step: int
    total_steps: int | None
    rate: float | None
    left: float | None

    @property
    def done(self) -> float | None:
        """Share of the run that is done, from 0 to 1; None if nothing tells."""
        if self.total_steps is not None:
            return min(1.0, self.step / self.total_steps)
        if self.total_epochs is None or self.epoch is None:
            return None
        return self.epochs_done / self.total_epochs

    @property
    def epochs_done(self) -> float:
        """Epochs that are over: they are reported at their end, and counted from 0."""
        done = 0.0 if self.epoch is None else self.epoch + 1
        return done if self.total_epochs is None else min(done, self.total_epochs)


@dataclasses.dataclass(frozen=True)
class _Sample:
    time: float
    step: int
    epoch: float | None


class ProgressMeter:
    """Measures over the last ``WINDOW`` seconds, so that a slow start is soon forgotten."""

    def __init__(self, goals: ProgressGoals | None = None) -> None:
        self._goals = goals if goals is not None else ProgressGoals()
        self._samples: collections.deque[_Sample] = collections.deque()
        self._next_line = 0.0

    def update(self, row: Row, now: float) -> ProgressStatus:
        """Take the newest report, which was known at this time; return how far the run is."""
        values = flatten(row.metrics)
        step = _number(values.get(self._goals.step_key))
        epoch = _number(values.get(self._goals.epoch_key))
        self._add(_Sample(now, row.number + 1 if step is None else int(step), epoch))
        first, last = self._samples[0], self._samples[-1]
        elapsed = last.time - first.time
        rate = (last.step - first.step) / elapsed if elapsed > 0 else None
        return ProgressStatus(
            epoch=last.epoch,
            total_epochs=self._goals.total_epochs,
            step=last.step,
            total_steps=self._goals.total_steps,
            rate=rate,
            left=self._left(first, last, rate),
        )

    def is_due(self, now: float) -> bool:
        """Whether another line of status is due where lines are not overwritten."""
        if self._next_line == 0.0:
            self._next_line = now + LINE_EVERY
        if now < self._next_line:
            return False
        self._next_line = now + LINE_EVERY
        return True

    def _add(self, sample: _Sample) -> None:
        last = self._samples[-1] if self._samples else None
        if last is not None and sample.step < last.step:
            self._samples.clear()  # the workers began again from an older checkpoint
        self._samples.append(sample)
        while len(self._samples) > 2 and self._samples[1].time <= sample.time - WINDOW:
            self._samples.popleft()

    def _left(self, first: _Sample, last: _Sample, rate: float | None) -> float | None:
        goals = self._goals
        if goals.total_steps is not None:
            return max(0, goals.total_steps - last.step) / rate if rate else None
        if goals.total_epochs is None or first.epoch is None or last.epoch is None:
            return None
        epochs, elapsed = last.epoch - first.epoch, last.time - first.time
        if epochs <= 0 or elapsed <= 0:
            return None
        return max(0.0, goals.total_epochs - 1 - last.epoch) * elapsed / epochs


def format_status(status: ProgressStatus) -> str:
    """How far a run is, as one line."""
    parts = []
    if status.epoch is not None:
        total = f"/{status.total_epochs}" if status.total_epochs is not None else ""
        parts.append(f"epoch {status.epochs_done:g}{total}" if total else f"epoch {status.epoch:g}")
    total = f"/{status.total_steps}" if status.total_steps is not None else ""
    parts.append(f"step {status.step}{total}")
    if status.rate is not None:
        parts.append(f"{status.rate:.3g} steps/s")
    if status.left is not None:
        parts.append(f"{format_seconds(status.left)} left")
    return ", ".join(parts)


def format_seconds(seconds: float) -> str:
    """A duration as ``1:02:03``, or ``2:03`` below an hour."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"


def _number(value: Any) -> float | None:
    return value if isinstance(value, int | float) and not isinstance(value, bool) else None


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
            lines.append(WORDS[progress.state])
        write(self._stream, "".join(f"[{self._name}] {line}\n" for line in lines))

    def close(self) -> None:
        """Nothing is held open."""


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
        from miniray.train.progress.live_display import LiveDisplay

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
