"""Folders that are built once per machine, counted while used, and removed when not.

The daemons of a machine may share one cache. A folder exists for users when its
marker does, which is renamed into place last; so a killed builder leaves no folder that looks
finished. The kernel drops the locks of a process that dies.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import fcntl
import functools
import json
import logging
import os
import shutil
import threading
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Iterator

logger = logging.getLogger(__name__)
T = TypeVar("T")


@dataclasses.dataclass(eq=False, repr=False)
class _Held:
    """A folder in use by this process."""

    use_lock: int  # descriptor of a shared lock, which keeps the folder from being removed
    count: int


@dataclasses.dataclass(eq=False, repr=False)
class _Pending:
    """A folder that this process is building or waiting for."""

    task: asyncio.Task[None]
    waiters: int = 0


class FolderCache:
    """Builds each folder once for all users, and keeps it while it is in use.

    Belongs to one event loop.

    Args:
        root: Where the folders are; daemons of one user and machine may share it.
        limit: Bytes that folders may take; above it, unused ones are removed, the
            longest unused first. None is no limit.
    """

    def __init__(self, root: Path, limit: int | None) -> None:
        self._root = root
        self._limit = limit
        self._held: dict[str, _Held] = {}
        self._pending: dict[str, _Pending] = {}
        self._ending: set[asyncio.Task[None]] = set()  # cancelled, still cleaning up
        self._collection: asyncio.Task[None] | None = None
        self._collect_again = False
        root.mkdir(mode=0o700, parents=True, exist_ok=True)

    async def acquire(self, key: str, build: Callable[[Path, int], Awaitable[None]]) -> Path:
        """Return a finished folder, counted until ``release``.

        Args:
            key: A file name that says what is in the folder.
            build: Fills the new, empty folder that it is given. Its second argument is
                the descriptor of the build lock; a process that inherits it keeps others
                from building the folder while it lives. It is cancelled when the last waiter for
                the folder leaves.

        Raises:
            Exception: What ``build`` raises, to all who wait for it.
        """
        held = self._held.get(key)
        if held is not None:
            held.count += 1
            return self._root / key
        pending = self._pending.get(key)
        if pending is None:
            pending = _Pending(asyncio.create_task(self._obtain(key, build)))
            self._pending[key] = pending
        pending.waiters += 1
        try:
            await asyncio.shield(pending.task)
        except asyncio.CancelledError:
            self._leave(key, pending)
            raise
        return self._root / key

    def release(self, key: str) -> None:
        """Give back what one ``acquire`` returned; an unused folder may be removed."""
        held = self._held[key]
        held.count -= 1
        if held.count:
            return
        del self._held[key]
        with contextlib.suppress(FileNotFoundError):  # a user may have emptied the cache
            os.utime(_marker(self._root, key))  # the time of last use
        os.close(held.use_lock)
        self._collect()

    @property
    def in_use(self) -> bool:
        """Whether a folder is in use, or waited for."""
        return bool(self._held or self._pending)

    async def close(self) -> None:
        """Stop what is being built and drop every lock; the folders stay."""
        tasks = [pending.task for pending in self._pending.values()]
        for task in tasks:
            task.cancel()
        tasks.extend(self._ending)
        if self._collection is not None:
            tasks.append(self._collection)
        await asyncio.gather(*tasks, return_exceptions=True)
        for held in self._held.values():
            os.close(held.use_lock)
        self._held.clear()

    def _leave(self, key: str, pending: _Pending) -> None:
        """Take a cancelled waiter off; the last one ends the build."""
        if pending.task.done():
            if not pending.task.cancelled() and pending.task.exception() is None:
                self.release(key)
            return
        pending.waiters -= 1
        if pending.waiters == 0:
            # A later acquire starts over, and waits for the lock until this build is gone.
            self._pending.pop(key, None)
            pending.task.cancel()
            self._ending.add(pending.task)
            pending.task.add_done_callback(self._ending.discard)

    async def _obtain(self, key: str, build: Callable[[Path, int], Awaitable[None]]) -> None:
        this = asyncio.current_task()
        try:
            use_lock = await self._obtain_lock(key, build)
            # In the same step as the last await, so no waiter can leave in between.
            self._held[key] = _Held(use_lock, self._pending[key].waiters)
        finally:
            pending = self._pending.get(key)
            if pending is not None and pending.task is this:
                del self._pending[key]

    async def _obtain_lock(self, key: str, build: Callable[[Path, int], Awaitable[None]]) -> int:
        """Build the folder if it does not exist, and return a lock that keeps it."""
        build_lock = await _wait_for_lock(self._root / f"{key}.build")
        try:
            if not _marker(self._root, key).exists():
                await self._build(key, build, build_lock)
                self._collect()
            return _use(self._root, key)
        finally:
            os.close(build_lock)

    async def _build(
        self, key: str, build: Callable[[Path, int], Awaitable[None]], build_lock: int
    ) -> None:
        folder = self._root / key
        await uninterrupted(_remove_tree, folder)  # what a killed builder left
        folder.mkdir(mode=0o700)
        try:
            await build(folder, build_lock)
            size = await uninterrupted(_tree_bytes, folder)
        except BaseException:
            await uninterrupted(_remove_tree, folder)
            raise
        _mark(self._root, key, size)

    def _collect(self) -> None:
        """Remove unused folders beyond the limit, in the background."""
        if self._limit is None:
            return
        if self._collection is not None and not self._collection.done():
            self._collect_again = True
            return
        self._collection = asyncio.create_task(self._collect_all(self._limit))

    async def _collect_all(self, limit: int) -> None:
        again = True
        while again:
            self._collect_again = False
            try:
                await uninterrupted(collect, self._root, limit)
            except OSError:
                logger.exception("The cache %s can't be cleaned.", self._root)
            again = self._collect_again


@contextlib.contextmanager
def folder_in_use(root: Path, key: str, build: Callable[[Path], None]) -> Iterator[Path]:
    """Hold a finished folder, as ``FolderCache.acquire`` does, without an event loop; blocks.

    A folder is removed after its last use: there is no limit below which unused folders stay.
    Remains of killed processes are removed before a folder is used again.

    Args:
        root: Folder for these folders only; made for as long as one is used.
        key: A file name that says what is in the folder.
        build: Fills the new, empty folder that it is given.
    """
    _remove_unused(root)
    try:
        build_lock = _lock_exclusive(root / f"{key}.build")
        try:
            if not _marker(root, key).exists():
                _remove_tree(root / key)  # what a builder left that has failed
                (root / key).mkdir(mode=0o700)
                build(root / key)
                _mark(root, key, 0)
            use_lock = _use(root, key)
        finally:
            _unlock(build_lock)
        try:
            yield root / key
        finally:
            _unlock(use_lock)
            # Who looks for unused folders just now has this lock, and may have seen it in use.
            build_lock = _lock_exclusive(root / f"{key}.build")
            try:
                _remove_locked(root, key, unfinished=False)
            finally:
                _unlock(build_lock)
    finally:
        _remove_unused(root)
        with contextlib.suppress(OSError):  # others have folders there, or have removed it
            root.rmdir()


def _remove_unused(root: Path) -> None:
    """Remove all folders that are neither built nor in use."""
    with contextlib.suppress(FileNotFoundError):  # another process removes them too
        for entry in root.glob("*.build"):
            _remove_if_unused(root, entry.stem, unfinished=False)


def _unlock(descriptor: int) -> None:
    """Give back a lock, also if a process that was forked meanwhile has the file open too."""
    fcntl.flock(descriptor, fcntl.LOCK_UN)
    os.close(descriptor)


def _use(root: Path, key: str) -> int:
    """Return a lock that keeps a finished folder, to one who has the lock for building it."""
    use_lock = os.open(root / f"{key}.use", os.O_RDWR | os.O_CREAT, 0o600)
    # Never waits: a process that locks this exclusively holds the build lock.
    fcntl.flock(use_lock, fcntl.LOCK_SH)
    return use_lock


def collect(root: Path, limit: int) -> None:
    """Remove unused folders, the longest unused first, until at most ``limit`` bytes remain.

    Folders that a killed builder left are removed in any case.
    """
    finished: list[tuple[float, str, int]] = []
    for entry in root.iterdir():
        if entry.is_dir() and not _marker(root, entry.name).exists():
            _remove_if_unused(root, entry.name, unfinished=True)
        elif entry.suffix == ".ready":
            with contextlib.suppress(FileNotFoundError):  # another daemon is collecting too
                size = json.loads(entry.read_text(encoding="utf-8"))["bytes"]
                finished.append((entry.stat().st_mtime, entry.stem, size))
    total = sum(size for _, _, size in finished)
    for _, key, size in sorted(finished):
        if total <= limit:
            return
        if _remove_if_unused(root, key, unfinished=False):
            total -= size


def _remove_if_unused(root: Path, key: str, *, unfinished: bool) -> bool:
    """Remove a folder unless a process builds or uses it; returns whether it is gone."""
    with _try_exclusive(root / f"{key}.build") as building:
        # Its holder may just be removing the other lock's file.
        return building and _remove_locked(root, key, unfinished=unfinished)


def _remove_locked(root: Path, key: str, *, unfinished: bool) -> bool:
    """Do so as the process that has the lock for building it."""
    with _try_exclusive(root / f"{key}.use") as using:
        if not using:
            return False
        if unfinished and _marker(root, key).exists():
            return False  # it was finished since
        _marker(root, key).unlink(missing_ok=True)
        _remove_tree(root / key)
        (root / f"{key}.use").unlink()
        (root / f"{key}.build").unlink()
        return True


@contextlib.contextmanager
def _try_exclusive(path: Path) -> Iterator[bool]:
    """Try to hold a lock without waiting; yields whether it is held."""
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            yield False
        else:
            yield _is_current(descriptor, path)
    finally:
        os.close(descriptor)


def _lock_exclusive(path: Path) -> int:
    """Wait for a lock and return its descriptor; closing it gives the lock back."""
    while True:
        try:
            descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
        except FileNotFoundError:  # who used the cache last has removed its folder
            path.parent.mkdir(mode=0o700, exist_ok=True)
            continue
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        if _is_current(descriptor, path):
            return descriptor
        os.close(descriptor)


async def _wait_for_lock(path: Path) -> int:
    """Wait for a lock in a thread of its own, which a cancelled caller leaves behind.

    The thread is not an executor's, so that a process can end while another one builds.
    """
    loop = asyncio.get_running_loop()
    locked: asyncio.Future[int] = loop.create_future()

    def deliver(descriptor: int) -> None:
        if locked.cancelled():
            os.close(descriptor)
        else:
            locked.set_result(descriptor)

    def fail(error: OSError) -> None:
        if not locked.cancelled():
            locked.set_exception(error)

    def wait() -> None:
        try:
            descriptor = _lock_exclusive(path)
        except OSError as error:  # a full disk, too many open files
            with contextlib.suppress(RuntimeError):  # the loop was closed, nobody waits
                loop.call_soon_threadsafe(fail, error)
            return
        try:
            loop.call_soon_threadsafe(deliver, descriptor)
        except RuntimeError:  # the loop was closed, nobody waits
            os.close(descriptor)

    threading.Thread(target=wait, name=f"lock {path.name}", daemon=True).start()
    try:
        return await locked
    except asyncio.CancelledError:
        if locked.done() and not locked.cancelled():
            os.close(locked.result())
        raise


def _is_current(descriptor: int, path: Path) -> bool:
    """Return whether a locked file is still at its path; a collector may have removed it."""
    try:
        return os.path.samestat(os.fstat(descriptor), path.stat())
    except FileNotFoundError:
        return False


def _marker(root: Path, key: str) -> Path:
    """Return the file whose existence says that the folder of this key is finished."""
    return root / f"{key}.ready"


def _mark(root: Path, key: str, size: int) -> None:
    """Enter that the folder of this key is finished, with its size in bytes."""
    draft = root / f"{key}.draft"
    draft.write_text(json.dumps({"bytes": size}), encoding="utf-8")
    draft.rename(_marker(root, key))


def _remove_tree(folder: Path) -> None:
    with contextlib.suppress(FileNotFoundError):
        shutil.rmtree(folder)


def _tree_bytes(folder: Path) -> int:
    return sum(
        (Path(base) / name).lstat().st_size for base, _, names in os.walk(folder) for name in names
    )


async def uninterrupted(function: Callable[..., T], *args: Any) -> T:
    """Run a function in a thread; a cancellation takes effect when it has ended.

    So files are never removed under a thread that is still at work.
    """
    future = asyncio.get_running_loop().run_in_executor(None, functools.partial(function, *args))
    cancelled: asyncio.CancelledError | None = None
    while not future.done():
        try:
            await asyncio.wait([future])
        except asyncio.CancelledError as error:  # noqa: PERF203 - it may come more than once
            cancelled = error
    if cancelled is not None:
        future.exception()
        raise cancelled
    return future.result()


@dataclasses.dataclass(eq=False, repr=False)
class JobFolders:
    """The folders of each job. Belongs to one event loop."""

    #: Where they are; made when it is needed.
    root: Path
    _jobs: dict[bytes, FolderCache] = dataclasses.field(default_factory=dict, init=False)
    _over: set[bytes] = dataclasses.field(default_factory=set, init=False)
    _removals: set[asyncio.Task[None]] = dataclasses.field(default_factory=set, init=False)

    def of(self, job_id: bytes) -> FolderCache:
        """Return the folders of a job, which only the job's end removes."""
        if job_id not in self._jobs:
            self._jobs[job_id] = FolderCache(self.root / job_id.hex(), None)
        return self._jobs[job_id]

    def jobs(self) -> set[bytes]:
        """Return the jobs that have folders."""
        return set(self._jobs)

    def end_job(self, job_id: bytes) -> None:
        """Remove the folders of a job that is over, as soon as no worker uses them."""
        if job_id in self._jobs:
            self._over.add(job_id)
            self.remove_unused()

    def remove_unused(self) -> None:
        """Remove the unused folders of ended jobs."""
        for job_id in [each for each in self._over if not self._jobs[each].in_use]:
            self._over.discard(job_id)
            removal = asyncio.create_task(_end(self._jobs.pop(job_id), self.root / job_id.hex()))
            self._removals.add(removal)
            removal.add_done_callback(self._removals.discard)

    async def close(self) -> None:
        """Cancel all builds; finished folders go with the node's session."""
        await asyncio.gather(
            *(folders.close() for folders in self._jobs.values()),
            *self._removals,
            return_exceptions=True,
        )


async def _end(folders: FolderCache, root: Path) -> None:
    await folders.close()
    await uninterrupted(_remove, root)


def _remove(folder: Path) -> None:
    # A worker that starts late makes a new one, never files in one that is being removed.
    going = folder.with_name(f"{folder.name}.{os.urandom(4).hex()}")
    try:
        folder.rename(going)
        shutil.rmtree(going)
    except OSError as error:
        logger.warning("the folder %s of a job that is over cannot be removed: %s", going, error)
