"""Answers of a worker: results and errors as values, each call once.

Refs inside values are kept until the caller counts them. A reply also says which refs of the
arguments the worker still holds.
"""

from __future__ import annotations

import dataclasses
import itertools
import os
import pickle
import threading
import time
from typing import TYPE_CHECKING, Any, NamedTuple, NoReturn

from miniray.common.config import config
from miniray.common.exception_transport import (
    forget_traceback,
    format_traceback,
    name_of,
    note_place,
    traceback_of,
)
from miniray.common.names import short_name
from miniray.common.object_ref import hooks
from miniray.common.spans import LONG, SPANS
from miniray.exceptions import MinirayError, TaskCancelledError, TaskError
from miniray.messages import protocol as p
from miniray.messages.value import ActorExit, error_value, is_shared
from miniray.values.serialization import serialize
from miniray.worker import stdio
from miniray.worker.work import (
    NOT_ERRORS,
    ArgumentLostError,
    carried,
    forget_arguments,
    raise_as_error,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from miniray.client.cluster_runtime import ClusterRuntime
    from miniray.common.object_ref import ObjectRef
    from miniray.messages.value import Value
    from miniray.wire.peers import Peer
    from miniray.worker.work import Work, WorkQueue

_NONE: Value = (p.VALUE_PICKLE, pickle.dumps(None, 5), ())


class Stored(NamedTuple):
    """Results that are values already."""

    values: Sequence[Value]
    #: The number under which refs inside are kept; 0 if there are none.
    pin: int


class Results:
    """Makes values of results, and keeps the refs inside until the caller counts them."""

    def __init__(self, runtime: ClusterRuntime) -> None:
        self._runtime = runtime
        #: Refs inside values in flight: caller → pin → refs of one message. A pin is a
        #: number of its own: a call sends many messages, and may run here more than once.
        self._pins: dict[bytes, dict[int, list[ObjectRef[Any]]]] = {}
        self._numbers = itertools.count(1).__next__
        # Reentrant: a garbage collection may run user code in any section.
        self._lock = threading.RLock()
        #: Called once all refs were counted or dropped.
        self._on_counted: Callable[[], object] | None = None

    def value(self, result: Any, work: Work) -> tuple[Value, int]:
        """Make a result the value that travels to the caller, its owner.

        Returns:
            The value, and the number under which refs inside are kept; 0 if there are none.

        Raises:
            TypeError: The result cannot be pickled.
        """
        if result is None:
            return _NONE, 0
        refs: list[ObjectRef[Any]] = []
        value = self.store(result, work, refs)
        return value, self.pin(work.caller, refs) if refs else 0

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
                values.append(self.store(item, work, refs))  # noqa: PERF401 - freed below
        except BaseException:
            self.free(values)
            raise
        return values, self.pin(work.caller, refs) if refs else 0

    def free(self, values: Iterable[Value]) -> None:
        """Free values that were written: their owner, the caller, will not receive them."""
        for value in filter(is_shared, values):
            self._runtime.free_shared(value)

    def drop(self, result: Any, caller: Peer) -> None:
        """Free a result that is not sent."""
        if isinstance(result, Stored):
            self.free(result.values)
            if result.pin:
                self.release(caller, [result.pin])

    def store(self, result: Any, work: Work, refs: list[ObjectRef[Any]]) -> Value:
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

    def pin(self, caller: Peer, refs: list[ObjectRef[Any]]) -> int:
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
        """Return the refs kept until callers have counted them: the holder's name, and the refs."""
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
        """Drop the refs kept for a caller that is gone."""
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
    """Return whether an error is one of ``miniray.train``, whose calls users did not make."""
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
        raise wrong_number(name, count, len(items))
    return items


def wrong_number(name: str, count: int, returned: int) -> ValueError:
    """Make the error of a call that has not as many results as it was to return."""
    return ValueError(f"{name} has num_returns={count} but returned {returned} values.")


@dataclasses.dataclass(eq=False, repr=False)
class Replies:
    """Answers calls, each once."""

    #: Of this process.
    runtime: ClusterRuntime
    #: Makes values of what calls return.
    results: Results
    #: By call of a caller: what was received and has not ended.
    unanswered: dict[tuple[bytes, int], Work]
    #: What is to run next.
    queue: WorkQueue
    #: Called if a call has ended its actor.
    leave: Callable[[BaseException], None]
    #: Functions and methods that were quick when they ran last. Answers wait for others, to be
    #: written together; before one that may take long, and hold the interpreter's lock for
    #: all of that time, they are written.
    _quick: set[Any] = dataclasses.field(default_factory=set, init=False)
    #: Ends this process where it would answer the parent's caller: user code forked it.
    _end_child: Callable[[BaseException | None], NoReturn] | None = dataclasses.field(
        default=None, init=False
    )

    def in_forked_child(self, end: Callable[[BaseException | None], NoReturn]) -> None:
        """End this process where it would answer: the calls are its parent's."""
        self._end_child = end

    def write_before(self, work: Work) -> None:
        """Write the answers that wait, unless the call that begins is known to be quick."""
        if work.target not in self._quick:
            self.runtime.loop.flush_posted()

    def answer(self, work: Work, result: Any) -> None:
        """Send a result; what cannot be sent becomes the call's error."""
        if self._end_child is not None:
            self._end_child(None)
        if self._exits(work):
            return
        if work.execution.cancelled:  # whatever it made of that
            self.results.drop(result, work.caller)
            self.answer_error(work, TaskCancelledError(work.name))
            self.cancel_children(work)
            return
        try:
            values, pin = self.results.values(result, work) if work.stream is None else ((), 0)
        except (TypeError, ValueError) as error:  # it names what was returned: frames add nothing
            forget_traceback(error)
            self.answer_error(work, error)
            return
        except Exception as error:  # noqa: BLE001 - it is the call's result
            self.answer_error(work, error)
            return
        del result
        status = p.STATUS_STREAM_END if work.stream is not None else p.STATUS_OK
        seconds = time.perf_counter() - work.started
        if seconds > SPANS.least:
            self._note(work, seconds)
        elif work.target not in self._quick:
            self._quick.add(work.target)
        self._reply(work, status, values, seconds, pin)

    def answer_error(self, work: Work, error: BaseException) -> None:
        """Send an error; the caller gets an answer even if the error's class fails."""
        if self._end_child is not None:
            self._end_child(carried(error))
        if self._exits(work):
            return
        forget_arguments(self.runtime, work)  # it may have failed before it loaded them
        status, values = self._failure(work, error)
        forget_traceback(error)  # its frames hold the arguments
        forget_traceback(carried(error))
        seconds = time.perf_counter() - work.started if work.started else 0.0
        if seconds > SPANS.least:
            SPANS.call(work.name, work.started, seconds, False, work.key)
        self._reply(work, status, values, seconds, 0)

    def _note(self, work: Work, seconds: float) -> None:
        """Record a call that took long; while all are recorded, any."""
        if seconds > LONG:
            self._quick.discard(work.target)
        else:
            self._quick.add(work.target)
        SPANS.call(work.name, work.started, seconds, True, work.key)

    def cancel_children(self, work: Work) -> None:
        """Cancel what a piece of work has started, if it was cancelled together with that."""
        execution = work.execution
        if execution.cancelled and work.recursive:
            if not work.is_task:
                execution.interrupted()  # it runs on, and may check whether it was cancelled
            execution.cancel_children()

    def _exits(self, work: Work) -> bool:
        """Return whether a call has ended its actor; it has no answer then."""
        execution = work.execution
        execution.answered = True  # before the check
        if execution.exits:
            self.leave(ActorExit())
        return execution.exits

    def _reply(
        self, work: Work, status: int, values: Sequence[Any], seconds: float, pin: int
    ) -> None:
        if self.queue.empty():  # a caller that has the answer may end this process
            stdio.flush_all()
        self.unanswered.pop(work.key, None)
        held = self._still_held(work)
        message = (p.PEER_REPLY, work.number, status, values, held, seconds, pin)
        if held is None:
            work.caller.post(message)
        else:
            # The call protected the refs of its arguments. Refs that this process has
            # registered by itself must be counted before that ends.
            self.runtime.borrowing.defer(lambda: work.caller.post(message))

    def _failure(self, work: Work, error: BaseException) -> tuple[int, tuple[Any, ...]]:
        try:
            if work.execution.cancelled and not work.started:
                return p.STATUS_ERROR, (error_value(TaskCancelledError(work.name)),)
            ends = work.stream is None or isinstance(error, TaskCancelledError)
            # A KeyboardInterrupt that user code has raised by itself is a cancel too, as in Ray.
            if (work.execution.cancelled and ends) or isinstance(error, KeyboardInterrupt):
                return p.STATUS_ERROR, (self.results.cancelled(error, work.name),)
            if isinstance(error, ArgumentLostError) and not work.execution.cancelled:
                return p.STATUS_LOST, ((error.id, error.payload),)
            return p.STATUS_ERROR, (self.results.error(error, work.name),)
        except BaseException as problem:  # noqa: BLE001 - the error's class is user code
            return p.STATUS_ERROR, (error_value(TaskError.untold(work.name, error, problem)),)

    def _still_held(self, work: Work) -> list[tuple[bytes, bytes]] | None:
        if work.held is None:
            return None
        if hooks.dropped:
            self.runtime.refs.drain()
        kept = self.runtime.borrowing.keep_of(work.held)
        work.held = None
        return kept
