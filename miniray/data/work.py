"""What a task of a dataset runs: reads units, runs the steps, yields blocks and their records."""

from __future__ import annotations

import itertools
import random
import resource
import sys
import time
from typing import TYPE_CHECKING, Any

import numpy as np

from miniray.data.stats import Record
from miniray.data.tables import resized
from miniray.data.transforms import run_steps

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from miniray.data.sources import ReadUnit
    from miniray.data.transforms import Transform, Where

#: How often a file is read again after an error that is retried.
_READS = 3


class StageWork:
    """The steps of a stage, as they are run in a process.

    Args:
        steps: The steps.
        target: Bytes of a block; 0: tables are blocks as they come.
        retried: Texts of errors after which a unit is read again.
    """

    def __init__(
        self, steps: Sequence[Transform], target: int, retried: Sequence[str] = ()
    ) -> None:
        self._steps = steps
        self._target = target
        self._retried = retried

    def prepared(self) -> StageWork:
        """Return the same with objects in place of classes."""
        return StageWork([step.prepared() for step in self._steps], self._target, self._retried)

    def tables(
        self, where: Where, units: Sequence[ReadUnit], values: Sequence[Any]
    ) -> Iterator[Any]:
        """Yield the blocks of some units.

        Args:
            where: What the units are, for messages and seeds.
            units: The units, without refs.
            values: The values of their refs, for each unit.
        """
        _seed(where)
        tables = (
            table
            for unit, own in zip(units, values, strict=True)
            for table in self._read(unit, own)
        )
        made = run_steps(self._steps, tables, where)
        return resized(made, self._target) if self._target else made

    def _read(self, unit: ReadUnit, values: Sequence[Any]) -> Iterator[Any]:
        for attempt in range(_READS):
            begun = False
            try:
                for table in unit.read(*values):
                    begun = True
                    yield table
                return
            except Exception as error:
                known = any(text in str(error) for text in self._retried)
                if begun or not known or attempt == _READS - 1:
                    raise


def yield_blocks(
    work: StageWork,
    where: Where,
    units: Sequence[ReadUnit],
    counts: Sequence[int],
    values: Sequence[Any],
) -> Iterator[Any]:
    """Yield each block and then its record."""
    each = iter(values)
    own = [[next(each) for _ in range(count)] for count in counts]
    tables = work.tables(where, units, own)
    first = 0
    for number in itertools.count():
        wall, cpu = time.perf_counter(), time.process_time()
        table = next(tables, None)
        if table is None:
            return
        wall, cpu = time.perf_counter() - wall, time.process_time() - cpu
        record = Record(number, first, table.num_rows, table.nbytes, wall, cpu, _heap())
        first += record.rows
        yield table
        del table  # in the store now
        yield record


def task_of(work: StageWork) -> Callable[..., Iterator[Any]]:
    """Return the function that tasks run."""

    def run(where: Where, units: Any, counts: Any, *values: Any) -> Iterator[Any]:
        yield from yield_blocks(work, where, units, counts, values)

    return run


class PoolWorker:
    """An actor of a pool: has the objects of the user's classes."""

    def __init__(self, work: StageWork) -> None:
        self._work = work.prepared()

    def run(self, where: Where, units: Any, counts: Any, *values: Any) -> Iterator[Any]:
        """Yield each block and then its record."""
        yield from yield_blocks(self._work, where, units, counts, values)


def _seed(where: Where) -> None:
    """Let random numbers of a unit be the same on any worker, and in a repeated call."""
    seed = where.index & 0xFFFFFFFF
    random.seed(seed)
    np.random.seed(seed)
    torch = sys.modules.get("torch")
    if torch is not None:
        torch.manual_seed(seed)


def _heap() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
