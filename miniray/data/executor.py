"""Executes a plan: feeds that are polled from the consumer's side, and one wait for all of them.

Nothing runs ahead by itself: a poll of the last feed polls those below it, which start what may
start. Where none has anything, the consumer waits for the calls whose blocks come next.
"""

from __future__ import annotations

import collections
import dataclasses
import functools
import itertools
import time
from typing import TYPE_CHECKING, Any

from miniray.api import cluster_resources, get, wait
from miniray.data.context import DataContext
from miniray.data.exchange import Aligned, Cut, together
from miniray.data.feeds import (
    GroupFeed,
    HeadFeed,
    LimitFeed,
    Setting,
    SourceFeed,
    UnionFeed,
    UnitFeed,
)
from miniray.data.ordered import KeySample, Ordered
from miniray.data.plan import (
    Exchange,
    Limit,
    Read,
    Regroup,
    Stage,
    Union,
    check_lengths,
    count_of,
    has_user_code,
    optimised,
    walk,
)
from miniray.data.sources import CutWish, ranged
from miniray.data.stages import InlineFeed, PoolFeed, StageFeed
from miniray.data.stats import RUNNING, ExecutionStats, RowProgress
from miniray.data.transforms import DataError, Gather
from miniray.data.work import StageWork

if TYPE_CHECKING:
    from collections.abc import Generator, Iterator, Mapping, Sequence

    from miniray.data.plan import PlanNode
    from miniray.data.sources import ReadUnit

#: Blocks that are cut together, and of about so many a partition is made.
_TOGETHER = 4
#: Partitions, at most: larger inputs have larger ones.
_MOST = 512
#: Units whose keys are looked at, at most, to choose the bounds of partitions.
_LOOKED_AT = 64


def _feed(node: PlanNode, setting: Setting, wish: CutWish) -> UnitFeed:
    """Return the feed of a node; ``wish`` says how the node above would have its input."""
    if isinstance(node, Read):
        return SourceFeed(node.units(wish))
    if isinstance(node, Union):
        return UnionFeed([functools.partial(_feed, each, setting, wish) for each in node.inputs])
    if isinstance(node, Limit):
        (below,) = node.inputs
        if isinstance(below, Union | Exchange) and count_of(below) is None:
            below = _read_by_tasks(below)  # blocks tell their rows, of which so many are wanted
        if isinstance(below, Read) and below.source.count() is None:
            head = HeadFeed(_feed(below, setting, wish), node.rows)
            return LimitFeed(_run(Stage((below,), ()), head, setting), node.rows)
        return LimitFeed(_feed(below, setting, wish), node.rows)
    if isinstance(node, Regroup):
        feed = _feed(_read_by_tasks(node.inputs[0]), setting, wish)
        stage = Stage(node.inputs, (Gather(),))
        return _run(stage, feed, setting, node.rows, strict=node.strict)
    if isinstance(node, Exchange):
        return ExchangeFeed(node, setting)
    assert isinstance(node, Stage)
    parts = 1
    if any(step.user for step in node.steps) and not setting.local:
        pool = node.compute.pool
        slots = setting.slots(node.compute) if pool is None else max(pool)
        parts = setting.context.read_op_min_num_blocks * slots
    target = setting.context.target_max_block_size
    own = CutWish(target, parts, node.least)
    (below,) = node.inputs
    if isinstance(below, Exchange) and below.partitions is not None and not node.steps:
        target = 0  # so many blocks were asked for
    return _run(node, _feed(below, setting, own), setting, node.least, target=target)


def _run(
    stage: Stage,
    below: UnitFeed,
    setting: Setting,
    rows: int = 1,
    *,
    strict: bool = False,
    target: int | None = None,
) -> UnitFeed:
    groups = GroupFeed(below, rows, strict=strict)
    context = setting.context
    size = context.target_max_block_size if target is None else target
    work = StageWork(stage.steps, size, context.retried_io_errors)
    if setting.local:
        return InlineFeed(groups, work)
    kind = StageFeed if stage.compute.pool is None else PoolFeed
    return kind(groups, stage, work, setting)


class ExchangeFeed(UnitFeed):
    """Gives the partitions of an exchange, when all of its input is there.

    The input becomes blocks, and each call of the next stage cuts some of them into a piece for
    each partition. The pieces of a partition are one unit: whoever reads it makes its rows.
    """

    def __init__(self, node: Exchange, setting: Setting) -> None:
        self._node = node
        self._setting = setting
        self._feeds: list[UnitFeed] = []
        self._made = self._partitions()

    def poll(self) -> ReadUnit | None:
        unit = next(self._made, self)
        self.done = unit is self
        return None if isinstance(unit, UnitFeed) else unit

    def waiting(self) -> list[Any]:
        """Return what the feed waits for that is drained now."""
        return self._feeds[-1].waiting() if self._feeds else []

    def close(self) -> None:
        """Close all feeds that were drained: pools may have had to make their blocks again."""
        while self._feeds:
            self._feeds.pop().close()

    def _drain(self, feed: UnitFeed) -> Generator[ReadUnit | None, None, list[ReadUnit]]:
        """Return all units of a feed, yielding None as long as there are none."""
        self._feeds.append(feed)
        found = []
        while True:
            unit = feed.poll()
            if unit is not None:
                found.append(unit)
            elif feed.done:
                return found
            else:
                yield None

    def _partitions(self) -> Generator[ReadUnit | None, None, None]:
        how, setting = self._node.how, self._setting
        target = setting.context.target_max_block_size
        sides = []
        for below in self._node.inputs:
            feed = _feed(_read_by_tasks(below), setting, CutWish(target))  # blocks tell their rows
            sides.append((yield from self._drain(feed)))
        total = sum(unit.size for side in sides for unit in side)
        if isinstance(how, Aligned):
            yield from self._aligned(sides, self._node.partitions or -(-total // target) or 1)
            return
        # As many pieces as a driver can know of, and not too few for a store to hold two calls.
        each = min(max(_TOGETHER * target, total // _MOST), setting.bytes_in_flight // 2)
        parts = self._node.partitions or -(-total // each) or 1
        bounds: Sequence[Any] = []
        if parts > 1:
            samples = (yield from self._sampled(sides)) if isinstance(how, Ordered) else []
            bounds = how.bounds(samples, parts)
        if not bounds:
            yield together(sides, how)
            return
        pieces = []
        for side, units in enumerate(sides):
            pieces.append((yield from self._cut(Cut(how, side, bounds), units, each)))
        self.close()
        for place in range(len(bounds) + 1):
            unit = together([own[place] for own in pieces], how, (place, len(bounds) + 1))
            for own in pieces:
                own[place] = []
            yield unit

    def _aligned(self, sides: Sequence[list[ReadUnit]], parts: int) -> Iterator[ReadUnit]:
        rows = check_lengths([sum(unit.rows or 0 for unit in side) for side in sides]) or 0
        ends = [part * rows // parts for part in range(parts + 1)]
        for place, (low, high) in enumerate(itertools.pairwise(ends)):
            cut = [ranged(side, low, high) or [side[0].part(0, 0)] for side in sides if side]
            if cut:
                yield together(cut, self._node.how, (place, parts))

    def _sampled(
        self, sides: Sequence[list[ReadUnit]]
    ) -> Generator[ReadUnit | None, None, list[Any]]:
        """Return keys of rows of some units."""
        how = self._node.how
        assert isinstance(how, Ordered)
        tables = []
        for side, units in enumerate(sides if how.sampled else []):
            some = units[:: -(-len(units) // _LOOKED_AT) or 1]
            stage = Stage((), (KeySample(how, side),))
            feed = _run(stage, SourceFeed(iter(some)), self._setting)
            tables += [table_of(unit) for unit in (yield from self._drain(feed))]
        return tables

    def _cut(
        self, step: Cut, units: list[ReadUnit], each: int
    ) -> Generator[ReadUnit | None, None, list[list[ReadUnit]]]:
        """Return the pieces of each partition, in the order of the rows."""
        setting = dataclasses.replace(self._setting, ordered=False)
        feed = _run(Stage((), (step,)), SourceFeed(_calls(units, each)), setting, target=0)
        found = yield from self._drain(feed)
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
    if isinstance(node, Read) and not node.source.made:
        return Stage((node,), ())
    if isinstance(node, Exchange):
        return Stage((node,), ())
    if isinstance(node, Union):
        return Union(tuple(_read_by_tasks(each) for each in node.inputs))
    if isinstance(node, Limit):
        return dataclasses.replace(node, inputs=(_read_by_tasks(node.inputs[0]),))
    return node


def execute(
    plan: PlanNode,
    *,
    local: bool | None = None,
    ordered: bool | None = None,
    stats: ExecutionStats | None = None,
    share: int = 1,
    below: UnitFeed | None = None,
) -> Iterator[ReadUnit]:
    """Return the blocks of a plan, in order; its stages run ahead of the reader.

    Args:
        plan: The plan.
        local: Run all in this process. Default: without functions of users, what is small is.
        ordered: Keep the order. Default: as the context says.
        stats: Where to count.
        share: Among how many executions pools are divided.
        below: What is read in place of the plan's source. Calls for it start at once, and none of
            its units may be left out.

    Raises:
        DataError: A function of the user or a file has failed.
    """
    context = DataContext.get_current()
    root = optimised(plan)
    if local is None:
        local = not has_user_code(root) and below is None and _is_small(root, context)
    errors = context.max_errored_blocks if below is None else 0
    resources = {} if local else cluster_resources()
    if not local:
        _check_pools(root, resources, share)
    setting = Setting(
        dataclasses.replace(context, max_errored_blocks=errors),
        local=local,
        ordered=context.execution_options.preserve_order if ordered is None else ordered,
        whole=below is None,
        share=share,
        resources=resources,
        pooled=pools_hold(root, share).get("CPU", 0),
        stats=stats or ExecutionStats(root.name),
    )
    if context.print_on_execution_start:
        from miniray.data.plan import explained

        print(explained(root))  # noqa: T201 -- asked for
    if below is not None:
        feed = _over(below, root if isinstance(root, Stage) else Stage((root,), ()), setting)
        feed.start()
    else:
        wish = CutWish(context.target_max_block_size)
        feed = _feed(root if local else _read_by_tasks(root), setting, wish)
    progress = RowProgress(setting.stats) if context.enable_progress_bars else None
    return _drained(feed, setting.stats, progress)


def _over(feed: UnitFeed, node: PlanNode, setting: Setting) -> UnitFeed:
    """Return the feed of a plan's stages over another feed than its source's."""
    if not isinstance(node, Stage):
        return feed
    return _run(node, _over(feed, node.inputs[0], setting), setting)


def _drained(
    feed: UnitFeed, stats: ExecutionStats, progress: RowProgress | None
) -> Iterator[ReadUnit]:
    RUNNING.add(stats)
    try:
        while True:
            stats.asking = True
            unit = feed.poll()
            if progress is not None:
                progress.tell()
            if unit is not None:
                stats.asking = False
                yield unit
                continue
            if feed.done:
                return
            began = time.perf_counter()
            wait(feed.waiting(), num_returns=1)
            stats.waited += time.perf_counter() - began
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
    """Raise DataError if the pools of a plan do not fit beside each other; see also the CPUs."""
    for name, amount in unfitting(root, resources, share).items():
        if name != "CPU":
            raise DataError(
                f"The pools of {root.name} hold {amount:g} {name} together, of "
                f"{resources.get(name, 0):g} that there are. A pool lives until what it has made "
                f"was read. Use fewer actors, or call materialize() between two pools."
            )


def _is_small(root: PlanNode, context: DataContext) -> bool:
    """Whether all that is read fits into a block, or a few rows of it are wanted."""
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
    from miniray.data.tables import concat

    values = get(list(unit.refs)) if unit.refs else []
    return concat(list(unit.read(*values)))
