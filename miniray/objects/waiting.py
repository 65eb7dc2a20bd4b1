"""Waiting for several objects at once, from a thread."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from miniray.messages import protocol as p
from miniray.wire.gates import Gate

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from miniray.objects.fetches import Fetches
    from miniray.objects.objects import Entry, ObjectTable
    from miniray.wire.io_loop import IOLoop


#: Up to so many objects are waited for one by one, more of them through the table's arrivals.
_FEW = 8


def wait_for(
    loop: IOLoop,
    table: ObjectTable,
    pending: Sequence[Entry],
    needed: int,
    timeout: float | None,
    block: Callable[[Callable[[float | None], bool], float | None], bool],
    fetches: Fetches | None = None,
    failed: list[Entry] | None = None,
) -> bool:
    """Wait until ``needed`` of the pending entries have values; False on timeout.

    Args:
        loop: What brings the values.
        table: Where the entries are.
        pending: Entries that had no value, or none on this node, a moment ago.
        needed: How many must arrive.
        timeout: Seconds, None for no limit.
        block: Runs the wait itself; tells the node when it takes long.
        fetches: Brings values to this node, if only those count.
        failed: Where an entry goes whose value is an error. The wait is over with the first
            then; None if an error counts like any value.
    """
    gate = Gate(loop, needed)
    if len(pending) > _FEW:
        return _wait_for_many(table, pending, gate, timeout, block, fetches, failed)
    arrived: Callable[[Entry], None] = gate.arrived
    if fetches is not None:
        arrived = _when_here(table, gate, fetches)
    elif failed is not None and needed > 1:
        arrived = _unless_failed(gate, failed)
    try:
        for entry in pending:
            if table.when_ready(entry, arrived):
                arrived(entry)
        return block(gate.wait, timeout)
    finally:
        for entry in pending:
            if entry.value is None:
                table.drop_waiter(entry, arrived)
            elif fetches is not None:
                fetches.drop_waiter(entry, arrived)


def _when_here(table: ObjectTable, gate: Gate, fetches: Fetches) -> Callable[[Entry], None]:
    """What to call with an entry that has a value: counts it when that is on this node."""

    def arrived(entry: Entry) -> None:
        value = entry.value
        if value is not None:
            if fetches.when_here(entry, value, arrived):
                gate.arrived()
        elif table.when_ready(entry, arrived):  # it was lost, and made again
            arrived(entry)

    return arrived


def _unless_failed(gate: Gate, failed: list[Entry]) -> Callable[[Entry], None]:
    """What to call with an entry that has a value: an error opens the gate at once."""

    def arrived(entry: Entry) -> None:
        value = entry.value
        if value is not None and value[0] == p.VALUE_ERROR:
            failed.append(entry)
            gate.open()
        else:
            gate.arrived()

    return arrived


def _wait_for_many(
    table: ObjectTable,
    pending: Sequence[Entry],
    gate: Gate,
    timeout: float | None,
    block: Callable[[Callable[[float | None], bool], float | None], bool],
    fetches: Fetches | None,
    failed: list[Entry] | None,
) -> bool:
    missing = {entry.id for entry in pending}
    count = gate.arrived if failed is None else _unless_failed(gate, failed)

    def arrived(entry: Entry) -> None:
        if fetches is not None:
            value = entry.value
            # If it was lost it will be made again, and come here as any value that comes.
            if value is None or entry.id not in missing:
                return
            if not fetches.when_here(entry, value, arrived):
                return
        try:
            missing.remove(entry.id)  # whoever sees the value first counts it
        except KeyError:
            return
        count(entry)

    table.watch(arrived)
    try:
        for entry in pending:
            if entry.value is not None:
                arrived(entry)
        return block(gate.wait, timeout)
    finally:
        table.unwatch(arrived)
        if fetches is not None:
            for entry in pending:
                fetches.drop_waiter(entry, arrived)


def deadline_of(timeout: float | None) -> float | None:
    """The moment, on the monotonic clock, at which a timeout ends."""
    return None if timeout is None else time.monotonic() + timeout


def time_left(deadline: float | None) -> float | None:
    """Seconds until a deadline, at least 0."""
    return None if deadline is None else max(0.0, deadline - time.monotonic())
