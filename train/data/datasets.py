"""Datasets of ``miniray.data`` as sources: a rank has its own rows of an epoch made by tasks."""

from __future__ import annotations

import collections
import copy
import dataclasses
import logging
import operator
from typing import TYPE_CHECKING, Any, NamedTuple

from miniray.api import cluster_resources
from miniray.data.context import TASKS, Compute, DataContext
from miniray.data.dataset import Dataset
from miniray.data.exchange import Numbered, together
from miniray.data.executor import check_pools, execute, pools_hold, table_of
from miniray.data.files import FileRows, bunched
from miniray.data.plan import Exchange, Read, Stage, chain, has_user_code, optimised, stacked
from miniray.data.sources import CutWish, ReadUnit, UnitsDatasource
from miniray.data.stages import MODULES
from miniray.data.transforms import FilterExpr, MapBatches, MapRows
from miniray.data.work import StageWork
from miniray.train.data.units import UnitsSource, chosen
from miniray.util.placement_group import get_current_placement_group, placement_group_table

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence

    from miniray.data.context import ExecutionOptions
    from miniray.data.feeds import Feed
    from miniray.data.plan import PlanNode
    from miniray.data.transforms import Transform
    from miniray.train.data.order import Span

logger = logging.getLogger(__name__)

#: Units that a dataset with functions is cut into at least. The order of an epoch is one of units,
#: so that it is not for the cluster to say: a run may go on where there are other CPUs.
_UNITS = 256
#: Rows that are read together, at most, unless more are in one row group: small units are there
#: soon, and ranks seldom read the same ones.
_MIXED = 65_536
#: Bytes of a unit, at most: a task holds all of it to bring its rows into another order.
_LARGEST = 512 * 2**20
#: Places of the data that a unit has rows of, where its epochs have an order of their own.
_PLACES = 8
#: By how much the keys of the same unit differ in two epochs.
_EPOCHS_APART = 1_000_003


class PoolSpec(NamedTuple):
    """A pool of a dataset, for whoever makes the actors that all ranks use."""

    compute: Compute
    #: What each actor is made with, or a ref of it.
    work: Any
    context: DataContext
    #: The dataset's name in the trainer.
    dataset: str = ""

    @property
    def selector(self) -> dict[str, str]:
        """The labels that its nodes must have."""
        own = self.compute.options.get("label_selector")
        return own or self.context.execution_options.label_selector or {}


class DatasetSource(UnitsSource):
    """A dataset: its units are the blocks, and its functions run on those rows that a rank reads.

    Functions that change the number of rows, such as a filter, and all before them run once: their
    result stays in the object store, as every rank needs the number of rows.

    Args:
        dataset: The dataset. A ``map_batches`` counts as one that keeps the number of rows, which
            is checked, unless it says ``udf_modifying_row_count=True``.
        shuffled: Whether each epoch has an order of its own: a ``random_shuffle`` is left out then.
        options: How it is executed. Default: as the context says.
    """

    modules = (*MODULES, "miniray.train.data.datasets")

    def __init__(
        self, dataset: Dataset, *, shuffled: bool = False, options: ExecutionOptions | None = None
    ) -> None:
        context = DataContext.get_current()
        options = options or context.execution_options
        self._context = dataclasses.replace(
            context,
            execution_options=options,
            max_errored_blocks=0,  # else ranks would not have the same number of rows
        )
        plan = _unshuffled(dataset._plan) if shuffled else dataset._plan
        left_out = plan is not dataset._plan
        if left_out:
            dataset = Dataset(plan)
        read, stages = _countable(optimised(dataset._plan), dataset)
        parts = _UNITS if has_user_code(stacked(read, stages)) else 1
        # Ranks read units, and need no footers of all files, or tables, beside these.
        self._read = Read(UnitsDatasource((), name=read.source.name))
        self._stages = tuple(dataclasses.replace(stage, inputs=()) for stage in stages)
        found = [unit for unit in _units_of(read, parts) if unit.rows]
        units = [part for unit in found for part in _held_at_once(unit)]
        super().__init__(_mixed(units) if shuffled else units)
        if left_out and len(self._units) > 1:  # else all rows are mixed
            logger.warning(
                "A random_shuffle() before the trainer is left out: in each epoch the trainer "
                "orders the %d units of this dataset anew, and the rows within each unit. "
                "random_shuffle().materialize() mixes all rows before, once.",
                len(self._units),
            )
        # A pool that holds resources may not stay: another dataset's may wait for these.
        self.stays = not any(pools_hold(self._plan).values())
        size, retried = context.target_max_block_size, context.retried_io_errors
        self.pools = [
            PoolSpec(each.compute, StageWork(each.steps, size, retried), self._context)
            for each in self._stages
            if each.compute.is_pool
        ]

    @property
    def _plan(self) -> PlanNode:
        return stacked(self._read, self._stages)

    def through(self, pools: Iterable[Sequence[Any]], rank: int) -> DatasetSource:
        """Return a source with these actors for its pools; each rank begins with another one."""
        stages = list(self._stages)
        places = [place for place, stage in enumerate(stages) if stage.compute.is_pool]
        for place, actors in zip(places, pools, strict=True):
            first = rank % len(actors)
            given = [*actors[first:], *actors[:first]]
            compute = dataclasses.replace(stages[place].compute, given=given)
            stages[place] = dataclasses.replace(stages[place], compute=compute)
        source = copy.copy(self)
        source._stages, source.stays = tuple(stages), True
        return source

    def is_local(self) -> bool:
        """Return whether ranks hold all CPUs, so that each prepares its data; say so once."""
        local = not is_cpu_left()
        if local:
            _warn_local()
        return local

    def tables(self, units: Feed, share: int, *, local: bool) -> Iterator[Any]:
        """Return the rows of units, in their order. Tasks for the first ones begin at once.

        Raises:
            DataError: The pools of all ranks do not fit beside each other.
        """
        if not local:
            own = get_current_placement_group()
            left = _left_by([] if own is None else [placement_group_table(own)])
            check_pools(self._plan, left, share)
        made = execute(
            self._plan, below=units, local=local, ordered=True, share=share, context=self._context
        )
        return map(table_of, made)

    def selected(self, block: int, span: Span, epoch: int) -> ReadUnit:
        """Return rows of a unit. Random numbers of functions follow from the epoch and the unit."""
        return chosen(self._units[block], span, epoch * _EPOCHS_APART + block)


def _units_of(read: Read, parts: int) -> list[ReadUnit]:
    """Return the units of a read, of small rows not more together than mix well."""
    target = DataContext.get_current().target_max_block_size
    units = list(read.units(CutWish(target, parts)))
    rows = sum(unit.rows or 0 for unit in units)
    few = _MIXED * sum(unit.size for unit in units) // max(rows, 1)
    return list(read.units(CutWish(few, parts))) if 0 < few < target else units


def _held_at_once(unit: ReadUnit) -> list[ReadUnit]:
    """Return a unit in parts that are small enough to be reordered."""
    if unit.size <= _LARGEST or not unit.rows:
        return [unit]
    step = -(-unit.rows // -(-unit.size // _LARGEST))
    return [unit.part(start, start + step) for start in range(0, unit.rows, step)]


def _mixed(units: Sequence[ReadUnit]) -> Iterator[ReadUnit]:
    """Yield as many units, of about as many rows each: some from each of several places."""
    count = len(units)
    rows = -(-sum(unit.rows or 0 for unit in units) // max(1, count * _PLACES))
    most = 2 * max((unit.size for unit in units), default=0)  # row groups are not all as large
    parts = [part for unit in units for part in _parts_of(unit, rows)]
    for first in range(count):
        for some in bunched(parts[first::count], operator.attrgetter("size"), most):
            yield together([some])


def _parts_of(unit: ReadUnit, rows: int) -> Iterator[ReadUnit]:
    """Yield parts of a unit of at most so many rows, except that row groups stay whole.

    The end of a row group is decoded with its beginning; all else is read from any row on.
    """
    content, whole = unit.content, unit.rows or 0
    if not isinstance(content, FileRows):
        yield from (unit.part(low, low + rows) for low in range(0, whole, rows))
        return
    pieces = content.within(unit.start, unit.start + whole)
    for some in bunched(pieces, lambda piece: piece.stop - piece.start, rows):
        have = sum(piece.stop - piece.start for piece in some)
        yield ReadUnit(FileRows(content.source, tuple(some)), have, unit.size * have // whole)


def _unshuffled(node: PlanNode) -> PlanNode:
    """Return a plan without shuffles that only functions of rows or batches follow.

    Returns the plan itself if there is none.
    """
    if isinstance(node, Exchange) and isinstance(node.how, Numbered) and node.how.seed is not None:
        return _unshuffled(node.inputs[0])
    if isinstance(node, Stage):
        steps = map(_expected, node.steps)
        if all(step.keeps_count or isinstance(step, FilterExpr | MapRows) for step in steps):
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
        if first < len(steps) or not steps:
            rest = steps[first:]
            compute = stage.compute if any(step.user for step in rest) else TASKS  # no pool for it
            kept.insert(0, dataclasses.replace(stage, steps=rest, compute=compute))
        if first:
            below = [*stages[:place], dataclasses.replace(stage, steps=stage.steps[:first])]
            return _made(Dataset(stacked(read, below))), tuple(kept)
    known = read.source.count() is not None
    return (read if known else _made(Dataset(read))), tuple(kept)


def _expected(step: Transform) -> Transform:
    """Return a step that is checked to keep the number of rows, unless it says it does not."""
    if isinstance(step, MapBatches) and step.changes_count is None:
        return dataclasses.replace(step, changes_count=False)
    return step


def _made(dataset: Dataset) -> Read:
    plan = dataset._counted()._plan
    assert isinstance(plan, Read)
    return plan


_warned = False


def _warn_local() -> None:
    """Say once that ranks prepare their data themselves."""
    global _warned
    if not _warned:
        logger.warning(
            "The workers hold all CPUs of the cluster, so that each of them prepares its data "
            "itself. Tasks do that beside them where CPUs are left."
        )
    _warned = True


def is_cpu_left() -> bool:
    """Return whether there is a CPU that no placement group holds, such as those of ranks."""
    return _left_by(placement_group_table().values()).get("CPU", 0) >= 1


def _left_by(groups: Iterable[Mapping[str, Any]]) -> dict[str, float]:
    """Return what placement groups leave of the cluster's resources."""
    left = collections.Counter(cluster_resources())
    for group in groups:
        if group["state"] == "CREATED":
            for bundle in group["bundles"].values():
                left.subtract(bundle)
    return dict(left)
