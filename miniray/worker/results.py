"""What calls return, and raise, as values; and the refs inside, until callers count them."""

from __future__ import annotations

import itertools
import logging
import os
import pickle
import threading
from typing import TYPE_CHECKING, Any, NamedTuple

from miniray.common.config import config
from miniray.common.exception_transport import (
    format_traceback,
    name_of,
    note_place,
    traceback_of,
)
from miniray.common.names import short_name
from miniray.exceptions import MinirayError, TaskCancelledError, TaskError
from miniray.messages import protocol as p
from miniray.messages.value import error_value
from miniray.values.serialization import serialize
from miniray.worker.work import NOT_ERRORS, carried, raise_as_error

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence
    from contextlib import AbstractContextManager

    from miniray.client.cluster_runtime import ClusterRuntime
    from miniray.common.object_ref import ObjectRef
    from miniray.messages.value import Value
    from miniray.wire.peers import Peer
    from miniray.worker.work import Work

logger = logging.getLogger(__name__)

_NONE: Value = (p.VALUE_PICKLE, pickle.dumps(None, 5), ())
_END = object()


class Stored(NamedTuple):
    """Results that are values already."""

    values: Sequence[Value]
    #: The number under which refs inside are kept; 0 if there are none.
    pin: int


class Results:
    """Makes values of results, and keeps the refs inside until the caller counts them."""

    def __init__(self, runtime: ClusterRuntime) -> None:
        self._runtime = runtime
        #: Refs inside values on their way: caller → pin → those of one message. A pin is a
        #: number of its own: a call sends many messages, and may run here more than once.
        self._pins: dict[bytes, dict[int, list[ObjectRef[Any]]]] = {}
        self._numbers = itertools.count(1).__next__
        # Reentrant: a garbage collection may run user code in any section.
        self._lock = threading.RLock()
        #: Called once nothing is kept any more.
        self._on_counted: Callable[[], object] | None = None

    def value(self, result: Any, work: Work) -> tuple[Value, int]:
        """Make a result the value that travels to the caller, who owns it.

        Returns:
            The value, and the number under which refs inside are kept; 0 if there are none.

        Raises:
            TypeError: The result cannot be pickled.
        """
        if result is None:
            return _NONE, 0
        refs: list[ObjectRef[Any]] = []
        value = self._value(result, work, refs)
        return value, self._pin(work.caller, refs) if refs else 0

    def values(self, result: Any, work: Work) -> tuple[Sequence[Value], int]:
        """Make the values of a call with any number of results; as ``value``.

        Raises:
            ValueError: The call did not return as many values as it has return ids.
        """
        if isinstance(result, Stored):
            return result
        count = len(work.return_ids)
        if count == 1:
            value, pin = self.value(result, work)
            return (value,), pin
        values: list[Value] = []
        refs: list[ObjectRef[Any]] = []
        try:
            for item in _split(result, count, work.name):
                values.append(self._value(item, work, refs))  # noqa: PERF401 - freed below
        except BaseException:
            self._free(values)
            raise
        return values, self._pin(work.caller, refs) if refs else 0

    def of_generator(
        self, items: Iterator[Any], work: Work, whole: Callable[[], AbstractContextManager[None]]
    ) -> Stored:
        """Make the values of a call with a fixed number of results that yields them.

        Each value is stored before the next one is made: they need not fit into the process
        together. If it fails or ends too early, that is the error of the results that it did
        not make, and what it yields or raises after the last one is logged, as in Ray. One that
        makes values once more and ends too early may have made others: it fails as a whole.

        Args:
            items: What the call returned.
            work: The call.
            whole: Keeps a cancel out while a value is stored, and heeds it after.

        Raises:
            Exception: What the generator raised before its first value, or any that was to be
                made once more.
        """
        values: list[Value] = []
        refs: list[ObjectRef[Any]] = []
        try:
            self._take_items(items, work, whole, values, refs)
        except BaseException:
            self._free(values)
            raise
        finally:
            close_items(items)
        return Stored(values, self._pin(work.caller, refs) if refs else 0)

    def _take_items(
        self,
        items: Iterator[Any],
        work: Work,
        whole: Callable[[], AbstractContextManager[None]],
        values: list[Value],
        refs: list[ObjectRef[Any]],
    ) -> None:
        count, name = len(work.return_ids), work.name
        try:
            for item in itertools.islice(items, count):
                with whole():
                    values.append(self._value(item, work, refs))
                del item  # before the next one is made
            if len(values) < count:
                raise _wrong_number(name, count, len(values))
            if not work.again and next(items, _END) is not _END:
                logger.warning("%s has num_returns=%s and yielded more values", name, count)
        except Exception as error:
            if not values or work.again or isinstance(error, TaskCancelledError):
                raise
            if len(values) == count:
                logger.exception("%s raised after the last of its results", name)
            values += [self.error(error, name)] * (count - len(values))

    def _free(self, values: Iterable[Value]) -> None:
        """Free values that were written: their owner, the caller, will not receive them."""
        for value in values:
            self._runtime.free_shared(value)

    def drop(self, result: Any, caller: Peer) -> None:
        """Free a result that is not sent."""
        if isinstance(result, Stored):
            self._free(result.values)
            if result.pin:
                self.release(caller, [result.pin])

    def _value(self, result: Any, work: Work, refs: list[ObjectRef[Any]]) -> Value:
        """Store one result; refs inside are added to ``refs``."""
        try:
            serialized = serialize(result, work.name)
        except NOT_ERRORS as error:
            raise_as_error(error)
        refs.extend(serialized.refs)
        if serialized.size > config().inline_limit:
            caller = work.caller
            write = self._runtime.shared_memory.write
            return write(serialized, caller.process_id, caller.node_id, work.name)
        return serialized.value()

    def _pin(self, caller: Peer, refs: list[ObjectRef[Any]]) -> int:
        """Keep refs until the caller has counted them, or is gone."""
        with self._lock:
            if caller.lost:  # it will not release them, and its loss was reported before
                return 0
            pin = self._numbers()
            self._pins.setdefault(caller.process_id, {})[pin] = refs
        return pin

    def error(self, error: BaseException, name: str) -> Value:
        """Make the value of what a call has raised, with its traceback."""
        error = carried(error)
        if _is_of_train(error):
            if traceback_of(error) is not None:
                note_place(error, f"{short_name(name)}() (pid={os.getpid()})")
            return error_value(error)
        return error_value(TaskError.from_exception(error, name, **self._place()))

    def cancelled(self, error: BaseException, name: str) -> Value:
        """Make the value of the error of a call that was cancelled, and raised ``error`` then."""
        cancelled = TaskCancelledError(name)
        text = format_traceback(error).rstrip()
        text = text if isinstance(error, TaskCancelledError) else f"{text}\n{cancelled}"
        return error_value(TaskError(name, text, cancelled, **self._place()))

    def _place(self) -> dict[str, Any]:
        facts = self._runtime.facts
        actor_id = facts.actor_id.hex() if facts.actor_id is not None else None
        return {"pid": os.getpid(), "actor_id": actor_id, "actor_repr": facts.actor_repr}

    def holds(self) -> list[tuple[str, list[ObjectRef[Any]]]]:
        """Return what keeps refs until callers have counted them: a name for it, and the refs."""
        with self._lock:
            return [
                ("a result on its way", refs)
                for pins in self._pins.values()
                for refs in pins.values()
            ]

    def release(self, caller: Peer, numbers: Iterable[int]) -> None:
        """Drop the refs kept under these numbers, as the caller counts them now."""
        with self._lock:
            pins = self._pins.get(caller.process_id)
            if pins is None:
                return
            dropped = [pins.pop(number, None) for number in numbers]
            if not pins:
                del self._pins[caller.process_id]
        del dropped  # not in the section: it may run finalizers
        self._look_if_counted()

    def caller_gone(self, caller: Peer) -> None:
        """Drop what was kept for a caller that is gone."""
        with self._lock:
            dropped = self._pins.pop(caller.process_id, None)
        del dropped
        self._look_if_counted()

    def when_counted(self, callback: Callable[[], object]) -> bool:
        """Call back once the receivers have counted all refs; return True if they have.

        One that is stopped, or holds the interpreter's lock, may take any time: it counts them
        in the end, or ends itself.
        """
        with self._lock:
            self._on_counted = callback
            return not self._pins

    def _look_if_counted(self) -> None:
        with self._lock:
            if self._pins or self._on_counted is None:
                return
            callback, self._on_counted = self._on_counted, None
        callback()


def _is_of_train(error: BaseException) -> bool:
    """Return whether an error is one of ``miniray.train``, whose calls users do not know."""
    return isinstance(error, MinirayError) and name_of(error).startswith("miniray.train.")


def _split(result: Any, count: int, name: str) -> list[Any]:
    """Return the results of a call with several, one by one."""
    if count == 0:
        return []
    try:
        items = list(result)
    except TypeError:
        raise ValueError(
            f"{name} has num_returns={count} but returned one value of type "
            f"{type(result).__name__}, which cannot be split into {count}."
        ) from None
    if len(items) != count:
        raise _wrong_number(name, count, len(items))
    return items


def _wrong_number(name: str, count: int, returned: int) -> ValueError:
    return ValueError(f"{name} has num_returns={count} but returned {returned} values.")


def items_of(result: Any, name: str) -> Iterator[Any]:
    """Return what a call that streams has returned, as an iterator; ``close_items`` follows.

    Raises:
        TypeError: It has no items.
    """
    if hasattr(result, "__next__"):
        return result  # type: ignore[no-any-return]
    if not hasattr(result, "__iter__"):
        raise TypeError(
            f'{name} has num_returns="streaming" but returned a '
            f"{type(result).__name__}, which cannot be iterated."
        )
    return iter(result)


def close_items(items: Iterator[Any]) -> None:
    """End an iterator: a generator runs its ``finally`` blocks, a file is closed."""
    close = getattr(items, "close", None)
    if close is not None:
        close()
