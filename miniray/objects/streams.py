"""The caller's side of generators: items arrive one by one as objects of their own."""

from __future__ import annotations

import collections
import logging
import pickle
import threading
import weakref
from typing import TYPE_CHECKING, Any

from miniray.common.task_error import TaskError
from miniray.messages.protocol import VALUE_PICKLE
from miniray.objects.borrowing import load_error
from miniray.wire.interrupts import uncut

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from miniray.common.names import CallSite
    from miniray.common.object_ref import ObjectRef
    from miniray.objects.objects import ObjectTable, Value

logger = logging.getLogger(__name__)


#: So many items of a generator can be made again when they are lost.
MOST_REMEMBERED = 10_000

#: The value of refs that only tell when something has happened.
TRUE: Value = (VALUE_PICKLE, pickle.dumps(True, 5), ())


class StreamState:
    """Items of one generator call: sent by the executor, taken by the consumer.

    The consumer may be a thread that waits or an event loop; both are woken by
    callbacks. ``on_consumed`` tells the executor how many items were taken, which
    is its backpressure; ``on_abandoned`` that nobody reads on.
    """

    def __init__(
        self,
        id: bytes,
        table: ObjectTable,
        new_id: Callable[[], bytes],
        on_consumed: Callable[[int], None],
        on_abandoned: Callable[[], None],
        limit: int,
    ) -> None:
        #: Id by which the call can be cancelled.
        self.id = id
        #: Ids of the first items, by which a run for those that were lost knows which they are.
        self.ids: list[bytes] = []
        #: The Origin they are made again from; None if they cannot be, or need not be kept.
        self.origin: Any = None
        #: How many items may wait unread before the executor pauses; -1: any number.
        self.limit = limit
        self._table = table
        self._new_id = new_id
        self._on_consumed = on_consumed
        self._on_abandoned = on_abandoned
        self._items: collections.deque[ObjectRef[Any]] = collections.deque()
        self._received = 0
        self._consumed = 0
        self._ended = False
        self._closed = False
        # Reentrant: the collector may drop the generator, and so close it, in any section.
        self._lock = threading.RLock()
        #: In order; a consumer that gives up takes its own back.
        self._waiters: dict[Callable[[], None], None] = {}
        #: What ``wait`` waits for: the same until there is something to take. Who gives up
        #: waiting drops it.
        self._next: weakref.ref[ObjectRef[Any]] | None = None
        self._completed: ObjectRef[Any] | None = None
        #: What ended the call, if that was an error.
        self._error: Value | None = None

    # --- the executor's side -----------------------------------------------------------
    def item(
        self,
        index: int,
        value: Value,
        contained: list[ObjectRef[Any]] | None,
        made: CallSite | None = None,
    ) -> bool:
        """An item arrived; False if nobody wants it (a repeat after a retry, or closed)."""
        with self._lock:
            if self._closed or self._ended:
                return False
            if index < self._received:
                # The call runs once more: its executor must not wait for what was taken before.
                self._on_consumed(self._consumed)
                return False
            self._received = index + 1
            id = self._new_id()
            ref = self._table.create_with_value(id, value, contained)
            if index < MOST_REMEMBERED:
                self.ids.append(id)
            self._items.append(ref if made is None else self._table.record(ref, made))
            waiters, self._waiters = self._waiters, {}
        _wake(waiters)
        return True

    def end(self, error: Value | None) -> None:
        """The generator ended; an error is its last item, as in Ray."""
        with self._lock:
            if self._ended:
                return
            if error is not None and not self._closed:
                self._items.append(self._table.create_with_value(self._new_id(), error, None))
            self._ended = True
            self._error = error
            waiters, self._waiters = self._waiters, {}
            completed = self._completed
        _wake(waiters)
        if completed is not None:
            self._table.set_value(completed.binary(), self._outcome())

    # --- the consumer's side -----------------------------------------------------------
    def take(self) -> ObjectRef[Any] | None:
        """The next item, or None if there is none yet or none any more (see ``finished``)."""
        with self._lock:
            if not self._items:
                return None
            ref = self._items.popleft()
            self._consumed += 1
            self._on_consumed(self._consumed)  # in here: the counts must arrive in order
        return ref

    @property
    def has_item(self) -> bool:
        """Whether there is an item to take."""
        return bool(self._items)

    @property
    def finished(self) -> bool:
        """Whether all items were taken and no more will come."""
        return (self._ended or self._closed) and not self._items

    def completed_ref(self) -> ObjectRef[Any]:
        """A ref that is ready when the generator has ended at its executor.

        It raises what else has ended the call, such as the death of its process, as in Ray.
        """
        with self._lock:
            if self._completed is None:
                id = self._new_id()
                if self._ended:
                    self._completed = self._table.create_with_value(id, self._outcome(), None)
                else:
                    self._completed = self._table.create(id)
            return self._completed

    def take_all(self) -> list[ObjectRef[Any]]:
        """All items that were not taken."""
        with self._lock:
            items = list(self._items)
            self._items.clear()
        return items

    def _outcome(self) -> Value:
        """What ``completed`` tells: errors of the generator itself came with its items."""
        if self._error is None or isinstance(load_error(self._error), TaskError):
            return TRUE
        return self._error

    def next_ref(self) -> ObjectRef[Any]:
        """A ref that is ready when there is an item to take, or the end is reached."""
        with self._lock:
            ref = None if self._next is None else self._next()
            if ref is None:
                ref = self._table.create(self._new_id())
                if self.when_changed(self._tell_next):
                    self._table.set_value(ref.binary(), TRUE)
                else:
                    self._next = weakref.ref(ref)
            return ref

    def _tell_next(self) -> None:
        with self._lock:
            ref = None if self._next is None else self._next()
            self._next = None
        if ref is not None:
            self._table.set_value(ref.binary(), TRUE)

    def when_changed(self, callback: Callable[[], None]) -> bool:
        """Call back at the next item or the end; True if there is something to take now."""
        with self._lock:
            if self._items or self._ended or self._closed:
                return True
            self._waiters[callback] = None
            return False

    def drop_waiter(self, callback: Callable[[], None]) -> None:
        """Take back ``when_changed``."""
        with self._lock:
            self._waiters.pop(callback, None)

    @uncut  # it is done once
    def close(self) -> None:
        """Nobody reads on: the executor stops, items not taken are freed."""
        with self._lock:
            if self._closed:
                return
            self._closed = True
            self._items.clear()
            ended = self._ended
            waiters, self._waiters = self._waiters, {}
        _wake(waiters)
        if not ended:
            self._on_abandoned()


def _wake(waiters: Iterable[Callable[[], None]]) -> None:
    for waiter in waiters:
        try:
            waiter()
        except Exception:  # noqa: PERF203 - an event loop that was closed must not stop the others
            logger.exception("a consumer of a generator could not be woken")
