"""Waiting for several objects at once, from a thread."""

from __future__ import annotations

import threading
import time
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from miniray.core.objects import Entry, ObjectTable


#: Up to so many objects are waited for one by one, more of them through the table's arrivals.
_FEW = 8


class Gate:
    """Opens when ``needed`` of the watched entries have values."""

    __slots__ = ("_lock", "_needed", "_opened")

    def __init__(self, needed: int) -> None:
        self._needed = needed
        self._opened = threading.Lock()
        self._opened.acquire()
        self._lock = threading.Lock()

    def arrived(self, _entry: Entry | None = None) -> None:
        """One more entry has its value."""
        with self._lock:
            self._needed -= 1
            if self._needed == 0:
                self._opened.release()

    def wait(self, timeout: float | None) -> bool:
        """Wait until open; False on timeout."""
        if timeout is None:
            return self._opened.acquire()
        return self._opened.acquire(timeout=max(0.0, min(timeout, threading.TIMEOUT_MAX)))


def wait_for(
    table: ObjectTable,
    pending: Sequence[Entry],
    needed: int,
    timeout: float | None,
    block: Callable[[Callable[[float | None], bool], float | None], bool],
) -> bool:
    """Wait until ``needed`` of the pending entries have values; False on timeout.

    Args:
        table: Where the entries are.
        pending: Entries that had no value a moment ago.
        needed: How many must arrive.
        timeout: Seconds, None for no limit.
        block: Runs the wait itself; tells the node when it takes long.
    """
    gate = Gate(needed)
    if len(pending) > _FEW:
        return _wait_for_many(table, pending, gate, timeout, block)
    for entry in pending:
        if table.when_ready(entry, gate.arrived):
            gate.arrived()
    try:
        return block(gate.wait, timeout)
    finally:
        for entry in pending:
            if entry.value is None:
                table.drop_waiter(entry, gate.arrived)


def _wait_for_many(
    table: ObjectTable,
    pending: Sequence[Entry],
    gate: Gate,
    timeout: float | None,
    block: Callable[[Callable[[float | None], bool], float | None], bool],
) -> bool:
    missing = {entry.id for entry in pending}

    def arrived(entry: Entry) -> None:
        try:
            missing.remove(entry.id)  # whoever sees the value first counts it
        except KeyError:
            return
        gate.arrived()

    table.watch(arrived)
    try:
        for entry in pending:
            if entry.value is not None:
                arrived(entry)
        return block(gate.wait, timeout)
    finally:
        table.unwatch(arrived)


def deadline_of(timeout: float | None) -> float | None:
    """The moment, on the monotonic clock, at which a timeout ends."""
    return None if timeout is None else time.monotonic() + timeout


def time_left(deadline: float | None) -> float | None:
    """Seconds until a deadline, at least 0."""
    return None if deadline is None else max(0.0, deadline - time.monotonic())
