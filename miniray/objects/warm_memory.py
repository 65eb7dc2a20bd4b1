"""Memory that this process has written before and keeps mapped for its next value.

Copying into mapped memory is twice as fast as writing it through its descriptor, but mapping it
takes as long as a copy. So the first value in a piece of memory is written, at the second it is
mapped, and from the third on both are saved.
"""

from __future__ import annotations

import collections
import os
import threading
from typing import TYPE_CHECKING

from miniray.values.mapped import copy_into, map_memory

if TYPE_CHECKING:
    import ctypes
    from collections.abc import Iterable, Sequence

    from miniray.wire.node_link import NodeLink

#: Stands for a number of memory where a value has to be written to disk.
ON_DISK = 0
#: Linux writes at most this much with one call.
_WRITE_LIMIT = 0x7FFFF000
_IOV_LIMIT = 1024
#: Pieces of memory that stay mapped, and bytes of them.
_KEPT = 16
_KEPT_BYTES = 1 << 30
#: Pieces of memory that are remembered as written once.
_REMEMBERED = 64


class WarmMemory:
    """What this process keeps mapped for writing. Thread-safe."""

    def __init__(self, link: NodeLink) -> None:
        self._link = link
        # Reentrant: a garbage collection may run user code, which may put, in any section.
        self._lock = threading.RLock()
        self._blocks: collections.OrderedDict[int, ctypes.Array[ctypes.c_char]] = (
            collections.OrderedDict()
        )
        self._bytes = 0
        self._written: collections.OrderedDict[int, None] = collections.OrderedDict()

    def write(self, memory: int, fd: int, size: int, pieces: Sequence[bytes | memoryview]) -> None:
        """Write a value of ``size`` bytes, in pieces, to the beginning of a piece of memory.

        Args:
            memory: Its number, or ON_DISK.
            fd: Its descriptor, which stays open; -1 if the daemon knows that it is mapped here.
            size: Bytes of all pieces.
            pieces: What to write one after the other.
        """
        if fd < 0:
            block = self._blocks.get(memory)
            if block is not None:
                with self._lock:
                    if memory in self._blocks:
                        self._blocks.move_to_end(memory)
                _copy(block, pieces)
                return
            # Another thread has just unmapped it to make room.
            _, fd = self._link.node_request("memory", (memory,))
            try:
                write_all(fd, pieces)
            finally:
                os.close(fd)
        elif memory == ON_DISK:
            write_all(fd, pieces)
        elif memory in self._written:
            block = map_memory(fd, os.fstat(fd).st_size, shared=True)
            self._keep(memory, block)
            _copy(block, pieces)
        else:
            write_all(fd, pieces)
            with self._lock:
                self._written[memory] = None
                while len(self._written) > _REMEMBERED:
                    self._written.popitem(last=False)

    def _keep(self, memory: int, block: ctypes.Array[ctypes.c_char]) -> None:
        too_many = []
        with self._lock:
            self._written.pop(memory, None)
            if len(block) > _KEPT_BYTES:
                return
            self._blocks[memory] = block
            self._bytes += len(block)
            while len(self._blocks) > _KEPT or self._bytes > _KEPT_BYTES:
                number, old = self._blocks.popitem(last=False)
                self._bytes -= len(old)
                too_many.append(number)
        self._link.node_notice("mapped_memory", memory)
        if too_many:
            del old
            self._link.node_notice("unmapped_memory", too_many)

    def give_up(self, numbers: Iterable[int]) -> None:
        """Unmap memory that the daemon wants back."""
        for number in numbers:
            with self._lock:
                self._written.pop(number, None)
                block = self._blocks.pop(number, None)
                if block is not None:
                    self._bytes -= len(block)
            del block
        self._link.node_notice("unmapped_memory", list(numbers))

    def close(self) -> None:
        with self._lock:
            self._blocks.clear()
            self._bytes = 0


def _copy(block: ctypes.Array[ctypes.c_char], pieces: Sequence[bytes | memoryview]) -> None:
    offset = 0
    for piece in pieces:
        copy_into(block, offset, piece)
        offset += len(piece)


def write_all(fd: int, pieces: Iterable[bytes | memoryview]) -> None:
    """Write pieces one after the other to the beginning of a file."""
    offset = 0
    pending = collections.deque(pieces)
    while pending:
        batch: list[bytes | memoryview] = []
        total = 0
        for piece in pending:
            if len(batch) == _IOV_LIMIT or total >= _WRITE_LIMIT:
                break
            batch.append(piece)
            total += len(piece)
        written = os.pwritev(fd, batch, offset)
        offset += written
        while pending and written >= len(pending[0]):
            written -= len(pending[0])
            pending.popleft()
        if written:
            pending[0] = memoryview(pending[0])[written:]
