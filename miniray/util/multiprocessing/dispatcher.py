"""Runs the calls of a ``Pool``: shares them out among actors, which run them batch by batch.

A process has one batch at a time and gets the next when that is back, so that uneven calls even
out. A call that finds a process idle is sent at once, from the thread that makes it; waiting calls
go together, or ahead to a busy process, if earlier ones were short.
"""

from __future__ import annotations

import collections
import dataclasses
import functools
import logging
import math
import queue
import threading
import time
from multiprocessing.pool import ExceptionWithTraceback  # type: ignore[attr-defined]
from typing import TYPE_CHECKING, Any

from miniray import api
from miniray.common.runtime import current_runtime
from miniray.exceptions import ActorError, TaskCancelledError
from miniray.wire.interrupts import uncut

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from miniray.common.object_ref import ObjectRef

logger = logging.getLogger(__name__)

#: Seconds that it takes about to send a batch and to take it in: less work is not shared out...
_WORTH_SENDING = 0.0002
#: ... where this many units wait for each process. With fewer, one that takes longer than those
#: before would hold up too many.
_MANY = 4
#: Seconds for which the thread stays when no call is in flight.
_LINGER = 1.0
#: Functions whose times are remembered.
_FUNCTIONS = 1000
#: How a unit calls its function: ``APPLY`` with its only element, which is (args, kwargs), ``MAP``
#: with each, ``STARMAP`` with the arguments in each. Numbers, as they pickle quickly.
APPLY, MAP, STARMAP = range(3)

#: Seconds that a batch of several units should take at most: others could run those behind a long
#: one.
TOGETHER = 0.01

#: A function, how to call it, and its elements.
Work = tuple["Callable[..., Any]", int, "Sequence[Any]"]
#: What came of a unit: the results of its calls, and whether one of them is ``Failed``.
Outcome = tuple[list[Any], bool]


@dataclasses.dataclass(slots=True, eq=False)
class Unit:
    """Calls that stay together: one ``apply``, or a chunk of a ``map``."""

    #: What is called.
    func: Callable[..., Any]
    #: How an element becomes arguments.
    how: int
    #: One for each call.
    elements: Sequence[Any]
    #: Called with its outcome, in the dispatcher's thread.
    deliver: Callable[[Outcome], None]
    #: It was in a batch that could not be pickled.
    alone: bool = dataclasses.field(default=False, init=False)

    @property
    def work(self) -> Work:
        """What a process runs."""
        return self.func, self.how, self.elements

    def fail(self, error: BaseException) -> Outcome:
        """Return an outcome in which every call has failed."""
        return [Failed(error)] * len(self.elements), True


@dataclasses.dataclass(slots=True, eq=False)
class _Process:
    """An actor of the pool and the batches that it was sent."""

    actor: Any
    #: Units until it is replaced; None is no limit.
    left: int | None
    batches: list[_Batch] = dataclasses.field(default_factory=list)


@dataclasses.dataclass(slots=True, eq=False)
class _Batch:
    """Units that were sent together to a process."""

    process: _Process
    units: list[Unit]
    #: Whether earlier calls show that they take less than ``TOGETHER``.
    short: bool
    #: What came of it; an error if it could not be sent.
    ref: ObjectRef[Any] | Exception | None = None


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
        #: Processes with one batch that is expected to be short.
        self._short: collections.deque[_Process] = collections.deque()
        self._finished: queue.SimpleQueue[_Batch] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        #: Seconds that a call takes, by function.
        self._seconds: dict[str, float] = {}
        self._closed = False
        #: Why there are no processes, and never will be.
        self._gone: Exception | None = None
        self._ending: list[ObjectRef[Any]] = []
        self._idle.extend(_Process(start(), limit) for _ in range(processes))
        api.get([process.actor.ping.remote() for process in self._idle])

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
        """Return how many calls of a function take this time; 0 if that is not known."""
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
        """Take no more; processes end when no call waits."""
        with self._lock:
            self._closed = True
            idle = list(self._idle)
            self._idle.clear()
        for process in idle:
            self._end(process)

    def terminate(self) -> None:
        """Take no more calls and end all processes: unfinished calls fail."""
        self._drop(TaskCancelledError("a call of a pool that was ended"))
        with self._lock:
            actors = [process.actor for process in (*self._idle, *self._busy)]
        self.close()
        for actor in actors:
            if actor is not None:
                api.kill(actor)

    def join(self) -> None:
        """Wait until all has been delivered and the processes of a closed pool have ended."""
        with self._settled:
            self._settled.wait_for(lambda: not self._under_way)
        if self._ending:
            api.wait(self._ending, num_returns=len(self._ending))

    # --- sending -------------------------------------------------------------------
    def _pump(self) -> None:
        """Send what waits to the processes that can take it."""
        while True:
            with self._lock:
                process = self._available() if self._waiting else None
                if process is None:
                    return
                batch = self._take(process)
                process.batches.append(batch)
                self._busy.add(process)
                if len(process.batches) == 1 and batch.short and process.left is None:
                    self._short.append(process)
                if self._thread is None:
                    self._thread = threading.Thread(
                        target=self._run, daemon=True, name="pool-results"
                    )
                    self._thread.start()
            self._send(batch)

    def _available(self) -> _Process | None:
        """Return an idle process, or one that will be idle soon; None if there is none."""
        if self._idle:
            return self._idle.pop()  # the last one is awake
        if self._short and self._seconds_of(self._waiting[0]) < TOGETHER:
            return self._short.popleft()
        return None

    def _seconds_of(self, unit: Unit) -> float:
        """Return how long a unit should take."""
        return self._seconds.get(_name(unit.func), math.inf) * len(unit.elements)

    def _take(self, process: _Process) -> _Batch:
        """Return the next batch: of one function, and at most a fair share of the waiting units."""
        waiting = self._waiting
        share = -(-len(waiting) // self._processes)
        least = _WORTH_SENDING if share >= _MANY else 0.0
        first = waiting.popleft()
        units = [first]
        seconds = self._seconds_of(first)
        while waiting and len(units) != process.left and not first.alone:
            unit = waiting[0]
            more = seconds + self._seconds_of(unit)
            if more > (TOGETHER if len(units) < share else least):
                break
            if unit.alone or (
                unit.func is not first.func and _name(unit.func) != _name(first.func)
            ):
                break
            seconds = more
            units.append(waiting.popleft())
        return _Batch(process, units, seconds < TOGETHER)

    def _send(self, batch: _Batch) -> None:
        try:
            ref = batch.process.actor.run.remote(id(batch), *[unit.work for unit in batch.units])
        except Exception as error:  # noqa: BLE001 - of the calls: they cannot be pickled
            batch.ref = error
            self._finished.put(batch)
            return
        batch.ref = ref
        current_runtime().objects.when_done(ref, functools.partial(self._finished.put, batch))

    # --- in a thread of its own ------------------------------------------------------
    def _run(self) -> None:
        while True:
            try:
                batch = self._finished.get(timeout=None if self._busy else _LINGER)
            except queue.Empty:
                with self._lock:
                    if not self._busy:
                        self._thread = None
                        return
                continue
            found = self._take_in(batch)
            self._free(batch)
            self._pump()
            for unit, outcome in found:
                self._deliver(unit, outcome)
            del found, batch  # not when the next one comes

    def _take_in(self, batch: _Batch) -> list[tuple[Unit, Outcome]]:
        """Return the outcomes of a batch."""
        units, ref = batch.units, batch.ref
        try:
            if isinstance(ref, Exception):
                raise ref
            assert ref is not None
            outcomes, seconds = api.get(ref)
        except ActorError as error:
            batch.process.actor = None
            return [(unit, unit.fail(error)) for unit in units]
        except Exception as error:  # noqa: BLE001 - it is that of a call
            if len(units) == 1:
                return [(units[0], units[0].fail(error))]
            if ref is error:
                for unit in units:  # one of them cannot be pickled
                    unit.alone = True
                self._put_back(units, 0)
                return []
            return self._one_by_one(batch)
        self._put_back(units, len(outcomes))
        self._learn(units, seconds)
        return list(zip(units, outcomes, strict=True))

    def _put_back(self, units: list[Unit], first: int) -> None:
        """Put the units of a batch that have not run back, from this one on."""
        if first < len(units):
            with self._lock:
                self._waiting.extendleft(reversed(units[first:]))
            del units[first:]

    def _one_by_one(self, batch: _Batch) -> list[tuple[Unit, Outcome]]:
        """Return the outcomes of a batch in which one cannot be pickled or read."""
        found: list[tuple[Unit, Outcome]] = []
        units = batch.units
        for index, unit in enumerate(list(units)):
            try:
                outcome = api.get(batch.process.actor.outcome.remote(id(batch), index))
            except Exception as error:  # noqa: BLE001 - it is that of the call
                outcome = unit.fail(error)
            if outcome is None:
                self._put_back(units, index)
                break
            found.append((unit, outcome))
        return found

    def _learn(self, units: Sequence[Unit], seconds: float) -> None:
        """Remember how long a call takes: at once if it takes longer than it did."""
        known, name = self._seconds, _name(units[0].func)
        found = seconds / sum(len(unit.elements) for unit in units)
        before = known.pop(name, found)
        known[name] = max(found, (found + before) / 2)
        if len(known) > _FUNCTIONS:
            del known[next(iter(known))]

    def _free(self, batch: _Batch) -> None:
        """Let a process that has run a batch take the next, or start another in its place."""
        process = batch.process
        with self._lock:
            process.batches.remove(batch)
            if process in self._short:
                self._short.remove(process)
            if process.batches:
                if process.actor is not None and process.batches[0].short:
                    self._short.append(process)
                return
        if process.left is not None:
            process.left -= len(batch.units)
            if not process.left and process.actor is not None:
                self._end(process)
                process.actor = None
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
        """Fail all waiting and later units: no process runs them."""
        with self._lock:
            self._gone = why
            dropped = list(self._waiting)
            self._waiting.clear()
        for unit in dropped:
            self._deliver(unit, unit.fail(why))

    def _end(self, process: _Process) -> None:
        end = process.actor.__ray_terminate__.remote()
        with self._lock:
            if self._ending:  # many, where processes are replaced
                count = len(self._ending)
                _, self._ending = api.wait(self._ending, num_returns=count, timeout=0)
            self._ending.append(end)

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
    """Return a name for functions whose calls take about as long."""
    while isinstance(func, functools.partial):
        func = func.func
    named = func if hasattr(func, "__qualname__") else type(func)
    return f"{named.__module__}.{named.__qualname__}"


# --- in the processes -------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Failed:
    """Stands for the result of a call that raised."""

    error: BaseException  # in the process that raised it the standard library's wrapper of that


class PoolActor:
    """One process of a pool."""

    def __init__(self, initializer: Callable[..., Any] | None, initargs: Sequence[Any]) -> None:
        #: What came of the last two batches: the second is sent before the first is read.
        self._kept: collections.deque[tuple[int, list[Outcome]]] = collections.deque(maxlen=2)
        if initializer is not None:
            initializer(*initargs)

    def ping(self) -> None:
        """Answer once the process is ready."""

    def run(self, number: int, *units: Work) -> tuple[list[Outcome], float]:
        """Run units one after the other, as many as end within ``TOGETHER``, and at least one.

        Returns:
            What came of each, and how many seconds all of them took.
        """
        began = time.perf_counter()
        outcomes: list[Outcome] = []
        seconds = 0.0
        for unit in units:
            outcomes.append(_run(*unit))
            seconds = time.perf_counter() - began
            if seconds > TOGETHER:  # the others are shared out again
                break
        self._kept.append((number, outcomes if len(units) > 1 else []))
        return outcomes, seconds

    def outcome(self, number: int, index: int) -> Outcome | None:
        """Return the outcome of one unit of a batch, if all together cannot be pickled or read.

        None if it did not run.
        """
        outcomes = dict(self._kept)[number]
        return outcomes[index] if index < len(outcomes) else None


def _run(func: Callable[..., Any], how: int, elements: Iterable[Any]) -> Outcome:
    """Call a function with each element; an error takes its result's place."""
    results: list[Any] = []
    add = results.append
    failed = False
    left = iter(elements)
    while True:
        try:
            if how == MAP:
                for element in left:
                    add(func(element))
            elif how == STARMAP:
                for element in left:
                    add(func(*element))
            else:
                for args, kwargs in left:
                    add(func(*args, **kwargs))
        except Exception as error:  # noqa: BLE001, PERF203 - the caller's, who raises it; once per error
            add(Failed(ExceptionWithTraceback(error, error.__traceback__)))
            failed = True
        else:
            return results, failed
