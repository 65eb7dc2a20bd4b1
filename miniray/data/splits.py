"""Parts of datasets: ranges of rows where their number is known, else of what was made."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any

from miniray.data.batches import StreamIterator
from miniray.data.context import DataContext
from miniray.data.plan import Read, chain, keeps_count, optimised
from miniray.data.sources import BlocksDatasource, CutWish, FixedDatasource, ranged

if TYPE_CHECKING:
    from collections.abc import Callable

    from miniray.data.plan import PlanNode, Stage
    from miniray.data.sources import ReadUnit


def units_of(read: Read, parts: int = 1) -> list[ReadUnit]:
    """Return the units of a read, at least so many if there are the rows."""
    context = DataContext.get_current()
    units = list(read.source.units(CutWish(context.target_max_block_size, parts)))
    if read.shuffle is not None:
        import random

        random.Random(read.shuffle).shuffle(units)  # noqa: S311 -- no secret
    return units


def counted_chain(dataset: Any) -> tuple[Read, tuple[Stage, ...]] | None:
    """Return the read and stages of a plan whose rows are known by number; None if they are not."""
    found = chain(optimised(dataset._plan))
    if found is None or not all(keeps_count(stage.steps) for stage in found[1]):
        return None
    return None if found[0].source.count() is None else found


def sliced(dataset: Any) -> tuple[int, Any]:
    """Return the number of rows, and a dataset of which ranges can be taken.

    That is the dataset itself, or where functions change the number of rows, its blocks.
    """
    if counted_chain(dataset) is None:
        dataset = dataset.materialize()
    return dataset.count(), dataset


def between(dataset: Any, start: int, stop: int) -> Any:
    """Return the rows of a range, lazily, of a dataset as ``sliced`` returns it."""
    found = counted_chain(dataset)
    assert found is not None
    read, stages = found
    parts = ranged(units_of(read), start, stop)
    schema = read.source.schema()
    source: Any = FixedDatasource(parts, schema, read.source.files())
    if isinstance(read.source, BlocksDatasource):
        source = BlocksDatasource(parts, schema)
    plan: PlanNode = Read(source)
    for stage in stages:
        plan = dataclasses.replace(stage, inputs=(plan,))
    made = type(dataset)(plan)
    made._schema = dataset._schema
    return made


def streamed(
    dataset: Any, n: int, make: Callable[[PlanNode], Any], *, equal: bool
) -> list[StreamIterator]:
    """Return iterators over n parts: ranges where rows are known, else every n-th unit.

    Args:
        dataset: What is split.
        n: Into how many parts.
        make: Makes a dataset of a plan.
        equal: Whether the parts have as many rows.
    """
    if counted_chain(dataset) is not None or equal:
        return [StreamIterator(part) for part in dataset.split(n)]
    found = chain(optimised(dataset._plan))
    if found is None:
        return [StreamIterator(part) for part in dataset.split(n)]
    read, stages = found
    units = units_of(read, 4 * n)
    parts = []
    for number in range(n):
        own = FixedDatasource(units[number::n], read.source.schema(), read.source.files())
        plan: PlanNode = Read(own)
        for stage in stages:
            plan = dataclasses.replace(stage, inputs=(plan,))
        parts.append(StreamIterator(make(plan)))
    return parts
