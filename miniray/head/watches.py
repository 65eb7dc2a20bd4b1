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
#: Actors that one push describes to a watcher, and seconds until the next ones.
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


@dataclasses.dataclass(eq=False, repr=False)
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
        #: By process that watches actors: those that are still to be described.
        self._to_tell: dict[bytes, dict[bytes, None]] = {}
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
        self._settle()

    def _begin(self, process_id: bytes, name: str) -> None:
        """Describe a listing to a new watcher."""
        if name == "actors":
            self._cluster.actors.changes.watch()
            self._to_tell[process_id] = dict.fromkeys(self._state.actor_ids())
            self._push_actors(process_id)
            return
        rows = self._pushed.get(name)
        if rows is None:
            rows = self._pushed[name] = self._rows(name)
        self._tell(process_id, name, rows, [])

    def _ended(self, process_id: bytes, _how: ProcessExit) -> None:
        if self._of.pop(process_id, None) is not None:
            self._settle()

    def _settle(self) -> None:
        self._of = {process_id: names for process_id, names in self._of.items() if names}
        watched = set().union(*self._of.values())
        self._pushed = {name: rows for name, rows in self._pushed.items() if name in watched}
        self._to_tell = {
            id: ids for id, ids in self._to_tell.items() if "actors" in self._of.get(id, ())
        }
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
        changed = dict.fromkeys(self._cluster.actors.changes.take())
        for process_id, ids in self._to_tell.items():
            goes_on = bool(ids)
            ids.update(changed)
            if ids and not goes_on:
                self._push_actors(process_id)
        self._pause = max(_BETWEEN, _SHARE * (self._timers.time() - began))

    def _push_changed(self, name: str) -> None:
        before, now = self._pushed[name], self._rows(name)
        self._pushed[name] = now
        changed = {key: row for key, row in now.items() if before.get(key) != row}
        gone = [key for key in before if key not in now]
        if changed or gone:
            for process_id, names in self._of.items():
                if name in names:
                    self._tell(process_id, name, changed, gone)

    def _push_actors(self, process_id: bytes) -> None:
        """Describe a piece of what a watcher does not know of actors; soon the next one."""
        ids = self._to_tell.get(process_id)
        if ids is None:
            return  # it watches them no more
        piece = list(itertools.islice(ids, _PIECE))
        for id in piece:
            del ids[id]
        found = {id.hex(): self._state.actor_row(id) for id in piece}
        rows = {key: row for key, row in found.items() if row is not None}
        self._tell(process_id, "actors", rows, [key for key in found if key not in rows])
        if ids:
            self._timers.call_later(_NEXT_PIECE, lambda: self._push_actors(process_id))

    def _rows(self, name: str) -> Rows:
        field = _KEYS.get(name, "")
        rows = self._state.listing(name)
        return {str(row.get(field, number)): row for number, row in enumerate(rows)}

    def _tell(self, process_id: bytes, name: str, changed: Rows, gone: list[str]) -> None:
        # As bytes: what cannot travel ends here, and each process unpacks rows for itself.
        self._cluster.clients.push(process_id, "rows", name, plain.dumps((changed, gone)))
