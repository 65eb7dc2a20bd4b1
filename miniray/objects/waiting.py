"""Waiting for objects: for several at once from a thread, or for one in an event loop.

Values of other nodes are fetched, for a `wait` that returns when they are here, and ahead of their
use. The daemon copies; ``ValueFetches`` is what this process waits for.
"""

from __future__ import annotations

import dataclasses
import itertools
import threading
import time
from typing import TYPE_CHECKING

from miniray.common.spans import SPANS
from miniray.exceptions import NotInitializedError, ObjectLostError
from miniray.messages.protocol import VALUE_SHARED
from miniray.messages.value import is_error, is_shared, location_of, node_of, rebuild_error
from miniray.objects.objects import ValueFetch
from miniray.wire.interrupts import uncut
from miniray.wire.io_loop import Gate

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from miniray.messages.value import Value
    from miniray.objects.borrowing import Borrowing
    from miniray.objects.objects import Entry, ObjectTable
    from miniray.wire.io_loop import IOLoop
    from miniray.wire.node_link import NodeLink

    #: Runs a wait, given with its timeout, and gives back the task's CPU if that takes long.
    Block = Callable[["Wait", float | None], bool]
    Wait = Callable[[float | None], bool]

#: Up to this many objects are waited for one by one, more of them through the table's arrivals.
_FEW = 8


def _nobody_waits(_entry: Entry) -> None:
    """Do nothing: the value is brought here ahead of its use."""


@dataclasses.dataclass(eq=False, repr=False)
class ValueFetches:
    """The fetches of this process. Thread-safe."""

    link: NodeLink
    node_id: bytes
    #: Called with a value that turned out to be gone; has it made once more.
    on_lost: Callable[[Entry, Value, ObjectLostError], None]

    def __post_init__(self) -> None:
        #: Names a request, so that it can be withdrawn.
        self.next_number = itertools.count(1).__next__
        # Reentrant: a garbage collection may run user code, which may wait, in any section.
        self._lock = threading.RLock()

    def is_remote(self, value: Value) -> bool:
        return is_shared(value) and node_of(value) != self.node_id

    def is_here(self, entry: Entry) -> bool:
        """Return whether an entry's value was seen on this node, or failed to get here."""
        value = entry.value
        if value is None:
            return False
        form, _, _ = value  # `wait` checks this for each of many refs
        if form != VALUE_SHARED or not self.is_remote(value):
            return True
        fetch = entry.fetch
        return fetch is not None and fetch.value is value and fetch.done

    # --- for `wait` ------------------------------------------------------------------
    def when_here(self, entry: Entry, value: Value, waiter: Callable[[Entry], None]) -> bool:
        """Bring a value here; True if it is, else ``waiter(entry)`` is called once.

        It is called as well when the value could not be brought here; it may be gone then.
        """
        if not self.is_remote(value):
            return True
        with self._lock:
            fetch = entry.fetch
            begin = fetch is None or fetch.value is not value
            if begin:
                fetch = entry.fetch = self._fetch_of(value)
            assert fetch is not None
            if fetch.done:
                return True
            fetch.waiters.append(waiter)
        if begin:
            asked = (*location_of(value), fetch.number)
            self.link.node_request_async(
                "fetch_segment",
                asked,
                lambda error, _result, _fd: self._came(entry, fetch, error),
            )
        return False

    def _fetch_of(self, value: Value, *, done: bool = False) -> ValueFetch:
        return ValueFetch(value, self.next_number(), self.withdraw, done=done)

    def bring(self, entry: Entry, value: Value) -> None:
        if not self.is_here(entry):
            self.when_here(entry, value, _nobody_waits)

    def _came(self, entry: Entry, fetch: ValueFetch, failed: BaseException | bytes | None) -> None:
        error = None if failed is None else rebuild_error(failed)
        with self._lock:
            if fetch.done:  # it was cancelled
                return
            fetch.done = True
            waiters, fetch.waiters = fetch.waiters, []
        if isinstance(error, ObjectLostError):
            self.on_lost(entry, fetch.value, error)
        for waiter in waiters:
            waiter(entry)

    def drop_waiter(self, entry: Entry, waiter: Callable[[Entry], None]) -> None:
        """Undo ``when_here``; the value comes all the same."""
        with self._lock:
            fetch = entry.fetch
            if fetch is not None and waiter in fetch.waiters:
                fetch.waiters.remove(waiter)

    def look(self, entries: Iterable[Entry]) -> None:
        """Find out which values are on this node by now, without bringing any."""
        unknown = [
            (entry, value)
            for entry in entries
            if (value := entry.value) is not None and not self.is_here(entry)
        ]
        if not unknown:
            return
        places = [location_of(value)[:-1] for _, value in unknown]
        found, _ = self.link.node_request("are_here", (places,))
        for (entry, value), here in zip(unknown, found, strict=True):
            if here:
                with self._lock:
                    fetch = entry.fetch
                    if fetch is None or fetch.value is not value:
                        entry.fetch = self._fetch_of(value, done=True)

    # --- for others ------------------------------------------------------------------
    def prefetch(self, values: Iterable[Value]) -> list[int]:
        """Have the daemon bring values here that will be read soon, within its capacity.

        Returns numbers for ``withdraw``, which is due when they were read or are not needed.
        """
        places = dict.fromkeys(location_of(value) for value in values if self.is_remote(value))
        wanted = [(*place, self.next_number()) for place in places]
        if wanted:
            self.link.node_notice("prefetch", wanted)
        return [number for *_, number in wanted]

    def withdraw(self, numbers: Sequence[int]) -> None:
        if numbers:
            self.link.node_notice("withdraw", numbers)


@dataclasses.dataclass(eq=False, repr=False)
class Waits:
    """Waits of this process for values."""

    #: What brings the values.
    loop: IOLoop
    table: ObjectTable
    #: Requests values from their owners.
    borrowing: Borrowing
    #: Runs the wait itself; notifies the node when it takes long.
    block: Block

    def __post_init__(self) -> None:
        self._wait = self.block
        SPANS.switches.add(self._record)

    def _record(self, recorded: bool) -> None:
        """Note from now on how long each wait takes, or not."""
        self._wait = self._timed if recorded else self.block

    def _timed(self, wait: Wait, timeout: float | None) -> bool:
        with SPANS.timed("wait", "get"):
            return self.block(wait, timeout)

    def end(self) -> None:
        """Note no waits any more."""
        SPANS.switches.discard(self._record)

    def abandon(self) -> None:
        """Refuse all waits, in a forked child."""
        self.end()
        self._wait = _refuse

    def when_ready(self, entry: Entry, ready: Callable[[Entry], None]) -> bool:
        """Call ``ready(entry)`` once there is a value; True if there is one already."""
        if self.table.when_ready(entry, ready):
            return True
        self.borrowing.want([entry])
        return False

    async def for_value(self, entry: Entry) -> None:
        """Wait, in an event loop, until an entry has a value."""
        import asyncio

        self.loop.flush_posted()
        loop = asyncio.get_running_loop()
        there = asyncio.Event()
        here = threading.get_ident()

        def ready(_entry: Entry) -> None:
            if self.loop.in_callback and threading.get_ident() == here:
                there.set()
            else:
                loop.call_soon_threadsafe(there.set)

        if not self.when_ready(entry, ready):
            try:
                await there.wait()
            finally:
                self.table.drop_waiter(entry, ready)

    @uncut  # the wait itself may be
    def for_callback(self, when: Callable[[Callable[[], None]], bool]) -> None:
        """Wait until ``when`` calls back; not at all if it returns True."""
        gate = Gate(self.loop)
        if not when(gate.arrived):
            self.loop.flush_posted()
            self._wait(gate.wait, None)

    @uncut  # the wait itself may be
    def for_values(
        self,
        pending: Sequence[Entry],
        needed: int,
        timeout: float | None,
        fetches: ValueFetches | None = None,
        failed: list[Entry] | None = None,
    ) -> bool:
        """Wait until ``needed`` of the pending entries have values; False on timeout.

        Args:
            pending: Entries that had no value, or none on this node, a moment ago.
            needed: How many must arrive.
            timeout: Seconds, None for no limit.
            fetches: Brings values to this node, if only those count.
            failed: Where an entry goes whose value is an error. The wait is over with the first
                then; None if an error counts like any value.
        """
        self.loop.flush_posted()
        table = self.table
        for entry in pending:
            if not table.is_owned(entry.id):
                self.borrowing.want(pending)
                break
        gate = Gate(self.loop, needed)
        if len(pending) > _FEW:
            return self._for_many(pending, gate, timeout, fetches, failed)
        arrived: Callable[[Entry], None] = gate.arrived
        if fetches is not None:
            arrived = self._when_here(gate, fetches)
        elif failed is not None and needed > 1:
            arrived = _unless_failed(gate, failed)
        try:
            for entry in pending:
                if table.when_ready(entry, arrived):
                    arrived(entry)
            return self._wait(gate.wait, timeout)
        finally:
            for entry in pending:
                if entry.value is None:
                    table.drop_waiter(entry, arrived)
                elif fetches is not None:
                    fetches.drop_waiter(entry, arrived)

    def _when_here(self, gate: Gate, fetches: ValueFetches) -> Callable[[Entry], None]:
        """Return what to call with an entry that has a value: it counts one that is here."""

        def arrived(entry: Entry) -> None:
            value = entry.value
            if value is not None:
                if fetches.when_here(entry, value, arrived):
                    gate.arrived()
            elif self.table.when_ready(entry, arrived):  # it was lost, and made again
                arrived(entry)

        return arrived

    def _for_many(
        self,
        pending: Sequence[Entry],
        gate: Gate,
        timeout: float | None,
        fetches: ValueFetches | None,
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
                missing.remove(entry.id)  # the thread that sees the value first counts it
            except KeyError:
                return
            count(entry)

        self.table.watch(arrived)
        try:
            for entry in pending:
                if entry.value is not None:
                    arrived(entry)
            return self._wait(gate.wait, timeout)
        finally:
            self.table.unwatch(arrived)
            if fetches is not None:
                for entry in pending:
                    fetches.drop_waiter(entry, arrived)


def plain_wait(wait: Wait, timeout: float | None) -> bool:
    """Wait without lending this process's CPU to others."""
    return wait(timeout)


def _refuse(_wait: Wait, _timeout: float | None) -> bool:
    raise NotInitializedError(
        "This process was forked from the one that waits here for a value. What the parent "
        "started can be waited for in the parent only."
    )


def _unless_failed(gate: Gate, failed: list[Entry]) -> Callable[[Entry], None]:
    """Return what to call with an entry that has a value: an error opens the gate at once."""

    def arrived(entry: Entry) -> None:
        if is_error(entry.value):
            failed.append(entry)
            gate.open()
        else:
            gate.arrived()

    return arrived


def deadline_of(timeout: float | None) -> float | None:
    """Return the moment, on the monotonic clock, at which a timeout ends."""
    return None if timeout is None else time.monotonic() + timeout


def time_left(deadline: float | None) -> float | None:
    """Return the seconds until a deadline, at least 0."""
    return None if deadline is None else max(0.0, deadline - time.monotonic())
