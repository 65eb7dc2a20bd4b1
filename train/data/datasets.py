"""Datasets of ``miniray.data`` as sources: a rank has its own rows of an epoch made by tasks."""

from __future__ import annotations

import dataclasses
import itertools
import logging
from typing import TYPE_CHECKING, Any

import pyarrow as pa

from miniray.api import cluster_resources
from miniray.data.context import DataContext
from miniray.data.dataset import Dataset
from miniray.data.exchange import Numbered
from miniray.data.executor import execute, table_of
from miniray.data.feeds import UnitFeed
from miniray.data.plan import Apply, Exchange, Read, Stage, chain, has_user_code, optimised, stacked
from miniray.data.sources import CutWish, ReadUnit
from miniray.data.stages import MODULES
from miniray.data.tables import concat
from miniray.data.transforms import FilterExpr, MapBatches, MapRows
from miniray.train.data.order import EpochOrder
from miniray.train.data.position import part, size_of
from miniray.train.data.sources import Source
from miniray.util.placement_group import placement_group_table

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from miniray.data.plan import PlanNode
    from miniray.data.transforms import Transform
    from miniray.train.data.order import Span
    from miniray.train.data.position import Range

logger = logging.getLogger(__name__)

#: Units that a dataset with functions is cut into at least. The order of an epoch is one of units,
#: so that it is not for the cluster to say: a run may go on where there are other CPUs.
_UNITS = 256
#: Units of the next pass that are read ahead of its begin, at most.
_AHEAD = 4
#: By how much the keys of the same unit differ in two epochs.
_EPOCHS_APART = 1_000_003


class DatasetSource(Source):
    """A dataset: its units are the blocks, and its functions run on those rows that a rank reads.

    What changes the number of rows, such as a filter, and all before it, runs once: what it makes
    stays in the object store, as every rank has to know how many rows there are.

    Args:
        dataset: The dataset. A ``map_batches`` counts as one that keeps the number of rows, which
            is checked, unless it says ``udf_modifying_row_count=True``.
        shuffled: Whether each epoch has an order of its own: a ``random_shuffle`` is left out then.
    """

    modules = (*MODULES, "miniray.train.data.datasets")

    def __init__(self, dataset: Dataset, *, shuffled: bool = False) -> None:
        plan = _unshuffled(dataset._plan) if shuffled else dataset._plan
        left_out = plan is not dataset._plan
        if left_out:
            dataset = Dataset(plan)
        read, stages = _countable(optimised(dataset._plan), dataset)
        self._plan = stacked(read, stages)
        parts = _UNITS if has_user_code(self._plan) else 1
        wish = CutWish(DataContext.get_current().target_max_block_size, parts)
        self._units = [unit for unit in read.units(wish) if unit.rows]
        if left_out and len(self._units) > 1:  # else all rows are mixed
            logger.warning(
                "A random_shuffle() before the trainer is left out: in each epoch the trainer "
                "orders the %d units of this dataset anew, and the rows within each unit. "
                "random_shuffle().materialize() mixes all rows before, once.",
                len(self._units),
            )
        #: Whether what makes the rows may stay between passes. A pool that holds resources may not:
        #: another dataset's may wait for these.
        self.stays = not any(map(_holds, stages))

    @property
    def block_sizes(self) -> Sequence[int]:
        """Rows of each unit."""
        return [unit.rows or 0 for unit in self._units]

    def open_block(self, block: int) -> Any:
        """Not for datasets: their rows come in the order of the epoch."""
        raise NotImplementedError

    def passes(self, seed: int | None, whole: Sequence[Range], share: int) -> PassReader:
        """Return what reads passes over a rank's part."""
        return PassReader(self, seed, whole, share)

    def tables(self, units: UnitFeed, share: int, *, local: bool) -> Iterator[Any]:
        """Return the rows of units, in their order. Tasks for the first ones begin at once.

        Args:
            units: Which rows of which units.
            share: How many ranks there are, among which pools are divided.
            local: Prepare them in this process.
        """
        made = execute(self._plan, below=units, local=local, ordered=True, share=share)
        return map(table_of, made)

    def selected(self, block: int, span: Span, epoch: int) -> Selected:
        """Return rows of a unit. Random numbers of functions follow from the epoch and the unit."""
        return Selected(self._units[block], span, epoch * _EPOCHS_APART + block)


def _holds(stage: Stage) -> bool:
    """Whether a stage holds resources while it has nothing to do."""
    options = stage.compute.options
    return stage.compute.pool is not None and any(
        options.get(name) for name in ("num_cpus", "num_gpus", "memory", "resources")
    )


def _unshuffled(node: PlanNode) -> PlanNode:
    """Return a plan without shuffles that only functions of rows or batches follow.

    It is the same plan if there is none.
    """
    if isinstance(node, Exchange) and isinstance(node.how, Numbered) and node.how.seed is not None:
        return _unshuffled(node.inputs[0])
    if isinstance(node, Apply):
        step = _expected(node.step)
        if step.keeps_count or isinstance(step, FilterExpr | MapRows):
            below = _unshuffled(node.inputs[0])
            return node if below is node.inputs[0] else dataclasses.replace(node, inputs=(below,))
    return node


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
            below = [*stages[:place], dataclasses.replace(stage, steps=stage.steps[:first])]
            return _made(Dataset(stacked(read, below))), tuple(kept)
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
    return plan


@dataclasses.dataclass(frozen=True)
class Selected(ReadUnit):
    """Some rows of a unit, in the order of an epoch.

    Attributes:
        inner: The unit.
        span: Which rows.
        key: From which random numbers are drawn: a pass that is resumed draws the same ones.
    """

    inner: ReadUnit
    span: Span
    key: int | None = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "rows", self.span.stop - self.span.start)
        object.__setattr__(self, "refs", self.inner.refs)

    @property
    def label(self) -> str:
        """The unit."""
        return f"the chosen rows of {self.inner.label}"

    def bare(self) -> ReadUnit:
        """Return the rows of the inner unit without its refs."""
        return Selected(self.inner.bare(), self.span, self.key)

    def read(self, *values: Any) -> Iterator[Any]:
        """Yield the rows in their order."""
        numbers = self.span.numbers()
        if isinstance(numbers, range):
            yield from self.inner.part(numbers.start, numbers.stop).read(*values)
            return
        yield concat(list(self.inner.read(*values))).take(pa.array(numbers))


class Passes(UnitFeed):
    """The units of a rank's passes, and of the pass after the last that has begun the first ones.

    Args:
        source: Of which the units are.
        seed: From which the orders of epochs are drawn.
        whole: The rank's part of a whole epoch.
        epoch: Of the first pass, which has not begun.
        ranges: What that one reads.
    """

    def __init__(
        self,
        source: DatasetSource,
        seed: int | None,
        whole: Sequence[Range],
        epoch: int,
        ranges: Sequence[Range],
    ) -> None:
        self._source, self._seed, self._whole = source, seed, whole
        self._begun = epoch - 1
        self._open(epoch, ranges)

    def begin(self) -> None:
        """Give all units of the next pass."""
        self._begun += 1

    def _open(self, epoch: int, ranges: Sequence[Range]) -> None:
        self._epoch = epoch
        self._given = 0
        order = EpochOrder(self._source.block_sizes, self._seed, epoch)
        self._pieces = itertools.chain.from_iterable(itertools.starmap(order.spans, ranges))

    def poll(self) -> ReadUnit | None:
        """Return the next unit; None if it is of a pass that has to begin first."""
        ahead = self._epoch > self._begun
        if ahead and self._given >= (_AHEAD if self._source.stays else 0):
            return None
        piece = next(self._pieces, None)
        if piece is None:
            if ahead:
                return None
            self._open(self._epoch + 1, self._whole)
            return self.poll()
        self._given += 1
        return self._source.selected(*piece, self._epoch)


class PassReader:
    """Reads a rank's rows by their place in its part, pass after pass.

    While the rest of a pass is read, the first tasks of the next one run, unless the plan has a
    pool that must not stay.

    Args:
        source: Whose rows.
        seed: From which the orders of epochs are drawn.
        whole: The rank's part of a whole epoch.
        share: How many ranks there are.
    """

    def __init__(
        self, source: DatasetSource, seed: int | None, whole: Sequence[Range], share: int
    ) -> None:
        self.source = source
        self.size = 0
        self._seed, self._whole, self._share = seed, whole, share
        self._epoch = -1
        self._ranges: Sequence[Range] = ()
        self._at = -1  # the place from which the tables go on
        self._left = 0  # rows of the pass before that come first
        self._local = False
        self._tables: Iterator[Any] = iter(())
        self._held: list[Any] = []

    def prepare(self, epoch: int, ranges: Sequence[Range], start: int) -> None:
        """Have the first tasks of a pass run, where they may run before it begins."""
        if self.source.stays:
            self._start(epoch, ranges, start)

    def _start(self, epoch: int, ranges: Sequence[Range], start: int) -> None:
        """Have the first tasks of a pass run; ``start`` is the place where it begins."""
        self._epoch, self._ranges, self.size = epoch, ranges, size_of(ranges)
        self._at, self._left, self._held = start, 0, []
        self._local = not _is_cpu_left()
        left = part(ranges, start, self.size)
        self._units = Passes(self.source, self._seed, self._whole, epoch, left)
        self._tables = self.source.tables(self._units, self._share, local=self._local)

    def begin(self, epoch: int, ranges: Sequence[Range], start: int) -> None:
        """Begin a pass, with what was prepared for it if that is the one."""
        prepared = (self._epoch, self._ranges, self._at) == (epoch, ranges, start)
        if not prepared or self._local == _is_cpu_left():
            self._start(epoch, ranges, start)
        if self._local:
            _tell_local()
        self._units.begin()

    def end(self) -> None:
        """End the pass: the next one is that over the whole part."""
        if not self.source.stays:
            self._epoch, self._tables = -1, iter(())  # with which its pools end
            return
        self._left += self.size - self._at
        self._epoch, self._ranges, self._at = self._epoch + 1, self._whole, 0
        self.size = size_of(self._whole)

    def read(self, start: int, stop: int) -> Any:
        """Return the rows from one place of the part up to, without, another."""
        if start != self._at:
            self._start(self._epoch, self._ranges, start)
            self._units.begin()
        if self._left:
            self._rows(self._left)
            self._left = 0
        self._at = stop
        return self._rows(stop - start)

    def _rows(self, wanted: int) -> Any:
        have = sum(table.num_rows for table in self._held)
        while have < wanted:
            table = next(self._tables)
            if table.num_rows:
                self._held.append(table)
                have += table.num_rows
        whole = concat(self._held)
        self._held = [whole.slice(wanted)] if have > wanted else []
        return whole.slice(0, wanted)


_told = False


def _tell_local() -> None:
    """Say once that ranks prepare their data themselves."""
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
