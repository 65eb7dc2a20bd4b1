"""Files that hold values for which there is no memory, and the folder that they are in.

The files have no name: they are gone when the daemon ends, however it ends. Small values
share files, so that many of them take few descriptors; the disk has the blocks of a file back when
its last value goes. Bookkeeping runs in the daemon's loop, reading and writing in threads.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import dataclasses
import errno
import logging
import mmap
import os
import tempfile
import threading
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple, TypeVar

from miniray.common.names import format_bytes
from miniray.common.process_state import RESERVE, limit
from miniray.system.boot_options import BootError

if TYPE_CHECKING:
    from collections.abc import Callable

logger = logging.getLogger(__name__)

T = TypeVar("T")

#: Values that are written or read at the same time: more would only make the disk seek.
_THREADS = 2
#: Bytes of a file that values share, and of the largest value that shares one.
_FILE_SIZE = 16 * 1024 * 1024
_SHARES = _FILE_SIZE // 4
#: Values begin at such multiples in a file: they are mapped in whole pages.
_BLOCK = 4096
#: Errors of a disk without space: the device is full, or the quota of this user.
DISK_IS_FULL = frozenset({errno.ENOSPC, errno.EDQUOT})
#: Bytes of one read or write: the end of the node waits for it.
_STEP = 16 * 1024 * 1024
#: For files that are too large for a ``/tmp`` in memory (hier(7)).
_LARGE_FILES = Path("/var/tmp")  # noqa: S108 - what is made there has no name
_IN_MEMORY = frozenset({"tmpfs", "ramfs"})


@dataclasses.dataclass(slots=True, eq=False, repr=False)
class _File:
    """An open file, and how many values are in it."""

    fd: int
    #: Where the next value begins.
    end: int = 0
    values: int = 0


@dataclasses.dataclass(slots=True, eq=False, repr=False)
class DiskPlace:
    """The place of a value on disk."""

    file: _File
    offset: int
    size: int

    @property
    def fd(self) -> int:
        return self.file.fd


class SpillFiles:
    """The spilled values of a node, in files of a folder that is made if need be."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        #: Bytes of disk that values take.
        self.used = 0
        #: The file that the next small value goes into.
        self._shared: _File | None = None
        self._files: set[_File] = set()
        self._stopped = threading.Event()
        self._threads = concurrent.futures.ThreadPoolExecutor(
            _THREADS, thread_name_prefix="miniray-spill"
        )
        #: Closes files, which takes long for large ones and must not wait for what is written.
        self._closer = concurrent.futures.ThreadPoolExecutor(1, thread_name_prefix="miniray-close")

    # --- places -----------------------------------------------------------------------------
    def reserve(self, size: int) -> DiskPlace:
        """Return a place for a value that the daemon writes."""
        if size > _SHARES:
            return self._add(self._made(open_file(self.folder)), size)
        if self._shared is None or self._shared.end + size > _FILE_SIZE:
            self._shared = self._made(open_file(self.folder))
        return self._add(self._shared, size)

    def reserve_file(self, size: int) -> DiskPlace:
        """Return a place that a process may write to: a file with no other value in it.

        Raises OSError if no file can be made; EMFILE if only reserved descriptors are left.
        """
        fd = open_file(self.folder)
        # The kernel gives the lowest free number: this one says how many are open.
        if fd >= limit() - RESERVE:
            os.close(fd)
            raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))
        return self._add(self._made(fd), size)

    def _made(self, fd: int) -> _File:
        file = _File(fd)
        self._files.add(file)
        return file

    def _add(self, file: _File, size: int) -> DiskPlace:
        place = DiskPlace(file, file.end, size)
        file.end += _blocks(size)
        file.values += 1
        self.used += _blocks(size)
        return place

    def release(self, place: DiskPlace) -> None:
        """Drop a value; processes that have mapped it keep its bytes."""
        file = place.file
        file.values -= 1
        self.used -= _blocks(place.size)
        if file.values or self._stopped.is_set():
            return
        self._files.remove(file)
        if file is self._shared:
            self._shared = None
        self._closer.submit(os.close, file.fd)

    async def all_closed(self) -> None:
        """Wait until the disk has the blocks of all files back whose values are gone."""
        await asyncio.get_running_loop().run_in_executor(self._closer, bool)  # after what it closes

    def stop(self) -> None:
        """End reads and writes in progress early, and begin no further ones."""
        self._stopped.set()
        self._threads.shutdown(wait=False, cancel_futures=True)
        self._closer.shutdown(wait=False)

    def close(self) -> None:
        self.stop()
        for file in self._files:
            os.close(file.fd)
        self._files.clear()
        self._shared = None
        self.used = 0

    # --- in threads -------------------------------------------------------------------------
    async def write(self, place: DiskPlace, memory: int) -> None:
        """Copy a value from the memory of this descriptor to its place."""
        await self._in_thread(write, place, memory, self._stopped.is_set)

    async def read(self, place: DiskPlace, memory: int) -> None:
        """Copy a value from its place to the memory of this descriptor, which is large enough."""
        await self._in_thread(read, place, memory, self._stopped.is_set)

    async def read_piece(self, place: DiskPlace, offset: int, length: int) -> bytes:
        return await self._in_thread(read_piece, place, offset, length)

    async def allocate(self, place: DiskPlace) -> None:
        """Have the disk set blocks aside for a value."""
        await self._in_thread(allocate, place)

    async def describe_disk(self) -> str:
        """Describe how full the disk is, and by what; empty if that is unknown."""
        loop = asyncio.get_running_loop()
        # In that thread, when the blocks of all files are back whose values are gone.
        disk = await loop.run_in_executor(self._closer, look_at, self.folder)
        return describe_disk(disk, self.used) if disk is not None else ""

    async def _in_thread(self, function: Callable[..., T], *args: object) -> T:
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self._threads, function, *args)


def _blocks(size: int) -> int:
    return -(-size // _BLOCK) * _BLOCK


def open_file(folder: Path) -> int:
    """Return the descriptor of a new file without a name; makes its folder if need be."""
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


# --- run in threads -----------------------------------------------------------------------------
def allocate(place: DiskPlace) -> None:
    os.posix_fallocate(place.fd, place.offset, place.size)


def write(place: DiskPlace, memory: int, stopped: Callable[[], bool]) -> None:
    """Write as ``SpillFiles.write`` does; return early once ``stopped()``."""
    with mmap.mmap(memory, place.size, prot=mmap.PROT_READ) as mapped, memoryview(mapped) as view:
        done = 0
        while done < place.size and not stopped():
            with view[done : done + _STEP] as part:
                done += os.pwrite(place.fd, part, place.offset + done)


def read(place: DiskPlace, memory: int, stopped: Callable[[], bool]) -> None:
    """Read as ``SpillFiles.read`` does; return early once ``stopped()``."""
    with mmap.mmap(memory, place.size) as mapped, memoryview(mapped) as view:
        done = 0
        while done < place.size and not stopped():
            with view[done : done + _STEP] as part:
                count = os.preadv(place.fd, [part], place.offset + done)
            if count == 0:
                raise OSError(errno.EIO, f"only {done} of {place.size} bytes of it are left")
            done += count


def read_piece(place: DiskPlace, offset: int, length: int) -> bytes:
    return os.pread(place.fd, min(length, place.size - offset), place.offset + offset)


class Disk(NamedTuple):
    """A file system; bytes."""

    size: int
    #: Bytes that users other than root may still take.
    free: int


def look_at(folder: Path) -> Disk | None:
    """Return the file system that a folder is on; None if that is unknown."""
    try:
        found = os.statvfs(folder)
    except OSError:  # the error that this would explain is reported in any case
        return None
    return Disk(found.f_blocks * found.f_frsize, found.f_bavail * found.f_frsize)


def describe_disk(disk: Disk, values: int) -> str:
    """Describe the use of a disk; ``values`` are bytes of this node's values."""
    taken = disk.size - disk.free
    values = min(values, taken)
    return (
        f"Of the {format_bytes(disk.size)} of that disk, values of this node take "
        f"{format_bytes(values)}, other files take {format_bytes(taken - values)}, and "
        f"{format_bytes(disk.free)} are free."
    )


# --- the folder ---------------------------------------------------------------------------------
def spill_folder(wanted: str, session: Path, large_files: Path = _LARGE_FILES) -> tuple[Path, str]:
    """Choose the folder for spilled values, and make it if need be; return a warning too, or "".

    On many machines ``/tmp`` is memory: what went there would leave the object store and take as
    much memory as before, until the kernel kills a process. If the session's folder is in memory,
    ``large_files`` serves instead.

    Raises:
        BootError: The configured folder cannot be used. A full disk is only a warning.
    """
    folder = _chosen(wanted, session, large_files)
    try:
        os.close(open_file(folder))
    except OSError as error:
        why = error.strerror or str(error)
        if wanted and error.errno not in DISK_IS_FULL:
            raise BootError(
                f"MINIRAY_SPILL_FOLDER is {wanted!r}, and no file can be made there: {why}. Set it "
                f"to a folder on a disk in which this user may make files, or leave it out."
            ) from None
        warning = (
            f"No file can be made in {folder}, where values go that do not fit into the object "
            f"store: {why}. What does not fit is refused as long as that is so; "
            f"MINIRAY_SPILL_FOLDER sets another folder."
        )
        logger.warning("%s", warning)
        return folder, warning
    if is_in_memory(folder):
        logger.warning(
            "%s, where values go that do not fit into the object store, is in memory too: set "
            "MINIRAY_SPILL_FOLDER to a folder on a disk",
            folder,
        )
    return folder, ""


def _chosen(wanted: str, session: Path, large_files: Path) -> Path:
    if wanted:
        return Path(wanted)
    if is_in_memory(session) and os.access(large_files, os.W_OK) and not is_in_memory(large_files):
        return large_files
    return session / "spilled"


def is_in_memory(folder: Path, mounts: Path = Path("/proc/self/mountinfo")) -> bool:
    """Return whether files in a folder take memory and no disk; a missing one has its parent's."""
    while not folder.exists() and folder != folder.parent:
        folder = folder.parent
    device = folder.stat().st_dev
    number = f"{os.major(device)}:{os.minor(device)}"
    for line in mounts.read_text(encoding="utf-8", errors="replace").splitlines():
        # 36 35 98:0 /mnt1 /mnt2 rw,noatime master:1 - ext3 /dev/root rw (proc_pid_mountinfo(5))
        mount, _, system = line.partition(" - ")
        _id, _parent, of_mount, *_ = mount.split()
        if of_mount == number:
            return system.split()[0] in _IN_MEMORY
    return False
