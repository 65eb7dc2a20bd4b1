"""One local copy of a remote folder for all processes of a machine that read it at the same time.

Each copy has a lock file: a process that fetches the copy holds an exclusive lock, readers hold a
shared one, and the last reader deletes the copy. The kernel takes the locks of a process that is
killed, so what it leaves is found, and is deleted by the next one who wants any copy.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import logging
import os
import pickle
import shutil
import stat
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

from miniray.train.storage.filesystem import download, in_memory

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

logger = logging.getLogger(__name__)

#: By which stores tell one content of a file from another.
_VERSIONS = ("ETag", "etag", "mtime", "LastModified", "last_modified", "updated")


@contextlib.contextmanager
def shared_copy(filesystem: Any, path: str) -> Iterator[str]:
    """A local folder with the files, which other processes of this machine may read too."""
    key = _key_of(filesystem, path)
    folder = None if key is None else _folder_of_copies()
    if folder is None:
        with tempfile.TemporaryDirectory(prefix="miniray_checkpoint_") as own:
            download(filesystem, path, Path(own))
            yield own
        return
    lock = folder / f"{key}.lock"
    number = _enter(lock, lambda target: download(filesystem, path, target))
    try:
        yield str(lock.with_suffix(""))
    finally:
        _leave(lock, number)


def _key_of(filesystem: Any, path: str) -> str | None:
    """Return what copies of the same content have in common; None if it is not known."""
    if in_memory(filesystem):
        return None
    try:
        store = pickle.dumps(filesystem)
    except Exception:  # whatever a user's class raises
        logger.debug("%r is not shared between processes.", filesystem, exc_info=True)
        return None
    filesystem.invalidate_cache(path)
    found = filesystem.find(path, detail=True)
    files = [
        (name, info["size"], *(str(info.get(version)) for version in _VERSIONS))
        for name, info in sorted(found.items())
    ]
    return hashlib.sha256(store + repr((path, files)).encode()).hexdigest()[:24]


def _folder_of_copies() -> Path | None:
    """Return the folder that holds the copies of this user; None if there can be none."""
    folder = Path(tempfile.gettempdir(), f"miniray_checkpoints_{os.getuid()}")
    try:
        with contextlib.suppress(FileExistsError):
            folder.mkdir(mode=0o700)
        found = folder.lstat()
    except OSError as error:
        logger.warning("Checkpoints are fetched by each process for itself: %s", error)
        return None
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid() or found.st_mode & 0o022:
        logger.warning(
            "Checkpoints are fetched by each process for itself: %s is not a folder of this user "
            "alone",
            folder,
        )
        return None
    return folder


def _enter(lock: Path, fetch: Callable[[Path], None]) -> int:
    """Lock a copy for reading, and fetch it if it is not there; return the lock, for ``_leave``."""
    files, part = lock.with_suffix(""), lock.with_suffix(".part")
    while True:
        with contextlib.suppress(FileExistsError):
            lock.parent.mkdir(mode=0o700)
        try:
            number = os.open(lock, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        except FileNotFoundError:
            continue  # the last reader has just deleted the folder
        try:
            if _try_alone(number) and _is_at(number, lock):
                for left in (files, part):  # by a process that was killed
                    shutil.rmtree(left, ignore_errors=True)
                fetch(part)
                part.rename(files)
            # Waits until they are fetched. They may be deleted before this process has the lock.
            fcntl.flock(number, fcntl.LOCK_SH)
            if _is_at(number, lock) and files.exists():
                return number
        except BaseException:
            _leave(lock, number)
            raise
        os.close(number)


def _leave(lock: Path, number: int) -> None:
    """Give up a lock; delete the copy if it was the last, and what killed processes have left."""
    _delete_unused(lock, number)
    fcntl.flock(number, fcntl.LOCK_UN)  # a process that was forked meanwhile has the file open too
    os.close(number)
    with contextlib.suppress(OSError):  # another one that leaves may have deleted the folder
        for other in lock.parent.glob("*.lock"):
            with contextlib.suppress(FileNotFoundError), other.open("rb") as file:
                _delete_unused(other, file.fileno())
        lock.parent.rmdir()


def _delete_unused(lock: Path, number: int) -> None:
    """Delete a copy that no other process has locked."""
    if _try_alone(number) and _is_at(number, lock):
        for path in (lock.with_suffix(""), lock.with_suffix(".part")):
            shutil.rmtree(path, ignore_errors=True)
        lock.unlink()


def _try_alone(number: int) -> bool:
    """Take the exclusive lock if no other process has a lock; otherwise hold none."""
    try:
        fcntl.flock(number, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _is_at(number: int, path: Path) -> bool:
    """Return whether an open file is still what has this path."""
    try:
        return os.path.samestat(path.lstat(), os.fstat(number))
    except FileNotFoundError:
        return False
