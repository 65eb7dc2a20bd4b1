"""Folds lines that many workers write: which are printed, and how often the others came.

Pure decisions over lines and times; prints nothing and starts no timers. The rules
are Ray's: the first line of a pattern is printed at once, the same from other
workers is counted, and the count is printed when the window has passed.
"""

from __future__ import annotations

import dataclasses
import re
from typing import TYPE_CHECKING, Generic, TypeVar

if TYPE_CHECKING:
    from collections.abc import Hashable

#: Words with digits tend to differ between workers (ranks, addresses, durations).
_VARYING = re.compile(r"\d")
#: More patterns than this are not followed at once; their lines are all printed.
_MAX_PATTERNS = 10_000

SourceT = TypeVar("SourceT", bound="Hashable")


@dataclasses.dataclass(frozen=True)
class Folded(Generic[SourceT]):
    """A line to print for those that were held back."""

    source: SourceT  # of the last of them
    text: str  # the last of them
    count: int  # how many there were


@dataclasses.dataclass
class _Pattern(Generic[SourceT]):
    since: float
    sources: set[SourceT]
    last: Folded[SourceT]


class LogDeduplicator(Generic[SourceT]):
    """Folds the lines of one stream (stdout or stderr) of all workers.

    Args:
        window: Seconds over which lines of one pattern are folded.
    """

    def __init__(self, window: float) -> None:
        self._window = window
        self._patterns: dict[str, _Pattern[SourceT]] = {}  # in the order of their times

    def admit(self, source: SourceT, text: str, now: float) -> bool:
        """Whether a line is to be printed now; otherwise it is counted.

        Args:
            source: The worker that wrote it. What one worker repeats is printed.
            text: The line.
            now: The time, in seconds.
        """
        key = " ".join(word for word in text.split() if not _VARYING.search(word))
        if not key:
            return True  # nothing but numbers: they are what the user wants to see
        pattern = self._patterns.get(key)
        if pattern is None:
            if len(self._patterns) < _MAX_PATTERNS:
                self._patterns[key] = _Pattern(now, {source}, Folded(source, text, 0))
            return True
        pattern.sources.add(source)
        if len(pattern.sources) == 1:
            return True
        pattern.last = Folded(source, text, pattern.last.count + 1)
        return False

    def due(self, now: float) -> list[Folded[SourceT]]:
        """The held-back lines whose window has passed; patterns that came once are forgotten."""
        ready: list[Folded[SourceT]] = []
        while self._patterns:
            key = next(iter(self._patterns))
            pattern = self._patterns[key]
            if now - pattern.since < self._window:
                break
            del self._patterns[key]
            if pattern.last.count:
                ready.append(pattern.last)
            if pattern.last.count > 1:  # it goes on, so a new window begins
                pattern.since = now
                pattern.last = dataclasses.replace(pattern.last, count=0)
                self._patterns[key] = pattern
        return ready

    def next_due(self) -> float | None:
        """When ``due`` may have something next; None while nothing is held back."""
        held = (pattern.since for pattern in self._patterns.values() if pattern.last.count)
        first = next(held, None)  # patterns are in the order of their times
        return None if first is None else first + self._window

    def drain(self) -> list[Folded[SourceT]]:
        """All held-back lines, whatever their time; everything is forgotten."""
        held = [pattern.last for pattern in self._patterns.values() if pattern.last.count]
        self._patterns.clear()
        return held
