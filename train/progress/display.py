"""Shows the driver's user how a run goes: a live line on a terminal, plain lines elsewhere.

An output that can't be written to does not end a run.
"""

from __future__ import annotations

import sys
import time
from typing import TYPE_CHECKING, TextIO

from miniray.logs.screen import is_terminal, write
from miniray.train.config.run import ProgressCallback
from miniray.train.progress.meter import WORDS, ProgressMeter, format_row, format_status

if TYPE_CHECKING:
    from collections.abc import Iterable

    from miniray.train.base.policies import RunState
    from miniray.train.config.run import Callback
    from miniray.train.progress.feed import Progress
    from miniray.train.progress.live_display import LiveDisplay

#: Seconds between two looks of a driver at its run.
PAUSE = 0.1


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


def make_display(
    name: str, callbacks: Iterable[Callback] = (), *, live: bool = True
) -> PlainDisplay | LiveDisplay:
    """Return the display that suits standard output, as the run's ProgressCallback wants it."""
    chosen = next((each for each in callbacks if isinstance(each, ProgressCallback)), None)
    meter = ProgressMeter(chosen)
    if live and is_terminal(sys.stdout) and _writes_unicode(sys.stdout):
        from miniray.train.progress.live_display import LiveDisplay

        return LiveDisplay(name, meter)
    return PlainDisplay(name, sys.stdout, meter)


def _writes_unicode(stream: TextIO) -> bool:
    """Return whether a stream can write the characters that a live line is drawn with."""
    encoding = getattr(stream, "encoding", None)  # a stand-in may have none
    return encoding is None or str(encoding).lower().startswith("utf")
