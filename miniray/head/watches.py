"""Listings that processes watch: rows that changed are pushed, at most four times a second.

Without watchers no work is done. Actors may be many, so the table of actors records which have
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
#: Rows by what names them.
Rows = dict[str, Any]


@dataclasses.dataclass(eq=False, repr=False)
class Watches:
    """Pushes ``rows`` (listing, changed rows by key, keys of rows that are gone) to watchers."""

    _cluster: ClusterDirectories
    _state: ClusterState
    _timers: Timers

    def __post_init__(self) -> None:
        #: By watcher, the rows of each listing but of actors; None before the first push.
        self._known: dict[bytes, dict[str, Rows | None]] = {}
        #: By watcher of actors, the actors that are still to be described.
        self._actors: dict[bytes, dict[bytes, None]] = {}
        self._due = False
        self._pause = _BETWEEN
        self._cluster.clients.on_ended.append(lambda process_id, _how: self._end(process_id))

    def watch(self, process_id: bytes, listings: list[str]) -> None:
        """Push the rows of these listings to a process, and later what changes; no others.

        Raises:
            ValueError: There is no such listing, or too many processes watch.
        """
        known = self._state.listings
        if unknown := sorted(set(listings) - set(known)):
            raise ValueError(f"There is no listing of {unknown[0]!r}; there are {sorted(known)}.")
        if not listings:
            self._end(process_id)
            return
        if process_id not in self._known and len(self._known) >= _MOST_WATCHERS:
            raise ValueError(f"{_MOST_WATCHERS} processes watch this cluster, which is the limit.")
        before = self._known.get(process_id, {})
        self._known[process_id] = {name: before.get(name) for name in listings if name != "actors"}
        if "actors" not in listings:
            self._leave_actors(process_id)
        elif process_id not in self._actors:
            self._cluster.actors.changes.watch()
            self._actors[process_id] = dict.fromkeys(self._state.actor_ids())
            self._push_actors(process_id)
        self._push_changed(process_id)

    def _end(self, process_id: bytes) -> None:
        self._known.pop(process_id, None)
        self._leave_actors(process_id)

    def _leave_actors(self, process_id: bytes) -> None:
        if self._actors.pop(process_id, None) is not None and not self._actors:
            self._cluster.actors.changes.unwatch()

    def moved(self) -> None:
        """Schedule a push: something may have changed."""
        if self._known and not self._due:
            self._due = True
            self._timers.call_later(self._pause, self._push)

    def _push(self) -> None:
        self._due = False
        began = self._timers.time()
        changed = dict.fromkeys(self._cluster.actors.changes.take())
        for process_id in list(self._known):
            self._push_changed(process_id)
        for process_id, actors in list(self._actors.items()):
            goes_on = bool(actors)
            actors.update(changed)
            if actors and not goes_on:
                self._push_actors(process_id)
        self._pause = max(_BETWEEN, _SHARE * (self._timers.time() - began))

    def _push_changed(self, process_id: bytes) -> None:
        """Push the changes of a watcher's listings, except that of actors."""
        known = self._known.get(process_id, {})  # none if it has just ended
        for name, before in known.items():
            now = _by_key(name, self._state.listing(name))
            known[name], old = now, before or {}
            changed = {key: row for key, row in now.items() if old.get(key) != row}
            gone = [key for key in old if key not in now]
            if changed or gone or before is None:
                self._tell(process_id, name, changed, gone)

    def _push_actors(self, process_id: bytes) -> None:
        """Push a piece of the actors that changed for a watcher, and schedule the next one."""
        actors = self._actors.get(process_id)
        if actors is None:
            return  # it no longer watches them
        piece = list(itertools.islice(actors, _PIECE))
        for id in piece:
            del actors[id]
        found = {id.hex(): self._state.actor_row(id) for id in piece}
        rows = {key: row for key, row in found.items() if row is not None}
        self._tell(process_id, "actors", rows, [key for key in found if key not in rows])
        if actors:
            self._timers.call_later(_NEXT_PIECE, lambda: self._push_actors(process_id))

    def _tell(self, process_id: bytes, name: str, changed: Rows, gone: list[str]) -> None:
        # As bytes: what cannot travel ends here, and each process unpacks rows for itself.
        data = plain.dumps((changed, gone))
        self._cluster.clients.push(process_id, "rows", name, data)


def _by_key(name: str, rows: list[dict[str, Any]]) -> Rows:
    """Return rows by their key, by the id of what is listed, or if there is none by their place."""
    id = f"{name.removesuffix('s').removesuffix('_state')}_id"
    return {str(row.get("key", row.get(id, number))): row for number, row in enumerate(rows)}
