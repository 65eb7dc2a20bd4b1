"""Executes a plan: feeds that are polled from the consumer's side, and one wait for all of them.

A feed gives units: those of a source, or blocks that tasks have made. Nothing runs ahead by itself:
a stage takes units from the feed below while its window of calls has capacity, and a call pauses at
two blocks that nobody has read. So what is in flight is bounded by the windows, whatever the data.
"""

from __future__ import annotations

import collections
import dataclasses
import functools
import time
from typing import TYPE_CHECKING, Any

from miniray.api import cluster_resources, get, kill, wait
from miniray.data.context import DataContext
from miniray.data.plan import (
    Limit,
    Read,
    Regroup,
    Stage,
    Union,
    count_of,
    has_user_code,
    optimised,
)
from miniray.data.sources import BlocksDatasource, BlockUnit, CutWish, TablesDatasource, TableUnit
from miniray.data.stats import ExecutionStats
from miniray.data.transforms import DataError, Gather, Where
from miniray.data.work import PoolWorker, StageWork, task_of
from miniray.decorator import remote
from miniray.exceptions import MinirayError, TaskError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from miniray.data.context import ExecutionOptions
    from miniray.data.plan import Compute, PlanNode
    from miniray.data.sources import ReadUnit
    from miniray.data.stats import StageStats

#: Objects of a call that may be unread before it pauses: two blocks and their records.
_UNREAD = 4
#: Calls in the window of a stage for each that can run at once.
_AHEAD = 2
#: Calls in the window of a pool for each actor; two of them are at the actor.
_POOL_AHEAD = 4


@dataclasses.dataclass
class Setting:
    """What an execution knows of its surroundings.

    Attributes:
        context: The settings.
        local: Run everything in this process.
        ordered: Keep the order of rows.
        seed: What random numbers of the tasks are drawn from.
        share: Of how many executions of the same plan this one is: pools are divided among them.
        resources: The cluster's totals; empty if local.
        pooled: CPUs that pools of the plan hold at least, at one time.
        stats: Where stages count.
    """

    context: DataContext
    local: bool = False
    ordered: bool = True
    seed: int = 0
    share: int = 1
    resources: Mapping[str, float] = dataclasses.field(default_factory=dict)
    pooled: float = 0
    stats: ExecutionStats = dataclasses.field(default_factory=ExecutionStats)

    @property
    def options(self) -> ExecutionOptions:
        """The options of the context."""
        return self.context.execution_options

    def slots(self, compute: Compute, heap: int = 0) -> int:
        """Return how many tasks of a kind can run at once.

        Args:
            compute: What they run on.
            heap: Bytes that one of them takes.
        """
        given = compute.options
        demand = {"CPU": given.get("num_cpus", 1), "GPU": given.get("num_gpus", 0)}
        demand.update(given.get("resources") or {})
        limits = self.options.resource_limits
        totals = dict(self.resources)
        for name, limit in (("CPU", limits.cpu), ("GPU", limits.gpu)):
            if limit is not None:
                totals[name] = min(limit, totals.get(name, 0))
        found = [totals.get(name, 0) / amount for name, amount in demand.items() if amount]
        if heap and totals.get("memory"):
            found.append(totals["memory"] / heap)
        if compute.most is not None:
            found.append(compute.most)
        return max(1, int(min(found, default=1)))

    def tasks_at_most(self, compute: Compute) -> int:
        """Return how many tasks of a kind may run at once, whatever the cluster has."""
        cpus, each = self.options.resource_limits.cpu, compute.options.get("num_cpus", 1)
        allowed = 2**31 if cpus is None or not each else max(1, int(cpus / each))
        return allowed if compute.most is None else min(allowed, compute.most)

    def actors_at_most(self, compute: Compute) -> int:
        """Return how many actors leave a CPU to the tasks that feed them.

        Raises:
            DataError: Not even the least number of them does.
        """
        each = compute.options.get("num_cpus", 0)
        least = compute.pool[0] if compute.pool is not None else 1
        others = self.pooled - least * each
        cpus = self.resources.get("CPU", 0)
        most = int((cpus - 1 - others) / each) if each else 2**31
        if most < least:
            beside = f", beside other pools that hold {others:g}," if others else ""
            raise DataError(
                f"A pool of {least} actors with num_cpus={each}{beside} leaves none of the "
                f"cluster's {cpus:g} CPUs to the tasks that read the data. Use fewer actors, or "
                f"leave num_cpus out."
            )
        return most

    @property
    def bytes_in_flight(self) -> int:
        """The most bytes of blocks that a stage may have made and not handed on."""
        limit = self.options.resource_limits.object_store_memory
        store = self.resources.get("object_store_memory", 0) / 4
        return int(limit if limit is not None else store) or 2**62


class Feed:
    """Gives units, one after another, without waiting."""

    done = False

    def poll(self) -> ReadUnit | None:
        """Return the next unit; None if there is none yet, or, if ``done``, none any more."""
        raise NotImplementedError

    def waiting(self) -> list[Any]:
        """Return the generators of which one must go on before ``poll`` can give anything."""
        return []

    def close(self) -> None:
        """Stop what runs."""


class SourceFeed(Feed):
    """The units of a source."""

    def __init__(self, units: Iterator[ReadUnit]) -> None:
        self._units = units

    def poll(self) -> ReadUnit | None:
        """Return the next one."""
        unit = next(self._units, None)
        self.done = unit is None
        return unit


class UnionFeed(Feed):
    """What several feeds give, one feed after another."""

    def __init__(self, makers: Sequence[Callable[[], Feed]]) -> None:
        self._makers = collections.deque(makers)
        self._current: Feed | None = None

    def poll(self) -> ReadUnit | None:
        """Return the next unit of the feed whose turn it is."""
        while True:
            if self._current is None:
                if not self._makers:
                    self.done = True
                    return None
                self._current = self._makers.popleft()()
            unit = self._current.poll()
            if unit is not None or not self._current.done:
                return unit
            self._current = None

    def waiting(self) -> list[Any]:
        """Return what that feed waits for."""
        return self._current.waiting() if self._current is not None else []

    def close(self) -> None:
        """Close that feed."""
        self._makers.clear()
        if self._current is not None:
            self._current.close()


class LimitFeed(Feed):
    """The first rows of a feed, which is closed when there are enough."""

    def __init__(self, below: Feed, rows: int) -> None:
        self._below = below
        self._left = rows

    def poll(self) -> ReadUnit | None:
        """Return the next unit, or the part of it that is wanted."""
        if self._left <= 0:
            self.close()
            self.done = True
            return None
        unit = self._below.poll()
        if unit is None:
            self.done = self._below.done
            return None
        if unit.rows is None or unit.rows > self._left:
            unit = unit.part(0, self._left)
        self._left -= unit.rows or 0
        return unit

    def waiting(self) -> list[Any]:
        """Return what the feed below waits for."""
        return self._below.waiting()

    def close(self) -> None:
        """Close the feed below."""
        self._below.close()


class HeadFeed(LimitFeed):
    """The first rows of each unit, where nobody knows how many these have."""

    def poll(self) -> ReadUnit | None:
        """Return a part of the next unit."""
        unit = self._below.poll()
        self.done = self._below.done
        return unit if unit is None else unit.part(0, self._left)


class Groups:
    """Puts units together, so that each group has as many rows as are wanted."""

    def __init__(self, below: Feed, rows: int, *, strict: bool) -> None:
        self._below = below
        self._rows = rows
        self._strict = strict
        self._held: list[ReadUnit] = []
        self._have = 0

    @property
    def done(self) -> bool:
        """Whether no group will come any more."""
        return self._below.done and not self._held

    def next(self) -> list[ReadUnit] | None:
        """Return a group; None if there is none yet, or none any more."""
        while self._have < self._rows:
            unit = self._below.poll()
            if unit is None:
                break
            self._held.append(unit)
            # What has an unknown number of rows is a group.
            self._have += self._rows if unit.rows is None else unit.rows
        if self._have < self._rows and not self._below.done:
            return None
        group, self._held = self._held, []
        over, self._have = self._have - self._rows, 0
        if self._strict and over > 0 and group[-1].rows is not None:
            last = group[-1].rows
            self._held = [group[-1].part(last - over, last)]
            group[-1] = group[-1].part(0, last - over)
            self._have = over
        return group or None


def _index(group: Sequence[ReadUnit], place: int) -> int:
    """Return what random numbers of a call are drawn from."""
    return place if group[0].key is None else group[0].key


class InlineFeed(Feed):
    """Runs the steps of a stage in this process."""

    def __init__(self, groups: Groups, work: StageWork, seed: int) -> None:
        self._groups = groups
        self._work = work.prepared()
        self._seed = seed
        self._tables: Iterator[Any] | None = None
        self._index = 0

    def poll(self) -> ReadUnit | None:
        """Run until there is a block."""
        while True:
            if self._tables is None:
                group = self._groups.next()
                if group is None:
                    self.done = self._groups.done
                    return None
                where = Where(group[0].label, _index(group, self._index), self._seed)
                values = [get(list(unit.refs)) if unit.refs else [] for unit in group]
                self._tables = self._work.tables(where, group, values)
                self._index += 1
            table = next(self._tables, None)
            if table is not None:
                return TableUnit(table)
            self._tables = None


class Running:
    """A call of a stage: gives its blocks in order."""

    def __init__(self, generator: Any, label: str, actor: Any = None) -> None:
        self.generator = generator
        self.label = label
        self.actor = actor
        self._block: Any = None
        self._rows = 0

    def take(self, stats: StageStats) -> ReadUnit | None:
        """Return the next block, if it is there.

        Raises:
            DataError: The call has failed.
        """
        generator = self.generator
        if self._block is None:
            if not generator.next_ready():
                return None
            self._block = next(generator)
        if not generator.next_ready():
            if generator.is_finished():
                block, self._block = self._block, None
                self._get(block)  # an error comes last
            return None
        block, self._block = self._block, None
        record = self._get(next(generator))
        if record.first != self._rows:
            raise DataError(
                f"{self.label} ran again after its process had died, and gave other rows than "
                f"before. Functions must make the same of the same rows."
            )
        self._rows += record.rows
        stats.add(record)
        return BlockUnit((block,), record.rows, record.size, origin=self.label)

    def _get(self, ref: Any) -> Any:
        try:
            return get(ref)
        except DataError as error:
            raise DataError(_told(error)) from None
        except TaskError as error:
            raise DataError(f"Reading {self.label} failed: {error}") from error
        except MinirayError as error:
            raise DataError(f"The task for {self.label} has ended: {error}") from error

    @property
    def ended(self) -> bool:
        """Whether all was taken."""
        return self._block is None and self.generator.is_finished()


def _told(error: DataError) -> str:
    """Return the text of an error of a task, without the task's own traceback."""
    cause = getattr(error, "cause", None)
    return str(cause if cause is not None else error)


class StageFeed(Feed):
    """Runs a stage in tasks."""

    def __init__(self, groups: Groups, below: Feed, stage: Stage, setting: Setting) -> None:
        self._groups = groups
        self._below = below
        self._compute = stage.compute
        self._setting = setting
        self._stats = setting.stats.stage(stage.name)
        context = setting.context
        self._work = StageWork(
            stage.steps, context.target_max_block_size, context.retried_io_errors
        )
        self._calls: collections.deque[Running] = collections.deque()
        self._index = 0
        self._start_up()

    def _start_up(self) -> None:
        """Make what runs the calls."""
        options = {
            "name": self._stats.name[:100],
            "max_retries": self._setting.context.max_task_retries,
            "_generator_backpressure_num_objects": _UNREAD,
            **_placed(self._setting),
            **self._compute.options,
        }
        self._task: Any = remote(**options)(task_of(self._work))

    def poll(self) -> ReadUnit | None:
        """Start what may start, and return the next block if it is there."""
        while True:
            self._fill()
            ended = 0
            for call in list(self._calls) if not self._setting.ordered else list(self._calls)[:1]:
                unit = self._take(call)
                if unit is not None:
                    return unit
                if call.ended:
                    self._finish(call)
                    ended += 1
            if not ended:
                self.done = not self._calls and self._groups.done
                if self.done:
                    self.close()
                return None

    def _take(self, call: Running) -> ReadUnit | None:
        try:
            return call.take(self._stats)
        except DataError:
            self._stats.errors += 1
            allowed = self._setting.context.max_errored_blocks
            if 0 <= allowed < self._stats.errors:
                raise
            return None

    def _finish(self, call: Running) -> None:
        self._calls.remove(call)

    @property
    def _window(self) -> int:
        """The calls that may have begun and are not read to their end."""
        slots = self._setting.slots(self._compute, self._stats.heap)
        return self._bounded(min(_AHEAD * slots, self._setting.tasks_at_most(self._compute)))

    def _bounded(self, window: int) -> int:
        """Return a window that what the calls make fits into."""
        stats = self._stats
        each = stats.size // max(1, stats.calls - len(self._calls)) if stats.blocks else 0
        return max(1, min(window, self._setting.bytes_in_flight // max(each, 1)))

    def _fill(self) -> None:
        window = self._window
        while len(self._calls) < window:
            group = self._groups.next()
            if group is None:
                return
            first, last = group[0].label, group[-1].label
            label = first if len(group) == 1 else f"{first} up to {last}"
            where = Where(label, _index(group, self._index), self._setting.seed)
            self._index += 1
            counts = [len(unit.refs) for unit in group]
            refs = [ref for unit in group for ref in unit.refs]
            self._stats.calls += 1
            self._calls.append(self._call(where, [unit.bare() for unit in group], counts, refs))

    def _call(self, where: Where, units: Any, counts: Any, refs: Any) -> Running:
        return Running(self._task.remote(where, units, counts, *refs), where.label)

    def waiting(self) -> list[Any]:
        """Return the call whose blocks come next, and what the feed below waits for."""
        calls = list(self._calls)
        found = [call.generator for call in (calls[:1] if self._setting.ordered else calls)]
        if len(calls) < self._window:
            found += self._below.waiting()
        return found

    def close(self) -> None:
        """Stop the calls."""
        for call in self._calls:
            call.generator.close()
        self._calls.clear()
        self._below.close()


class PoolFeed(StageFeed):
    """Runs a stage in the actors of a pool."""

    def _start_up(self) -> None:
        """Start the first actors."""
        pool = self._compute.pool
        assert pool is not None
        share = self._setting.share
        most = pool[1] or max(pool[0], self._setting.slots(self._compute))
        self._most = max(1, min(most, self._setting.actors_at_most(self._compute)) // share)
        options = {
            "max_restarts": self._setting.context.max_actor_restarts,
            "max_task_retries": self._setting.context.max_task_retries,
            **_placed(self._setting),
            **self._compute.options,
        }
        self._class: Any = remote(**options)(PoolWorker)
        self._load: dict[Any, int] = {}
        # An actor that does not say num_cpus keeps none: tasks of other stages find theirs.
        for _ in range(min(self._most, max(1, (self._compute.initial or pool[0]) // share))):
            self._grow()

    def _grow(self) -> None:
        self._load[self._class.remote(self._work)] = 0

    @property
    def _window(self) -> int:
        return self._bounded(_POOL_AHEAD * len(self._load))

    def _call(self, where: Where, units: Any, counts: Any, refs: Any) -> Running:
        if min(self._load.values()) >= 2 and len(self._load) < self._most:
            self._grow()
        actor = min(self._load, key=self._load.__getitem__)
        self._load[actor] += 1
        run = actor.run.options(
            num_returns="streaming", _generator_backpressure_num_objects=_UNREAD
        )
        return Running(run.remote(where, units, counts, *refs), where.label, actor)

    def _finish(self, call: Running) -> None:
        super()._finish(call)
        self._load[call.actor] -= 1

    def close(self) -> None:
        """Stop the calls and the actors."""
        super().close()
        for actor in self._load:
            kill(actor)
        self._load.clear()


def _placed(setting: Setting) -> dict[str, Any]:
    """Return where tasks and actors run: outside of the consumer's placement group."""
    selector = setting.options.label_selector
    labels = {"label_selector": selector} if selector else {}
    return {"scheduling_strategy": "DEFAULT", **labels}


# --- from a plan to feeds -----------------------------------------------------------------


def _feed(node: PlanNode, setting: Setting, wish: CutWish) -> Feed:
    """Return the feed of a node; ``wish`` says how the node above would have its input."""
    if isinstance(node, Read):
        return SourceFeed(_units(node, wish))
    if isinstance(node, Union):
        return UnionFeed([functools.partial(_feed, each, setting, wish) for each in node.inputs])
    if isinstance(node, Limit):
        (below,) = node.inputs
        if isinstance(below, Union) and count_of(below) is None:
            below = _read_by_tasks(below)  # blocks tell their rows, of which so many are wanted
        if isinstance(below, Read) and below.source.count() is None:
            head = HeadFeed(_feed(below, setting, wish), node.rows)
            return LimitFeed(_run(Stage((below,), ()), head, setting), node.rows)
        return LimitFeed(_feed(below, setting, wish), node.rows)
    if isinstance(node, Regroup):
        feed = _feed(_read_by_tasks(node.inputs[0]), setting, wish)
        stage = Stage(node.inputs, (Gather(),))
        return _run(stage, feed, setting, node.rows, strict=node.strict)
    assert isinstance(node, Stage)
    parts = 1
    if any(step.user for step in node.steps) and not setting.local:
        pool = node.compute.pool
        slots = setting.slots(node.compute) if pool is None else max(pool)
        parts = setting.context.read_op_min_num_blocks * slots
    own = CutWish(setting.context.target_max_block_size, parts, node.least)
    return _run(node, _feed(node.inputs[0], setting, own), setting, node.least)


def _run(
    stage: Stage, below: Feed, setting: Setting, rows: int = 1, *, strict: bool = False
) -> Feed:
    groups = Groups(below, rows, strict=strict)
    if setting.local:
        context = setting.context
        work = StageWork(stage.steps, context.target_max_block_size, context.retried_io_errors)
        return InlineFeed(groups, work, setting.seed)
    kind = StageFeed if stage.compute.pool is None else PoolFeed
    return kind(groups, below, stage, setting)


def _units(node: Read, wish: CutWish) -> Iterator[ReadUnit]:
    if node.shuffle is None:
        return node.source.units(wish)
    import random

    units = list(node.source.units(wish))
    random.Random(node.shuffle).shuffle(units)  # noqa: S311 -- no secret
    return iter(units)


def _read_by_tasks(node: PlanNode) -> PlanNode:
    """Return a node whose units are blocks: one more stage where they are of a source."""
    if isinstance(node, Read) and not isinstance(node.source, BlocksDatasource | TablesDatasource):
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
    seed: int = 0,
    share: int = 1,
    units: Iterator[ReadUnit] | None = None,
) -> Iterator[ReadUnit]:
    """Yield the blocks of a plan, in order, while its stages run ahead of the reader.

    Args:
        plan: The plan.
        local: Run all in this process. Default: without functions of users, what is small is.
        ordered: Keep the order. Default: as the context says.
        stats: Where to count.
        seed: What random numbers of tasks are drawn from.
        share: Among how many executions pools are divided.
        units: What is read in place of the units of the plan's source.

    Raises:
        DataError: A function of the user or a file has failed.
    """
    context = DataContext.get_current()
    root = optimised(plan)
    if local is None:
        local = not has_user_code(root) and units is None and _is_small(root, context)
    setting = Setting(
        dataclasses.replace(context),
        local=local,
        ordered=context.execution_options.preserve_order if ordered is None else ordered,
        seed=seed,
        share=share,
        resources={} if local else cluster_resources(),
        pooled=_pooled(root),
        stats=stats or ExecutionStats(),
    )
    if context.print_on_execution_start:
        from miniray.data.plan import explained

        print(explained(root))  # noqa: T201 -- asked for
    wish = CutWish(context.target_max_block_size)
    feed = _given(root, setting, units) if units is not None else None
    if feed is None:
        feed = _feed(root if local else _read_by_tasks(root), setting, wish)
    yield from _drained(feed, setting.stats)


def _given(root: PlanNode, setting: Setting, units: Iterator[ReadUnit]) -> Feed:
    """Return the feed of the plan's stages over other units than those of its source."""
    stages: list[Stage] = []
    while isinstance(root, Stage):
        stages.insert(0, root)
        root = root.inputs[0]
    feed: Feed = SourceFeed(units)
    for stage in stages or [Stage((root,), ())]:
        feed = _run(stage, feed, setting, 1)
    return feed


def _drained(feed: Feed, stats: ExecutionStats) -> Iterator[ReadUnit]:
    try:
        while True:
            unit = feed.poll()
            if unit is not None:
                yield unit
                continue
            if feed.done:
                return
            began = time.perf_counter()
            wait(feed.waiting(), num_returns=1)
            stats.waited += time.perf_counter() - began
    finally:
        stats.ended = time.perf_counter()
        feed.close()


def _pooled(node: PlanNode) -> float:
    """Return the CPUs that pools hold at least, at one time."""
    own: float = 0
    if isinstance(node, Stage) and node.compute.pool is not None:
        own = node.compute.pool[0] * node.compute.options.get("num_cpus", 0)
    return own + max(map(_pooled, node.inputs), default=0)  # a union runs one after another


def _is_small(root: PlanNode, context: DataContext) -> bool:
    """Whether all that is read fits into a block, or a few rows of it are wanted."""
    if isinstance(root, Limit | Stage | Regroup):
        return isinstance(root, Limit) or _is_small(root.inputs[0], context)
    if isinstance(root, Union):
        return all(_is_small(each, context) for each in root.inputs)
    assert isinstance(root, Read)
    units = list(root.source.units(CutWish(context.target_max_block_size)))
    return sum(unit.size for unit in units) < context.target_max_block_size and len(units) < 2


def table_of(unit: ReadUnit) -> Any:
    """Return the rows of a unit as a table."""
    from miniray.data.blocks import concat

    values = get(list(unit.refs)) if unit.refs else []
    return concat(list(unit.read(*values)))
