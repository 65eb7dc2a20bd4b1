"""The memory under the segments of a node: memfds, which stay warm while unused.

Writing into memory that has pages is several times faster than into new memory, and faster again
for a process that has it mapped. So freed memory waits in a pool for the next writer, if possible
for the one that has it mapped. Memory that is given up loses its pages, and no longer counts,
even if processes still have it mapped.
"""

from __future__ import annotations

import asyncio
import bisect
import concurrent.futures
import ctypes
import dataclasses
import errno
import functools
import logging
import os
from typing import TYPE_CHECKING, Any

from miniray.common.process_state import OUT_OF_DESCRIPTORS, RESERVE, limit
from miniray.exceptions import ObjectStoreFullError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    #: Sends a push to a process of this node: (process, topic, body).
    Push = Callable[[bytes, str, tuple[Any, ...]], object]

logger = logging.getLogger(__name__)

#: Memory of the pool may be this many times larger than the value that takes it.
_SLACK = 2
#: Bytes from which on giving memory back takes so long (1 ms; 50 ms for 256 MiB) that others would
#: notice: a thread does it.
_LARGE = 4 * 1024 * 1024
_FALLOC_FL_KEEP_SIZE = 1
_FALLOC_FL_PUNCH_HOLE = 2


@dataclasses.dataclass(slots=True, eq=False, repr=False)
class Memory:
    """One memfd."""

    number: int
    fd: int
    capacity: int
    pooled: bool = False
    #: Processes that have it mapped for writing, whatever its content.
    writers: set[bytes] = dataclasses.field(default_factory=set)


class Memories:
    """All memory of a node: at most ``capacity`` bytes.

    ``push`` requests a process to unmap memory (``give_up_memory``); ``changed`` is set when memory
    has gone back to the kernel.
    """

    def __init__(self, capacity: int, push: Push, changed: asyncio.Event) -> None:
        self.capacity = capacity
        self._push = push
        self._changed = changed
        #: Bytes in use, waiting in the pool, and going back to the kernel.
        self.used = 0
        self.pooled = 0
        self.closing = 0
        self._thread = concurrent.futures.ThreadPoolExecutor(1, thread_name_prefix="miniray-free")
        self._next = 1
        self._all: dict[int, Memory] = {}
        #: The pool: (capacity, number), sorted.
        self._pool: list[tuple[int, int]] = []
        #: The memory that each process has mapped for writing.
        self._mapped_by: dict[bytes, set[int]] = {}

    @property
    def taken(self) -> int:
        """Bytes that cannot be granted: all but the pool, which gives way."""
        return self.used + self.closing

    # --- taking and giving back ------------------------------------------------------------
    def take(self, capacity: int, process: bytes, others: int) -> Memory:
        """Return memory of at least ``capacity`` bytes, whole pages, for a process that will write.

        ``others`` is how many values are in the store, for the error.

        Raises:
            ObjectStoreFullError: It does not fit, or not before memory of the pool that gives way
                has gone back to the kernel.
            OSError: EMFILE, there is no descriptor for it.
        """
        memory = self._take_pooled(capacity, process)
        if memory is None:
            self._make_room(capacity)
            fd = self._open(others)
            os.ftruncate(fd, capacity)
            memory = self._all[self._next] = Memory(self._next, fd, capacity)
            self._next += 1
        self.used += memory.capacity
        return memory

    def _take_pooled(self, capacity: int, process: bytes) -> Memory | None:
        fits = [
            memory
            for memory in map(self._all.__getitem__, self._mapped_by.get(process, ()))
            if memory.pooled and capacity <= memory.capacity <= capacity * _SLACK
        ]
        if fits:
            memory = min(fits, key=lambda memory: memory.capacity)
            index = bisect.bisect_left(self._pool, (memory.capacity, memory.number))
        else:
            index = bisect.bisect_left(self._pool, (capacity, -1))
            if index == len(self._pool) or self._pool[index][0] > capacity * _SLACK:
                return None
        return self._unpool(index)

    def _unpool(self, index: int) -> Memory:
        capacity, number = self._pool.pop(index)
        memory = self._all[number]
        memory.pooled = False
        self.pooled -= capacity
        return memory

    def _open(self, others: int) -> int:
        while True:
            fd = _memfd()
            if fd is not None:
                return fd
            if not self._pool:
                break
                # One descriptor is wanted: the smallest memory gives way, at once.
            self._close(self._unpool(0), at_once=True)
        raise OSError(
            errno.EMFILE,
            f"Too many open files: of the {others} values in the object store of this node, each "
            f"that is looked at or written takes one, and its limit is {limit()}. Drop what is no "
            f"longer needed, or raise the limit (`ulimit -n`) before the node is started",
        )

    def _make_room(self, needed: int) -> None:
        if self.used + needed > self.capacity:
            raise ObjectStoreFullError(needed=needed, used=self.used, capacity=self.capacity)
        while self._pool and self.used + self.pooled + needed > self.capacity:
            self._close(self._unpool(-1))
        if self.taken + self.pooled + needed > self.capacity:
            raise ObjectStoreFullError(needed=needed, used=self.taken, capacity=self.capacity)

    def give_back(self, memory: Memory, *, again: bool = True) -> None:
        """Return memory to the pool, or give it up if a process may still read or write it."""
        self.used -= memory.capacity
        if not again:
            self._close(memory, empty=False)
            return
        if memory.fd >= limit() // 2:  # that many are open that workers may lack them
            self._close(memory)
            return
        memory.pooled = True
        bisect.insort(self._pool, (memory.capacity, memory.number))
        self.pooled += memory.capacity
        # Warm memory is kept for as much as is in use: of an idle node, for a quarter of the store.
        most = min(max(self.used, self.capacity // 4), self.capacity - self.used)
        while self._pool and self.pooled > most:
            self._close(self._unpool(0))

    def _close(self, memory: Memory, *, empty: bool = True, at_once: bool = False) -> None:
        """Give up unused memory, in a thread if it is large and not ``at_once``.

        Its pages go even if it is mapped, unless ``empty`` is False: a process may read them.
        """
        del self._all[memory.number]
        for process in memory.writers:
            self._drop(process, memory.number)
            self._push(process, "give_up_memory", ((memory.number,),))
        capacity = memory.capacity
        work = functools.partial(_free, memory.fd, capacity if empty and memory.writers else 0)
        if at_once or capacity < _LARGE:
            work()
            return
        try:
            freeing = asyncio.get_running_loop().run_in_executor(self._thread, work)
        except RuntimeError:  # the node ends: there is no thread any more
            work()
            return
        self.closing += capacity
        freeing.add_done_callback(functools.partial(self._freed, capacity))

    def _freed(self, capacity: int, freeing: asyncio.Future[None]) -> None:
        if not freeing.cancelled() and freeing.exception() is not None:
            logger.error("could not give memory back", exc_info=freeing.exception())
        self.closing -= capacity
        self._changed.set()

    def descriptor(self, number: int) -> int:
        return self._all[number].fd

    # --- what writers have mapped -------------------------------------------------------------
    def mapped(self, number: int, process: bytes) -> None:
        """Record that a process keeps memory mapped that it has written."""
        memory = self._all.get(number)
        if memory is None:  # it was given up at the same time
            self._push(process, "give_up_memory", ((number,),))
            return
        memory.writers.add(process)
        self._mapped_by.setdefault(process, set()).add(number)

    def unmapped(self, numbers: Iterable[int], process: bytes) -> None:
        for number in numbers:
            memory = self._all.get(number)
            if memory is not None:
                memory.writers.discard(process)
            self._drop(process, number)

    def _drop(self, process: bytes, number: int) -> None:
        mine = self._mapped_by.get(process)
        if mine is not None:
            mine.discard(number)
            if not mine:
                del self._mapped_by[process]

    def process_died(self, process: bytes) -> None:
        self.unmapped(tuple(self._mapped_by.get(process, ())), process)

    def close(self) -> None:
        """Close every descriptor; memory that is being freed is freed before the process ends."""
        self._thread.shutdown(wait=False)
        for memory in self._all.values():
            os.close(memory.fd)
        self._all.clear()
        self._pool.clear()
        self._mapped_by.clear()


def _memfd() -> int | None:
    """Create an empty memfd; None if only reserved descriptors are left."""
    try:
        fd = os.memfd_create("miniray", os.MFD_CLOEXEC)
    except OSError as error:
        if error.errno not in OUT_OF_DESCRIPTORS:
            raise
        return None
    # The kernel gives the lowest free number: this one says how many are open.
    if fd < limit() - RESERVE:
        return fd
    os.close(fd)
    return None


def _free(fd: int, mapped: int) -> None:
    """Close memory, and empty its first ``mapped`` bytes for the processes that have it mapped."""
    try:
        if mapped:
            mode = _FALLOC_FL_PUNCH_HOLE | _FALLOC_FL_KEEP_SIZE  # a late read must not raise SIGBUS
            if _libc().fallocate(fd, mode, 0, mapped) != 0:
                code = ctypes.get_errno()
                raise OSError(code, os.strerror(code))
    finally:
        os.close(fd)


@functools.cache
def _libc() -> ctypes.CDLL:
    libc = ctypes.CDLL(None, use_errno=True)
    libc.fallocate.argtypes = [ctypes.c_int, ctypes.c_int, ctypes.c_int64, ctypes.c_int64]
    return libc
