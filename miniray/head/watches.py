"""Listings that processes watch: rows that changed are pushed, at most four times a second.

Nothing is done while nobody watches. Actors may be many, so the table of actors notes which have
changed; the other listings are compared with what was pushed before.
"""

from __future__ import annotations

import dataclasses
import itertools
from typing import TYPE_CHECKING, Any

from miniray.messages import plain

if TYPE_CHECKING:
    from miniray.head.cluster import ClusterDirectories
    from miniray.head.directories.clients import ProcessExit
    from miniray.head.directories.grants import Timers
    from miniray.head.state import ClusterState

#: Seconds between two pushes, at least; and how many times longer than a push takes.
_BETWEEN, _SHARE = 0.25, 20
#: Actors that one push describes to a new watcher, and seconds until the next ones.
_PIECE, _NEXT_PIECE = 500, 0.01
#: Processes that may watch at a time.
_MOST_WATCHERS = 16
#: The field that names a row, by listing; rows of others are named by their place.
_KEYS = {
    "actors": "actor_id",
    "events": "event_id",
    "node_states": "node_id",
    "jobs": "job_id",
    "placement_groups": "placement_group_id",
    "workers": "worker_id",
    "submissions": "submission_id",
    "runs": "run_id",
    "devices": "key",
}
#: Rows by what names them.
Rows = dict[str, Any]


@dataclasses.dataclass(eq=False)
class Watches:
    """Pushes ``rows`` (listing, changed rows by key, keys of rows that are gone) to watchers."""

    _cluster: ClusterDirectories
    _state: ClusterState
    _timers: Timers

    def __post_init__(self) -> None:
        #: By process: the listings that it watches.
        self._of: dict[bytes, set[str]] = {}
        #: What was pushed of each watched listing, but for actors.
        self._pushed: dict[str, Rows] = {}
        #: Actors that are still to be described to a new watcher.
        self._to_tell: dict[bytes, list[bytes]] = {}
        self._due = False
        self._pause = _BETWEEN
        self._cluster.clients.on_ended.append(self._ended)

    def watch(self, process_id: bytes, listings: list[str]) -> None:
        """Push the rows of these listings to a process, and later what changes; no others.

        Raises:
            ValueError: There is no such listing, or too many processes watch.
        """
        known = self._state.listings
        for name in listings:
            if name not in known:
                raise ValueError(f"There is no listing of {name!r}; there are {sorted(known)}.")
        if process_id not in self._of and len(self._of) >= _MOST_WATCHERS:
            raise ValueError(f"{_MOST_WATCHERS} processes watch this cluster, and no more may.")
        before = self._of.get(process_id, set())
        self._of[process_id] = set(listings)
        for name in self._of[process_id] - before:
            self._begin(process_id, name)
        if "actors" not in listings:
            self._to_tell.pop(process_id, None)
        self._settle()

    def _begin(self, process_id: bytes, name: str) -> None:
        """Describe a listing to a new watcher."""
        if name == "actors":
            self._cluster.actors.changes.watch()
            self._to_tell[process_id] = self._state.actor_ids()
            if not self._due:
                self._due = True
                self._timers.call_later(0.0, self._push)
            return
        rows = self._pushed.get(name)
        if rows is None:
            rows = self._pushed[name] = self._rows(name)
        self._tell(process_id, name, rows, [])

    def _ended(self, process_id: bytes, _how: ProcessExit) -> None:
        if self._of.pop(process_id, None) is not None:
            self._to_tell.pop(process_id, None)
            self._settle()

    def _settle(self) -> None:
        self._of = {process_id: names for process_id, names in self._of.items() if names}
        watched = set().union(*self._of.values())
        self._pushed = {name: rows for name, rows in self._pushed.items() if name in watched}
        if "actors" not in watched:
            self._cluster.actors.changes.unwatch()

    def moved(self) -> None:
        """Note that something may have changed."""
        if self._of and not self._due:
            self._due = True
            self._timers.call_later(self._pause, self._push)

    def _push(self) -> None:
        self._due = False
        began = self._timers.time()
        for name in set().union(*self._of.values()) - {"actors"}:
            self._push_changed(name)
        self._push_actors()
        self._pause = max(_BETWEEN, _SHARE * (self._timers.time() - began))
        if self._to_tell:
            self._due = True
            self._timers.call_later(_NEXT_PIECE, self._push)

    def _push_changed(self, name: str) -> None:
        before, now = self._pushed[name], self._rows(name)
        self._pushed[name] = now
        changed = {key: row for key, row in now.items() if before.get(key) != row}
        gone = [key for key in before if key not in now]
        if changed or gone:
            for process_id, names in self._of.items():
                if name in names:
                    self._tell(process_id, name, changed, gone)

    def _push_actors(self) -> None:
        """Push the actors that changed, and a piece of the others to each new watcher."""
        rows, gone = self._described(self._cluster.actors.changes.take())
        for process_id, names in self._of.items():
            if "actors" not in names:
                continue
            more = rows
            waiting = self._to_tell.get(process_id)
            if waiting is not None:
                piece, rest = waiting[:_PIECE], waiting[_PIECE:]
                told, _ = self._described(piece)
                more = {**told, **rows}
                self._to_tell[process_id] = rest
                if not rest:
                    del self._to_tell[process_id]
            if more or gone or waiting is not None:
                self._tell(process_id, "actors", more, gone)

    def _described(self, ids: list[bytes]) -> tuple[Rows, list[str]]:
        """Return the rows of these actors, and the ids of those that are forgotten."""
        found = {id.hex(): self._state.actor_row(id) for id in ids}
        rows = {key: row for key, row in found.items() if row is not None}
        return rows, [key for key, row in found.items() if row is None]

    def _rows(self, name: str) -> Rows:
        field = _KEYS.get(name)
        number = itertools.count().__next__
        return {
            str(row[field]) if field is not None else str(number()): row
            for row in self._state.listing(name)
        }

    def _tell(self, process_id: bytes, name: str, changed: Rows, gone: list[str]) -> None:
        # As bytes: what cannot travel ends here, and each process unpacks rows for itself.
        self._cluster.clients.push(process_id, "rows", name, plain.dumps((changed, gone)))
