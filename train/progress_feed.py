"""What the driver is told of a run: kept here until it asks, and sent when there is news.

Holds the newest facts only, so a driver that looks seldom misses rows of
metrics but never the state.
"""

from __future__ import annotations

import asyncio
import collections
import dataclasses
from typing import TYPE_CHECKING, Any

from miniray.train.state import RunState

if TYPE_CHECKING:
    from collections.abc import Iterable

#: At most so many rows of metrics are sent at once; of more, the newest.
MAX_ROWS = 50


@dataclasses.dataclass(frozen=True)
class Row:
    """One step, as a person wants to see it."""

    number: int
    metrics: dict[str, Any]
    checkpoint: str | None


@dataclasses.dataclass(frozen=True)
class Progress:
    """News of a run.

    Attributes:
        version: To be given to ``after`` to get what follows.
        state: Where the run stands.
        rows: New rows, oldest first, at most ``MAX_ROWS``.
        skipped: How many rows before them were left out.
        notes: New remarks, as sentences.
    """

    version: int
    state: RunState
    rows: list[Row]
    skipped: int
    notes: list[str]


class ProgressFeed:
    """Collects news for one reader."""

    def __init__(self) -> None:
        self._version = 0
        self._state = RunState.INITIALIZING
        self._rows: collections.deque[Row] = collections.deque(maxlen=MAX_ROWS)
        self._new_rows = 0
        self._notes: list[str] = []
        self._changed = asyncio.Event()

    def set_state(self, state: RunState) -> None:
        """Tell of a new state."""
        self._state = state
        self._publish()

    def add_rows(self, rows: Iterable[Row]) -> None:
        """Tell of new rows."""
        for row in rows:
            self._rows.append(row)
            self._new_rows += 1
        self._publish()

    def note(self, text: str) -> None:
        """Tell a remark, as a sentence."""
        self._notes.append(text)
        self._publish()

    async def after(self, version: int) -> Progress:
        """Wait for news that the reader of this version does not have; 0 has none."""
        while self._version <= version:
            self._changed.clear()
            await self._changed.wait()
        rows, notes = list(self._rows), self._notes
        skipped = self._new_rows - len(rows)
        self._rows.clear()
        self._new_rows, self._notes = 0, []
        return Progress(self._version, self._state, rows, skipped, notes)

    def _publish(self) -> None:
        self._version += 1
        self._changed.set()
