"""Datasets of ``miniray.data`` as sources: a rank has its own rows of an epoch made by tasks."""

from __future__ import annotations

import dataclasses
import logging
from typing import TYPE_CHECKING, Any

import pyarrow as pa

from miniray.api import cluster_resources
from miniray.data.dataset import Dataset
from miniray.data.executor import execute, table_of
from miniray.data.plan import Read, Stage, chain, has_user_code, optimised
from miniray.data.sources import BlocksDatasource, ReadUnit
from miniray.data.splits import units_of
from miniray.data.tables import concat
from miniray.data.transforms import DataError, MapBatches
from miniray.train.data.position import part, size_of
from miniray.train.data.sources import Source
from miniray.util.placement_group import placement_group_table

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from miniray.data.plan import PlanNode
    from miniray.data.transforms import Transform
    from miniray.train.data.order import EpochOrder
    from miniray.train.data.position import Range

logger = logging.getLogger(__name__)

#: Units that a dataset with functions is cut into at least. The order of an epoch is one of units,
#: so that it is not for the cluster to say: a run may go on where there are other CPUs.
_UNITS = 256


class DatasetSource(Source):
    """A dataset: its units are the blocks, and its functions run on those rows that a rank reads.

    What changes the number of rows, such as a filter, and all before it, runs once: what it makes
    stays in the object store, as every rank has to know how many rows there are.

    Args:
        dataset: The dataset. A ``map_batches`` counts as one that keeps the number of rows, which
            is checked, unless it says ``udf_modifying_row_count=True``.
    """

    def __init__(self, dataset: Dataset) -> None:
        node = optimised(dataset._plan)
        read, stages = _countable(node, dataset)
        self._plan: PlanNode = read
        for stage in stages:
            self._plan = dataclasses.replace(stage, inputs=(self._plan,))
        parts = _UNITS if has_user_code(self._plan) else 1
        self._units = [unit for unit in units_of(read, parts) if unit.rows]

    @property
    def block_sizes(self) -> Sequence[int]:
        """Rows of each unit."""
        return [unit.rows or 0 for unit in self._units]

    def open_block(self, block: int) -> Any:
        """Not for datasets: their rows come in the order of the epoch."""
        raise NotImplementedError

    def stream(self, order: EpochOrder, ranges: Sequence[Range], epoch: int, share: int) -> Any:
        """Return what reads these ranges of an epoch's order."""
        return _StreamReader(self, order, ranges, epoch, share)

    def tables(self, pieces: Iterator[tuple[int, Any]], epoch: int, share: int) -> Iterator[Any]:
        """Yield the rows of pieces, in their order.

        Args:
            pieces: Blocks, each with the numbers of its rows.
            epoch: From which, with the units, random numbers of functions are drawn.
            share: How many ranks there are, among which pools are divided.
        """
        local = not _is_cpu_left()
        if local:
            _tell_local()
        units = (Selected(self._units[block], rows, block) for block, rows in pieces)
        for unit in execute(
            self._plan, units=units, local=local, ordered=True, seed=epoch, share=share
        ):
            yield table_of(unit)


def _countable(node: PlanNode, dataset: Dataset) -> tuple[Read, tuple[Stage, ...]]:
    """Return a read of known rows and stages that keep their number."""
    found = chain(node)
    if found is None:
        return _made(dataset), ()
    read, stages = found
    kept: list[Stage] = []
    for place in range(len(stages) - 1, -1, -1):
        stage = stages[place]
        steps = tuple(map(_expected, stage.steps))
        first = len(steps)
        while first and steps[first - 1].keeps_count:
            first -= 1
        if first < len(steps):
            kept.insert(0, dataclasses.replace(stage, steps=steps[first:]))
        if first:
            plan: PlanNode = read
            for below in stages[:place]:
                plan = dataclasses.replace(below, inputs=(plan,))
            plan = dataclasses.replace(stage, inputs=(plan,), steps=stage.steps[:first])
            return _made(Dataset(plan)), tuple(kept)
    known = read.source.count() is not None
    return (read if known else _made(Dataset(read))), tuple(kept)


def _expected(step: Transform) -> Transform:
    """Return a step that is checked to keep the number of rows, unless it says it does not."""
    if isinstance(step, MapBatches) and not step.changes_count and not step.keeps_count:
        return dataclasses.replace(step, keeps_count=True)
    return step


def _made(dataset: Dataset) -> Read:
    plan = dataset.materialize()._plan
    assert isinstance(plan, Read)
    assert isinstance(plan.source, BlocksDatasource)
    return plan


@dataclasses.dataclass(frozen=True)
class Selected(ReadUnit):
    """Some rows of a unit, in an order of their own.

    Attributes:
        inner: The unit.
        numbers: Of the rows: a range, or an array.
        key: The number of the unit: a pass that is resumed draws the same random numbers.
    """

    inner: ReadUnit
    numbers: Any
    key: int | None = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "rows", len(self.numbers))
        object.__setattr__(self, "refs", self.inner.refs)

    @property
    def label(self) -> str:
        """The unit."""
        return f"the chosen rows of {self.inner.label}"

    def bare(self) -> ReadUnit:
        """Return the rows of the inner unit without its refs."""
        return Selected(self.inner.bare(), self.numbers, self.key)

    def read(self, *values: Any) -> Iterator[Any]:
        """Yield the rows in their order."""
        if isinstance(self.numbers, range):
            yield from self.inner.part(self.numbers.start, self.numbers.stop).read(*values)
            return
        yield concat(list(self.inner.read(*values))).take(pa.array(self.numbers))


class _StreamReader:
    """Reads rows of a rank's part, each read going on where the one before has ended."""

    def __init__(
        self,
        source: DatasetSource,
        order: EpochOrder,
        ranges: Sequence[Range],
        epoch: int,
        share: int,
    ) -> None:
        self.size = size_of(ranges)
        self.source = source
        self._order = order
        self._ranges = ranges
        self._epoch = epoch
        self._share = share
        self._at = -1
        self._tables: Iterator[Any] = iter(())
        self._held: list[Any] = []

    def read(self, start: int, stop: int) -> Any:
        """Return the rows from one place of the part up to, without, another."""
        if start != self._at:
            pieces = (
                piece
                for low, high in part(self._ranges, start, self.size)
                for piece in self._order.pieces(low, high)
            )
            self._tables = self.source.tables(pieces, self._epoch, self._share)
            self._held = []
        have = sum(table.num_rows for table in self._held)
        while have < stop - start:
            table = next(self._tables, None)
            if table is None:
                raise DataError(
                    f"The dataset gave {have} rows where {stop - start} were expected. In a "
                    f"trainer no unit may be left out: leave max_errored_blocks at 0."
                )
            if table.num_rows:
                self._held.append(table)
                have += table.num_rows
        whole = concat(self._held)
        self._held = [whole.slice(stop - start)] if have > stop - start else []
        self._at = stop
        return whole.slice(0, stop - start)


_told = False


def _tell_local() -> None:
    global _told
    if not _told:
        logger.warning(
            "The workers hold all CPUs of the cluster, so that each of them prepares its data "
            "itself. Tasks do that beside them where CPUs are left."
        )
    _told = True


def _is_cpu_left() -> bool:
    """Whether there is a CPU that no placement group holds, such as those of ranks."""
    held = 0.0
    for group in placement_group_table().values():
        if group["state"] == "CREATED":
            held += sum(bundle.get("CPU", 0) for bundle in group["bundles"].values())
    return cluster_resources().get("CPU", 0) - held >= 1
