"""Rows of a topic, and one viewer's part of them: a window, searched and sorted."""

from __future__ import annotations

import collections
import dataclasses
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import asyncio
    from collections.abc import Iterable, Mapping

    Row = dict[str, Any]
    #: The state of a polled topic: rows by key, and the other fields of its summary.
    Asked = tuple[dict[str, Row], Row]

#: Fields that a topic's summary counts the values of.
_COUNTED = ("state", "status", "kind", "severity")


class Table:
    """Rows by key; one that changes is another object from then on."""

    def __init__(self, error: str = "") -> None:
        self.rows: dict[str, Row] = {}
        #: What else the summary says.
        self.facts: Row = {}
        #: Counts the changes.
        self.revision = 0
        #: Whether it is known which rows there are.
        self.known = False
        #: Why rows are missing or old, as a sentence; empty if they are not.
        self.error = error
        #: Set whenever something has changed, for each viewer.
        self.viewers: set[asyncio.Event] = set()

    def update(self, changed: Mapping[str, Row], gone: Iterable[str] = ()) -> None:
        """Enter changed rows, and drop others."""
        self.revision += 1
        self.known = True
        for key in gone:
            self.rows.pop(key, None)
        self.rows.update(changed)
        self.wake()

    def forget(self) -> None:
        """Drop all rows: others will come from a restarted source."""
        self.update({}, list(self.rows))
        self.known = False

    def replace(self, rows: Mapping[str, Row], facts: Row) -> None:
        """Hold these rows and facts only; rows that are as before have not changed."""
        changed = {key: row for key, row in rows.items() if self.rows.get(key) != row}
        gone = [key for key in self.rows if key not in rows]
        if changed or gone or facts != self.facts or self.error or not self.known:
            self.error, self.facts = "", facts
            self.update(changed, gone)

    def fail(self, error: str) -> None:
        """Show viewers why rows are missing or old; empty: they are not any more."""
        if error != self.error:
            self.error = error
            self.wake()

    def wake(self) -> None:
        for event in self.viewers:
            event.set()

    def summary(self) -> dict[str, Any]:
        """Count the values of those fields that say how far things are."""
        counts: dict[str, collections.Counter[str]] = {}
        for row in self.rows.values():
            for field in _COUNTED:
                value = row.get(field)
                if isinstance(value, str):
                    counts.setdefault(field, collections.Counter())[value] += 1
        counted = {field: dict(each) for field, each in counts.items()}
        return {"total": len(self.rows), **counted, **self.facts}


@dataclasses.dataclass(frozen=True, slots=True)
class Window:
    """The rows that a viewer wants."""

    first: int = 0
    size: int = 60
    #: Words that are all in a row.
    search: str = ""
    #: A field, with - before it for descending order; empty: in the order of the rows.
    sort: str = ""


@dataclasses.dataclass(eq=False)
class View:
    """What one viewer has been sent of a table."""

    _table: Table
    _topic: str
    _window: Window

    def __post_init__(self) -> None:
        #: The table's revision that was sent, its rows in the window, and its summary.
        self._seen = -1
        self._rows: dict[str, Row] = {}
        self._said: Row = {}
        self._error = ""

    def news(self) -> Row | None:
        """Return what this viewer was not sent yet; None if it has all."""
        table, window = self._table, self._window
        if table.error != self._error:
            self._error = table.error
            if table.error:
                return {"topic": self._topic, "error": table.error}
            # The end of the error is sent with the rows, changed or not.
            self._seen, self._rows, self._said = -1, {}, {}
        if not table.known or table.error or self._seen == table.revision:
            return None
        self._seen = table.revision
        found = self._found()
        rows = dict(found[window.first : window.first + window.size])
        changed = {key: row for key, row in rows.items() if self._rows.get(key) is not row}
        said = {"total": len(found), "summary": table.summary(), "order": list(rows)}
        if not changed and said == self._said:
            return None
        self._rows, self._said = rows, said
        return {"topic": self._topic, **said, "changed": changed}

    def _found(self) -> list[tuple[str, Row]]:
        """Return the rows that match, in the order that is wanted."""
        words = self._window.search.lower().split()
        rows = self._table.rows
        keys = [key for key, row in rows.items() if _has(row, words)]
        sort = self._window.sort
        if sort:
            field = sort.lstrip("-")
            keys.sort(key=lambda key: _rank(rows[key].get(field)), reverse=sort[0] == "-")
        return [(key, rows[key]) for key in keys]


def _has(row: Row, words: list[str]) -> bool:
    if not words:
        return True
    text = " ".join(map(str, row.values())).lower()
    return all(word in text for word in words)


def _rank(value: Any) -> tuple[int, float, str]:
    """Return the sort key of a value of any kind: None first, then numbers, then texts."""
    if value is None or value == "":
        return 0, 0.0, ""
    if isinstance(value, int | float):
        return 1, float(value), ""
    return 2, 0.0, str(value).lower()
