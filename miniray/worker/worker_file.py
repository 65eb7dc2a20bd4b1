"""The file without a name that a worker and its daemon share.

Its first page says under which name the worker writes to its standard streams: the worker
changes that as often as it likes, and the daemon looks when something was written, so neither
wakes the other. The spec of the worker comes behind it.
"""

from __future__ import annotations

import fcntl
import marshal
import mmap
import os
import struct
import termios
from typing import Any

from miniray.values.mapped import map_memory

_PAGE = mmap.PAGESIZE
#: How often the name has changed, and how many bytes the name has.
_HEAD = struct.Struct("<QH")
#: Each stream has two places for its name, and a byte that says which of them is good.
_FIRST, _PLACE = 16, 1000
#: Bytes of a name.
MAX_NAME = _PLACE - _HEAD.size


def make(spec: dict[str, Any]) -> int:
    """Make the file of a worker, and write what it is to be."""
    fd = os.memfd_create("miniray-worker", os.MFD_CLOEXEC)
    with open(fd, "wb", closefd=False) as file:
        file.write(bytes(_PAGE) + marshal.dumps(spec))
    return fd


def read_spec(fd: int) -> dict[str, Any]:
    """Read what this worker is to be."""
    spec: dict[str, Any] = marshal.loads(os.pread(fd, os.fstat(fd).st_size - _PAGE, _PAGE))
    return spec


def has_unread(pipe: int) -> bool:
    """Return whether something is in a pipe; either end will do."""
    return fcntl.ioctl(pipe, termios.FIONREAD, b"\0\0\0\0") != b"\0\0\0\0"


class NamePage:
    """The first page, which stays when the descriptor is closed.

    Args:
        fd: The file.
    """

    def __init__(self, fd: int) -> None:
        self._bytes = memoryview(map_memory(fd, _PAGE, shared=True)).cast("B")

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
