"""A joblib backend on ``util.multiprocessing.Pool``: loops on processes anywhere in the cluster."""

from __future__ import annotations

import sys
import threading
from typing import TYPE_CHECKING, Any, NamedTuple

from miniray import api

try:
    from joblib import register_parallel_backend
    from joblib.parallel import (
        AutoBatchingMixin,
        FallbackToBackend,
        ParallelBackendBase,
        SequentialBackend,
    )
except ModuleNotFoundError as error:
    raise ModuleNotFoundError(
        "miniray.util.joblib needs joblib: pip install 'miniray[joblib]'", name=error.name
    ) from None

from miniray.common.runtime import current_runtime
from miniray.util.multiprocessing.pool import Pool, attach

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from miniray.common.object_ref import ObjectRef
    from miniray.util.multiprocessing.results import AsyncResult

__all__ = ["register_ray"]

#: Bytes of an argument above which it is put into the object store, once for all calls of a loop.
_LARGE = 100 * 1024
#: The latest arguments that are kept there, as further calls may be given them.
_MOST_STORED = 64


def register_ray() -> None:
    """Make ``joblib.parallel_backend("ray")``, or ``"miniray"``, run loops in this cluster.

    The backend attaches to a cluster as ``Pool`` does, and takes ``ray_remote_args``, options of
    its actors. Arguments above 100 KiB are stored once for all calls of a loop. The processes stay
    for the next loop with as many jobs, as those of loky do, unless they have options.
    """
    for name in ("ray", "miniray"):
        register_parallel_backend(name, JoblibBackend)


class JoblibBackend(AutoBatchingMixin, ParallelBackendBase):  # type: ignore[misc]
    """What joblib calls; one object for each loop."""

    supports_retrieve_callback = True
    supports_return_generator = True

    def __init__(
        self, *args: Any, ray_remote_args: Mapping[str, Any] | None = None, **kwargs: Any
    ) -> None:
        super().__init__(*args, **kwargs)
        self._remote_args = dict(ray_remote_args or {})
        self._pool: Pool | None = None
        self._jobs = 1
        self._stored: dict[int, tuple[Any, ObjectRef[Any]]] = {}

    def effective_n_jobs(self, n_jobs: int | None) -> int:
        """Return the number of processes; below 0 it is counted from the cluster's CPUs."""
        if n_jobs == 0:
            raise ValueError("n_jobs == 0 in Parallel has no meaning")
        if n_jobs is None:
            return 1
        if n_jobs > 0:
            return n_jobs
        attach(None, None)
        return max(int(api.cluster_resources().get("CPU", 0)) + 1 + n_jobs, 1)

    def configure(
        self,
        n_jobs: int = 1,
        parallel: Any = None,
        prefer: str | None = None,
        require: str | None = None,
        ray_remote_args: Mapping[str, Any] | None = None,
        **kwargs: Any,
    ) -> int:
        """Get processes for a loop."""
        del prefer, require, kwargs  # of other backends: folders and limits of memory maps
        self._jobs = self.effective_n_jobs(n_jobs)
        if self._jobs == 1:
            raise FallbackToBackend(SequentialBackend(nesting_level=self.nesting_level))
        self._remote_args = dict(ray_remote_args or self._remote_args)
        self.parallel = parallel
        self._pool = _idle.take(self._jobs, self._remote_args)
        return self._jobs

    def submit(
        self, func: Callable[[], Any], callback: Callable[[Any], Any] | None = None
    ) -> AsyncResult:
        """Run a batch of calls."""
        assert self._pool is not None
        batch = _Batch(func, self._stored)
        work = batch if batch.stored else func  # each class costs its pickling
        return self._pool.apply_async(work, callback=callback, error_callback=callback)

    apply_async = submit  # its name in joblib before 1.5

    def retrieve_result_callback(self, out: Any) -> Any:
        """Return what came of a batch, which its callback was given."""
        if isinstance(out, BaseException):
            raise out
        return out

    def abort_everything(self, ensure_ready: bool = True) -> None:
        """End the other calls after one has failed."""
        if self._pool is not None:
            self._pool.terminate()
            self._pool = None
        if ensure_ready:
            self._pool = _idle.take(self._jobs, self._remote_args)

    def terminate(self) -> None:
        """Keep the processes for the next loop: this one is over."""
        self._stored.clear()
        if self._pool is not None:
            _idle.give_back(self._pool, self._jobs, self._remote_args)
            self._pool = None
        self.reset_batch_stats()


class _Idle:
    """The processes of the last loop, for the next one. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._found: tuple[tuple[int, object], Pool] | None = None

    def take(self, jobs: int, remote_args: Mapping[str, Any]) -> Pool:
        """Return a pool that is not in use."""
        attach(None, jobs)
        with self._lock:
            found, self._found = self._found, None
        if found is not None:
            kind, pool = found
            if kind == (jobs, current_runtime().session) and not remote_args:
                return pool
            pool.terminate()
        return Pool(jobs, ray_remote_args=remote_args)

    def give_back(self, pool: Pool, jobs: int, remote_args: Mapping[str, Any]) -> None:
        """Keep a pool for the next loop, unless it holds resources."""
        if not remote_args and api.is_initialized():
            with self._lock:
                key = (jobs, current_runtime().session)
                found, self._found = self._found, (key, pool)
            if found is None:
                return
            _, pool = found
        pool.terminate()


_idle = _Idle()


class _Stored(NamedTuple):
    """Stands for an argument that is in the object store."""

    ref: ObjectRef[Any]


class _Batch:
    """Calls of joblib with their large arguments in the object store.

    Args:
        calls: joblib's ``BatchedCalls``.
        stored: By id, the values stored for this loop already, with their refs.
    """

    def __init__(self, calls: Any, stored: dict[int, tuple[Any, ObjectRef[Any]]]) -> None:
        self._calls = calls
        #: Calls some of whose arguments are in the store.
        self.stored: list[int] = []

        def store(value: Any) -> Any:
            if _size(value) <= _LARGE:
                return value
            found = stored.pop(id(value), None)
            _, ref = (value, api.put(value)) if found is None else found
            stored[id(value)] = value, ref  # the last one
            if len(stored) > _MOST_STORED:
                del stored[next(iter(stored))]
            return _Stored(ref)

        for index, (func, args, kwargs) in enumerate(calls.items):
            if any(_size(value) > _LARGE for value in (*args, *kwargs.values())):
                self.stored.append(index)
                calls.items[index] = _replaced(func, args, kwargs, store)

    def __call__(self) -> Any:
        items = self._calls.items
        for index in self.stored:
            func, args, kwargs = items[index]
            items[index] = _replaced(func, args, kwargs, _load)
        return self._calls()


def _load(value: Any) -> Any:
    return api.get(value.ref) if type(value) is _Stored else value


def _replaced(
    func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], replace: Callable[[Any], Any]
) -> tuple[Any, tuple[Any, ...], dict[str, Any]]:
    return func, tuple(map(replace, args)), {key: replace(v) for key, v in kwargs.items()}


def _size(value: Any) -> int:
    """Return the bytes of an array or a table; of other values ``sys.getsizeof``."""
    size = getattr(value, "nbytes", None)
    return size if type(size) is int else sys.getsizeof(value)
