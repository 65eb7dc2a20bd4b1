"""The calls of one concurrency group of an asyncio actor, as tasks of one event loop.

At most `limit` calls run at once, and the calls of one caller begin in the order sent.
What a call does is the executor's business.
"""

from __future__ import annotations

import asyncio
import collections
import contextvars
import dataclasses
import functools
import threading
from typing import TYPE_CHECKING, Any

from miniray.exceptions import TaskCancelledError
from miniray.worker.work import Arguments, load_arguments, reads_shared_memory

if TYPE_CHECKING:
    import concurrent.futures
    from collections.abc import Callable, Coroutine

    from miniray.client.cluster_runtime import ClusterRuntime
    from miniray.worker.work import Work

#: Arguments that were loaded ahead of their call; or what loading them has raised.
Loaded = Arguments | BaseException
#: Futures of the call before this one, if there is one, and of this one: that it has begun.
_Turn = tuple["asyncio.Future[None] | None", "asyncio.Future[None]"]


def call_in(
    loop: asyncio.AbstractEventLoop, callback: Callable[..., object], *args: Any, **how: Any
) -> None:
    """Call back in an event loop, unless it has ended with its actor."""
    try:
        loop.call_soon_threadsafe(callback, *args, **how)
    except RuntimeError:
        if not loop.is_closed():
            raise


@dataclasses.dataclass(eq=False, repr=False)
class CallLoop:
    """Calls that share an event loop."""

    _runtime: ClusterRuntime
    #: Runs a call, with its arguments if these have been loaded, and answers it, also if loading
    #: them has failed.
    _execute: Callable[[Work, Loaded | None], Coroutine[Any, Any, None]]
    #: Answers a call with an error.
    _answer_error: Callable[[Work, BaseException], None]
    #: How many more calls may run now.
    _free: int
    #: Threads that wait for arguments.
    _loaders: concurrent.futures.Executor

    def __post_init__(self) -> None:
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread = 0
        self._inbox: collections.deque[Work] = collections.deque()
        self._woken = False
        #: Calls beyond the limit, in order.
        self._waiting: collections.OrderedDict[tuple[bytes, int], Work] = collections.OrderedDict()
        self._tasks: dict[tuple[bytes, int], asyncio.Task[None]] = {}
        #: By caller: resolved when the last of its calls has begun, if that waits for arguments.
        self._behind: dict[bytes, asyncio.Future[None]] = {}
        self._flushing = False
        #: No further call begins.
        self._ended = False

    # --- from any thread ---------------------------------------------------------------
    def put(self, work: Work) -> None:
        self._inbox.append(work)
        self._wake()

    def _wake(self) -> None:
        loop = self._loop
        if loop is not None and not self._woken and not self._ended:
            self._woken = True
            # In a context of its own: this may run in a coroutine that waits in get().
            if self._runtime.loop.in_callback and threading.get_ident() == self._thread:
                loop.call_soon(self._take, context=contextvars.Context())
            else:
                call_in(loop, self._take, context=contextvars.Context())

    def cancel(self, work: Work) -> None:
        """End a call that runs, or that waits for its turn."""
        loop = self._loop
        if loop is not None:
            call_in(loop, self._cancel, work)

    # --- in the event loop -------------------------------------------------------------
    async def serve(self) -> None:
        self.begin()
        await asyncio.get_running_loop().create_future()

    def begin(self) -> None:
        self._thread = threading.get_ident()
        self._loop = asyncio.get_running_loop()
        self._wake()

    def end(self) -> None:
        """Begin no further call: the loop is about to cancel what runs."""
        self._ended = True

    def _take(self) -> None:
        self._woken = False
        inbox = self._inbox
        while inbox and not self._ended:
            work = inbox.popleft()
            if self._free > 0 and not self._waiting:
                self._start(work)
            else:
                self._waiting[work.key] = work

    def _start(self, work: Work) -> None:
        self._free -= 1
        turn = None
        if work.caller.process_id in self._behind or reads_shared_memory(work):
            turn = self._turn_of(work)
        assert self._loop is not None
        self._loop.create_task(self._run(work, turn))

    async def _run(self, work: Work, turn: _Turn | None) -> None:
        task = asyncio.current_task()
        assert task is not None
        key = work.key
        # From here on: a task that is cancelled before it has begun would end without an answer.
        self._tasks[key] = task
        try:
            if turn is None:
                await self._execute(work, None)
            else:
                await self._execute_in_turn(work, *turn)
        finally:
            if not self._flushing:
                self._flush_soon()
            self._tasks.pop(key, None)
            self._free += 1
            if self._waiting and self._free > 0 and not self._ended:
                _, first = self._waiting.popitem(last=False)
                self._start(first)

    def _flush_soon(self) -> None:
        self._flushing = True
        asyncio.get_running_loop().call_soon(self._flush)

    def _flush(self) -> None:
        self._flushing = False
        self._runtime.loop.flush_posted()

    def _cancel(self, work: Work) -> None:
        key = work.key
        task = self._tasks.get(key)
        if task is not None:
            work.execution.interrupted()
            task.cancel()
        elif self._waiting.pop(key, None) is not None:  # its turn may never come
            self._answer_error(work, TaskCancelledError(work.name))
            if not self._flushing:
                self._flush_soon()

    def _turn_of(self, work: Work) -> _Turn:
        """Queue a call behind the last one of its caller."""
        caller = work.caller.process_id
        before = self._behind.get(caller)
        begun = self._behind[caller] = asyncio.get_running_loop().create_future()
        return before, begun

    async def _execute_in_turn(
        self, work: Work, before: asyncio.Future[None] | None, begun: asyncio.Future[None]
    ) -> None:
        """Run a call that waits for its arguments, or for such a call before it.

        A thread waits for the arguments. Calls of one caller begin in the order sent, so those
        that it sent later wait too; others do not.
        """
        arguments: Loaded | None = None

        def begin() -> None:
            begun.set_result(None)
            if self._behind.get(work.caller.process_id) is begun:
                del self._behind[work.caller.process_id]

        try:
            if work.execution.cancelled:
                raise asyncio.CancelledError
            if before is not None:
                await asyncio.shield(before)
            if reads_shared_memory(work):
                load = functools.partial(_load, self._runtime, work)
                loop = asyncio.get_running_loop()
                arguments = await loop.run_in_executor(self._loaders, load)
        except asyncio.CancelledError:
            if before is None or before.done():
                begin()
            else:  # those behind this one still wait for those before it
                before.add_done_callback(lambda _before: begin())
            if work.execution.cancelled or not self._ended:  # else it fails with its actor
                self._answer_error(work, TaskCancelledError(work.name))
            return
        # The calls behind this one are tasks: they go on after this has run up to its first wait.
        begin()
        await self._execute(work, arguments)


def _load(runtime: ClusterRuntime, work: Work) -> Loaded:
    """Return the arguments of a call, or what their unpickling has raised.

    That may be anything, and is the call's: raised here, it would pass through a future, which
    takes no ``StopIteration`` and lets a ``SystemExit`` end the event loop.
    """
    try:
        return load_arguments(runtime, work)
    except BaseException as error:  # noqa: BLE001 - raised where the call is run
        return error
