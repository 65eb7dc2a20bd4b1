"""Shares the calls of a ``Pool`` out among its processes and takes in what comes of them.

A process has one batch at a time and gets the next when that is back, so that uneven calls even
out. A call that finds a process idle is sent at once, from the thread that makes it; what waits
goes together, as far as such calls are known to be short.
"""

from __future__ import annotations

import collections
import functools
import logging
import queue
import threading
from typing import TYPE_CHECKING, Any

import miniray
from miniray.core.interrupts import uncut
from miniray.core.runtime import current_runtime
from miniray.exceptions import ActorError, TaskCancelledError
from miniray.util.multiprocessing.worker import Failed, Outcome

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from miniray.object_ref import ObjectRef
    from miniray.util.multiprocessing.worker import How, Work

logger = logging.getLogger(__name__)

#: Seconds that the calls of a batch should take at most, if it has more than one unit: those
#: behind a call wait for it.
TOGETHER = 0.01
#: Seconds that it takes about to send a batch and to take it in.
_WORTH_SENDING = 0.0002
#: Seconds for which the thread stays when nothing is under way.
_LINGER = 1.0
#: Functions whose times are remembered.
_FUNCTIONS = 1000


class Unit:
    """Calls that stay together: one ``apply``, or a chunk of a ``map``.

    Args:
        func: What is called.
        how: With what of each element.
        elements: One for each call.
        deliver: Called with what came of it, in the dispatcher's thread.
        joins: Whether it goes with others, though a process is idle, if all of them together are
            not worth sending.
    """

    __slots__ = ("alone", "deliver", "elements", "func", "how", "joins")

    def __init__(
        self,
        func: Callable[..., Any],
        how: How,
        elements: Sequence[Any],
        deliver: Callable[[Outcome], None],
        joins: bool,
    ) -> None:
        self.func = func
        self.how = how
        self.elements = elements
        self.deliver = deliver
        self.joins = joins
        #: It was in a batch that could not be pickled.
        self.alone = False

    @property
    def work(self) -> Work:
        """What a process runs."""
        return self.func, self.how, self.elements

    def fail(self, error: BaseException) -> Outcome:
        """What came of it if none of its calls ran to its end."""
        return Outcome([Failed(error)] * len(self.elements), failed=True)


class _Process:
    """An actor of the pool and what it runs."""

    __slots__ = ("actor", "batch", "left", "ref")

    def __init__(self, actor: Any, left: int | None) -> None:
        self.actor = actor
        #: Units until it is replaced; None is no limit.
        self.left = left
        self.batch: list[Unit] = []
        #: What came of the batch; an error if it could not be sent.
        self.ref: ObjectRef[Any] | Exception | None = None


class Dispatcher:
    """The processes of a pool and the units that wait for one. Thread-safe.

    Args:
        start: Starts a process.
        processes: How many.
        limit: Units after which a process is replaced; None is no limit.
    """

    def __init__(self, start: Callable[[], Any], processes: int, limit: int | None) -> None:
        self._start = start
        self._processes = processes
        self._limit = limit
        # Reentrant: a garbage collection in here may end an iterator or a pool.
        self._lock = threading.RLock()
        self._settled = threading.Condition(self._lock)
        self._waiting: collections.deque[Unit] = collections.deque()
        self._idle: list[_Process] = []
        self._busy: set[_Process] = set()
        #: Units that were put and not delivered.
        self._under_way = 0
        self._finished: queue.SimpleQueue[_Process] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        #: Seconds that a call takes, by function.
        self._seconds: dict[str, float] = {}
        self._closed = False
        #: Why there are no processes, and never will be.
        self._gone: Exception | None = None
        self._ending: list[ObjectRef[Any]] = []
        self._idle.extend(_Process(start(), limit) for _ in range(processes))
        miniray.get([process.actor.ping.remote() for process in self._idle])

    @uncut  # a process that has a batch which was not sent would be waited for
    def put(self, units: Iterable[Unit]) -> None:
        """Run units, in this order as far as there are processes for them."""
        with self._lock:
            before = len(self._waiting)
            self._waiting.extend(units)
            self._under_way += len(self._waiting) - before
        if self._gone is None:
            self._pump()
        else:
            self._drop(self._gone)

    def calls_within(self, func: Callable[..., Any], seconds: float) -> int:
        """How many calls of a function a process makes in this time; 0 if that is not known."""
        call = self._seconds.get(_name(func))
        return 0 if call is None else int(seconds / (call + 1e-9))

    @property
    def closed(self) -> bool:
        """Whether it takes no more."""
        return self._closed

    def check_open(self) -> None:
        """Raise ValueError if the pool is closed."""
        if self._closed:
            raise ValueError("Pool not running")

    def close(self) -> None:
        """Take no more; processes end when nothing waits."""
        with self._lock:
            self._closed = True
            idle = list(self._idle)
            self._idle.clear()
        for process in idle:
            self._end(process)

    def terminate(self) -> None:
        """Take no more and end all processes: what has not come back fails."""
        self._drop(TaskCancelledError("a call of a pool that was ended"))
        with self._lock:
            actors = [process.actor for process in (*self._idle, *self._busy)]
        self.close()
        for actor in actors:
            if actor is not None:
                miniray.kill(actor)

    def join(self) -> None:
        """Wait until all has been delivered and the processes of a closed pool have ended."""
        with self._settled:
            self._settled.wait_for(lambda: not self._under_way)
        if self._ending:
            miniray.wait(self._ending, num_returns=len(self._ending))

    # --- sending -------------------------------------------------------------------
    def _pump(self) -> None:
        """Send what waits to the processes that are idle."""
        while True:
            with self._lock:
                if not self._waiting or not self._idle:
                    return
                process = self._idle.pop()  # the last one is awake
                process.batch = self._take(process.left)
                self._busy.add(process)
                if self._thread is None:
                    self._thread = threading.Thread(
                        target=self._run, daemon=True, name="pool-results"
                    )
                    self._thread.start()
            self._send(process)

    def _take(self, most: int | None) -> list[Unit]:
        """The next batch: of one function, and no more than a fair share of what waits."""
        waiting = self._waiting
        share = -(-len(waiting) // self._processes)
        first = waiting.popleft()
        batch = [first]
        name = _name(first.func)
        call = self._seconds.get(name)
        if call is None or first.alone:
            return batch
        seconds = call * len(first.elements)
        while waiting and len(batch) != most:
            unit = waiting[0]
            seconds += call * len(unit.elements)
            if seconds > (TOGETHER if len(batch) < share else _WORTH_SENDING * unit.joins):
                break
            if unit.alone or (unit.func is not first.func and _name(unit.func) != name):
                break
            batch.append(waiting.popleft())
        return batch

    def _send(self, process: _Process) -> None:
        try:
            ref = process.actor.run.remote(*[unit.work for unit in process.batch])
        except Exception as error:  # noqa: BLE001 - of the calls: they cannot be pickled
            process.ref = error
            self._finished.put(process)
            return
        process.ref = ref
        current_runtime().when_done(ref, functools.partial(self._finished.put, process))

    # --- in a thread of its own ------------------------------------------------------
    def _run(self) -> None:
        while True:
            try:
                process = self._finished.get(timeout=None if self._busy else _LINGER)
            except queue.Empty:
                with self._lock:
                    if not self._busy:
                        self._thread = None
                        return
                continue
            found = self._take_in(process)
            self._free(process)
            self._pump()
            for unit, outcome in found:
                self._deliver(unit, outcome)
            found.clear()  # not when the next ones come

    def _take_in(self, process: _Process) -> list[tuple[Unit, Outcome]]:
        """What came of the batch of a process."""
        batch, ref = process.batch, process.ref
        try:
            if isinstance(ref, Exception):
                raise ref
            assert ref is not None
            outcomes, seconds = miniray.get(ref)
        except ActorError as error:
            process.actor = None
            return [(unit, unit.fail(error)) for unit in batch]
        except Exception as error:  # noqa: BLE001 - it is that of a call
            if len(batch) == 1:
                return [(batch[0], batch[0].fail(error))]
            if ref is error:
                self._put_back(batch)
                return []
            return [
                (unit, self._outcome_of(process, unit, index)) for index, unit in enumerate(batch)
            ]
        self._learn(batch, seconds)
        return list(zip(batch, outcomes, strict=True))

    def _put_back(self, batch: Sequence[Unit]) -> None:
        """Something in a batch cannot be pickled: send its units one by one."""
        for unit in batch:
            unit.alone = True
        with self._lock:
            self._waiting.extendleft(reversed(batch))

    @staticmethod
    def _outcome_of(process: _Process, unit: Unit, index: int) -> Outcome:
        """What came of one unit of a batch, since something in the others cannot be read."""
        try:
            outcome: Outcome = miniray.get(process.actor.outcome.remote(index))
        except Exception as error:  # noqa: BLE001 - it is that of the call
            return unit.fail(error)
        return outcome

    def _learn(self, batch: Sequence[Unit], seconds: float) -> None:
        """Remember how long a call takes: at once if it takes longer than it did."""
        known, name = self._seconds, _name(batch[0].func)
        found = seconds / sum(len(unit.elements) for unit in batch)
        before = known.pop(name, found)
        known[name] = max(found, (found + before) / 2)
        if len(known) > _FUNCTIONS:
            del known[next(iter(known))]

    def _free(self, process: _Process) -> None:
        """A process has no batch any more: it takes the next, or its place another one."""
        if process.left is not None:
            process.left -= len(process.batch)
            if not process.left and process.actor is not None:
                self._end(process)
                process.actor = None
        process.batch, process.ref = [], None
        if process.actor is None and (self._waiting or not self._closed):
            try:
                process.actor, process.left = self._start(), self._limit
            except Exception as error:  # noqa: BLE001 - that of all calls: the cluster has ended
                self._closed = True
                self._drop(error)
        with self._lock:
            self._busy.discard(process)
            if process.actor is None:
                return
            if self._waiting or not self._closed:
                self._idle.append(process)
                return
        self._end(process)

    def _drop(self, why: Exception) -> None:
        """No process runs what waits, or what comes."""
        with self._lock:
            self._gone = why
            dropped = list(self._waiting)
            self._waiting.clear()
        for unit in dropped:
            self._deliver(unit, unit.fail(why))

    def _end(self, process: _Process) -> None:
        self._ending.append(process.actor.__ray_terminate__.remote())

    def _deliver(self, unit: Unit, outcome: Outcome) -> None:
        try:
            unit.deliver(outcome)
        except Exception:
            logger.exception("delivering what a pool has run failed")
        with self._settled:
            self._under_way -= 1
            if not self._under_way:
                self._settled.notify_all()


def _name(func: Callable[..., Any]) -> str:
    """Tells functions apart whose calls take about as long."""
    while isinstance(func, functools.partial):
        func = func.func
    named = func if hasattr(func, "__qualname__") else type(func)
    return f"{named.__module__}.{named.__qualname__}"
