"""Rows of a topic, and what one viewer sees of them: a window, searched and sorted."""

from __future__ import annotations

import collections
import dataclasses
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    import asyncio
    from collections.abc import Callable, Iterable, Mapping

    Row = dict[str, Any]

#: Fields that a topic's summary counts the values of.
_COUNTED = ("state", "status", "kind", "severity")


class Asked(NamedTuple):
    """What a topic that is asked for is now."""

    #: By key.
    rows: dict[str, Row]
    #: What its summary says beside.
    facts: Row


class Table:
    """Rows by key, each with the revision at which it last changed."""

    def __init__(self, error: str = "") -> None:
        self.rows: dict[str, Row] = {}
        self._changed_at: dict[str, int] = {}
        self.revision = 0
        #: Whether it is known which rows there are.
        self.known = False
        #: Why rows are missing or old, as a sentence; empty if they are not.
        self.error = error
        #: What else the summary says.
        self.facts: Callable[[], Row] = dict
        #: Set whenever something has changed, for each viewer.
        self.viewers: set[asyncio.Event] = set()

    def update(self, changed: Mapping[str, Row], gone: Iterable[str] = ()) -> None:
        """Enter changed rows, and drop others."""
        self.revision += 1
        self.known = True
        for key in gone:
            self.rows.pop(key, None)
            self._changed_at.pop(key, None)
        for key, row in changed.items():
            self.rows[key] = row
            self._changed_at[key] = self.revision
        self.wake()

    def forget(self) -> None:
        """Drop all rows: others will come from a source that has begun anew."""
        self.update({}, list(self.rows))
        self.known = False

    def replace(self, rows: Mapping[str, Row]) -> None:
        """Hold these rows only; those that are as before have not changed."""
        changed = {key: row for key, row in rows.items() if self.rows.get(key) != row}
        gone = [key for key in self.rows if key not in rows]
        if changed or gone or self.error or not self.known:
            self.error = ""
            self.update(changed, gone)

    def fail(self, error: str) -> None:
        """Let viewers know why rows are missing or old; empty: they are not any more."""
        if error != self.error:
            self.error = error
            self.wake()

    def wake(self) -> None:
        for event in self.viewers:
            event.set()

    def changed_since(self, key: str, revision: int) -> bool:
        return self._changed_at[key] > revision

    def summary(self) -> dict[str, Any]:
        """Count the values of those fields that say how far things are."""
        counts: dict[str, collections.Counter[str]] = {}
        for row in self.rows.values():
            for field in _COUNTED:
                value = row.get(field)
                if isinstance(value, str):
                    counts.setdefault(field, collections.Counter())[value] += 1
        counted = {field: dict(each) for field, each in counts.items()}
        return {"total": len(self.rows), **counted, **self.facts()}


@dataclasses.dataclass(frozen=True, slots=True)
class Window:
    """Which rows a viewer wants."""

    first: int = 0
    size: int = 60
    #: Words that are all in a row.
    search: str = ""
    #: A field, with - before it for descending order; empty: in the order of the rows.
    sort: str = ""


class View:
    """What one viewer has been sent of a table."""

    def __init__(self, table: Table, topic: str, window: Window) -> None:
        self._table = table
        self._topic = topic
        self._window = window
        self._order: list[str] | None = None
        self._seen = 0
        self._error = ""
        self._said: Row = {}

    def news(self) -> Row | None:
        """Return what this viewer does not know yet; None if that is nothing."""
        table = self._table
        if table.error != self._error:
            self._error = table.error
            if table.error:
                return {"topic": self._topic, "error": table.error}
            self._order = None  # that it is over is told with the rows, changed or not
        if (
            not table.known
            or table.error
            or (self._order is not None and self._seen == table.revision)
        ):
            return None
        window, found = self._window, self._found()
        order = [key for key, _ in found[window.first : window.first + window.size]]
        known = set(self._order or ())
        changed = {
            key: table.rows[key]
            for key in order
            if key not in known or table.changed_since(key, self._seen)
        }
        said = {"total": len(found), "summary": table.summary()}
        if not changed and order == self._order and said == self._said:
            self._seen = table.revision
            return None
        self._order, self._seen, self._said = order, table.revision, said
        return {"topic": self._topic, **said, "order": order, "changed": changed}

    def _found(self) -> list[tuple[str, Row]]:
        """Return the rows that match, in the order that is wanted."""
        words = self._window.search.lower().split()
        found = [(key, row) for key, row in self._table.rows.items() if _has(row, words)]
        sort = self._window.sort
        if sort:
            field = sort.lstrip("-")
            rows = self._table.rows
            found.sort(key=lambda item: _rank(rows[item[0]].get(field)), reverse=sort[0] == "-")
        return found


def _has(row: Row, words: list[str]) -> bool:
    if not words:
        return True
    text = " ".join(map(str, row.values())).lower()
    return all(word in text for word in words)


def _rank(value: Any) -> tuple[int, float, str]:
    """Return what values of any kind are sorted by: nothing, numbers, texts."""
    if value is None or value == "":
        return 0, 0.0, ""
    if isinstance(value, int | float):
        return 1, float(value), ""
    return 2, 0.0, str(value).lower()
