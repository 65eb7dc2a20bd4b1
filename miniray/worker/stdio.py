"""The standard streams of a worker, and the name under which each line is written.

That is the name of the running task or method, whether Python, C code, a child process or
faulthandler writes. When it changes and a stream's pipe is empty, the new name is
put into memory that the daemon checks when it reads (the first page of the worker's file, whose
other pages hold its spec), which costs no wake-up. If something is in the pipe, a mark behind that
says so, which ``common/log_lines.py`` understands. Only writes: the daemon decides where the
output goes.

There is no lock in here: a signal handler may print while a print is under way, a
fork may happen in any thread, and at interpreter exit a thread that holds a lock
never runs again. A write of one line is one ``write(2)``, which the kernel keeps whole.
"""

from __future__ import annotations

import ctypes
import fcntl
import functools
import io
import marshal
import mmap
import os
import select
import struct
import sys
import termios
from typing import TYPE_CHECKING, Any, TextIO

from miniray.common.log_lines import clean_name, mark
from miniray.common.names import short_name
from miniray.common.process_state import WORKER_FILE
from miniray.common.spans import RING_BYTES, SPANS, Ring
from miniray.values.mapped import map_memory

if TYPE_CHECKING:
    from _typeshed import ReadableBuffer

_PAGE = mmap.PAGESIZE
#: Bytes of a worker's file before its spec: that page, and the ring of its calls.
_SHARED = _PAGE + RING_BYTES
#: How often the name has changed, and how many bytes the name has.
_HEAD = struct.Struct("<QH")
#: Each stream has two places for its name, and a byte that says which of them is good.
_FIRST, _PLACE = 16, 1000
#: Bytes of a name.
MAX_NAME = _PLACE - _HEAD.size


def make(spec: dict[str, Any]) -> int:
    """Make the file of a worker, and write what it is to be."""
    fd = os.memfd_create(WORKER_FILE, os.MFD_CLOEXEC)
    with open(fd, "wb", closefd=False) as file:
        file.truncate(_SHARED)
        file.seek(_SHARED)
        file.write(marshal.dumps(spec))
    return fd


def read_spec(fd: int) -> dict[str, Any]:
    spec: dict[str, Any] = marshal.loads(os.pread(fd, os.fstat(fd).st_size - _SHARED, _SHARED))
    return spec


def has_unread(pipe: int) -> bool:
    """Return whether something is in a pipe; either end will do."""
    return fcntl.ioctl(pipe, termios.FIONREAD, b"\0\0\0\0") != b"\0\0\0\0"


class NamePage:
    """The first page, which stays when the descriptor is closed, and the ring behind it."""

    def __init__(self, fd: int) -> None:
        self._bytes = memoryview(map_memory(fd, _SHARED, shared=True)).cast("B")
        #: The worker's last calls that took long.
        self.calls = Ring(self._bytes[_PAGE:])

    def write(self, stream: int, number: int, name: bytes) -> None:
        """Name what is written to a stream from now on.

        Args:
            stream: 0 for stdout, 1 for stderr.
            number: How often the name has changed.
            name: The name, of at most ``MAX_NAME`` bytes.
        """
        page = self._bytes
        place = 1 - page[stream]
        at = _FIRST + (2 * stream + place) * _PLACE
        page[at : at + _HEAD.size + len(name)] = _HEAD.pack(number, len(name)) + name
        page[stream] = place  # a reader that looks before sees the name before

    def read(self, stream: int) -> tuple[int, str]:
        """Return the number and the name that were written last."""
        while True:
            place = self._bytes[stream]
            at = _FIRST + (2 * stream + place) * _PLACE
            number, size = _HEAD.unpack_from(self._bytes, at)
            name = bytes(self._bytes[at + _HEAD.size :][:size])
            if self._bytes[stream] == place:
                return number, name.decode(errors="replace")


#: _IOLBF of <stdio.h>.
_LINE_BUFFERED = 1
_name = ""
_names: _Names | None = None
_fork_hook_registered = False


class _Names:
    """Publishes to the daemon the name under which the streams are written."""

    def __init__(self, file: int) -> None:
        self._page = NamePage(file)
        SPANS.write_to(self._page.calls)
        # User code may put other files in the place of descriptors 1 and 2.
        self._pipes = (os.dup(1), os.dup(2))
        self._number = 0

    def change(self, name: str) -> None:
        self._number += 1
        encoded = _encoded(name)
        for stream, pipe in enumerate(self._pipes):
            if has_unread(pipe):
                _write_all(pipe, mark(self._number, encoded))
            else:
                self._page.write(stream, self._number, encoded)


class DescriptorWriter(io.BufferedIOBase):
    """Writes all bytes that it is given to a descriptor at once.

    Args:
        descriptor: Where to write; closing the writer leaves it open, because C code
            and child processes write to it too.
        name: The stream's ``name``, such as ``<stdout>``.
    """

    mode = "wb"

    def __init__(self, descriptor: int, name: str) -> None:
        self._descriptor = descriptor
        self.name = name

    def writable(self) -> bool:
        return True

    def fileno(self) -> int:
        return self._descriptor

    def isatty(self) -> bool:
        return os.isatty(self._descriptor)

    def write(self, data: ReadableBuffer) -> int:
        """Write all bytes; return how many were given."""
        content = bytes(data)
        _write_all(self._descriptor, content)
        return len(content)


def set_name(name: str) -> None:
    """Name what is written from now on, in both streams."""
    global _name
    if name == _name:
        return
    flush_all()  # an unfinished line belongs to the name before
    _name = name
    if _names is not None:
        _names.change(name)


def install(file: int) -> None:
    """Make ``sys.stdout`` and ``sys.stderr`` this worker's streams on descriptors 1 and 2.

    Text is UTF-8, and what UTF-8 can't hold is written with backslashes. A line is
    passed on when it ends, and anything at a flush; a line of C code's as well.
    """
    global _fork_hook_registered, _names
    _names = _Names(file)
    libc = ctypes.CDLL(None)
    libc.setvbuf(ctypes.c_void_p.in_dll(libc, "stdout"), None, _LINE_BUFFERED, 0)
    flush_all()  # what the template has left in the old streams
    sys.stdout = sys.__stdout__ = _text_stream(1, "<stdout>")  # type: ignore[misc]
    sys.stderr = sys.__stderr__ = _text_stream(2, "<stderr>")  # type: ignore[misc]
    if not _fork_hook_registered:
        # An unfinished line would otherwise be written by the child as well.
        os.register_at_fork(before=flush_all, after_in_child=_forget_names)
        _fork_hook_registered = True


def flush_all() -> None:
    """Write unfinished lines; for exits that skip the interpreter's own."""
    _flush(sys.stdout)
    _flush(sys.stderr)


def flush_c() -> None:
    """Write what C code has left in its own buffers; for exits that skip the C library's."""
    ctypes.CDLL(None).fflush(None)


@functools.lru_cache(maxsize=256)
def _encoded(name: str) -> bytes:
    return clean_name(short_name(name)).encode(errors="replace")[:MAX_NAME]


def _forget_names() -> None:
    """Keep the name that the parent has: a child of user code cannot change it."""
    global _names
    _names = None


def _flush(stream: TextIO) -> None:
    try:
        stream.flush()
    except Exception:  # noqa: BLE001 - a stream of user code's
        # It is None or closed, fails by itself, or has lost its reader.
        # A message about it would have no reader either.
        return


def _text_stream(descriptor: int, name: str) -> io.TextIOWrapper:
    return io.TextIOWrapper(
        DescriptorWriter(descriptor, name),
        encoding="utf-8",
        errors="backslashreplace",
        line_buffering=True,
    )


def _write_all(descriptor: int, content: bytes) -> None:
    written = 0
    while written < len(content):
        try:
            written += os.write(descriptor, memoryview(content)[written:])
        except BlockingIOError:  # noqa: PERF203 - a child has made the shared pipe non-blocking
            select.select([], [descriptor], [])
