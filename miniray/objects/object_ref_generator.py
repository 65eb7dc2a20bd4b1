"""Results of calls of generators: refs as they come, or all of them at the end.

Items arrive one by one, each as an object of its own. ``StreamState`` is the caller's side of one
call; what user code iterates over stands on it.
"""

from __future__ import annotations

import abc
import collections
import dataclasses
import functools
import logging
import threading
import weakref
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from miniray.common.object_ref import ObjectRef, hooks
from miniray.common.task_error import TaskError
from miniray.messages.value import TRUE, load_error
from miniray.wire.interrupts import uncut

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

    from miniray.common.names import CallSite
    from miniray.messages.value import Value
    from miniray.objects.objects import ObjectTable

logger = logging.getLogger(__name__)

T = TypeVar("T")

#: How many items of a generator can be made again when they are lost.
MOST_REMEMBERED = 10_000


@dataclasses.dataclass(eq=False, repr=False)
class StreamState:
    """Items of one generator call: sent by the executor, taken by the consumer.

    The consumer may be a thread that waits or an event loop; both are woken by callbacks.
    """

    #: Names the call, for ``cancel``.
    id: bytes
    #: The objects of this process.
    table: ObjectTable
    #: Reports to the executor how many items were taken: its backpressure.
    on_consumed: Callable[[int], None]
    #: Reports to the executor that the consumer stopped reading.
    on_abandoned: Callable[[], None]
    #: How many items may wait unread before the executor pauses; -1: any number.
    limit: int

    def __post_init__(self) -> None:
        #: Ids of the first items, which a run for lost ones makes again.
        self.ids: list[bytes] = []
        #: The Origin they are made again from; None if they cannot be, or need not be kept.
        self.origin: Any = None
        self._items: collections.deque[ObjectRef[Any]] = collections.deque()
        self._received = 0
        self._consumed = 0
        self._ended = False
        self._closed = False
        # Reentrant: the collector may drop the generator, and so close it, in any section.
        self._lock = threading.RLock()
        #: In order; a consumer that gives up takes its own back.
        self._waiters: dict[Callable[[], object], None] = {}
        #: What ``wait`` waits for: one ref until there is something to take, held by its waiters.
        self._next: weakref.ref[ObjectRef[Any]] | None = None
        self._completed: ObjectRef[Any] | None = None
        #: The error that ended the call, if one did.
        self._error: Value | None = None

    # --- the executor's side -----------------------------------------------------------
    def item(
        self,
        index: int,
        value: Value,
        contained: list[ObjectRef[Any]] | None,
        made: CallSite | None = None,
    ) -> bool:
        """Take an item; False if it is not wanted (a repeat after a retry, or closed)."""
        with self._lock:
            if self._closed or self._ended:
                return False
            if index < self._received:
                # The call runs once more: its executor must not wait for what was taken before.
                self.on_consumed(self._consumed)
                return False
            self._received = index + 1
            id = self.table.new_id()
            ref = self.table.create_with_value(id, value, contained)
            if index < MOST_REMEMBERED:
                self.ids.append(id)
            self._items.append(ref if made is None else self.table.record(ref, made))
            waiters, self._waiters = self._waiters, {}
        _wake(waiters)
        return True

    def end(self, error: Value | None) -> None:
        """End the stream; an error is its last item, as in Ray."""
        with self._lock:
            if self._ended:
                return
            if error is not None and not self._closed:
                self._items.append(self.table.create_with_value(self.table.new_id(), error, None))
            self._ended = True
            self._error = error
            waiters, self._waiters = self._waiters, {}
            completed = self._completed
        _wake(waiters)
        if completed is not None:
            self.table.set_value(completed.binary(), self._outcome())

    # --- the consumer's side -----------------------------------------------------------
    def take(self) -> ObjectRef[Any] | None:
        """Take the next item; None if it has not come yet, or at the end (see ``finished``)."""
        with self._lock:
            if not self._items:
                return None
            ref = self._items.popleft()
            self._consumed += 1
            self.on_consumed(self._consumed)  # in here: the counts must arrive in order
        return ref

    @property
    def has_item(self) -> bool:
        return bool(self._items)

    @property
    def finished(self) -> bool:
        """Whether all items were taken and no more will come."""
        return (self._ended or self._closed) and not self._items

    def completed_ref(self) -> ObjectRef[Any]:
        """Return a ref that is ready when the generator has ended at its executor.

        It raises what else has ended the call, such as the death of its process, as in Ray.
        """
        with self._lock:
            if self._completed is None:
                id = self.table.new_id()
                if self._ended:
                    self._completed = self.table.create_with_value(id, self._outcome(), None)
                else:
                    self._completed = self.table.create(id)
            return self._completed

    def take_all(self) -> list[ObjectRef[Any]]:
        with self._lock:
            items = list(self._items)
            self._items.clear()
        return items

    def _outcome(self) -> Value:
        """Return the value of ``completed``: errors of the generator itself came with its items."""
        if self._error is None or isinstance(load_error(self._error), TaskError):
            return TRUE
        return self._error

    def next_ref(self) -> ObjectRef[Any]:
        """Return a ref that is ready when there is an item to take, or the end is reached."""
        with self._lock:
            ref = None if self._next is None else self._next()
            if ref is None:
                ref = self.table.create(self.table.new_id())
                if self.when_changed(self._notify_next):
                    self.table.set_value(ref.binary(), TRUE)
                else:
                    self._next = weakref.ref(ref)
            return ref

    def _notify_next(self) -> None:
        with self._lock:
            ref = None if self._next is None else self._next()
            self._next = None
        if ref is not None:
            self.table.set_value(ref.binary(), TRUE)

    def when_changed(self, callback: Callable[[], object]) -> bool:
        """Call back at the next item or the end; True if there is something to take now."""
        with self._lock:
            if self._items or self._ended or self._closed:
                return True
            self._waiters[callback] = None
            return False

    def drop_waiter(self, callback: Callable[[], object]) -> None:
        """Take back ``when_changed``."""
        with self._lock:
            self._waiters.pop(callback, None)

    @uncut  # it is done once
    def close(self) -> None:
        """Stop the executor, and free the items that were not taken."""
        with self._lock:
            if self._closed:
                return
            self._closed = True
            self._items.clear()
            ended = self._ended
            waiters, self._waiters = self._waiters, {}
        _wake(waiters)
        if not ended:
            self.on_abandoned()


def _wake(waiters: Iterable[Callable[[], object]]) -> None:
    for waiter in waiters:
        try:
            waiter()
        except Exception:  # noqa: PERF203 - an event loop that was closed must not stop the others
            logger.exception("a consumer of a generator could not be woken")


class ObjectRefGenerator(Generic[T], metaclass=abc.ABCMeta):
    """Iterates, with ``for`` or ``async for``, over the refs of the yielded values.

    Each ref is ready when it comes. If the generator raises, the last ref gives
    that error to ``get``. Dropping the generator stops its task. It belongs to
    the process that made the call and cannot be passed to others.
    """

    def __init__(
        self, state: StreamState, wait: Callable[[Callable[[Callable[[], None]], bool]], None]
    ) -> None:
        self._state = state
        self._wait = wait

    def __iter__(self) -> ObjectRefGenerator[T]:
        return self

    def __next__(self) -> ObjectRef[T]:
        state = self._state
        while True:
            ref = state.take()
            if ref is not None:
                return ref
            if state.finished:
                raise StopIteration
            self._wait(state.when_changed)

    def __aiter__(self) -> ObjectRefGenerator[T]:
        return self

    async def __anext__(self) -> ObjectRef[T]:
        import asyncio

        state = self._state
        while True:
            ref = state.take()
            if ref is not None:
                return ref
            if state.finished:
                raise StopAsyncIteration
            changed = asyncio.Event()
            loop = asyncio.get_running_loop()
            wake = functools.partial(loop.call_soon_threadsafe, changed.set)
            if not state.when_changed(wake):
                try:
                    await changed.wait()
                finally:
                    state.drop_waiter(wake)

    def completed(self) -> ObjectRef[bool]:
        """A ref that is ready when the task or method has ended.

        Its value is True. What is raised by the generator comes with its items; the ref raises
        what else has ended the call, such as the death of its process.
        """
        return self._state.completed_ref()

    def next_ready(self) -> bool:
        """Return whether the next item is there; False at the end."""
        return self._state.has_item

    def is_finished(self) -> bool:
        """Return whether the generator has ended and all items were taken: ``next`` raises then."""
        return self._state.finished

    def _next_ref(self) -> ObjectRef[bool]:
        """Return a ref that is ready when the next item, or the end, is there: for ``wait``."""
        return self._state.next_ref()

    def call_ref(self) -> ObjectRef[Any]:
        """Return an uncounted ref that names the call: for ``cancel``."""
        return ObjectRef(self._state.id, b"")

    def close(self) -> None:
        """Stop the task; values not taken are freed."""
        self._state.close()

    def __del__(self) -> None:
        if hooks.wake is not None:  # else there is no runtime: it ended, or this is a forked child
            self._state.close()

    def __reduce__(self) -> tuple[object, ...]:
        raise TypeError(
            "An ObjectRefGenerator belongs to the process that made the call and cannot be "
            "passed on. Pass the refs that it yields instead."
        )

    def __repr__(self) -> str:
        return f"ObjectRefGenerator({self._state.id.hex()})"


class DynamicObjectRefGenerator(Generic[T], metaclass=abc.ABCMeta):
    """The refs of all values that a call with ``num_returns="dynamic"`` has yielded.

    It is the value of the ref that such a call returns. It can be passed on and has a length. Each
    ref that iterating gives leaves it, so that its value may be freed. If the generator raised, the
    last ref gives that error to ``get``.
    """

    def __init__(self, refs: Iterable[ObjectRef[T]]) -> None:
        self._refs = collections.deque(refs)

    def __iter__(self) -> Iterator[ObjectRef[T]]:
        while self._refs:
            yield self._refs.popleft()

    def __len__(self) -> int:
        return len(self._refs)
