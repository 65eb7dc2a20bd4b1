"""One local copy of a remote folder for all processes of a machine that read it at the same time.

Each copy has a lock file: who fetches the copy holds the lock alone, who reads it holds it with
others, and the last of them deletes the copy. The kernel takes the locks of a process that is
killed, so what it leaves is found, and is deleted by the next one who wants any copy.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import logging
import os
import pickle
import secrets
import shutil
import stat
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

from miniray.train.storage.filesystem import download, in_memory

if TYPE_CHECKING:
    from collections.abc import Iterator

logger = logging.getLogger(__name__)

#: By which stores tell one content of a file from another.
_VERSIONS = ("ETag", "etag", "mtime", "LastModified", "last_modified", "updated")


@contextlib.contextmanager
def shared_copy(filesystem: Any, path: str) -> Iterator[str]:
    """A local folder with the files, which other processes of this machine may read too.

    Args:
        filesystem: An fsspec filesystem.
        path: A folder there.
    """
    key = _key_of(filesystem, path)
    folder = None if key is None else _folder_of_copies()
    if key is None or folder is None:
        with tempfile.TemporaryDirectory(prefix="miniray_checkpoint_") as own:
            download(filesystem, path, Path(own))
            yield own
        return
    copy = _Copy(folder, key)
    lock = copy.enter(lambda target: download(filesystem, path, target))
    try:
        yield str(copy.files)
    finally:
        copy.leave(lock)


def _key_of(filesystem: Any, path: str) -> str | None:
    """What copies of the same content have in common; None if nobody can tell."""
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
    """The folder that holds the copies of this user; None if there can be none."""
    folder = Path(tempfile.gettempdir(), f"miniray_checkpoints_{os.getuid()}")
    try:
        with _alone_in(folder):
            return folder
    except OSError as error:
        logger.warning("Checkpoints are fetched by each process for itself: %s", error)
        return None


@contextlib.contextmanager
def _alone_in(folder: Path) -> Iterator[None]:
    """Hold the lock of a folder, which is made for it and goes when nothing is in it.

    Raises:
        OSError: It is not this user's own, or can't be locked.
    """
    while True:
        with contextlib.suppress(FileExistsError):
            folder.mkdir(mode=0o700)
        try:
            number = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
        except FileNotFoundError:
            continue  # the last one has just left
        try:
            found = os.fstat(number)
            if found.st_uid != os.getuid() or stat.S_IMODE(found.st_mode) & 0o022:
                raise PermissionError(f"{folder} is not a folder of this user alone")
            fcntl.flock(number, fcntl.LOCK_EX)
            if _is_at(number, folder):
                yield
                with contextlib.suppress(OSError):
                    folder.rmdir()
                return
        finally:
            os.close(number)


class _Copy:
    """A copy of some files.

    Attributes:
        files: The folder of the files; it exists when all of them are there.
    """

    def __init__(self, folder: Path, key: str) -> None:
        self._folder = folder
        self._lock = folder / f"{key}.lock"
        self._part = folder / f"{key}.part"
        self.files = folder / key

    def enter(self, fetch: Any) -> int:
        """Have the files, fetched by whoever came first; returns the lock that ``leave`` takes.

        Args:
            fetch: Called with the folder to fetch them into.
        """
        while True:
            with _alone_in(self._folder):
                number = os.open(self._lock, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
                first = _try_alone(number)
            try:
                if first:
                    self._fetch(fetch)
                    with _alone_in(self._folder):
                        # Nobody takes it alone meanwhile, as that is done in this folder's lock.
                        fcntl.flock(number, fcntl.LOCK_SH)
                else:
                    fcntl.flock(number, fcntl.LOCK_SH)  # waits for who fetches them
                if _is_at(number, self._lock) and self.files.exists():
                    return number
            except BaseException:
                self.leave(number)
                raise
            self.leave(number)  # who fetched them failed, or was killed

    def _fetch(self, fetch: Any) -> None:
        for left in (self.files, self._part):
            shutil.rmtree(left, ignore_errors=True)
        fetch(self._part)
        self._part.rename(self.files)

    def leave(self, number: int) -> None:
        """Read the files no more; the last one deletes them, and what killed processes left."""
        unused: list[Path] = []
        try:
            with _alone_in(self._folder):
                if _is_at(number, self._lock) and _try_alone(number):
                    unused += _set_aside(self._lock)
                # A process that was forked meanwhile has the file open too.
                fcntl.flock(number, fcntl.LOCK_UN)
                for lock in self._folder.glob("*.lock"):
                    with lock.open("rb") as file:
                        if _try_alone(file.fileno()):
                            unused += _set_aside(lock)
                unused = [*{*unused, *self._folder.glob("*.unused")}]
        finally:
            os.close(number)
        for path in unused:
            shutil.rmtree(path, ignore_errors=True)
        if unused:
            with _alone_in(self._folder):
                pass  # which deletes it, if nothing is left


def _set_aside(lock: Path) -> list[Path]:
    """Take a copy from where it is found; returns what is to be deleted of it."""
    aside = []
    for path in (lock.with_suffix(""), lock.with_suffix(".part")):
        target = path.with_name(f"{secrets.token_hex(8)}.unused")
        with contextlib.suppress(FileNotFoundError):
            path.rename(target)
            aside.append(target)
    lock.unlink()
    return aside


def _try_alone(number: int) -> bool:
    """Take a lock alone if nobody else has it."""
    try:
        fcntl.flock(number, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _is_at(number: int, path: Path) -> bool:
    """Whether an open file is still what has this path."""
    try:
        found = path.lstat()
    except FileNotFoundError:
        return False
    own = os.fstat(number)
    return (found.st_dev, found.st_ino) == (own.st_dev, own.st_ino)
