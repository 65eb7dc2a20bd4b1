"""Values of other nodes on their way to this one, before this process maps them.

For `wait`, which tells when a value is here, and for what a process knows that it will read. The
daemon copies; here is only what this process waits for.
"""

from __future__ import annotations

import itertools
import threading
from typing import TYPE_CHECKING

from miniray.exceptions import ObjectLostError
from miniray.messages.protocol import VALUE_SHARED
from miniray.wire.node_link import rebuild_error

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from miniray.objects.objects import Entry, Value
    from miniray.wire.node_link import NodeLink


def _ignore(_entry: Entry, _value: Value, _error: ObjectLostError) -> None:
    """Nobody has said what to do yet."""


def _nobody_waits(_entry: Entry) -> None:
    """It is here."""


class Fetch:
    """A value that is being brought here for as long as a ref lives in this process."""

    __slots__ = ("_fetches", "done", "number", "value", "waiters")

    def __init__(self, fetches: Fetches, value: Value, *, done: bool = False) -> None:
        self._fetches = fetches
        self.value = value
        self.number = fetches.next_number()
        #: It is here, or has failed, which `get` will tell.
        self.done = done
        self.waiters: list[Callable[[Entry], None]] = []

    def cancel(self) -> None:
        """The last ref is gone."""
        if not self.done:
            self.done = True
            self.waiters = []
            self._fetches.withdraw([self.number])


class Fetches:
    """All of this process. Thread-safe."""

    def __init__(self, link: NodeLink, node_id: bytes) -> None:
        self._link = link
        self._node_id = node_id
        #: Names a request, so that it can be withdrawn.
        self.next_number = itertools.count(1).__next__
        #: Called with a value that turned out to be gone; sees to it that it is made again.
        self.on_lost: Callable[[Entry, Value, ObjectLostError], None] = _ignore
        # Reentrant: a garbage collection may run user code, which may wait, in any section.
        self._lock = threading.RLock()

    def is_remote(self, value: Value) -> bool:
        """Whether a value lies in the shared memory of another node."""
        return value[0] == VALUE_SHARED and value[1][0] != self._node_id

    def is_here(self, entry: Entry) -> bool:
        """Whether an entry has a value, and that was seen on this node, or failed to get here."""
        value = entry.value
        if value is None:
            return False
        if value[0] != VALUE_SHARED or value[1][0] == self._node_id or entry.mapping is not None:
            return True
        fetch = entry.fetch
        return fetch is not None and fetch.value is value and fetch.done

    # --- for `wait` ------------------------------------------------------------------
    def when_here(self, entry: Entry, value: Value, waiter: Callable[[Entry], None]) -> bool:
        """Bring a value here; True if it is, else ``waiter(entry)`` is called once.

        It is called as well when the value could not be brought here; it may be gone then.
        """
        if not self.is_remote(value) or entry.mapping is not None:
            return True
        with self._lock:
            fetch = entry.fetch
            begin = fetch is None or fetch.value is not value
            if begin:
                fetch = entry.fetch = Fetch(self, value)
            assert fetch is not None
            if fetch.done:
                return True
            fetch.waiters.append(waiter)
        if begin:
            asked = (*value[1], fetch.number)
            self._link.node_request_async(
                "fetch_segment",
                asked,
                lambda error, _result, _fd: self._came(entry, fetch, error),
            )
        return False

    def bring(self, entry: Entry, value: Value) -> None:
        """Bring a value here that nobody waits for yet."""
        if not self.is_here(entry):
            self.when_here(entry, value, _nobody_waits)

    def _came(self, entry: Entry, fetch: Fetch, failed: BaseException | bytes | None) -> None:
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
        """Take back ``when_here``; the value comes all the same."""
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
        places = [value[1][:2] for _, value in unknown]
        found, _ = self._link.node_request("are_here", (places,))
        for (entry, value), here in zip(unknown, found, strict=True):
            if here:
                with self._lock:
                    fetch = entry.fetch
                    if fetch is None or fetch.value is not value:
                        entry.fetch = Fetch(self, value, done=True)

    # --- for others ------------------------------------------------------------------
    def prefetch(self, values: Iterable[Value]) -> list[int]:
        """Let the daemon bring values here that will be read soon, as far as it has room.

        Returns numbers for ``withdraw``, which is due when they were read or are not needed.
        """
        places = dict.fromkeys(value[1] for value in values if self.is_remote(value))
        wanted = [(*place, self.next_number()) for place in places]
        if wanted:
            self._link.node_notice("prefetch", wanted)
        return [number for *_, number in wanted]

    def withdraw(self, numbers: Sequence[int]) -> None:
        """Nobody waits for these any more."""
        if numbers:
            self._link.node_notice("withdraw", numbers)
