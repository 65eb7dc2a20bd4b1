"""``Pool``: the standard library's process pool, with actors for processes.

It shares batches of calls out among its actors; ``results.py`` brings them back.
"""

from __future__ import annotations

import functools
import itertools
import logging
import os
from typing import TYPE_CHECKING, Any

import miniray
from miniray.core.init_options import ADDRESS_VARIABLE
from miniray.core.option_checks import whole
from miniray.util.multiprocessing.results import AsyncResult, Collector, IMapIterator
from miniray.util.multiprocessing.worker import PoolActor

if TYPE_CHECKING:
    import concurrent.futures
    from collections.abc import Callable, Iterable, Mapping, Sequence, Sized
    from types import TracebackType

    from miniray.util.multiprocessing.worker import Arguments

    Deliver = Callable[[concurrent.futures.Future[Any]], None]

logger = logging.getLogger(__name__)

#: Batches per process that ``map`` makes, so that uneven calls even out.
BATCHES_PER_PROCESS = 4


class Pool:
    """A pool of processes anywhere in the cluster, with ``multiprocessing.Pool``'s interface.

    Args:
        processes: How many; None is one for each CPU of the cluster. A cluster that is started
            for the pool, because none runs, has as many CPUs.
        initializer: Called in each process when it starts.
        initargs: Arguments of ``initializer``.
        maxtasksperchild: A process is replaced after this many batches; None never.
        context: Accepted for compatibility and ignored.
        ray_address: The cluster to use if this process is in none: what ``init`` takes.
        ray_remote_args: Options of the actors, for example ``{"num_gpus": 0.5}``.

    Raises:
        TypeError: ``processes`` or ``maxtasksperchild`` is no whole number.
        ValueError: One of them is below 1, or ``processes`` is above the cluster's CPUs.
    """

    def __init__(
        self,
        processes: int | None = None,
        initializer: Callable[..., Any] | None = None,
        initargs: Iterable[Any] | None = None,
        maxtasksperchild: int | None = None,
        context: object = None,
        ray_address: str | None = None,
        ray_remote_args: Mapping[str, Any] | None = None,
    ) -> None:
        if context is not None:
            _tell_of_context()
        if maxtasksperchild is not None:
            whole(1)("maxtasksperchild", maxtasksperchild)
        if processes is not None:
            whole(1)("processes", processes)
        if not miniray.is_initialized():
            _attach(ray_address, processes)
        self._closed = False
        self._initializer = initializer
        self._initargs = tuple(initargs or ())
        self._batch_limit = maxtasksperchild
        actor_class: Any = miniray.remote(PoolActor)
        self._actor_class = actor_class.options(**{"num_cpus": 0, **(ray_remote_args or {})})
        self._collector = Collector()
        self._ending: list[Any] = []
        self._actors = [self._start() for _ in range(_fitting(processes))]
        self._batches_of = [0] * len(self._actors)
        self._turns = itertools.cycle(range(len(self._actors)))
        miniray.get([actor.ping.remote() for actor in self._actors])

    def apply(
        self,
        func: Callable[..., Any],
        args: Sequence[Any] | None = None,
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """Call ``func(*args, **kwargs)`` in one of the processes and return its result."""
        return self.apply_async(func, args, kwargs).get()

    def apply_async(
        self,
        func: Callable[..., Any],
        args: Sequence[Any] | None = None,
        kwargs: Mapping[str, Any] | None = None,
        callback: Callable[[Any], Any] | None = None,
        error_callback: Callable[[BaseException], Any] | None = None,
    ) -> AsyncResult:
        """``apply`` without waiting.

        Args:
            func: What to call.
            args: Its positional arguments.
            kwargs: Its keyword arguments.
            callback: Called with the result.
            error_callback: Called with what ``func`` raised, in place of ``callback``.
        """
        batch = [(args or (), kwargs or {})]
        return self._send(func, [batch], True, callback, error_callback)

    def map(
        self, func: Callable[[Any], Any], iterable: Iterable[Any], chunksize: int | None = None
    ) -> list[Any]:
        """Call ``func`` with each element; the results, in their order.

        Args:
            func: Takes one element.
            iterable: The elements; read at once.
            chunksize: Elements sent to a process at a time; None makes four batches
                for each process.
        """
        results: list[Any] = self.map_async(func, iterable, chunksize).get()
        return results

    def map_async(
        self,
        func: Callable[[Any], Any],
        iterable: Iterable[Any],
        chunksize: int | None = None,
        callback: Callable[[list[Any]], Any] | None = None,
        error_callback: Callable[[BaseException], Any] | None = None,
    ) -> AsyncResult:
        """``map`` without waiting; the callbacks get the list, or the first error."""
        calls: list[Arguments] = [((element,), {}) for element in iterable]
        batches = self._batched(calls, chunksize)
        return self._send(func, batches, False, callback, error_callback)

    def starmap(
        self,
        func: Callable[..., Any],
        iterable: Iterable[Iterable[Any]],
        chunksize: int | None = None,
    ) -> list[Any]:
        """``map`` for elements that are argument lists: ``func(*element)``."""
        results: list[Any] = self.starmap_async(func, iterable, chunksize=chunksize).get()
        return results

    def starmap_async(
        self,
        func: Callable[..., Any],
        iterable: Iterable[Iterable[Any]],
        callback: Callable[[list[Any]], Any] | None = None,
        error_callback: Callable[[BaseException], Any] | None = None,
        chunksize: int | None = None,
    ) -> AsyncResult:
        """``starmap`` without waiting."""
        batches = self._batched([(tuple(element), {}) for element in iterable], chunksize)
        return self._send(func, batches, False, callback, error_callback)

    def imap(
        self, func: Callable[[Any], Any], iterable: Iterable[Any], chunksize: int | None = 1
    ) -> IMapIterator:
        """``map`` that reads the iterable as results are taken; one batch per process at a time.

        Args:
            func: Takes one element.
            iterable: The elements; may be endless.
            chunksize: Elements sent to a process at a time.
        """
        return self._imap(func, iterable, chunksize, ordered=True)

    def imap_unordered(
        self, func: Callable[[Any], Any], iterable: Iterable[Any], chunksize: int | None = 1
    ) -> IMapIterator:
        """``imap`` whose results come as they finish."""
        return self._imap(func, iterable, chunksize, ordered=False)

    def close(self) -> None:
        """Take no more calls; the processes end when those sent have finished."""
        if self._closed:
            return
        self._closed = True
        for actor in self._actors:
            self._end(actor)

    def terminate(self) -> None:
        """Take no more calls and end the processes at once."""
        self.close()
        for actor in self._actors:
            miniray.kill(actor)

    def join(self) -> None:
        """Wait until the processes of a closed pool have ended.

        Raises:
            ValueError: the pool is neither closed nor terminated.
        """
        if not self._closed:
            raise ValueError("Pool is still running: call close() or terminate() first")
        if self._ending:
            miniray.wait(self._ending, num_returns=len(self._ending))

    def __enter__(self) -> Pool:
        self._check_running()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.terminate()

    def _check_running(self) -> None:
        if self._closed:
            raise ValueError("Pool not running")

    def _start(self) -> Any:
        return self._actor_class.remote(self._initializer, self._initargs)

    def _end(self, actor: Any) -> None:
        # Comes after the calls sent so far, since calls run in order.
        self._ending.append(actor.__ray_terminate__.remote())

    def _run(self, func: Callable[..., Any], batch: Sequence[Arguments], deliver: Deliver) -> None:
        """Send a batch to the process whose turn it is."""
        index = next(self._turns)
        actor = self._actors[index]
        self._collector.watch(actor.run_batch.remote(func, batch), deliver)
        self._batches_of[index] += 1
        if self._batches_of[index] == self._batch_limit:
            self._end(actor)
            self._actors[index] = self._start()
            self._batches_of[index] = 0

    def _send(
        self,
        func: Callable[..., Any],
        batches: Sequence[Sequence[Arguments]],
        single: bool,
        callback: Callable[[Any], Any] | None,
        error_callback: Callable[[BaseException], Any] | None,
    ) -> AsyncResult:
        self._check_running()
        result = AsyncResult([len(batch) for batch in batches], single, callback, error_callback)
        for index, batch in enumerate(batches):
            self._run(func, batch, lambda future, index=index: result.deliver(index, future))  # type: ignore[misc]
        return result

    def _batched(self, calls: Sequence[Arguments], size: int | None) -> list[Sequence[Arguments]]:
        step = self._default_size(calls) if size is None else whole(1)("chunksize", size)
        return [calls[start : start + step] for start in range(0, len(calls), step)]

    def _default_size(self, elements: Sized) -> int:
        return max(1, -(-len(elements) // (len(self._actors) * BATCHES_PER_PROCESS)))

    def _imap(
        self,
        func: Callable[[Any], Any],
        iterable: Iterable[Any],
        size: int | None,
        ordered: bool,
    ) -> IMapIterator:
        self._check_running()
        step = 1 if size is None else whole(1)("chunksize", size)
        elements = iter(iterable)
        batches = iter(lambda: list(itertools.islice(elements, step)), [])

        def submit(batch: list[Any], deliver: Deliver) -> None:
            self._run(func, [((element,), {}) for element in batch], deliver)

        return IMapIterator(batches, submit, len(self._actors), ordered)


@functools.cache
def _tell_of_context() -> None:
    """Once per process: libraries make pools for every loop."""
    logger.warning("The argument 'context' of Pool has no effect: its processes are actors")


def _attach(address: str | None, processes: int | None) -> None:
    """Attach to a cluster; one that is started for a pool is as large as that, as in Ray."""
    from miniray.core.cluster_choice import latest_cluster

    wanted = address or os.environ.get(ADDRESS_VARIABLE)
    starts_one = latest_cluster(None) is None if wanted is None else wanted == "local"
    miniray.init(address, num_cpus=processes if starts_one else None)


def _fitting(processes: int | None) -> int:
    """The number of processes of a pool on this cluster."""
    cpus = int(miniray.cluster_resources().get("CPU", 0))
    if processes is None:
        return max(1, cpus)
    if processes > cpus:
        raise ValueError(
            f"A pool of {processes} processes was asked for, but the cluster has {cpus} CPUs."
            " Ask for fewer, or start the cluster with more"
        )
    return processes
