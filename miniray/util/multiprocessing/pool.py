"""``Pool``: the standard library's process pool, with actors for processes.

It makes units of calls; ``dispatcher.py`` shares them out among its actors.
"""

from __future__ import annotations

import functools
import itertools
import logging
import os
import weakref
from typing import TYPE_CHECKING, Any

from miniray import api
from miniray.client.init_options import ADDRESS_VARIABLE
from miniray.decorator import remote
from miniray.system.option_checks import whole
from miniray.util.multiprocessing.dispatcher import APPLY, MAP, STARMAP, Dispatcher, PoolActor, Unit
from miniray.util.multiprocessing.results import AsyncResult, IMapIterator

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence

logger = logging.getLogger(__name__)

#: Chunks per process that ``map`` makes, so that uneven calls even out.
CHUNKS_PER_PROCESS = 4
#: Seconds of work that ``imap`` reads ahead at most, and chunks, for each process.
AHEAD, MOST_AHEAD = 0.02, 100


class Pool:
    """A pool of processes anywhere in the cluster, with ``multiprocessing.Pool``'s interface.

    Args:
        processes: How many; None is one for each CPU of the cluster. A cluster that is started
            for the pool, because none runs, has as many CPUs.
        initializer: Called in each process when it starts.
        initargs: Arguments of ``initializer``.
        maxtasksperchild: A process is replaced after this many chunks or single calls; None never.
        context: Accepted for compatibility and ignored.
        ray_address: The cluster to use if this process is in none, as ``init`` takes it.
        ray_remote_args: Options of the actors, for example ``{"num_gpus": 0.5}``.

    Raises:
        TypeError: ``processes`` or ``maxtasksperchild`` is not a whole number.
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
        attach(ray_address, processes)
        self._processes = _fitting(processes)
        actor_class: Any = remote(PoolActor)
        actor_class = actor_class.options(**{"num_cpus": 0, **(ray_remote_args or {})})
        arguments = (initializer, tuple(initargs or ()))
        #: Sources that may have more to send.
        self._iterators: weakref.WeakSet[IMapIterator] = weakref.WeakSet()
        self._dispatcher = Dispatcher(
            lambda: actor_class.remote(*arguments), self._processes, maxtasksperchild
        )

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
        """Do as ``apply`` without waiting.

        A call that finds a process idle is sent at once. Of those that wait, several go to a
        process together if such calls have taken little time so far, and come back if one of them
        takes long, when that has ended: so none of them may wait for another.

        Args:
            func: What to call.
            args: Its positional arguments.
            kwargs: Its keyword arguments.
            callback: Called with the result.
            error_callback: Called with the exception of ``func``, in place of ``callback``.
        """
        chunks = [[(args or (), kwargs or {})]]
        return self._put(func, APPLY, chunks, callback, error_callback)

    def map(
        self, func: Callable[[Any], Any], iterable: Iterable[Any], chunksize: int | None = None
    ) -> list[Any]:
        """Call ``func`` with each element; the results, in their order.

        Args:
            func: Takes one element.
            iterable: The elements; read at once.
            chunksize: Elements sent to a process at a time; None makes four chunks for each
                process, or fewer if such calls have taken very little time so far.
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
        """Do as ``map`` without waiting; the callbacks get the list, or the first error."""
        chunks = self._chunked(iterable, chunksize)
        return self._put(func, MAP, chunks, callback, error_callback)

    def starmap(
        self,
        func: Callable[..., Any],
        iterable: Iterable[Iterable[Any]],
        chunksize: int | None = None,
    ) -> list[Any]:
        """Do as ``map`` for elements that are argument lists: ``func(*element)``."""
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
        """Do as ``starmap`` without waiting."""
        chunks = self._chunked(map(tuple, iterable), chunksize)
        return self._put(func, STARMAP, chunks, callback, error_callback)

    def imap(
        self, func: Callable[[Any], Any], iterable: Iterable[Any], chunksize: int | None = 1
    ) -> IMapIterator:
        """Do as ``map``, but read the iterable as results are taken.

        Args:
            func: Takes one element.
            iterable: The elements; may be endless.
            chunksize: Elements sent to a process at a time.
        """
        return self._imap(func, iterable, chunksize, ordered=True)

    def imap_unordered(
        self, func: Callable[[Any], Any], iterable: Iterable[Any], chunksize: int | None = 1
    ) -> IMapIterator:
        """Do as ``imap``, but yield results as they finish."""
        return self._imap(func, iterable, chunksize, ordered=False)

    def close(self) -> None:
        """Take no more calls; the processes end when those made have finished.

        What ``imap`` has not read of its iterable is read now.
        """
        for iterator in list(self._iterators):
            iterator.send_rest()
        self._dispatcher.close()

    def terminate(self) -> None:
        """Take no more calls and end the processes at once; calls that have not ended fail."""
        self._dispatcher.terminate()

    def join(self) -> None:
        """Wait until the processes of a closed pool have ended.

        Raises:
            ValueError: the pool is neither closed nor terminated.
        """
        if not self._dispatcher.closed:
            raise ValueError("Pool is still running: call close() or terminate() first")
        self._dispatcher.join()

    def __enter__(self) -> Pool:
        self._dispatcher.check_open()
        return self

    def __exit__(self, *_: object) -> None:
        self.terminate()

    def _put(
        self,
        func: Callable[..., Any],
        how: int,
        chunks: Sequence[Sequence[Any]],
        callback: Callable[[Any], Any] | None,
        error_callback: Callable[[BaseException], Any] | None,
    ) -> AsyncResult:
        self._dispatcher.check_open()
        result = AsyncResult(len(chunks), how == APPLY, callback, error_callback)
        self._dispatcher.put(
            Unit(func, how, chunk, functools.partial(result.deliver, index))
            for index, chunk in enumerate(chunks)
        )
        return result

    def _chunked(self, elements: Iterable[Any], size: int | None) -> list[Sequence[Any]]:
        found = list(elements)
        if size is None:
            size = max(1, -(-len(found) // (self._processes * CHUNKS_PER_PROCESS)))
        else:
            size = whole(1)("chunksize", size)
        return [found[start : start + size] for start in range(0, len(found), size)]

    def _imap(
        self,
        func: Callable[[Any], Any],
        iterable: Iterable[Any],
        size: int | None,
        ordered: bool,
    ) -> IMapIterator:
        dispatcher = self._dispatcher
        dispatcher.check_open()
        step = 1 if size is None else whole(1)("chunksize", size)
        elements = iter(iterable)

        def ahead() -> int:
            chunks = dispatcher.calls_within(func, AHEAD) // step
            return self._processes * min(chunks, MOST_AHEAD)

        made = IMapIterator(
            iter(lambda: list(itertools.islice(elements, step)), []),
            functools.partial(Unit, func, MAP),
            dispatcher.put,
            ahead,
            self._processes,
            ordered,
        )
        self._iterators.add(made)
        return made


@functools.cache
def _tell_of_context() -> None:
    """Warn once per process: libraries make pools for every loop."""
    logger.warning("The argument 'context' of Pool has no effect: its processes are actors")


def attach(address: str | None, processes: int | None) -> None:
    """Attach to a cluster, unless this process is in one.

    One that is started for a pool is as large as that, as in Ray.
    """
    if api.is_initialized():
        return
    from miniray.client.cluster_choice import latest_cluster

    wanted = address or os.environ.get(ADDRESS_VARIABLE)
    starts_one = latest_cluster(None) is None if wanted is None else wanted == "local"
    api.init(address, num_cpus=processes if starts_one else None)


def _fitting(processes: int | None) -> int:
    """Return the number of processes of a pool on this cluster."""
    cpus = int(api.cluster_resources().get("CPU", 0))
    if processes is None:
        return max(1, cpus)
    if processes > cpus:
        raise ValueError(
            f"A pool of {processes} processes was asked for, but the cluster has {cpus} CPUs."
            " Ask for fewer, or start the cluster with more"
        )
    return processes
