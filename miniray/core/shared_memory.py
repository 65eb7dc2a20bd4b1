"""Large values: written once into memory that the daemon holds, read without a copy.

A segment is a memfd of the node daemon. Writers get its descriptor and use
pwritev, which needs no mapping and copies at memory speed into a warm segment.
Readers map it copy-on-write, so that no writer can disturb another reader. The
daemon is told when the last view in this process is gone.
"""

from __future__ import annotations

import collections
import contextlib
import ctypes
import functools
import mmap
import os
import weakref
from typing import TYPE_CHECKING, Any

from miniray.core.protocol import VALUE_SHARED
from miniray.object_ref import hooks

if TYPE_CHECKING:
    from miniray.core.node_link import NodeLink
    from miniray.core.objects import Value
    from miniray.core.serialization import Serialized

#: Linux writes at most this much with one call.
_WRITE_LIMIT = 0x7FFFF000
_IOV_LIMIT = 1024
_MAP_FAILED = ctypes.c_void_p(-1).value


class Mapping:
    """A mapped segment: ``view`` is valid as long as the mapping or a view of it lives."""

    __slots__ = ("__weakref__", "form", "segment", "view")

    def __init__(self, view: memoryview, form: int, segment: int) -> None:
        self.view = view
        self.form = form
        self.segment = segment


@functools.cache
def _libc() -> ctypes.CDLL:
    libc = ctypes.CDLL(None, use_errno=True)
    libc.mmap.restype = ctypes.c_void_p
    libc.mmap.argtypes = [
        ctypes.c_void_p,
        ctypes.c_size_t,
        ctypes.c_int,
        ctypes.c_int,
        ctypes.c_int,
        ctypes.c_long,
    ]
    libc.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
    return libc


class SharedMemory:
    """This process's side of the node's object store. Thread-safe."""

    def __init__(self, link: NodeLink, node_id: bytes) -> None:
        self._link = link
        self._node_id = node_id
        #: Segments whose last view went away; reported in batches.
        self._unmapped: collections.deque[int] = collections.deque()

    # --- writing -----------------------------------------------------------------
    def write(self, value: Serialized, owner: bytes, owner_node: bytes) -> Value:
        """Store a value on this node for an owner on any; returns what others need to read it.

        Raises:
            ObjectStoreFullError: the store has no room for it.
        """
        self.report_unmapped()
        segment, fd = self._link.node_request(
            "create_segment", (value.size, value.form, owner, owner_node)
        )
        try:
            _write_all(fd, value.pieces())
        except BaseException:
            self._link.node_notice("seal_segment", segment)
            self._link.node_notice("free_segment", self._node_id, segment)
            raise
        finally:
            os.close(fd)
        self._link.node_notice("seal_segment", segment)
        contained = tuple((ref.binary(), ref._owner_node) for ref in value.refs)
        return (VALUE_SHARED, (self._node_id, segment, value.size), contained)

    # --- reading -----------------------------------------------------------------
    def map(self, payload: Any) -> Mapping:
        """Map a value, fetched from its node first if it is on another.

        Raises:
            ObjectLostError: its node, or the segment, is gone.
        """
        self.report_unmapped()
        node_id, segment, size = payload
        (local, form), fd = self._link.node_request("map_segment", (node_id, segment, size))
        try:
            return self._map(fd, size, form, local)
        finally:
            os.close(fd)

    def _map(self, fd: int, size: int, form: int, segment: int) -> Mapping:
        libc = _libc()
        address = libc.mmap(None, size, mmap.PROT_READ | mmap.PROT_WRITE, mmap.MAP_PRIVATE, fd, 0)
        if address == _MAP_FAILED or address is None:
            code = ctypes.get_errno()
            self._unmapped.append(segment)
            raise OSError(code, f"could not map {size} bytes: {os.strerror(code)}")
        block = (ctypes.c_char * size).from_address(address)
        weakref.finalize(block, _unmap, address, size, self._unmapped, segment).atexit = False
        return Mapping(memoryview(block).cast("B"), form, segment)

    def report_unmapped(self) -> None:
        """Tell the daemon which segments this process reads no more."""
        if not self._unmapped:
            return
        gone = []
        with contextlib.suppress(IndexError):  # another thread may take some of them
            while True:
                gone.append(self._unmapped.popleft())
        self._link.node_notice("unmapped", gone)

    # --- freeing -----------------------------------------------------------------
    def free(self, value: Value) -> None:
        """The owner has no use for a value any more."""
        node_id, segment, _size = value[1]
        self._link.node_notice("free_segment", node_id, segment)


def _unmap(address: int, size: int, unmapped: collections.deque[int], segment: int) -> None:
    _libc().munmap(address, size)
    unmapped.append(segment)
    # May run in a garbage collection anywhere. An id that nobody has makes the runtime
    # look at its queues, and so report.
    hooks.dropped.append(b"")
    hooks.call()


def _write_all(fd: int, pieces: list[bytes | memoryview]) -> None:
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
