"""Waiting tasks by shape, the leases that this process has for them, and which task goes where.

Responsible for which of the tasks goes to which lease. ``task_client.py``, whose lock protects
this, decides when one is sent, and how many leases are requested.

A task that would have to move much data to any other node wishes to run where that is. Leases on
other nodes are left to other tasks for as long as moving the data or starting a worker would take
("delay scheduling", Zaharia et al., EuroSys 2010). After that it runs anywhere. It does not wait if
another task has just waited for that node without success.
"""

from __future__ import annotations

import bisect
import collections
import dataclasses
import itertools
import json
import math
import time
from typing import TYPE_CHECKING, NamedTuple

from miniray.common.specs import Anywhere, BundleAffinity, LeaseSpec, Placement, Spread
from miniray.messages.value import location_of

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence

    from miniray.calls.call import Call
    from miniray.calls.calls import CallTable
    from miniray.calls.context import ProcessFacts
    from miniray.common.runtime import Exported
    from miniray.common.specs import TaskOptions
    from miniray.messages.value import Value
    from miniray.wire.peers import Peer

#: Resources whose workers end after one task, so that device memory is released.
_SCALARS = frozenset({"CPU", "memory"})
#: Bytes that must be saved from moving for a node to be preferred: less is there in a millisecond.
LEAST = 1 << 20
#: Bytes that move between nodes in a second, roughly.
RATE = 1 << 30
#: Seconds that a task waits for a lease on the node it prefers: for a worker to start, even on a
#: busy machine, and at most.
SHORTEST, LONGEST = 0.1, 1.0
#: Seconds for which no task waits for a node after a task has waited for it without success.
FULL_FOR = 1.0
#: Number of waiting tasks that are examined for each lease.
LOOK = 16


class Shape(NamedTuple):
    """Common properties of tasks that can run on the same lease."""

    #: Equal for tasks of one shape.
    key: str
    #: The part for the head, without the runtime environment.
    spec: LeaseSpec


#: shape by id of the options, which RemoteFunction keeps, function and capturing placement group;
#: the options are held so ids stay valid
_shapes: dict[tuple[int, bytes, bytes | None], tuple[TaskOptions, Shape]] = {}
_SHAPES_LIMIT = 4096


def shape_of(options: TaskOptions, function: Exported, facts: ProcessFacts) -> Shape:
    """Return the shape of a task that this process calls now, in the group of its lease."""
    group = facts.capturing_group
    key = (id(options), function.key, group)
    known = _shapes.get(key)
    if known is not None:
        _, shape = known
        return shape
    spec = LeaseSpec.of(
        options,
        name=options.name or function.name,
        placement=effective_placement(options.placement, group),
        runtime_env="",
    )
    # The worker of a function whose calls are limited runs no other one.
    limited = options.max_calls or not _SCALARS.issuperset(options.resources)
    parts = (
        dataclasses.replace(spec, name="").to_wire(),
        options.runtime_env or None,
        function.key if limited else None,
    )
    shape = Shape(json.dumps(parts, sort_keys=True, default=repr), spec)
    if len(_shapes) >= _SHAPES_LIMIT:
        _shapes.clear()
    _shapes[key] = (options, shape)
    return shape


def effective_placement(placement: Placement, group: bytes | None) -> Placement:
    """Return the placement with what a capturing placement group of the caller adds."""
    if isinstance(placement, Anywhere):
        return None
    if placement is None and group is not None:
        return BundleAffinity(group, -1, capture_child_tasks=True)
    if isinstance(placement, BundleAffinity) and placement.capture_child_tasks is None:
        return dataclasses.replace(placement, capture_child_tasks=group is not None)
    return placement


class Wish(NamedTuple):
    """The node a task should run on."""

    node: bytes
    #: Until when it waits for that node, as ``time.monotonic``.
    until: float


def preferred(
    values: Iterable[Value], copies: Iterable[tuple[bytes, int]] = ()
) -> tuple[bytes, int] | None:
    """Return the node with most of these values (at least one), and the bytes it saves from moving.

    Saved is what it has more than the next best node; None where that is less than
    ``LEAST``. ``copies`` are further nodes that have one of the values, and its size.
    """
    own: dict[bytes, int] = {}
    for node, *_, size in map(location_of, values):
        own[node] = own.get(node, 0) + size
    sizes = dict(own)
    for node, size in copies:
        sizes[node] = sizes.get(node, 0) + size
    best = max(sizes, key=lambda node: (sizes[node], own.get(node, 0)))
    saved = sizes[best] - max((size for node, size in own.items() if node != best), default=0)
    return (best, saved) if saved >= LEAST else None


@dataclasses.dataclass(slots=True, eq=False, repr=False)
class HeldLease:
    """A worker that runs this client's tasks of one shape."""

    id: int
    peer: Peer
    group: TaskGroup
    #: After how many tasks its worker ends; 0: no limit.
    max_calls: dataclasses.InitVar[int]
    #: Sent and unanswered, in order.
    calls: dict[int, Call] = dataclasses.field(default_factory=dict)
    #: How many tasks may be there at once.
    window: int = 1
    idle_since: float = dataclasses.field(init=False)
    #: The head wants it back: no more tasks are sent.
    leaving: bool = False
    #: Whether it is in its group's ``with_capacity``.
    has_capacity: bool = False
    #: Tasks that may still be sent to it; -1: any number.
    remaining: int = dataclasses.field(init=False)
    #: Tasks that its worker may run beyond those.
    _unused: int = dataclasses.field(init=False)

    def __post_init__(self, max_calls: int) -> None:
        self.idle_since = time.monotonic()
        # Tasks that are to be spread take a lease each.
        self.remaining = 1 if self.group.spread else max_calls or -1
        self._unused = max_calls - self.remaining

    def give(self, call: Call) -> Peer:
        """Count a task that is sent; return where to."""
        self.calls[call.number] = call
        if self.remaining > 0:
            self.remaining -= 1
        return self.peer

    @property
    def calls_left(self) -> int:
        """The number of tasks its worker may run after the sent ones; 0 also without a limit."""
        return max(0, self._unused + self.remaining)

    @property
    def open(self) -> bool:
        return not self.leaving and self.remaining != 0


@dataclasses.dataclass(slots=True, eq=False, repr=False)
class TaskGroup:
    """All tasks of one shape."""

    id: int
    spec: LeaseSpec
    #: Seconds an idle lease is kept: leases with devices go back at once.
    keep: float
    _calls: CallTable
    _clock: Callable[[], float]
    queue: collections.deque[Call] = dataclasses.field(default_factory=collections.deque)
    leases: dict[int, HeldLease] = dataclasses.field(default_factory=dict)
    #: Ids, in order, of the leases that may take a task, idle ones among them:
    #: the first is used first, so that the last can go back.
    with_capacity: list[int] = dataclasses.field(default_factory=list)
    #: Leases last requested from the head in all; 0 without waiting tasks.
    asked: int = 0
    #: The node that the last request prefers; empty: that of this process.
    near: bytes = b""
    #: Where queued tasks should run, by the number of the call.
    wishes: dict[int, Wish] = dataclasses.field(default_factory=dict)
    #: A lease was left to others, as all of the first tasks still wait for certain nodes.
    refused: bool = False
    #: When they are examined again, as one will have waited long enough.
    next_look: float = math.inf
    #: Nodes for which a task waited without success, and when that was.
    _full: dict[bytes, float] = dataclasses.field(default_factory=dict)
    #: Seconds that a task takes, a moving average; None until the first has ended.
    duration: float | None = None

    @property
    def spread(self) -> bool:
        """Whether its tasks are to run on the least used nodes."""
        return isinstance(self.spec.placement, Spread)

    def add(self, lease: HeldLease) -> None:
        self.leases[lease.id] = lease
        self.note_capacity(lease)

    def remove(self, lease: HeldLease) -> bool:
        """Remove a lease; False if it was not here."""
        self.note_no_room(lease)
        return self.leases.pop(lease.id, None) is not None

    def note_capacity(self, lease: HeldLease) -> None:
        if not lease.has_capacity:
            lease.has_capacity = True
            bisect.insort(self.with_capacity, lease.id)

    def note_no_room(self, lease: HeldLease) -> None:
        if lease.has_capacity:
            lease.has_capacity = False
            del self.with_capacity[bisect.bisect_left(self.with_capacity, lease.id)]

    def idle(self) -> list[HeldLease]:
        return [lease for id in self.with_capacity if not (lease := self.leases[id]).calls]

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
        """Have a task wait for the node that has most of what it reads, for a while."""
        values = self._calls.shared_values(call) if self.spec.placement is None else []
        where = preferred(values, self._calls.copies(call)) if values else None
        if where is not None:
            node, saved = where
            now = self._clock()
            if now - self._full.get(node, -FULL_FOR) >= FULL_FOR:
                patience = min(max(saved / RATE, SHORTEST), LONGEST)
                self.wishes[call.number] = Wish(node, now + patience)

    def note_idle(self, node: bytes) -> None:
        """Record that a lease on a node is new, or idle: it is worth waiting for."""
        self._full.pop(node, None)

    def first_for(self, node: bytes, now: float) -> int | None:
        """Return which of the queued tasks a lease on a node should run; None: none for now."""
        for index, call in enumerate(itertools.islice(self.queue, LOOK)):
            wish = self.wishes.get(call.number)
            if wish is None or wish.node == node or now >= wish.until:
                return index
        return None

    def take(self, lease: HeldLease) -> Call | None:
        """Take what to send to a lease out of the queue; None if all are left to other leases."""
        queue = self.queue
        if not self.wishes:
            return queue.popleft()
        node, now = lease.peer.node_id, self._clock()
        index = self.first_for(node, now)
        if index is None:
            self.refused = True
            return None
        call = queue[index]
        del queue[index]
        wish = self.wishes.pop(call.number, None)
        if wish is not None and wish.node != node:
            self._full[wish.node] = now
        return call

    def take_all(self) -> list[Call]:
        """Take out all tasks that wait, in their order."""
        calls = list(self.queue)
        self.queue.clear()
        self.wishes.clear()
        return calls

    def withdraw(self, call: Call) -> None:
        """Take out a task that is not to run, if it is here."""
        if call in self.queue:
            self.queue.remove(call)
            self.wishes.pop(call.number, None)

    # --- waiting for a certain node ----------------------------------------------------
    def _first_wishes(self) -> Iterator[Wish]:
        if self.wishes:
            for call in itertools.islice(self.queue, LOOK):
                if call.number in self.wishes:
                    yield self.wishes[call.number]

    def hint(self) -> bytes:
        """Return the node for which the first task with a wish waits; empty if none has one."""
        return next((wish.node for wish in self._first_wishes()), b"")

    def patience(self) -> tuple[float, float] | None:
        """Return when a task that waits for a node may go elsewhere, and in how many seconds.

        None if none waits.
        """
        now = self._clock()
        until = min((wish.until for wish in self._first_wishes()), default=None)
        return None if until is None else (until, until - now)

    def lose_patience(self) -> None:
        """Record that the time for a look, which ``patience`` returned, has come."""
        self.next_look = math.inf
