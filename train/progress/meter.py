"""How a run goes, measured from its reports and as text. Pure: the caller says the time."""

from __future__ import annotations

import collections
import dataclasses
from typing import TYPE_CHECKING, Any

from miniray.train.base.policies import RunState
from miniray.train.callbacks.progress import ProgressCallback
from miniray.train.storage.metrics_log import flatten

if TYPE_CHECKING:
    from miniray.train.progress.feed import Row

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
    """Return a metric as short text."""
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

    def __init__(self, goals: ProgressCallback | None = None) -> None:
        self._goals = goals if goals is not None else ProgressCallback()
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
        """Return whether another line of status is due where lines are not overwritten."""
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
    """Return a duration as ``1:02:03``, or ``2:03`` below an hour."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"


def _number(value: Any) -> float | None:
    return value if isinstance(value, int | float) and not isinstance(value, bool) else None
