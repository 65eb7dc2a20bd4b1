"""What a worker sends its callers: results, errors, and the items of generators.

A reply also says which refs of the arguments the worker still holds.
"""

from __future__ import annotations

import dataclasses
import functools
import threading
import time
from typing import TYPE_CHECKING, Any

from miniray.common.exception_transport import forget_traceback
from miniray.common.object_ref import hooks
from miniray.common.spans import LONG, SPANS
from miniray.exceptions import TaskCancelledError, TaskError
from miniray.messages import protocol as p
from miniray.messages.value import ActorExit, error_value
from miniray.worker import stdio
from miniray.worker.arguments import forget_arguments
from miniray.worker.interruption import end_child
from miniray.worker.results import close_items, items_of
from miniray.worker.work import ArgumentLostError, carried

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from miniray.client.cluster_runtime import ClusterRuntime
    from miniray.wire.peers import Peer
    from miniray.worker.interruption import Interruption
    from miniray.worker.results import Results
    from miniray.worker.work import Work, WorkQueue


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
    #: User code forked: where this process would answer the parent's caller, it ends.
    _in_child: bool = dataclasses.field(default=False, init=False)

    def in_forked_child(self) -> None:
        """End this process where it would answer: the calls are its parent's."""
        self._in_child = True

    def write_before(self, work: Work) -> None:
        """Write the answers that wait, unless what is begun is known to be quick."""
        if work.target not in self._quick:
            self.runtime.loop.flush_posted()

    def answer(self, work: Work, result: Any) -> None:
        """Send a result; what cannot be sent becomes the call's error."""
        if self._in_child:
            end_child(None)
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
        """Send an error; whatever is the matter with it, the caller gets an answer."""
        if self._in_child:
            end_child(carried(error))
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
        """Note a call that took long; while all are recorded, any."""
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
                execution.interrupted()  # it runs on, and may ask whether it was cancelled
            execution.cancel_children()

    def _exits(self, work: Work) -> bool:
        """Return whether a call has ended its actor; it has no answer then."""
        execution = work.execution
        execution.answered = True  # before it is asked
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
            # The call protected the refs of its arguments. Those of them that this process has
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


#: Bytes that may wait in memory because a caller does not read, before its streams pause.
_UNREAD = 16 * 1024 * 1024


@dataclasses.dataclass(eq=False, repr=False)
class Streams:
    """Sends what the generators of calls yield, no further ahead than their callers read."""

    #: Makes values of items.
    results: Results
    #: Of the main thread, which may be the one that sends.
    interruption: Interruption
    #: Waits as user code does that waits.
    block: Callable[[Callable[[float | None], bool], float | None], bool]
    #: Lets all streams to a caller look again whether they may go on.
    wake: Callable[[Peer], None]

    def run(self, work: Work, result: Any) -> None:
        """Send what a call has returned, item by item."""
        items = items_of(result, work.name)
        work.consumed_changed = threading.Event()
        index = 0
        try:
            for item in items:
                if work.consumed == -1:
                    return
                self.send(work, index, item)
                del item  # before the next one is made
                index += 1
                self._await_reader(work, index)
        finally:
            close_items(items)

    def send(self, work: Work, index: int, item: Any) -> None:
        """Send one item, unless it cannot be pickled."""
        with self.interruption.put_off(work):
            value, pin = self.results.value(item, work)
            work.caller.send((p.PEER_STREAM, work.number, index, value, pin))

    def may_go_on(self, work: Work, sent: int) -> bool:
        """Return whether to make the next item; if not, ``consumed_changed`` is set later."""
        if work.consumed == -1:
            return True
        if work.stream is not None and 0 <= work.stream <= sent - work.consumed:
            return False
        caller = work.caller
        if caller.backlog() <= _UNREAD:
            return True
        caller.when_drained(functools.partial(self.wake, caller))
        return False

    def _await_reader(self, work: Work, sent: int) -> None:
        """Wait until the caller has taken enough of what was sent (backpressure)."""
        while not self.may_go_on(work, sent):
            work.consumed_changed.clear()
            if self.may_go_on(work, sent):
                return
            self.block(work.consumed_changed.wait, None)
