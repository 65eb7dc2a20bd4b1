"""The standard streams of a worker, which say under which name each line was written.

Before the first write under a new name, a stream writes the mark that
``node/log_lines.py`` understands. What C code and child processes write to the same
descriptors passes through as it is. Reads nothing, and knows nothing of where the
output goes.

There is no lock in here: a signal handler may print while a print is under way, a
fork may happen in any thread, and at interpreter exit a thread that holds a lock
never runs again. A write of one line is one ``write(2)``, which the kernel keeps whole.
"""

from __future__ import annotations

import io
import os
import select
import sys
from typing import TYPE_CHECKING, TextIO

from miniray.core.names import short_name
from miniray.node.log_lines import mark

if TYPE_CHECKING:
    from _typeshed import ReadableBuffer

_name = ""
_name_mark = b""
_fork_hook_registered = False


class DescriptorWriter(io.BufferedIOBase):
    """Writes all of what it is given to a descriptor at once, after the mark of the name.

    Args:
        descriptor: Where to write; closing the writer leaves it open, because C code
            and child processes write to it too.
        name: The stream's ``name``, such as ``<stdout>``.
    """

    mode = "wb"

    def __init__(self, descriptor: int, name: str) -> None:
        self._descriptor = descriptor
        self._written_mark = b""
        self.name = name

    def writable(self) -> bool:
        """Always true."""
        return True

    def fileno(self) -> int:
        """The descriptor, which faulthandler and subprocesses use."""
        return self._descriptor

    def isatty(self) -> bool:
        """Whether the descriptor is a terminal."""
        return os.isatty(self._descriptor)

    def write(self, data: ReadableBuffer) -> int:
        """Write all bytes; returns how many were given."""
        content = bytes(data)
        if not content:
            return 0
        current = _name_mark
        if current == self._written_mark:
            _write_all(self._descriptor, content)
        else:
            # Another thread or a signal handler may come here at the same moment; a mark
            # that is written twice does no harm, one that comes too late would.
            _write_all(self._descriptor, current + content)
            self._written_mark = current
        return len(content)


def set_name(name: str) -> None:
    """What is written from now on is written under this name, in both streams."""
    global _name, _name_mark
    if name == _name:
        return
    flush_all()  # an unfinished line belongs to the name before
    _name, _name_mark = name, mark(short_name(name))


def install() -> None:
    """Make ``sys.stdout`` and ``sys.stderr`` this worker's streams on descriptors 1 and 2.

    Text is UTF-8, and what UTF-8 can't hold is written with backslashes. A line is
    passed on when it ends, and anything at a flush.
    """
    global _fork_hook_registered
    flush_all()  # what the template has left in the old streams
    sys.stdout = sys.__stdout__ = _text_stream(1, "<stdout>")  # type: ignore[misc]
    sys.stderr = sys.__stderr__ = _text_stream(2, "<stderr>")  # type: ignore[misc]
    if not _fork_hook_registered:
        # An unfinished line would otherwise be written by the child as well.
        os.register_at_fork(before=flush_all)
        _fork_hook_registered = True


def flush_all() -> None:
    """Write what is left of unfinished lines; for exits that skip the interpreter's own."""
    _flush(sys.stdout)
    _flush(sys.stderr)


def flush_c() -> None:
    """Write what C code has left in its own buffers; for exits that skip the C library's."""
    import ctypes

    ctypes.CDLL(None).fflush(None)


def _flush(stream: TextIO) -> None:
    try:
        stream.flush()
    except Exception:  # noqa: BLE001 - a stream of user code's
        # It is None or closed, fails by itself, or nobody reads any more.
        # Nothing can be told to anyone then, so there is nothing to do.
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
