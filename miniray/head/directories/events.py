"""Events of the cluster, for people: the latest of each kind, kept over restarts.

Responsible for bounds and order; the parts in which they happen choose the events.
"""

from __future__ import annotations

import collections
import heapq
import itertools
import marshal
import operator
import time
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

#: Events that are remembered of each source and severity: many of one kind leave others alone.
KEPT = 1000
#: Seconds in which equal events are kept once.
_AGAIN_AFTER = 60.0
#: The sort key of events.
_number = operator.itemgetter("event_id")
SEVERITIES = ("INFO", "WARNING", "ERROR")
SOURCES = ("NODE", "ACTOR", "WORKER", "DEVICE", "OBJECT", "JOB", "HEAD", "SECURITY")


class EventLog:
    """The events of the cluster.

    Args:
        keep: Called with the number and the record of an event that must survive a restart; or
            with None for one that is forgotten.
    """

    def __init__(self, keep: Callable[[int, bytes | None], object]) -> None:
        self._keep = keep
        self._events: dict[tuple[str, str], collections.deque[dict[str, Any]]] = {
            kind: collections.deque() for kind in itertools.product(SOURCES, SEVERITIES)
        }
        self._next = itertools.count(1).__next__
        self._last_added: dict[tuple[str, ...], float] = {}

    def add(
        self, source: str, event: str, message: str, severity: str = "INFO", **ids: str
    ) -> None:
        """Record an event.

        Args:
            source: One of ``SOURCES``.
            event: What has happened, in a word: ``joined``, ``died``.
            message: The same in a sentence, with the cause.
            severity: One of ``SEVERITIES``.
            ids: Hex ids of what it is about: node_id, actor_id, job_id.
        """
        number = self._next()
        entry = {
            "event_id": number,
            "time": time.time(),
            "severity": severity,
            "source_type": source,
            "event_type": event,
            "message": message,
            "custom_fields": ids,
        }
        self._keep(number, marshal.dumps(entry))
        self._enter(entry)

    def _enter(self, entry: dict[str, Any]) -> None:
        events = self._events[entry["source_type"], entry["severity"]]
        events.append(entry)
        if len(events) > KEPT:
            self._keep(events.popleft()["event_id"], None)

    def add_seldom(
        self, source: str, event: str, message: str, severity: str, node_id: str
    ) -> None:
        """Record an event that may happen many times a second: of each node once a minute."""
        now = time.monotonic()
        if now - self._last_added.get((source, event, node_id), -_AGAIN_AFTER) >= _AGAIN_AFTER:
            self._last_added[source, event, node_id] = now
            self.add(source, event, message, severity, node_id=node_id)

    def told(self, requester: bytes, source: str, event: str, message: str, severity: str) -> None:
        """Record an event of a daemon, which sends it under its node's id."""
        if (source, severity) not in self._events:
            raise ValueError(
                f"An event has a source of {SOURCES} and a severity of {SEVERITIES}, not "
                f"{source!r} and {severity!r}."
            )
        self.add(source, event, message, severity, node_id=requester.hex())

    def restore(self, records: Iterable[bytes]) -> None:
        """Continue after the events of earlier heads."""
        entries = sorted((marshal.loads(record) for record in records), key=_number)
        for entry in entries:
            self._enter(entry)
        if entries:
            self._next = itertools.count(_number(entries[-1]) + 1).__next__

    def after(self, number: int) -> list[dict[str, Any]]:
        """Return the events that came after the one of this number, the latest last."""
        merged = heapq.merge(*self._events.values(), key=_number)
        return [entry for entry in merged if _number(entry) > number]
