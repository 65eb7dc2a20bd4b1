"""Waiting for several objects at once, from a thread."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from miniray.core.gates import Gate

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from miniray.core.io_loop import IOLoop
    from miniray.core.objects import Entry, ObjectTable


#: Up to so many objects are waited for one by one, more of them through the table's arrivals.
_FEW = 8


def wait_for(
    loop: IOLoop,
    table: ObjectTable,
    pending: Sequence[Entry],
    needed: int,
    timeout: float | None,
    block: Callable[[Callable[[float | None], bool], float | None], bool],
) -> bool:
    """Wait until ``needed`` of the pending entries have values; False on timeout.

    Args:
        loop: What brings the values.
        table: Where the entries are.
        pending: Entries that had no value a moment ago.
        needed: How many must arrive.
        timeout: Seconds, None for no limit.
        block: Runs the wait itself; tells the node when it takes long.
    """
    gate = Gate(loop, needed)
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
