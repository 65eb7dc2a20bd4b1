"""Runs tasks and the methods of plain actors, in the main thread, one after the other.

Work arrives in the I/O thread; user code, unpickling included, runs here, and a signal ends a task
that is cancelled. The executors of threaded and asyncio actors build on this (``actor_modes.py``).
"""

from __future__ import annotations

import contextlib
import logging
import os
import pickle
import signal
import threading
import time
import traceback
from types import GeneratorType
from typing import TYPE_CHECKING, Any

from miniray.calls import context
from miniray.client.handover import await_others
from miniray.common.config import config
from miniray.common.object_ref import call_id
from miniray.exceptions import TaskCancelledError
from miniray.messages import protocol as p
from miniray.messages.value import ActorExit
from miniray.wire.interrupts import postpone
from miniray.wire.io_loop import Gate
from miniray.worker import stdio
from miniray.worker.generators import Generators, items_of
from miniray.worker.leases import Leases, Recall
from miniray.worker.replies import Replies, Results
from miniray.worker.work import (
    BUILT_IN,
    NOT_ERRORS,
    Work,
    WorkQueue,
    fetch_arguments,
    forget_arguments,
    load_arguments,
    method_of,
    raise_as_error,
    unknown_group,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine, Iterable, Iterator
    from types import FrameType

    from miniray.client.cluster_runtime import ClusterRuntime
    from miniray.common.object_ref import ObjectRef
    from miniray.common.specs import ActorSpec
    from miniray.objects.waiting import Wait
    from miniray.wire.io_loop import IOLoop
    from miniray.wire.peers import Peer

logger = logging.getLogger(__name__)

#: Interrupts the main thread when the running task is cancelled.
CANCEL_SIGNAL = signal.SIGUSR1
#: The name of the frame in which a module is run.
_MODULE = "<module>"
#: Seconds until it is sent again if it had no effect, at first and at most.
_AGAIN, _AGAIN_AT_MOST = 0.02, 1.0


class Interruption:
    """The call that runs in the main thread, and whether a cancel may raise there."""

    def __init__(self, loop: IOLoop) -> None:
        self._loop = loop
        self.running: Work | None = None
        #: Whether the user's code runs, which may be interrupted.
        self.allowed = False
        #: The main thread is in the hook for exceptions that Python ignores: what is raised there
        #: is lost, too.
        self.in_hook = False
        #: What was raised last to end the running task.
        self._raised: KeyboardInterrupt | None = None

    def end(self) -> None:
        """Record that the task is over."""
        self.running = None
        self._raised = None  # its frames hold the arguments

    def send(self, work: Work, pause: float = _AGAIN) -> None:
        """Interrupt the main thread while it runs the task; repeat until that has had effect.

        A signal that comes when the thread is about to sleep, as in the wait for a lock, does not
        wake it, and Python's handler runs when the sleep is over.
        """
        if self.running is work and self.allowed:
            signal.pthread_kill(threading.main_thread().ident or 0, CANCEL_SIGNAL)
            again = min(2 * pause, _AGAIN_AT_MOST)
            self._loop.call_later(pause, lambda: self.send(work, again))

    def on_signal(self, number: int, frame: FrameType | None) -> None:
        """Raise in the running task, if it is cancelled (CANCEL_SIGNAL)."""
        running = self.running
        if running is not None and running.execution.cancelled and self.allowed:
            if self.in_hook or postpone(self.on_signal, number, frame):
                return  # from the hook it goes on being sent
            self.allowed = False
            running.execution.interrupted()
            # As in Ray, so that user code can clean up.
            self._raised = KeyboardInterrupt()
            raise self._raised

    def was_ignored(self, error: BaseException | None) -> bool:
        """Return whether an exception that Python ignored was to end a task; send it again.

        What a ``__del__`` or the callback of a weak reference raises is lost, also if it was
        a signal's handler that raised in the middle of it. The caller is in the hook for that,
        and clears ``in_hook`` last.
        """
        work = self.running
        if work is None or error is None or error is not self._raised:
            return False
        self.in_hook = True
        self._raised = None
        self.allowed = True
        self._loop.call_later(_AGAIN, lambda: self.send(work))
        return True

    def cut_off_import(self, error: BaseException) -> bool:
        """Return whether an error is the end of a task in the middle of an import.

        Some modules of a package whose import was cut off stay, and those in native code cannot be
        loaded once more: NumPy, for one, is unusable in such a process.
        """
        return error is self._raised and any(
            frame.f_code.co_name == _MODULE  # Python hides the frames of its own that import it
            for frame, _ in traceback.walk_tb(error.__traceback__)
        )

    @contextlib.contextmanager
    def put_off(self, work: Work) -> Iterator[None]:
        """Keep a cancel out: between a value and its message, it would leak the value.

        Raises:
            TaskCancelledError: A cancel came meanwhile; raised after the block.
        """
        allowed, self.allowed = self.allowed, False
        yield
        self.allowed = allowed  # first: a cancel is either seen here, or interrupts
        if work.execution.cancelled:
            raise TaskCancelledError(work.name)


class Executor:
    """Takes calls, and runs them from the main thread's queue."""

    def __init__(
        self,
        runtime: ClusterRuntime,
        end: Callable[[BaseException | None], None],
        actor: ActorSpec | None,
    ) -> None:
        self._runtime = runtime
        self._end = end
        self._class_name = "" if actor is None else actor.class_name
        self._results = Results(runtime)
        self._queue = WorkQueue(runtime.loop)
        self._leases = Leases(self._queue.put)
        self._functions: dict[bytes, Any] = {}
        #: What runs in the main thread.
        self.interruption = Interruption(runtime.loop)
        #: By call of a caller: what was received and has not ended.
        self._open: dict[tuple[bytes, int], Work] = {}
        self.generators = Generators(
            self._results, self.interruption.put_off, self._open, self.block
        )
        self.replies = Replies(runtime, self._results, self._open, self._queue, self.leave)
        self._recall = Recall(runtime, self._queue, self._open, lambda: self.interruption.running)
        #: The actor.
        self.instance: Any = None
        #: Tasks run by this process, for max_calls; 0 in `limit` is no limit.
        self.limit = 0
        self._done = 0
        #: Modules are half imported; no further task may run.
        self._spoiled = False
        #: The actor ends: no further call begins.
        self._ending = False
        runtime.peers.on_kind.update(
            {
                p.PEER_CALL: self.on_call,
                p.PEER_CANCEL: self.on_cancel,
                p.PEER_STREAM_ACK: self.generators.on_ack,
                p.PEER_RELEASE: self.on_release,
                p.PEER_LEASE_END: lambda peer, message: self._recall.hand_back(),
            }
        )
        runtime.on_peer_lost += [self._results.caller_gone, self.generators.caller_gone]

    # --- what arrives, in the I/O thread ------------------------------------------------
    def on_call(self, peer: Peer, message: tuple[Any, ...]) -> None:
        """Take a task of the lease's owner, or a method call of this worker's actor (PEER_CALL)."""
        _, number, target, arguments, refs, return_ids, how, stream = message
        is_task = isinstance(target, bytes)
        group, lease = None, 0
        if is_task:
            name, lease = how
            own = name
        else:
            own = name = f"{self._class_name}.{target}"
            if how is not None:
                group, given = how
                name = own if given is None else given
        again = stream == p.STREAM_AGAIN
        work = Work(
            peer,
            number,
            target,
            context.Execution(_id_of(peer, number, return_ids), name, own),
            arguments,
            refs,
            return_ids,
            group,
            stream=None if again else stream,
            again=again,
        )
        fetch_arguments(self._runtime, work)
        self._open[(peer.process_id, number)] = work
        if not is_task:
            self.enqueue(work)
            return
        if lease == self._leases.current:
            self._queue.put(work)
        else:
            self._leases.take(lease, work)
        if len(self._open) > 1:
            self._recall.watch()

    def begin_lease(self, number: int, limit: int) -> None:
        """Run the tasks of a lease; ``limit`` is the ``max_calls`` of their function."""
        self.limit = limit
        self._leases.begin(number)

    def enqueue(self, work: Work) -> None:
        """Queue a method call where its mode runs it."""
        if work.group is None:
            self._queue.put(work)
        else:
            self.replies.answer_error(work, unknown_group(work, ()))

    def on_cancel(self, peer: Peer, message: tuple[Any, ...]) -> None:
        """Stop a call, or do not begin it (PEER_CANCEL)."""
        _, number, force, recursive = message
        work = self._open.get((peer.process_id, number))
        if work is None:
            return
        work.recursive = recursive  # first: code that sees it cancelled reads this too
        work.execution.cancelled = True
        forget_arguments(self._runtime, work)
        self.interrupt(work, force)

    def interrupt(self, work: Work, force: bool) -> None:
        """Stop a task that runs, or what waits for its arguments or its turn.

        A method that has begun runs on, and may check whether it was cancelled.
        """
        if self._queue.remove(work):  # its turn may be long in coming
            self.replies.answer_error(work, TaskCancelledError(work.name))
        elif self.interruption.running is work:
            if not work.is_task:
                self.replies.cancel_children(work)  # if it waits for them, its `get` raises
            elif force:
                self._runtime.link.node_notice("exiting", "cancelled")
                self._runtime.link.flush()
                os._exit(1)
            self.interruption.send(work)

    def on_release(self, peer: Peer, message: tuple[Any, ...]) -> None:
        """Drop refs inside results that the caller has counted (PEER_RELEASE)."""
        _, pins = message
        self._results.release(peer, pins)

    def holds(self) -> Iterator[tuple[str, Iterable[ObjectRef[Any]]]]:
        """Yield the calls that run, and results on their way, with the refs they hold."""
        for work in list(self._open.values()):
            if work.held is not None:
                yield work.name, work.held
        yield from self._results.holds()

    def works(self) -> Iterator[tuple[bytes, str, float | None]]:
        """Yield the calls that have not ended: id, name, seconds since it began if it has."""
        now = time.perf_counter()
        for work in list(self._open.values()):
            seconds = now - work.started if work.started else None
            yield work.execution.task_id, work.name, seconds

    # --- running -------------------------------------------------------------------
    def serve(self, create: Callable[[], Coroutine[Any, Any, bool]]) -> None:
        """Make the actor, and run its calls until the end.

        Args:
            create: Calls ``begin``; returns whether there is an actor to run.
        """
        making = create()
        try:
            making.send(None)
        except StopIteration as end:
            made = end.value
        else:
            raise RuntimeError("a coroutine waits outside of an event loop")
        if made:
            self.run()

    def begin(self, instance: Any) -> None:
        """Let calls begin."""
        self.instance = instance

    def run(self) -> None:
        take = self._queue.get
        while True:
            work = take()
            if work is None or self._ending:
                return
            if work.key in self._open:
                self.execute(work)
                if self._spoiled:
                    self._recall.hand_back()
                    self._end(None)
                    return
                if self.limit:
                    self._done += 1
                    if self._done >= self.limit:
                        self._end(None)
                        return

    def wait_counted(self) -> None:
        """Wait until the receivers of replies have counted the refs inside."""
        self._runtime.loop.flush_posted()
        counted = Gate(self._runtime.loop)
        if not self._results.when_counted(counted.arrived):
            await_others(self._runtime, counted)

    def stop(self) -> None:
        """End ``run`` after the work that is queued."""
        self._queue.put(None)

    def leave(self, why: BaseException) -> None:
        """End this process for user code: calls of an actor that are queued end with it.

        Tasks that are queued still run, as they would have to be sent elsewhere.
        """
        self._ending = self._runtime.facts.actor_id is not None
        self._end(why)

    def is_ending(self) -> bool:
        return self._ending

    def execute(self, work: Work) -> None:
        """Run one piece of work in this thread and answer."""
        if work.execution.cancelled:
            self.replies.answer_error(work, TaskCancelledError(work.name))
            return
        self.replies.write_before(work)
        interruption = self.interruption
        token = context.execution.set(work.execution)
        interruption.running = work
        work.started = time.perf_counter()
        try:
            result = self._invoke(work)
            result = self.read(work, result)
            interruption.allowed = False
            self.replies.answer(work, result)
        except ActorExit:
            interruption.allowed = False
            self.leave(ActorExit())
        except SystemExit as error:
            interruption.allowed = False
            self.leave(error)
        except BaseException as error:  # noqa: BLE001 - it is the call's result
            interruption.allowed = False
            self._spoiled = interruption.cut_off_import(error)
            self.replies.answer_error(work, error)
            self.replies.cancel_children(work)
        finally:
            interruption.end()
            context.execution.reset(token)

    def _invoke(self, work: Work) -> Any:
        """Call the user's code, in a frame of its own, so that the arguments end with it."""
        execution, interruption, is_task = work.execution, self.interruption, work.is_task
        if is_task:
            stdio.set_name(work.name)  # before its code is loaded, which may print or crash too
        function = self.resolve(work)
        if is_task:
            execution.function = function
        interruption.allowed = True
        if execution.cancelled:  # before it began
            raise TaskCancelledError(work.name)
        loaded, work.loaded = work.loaded, None
        args, kwargs = loaded or load_arguments(self._runtime, work)
        del loaded
        if not is_task:
            interruption.allowed = False  # a method that has begun runs on
            if execution.cancelled:
                raise TaskCancelledError(work.name)
        return function(*args, **kwargs)

    def next_arguments(self) -> tuple[Any, ...] | None:
        """Load the arguments of the call that is next in the queue; see ``Runtime``."""
        work = self._queue.first()
        if work is None or work.ahead:
            return None
        with contextlib.suppress(Exception):  # it is raised again when the call's turn has come
            args, _ = work.loaded = load_arguments(self._runtime, work)
            return args
        return None

    def resolve(self, work: Work) -> Callable[..., Any]:
        """Return the function or method that a piece of work calls."""
        if isinstance(work.target, bytes):
            function = self._functions.get(work.target)
            if function is None:
                function = self._functions[work.target] = self.load_code(work.target)
            return function  # type: ignore[no-any-return]
        return self.method(work.target)

    def method(self, name: str) -> Callable[..., Any]:
        """Return a method of the actor, or one that every actor has."""
        special = BUILT_IN.get(name)
        if special is not None:
            return lambda *args, **kwargs: special(self.instance, *args, **kwargs)
        return method_of(self.instance, name)

    def load_code(self, key: bytes) -> Any:
        part = self._code(key)
        names = p.pieces(key, part)
        blob = b"".join(map(self._code, names)) if names else p.whole(part)
        try:
            return pickle.loads(blob)
        except NOT_ERRORS as error:  # of a module that it imports
            raise_as_error(error)

    def _code(self, name: bytes) -> bytes:
        part, _ = self._runtime.link.node_request("get_code", (name,))
        if part is None:
            raise RuntimeError(
                f"the code of key {name[:16].hex()} is no longer known to the cluster: its job "
                f"is over"
            )
        return part  # type: ignore[no-any-return]

    def read(self, work: Work, result: Any) -> Any:
        """Return what is to be answered; a generator that a call has returned runs here."""
        if work.stream is not None:
            self.generators.stream(work, result)
            return None
        if work.again:
            result = items_of(result, work.name)
        elif not isinstance(result, GeneratorType):
            return result
        return self.generators.store(result, work)

    # --- blocking ------------------------------------------------------------------
    def block(self, wait: Wait, timeout: float | None) -> bool:
        """Wait for the running task, and give its CPU back when that takes long."""
        first = config().block_after
        if timeout is not None and timeout <= first:
            return wait(timeout)
        if wait(first):
            return True
        if context.execution.get() is None:
            return wait(None if timeout is None else timeout - first)
        self._runtime.link.node_notice("blocked", True)
        running = self.interruption.running
        if running is not None and running.is_task:
            self._recall.hand_back()
        try:
            return wait(None if timeout is None else timeout - first)
        finally:
            self._runtime.link.node_notice("blocked", False)


def _id_of(caller: Peer, number: int, return_ids: tuple[bytes, ...]) -> bytes:
    """Return the id of a call for the runtime context: that of its first result, if it has any."""
    return return_ids[0] if return_ids else call_id(caller.process_id, number)
