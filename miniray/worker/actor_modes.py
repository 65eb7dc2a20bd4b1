"""Executors of actors that run several methods at once: threads, groups, asyncio."""

from __future__ import annotations

import asyncio
import collections
import concurrent.futures
import contextvars
import functools
import inspect
import queue
import threading
from typing import TYPE_CHECKING, Any

from miniray.core import context, event_loop
from miniray.exceptions import TaskCancelledError
from miniray.worker.actor_loop import serving_loop
from miniray.worker.arguments import load_arguments, reads_shared_memory
from miniray.worker.executor import Executor
from miniray.worker.exits import ActorExit

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine, Mapping

    from miniray.core.cluster_runtime import ClusterRuntime
    from miniray.worker.work import Work

_Arguments = tuple[tuple[Any, ...], dict[str, Any]]

#: Ray's default for asyncio actors.
ASYNC_CONCURRENCY = 1000
_DEFAULT_GROUP = "_default"
#: Calls of an asyncio actor whose arguments are waited for at the same time.
_LOADERS = 32


def unknown_group(work: Work, groups: Mapping[str, Any]) -> ValueError:
    """The error for a call into a concurrency group that the actor does not have."""
    return ValueError(
        f"{work.name} was called in concurrency group {work.group!r}; "
        f"the actor has {sorted(set(groups) - {_DEFAULT_GROUP})}."
    )


class ThreadedExecutor(Executor):
    """Methods run in threads: ``max_concurrency`` of them, and a number per group."""

    def __init__(
        self,
        runtime: ClusterRuntime,
        end: Callable[[BaseException | None], None],
        max_concurrency: int,
        groups: Mapping[str, int],
    ) -> None:
        super().__init__(runtime, end)
        self._queues: dict[str, queue.SimpleQueue[Work | None]] = {}
        self._sizes = {_DEFAULT_GROUP: max_concurrency, **groups}
        self._group_of: dict[str, str] = {}
        #: Calls that no thread has taken: whoever takes one out of here answers it.
        self._unbegun: dict[tuple[bytes, int], Work] = {}

    def enqueue(self, work: Work) -> None:
        self._unbegun[_key(work)] = work
        super().enqueue(work)

    def begin(self, group_of: Mapping[str, str]) -> None:
        """Start the threads, once the actor's instance exists."""
        self._group_of = dict(group_of)
        for name, size in self._sizes.items():
            self._queues[name] = queue.SimpleQueue()
            for number in range(size):
                threading.Thread(
                    target=self._serve,
                    args=(self._queues[name],),
                    name=f"{name}-{number}",
                    daemon=True,
                ).start()

    def run(self) -> None:
        """Hand calls to their groups; calls that came before ``begin`` waited here."""
        while True:
            work = self._queue.get()
            if work is None:
                return
            group = work.group or self._group_of.get(work.target, _DEFAULT_GROUP)
            target = self._queues.get(group)
            if target is not None:
                target.put(work)
            elif self._unbegun.pop(_key(work), None) is not None:
                self.answer_error(work, unknown_group(work, self._sizes))

    def _serve(self, mine: queue.SimpleQueue[Work | None]) -> None:
        while True:
            work = mine.get()
            if work is None:
                return
            if self._unbegun.pop(_key(work), None) is not None:
                self.execute_in_thread(work)

    def execute_in_thread(self, work: Work) -> None:
        """Run one call in this thread."""
        execution = self.execution_of(work)
        # After it is known: a cancel from here on finds what the call has started.
        if work.cancelled:
            self.answer_error(work, TaskCancelledError(work.name))
            return
        token = context.execution.set(execution)
        work.begin()
        try:
            result = self._invoke(work)
            self.answer(work, self.read(work, result))
        except (ActorExit, SystemExit) as error:
            self._end(error)
        except BaseException as error:  # noqa: BLE001 - it is the call's result
            self.answer_error(work, error)
            self.cancel_children(work)  # also what it started after it was cancelled
        finally:
            self._runtime.loop.flush_posted()
            context.execution.reset(token)

    def _invoke(self, work: Work) -> Any:
        args, kwargs = load_arguments(self._runtime, work)
        return self.method(work.target)(*args, **kwargs)

    def interrupt(self, work: Work, force: bool) -> None:
        """A method in a thread runs on: threads cannot be interrupted (as in Ray).

        What it has started is cancelled, so if it waits for that, its ``get`` raises.
        """
        if self._unbegun.pop(_key(work), None) is not None:
            self.answer_error(work, TaskCancelledError(work.name))
        else:
            self.cancel_children(work)


class AsyncExecutor(Executor):
    """Methods are coroutines of one event loop in the main thread."""

    def __init__(
        self,
        runtime: ClusterRuntime,
        end: Callable[[BaseException | None], None],
        max_concurrency: int,
        groups: Mapping[str, int],
    ) -> None:
        super().__init__(runtime, end)
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread = 0
        self._inbox: collections.deque[Work] = collections.deque()
        self._woken = False
        self._begun = False
        self._room = {_DEFAULT_GROUP: max_concurrency, **groups}
        #: By group: calls for which there is no room yet, in order, by caller and number.
        self._waiting: dict[str, collections.OrderedDict[tuple[bytes, int], Work]] = {
            name: collections.OrderedDict() for name in self._room
        }
        self._group_of: dict[str, str] = {}
        self._tasks: dict[tuple[bytes, int], asyncio.Task[None]] = {}
        #: By caller: resolved when the last of its calls has begun, if that waits for arguments.
        self._behind: dict[bytes, asyncio.Future[None]] = {}
        #: Arguments are waited for in threads of their own: those of user code may be what gives
        #: back the memory that they wait for.
        self._loaders = concurrent.futures.ThreadPoolExecutor(
            _LOADERS, thread_name_prefix="miniray-arguments"
        )
        self._stopped: asyncio.Event | None = None
        self._warned = False
        self._flushing = False

    # --- from whichever thread reads the sockets ------------------------------------
    def enqueue(self, work: Work) -> None:
        self._inbox.append(work)
        self._wake()

    def _wake(self) -> None:
        loop = self._loop
        if loop is not None and not self._woken:
            self._woken = True
            # In a context of its own: this may run in a coroutine that waits in get().
            if self._runtime.loop.in_callback and threading.get_ident() == self._thread:
                loop.call_soon(self._take, context=contextvars.Context())
            else:
                loop.call_soon_threadsafe(self._take, context=contextvars.Context())

    def interrupt(self, work: Work, force: bool) -> None:
        loop = self._loop
        if loop is not None:
            loop.call_soon_threadsafe(self._cancel_task, work)

    # --- in the event loop -----------------------------------------------------------
    def run_loop(self, create: Callable[[], Any]) -> None:
        """Make the instance inside a running loop, then serve calls until the end."""
        event_loop.run(self._main(create), lambda: serving_loop(self._runtime.loop))

    async def _main(self, create: Callable[[], Any]) -> None:
        self._stopped = asyncio.Event()
        loop = asyncio.get_running_loop()
        if not create():
            return
        self._loop = loop
        self._thread = threading.get_ident()
        self._begun = True
        self._woken = False
        self._wake()
        await self._stopped.wait()

    def begin(self, group_of: Mapping[str, str]) -> None:
        """Remember the groups that methods belong to."""
        self._group_of = dict(group_of)

    def stop(self) -> None:
        loop = self._loop
        if loop is not None and self._stopped is not None:
            loop.call_soon_threadsafe(self._stopped.set)

    def _take(self) -> None:
        self._woken = False
        inbox = self._inbox
        while inbox:
            work = inbox.popleft()
            group = work.group or self._group_of.get(work.target, _DEFAULT_GROUP)
            if group not in self._room:
                self.answer_error(work, unknown_group(work, self._room))
            elif self._room[group] > 0 and not self._waiting[group]:
                self._start(work, group)
            else:
                self._waiting[group][_key(work)] = work

    def _start(self, work: Work, group: str) -> None:
        self._room[group] -= 1
        caller = work.caller.process_id
        if caller in self._behind or reads_shared_memory(work):
            execution = self._execute_in_turn(work)
        else:
            execution = self._execute(work)
        asyncio.get_running_loop().create_task(self._run_one(work, group, execution))

    async def _run_one(self, work: Work, group: str, execution: Coroutine[Any, Any, None]) -> None:
        task = asyncio.current_task()
        assert task is not None
        # From here on: a task that is cancelled before it has begun would end without an answer.
        self._tasks[_key(work)] = task
        try:
            await execution
        finally:
            self._flush_soon()
            self._tasks.pop(_key(work), None)
            self._room[group] += 1
            waiting = self._waiting[group]
            if waiting and self._room[group] > 0:
                self._start(waiting.popitem(last=False)[1], group)

    def _flush_soon(self) -> None:
        if not self._flushing:
            self._flushing = True
            asyncio.get_running_loop().call_soon(self._flush)

    def _flush(self) -> None:
        self._flushing = False
        self._runtime.loop.flush_posted()

    def _execute_in_turn(self, work: Work) -> Coroutine[Any, Any, None]:
        """Run a call whose arguments may have to come from elsewhere, or one behind such a call.

        They are waited for in a thread. Calls of one caller begin in the order sent, so those
        that it sent later wait too; others do not.
        """
        caller = work.caller.process_id
        before = self._behind.get(caller)
        begun = self._behind[caller] = asyncio.get_running_loop().create_future()
        return self._await_turn(work, before, begun)

    async def _await_turn(
        self, work: Work, before: asyncio.Future[None] | None, begun: asyncio.Future[None]
    ) -> None:
        arguments: _Arguments | None = None

        def begin() -> None:
            begun.set_result(None)
            if self._behind.get(work.caller.process_id) is begun:
                del self._behind[work.caller.process_id]

        try:
            if work.cancelled:
                raise asyncio.CancelledError
            if before is not None:
                await asyncio.shield(before)
            if reads_shared_memory(work):
                load = functools.partial(load_arguments, self._runtime, work)
                loop = asyncio.get_running_loop()
                arguments = await loop.run_in_executor(self._loaders, load)
        except asyncio.CancelledError:
            if before is None or before.done():
                begin()
            else:  # those behind this one still wait for those before it
                before.add_done_callback(lambda _before: begin())
            self.answer_error(work, TaskCancelledError(work.name))
            return
        except Exception as error:  # noqa: BLE001 - it is the call's result
            begin()
            self.answer_error(work, error)
            return
        # The calls behind this one are tasks: they go on after this has run up to its first wait.
        begin()
        await self._execute(work, arguments)

    async def _execute(self, work: Work, arguments: _Arguments | None = None) -> None:
        if work.cancelled:
            self.answer_error(work, TaskCancelledError(work.name))
            return
        context.execution.set(self.execution_of(work))
        work.begin()
        try:
            result = self._invoke(work, arguments)
            arguments = None
            if inspect.isawaitable(result):
                result = await result
            if work.stream is not None:
                await self._stream(work, result)
                result = None
            else:
                result = self.read(work, result)
            self.answer(work, result)
        except (ActorExit, SystemExit) as error:
            self._end(error)
        except asyncio.CancelledError:
            self.answer_error(work, TaskCancelledError(work.name))
            self.cancel_children(work)
        except BaseException as error:  # noqa: BLE001 - it is the call's result
            self.answer_error(work, error)
            self.cancel_children(work)

    def _invoke(self, work: Work, arguments: _Arguments | None = None) -> Any:
        args, kwargs = arguments or load_arguments(self._runtime, work)
        return self.method(work.target)(*args, **kwargs)

    async def _stream(self, work: Work, items: Any) -> None:
        if not hasattr(items, "__aiter__"):
            self._run_stream(work, items)
            return
        index = 0
        work.consumed_changed = _LoopEvent(asyncio.get_running_loop())
        try:
            async for item in items:
                if work.consumed == -1:
                    return
                self._send_item(work, index, item)
                del item  # before the next one is made
                index += 1
                limit = work.stream
                while limit is not None and 0 <= limit <= index - work.consumed:
                    if work.consumed == -1:
                        break
                    await work.consumed_changed.wait()
        finally:
            close = getattr(items, "aclose", None)
            if close is not None:
                await close()

    def _cancel_task(self, work: Work) -> None:
        key = _key(work)
        task = self._tasks.get(key)
        if task is not None:
            task.cancel()
            return
        for waiting in self._waiting.values():  # its turn may never come
            if waiting.pop(key, None) is not None:
                self.answer_error(work, TaskCancelledError(work.name))
                self._flush_soon()
                return

    def block(self, wait: Callable[[float | None], bool], timeout: float | None) -> bool:
        """A blocking get() in a coroutine works, and stops all others meanwhile."""
        if not self._warned and context.execution.get() is not None:
            self._warned = True
            import warnings

            warnings.warn(
                "miniray.get() or wait() blocks the event loop of this asyncio actor: no other "
                "method runs meanwhile. Use `await ref` instead.",
                RuntimeWarning,
                stacklevel=5,
            )
        return wait(timeout)


def _key(work: Work) -> tuple[bytes, int]:
    return work.caller.process_id, work.number


class _LoopEvent:
    """An event of the loop that the I/O thread sets."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._event = asyncio.Event()

    def set(self) -> None:
        self._loop.call_soon_threadsafe(self._event.set)

    async def wait(self) -> None:
        await self._event.wait()
        self._event.clear()
