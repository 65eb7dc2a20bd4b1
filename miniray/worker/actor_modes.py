"""Executors of actors that run several methods at once: threads, groups, asyncio."""

from __future__ import annotations

import asyncio
import concurrent.futures
import inspect
import queue
import threading
import time
from typing import TYPE_CHECKING, Any

from miniray.calls import context
from miniray.common.names import user_stacklevel
from miniray.exceptions import TaskCancelledError
from miniray.messages.value import ActorExit
from miniray.wire.poller import Pace, PacedSelector, run_in_loop
from miniray.worker.call_loop import CallLoop, call_in
from miniray.worker.executor import Executor
from miniray.worker.work import DEFAULT_GROUP, load_arguments, unknown_group

if TYPE_CHECKING:
    import selectors
    from collections.abc import Callable, Coroutine

    from miniray.client.cluster_runtime import ClusterRuntime
    from miniray.common.specs import ActorSpec
    from miniray.objects.waiting import Wait
    from miniray.wire.io_loop import IOLoop
    from miniray.worker.call_loop import Loaded
    from miniray.worker.work import Work

#: Ray's default for asyncio actors.
ASYNC_CONCURRENCY = 1000
#: Calls of an asyncio actor whose arguments are waited for at the same time.
_LOADERS = 32


class ThreadedExecutor(Executor):
    """Methods run in threads: ``max_concurrency`` of them, and a number per group."""

    def __init__(
        self,
        runtime: ClusterRuntime,
        end: Callable[[BaseException | None], None],
        actor: ActorSpec,
    ) -> None:
        super().__init__(runtime, end, actor)
        self._queues: dict[str, queue.SimpleQueue[Work | None]] = {}
        self._sizes = {DEFAULT_GROUP: actor.max_concurrency or 1, **actor.concurrency_groups}
        self._group_of = actor.method_groups
        #: Calls that no thread has taken: the thread that takes one out of here answers it.
        self._unbegun: dict[tuple[bytes, int], Work] = {}

    def enqueue(self, work: Work) -> None:
        self._unbegun[work.key] = work
        self._queue.put(work)

    def begin(self, instance: Any) -> None:
        super().begin(instance)
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
            if work is None or self.is_ending():
                return
            group = work.group or self._group_of.get(work.target, DEFAULT_GROUP)
            target = self._queues.get(group)
            if target is not None:
                target.put(work)
            elif self._unbegun.pop(work.key, None) is not None:
                self.replies.answer_error(work, unknown_group(work, self._sizes))

    def _serve(self, mine: queue.SimpleQueue[Work | None]) -> None:
        while True:
            work = mine.get()
            if work is None or self.is_ending():
                return
            if self._unbegun.pop(work.key, None) is not None:
                self.execute_in_thread(work)

    def execute_in_thread(self, work: Work) -> None:
        if work.execution.cancelled:
            self.replies.answer_error(work, TaskCancelledError(work.name))
            return
        token = context.execution.set(work.execution)
        work.started = time.perf_counter()
        try:
            result = self._invoke(work)
            self.replies.answer(work, self.read(work, result))
        except (ActorExit, SystemExit) as error:
            self.leave(error)
        except BaseException as error:  # noqa: BLE001 - it is the call's result
            self.replies.answer_error(work, error)
            self.replies.cancel_children(work)
        finally:
            self._runtime.loop.flush_posted()
            context.execution.reset(token)

    def _invoke(self, work: Work) -> Any:
        args, kwargs = load_arguments(self._runtime, work)
        return self.method(work.target)(*args, **kwargs)

    def interrupt(self, work: Work, force: bool) -> None:
        """Cancel what a method has started: its thread cannot be interrupted (as in Ray).

        What it has started is cancelled, so if it waits for that, its ``get`` raises.
        """
        if self._unbegun.pop(work.key, None) is not None:
            self.replies.answer_error(work, TaskCancelledError(work.name))
        else:
            self.replies.cancel_children(work)


class ServingSelector(PacedSelector):
    """Takes the sockets over from the I/O thread while the event loop waits.

    A call then needs no switch between threads. A coroutine that keeps the event loop busy
    leaves them to the I/O thread.
    """

    def __init__(self, io: IOLoop) -> None:
        super().__init__(Pace())
        self._io = io

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        if timeout is not None and timeout <= 0:
            return super().select(timeout)
        self._io.watch(False)
        try:
            return super().select(timeout)
        finally:
            self._io.watch(True)


def serving_loop(io: IOLoop) -> asyncio.AbstractEventLoop:
    """Make an event loop that handles what comes over the sockets of ``io``."""
    loop = asyncio.SelectorEventLoop(ServingSelector(io))
    loop.add_reader(io.lend(), io.serve_once)
    return loop


class AsyncExecutor(Executor):
    """Methods are coroutines of event loops.

    The constructor and the methods without a group have one in the main thread, each concurrency
    group has one in a thread of its own: a method that blocks holds up its group and no other.
    """

    def __init__(
        self,
        runtime: ClusterRuntime,
        end: Callable[[BaseException | None], None],
        actor: ActorSpec,
    ) -> None:
        super().__init__(runtime, end, actor)
        limit = ASYNC_CONCURRENCY if actor.max_concurrency is None else actor.max_concurrency
        #: Threads that wait for arguments, apart from those of user code, which may be what gives
        #: back the memory that the arguments wait for.
        loaders = concurrent.futures.ThreadPoolExecutor(
            _LOADERS, thread_name_prefix="miniray-arguments"
        )
        self._calls = {
            name: CallLoop(runtime, self._execute, self.replies.answer_error, size, loaders)
            for name, size in {DEFAULT_GROUP: limit, **actor.concurrency_groups}.items()
        }
        self._group_of = actor.method_groups
        self._main_loop: asyncio.AbstractEventLoop | None = None
        self._stopped: asyncio.Event | None = None
        self._warned = False

    # --- from whichever thread reads the sockets ------------------------------------
    def enqueue(self, work: Work) -> None:
        calls = self._calls_of(work)
        if calls is None:
            self.replies.answer_error(work, unknown_group(work, self._calls))
        else:
            calls.put(work)

    def _calls_of(self, work: Work) -> CallLoop | None:
        return self._calls.get(work.group or self._group_of.get(work.target, DEFAULT_GROUP))

    def interrupt(self, work: Work, force: bool) -> None:
        calls = self._calls_of(work)
        if calls is not None:
            calls.cancel(work)

    # --- in the main thread ------------------------------------------------------------
    def serve(self, create: Callable[[], Coroutine[Any, Any, bool]]) -> None:
        run_in_loop(self._main(create), lambda: serving_loop(self._runtime.loop))

    async def _main(self, create: Callable[[], Coroutine[Any, Any, bool]]) -> None:
        self._stopped = asyncio.Event()
        self._main_loop = asyncio.get_running_loop()
        if not await create():
            return
        for name, calls in self._calls.items():
            if name == DEFAULT_GROUP:
                calls.begin()
            else:
                threading.Thread(
                    target=asyncio.run, args=(calls.serve(),), name=name, daemon=True
                ).start()
        await self._stopped.wait()
        for calls in self._calls.values():
            calls.end()

    def stop(self) -> None:
        loop = self._main_loop
        if loop is not None and self._stopped is not None:
            call_in(loop, self._stopped.set)

    # --- in the event loop of a group --------------------------------------------------
    async def _execute(self, work: Work, arguments: Loaded | None = None) -> None:
        if self.is_ending():
            return
        if work.execution.cancelled:
            self.replies.answer_error(work, TaskCancelledError(work.name))
            return
        context.execution.set(work.execution)
        work.started = time.perf_counter()
        try:
            result = self._invoke(work, arguments)
            arguments = None
            if inspect.isawaitable(result):
                result = await result
            if work.stream is not None:
                await self._stream(work, result)
                result = None
            else:
                if work.again and hasattr(result, "__aiter__"):
                    result = iter([item async for item in result])
                result = self.read(work, result)
            self.replies.answer(work, result)
        except (ActorExit, SystemExit) as error:
            self.leave(error)
        except asyncio.CancelledError as error:
            if (
                work.execution.cancelled or not self.is_ending()
            ):  # else the loop ends with the actor
                where = error.__traceback__
                self.replies.answer_error(work, TaskCancelledError(work.name).with_traceback(where))
                self.replies.cancel_children(work)
        except BaseException as error:  # noqa: BLE001 - it is the call's result
            self.replies.answer_error(work, error)
            self.replies.cancel_children(work)

    def _invoke(self, work: Work, arguments: Loaded | None = None) -> Any:
        if isinstance(arguments, BaseException):
            raise arguments
        args, kwargs = arguments or load_arguments(self._runtime, work)
        return self.method(work.target)(*args, **kwargs)

    async def _stream(self, work: Work, items: Any) -> None:
        if not hasattr(items, "__aiter__"):
            self.generators.stream(work, items)
            return
        index = 0
        work.consumed_changed = _LoopEvent(asyncio.get_running_loop())
        try:
            async for item in items:
                if work.consumed == -1:
                    return
                self.generators.send(work, index, item)
                del item  # before the next one is made
                index += 1
                while not self.generators.may_go_on(work, index):
                    await work.consumed_changed.wait()
        finally:
            close = getattr(items, "aclose", None)
            if close is not None:
                await close()

    def block(self, wait: Wait, timeout: float | None) -> bool:
        """Wait in ``get()`` or ``wait()``, which stops all other coroutines meanwhile."""
        if self.instance is None:  # the constructor: there are no others
            return super().block(wait, timeout)
        if not self._warned and context.execution.get() is not None:
            self._warned = True
            import warnings

            warnings.warn(
                "miniray.get() or wait() blocks the event loop of this asyncio actor: no other "
                "method runs meanwhile. Use `await ref` instead.",
                RuntimeWarning,
                stacklevel=user_stacklevel(),
            )
        return wait(timeout)


class _LoopEvent:
    """An event of an asyncio loop that other threads set."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._event = asyncio.Event()

    def set(self) -> None:
        call_in(self._loop, self._event.set)

    async def wait(self) -> None:
        await self._event.wait()
        self._event.clear()


def executor_of(
    actor: ActorSpec, runtime: ClusterRuntime, end: Callable[[BaseException | None], None]
) -> Executor:
    """Make the executor of an actor's mode; ``end`` ends this process."""
    if actor.is_async:
        return AsyncExecutor(runtime, end, actor)
    if (actor.max_concurrency or 1) > 1 or actor.concurrency_groups:
        return ThreadedExecutor(runtime, end, actor)
    return Executor(runtime, end, actor)
