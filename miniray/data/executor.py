"""Executes a plan: feeds that are read from the consumer's side, and one wait for all of them.

Nothing runs ahead by itself: the reader of the last feed reads those below it, which start what
may start. Where none has anything, the consumer waits for the calls whose blocks come next.
"""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import itertools
import time
from typing import TYPE_CHECKING, Any

from miniray.api import cluster_resources, wait
from miniray.data.context import DataContext
from miniray.data.exchange import Aligned, Cut, together
from miniray.data.feeds import (
    Setting,
    group_feed,
    head_feed,
    inline_feed,
    limit_feed,
    source_feed,
    union_feed,
)
from miniray.data.ordered import KeySample, Ordered
from miniray.data.plan import (
    Exchange,
    Limit,
    Read,
    Regroup,
    Stage,
    Union,
    chain,
    check_lengths,
    count_of,
    explained,
    has_user_code,
    optimised,
    walk,
)
from miniray.data.sources import CutWish, ReadUnit, ranged
from miniray.data.stages import PoolStage, TaskStage
from miniray.data.stats import RUNNING, ExecutionStats, RowProgress
from miniray.data.tables import concat
from miniray.data.transforms import DataError, Gather
from miniray.data.work import StageWork

if TYPE_CHECKING:
    from collections.abc import Generator, Iterator, Mapping, Sequence

    from miniray.data.context import ExecutionOptions
    from miniray.data.feeds import Feed
    from miniray.data.plan import PlanNode

#: Blocks that are cut together, and of about so many a partition is made.
_TOGETHER = 4
#: Partitions, at most: larger inputs have larger ones.
_MOST = 512
#: Units whose keys are looked at, at most, to choose the bounds of partitions.
_LOOKED_AT = 64


def _feed(node: PlanNode, setting: Setting, wish: CutWish) -> Feed:
    """Return the feed of a node; ``wish`` says how the node above would have its input."""
    if isinstance(node, Read):
        return source_feed(node.units(wish))
    if isinstance(node, Union):
        return union_feed(_feed(each, setting, wish) for each in node.inputs)
    if isinstance(node, Limit):
        (below,) = node.inputs
        if isinstance(below, Union | Exchange) and count_of(below) is None:
            below = _read_by_tasks(below)  # blocks tell their rows, of which so many are wanted
        feed = _feed(below, setting, wish)
        if isinstance(below, Read) and below.source.count() is None:
            feed = _run(Stage((below,), ()), head_feed(feed, node.rows), setting)
        return limit_feed(feed, node.rows)
    if isinstance(node, Regroup):
        feed = _feed(_read_by_tasks(node.inputs[0]), setting, wish)
        groups = group_feed(feed, node.rows, strict=node.strict)
        return _run(Stage(node.inputs, (Gather(),)), groups, setting)
    if isinstance(node, Exchange):
        return _exchange_feed(node, setting)
    assert isinstance(node, Stage)
    parts = 1
    if node.user and not setting.local:
        pool = node.compute.pool
        slots = setting.slots(node.compute) if pool is None else max(pool)
        parts = setting.context.read_op_min_num_blocks * slots
    target = setting.context.target_max_block_size
    (below,) = node.inputs
    feed = group_feed(_feed(below, setting, CutWish(target, parts, node.least)), node.least)
    if isinstance(below, Exchange) and below.partitions is not None and not node.steps:
        target = 0  # so many blocks were asked for
    return _run(node, feed, setting, target)


def _run(stage: Stage, below: Feed, setting: Setting, target: int | None = None) -> Feed:
    """Return the blocks that a stage makes of another feed; ``target`` is as of ``StageWork``."""
    context = setting.context
    size = context.target_max_block_size if target is None else target
    work = StageWork(stage.steps, size, context.retried_io_errors)
    if setting.local:
        return inline_feed(below, work)
    kind = TaskStage if stage.compute.pool is None else PoolStage
    return kind(stage, work, setting).feed(below)


def _exchange_feed(node: Exchange, setting: Setting) -> Feed:
    """Give the partitions of an exchange, when all of its input is there.

    The input becomes blocks, and each call of the next stage cuts some of them into a piece for
    each partition. The pieces of a partition are one unit: whoever reads it makes its rows.
    """
    how = node.how
    target = setting.context.target_max_block_size
    # Feeds that were drained stay open: pools may have to make their blocks again.
    with contextlib.ExitStack() as drained:
        sides = []
        for below in node.inputs:  # blocks tell their rows
            feed = _feed(_read_by_tasks(below), setting, CutWish(target))
            sides.append((yield from _drain(feed, drained)))
        total = sum(unit.size for side in sides for unit in side)
        if isinstance(how, Aligned):
            yield from _aligned(node, sides, node.partitions or -(-total // target) or 1)
            yield from itertools.repeat(None)
        # As many pieces as a driver can know of, and not too few for a store to hold two calls.
        each = min(max(_TOGETHER * target, total // _MOST), setting.bytes_in_flight // 2)
        parts = node.partitions or -(-total // each) or 1
        bounds: Sequence[Any] = []
        if parts > 1:
            samples: list[Any] = []
            if isinstance(how, Ordered) and not how.given:
                samples = yield from _sampled(how, sides, setting, drained)
            bounds = how.bounds(samples, parts)
        if not bounds:
            yield together(sides, how)
            yield from itertools.repeat(None)
        pieces = []
        for side, units in enumerate(sides):
            cut = Cut(how, side, bounds)
            pieces.append((yield from _cut(cut, _calls(units, each), setting, drained)))
    for place in range(len(bounds) + 1):
        unit = [together([own[place] for own in pieces], how, (place, len(bounds) + 1))]
        for own in pieces:
            own[place] = []
        yield unit.pop()
    yield from itertools.repeat(None)


def _drain(feed: Feed, drained: contextlib.ExitStack) -> Generator[list[Any], None, list[ReadUnit]]:
    """Return all units of a feed, yielding what it waits for meanwhile."""
    drained.enter_context(contextlib.closing(feed))
    found = []
    while (item := next(feed)) is not None:
        if isinstance(item, ReadUnit):
            found.append(item)
        else:
            yield item
    return found


def _aligned(node: Exchange, sides: Sequence[list[ReadUnit]], parts: int) -> Iterator[ReadUnit]:
    rows = check_lengths([sum(unit.rows or 0 for unit in side) for side in sides]) or 0
    ends = [part * rows // parts for part in range(parts + 1)]
    for place, (low, high) in enumerate(itertools.pairwise(ends)):
        cut = [ranged(side, low, high) or [side[0].part(0, 0)] for side in sides if side]
        if cut:
            yield together(cut, node.how, (place, parts))


def _sampled(
    how: Ordered,
    sides: Sequence[list[ReadUnit]],
    setting: Setting,
    drained: contextlib.ExitStack,
) -> Generator[list[Any], None, list[Any]]:
    """Return keys of rows of some units."""
    tables = []
    for side, units in enumerate(sides):
        some = units[:: -(-len(units) // _LOOKED_AT) or 1]
        feed = _run(Stage((), (KeySample(how, side),)), source_feed(some), setting)
        tables += [table_of(unit) for unit in (yield from _drain(feed, drained))]
    return tables


def _cut(
    step: Cut, calls: Iterator[ReadUnit], setting: Setting, drained: contextlib.ExitStack
) -> Generator[list[Any], None, list[list[ReadUnit]]]:
    """Return the pieces of each partition, in the order of the rows."""
    unordered = dataclasses.replace(setting, ordered=False)
    found = yield from _drain(
        _run(Stage((), (step,)), source_feed(calls), unordered, target=0), drained
    )
    parts = len(step.bounds) + 1
    if not setting.local:
        found.sort(key=lambda unit: unit.place or (0, 0))
    pieces: list[list[ReadUnit]] = [[] for _ in range(parts)]
    for number, unit in enumerate(found):
        pieces[unit.place.number if unit.place else number % parts].append(unit)
    return pieces


def _calls(units: list[ReadUnit], size: int) -> Iterator[ReadUnit]:
    """Yield units of about so many bytes, each with the number of its first row.

    They are taken out of the list, so that a block is freed when the call has cut it.
    """
    held: list[ReadUnit] = []
    have = rows = 0
    units.reverse()
    while units:
        unit = units.pop()
        held.append(unit)
        have += unit.size
        if have >= size:
            yield together([held], key=rows)
            rows += sum(each.rows or 0 for each in held)
            held, have = [], 0
    if held:
        yield together([held], key=rows)


def _read_by_tasks(node: PlanNode) -> PlanNode:
    """Return a node whose units are blocks: one more stage where they are of a source."""
    if isinstance(node, Exchange) or (isinstance(node, Read) and not node.source.made):
        return Stage((node,), ())
    below = node.inputs[0] if isinstance(node, Limit) else None
    if isinstance(below, Read) and not below.source.made and count_of(node) is not None:
        return Stage((node,), ())
    if isinstance(node, Union | Limit):
        return dataclasses.replace(node, inputs=tuple(map(_read_by_tasks, node.inputs)))
    return node


def execute(
    plan: PlanNode,
    *,
    local: bool | None = None,
    ordered: bool | None = None,
    stats: ExecutionStats | None = None,
    share: int = 1,
    below: Feed | None = None,
    options: ExecutionOptions | None = None,
) -> Iterator[ReadUnit]:
    """Return the blocks of a plan, in order; its stages run ahead of the reader, from now on.

    Args:
        plan: The plan.
        local: Run all in this process. Default: without functions of users, what is small is.
        ordered: Keep the order. Default: as the context says.
        stats: Where to count.
        share: Among how many executions pools are divided.
        below: What is read in place of the plan's source; none of its units may be left out.
        options: In place of those of the context.

    Raises:
        DataError: A function of the user or a file has failed.
    """
    context = DataContext.get_current()
    root = optimised(plan)
    if local is None:
        local = not has_user_code(root) and below is None and _is_small(root, context)
    errors = context.max_errored_blocks if below is None else 0
    options = options or context.execution_options
    resources = {} if local else cluster_resources()
    if not local:
        _check_pools(root, resources, share)
    setting = Setting(
        dataclasses.replace(context, max_errored_blocks=errors, execution_options=options),
        local=local,
        ordered=options.preserve_order if ordered is None else ordered,
        whole=below is None,
        share=share,
        resources=resources,
        pooled=pools_hold(root, share).get("CPU", 0),
        stats=stats or ExecutionStats(root.name),
    )
    if context.print_on_execution_start:
        print(explained(root))  # noqa: T201 -- asked for
    progress = RowProgress(setting.stats) if context.enable_progress_bars else None
    if below is None:
        wish = CutWish(context.target_max_block_size)
        feed = _feed(root if local else _read_by_tasks(root), setting, wish)
    else:
        feed = below
        found = chain(root)
        assert found is not None
        _, stages = found
        for stage in stages or (Stage((root,), ()),):
            feed = _run(stage, feed, setting)
    # Calls begin with the first look for a block, which does not wait for one.
    return _drained(feed, None if local else next(feed), setting.stats, progress)


def _drained(
    feed: Feed,
    first: ReadUnit | list[Any] | None,
    stats: ExecutionStats,
    progress: RowProgress | None,
) -> Iterator[ReadUnit]:
    """Yield the units of a feed, of which ``first`` was read before; wait where it has none."""
    RUNNING.add(stats)
    stats.asking = True
    try:
        item = first or next(feed)
        del first  # else its block would stay in memory
        while item:  # a feed that waits for nothing was given less than it needs
            if progress is not None:
                progress.tell()
            if isinstance(item, ReadUnit):
                stats.asking = False
                yield item
                stats.asking = True
            else:
                began = time.perf_counter()
                wait(item, num_returns=1)
                stats.waited += time.perf_counter() - began
            item = next(feed)
    except DataError as error:
        # The way through the feeds tells a user nothing.
        raise error.with_traceback(None)
    finally:
        RUNNING.discard(stats)
        stats.ended = time.perf_counter()
        if progress is not None:
            progress.close()
        feed.close()


def pools_hold(node: PlanNode, share: int = 1) -> Mapping[str, float]:
    """Return the resources that the pools of a plan hold at least, at one time.

    Args:
        node: The plan, in stages.
        share: Among how many executions pools are divided.
    """
    found: collections.Counter[str] = collections.Counter()
    ends: collections.Counter[str] = collections.Counter()
    for each in node.inputs:  # one after another
        found |= ends + collections.Counter(pools_hold(each, share))
        if isinstance(node, Exchange):  # a pool that ends an input lives until its blocks are cut
            ends.update(_own_pool(each, share))
    return found + collections.Counter(_own_pool(node, share))


def _own_pool(node: PlanNode, share: int) -> dict[str, Any]:
    if not isinstance(node, Stage) or node.compute.pool is None:
        return {}
    actors = node.compute.actors(share)
    return {name: actors * amount for name, amount in node.compute.demand.items()}


def unfitting(node: PlanNode, resources: Mapping[str, float], share: int = 1) -> dict[str, float]:
    """Return how much the pools of a plan hold together of resources of which there is less.

    One pool alone waits for a node to join, as any actor does, unless tasks that feed it need the
    same: CPUs.

    Args:
        node: The plan, in stages.
        resources: What there is.
        share: How many executions there are, among which pools are divided.
    """
    own = [_own_pool(each, share) for each in walk(node)]
    found = {}
    for name, amount in pools_hold(node, share).items():
        alone = 0 if name == "CPU" else max(pool.get(name, 0) for pool in own)
        there = max(resources.get(name, 0), alone)
        if round(share * amount - there, 4) > 0:  # amounts have four decimals
            found[name] = share * amount
    return found


def _check_pools(root: PlanNode, resources: Mapping[str, float], share: int) -> None:
    """Raise DataError if the pools of a plan do not fit beside each other, and a CPU for tasks."""
    left = {**resources, "CPU": resources.get("CPU", 0) - 1}
    for name, amount in unfitting(root, left, share).items():
        what_to_do = (
            ", of which the tasks that read the data need one. Use fewer actors, or leave num_cpus "
            "out."
            if name == "CPU"
            else ". A pool lives until what it has made was read. Use fewer actors, or call "
            "materialize() between two pools."
        )
        raise DataError(
            f"The pools of {root.name} hold {amount:g} {name} together, of "
            f"{resources.get(name, 0):g} that there are{what_to_do}"
        )


def _is_small(root: PlanNode, context: DataContext) -> bool:
    """Return whether all that is read fits into a block, or a few rows of it are wanted."""
    if isinstance(root, Stage | Regroup):
        return _is_small(root.inputs[0], context)
    if isinstance(root, Limit) and not any(isinstance(each, Exchange) for each in walk(root)):
        return True
    if isinstance(root, Union | Exchange | Limit):
        return all(_is_small(each, context) for each in root.inputs)
    assert isinstance(root, Read)
    units = list(root.source.units(CutWish(context.target_max_block_size)))
    return sum(unit.size for unit in units) < context.target_max_block_size and len(units) < 2


def table_of(unit: ReadUnit) -> Any:
    """Return the rows of a unit as a table."""
    return concat(list(unit.read(*unit.values())))
