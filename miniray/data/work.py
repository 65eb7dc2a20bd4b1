"""What a task of a dataset runs: reads units, runs the steps, yields blocks and their records."""

from __future__ import annotations

import ctypes
import dataclasses
import functools
import itertools
import random
import resource
import sys
import time
from typing import TYPE_CHECKING, Any

import numpy as np

from miniray.common.runtime import runtime_or_none
from miniray.data.sources import ENDLESS, BlockRows, between
from miniray.data.stats import Record
from miniray.data.tables import resized

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence

    from miniray.data.sources import ReadUnit
    from miniray.data.transforms import Transform, Where

# Parameters of glibc's mallopt(3), and the largest value of the first.
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3
_LARGEST_ARRAY = 32 * 2**20
#: How often the same place of a file is read, if the error is one that is retried.
_READS = 3


@dataclasses.dataclass(frozen=True)
class StageWork:
    """The steps of a stage, as they are run in a process.

    Attributes:
        target: Bytes of a block; 0: tables are blocks as they come.
        retried: Texts of errors after which a unit is read again.
    """

    steps: Sequence[Transform]
    target: int
    retried: Sequence[str] = ()

    def prepared(self) -> StageWork:
        """Return the work with objects in place of classes."""
        return dataclasses.replace(self, steps=[step.prepared() for step in self.steps])

    def tables(
        self, where: Where, unit: ReadUnit, values: Sequence[Any], then: Iterable[Any] = ()
    ) -> Iterator[Any]:
        """Yield the blocks of a unit, given the values of its refs, and of the tables of ``then``.

        A step that has a thread begins at once: the user's code is called when they are read.
        """
        made: Iterator[Any] = itertools.chain(self._read(unit, values), then)
        for step in self.steps:
            made = step.run(made, where)
        return resized(made, self.target) if self.target else made

    def blocks(self, tables: Iterator[Any]) -> Iterator[Any]:
        """Yield each block of ``tables`` and then its record."""
        _keep_freed_memory()
        first = 0
        while True:
            wall, cpu = time.perf_counter(), time.process_time()
            table = next(tables, None)
            if table is None:
                return
            wall, cpu = time.perf_counter() - wall, time.process_time() - cpu
            heap = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
            record = Record(first, table.num_rows, table.nbytes, wall, cpu, heap)
            first += record.rows
            yield table
            del table  # in the store now
            yield record

    def _read(self, unit: ReadUnit, values: Sequence[Any]) -> Iterator[Any]:
        given = failed = 0
        while True:
            # Reading again gives the same rows: those that were given are left out.
            tables = between(unit.read(*values), given, ENDLESS)
            try:
                for table in tables:
                    given += table.num_rows
                    failed = 0
                    yield table
                return
            except Exception as error:
                failed += 1
                known = any(text in str(error) for text in self.retried)
                if not known or failed == _READS:
                    raise


def task_of(work: StageWork, name: str) -> Callable[..., Iterator[Any]]:
    """Return the function that tasks run; errors and warnings about its size call it by a name."""

    def run(where: Where, unit: ReadUnit, *values: Any) -> Iterator[Any]:
        seed(where)
        tables = work.tables(where, unit, values)
        del values  # free once they were read
        yield from work.blocks(tables)

    run.__qualname__ = name
    return run


class PoolWorker:
    """An actor of a pool: has the objects of the user's classes.

    The thread that has read a call's unit begins with the block of the next call that waits,
    while the class works on what is left.
    """

    def __init__(self, work: StageWork) -> None:
        self._work = work.prepared()
        #: The place of the call that runs.
        self._running: Where | None = None
        #: The place of the call that comes next, if its block is being read, and its tables.
        self._begun: tuple[Where | None, Any] = (None, None)

    def run(self, where: Where, unit: ReadUnit, *values: Any) -> Iterator[Any]:
        """Yield each block and then its record."""
        seed(where)
        begun, tables = self._begun
        self._begun, self._running = (None, None), where
        if begun is not where:  # the other one was cancelled
            tables = self._tables(where, unit, values)
        del values  # a thread reads them to their end, and frees them, while the class is called
        yield from self._work.blocks(tables)

    def _tables(self, where: Where, unit: ReadUnit, values: Sequence[Any]) -> Iterator[Any]:
        # Other units than blocks may run code of the user when they are loaded or read.
        then = self._begin_next(where) if isinstance(unit.content, BlockRows) else ()
        return self._work.tables(where, unit, values, then)

    def _begin_next(self, where: Where) -> Iterator[Any]:
        """Begin with the next call, behind the tables of one that runs; it adds no tables."""
        runtime = runtime_or_none()
        if runtime is not None and self._running is where:
            where, unit, *values = runtime.next_arguments() or (None, None)
            if unit is not None and isinstance(unit.content, BlockRows):
                self._begun = where, self._tables(where, unit, values)
        yield from ()


@functools.cache
def _keep_freed_memory() -> None:
    """Make the C library keep a block's memory for the next: new pages cost much of the work.

    No effect where the C library is not glibc.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mallopt(_M_MMAP_THRESHOLD, _LARGEST_ARRAY)
        mallopt(_M_TRIM_THRESHOLD, 2 * _LARGEST_ARRAY)


def seed(where: Where) -> None:
    """Let random numbers of a unit be the same on any worker, and in a repeated call."""
    number = where.index & 0xFFFFFFFF
    random.seed(number)
    np.random.seed(number)
    torch = sys.modules.get("torch")
    if torch is not None:
        torch.manual_seed(number)
