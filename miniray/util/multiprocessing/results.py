"""What a ``Pool`` hands out: ``AsyncResult`` and the iterators of ``imap``.

They wait for units and unfold them; which process runs what is the dispatcher's.
"""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import functools
import itertools
import logging
import queue
import threading
import time
from multiprocessing import TimeoutError as PoolTimeoutError
from typing import TYPE_CHECKING, Any

from miniray.util.multiprocessing.dispatcher import Failed

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

    from miniray.util.multiprocessing.dispatcher import Outcome, Unit

logger = logging.getLogger(__name__)

#: Chunks for each process whose results are waited for at most, before any have been taken.
_KEPT = 4


@dataclasses.dataclass(eq=False, repr=False)
class AsyncResult:
    """The result of ``apply_async``, ``map_async`` or ``starmap_async``.

    Made by the pool.
    """

    units: dataclasses.InitVar[int]
    _single: bool
    _callback: Callable[[Any], Any] | None
    _error_callback: Callable[[BaseException], Any] | None
    _error: BaseException | None = dataclasses.field(default=None, init=False)
    _done: bool = dataclasses.field(default=False, init=False)
    _value: Any = dataclasses.field(default=None, init=False)

    def __post_init__(self, units: int) -> None:
        self._outcomes: list[Outcome | None] = [None] * units
        self._missing = units
        #: Held until it is done: an Event takes longer to make than all the rest of a call.
        self._latch = threading.Lock()
        self._latch.acquire()
        if not units:
            self._finish()

    def wait(self, timeout: float | None = None) -> None:
        """Wait until all calls have finished, or for ``timeout`` seconds."""
        if not self._done and self._latch.acquire(
            timeout=-1 if timeout is None else max(timeout, 0)
        ):
            self._latch.release()  # for the next that waits

    def get(self, timeout: float | None = None) -> Any:
        """Return the result, or the list of results.

        Args:
            timeout: Seconds to wait at most; None waits for ever.

        Raises:
            multiprocessing.TimeoutError: it is not there in time.
            Exception: That of the first failed call.
        """
        self.wait(timeout)
        if not self._done:
            raise PoolTimeoutError(f"no result within {timeout} s")
        if self._error is not None:
            raise self._error
        return self._value

    def ready(self) -> bool:
        """Return whether all calls have finished."""
        return self._done

    def successful(self) -> bool:
        """Return whether no call failed.

        Raises:
            ValueError: not all calls have finished.
        """
        if not self.ready():
            raise ValueError(f"{self!r} not ready")
        return self._error is None

    def deliver(self, index: int, outcome: Outcome) -> None:
        """Take in the outcome of a unit (called by the dispatcher)."""
        self._outcomes[index] = outcome
        self._missing -= 1
        if self._missing == 0:
            self._finish()

    def _finish(self) -> None:
        outcomes = [outcome for outcome in self._outcomes if outcome is not None]
        self._outcomes.clear()
        failures = (r for found, bad in outcomes if bad for r in found if isinstance(r, Failed))
        first = next(failures, None)
        if first is not None:
            self._error = first.error
        elif self._single:
            self._value = outcomes[0][0][0]
        else:
            self._value = list(itertools.chain(*[results for results, _ in outcomes]))
        try:
            if self._error is not None and self._error_callback is not None:
                self._error_callback(self._error)
            elif self._error is None and self._callback is not None:
                self._callback(self._value)
        except Exception:
            logger.exception("a callback of a pool's result failed")
        finally:
            self._done = True
            self._latch.release()


@dataclasses.dataclass(eq=False, repr=False)
class IMapIterator:
    """The results of ``imap`` or ``imap_unordered``, as they come. Made by the pool.

    At first each process has a chunk; how far the iterable is read ahead grows with the results
    taken, so that a large or endless one is read as its results are.

    Args:
        chunks: The iterable in chunks.
        make: Makes the unit of a chunk, given what to call with its outcome.
        put: Runs units.
        ahead: Returns how many chunks may wait for processes.
        processes: Of the pool.
        ordered: Whether results come in the order of the iterable.
    """

    _chunks: Iterator[list[Any]]
    _make: Callable[[list[Any], Callable[[Outcome], None]], Unit]
    _put: Callable[[Iterable[Unit]], None]
    _ahead: Callable[[], int]
    _processes: int
    _ordered: bool

    def __post_init__(self) -> None:
        self._arrived: queue.SimpleQueue[tuple[int, list[Any]]] = queue.SimpleQueue()
        #: Results of chunks that came before their turn.
        self._early: dict[int, list[Any]] = {}
        self._results: collections.deque[Any] = collections.deque()
        self._sent = 0
        self._received = 0
        #: Chunks whose turn has come.
        self._next = 0
        self._send()

    def __iter__(self) -> IMapIterator:
        return self

    def __next__(self) -> Any:
        return self.next()

    def next(self, timeout: float | None = None) -> Any:
        """Return the next result.

        Args:
            timeout: Seconds to wait at most; None waits for ever.

        Raises:
            StopIteration: there are no more.
            multiprocessing.TimeoutError: it is not there in time.
            Exception: That of this call; later results can still be taken.
        """
        deadline = None if timeout is None else time.monotonic() + timeout
        while not self._results:
            if self._received == self._sent:
                raise StopIteration
            self._receive(deadline)
        result = self._results.popleft()
        if isinstance(result, Failed):
            raise result.error
        return result

    def send_rest(self) -> None:
        """Read the rest of the iterable now, as the pool is closed."""
        self._send(all_of_it=True)

    def _receive(self, deadline: float | None) -> None:
        """Wait for an outcome, and take all that there are."""
        left = None if deadline is None else max(0.0, deadline - time.monotonic())
        arrived = self._arrived
        try:
            found = [arrived.get(timeout=left)]
        except queue.Empty:
            raise PoolTimeoutError("the next result was not ready in time") from None
        with contextlib.suppress(queue.Empty):
            while True:
                found.append(arrived.get_nowait())
        self._received += len(found)
        if self._ordered:
            self._early.update(found)
        else:
            self._early.update(enumerate((results for _, results in found), self._next))
        while self._next in self._early:
            self._results.extend(self._early.pop(self._next))
            self._next += 1
        self._send()

    def _send(self, *, all_of_it: bool = False) -> None:
        """Give every process a chunk, and let others wait: half of these are put again."""
        extra = min(self._next, self._ahead())
        under_way = self._sent - self._received
        if under_way - self._processes > extra // 2 and not all_of_it:
            return
        kept = self._sent - self._next  # more than these if one holds up the results of others
        wanted = min(
            self._processes + extra - under_way, _KEPT * self._processes + 2 * extra - kept
        )
        units = [
            self._make(chunk, functools.partial(self._deliver, self._sent + number))
            for number, chunk in enumerate(
                itertools.islice(self._chunks, None if all_of_it else max(wanted, 0))
            )
        ]
        self._sent += len(units)
        if units:
            self._put(units)

    def _deliver(self, index: int, outcome: Outcome) -> None:
        self._arrived.put((index, outcome[0]))
