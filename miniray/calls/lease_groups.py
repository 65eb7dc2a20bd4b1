"""The leases that this process has, by the shape of the tasks that they run.

State only; who changes it is ``task_client.py``, whose lock protects it.
"""

from __future__ import annotations

import bisect
import collections
import math
import time
from typing import TYPE_CHECKING, Any

from miniray.calls.locality import Wishes

if TYPE_CHECKING:
    from miniray.calls.call import Call
    from miniray.wire.peers import Peer


class Lease:
    """A worker that runs this client's tasks of one shape."""

    __slots__ = ("_unused", "calls", "group", "has_room", "id", "idle_since", "leaving", "next",
                 "peer", "remaining", "window")  # fmt: skip

    def __init__(self, id: int, peer: Peer, group: LeaseGroup, max_calls: int) -> None:
        self.id = id
        self.peer = peer
        self.group = group
        #: Sent and unanswered, in order.
        self.calls: dict[int, Call] = {}
        #: What is sent as soon as there is room, and moves its arguments meanwhile.
        self.next: Call | None = None
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

    __slots__ = ("asked", "chosen", "duration", "id", "keep", "leases", "near", "next_look",
                 "queue", "spec", "spread", "wishes", "with_room", "without_next")  # fmt: skip

    def __init__(self, id: int, spec: dict[str, Any], keep: float) -> None:
        self.id = id
        self.spec = spec
        self.spread = spec["placement"] == ("spread",)
        #: Seconds an idle lease is kept: leases with devices go back at once.
        self.keep = keep
        self.queue: collections.deque[Call] = collections.deque()
        self.leases: dict[int, Lease] = {}
        #: Ids, in order, of the leases that may take a task, those with nothing to do among them:
        #: the first is used first, so that the last can go back.
        self.with_room: list[int] = []
        #: Leases without a task that was chosen for them; those looked at last are last.
        self.without_next: collections.OrderedDict[int, Lease] = collections.OrderedDict()
        #: Those of them that have a next task, which is not in the queue.
        self.chosen: dict[int, Lease] = {}
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
        self.leases[lease.id] = self.without_next[lease.id] = lease
        self.note_room(lease)

    def remove(self, lease: Lease) -> bool:
        """A lease is over; False if it was not here."""
        self.note_no_room(lease)
        self.without_next.pop(lease.id, None)
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
        return bool(self.asked or self.leases or self.waiting)

    @property
    def waiting(self) -> int:
        """How many tasks were not sent."""
        return len(self.queue) + len(self.chosen)
