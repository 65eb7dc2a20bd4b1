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
class _Watcher:
    """A process that watches, and what it knows."""

    process_id: bytes
    #: The rows of each listing but of actors; None: it was told nothing yet.
    rows: dict[str, Rows | None] = dataclasses.field(default_factory=dict)
    #: Actors that are still to be described; None: it does not watch them.
    actors: dict[bytes, None] | None = None


@dataclasses.dataclass(eq=False, repr=False)
class Watches:
    """Pushes ``rows`` (listing, changed rows by key, keys of rows that are gone) to watchers."""

    _cluster: ClusterDirectories
    _state: ClusterState
    _timers: Timers

    def __post_init__(self) -> None:
        self._watchers: dict[bytes, _Watcher] = {}
        self._due = False
        self._pause = _BETWEEN
        self._cluster.clients.on_ended.append(lambda process_id, _how: self._end(process_id))

    def watch(self, process_id: bytes, listings: list[str]) -> None:
        """Push the rows of these listings to a process, and later what changes; no others.

        Raises:
            ValueError: There is no such listing, or too many processes watch.
        """
        known = self._state.listings
        for name in listings:
            if name not in known:
                raise ValueError(f"There is no listing of {name!r}; there are {sorted(known)}.")
        if not listings:
            self._end(process_id)
            return
        if process_id not in self._watchers and len(self._watchers) >= _MOST_WATCHERS:
            raise ValueError(f"{_MOST_WATCHERS} processes watch this cluster, and no more may.")
        watcher = self._watchers.setdefault(process_id, _Watcher(process_id))
        watcher.rows = {name: watcher.rows.get(name) for name in listings if name != "actors"}
        if "actors" not in listings:
            self._leave_actors(watcher)
        elif watcher.actors is None:
            self._cluster.actors.changes.watch()
            watcher.actors = dict.fromkeys(self._state.actor_ids())
            self._push_actors(watcher)
        self._push_changed(watcher)

    def _end(self, process_id: bytes) -> None:
        watcher = self._watchers.pop(process_id, None)
        if watcher is not None:
            self._leave_actors(watcher)

    def _leave_actors(self, watcher: _Watcher) -> None:
        watcher.actors = None
        if all(each.actors is None for each in self._watchers.values()):
            self._cluster.actors.changes.unwatch()

    def moved(self) -> None:
        """Note that something may have changed."""
        if self._watchers and not self._due:
            self._due = True
            self._timers.call_later(self._pause, self._push)

    def _push(self) -> None:
        self._due = False
        began = self._timers.time()
        changed = dict.fromkeys(self._cluster.actors.changes.take())
        for watcher in list(self._watchers.values()):
            self._push_changed(watcher)
            if watcher.actors is not None:
                goes_on = bool(watcher.actors)
                watcher.actors.update(changed)
                if watcher.actors and not goes_on:
                    self._push_actors(watcher)
        self._pause = max(_BETWEEN, _SHARE * (self._timers.time() - began))

    def _push_changed(self, watcher: _Watcher) -> None:
        """Push what a watcher does not know of listings but that of actors."""
        for name, before in watcher.rows.items():
            field = _KEYS.get(name, "")
            rows = self._state.listing(name)
            now = {str(row.get(field, number)): row for number, row in enumerate(rows)}
            watcher.rows[name] = now
            known = before or {}
            changed = {key: row for key, row in now.items() if known.get(key) != row}
            gone = [key for key in known if key not in now]
            if changed or gone or before is None:
                self._tell(watcher, name, changed, gone)

    def _push_actors(self, watcher: _Watcher) -> None:
        """Describe a piece of what a watcher does not know of actors; soon the next one."""
        if watcher.actors is None:
            return  # it watches them no more
        piece = list(itertools.islice(watcher.actors, _PIECE))
        for id in piece:
            del watcher.actors[id]
        found = {id.hex(): self._state.actor_row(id) for id in piece}
        rows = {key: row for key, row in found.items() if row is not None}
        self._tell(watcher, "actors", rows, [key for key in found if key not in rows])
        if watcher.actors:
            self._timers.call_later(_NEXT_PIECE, lambda: self._push_actors(watcher))

    def _tell(self, watcher: _Watcher, name: str, changed: Rows, gone: list[str]) -> None:
        # As bytes: what cannot travel ends here, and each process unpacks rows for itself.
        data = plain.dumps((changed, gone))
        self._cluster.clients.push(watcher.process_id, "rows", name, data)
