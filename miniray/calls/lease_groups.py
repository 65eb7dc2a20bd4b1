"""The tasks of one shape that wait, and the leases that this process has for them.

Responsible for which of the tasks goes to which lease. When one is sent, and how many leases are
asked for, is for ``task_client.py``, whose lock protects this; where a task should run, for
``locality.py``.
"""

from __future__ import annotations

import bisect
import collections
import math
import time
from typing import TYPE_CHECKING

from miniray.calls.locality import Wishes, preferred
from miniray.common.specs import Spread

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from miniray.calls.call import Call
    from miniray.calls.calls import CallTable
    from miniray.common.specs import LeaseSpec
    from miniray.wire.peers import Peer


class Lease:
    """A worker that runs this client's tasks of one shape."""

    __slots__ = ("_unused", "calls", "group", "has_room", "id", "idle_since", "leaving", "peer",
                 "remaining", "window")  # fmt: skip

    def __init__(self, id: int, peer: Peer, group: LeaseGroup, max_calls: int) -> None:
        self.id = id
        self.peer = peer
        self.group = group
        #: Sent and unanswered, in order.
        self.calls: dict[int, Call] = {}
        #: How many tasks may be there at once.
        self.window = 1
        self.idle_since = time.monotonic()
        #: The head wants it back: nothing more is sent.
        self.leaving = False
        #: Tasks that its worker will still run before it ends (max_calls); -1: any number.
        #: Tasks that are to be spread take a lease each.
        self.remaining = 1 if group.spread else max_calls or -1
        #: Tasks that its worker may run beyond those that may be sent to it.
        self._unused = max_calls - self.remaining
        #: It is one of its group's ``with_room``.
        self.has_room = False

    @property
    def calls_left(self) -> int:
        """How many tasks its worker may run after those sent; 0 also if there is no limit."""
        return max(0, self._unused + self.remaining)

    @property
    def open(self) -> bool:
        """Whether it takes more tasks."""
        return not self.leaving and self.remaining != 0


class LeaseGroup:
    """All tasks of one shape."""

    __slots__ = ("_calls", "_clock", "asked", "duration", "id", "keep", "leases", "near",
                 "next_look", "queue", "spec", "spread", "wishes", "with_room")  # fmt: skip

    def __init__(
        self,
        id: int,
        spec: LeaseSpec,
        keep: float,
        calls: CallTable,
        clock: Callable[[], float],
    ) -> None:
        self._calls = calls
        self._clock = clock
        self.id = id
        self.spec = spec
        self.spread = isinstance(spec.placement, Spread)
        #: Seconds an idle lease is kept: leases with devices go back at once.
        self.keep = keep
        self.queue: collections.deque[Call] = collections.deque()
        self.leases: dict[int, Lease] = {}
        #: Ids, in order, of the leases that may take a task, those with nothing to do among them:
        #: the first is used first, so that the last can go back.
        self.with_room: list[int] = []
        #: Leases the head was last told to grant in all; 0 when there is nothing to do.
        self.asked = 0
        #: The node that it was told to prefer; empty: that of this process.
        self.near = b""
        #: Where queued tasks should run.
        self.wishes = Wishes()
        #: When they are looked at again, as one will have waited long enough.
        self.next_look = math.inf
        #: Seconds that a task takes, a moving average; None until the first has ended.
        self.duration: float | None = None

    def add(self, lease: Lease) -> None:
        """A lease was granted."""
        self.leases[lease.id] = lease
        self.note_room(lease)

    def remove(self, lease: Lease) -> bool:
        """A lease is over; False if it was not here."""
        self.note_no_room(lease)
        return self.leases.pop(lease.id, None) is not None

    def note_room(self, lease: Lease) -> None:
        """A lease may take a further task."""
        if not lease.has_room:
            lease.has_room = True
            bisect.insort(self.with_room, lease.id)

    def note_no_room(self, lease: Lease) -> None:
        """A lease takes no further task for now."""
        if lease.has_room:
            lease.has_room = False
            del self.with_room[bisect.bisect_left(self.with_room, lease.id)]

    def idle(self) -> list[Lease]:
        """The leases with nothing to do."""
        return [lease for id in self.with_room if not (lease := self.leases[id]).calls]

    @property
    def in_use(self) -> bool:
        """Whether a task waits, or the head grants leases, or has granted some."""
        return bool(self.asked or self.leases or self.queue)

    # --- the tasks that wait ---------------------------------------------------------
    def enter(self, call: Call) -> None:
        """Queue a task whose values are there, behind the others."""
        self.queue.append(call)
        if call.refs:
            self._wish(call)

    def put_back(self, calls: Sequence[Call]) -> None:
        """Make tasks that were taken the first in the queue again, in this order."""
        self.queue.extendleft(reversed(calls))
        for call in calls:
            if call.refs:
                self._wish(call)

    def _wish(self, call: Call) -> None:
        if self.spec.placement is None:
            values = self._calls.shared_values(call)
            where = preferred(values, self._calls.copies(call)) if values else None
            if where is not None:
                self.wishes.add(call, *where, self._clock())

    def take(self, lease: Lease) -> Call | None:
        """Take what to send to a lease out of the queue; None if all are left to other leases."""
        queue = self.queue
        if not self.wishes.by_number:
            return queue.popleft()
        index = self.wishes.best(queue, lease.peer.node_id, self._clock())
        if index is None:
            return None
        call = queue[index]
        del queue[index]
        self.wishes.drop(call)
        return call

    def take_all(self) -> list[Call]:
        """Take out all tasks that wait, in their order."""
        calls = list(self.queue)
        self.queue.clear()
        self.wishes.clear()
        return calls

    def withdraw(self, call: Call) -> None:
        """Take out a task that is not to run; it may not be here."""
        if call in self.queue:
            self.queue.remove(call)
            self.wishes.drop(call)

    # --- waiting for a certain node ----------------------------------------------------
    def patience(self) -> tuple[float, float] | None:
        """When a task that waits for a certain node may go to another, and in how many seconds.

        None if none waits.
        """
        now = self._clock()
        until = self.wishes.until(self.queue, now)
        return None if until is None else (until, until - now)

    def lose_patience(self) -> None:
        """Let tasks that have waited long enough for a certain node go to others."""
        self.wishes.give_up(self.queue, self._clock())

    def full(self, node: bytes) -> None:
        """Note that there is no room for a further lease on a node: those there may be enough."""
        if not any(lease.open and lease.peer.node_id == node for lease in self.leases.values()):
            self.wishes.full(node, self._clock())
