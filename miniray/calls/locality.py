"""Which node a task should run on for what it reads, and how long it waits for one there.

A task that would have to move much data to any other node wishes to run where that is. While its
wish may still come true, leases on other nodes are left to other tasks: for as long as moving the
data or starting a worker would take, and not at all if there was no room on that node just now
("delay scheduling", Zaharia et al., EuroSys 2010). After that it runs anywhere.

What is queued and sent is for ``task_client.py``, whose lock protects this.
"""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from miniray.calls.call import Call
    from miniray.objects.objects import Value

#: Bytes that must be saved from moving for a node to be preferred: less is there in a millisecond.
LEAST = 1 << 20
#: Bytes that move between nodes in a second, roughly.
RATE = 1 << 30
#: Seconds that a task waits for a lease on the node it prefers: for a worker to start, even on a
#: busy machine, and at most.
SHORTEST, LONGEST = 0.1, 1.0
#: Seconds for which a node that had no room is not waited for, and for which a task that could run
#: anywhere lets others pass that have what they read where a lease is free.
FULL_FOR = 1.0
#: So many of the tasks that wait are looked at for each lease.
LOOK = 16


class Wish(NamedTuple):
    """The node a task should run on."""

    node: bytes
    #: Until when it waits for that node, as ``time.monotonic``.
    until: float


def preferred(
    values: Iterable[Value], copies: Iterable[tuple[bytes, int]] = ()
) -> tuple[bytes, int] | None:
    """The node with most of these values of shared memory (at least one), and the bytes it saves.

    That is, what it has more than any other node has of its own; None where that is less than
    ``LEAST``. ``copies`` are further nodes that have one of the values, and its size.
    """
    own: dict[bytes, int] = {}
    for _, (node, _, size), _ in values:
        own[node] = own.get(node, 0) + size
    sizes = dict(own)
    for node, size in copies:
        sizes[node] = sizes.get(node, 0) + size
    best = max(sizes, key=lambda node: (sizes[node], own.get(node, 0)))
    saved = sizes[best] - max((size for node, size in own.items() if node != best), default=0)
    return (best, saved) if saved >= LEAST else None


class Wishes:
    """The wishes of the queued tasks of one shape."""

    __slots__ = ("_full", "by_number", "refused")

    def __init__(self) -> None:
        #: A lease was left to others, as all of the first tasks still wait for certain nodes.
        self.refused = False
        #: By the number of the call.
        self.by_number: dict[int, Wish] = {}
        #: Nodes that had no room, and when that was.
        self._full: dict[bytes, float] = {}

    def add(self, call: Call, node: bytes, saved: int, now: float) -> None:
        """A task is queued that should run on a node, where so many bytes need not move."""
        patience = min(max(saved / RATE, SHORTEST), LONGEST)
        self.by_number[call.number] = Wish(node, now + patience)

    def drop(self, call: Call) -> None:
        """A task is not in the queue any more."""
        self.by_number.pop(call.number, None)

    def clear(self) -> None:
        """No task is in the queue any more."""
        self.by_number.clear()

    def full(self, node: bytes, now: float) -> None:
        """There is no room on a node: nothing waits for it for a while."""
        self._full[node] = now

    def room(self, node: bytes) -> None:
        """A lease on a node is new, or has nothing to do."""
        self._full.pop(node, None)

    def best(self, queue: Sequence[Call], node: bytes, now: float) -> int | None:
        """Which of the queued tasks a lease on a node should run; None: none for now.

        Tasks without a wish, and those that waited very long, are passed by none.
        """
        first = self.by_number.get(queue[0].number)
        if first is None or first.node == node:
            return 0
        index = self._look(queue, node, now)
        self.refused |= index is None
        return index

    def _look(self, queue: Sequence[Call], node: bytes, now: float) -> int | None:
        anywhere: int | None = None
        for index, call in enumerate(itertools.islice(queue, LOOK)):
            wish = self.by_number.get(call.number)
            if wish is None or wish.node == node or now >= wish.until + FULL_FOR:
                passed = anywhere is not None and (wish is None or wish.node != node)
                return anywhere if passed else index
            if anywhere is None and self._may_go(wish, now):
                anywhere = index
        return anywhere

    def hint(self, queue: Iterable[Call]) -> bytes:
        """The node for which the first task waits that wishes for one; empty if none does."""
        if not self.by_number:
            return b""
        for call in itertools.islice(queue, LOOK):
            wish = self.by_number.get(call.number)
            if wish is not None:
                return wish.node
        return b""

    def give_up(self, queue: Iterable[Call], now: float) -> None:
        """The first tasks that have waited long enough, and all others, wait for no such node."""
        for call in itertools.islice(queue, LOOK):
            wish = self.by_number.get(call.number)
            if wish is not None and now >= wish.until and not self._is_full(wish.node, now):
                self._full[wish.node] = now

    def until(self, queue: Iterable[Call], now: float) -> float | None:
        """When the next of the first tasks may run anywhere; None if none waits for it."""
        times = [
            wish.until
            for call in itertools.islice(queue, LOOK)
            if (wish := self.by_number.get(call.number)) is not None and not self._may_go(wish, now)
        ]
        return min(times, default=None)

    def _may_go(self, wish: Wish, now: float) -> bool:
        """Whether a task may run on another node than it wishes for."""
        return now >= wish.until or self._is_full(wish.node, now)

    def _is_full(self, node: bytes, now: float) -> bool:
        return now - self._full.get(node, -FULL_FOR) < FULL_FOR
