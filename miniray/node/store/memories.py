"""The memory under the segments of a node: memfds, of which those out of use stay warm.

Writing into memory that has pages is several times faster than into new memory, and faster again
for a process that has it mapped. So what is freed waits in a pool for the next writer, if
possible for the one that has it mapped. Memory that is given up has no pages from then on, so it
counts no longer, whoever still has it mapped.
"""

from __future__ import annotations

import bisect
import errno
import functools
import os
from typing import TYPE_CHECKING

from miniray.common.descriptors import OUT_OF_DESCRIPTORS, RESERVE, limit
from miniray.exceptions import ObjectStoreFullError
from miniray.node.store.freeing import at_once, punch_hole

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from miniray.node.store.freeing import Free

#: Memory of the pool may be this many times larger than what it is used for.
_SLACK = 2
#: Bytes from which on giving memory back takes so long (1 ms) that others would notice.
_LARGE = 4 * 1024 * 1024


def _nothing() -> None:
    """Nobody waits."""


class Memory:
    """One memfd."""

    __slots__ = ("capacity", "fd", "number", "pooled", "writers")

    def __init__(self, number: int, fd: int, capacity: int) -> None:
        self.number = number
        self.fd = fd
        self.capacity = capacity
        self.pooled = False
        #: Processes that have it mapped for writing, whatever is in it.
        self.writers: set[bytes] = set()


class Memories:
    """All memory of a node.

    Args:
        capacity: Bytes that all of it may take.
        give_up: Called with a process and numbers of memory that it has mapped and is to unmap.
    """

    def __init__(self, capacity: int, give_up: Callable[[bytes, tuple[int, ...]], object]) -> None:
        self.capacity = capacity
        self._give_up = give_up
        #: Bytes in use, waiting in the pool, and going back to the kernel.
        self.used = 0
        self.pooled = 0
        self.closing = 0
        #: Does some work, then calls the second function: how large memory is closed.
        self.free: Free = at_once
        #: Called when memory has gone back to the kernel.
        self.on_freed: Callable[[], object] = _nothing
        self._next = 1
        self._all: dict[int, Memory] = {}
        #: The pool: (capacity, number), sorted.
        self._pool: list[tuple[int, int]] = []
        #: What each process has mapped for writing.
        self._mapped_by: dict[bytes, set[int]] = {}

    @property
    def taken(self) -> int:
        """Bytes that nobody can have: all but the pool, which gives way."""
        return self.used + self.closing

    # --- taking and giving back ------------------------------------------------------------
    def take(self, capacity: int, process: bytes, others: int) -> Memory:
        """Memory of at least so many bytes for a process that is going to write.

        Args:
            capacity: Bytes, whole pages.
            process: The writer.
            others: How many values are in the store, for the message of an error.

        Raises:
            ObjectStoreFullError: there is no room, or not before memory that gives way to it
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
            # What is small is closed at once; one descriptor is all that is wanted.
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
        """Nothing is in it any more.

        Args:
            memory: What was taken.
            again: Whether it may be used again. Not if somebody may still read or write it.
        """
        self.used -= memory.capacity
        if not again:
            self._close(memory, empty=False)
            return
        if memory.fd >= limit() // 2:  # so many are open that workers may need them
            self._close(memory)
            return
        memory.pooled = True
        bisect.insort(self._pool, (memory.capacity, memory.number))
        self.pooled += memory.capacity
        # Warm memory is kept for as much as is in use, so an idle node gives it back.
        most = min(max(self.used, self.capacity // 8), self.capacity - self.used)
        while self._pool and self.pooled > most:
            self._close(self._unpool(0))

    def _close(self, memory: Memory, *, empty: bool = True, at_once: bool = False) -> None:
        """Give up memory.

        Args:
            memory: What nobody uses.
            empty: Whether its pages go even if it is mapped. Not if somebody may look at them.
            at_once: Whether that must not take its time, however large it is.
        """
        del self._all[memory.number]
        for process in memory.writers:
            self._drop(process, memory.number)
            self._give_up(process, (memory.number,))
        capacity = memory.capacity
        work = functools.partial(_free, memory.fd, capacity if empty and memory.writers else 0)
        if at_once or capacity < _LARGE:
            work()
            return
        self.closing += capacity
        self.free(work, functools.partial(self._freed, capacity))

    def _freed(self, capacity: int) -> None:
        self.closing -= capacity
        self.on_freed()

    def descriptor(self, number: int) -> int:
        """The descriptor of memory that is in use."""
        return self._all[number].fd

    # --- what writers have mapped -------------------------------------------------------------
    def mapped(self, number: int, process: bytes) -> None:
        """A process keeps memory mapped that it has written."""
        memory = self._all.get(number)
        if memory is None:  # it was given up at the same time
            self._give_up(process, (number,))
            return
        memory.writers.add(process)
        self._mapped_by.setdefault(process, set()).add(number)

    def unmapped(self, numbers: Iterable[int], process: bytes) -> None:
        """A process does so no longer."""
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
        """A process is gone, and its mappings with it."""
        self.unmapped(tuple(self._mapped_by.get(process, ())), process)

    def close(self) -> None:
        """Close every descriptor."""
        for memory in self._all.values():
            os.close(memory.fd)
        self._all.clear()
        self._pool.clear()
        self._mapped_by.clear()


def _memfd() -> int | None:
    """New memory, of no size yet; None if the descriptor is needed for more than values."""
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
    """Close memory, of which so many bytes are mapped that are to be given back all the same."""
    try:
        if mapped:
            punch_hole(fd, 0, mapped)  # its size stays: a late look is no SIGBUS
    finally:
        os.close(fd)
