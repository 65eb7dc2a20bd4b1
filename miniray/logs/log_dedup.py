"""Folds lines that many workers write: which are printed, and how often the others came.

Pure decisions over lines and times; prints nothing and starts no timers. The first of
equal lines is printed at once, the same from other workers is counted, and the count is
printed when the window has passed. Unlike in Ray, lines that differ in numbers are not equal.
"""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Generic, TypeVar

if TYPE_CHECKING:
    from collections.abc import Hashable

#: More lines than this, and longer ones, are not followed at once; they are all printed.
_MAX_LINES = 10_000
_MAX_LENGTH = 2_000

SourceT = TypeVar("SourceT", bound="Hashable")


@dataclasses.dataclass(frozen=True)
class Folded(Generic[SourceT]):
    """A line to print for those that were held back."""

    text: str
    last: SourceT  # who wrote the last of them
    sources: set[SourceT]  # all who wrote it, the one whose line was printed included
    count: int  # how many were held back


@dataclasses.dataclass
class _Followed(Generic[SourceT]):
    since: float
    sources: set[SourceT]
    last: SourceT
    count: int = 0

    def folded(self, text: str) -> Folded[SourceT]:
        """What to print for the lines that were held back."""
        return Folded(text, self.last, set(self.sources), self.count)


class LogDeduplicator(Generic[SourceT]):
    """Folds the lines of one stream (stdout or stderr) of all workers.

    Args:
        window: Seconds over which equal lines are folded.
    """

    def __init__(self, window: float) -> None:
        self._window = window
        self._lines: dict[str, _Followed[SourceT]] = {}  # in the order of their times

    def admit(self, source: SourceT, text: str, now: float) -> bool:
        """Whether a line is to be printed now; otherwise it is counted.

        Args:
            source: The worker that wrote it. What one worker repeats is printed.
            text: The line.
            now: The time, in seconds.
        """
        if not text.strip() or len(text) > _MAX_LENGTH:
            return True
        line = self._lines.get(text)
        if line is None:
            if len(self._lines) < _MAX_LINES:
                self._lines[text] = _Followed(now, {source}, source)
            return True
        line.sources.add(source)
        if len(line.sources) == 1:
            return True
        line.last = source
        line.count += 1
        return False

    def due(self, now: float) -> list[Folded[SourceT]]:
        """The held-back lines whose window has passed; lines that came once are forgotten."""
        ready: list[Folded[SourceT]] = []
        while self._lines:
            text, line = next(iter(self._lines.items()))
            if now - line.since < self._window:
                break
            del self._lines[text]
            if line.count:
                ready.append(line.folded(text))
            if line.count > 1:  # it goes on, so a new window begins
                line.since, line.count = now, 0
                self._lines[text] = line
        return ready

    def next_due(self) -> float | None:
        """When ``due`` may have something next; None while nothing is held back."""
        held = (line.since for line in self._lines.values() if line.count)
        first = next(held, None)  # lines are in the order of their times
        return None if first is None else first + self._window

    def drain(self) -> list[Folded[SourceT]]:
        """All held-back lines, whatever their time; everything is forgotten."""
        held = [line.folded(text) for text, line in self._lines.items() if line.count]
        self._lines.clear()
        return held
