"""What a ``Pool`` hands out: ``AsyncResult`` and the iterators of ``imap``.

They wait for batches and unfold them; which process runs what is the pool's.
"""

from __future__ import annotations

import collections
import logging
import queue
import threading
import time
from multiprocessing import TimeoutError as PoolTimeoutError
from typing import TYPE_CHECKING, Any

from miniray.util.multiprocessing.worker import Failed

if TYPE_CHECKING:
    import concurrent.futures
    from collections.abc import Callable, Iterator, Sequence

    from miniray.object_ref import ObjectRef

logger = logging.getLogger(__name__)


def outcomes(future: concurrent.futures.Future[Any], size: int) -> list[Any]:
    """The results of a finished batch of ``size`` calls; all failed if its process died."""
    try:
        results: list[Any] = future.result()
    except BaseException as error:  # noqa: BLE001 - raised again where the result is taken
        return [Failed(error)] * size
    return results


class Collector:
    """Takes in finished batches, one after another, in a thread of its own.

    User callbacks run there: the thread that completes a future serves all of the
    process's connections and must not wait. The thread lives while batches are
    under way.
    """

    def __init__(self) -> None:
        self._finished: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._under_way = 0

    def watch(
        self, ref: ObjectRef[Any], deliver: Callable[[concurrent.futures.Future[Any]], None]
    ) -> None:
        """Call ``deliver`` with the ref's future when it is done."""
        with self._lock:
            self._under_way += 1
            if self._under_way == 1:
                threading.Thread(target=self._run, daemon=True, name="pool-results").start()
        ref.future().add_done_callback(lambda future: self._finished.put(lambda: deliver(future)))

    def _run(self) -> None:
        under_way = True
        while under_way:
            self._finished.get()()
            with self._lock:
                self._under_way -= 1
                under_way = self._under_way > 0


class AsyncResult:
    """The result of ``apply_async``, ``map_async`` or ``starmap_async``.

    Made by the pool.
    """

    def __init__(
        self,
        sizes: Sequence[int],
        single: bool,
        callback: Callable[[Any], Any] | None,
        error_callback: Callable[[BaseException], Any] | None,
    ) -> None:
        self._sizes = sizes
        self._batches: list[list[Any]] = [[] for _ in sizes]
        self._missing = len(sizes)
        self._single = single
        self._callback = callback
        self._error_callback = error_callback
        self._error: BaseException | None = None
        self._done = threading.Event()
        if not sizes:
            self._finish()

    def wait(self, timeout: float | None = None) -> None:
        """Wait until all calls have finished, or for ``timeout`` seconds."""
        self._done.wait(timeout)

    def get(self, timeout: float | None = None) -> Any:
        """The result, or the list of results.

        Args:
            timeout: Seconds to wait at most; None waits for ever.

        Raises:
            multiprocessing.TimeoutError: it is not there in time.
            Exception: what the first failed call raised.
        """
        if not self._done.wait(timeout):
            raise PoolTimeoutError(f"no result within {timeout} s")
        if self._error is not None:
            raise self._error
        return self._value()

    def ready(self) -> bool:
        """Whether all calls have finished."""
        return self._done.is_set()

    def successful(self) -> bool:
        """Whether no call failed.

        Raises:
            ValueError: not all calls have finished.
        """
        if not self.ready():
            raise ValueError(f"{self!r} not ready")
        return self._error is None

    def deliver(self, index: int, future: concurrent.futures.Future[Any]) -> None:
        """Take in a finished batch (called by the collector)."""
        self._batches[index] = outcomes(future, self._sizes[index])
        self._missing -= 1
        if self._missing == 0:
            self._finish()

    def _value(self) -> Any:
        results = [result for batch in self._batches for result in batch]
        return results[0] if self._single else results

    def _finish(self) -> None:
        failures = (r for batch in self._batches for r in batch if isinstance(r, Failed))
        first = next(failures, None)
        self._error = None if first is None else first.error
        try:
            if self._error is not None and self._error_callback is not None:
                self._error_callback(self._error)
            elif self._error is None and self._callback is not None:
                self._callback(self._value())
        except Exception:
            logger.exception("a callback of a pool's result failed")
        finally:
            self._done.set()


class IMapIterator:
    """The results of ``imap`` or ``imap_unordered``, as they come. Made by the pool.

    Each process has one batch at a time; the next is sent when a batch comes back,
    so that a large or endless iterable is read as its results are.
    """

    def __init__(
        self,
        batches: Iterator[list[Any]],
        submit: Callable[[list[Any], Callable[[concurrent.futures.Future[Any]], None]], None],
        in_flight: int,
        ordered: bool,
    ) -> None:
        self._batches = batches
        self._submit = submit
        self._ordered = ordered
        self._arrived: queue.SimpleQueue[tuple[int, list[Any]]] = queue.SimpleQueue()
        self._early: dict[int, list[Any]] = {}
        self._results: collections.deque[Any] = collections.deque()
        self._sent = 0
        self._received = 0
        for _ in range(in_flight):
            self._send_next()

    def __iter__(self) -> IMapIterator:
        return self

    def __next__(self) -> Any:
        return self.next()

    def next(self, timeout: float | None = None) -> Any:
        """The next result.

        Args:
            timeout: Seconds to wait at most; None waits for ever.

        Raises:
            StopIteration: there are no more.
            multiprocessing.TimeoutError: it is not there in time.
            Exception: what this call raised; later results can still be taken.
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

    def _receive(self, deadline: float | None) -> None:
        if self._ordered and self._received in self._early:
            self._results.extend(self._early.pop(self._received))
            self._received += 1
            return
        left = None if deadline is None else max(0.0, deadline - time.monotonic())
        try:
            index, batch = self._arrived.get(timeout=left)
        except queue.Empty:
            raise PoolTimeoutError("the next result is not there in time") from None
        self._send_next()
        if self._ordered:
            self._early[index] = batch
        else:
            self._results.extend(batch)
            self._received += 1

    def _send_next(self) -> None:
        batch = next(self._batches, None)
        if batch is None:
            return
        index, size = self._sent, len(batch)
        self._sent += 1
        self._submit(batch, lambda future: self._arrived.put((index, outcomes(future, size))))
