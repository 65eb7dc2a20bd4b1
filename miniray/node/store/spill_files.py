"""Files that hold values for which there is no memory.

Values share files, so that many small ones take few descriptors, and give their part of the disk
back as they go. The files have no name: nothing is left of them when the daemon ends, however.
What opens, counts and releases runs in the daemon's loop; what reads and writes runs in threads.
"""

from __future__ import annotations

import errno
import functools
import logging
import mmap
import os
import tempfile
from typing import TYPE_CHECKING

from miniray.common.descriptors import RESERVE, limit
from miniray.node.store.freeing import at_once, punch_hole

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from miniray.node.store.freeing import Free

logger = logging.getLogger(__name__)

#: A file takes values until it has this many bytes.
_FILE_SIZE = 256 * 1024 * 1024
#: Parts of a file begin at such multiples: the disk gives back whole blocks only.
_BLOCK = 4096
#: The disk has no room for more: the device, or what this user may take of it.
DISK_IS_FULL = frozenset({errno.ENOSPC, errno.EDQUOT})
#: Bytes that one call of the system reads or writes at most: the end of the node waits for it.
_STEP = 16 * 1024 * 1024


def open_file(folder: Path) -> int:
    """A new file without a name; returns its descriptor.

    Args:
        folder: Where it is made; it is made too if it does not exist.

    Raises:
        OSError: no file can be made there.
    """
    folder.mkdir(parents=True, exist_ok=True)
    try:
        return os.open(folder, os.O_TMPFILE | os.O_RDWR | os.O_CLOEXEC, 0o600)
    except OSError as error:
        if error.errno not in (errno.EOPNOTSUPP, errno.EISDIR, errno.EINVAL):
            raise
    # A file system that cannot make files without a name.
    fd, name = tempfile.mkstemp(prefix="miniray-spilled-", dir=folder)
    os.unlink(name)
    return fd


class _File:
    """One file on disk."""

    __slots__ = ("end", "fd", "places")

    def __init__(self, fd: int) -> None:
        self.fd = fd
        #: Where the next value begins.
        self.end = 0
        #: Values in it.
        self.places = 0


class Place:
    """Where a value is on disk."""

    __slots__ = ("_file", "left_open", "offset", "shown", "size")

    def __init__(self, file: _File, offset: int, size: int) -> None:
        self._file = file
        self.offset = offset
        self.size = size
        #: Who maps the value may have mapped it here.
        self.shown = False
        #: Somebody may look at it even when nobody maps it any more: it must not be punched.
        self.left_open = False

    @property
    def fd(self) -> int:
        """Descriptor of the file."""
        return self._file.fd


class SpillFiles:
    """The files of a node.

    Args:
        folder: Where they are made; it is made too if it does not exist.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        #: Bytes of disk that values take.
        self.used = 0
        #: Does some work, then calls the second function: how files are closed.
        self.free: Free = at_once
        self._current: _File | None = None
        self._files: set[_File] = set()

    def reserve(self, size: int, *, alone: bool = False) -> Place:
        """A place for a value of so many bytes.

        Args:
            size: Bytes.
            alone: Whether it has a file to itself, which may be shown to other processes.

        Raises:
            OSError: no file can be made; EMFILE if one that a value has to itself would take a
                descriptor that is needed for more than values.
        """
        file = self._current
        if alone:
            file = _File(self._open_spare())
            self._files.add(file)
        elif file is None or file.end + size > _FILE_SIZE:
            file = self._current = _File(open_file(self.folder))
            self._files.add(file)
        length = -(-size // _BLOCK) * _BLOCK
        place = Place(file, file.end, size)
        file.end += length
        file.places += 1
        self.used += length
        return place

    def _open_spare(self) -> int:
        fd = open_file(self.folder)
        # The kernel gives the lowest free number: this one says how many are open.
        if fd < limit() - RESERVE:
            return fd
        os.close(fd)
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))

    def is_to_punch(self, place: Place) -> bool:
        """Whether a place is to be punched before it is released: its file has other values."""
        return place._file.places > 1 and not place.left_open

    def release(self, place: Place) -> None:
        """A value is not needed any more; its part of the disk was punched, if it was to be."""
        length = -(-place.size // _BLOCK) * _BLOCK
        file = place._file
        file.places -= 1
        if file.places or file not in self._files:
            self._freed(length)
            return
        if file is self._current:
            self._current = None
        self._files.remove(file)
        self.free(functools.partial(os.close, file.fd), functools.partial(self._freed, length))

    def _freed(self, length: int) -> None:
        self.used -= length

    def close(self) -> None:
        """Give all of it up. Nothing may be reading or writing."""
        for file in self._files:
            os.close(file.fd)
        self._files.clear()
        self._current = None
        self.used = 0


# --- in threads ---------------------------------------------------------------------------------
def allocate(place: Place) -> None:
    """Have the disk's blocks for a value set aside.

    Raises:
        OSError: the disk is full, or broken.
    """
    os.posix_fallocate(place.fd, place.offset, place.size)


def write(place: Place, memory: int, stopped: Callable[[], bool]) -> None:
    """Copy a value from the memory of this descriptor to its place.

    Raises:
        OSError: the disk is full, or broken.
    """
    with mmap.mmap(memory, place.size, prot=mmap.PROT_READ) as mapped, memoryview(mapped) as view:
        done = 0
        while done < place.size and not stopped():
            with view[done : done + _STEP] as part:
                done += os.pwrite(place.fd, part, place.offset + done)


def read(place: Place, memory: int, stopped: Callable[[], bool]) -> None:
    """Copy a value from its place to the memory of this descriptor, which is large enough.

    Raises:
        OSError: the disk is broken.
    """
    with mmap.mmap(memory, place.size) as mapped, memoryview(mapped) as view:
        done = 0
        while done < place.size and not stopped():
            with view[done : done + _STEP] as part:
                count = os.preadv(place.fd, [part], place.offset + done)
            if count == 0:
                raise OSError(errno.EIO, f"only {done} of {place.size} bytes of it are left")
            done += count


def read_piece(place: Place, offset: int, length: int) -> bytes:
    """Some bytes of a value at its place."""
    return os.pread(place.fd, min(length, place.size - offset), place.offset + offset)


def punch(place: Place) -> None:
    """Give its part of a file back to the disk; if that cannot be done, it goes with the file."""
    length = -(-place.size // _BLOCK) * _BLOCK
    try:
        punch_hole(place.fd, place.offset, length)
    except OSError as error:
        if error.errno not in (errno.EOPNOTSUPP, errno.ENOSYS):
            logger.warning("could not give %d bytes of disk back: %s", length, error.strerror)
