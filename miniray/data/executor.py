"""Executes a plan: feeds that are read from the consumer's side, and one wait for all of them.

Nothing runs ahead by itself: the reader of the last feed reads those below it, which start what
may start. Where none has anything, the consumer waits for the calls whose blocks come next.
"""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import itertools
import threading
import time
from typing import TYPE_CHECKING, Any

import pyarrow as pa

from miniray.api import cluster_resources, wait
from miniray.data.blocks import no_rows
from miniray.data.context import DataContext
from miniray.data.exchange import Aligned, Cut, together
from miniray.data.feeds import (
    Setting,
    group_feed,
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
    explained,
    has_user_code,
    is_numbered,
    optimised,
    schema_of,
    walk,
)
from miniray.data.sources import ENDLESS, BlockRows, CutWish, ReadUnit, ranged
from miniray.data.stages import StageCalls
from miniray.data.stats import RUNNING, ExecutionStats, RowProgress
from miniray.data.tables import concat
from miniray.data.transforms import DataError
from miniray.data.work import StageWork

if TYPE_CHECKING:
    from collections.abc import Generator, Iterator, Mapping, Sequence

    from miniray.data.exchange import How
    from miniray.data.feeds import Feed
    from miniray.data.plan import PlanNode
    from miniray.data.transforms import Transform

    #: Yields what it waits for meanwhile, and returns something.
    Made = Generator[list[Any], None, Any]

#: Blocks that are cut together, and about how many a partition is made of.
_TOGETHER = 2
#: Partitions, at most: larger inputs have larger ones.
_MOST = 512
#: Rows that are read without tasks, if no more are wanted.
_FEW = 10_000
#: Units whose keys are looked at, at most, to choose the bounds of partitions.
_LOOKED_AT = 64


def _feed(node: PlanNode, setting: Setting, wish: CutWish) -> Feed:
    """Return the feed of a node; ``wish`` says how the node above would have its input."""
    if isinstance(node, Read):
        return source_feed(node.units(wish))
    if isinstance(node, Limit | Exchange):  # their rows follow from the order of others
        ordered = setting.context.execution_options.preserve_order
        setting = dataclasses.replace(setting, ordered=ordered)
    if isinstance(node, Union):
        return union_feed(_feed(each, setting, wish) for each in node.inputs)
    if isinstance(node, Exchange):
        return _exchange_feed(node, setting)
    (below,) = node.inputs
    if isinstance(node, Limit):
        below = below if is_numbered(below) else _blocks(below)
        return limit_feed(_feed(below, setting, wish), node.rows)
    if isinstance(node, Regroup):
        feed = _feed(_blocks(below), setting, wish)
        groups = group_feed(feed, node.rows, strict=node.strict)
        return _run(Stage((node,), ()), groups, setting, target=ENDLESS)  # a block of each group
    assert isinstance(node, Stage)
    compute, parts = node.compute, wish.parts
    target = setting.context.target_max_block_size
    least = node.least if node.user else max(node.least, wish.least)
    spreads = any(step.spreads for step in node.steps)
    if (spreads or parts > 1) and not setting.local:  # here or above
        slots = max(compute.least, compute.most) if compute.is_pool else setting.slots(compute)[0]
        parts = max(parts, setting.context.read_op_min_num_blocks * slots)
    feed = group_feed(_feed(below, setting, CutWish(target, parts, least)), node.least)
    if isinstance(below, Exchange) and below.partitions is not None and not node.steps:
        target = 0  # this number of blocks was requested
    return _run(node, feed, setting, target)


def _run(stage: Stage, below: Feed, setting: Setting, target: int) -> Feed:
    """Return the blocks that a stage makes of another feed; ``target`` is as of ``StageWork``."""
    work = StageWork(stage.steps, target, setting.context.retried_io_errors)
    if setting.local:
        return inline_feed(below, work)
    return StageCalls(stage, work, setting).feed(below)


def _blocks(node: PlanNode) -> PlanNode:
    """Return a node whose units have row counts: a stage on top where they have to be read."""
    below = node.inputs[0] if isinstance(node, Limit) and is_numbered(node) else node
    known = isinstance(below, Read) and below.source.made and is_numbered(below)
    if isinstance(below, Read | Exchange) and not known:
        return Stage((node,), ())
    if isinstance(node, Union | Limit):
        return dataclasses.replace(node, inputs=tuple(map(_blocks, node.inputs)))
    return node


def _exchange_feed(node: Exchange, setting: Setting) -> Feed:
    """Give the partitions of an exchange, when all of its input is there.

    The input becomes blocks, and each call of the next stage cuts some of them into a piece for
    each partition. The pieces of a partition are one unit: its reader makes its rows.
    """
    how, target = node.how, setting.context.target_max_block_size
    # They stay open while their blocks are read: pools may have to make these again.
    with contextlib.ExitStack() as inputs:
        sides: list[collections.deque[ReadUnit]] = []
        for below in node.inputs:
            feed = _feed(_blocks(below), setting, CutWish(target))
            inputs.enter_context(contextlib.closing(feed))
            units = yield from _drain(feed)
            if not units:
                units.append(BlockRows.unit(no_rows(schema_of(below) or pa.schema([])), key=0))
            sides.append(units)
        partitions: collections.deque[Any] = collections.deque([sides])
        total = sum(unit.size for side in sides for unit in side)
        # As many pieces as a driver can track, and enough for a store to hold two calls.
        each = min(max(_TOGETHER * target, total // _MOST), setting.bytes_in_flight // 2)
        if isinstance(how, Aligned):
            partitions = _aligned(sides, node.partitions or -(-total // target) or 1)
        elif (parts := node.partitions or -(-total // each) or 1) > 1:
            bounds = how.bounds((yield from _samples(how, sides, setting)), parts)
            if len(bounds):
                partitions = yield from _cut(how, bounds, sides, each, setting)
                inputs.close()
        count = len(partitions)
        for place in range(count):
            yield together(partitions.popleft(), how, (place, count))
        yield from itertools.repeat(None)


def _drain(feed: Feed) -> Made:
    """Return all units of a feed; the key of each is the number of its first row."""
    found: collections.deque[ReadUnit] = collections.deque()
    rows = 0
    while (item := next(feed)) is not None:
        if isinstance(item, ReadUnit):
            found.append(dataclasses.replace(item, key=rows))
            rows += item.rows or 0
        else:
            yield item
    return found


def _made(step: Transform, below: Feed, setting: Setting) -> Made:
    """Return all tables that a step makes of a feed."""
    with contextlib.closing(_run(Stage((), (step,)), below, setting, target=0)) as feed:
        return (yield from _drain(feed))


def _aligned(sides: Sequence[Any], parts: int) -> collections.deque[Any]:
    """Return for each partition the units of its rows, by input."""
    rows = check_lengths([sum(unit.rows or 0 for unit in side) for side in sides]) or 0
    ends = [part * rows // parts for part in range(parts + 1)]
    return collections.deque(
        [ranged(side, low, high) or [side[0].part(0, 0)] for side in sides]
        for low, high in itertools.pairwise(ends)
    )


def _samples(how: How, sides: Sequence[Any], setting: Setting) -> Made:
    """Return keys of rows of some units, if bounds are chosen by these."""
    tables: list[Any] = []
    if isinstance(how, Ordered) and not how.boundaries:
        for side, units in enumerate(sides):
            some = itertools.islice(units, 0, None, -(-len(units) // _LOOKED_AT))
            step = KeySample(f"{how.name}Sample", how, side)
            made = yield from _made(step, source_feed(some), setting)
            tables += map(table_of, made)
    return tables


def _cut(
    how: How, bounds: Sequence[Any], sides: Sequence[Any], size: int, setting: Setting
) -> Made:
    """Return for each partition its pieces, by input, cut by calls of about ``size`` bytes each."""
    unordered = dataclasses.replace(setting, ordered=False)
    pieces: list[list[list[ReadUnit]]] = [[[] for _ in sides] for _ in range(len(bounds) + 1)]
    for side, units in enumerate(sides):
        # They are taken out, so that a block is freed when the call has cut it.
        blocks = source_feed(units.popleft() for _ in range(len(units)))
        calls = group_feed(blocks, size, by_size=True)
        step = Cut(f"{how.name}Map", how, side, bounds)
        made = yield from _made(step, calls, unordered)
        for unit in sorted(made, key=lambda unit: unit.place):
            _, partition = unit.place
            pieces[partition][side].append(unit)
    return collections.deque(pieces)


def execute(
    plan: PlanNode,
    *,
    local: bool | None = None,
    ordered: bool | None = None,
    stats: ExecutionStats | None = None,
    share: int = 1,
    below: Feed | None = None,
    context: DataContext | None = None,
) -> Iterator[ReadUnit]:
    """Return the blocks of a plan, in order; its stages run ahead of the reader, from now on.

    Args:
        plan: The plan.
        local: Run all in this process. Default: for small data without functions of users.
        ordered: Keep the order. Default: as the context says.
        stats: Where to count.
        share: Among how many executions pools are divided.
        below: What is read in place of the plan's source.
        context: The settings. Default: those of the process.

    Raises:
        DataError: A function of the user or a file has failed.
    """
    root = optimised(plan)
    context = context or DataContext.get_current()
    if local is None:
        local = not has_user_code(root) and below is None and _is_small(root, context)
    resources = {} if local else cluster_resources()
    stats = stats or ExecutionStats(root.name)
    if not local:
        check_pools(root, resources, share)
        stats.held = pools_hold(root, share)
    setting = Setting(
        context,
        local=local,
        ordered=context.execution_options.preserve_order if ordered is None else ordered,
        share=share,
        resources=resources,
        stats=stats,
    )
    if context.print_on_execution_start:
        print(explained(root))  # noqa: T201 -- requested
    units = _drained(_feed_of(root, setting, below), setting)
    next(units)
    return units


def _feed_of(root: PlanNode, setting: Setting, below: Feed | None) -> Feed:
    """Return the blocks of a plan; ``below`` is in place of its source."""
    if below is None:
        as_it_is = setting.local or (isinstance(root, Read) and root.source.made)
        wish = CutWish(setting.context.target_max_block_size)
        return _feed(root if as_it_is else _blocks(root), setting, wish)
    found = chain(root)
    assert found is not None
    for stage in found[1] or (Stage((root,), ()),):
        below = _run(stage, below, setting, setting.context.target_max_block_size)
    return below


def _drained(feed: Feed, setting: Setting) -> Iterator[Any]:
    """Yield the units of a feed; wait where it has none. Errors leave out the frames of feeds.

    It yields None before, when it has begun the first calls: then it ends what runs if nobody
    reads on.
    """
    stats = setting.stats
    progress = RowProgress(stats, shown=setting.context.enable_progress_bars)
    RUNNING.add(stats)
    stats.thread = threading.get_ident()
    try:
        item = None if setting.local else next(feed)  # this does not wait for a block
        yield None
        stats.asking, stats.thread = True, threading.get_ident()
        item = item or next(feed)
        while item:  # an empty list: a feed was given less than it needs
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
        raise error.with_traceback(None)
    finally:
        RUNNING.discard(stats)
        stats.ended = time.perf_counter()
        progress.close()
        feed.close()


def pools_hold(node: PlanNode, share: int = 1) -> collections.Counter[str]:
    """Return the resources that the pools of a plan hold at least, at one time.

    Args:
        node: The plan, in stages.
        share: Among how many executions pools are divided.
    """
    found: collections.Counter[str] = collections.Counter()
    ends: collections.Counter[str] = collections.Counter()
    for each in node.inputs:  # one after another
        found |= ends + pools_hold(each, share)
        if isinstance(node, Exchange):  # a pool that ends an input lives until its blocks are cut
            ends += each.compute.held(share)
    return found + node.compute.held(share)


def check_pools(root: PlanNode, left: Mapping[str, float], share: int = 1) -> None:
    """Raise DataError if the pools of a plan do not fit beside each other, and a CPU for tasks.

    Nor may they wait for those of executions that this thread has begun to read: nobody else ends
    these. One pool alone waits for a node to join, as any actor does, unless tasks that feed it
    need the same: CPUs.

    Args:
        root: The plan, in stages.
        left: What there is for them.
        share: How many executions there are, among which pools are divided.
    """
    begun: collections.Counter[str] = collections.Counter()
    for each in list(RUNNING):
        if each.thread == threading.get_ident():
            begun.update(each.held)
    for name, own in pools_hold(root, share).items():
        alone = max(each.compute.held(share)[name] for each in walk(root))
        there = left.get(name, 0) - 1 if name == "CPU" else max(left.get(name, 0), alone)
        amount = share * (own + begun[name])
        if round(amount - there, 4) > 0:  # amounts have four decimals
            needed = ", of which the tasks that read the data need one" if name == "CPU" else ""
            others = " and of datasets that are not read to their end" if begun[name] else ""
            ranks = f", which each of {share} workers has as those of all do not fit,"
            raise DataError(
                f"The pools of {root.name}{others}{ranks if share > 1 else ''} hold {amount:g} "
                f"{name} together, of {left.get(name, 0):g} that there are{needed}: some would "
                f"wait for ever. A pool lives until its results were read. Use fewer actors, let "
                f"them hold less, call materialize() between two pools, or read one dataset after "
                f"another."
            )


def _is_small(node: PlanNode, context: DataContext) -> bool:
    """Return whether all that is read fits into a block, or a few rows of it are wanted."""
    few = isinstance(node, Limit) and node.rows <= _FEW
    if few and not any(isinstance(each, Exchange) for each in walk(node)):
        return True
    if isinstance(node, Read):
        target = context.target_max_block_size
        units = list(itertools.islice(node.source.units(CutWish(target)), 2))
        return len(units) < 2 and all(unit.size < target for unit in units)
    return all(_is_small(each, context) for each in node.inputs)


def table_of(unit: ReadUnit) -> Any:
    """Return the rows of a unit as a table."""
    return concat(list(unit.read(*unit.values())))
