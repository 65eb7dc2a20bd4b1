"""The live lines of a run at the bottom of a terminal: its progress, then the bars of its workers.

Imported where a terminal is there, since it loads rich. What workers print meanwhile comes from
``logs/screen.py``, and is printed above.
"""

from __future__ import annotations

import logging
import sys
import time
from typing import TYPE_CHECKING

from rich.progress import Progress as RichProgress
from rich.progress import ProgressColumn, SpinnerColumn, Task, TextColumn, TimeElapsedColumn
from rich.progress_bar import ProgressBar
from rich.table import Column
from rich.text import Text

from miniray.logs.screen import SCREEN, is_terminal
from miniray.train.base.policies import RunState
from miniray.train.progress.meter import WORDS, ProgressMeter, format_row, format_status

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from rich.console import RenderableType

    from miniray.train.progress.feed import Progress

logger = logging.getLogger(__name__)

_BAR_WIDTH = 20


class LiveDisplay:
    """Keeps a run's line up to date at the bottom of a terminal, below what the workers print."""

    def __init__(self, name: str, meter: ProgressMeter) -> None:
        text = TextColumn(
            "{task.description}",
            markup=False,
            # It gets the room that the others leave.
            table_column=Column(overflow="ellipsis", no_wrap=True, ratio=1),
        )
        elapsed = TimeElapsedColumn(Column(no_wrap=True, min_width=7))
        self._lines = _Lines(
            SpinnerColumn(),
            elapsed,
            _Bar(Column(no_wrap=True, min_width=_BAR_WIDTH)),
            text,
            # What goes to a file stays there: rich would print it on the terminal.
            redirect_stderr=is_terminal(sys.stderr),
            expand=True,
        )
        self._name = name
        self._meter = meter
        self._last = ""
        self._done: float | None = None
        self._task = self._lines.add_task(name, total=None, done=None)
        self._started = False
        self._try(self._start)

    def show(self, progress: Progress) -> None:
        """Bring the line up to date; notes and checkpoints stay above it."""
        self._try(lambda: self._show(progress))

    def close(self) -> None:
        """Leave the line as it is."""
        if self._started:
            self._started = False
            SCREEN.take_back(self)
            self._lines.bars = ()
            self._try(self._lines.stop)

    def print_above(self, lines: Sequence[str], bars: Sequence[str]) -> None:
        """Print lines of workers above, and show their progress bars below the run's line.

        Raises:
            Exception: Whatever the terminal raises.
        """
        self._lines.bars = tuple(bars)
        if lines:
            text = Text("\n").join(map(Text.from_ansi, lines))
            self._lines.console.print(text, soft_wrap=True)  # the terminal breaks long ones
        else:
            self._lines.refresh()

    def _start(self) -> None:
        SCREEN.hand_over(self)  # before: else bars of workers are where the line begins
        try:
            self._lines.start()
        except BaseException:  # another display is live, or the terminal is gone
            SCREEN.take_back(self)
            raise
        self._started = True

    def _try(self, draw: Callable[[], None]) -> None:
        try:
            draw()
        except Exception:  # the terminal is gone, or a stand-in that may raise anything
            logger.debug("The progress of run %s can't be shown.", self._name, exc_info=True)

    def _show(self, progress: Progress) -> None:
        above = [*progress.notes]
        above += [format_row(row) for row in progress.rows if row.checkpoint is not None]
        for line in above:
            self._lines.console.print(line, markup=False, highlight=False, soft_wrap=True)
        if progress.rows:
            status = self._meter.update(progress.rows[-1], time.monotonic())
            self._done = status.done
            self._last = f" · {format_status(status)} · {format_row(progress.rows[-1])}"
        if progress.state is RunState.FINISHED:
            self._done = 1.0
        ended = 1 if progress.state.terminal else None  # what has ended has no spinner
        self._lines.update(
            self._task,
            # What changes comes first: the end may find no room.
            description=f"{WORDS[progress.state]}{self._last} · {self._name}",
            total=ended,
            completed=ended,
            done=self._done,
        )


class _Lines(RichProgress):
    """A run's line, and the bars of workers below it."""

    bars: Sequence[str] = ()

    def get_renderables(self) -> Iterable[RenderableType]:
        yield from super().get_renderables()
        for bar in self.bars:
            text = Text.from_ansi(bar)
            text.no_wrap, text.overflow = True, "ellipsis"
            yield text


class _Bar(ProgressColumn):
    """How much of a run is done; one that moves to and fro where nothing tells."""

    def render(self, task: Task) -> RenderableType:
        done: float | None = task.fields["done"]
        unknown = done is None and not task.finished
        return ProgressBar(
            total=None if unknown else 1.0,
            completed=done or 0.0,
            width=_BAR_WIDTH,
            animation_time=task.get_time(),
        )
