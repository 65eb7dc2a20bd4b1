"""The queue of the main thread of a worker."""

from __future__ import annotations

import collections
from typing import TYPE_CHECKING

from miniray.wire.gates import Gate

if TYPE_CHECKING:
    from miniray.wire.io_loop import IOLoop
    from miniray.worker.work import Work


class WorkQueue:
    """First in, first out; any thread puts, one takes, and handles messages while it waits."""

    def __init__(self, loop: IOLoop) -> None:
        self._loop = loop
        self._items: collections.deque[Work | None] = collections.deque()
        self._gate: Gate | None = None

    def put(self, work: Work | None) -> None:
        """Add work; None is the end."""
        self._items.append(work)
        gate = self._gate
        if gate is not None:
            gate.arrived()

    def get(self) -> Work | None:
        """The next; waits for it."""
        items = self._items
        while True:
            if items:
                try:
                    return items.popleft()
                except IndexError:  # taken back by another thread meanwhile
                    continue
            self._loop.flush_posted()
            self._gate = gate = Gate(self._loop)
            if not items:  # else it came just before there was a gate
                gate.wait(None, idle=True)
            self._gate = None

    def take(self) -> Work | None:
        """The next that waits.

        Raises:
            IndexError: nothing waits.
        """
        return self._items.popleft()

    def remove(self, work: Work) -> bool:
        """Take this one out; False if it does not wait here (any more)."""
        try:
            self._items.remove(work)
        except ValueError:
            return False
        return True

    def empty(self) -> bool:
        """Whether nothing waits."""
        return not self._items
