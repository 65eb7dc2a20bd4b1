"""News of a run for drivers: kept until requested, and sent when there is more.

Several drivers may follow one run, each from where it is. Only the newest are kept, so a driver
with rare requests misses rows of metrics but never the state.
"""

from __future__ import annotations

import asyncio
import collections
import dataclasses
import itertools
from typing import TYPE_CHECKING, Any, NamedTuple

from miniray.train.base.states import RunState

if TYPE_CHECKING:
    from collections.abc import Iterable

    from miniray.train.base.reports import Step

#: The most rows of metrics, and remarks, that are kept; of more, the newest.
MAX_ROWS = 50
MAX_NOTES = 50


class Seen(NamedTuple):
    """How far a reader is; a new one is at 0.

    Attributes:
        version: Counts all news.
        rows: How many rows there were by then.
        notes: How many remarks.
    """

    version: int = 0
    rows: int = 0
    notes: int = 0


@dataclasses.dataclass(frozen=True)
class Row:
    """One step, for display."""

    number: int
    metrics: dict[str, Any]
    checkpoint: str | None

    @classmethod
    def of(cls, number: int, step: Step) -> Row:
        return cls(number, step.metrics, step.uploads[0].name if step.uploads else None)


@dataclasses.dataclass(frozen=True)
class Progress:
    """News of a run.

    Attributes:
        seen: To be given to ``after`` to get what follows.
        state: Where the run stands.
        rows: New rows, oldest first, at most ``MAX_ROWS``.
        skipped: How many rows before them were left out.
        notes: New remarks, as sentences.
    """

    seen: Seen
    state: RunState
    rows: list[Row]
    skipped: int
    notes: list[str]


class ProgressFeed:
    """Keeps the news of one run."""

    def __init__(self) -> None:
        self.state = RunState.INITIALIZING
        self._rows: collections.deque[Row] = collections.deque(maxlen=MAX_ROWS)
        self._notes: collections.deque[str] = collections.deque(maxlen=MAX_NOTES)
        self._now = Seen()
        self._changed = asyncio.Event()

    @property
    def version(self) -> int:
        return self._now.version

    @property
    def notes(self) -> list[str]:
        """The newest remarks."""
        return list(self._notes)

    def set_state(self, state: RunState) -> None:
        self.state = state
        self._publish()

    def add_rows(self, rows: Iterable[Row]) -> None:
        new = list(rows)
        self._rows.extend(new)
        self._publish(rows=len(new))

    def note(self, text: str) -> None:
        self._notes.append(text)
        self._publish(notes=1)

    async def after(self, seen: Seen) -> Progress:
        """Wait for news that the reader does not have."""
        while self._now.version <= seen.version:
            await self._changed.wait()
        new_rows = self._now.rows - seen.rows
        rows = _last(self._rows, new_rows)
        notes = _last(self._notes, self._now.notes - seen.notes)
        return Progress(self._now, self.state, rows, new_rows - len(rows), notes)

    def _publish(self, rows: int = 0, notes: int = 0) -> None:
        version, old_rows, old_notes = self._now
        self._now = Seen(version + 1, old_rows + rows, old_notes + notes)
        changed, self._changed = self._changed, asyncio.Event()
        changed.set()


def _last(items: collections.deque[Any], count: int) -> list[Any]:
    return list(itertools.islice(items, max(0, len(items) - count), None))
