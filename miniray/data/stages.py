"""Run the steps of a stage in tasks, or in the actors of a pool.

A stage takes units from the feed below while its window of calls has capacity, and a call pauses at
two unread blocks. So data in flight are bounded by windows, for any data.
"""

from __future__ import annotations

import collections
import contextlib
import itertools
from typing import TYPE_CHECKING, Any, NamedTuple

from miniray.api import cancel, get, is_initialized, kill
from miniray.data.feeds import key_of, where_of
from miniray.data.plan import Read, Stage, count_of, walk
from miniray.data.sources import BlockRows, ReadUnit
from miniray.data.stats import StageStats
from miniray.data.transforms import DataError
from miniray.data.work import PoolWorker, task_of
from miniray.decorator import remote
from miniray.exceptions import MinirayError, TaskError

if TYPE_CHECKING:
    from collections.abc import Mapping

    from miniray.data.context import Compute, DataContext
    from miniray.data.feeds import Feed, Setting
    from miniray.data.work import StageWork

#: What every process that reads data needs; loading it takes as long as some reads. Units of local
#: files come with their filesystem. Not pandas, which Arrow imports at the first list that it is
#: given by Python: numbers do without.
MODULES = (
    "miniray.data.parquet",
    "miniray.data.work",
    "numpy.random",
    "fsspec.implementations.local",
)
#: Objects of a call that may be unread before it pauses: two blocks and their records.
_UNREAD = 4
#: Calls in the window of a stage for each that can run at once, where blocks have an order: those
#: behind the first one pause.
_AHEAD = 2
#: Calls in the window of a pool for each actor; two of them are at the actor.
_POOL_AHEAD = 4


class StageCall(NamedTuple):
    """A call of a stage that is not read to its end."""

    #: What gives refs of its blocks and records in turns.
    generator: Any
    blocks: Feed
    #: The task or the method of an actor that runs it.
    runner: Any


def blocks_of(generator: Any, unit: ReadUnit, number: int, stats: StageStats) -> Feed:
    """Yield the blocks of a call in order.

    Args:
        generator: Gives refs of blocks and records in turns.
        unit: What they are made of, without its refs.
        number: Which call of its stage this is.
        stats: Where blocks are counted.

    Raises:
        DataError: The call has failed.
    """
    label, rows = unit.label, 0
    content = BlockRows(f"a block of {label}")
    for made in itertools.count():
        refs: list[Any] = []  # of a block, and of its record
        while len(refs) < 2:
            # Ray may announce a ref at the end, where none is.
            ref = next(generator, None) if generator.next_ready() else None
            if ref is not None:
                refs.append(ref)
            elif not generator.is_finished():
                yield [generator]
            elif refs:
                _value(refs.pop(), label, stats.name)  # an error comes last
            else:
                yield from itertools.repeat(None)
        record = _value(refs.pop(), label, stats.name)
        if record.first != rows:
            raise DataError(
                f"{stats.name} ran again on {label} after its process had died, and gave other "
                f"rows than before. Functions must make the same of the same rows."
            )
        rows += record.rows
        stats.add(record)
        key, place = key_of(unit.key, made), (number, made)
        yield ReadUnit(content, record.rows, record.size, (refs.pop(),), key=key, place=place)


def _value(ref: Any, label: str, name: str) -> Any:
    """Return the value of a ref; errors tell the unit and the stage, without its traceback."""
    try:
        return get(ref)
    except MinirayError as error:
        failed = getattr(error, "creation_error", None) or error
        cause = (failed.cause if isinstance(failed, TaskError) else None) or failed
        if isinstance(cause, DataError):
            raise DataError(str(cause)) from None
        said = f"{type(cause).__name__}: {cause}"
        raise DataError(f"{name} failed on {label}: {said}") from error


class StageCalls:
    """Runs a stage in tasks, or in the actors of a pool, which live until their blocks were read.

    What runs calls is one task, or a method of each actor: the next call goes to the one that has
    the fewest. Calls of actors that others use too run to their end: one that pauses until its
    blocks are read would keep others waiting, and its reader may wait for theirs.
    """

    def __init__(self, stage: Stage, work: StageWork, setting: Setting) -> None:
        self._stage = stage
        self._compute = stage.compute
        self._work = work
        self._setting = setting
        self._stats = StageStats(stage.name, _total(stage))
        self._calls: list[StageCall] = []
        self._inputs: collections.deque[ReadUnit] = collections.deque()  # no call has them yet
        #: A pool that feeds this stage does not wait until that has CPUs.
        self._behind_pool = any(each.compute.is_pool for each in stage.inputs)
        self._actors: list[Any] = []  # that end with the feed
        self._load: dict[Any, int] = {each.run: 0 for each in stage.compute.given}  # their calls
        #: Runners at first, and at most.
        self._first, self._most = setting.actors(stage.compute) if stage.compute.is_pool else (1, 1)
        self._share = setting.share if stage.compute.given else 1  # executions that use them

    def feed(self, below: Feed) -> Feed:
        """Run the stage over another feed, and yield its blocks.

        It starts calls while the window has capacity, and there is input.
        """
        with contextlib.closing(below):
            try:
                for _ in range(self._first):
                    self._add_runner()
                while True:
                    yield self._next(below)
            finally:
                for call in self._calls:
                    call.generator.close()
                if is_initialized():  # else they have ended with their cluster
                    for call in self._calls:
                        cancel(call.generator)  # else it runs to its next block
                    for actor in self._actors:
                        kill(actor)

    def _next(self, below: Feed) -> ReadUnit | list[Any] | None:
        while True:
            waiting = self._start(below)
            calls = self._calls[: 1 if self._setting.ordered else None]
            for call in calls:
                unit = self._take(call)
                if isinstance(unit, ReadUnit):
                    self._stats.waits_for = "its reader"
                    return unit
                if unit is None:
                    self._calls.remove(call)
                    self._load[call.runner] -= 1
                    self._stats.open -= 1
                    break
            else:
                break
        if not calls and waiting is None:
            below.close()
            self._stats.waits_for = ""
            return None
        self._stats.waits_for = "its tasks" if calls else "its input"
        return [call.generator for call in calls] + (waiting or [])

    def _start(self, below: Feed) -> list[Any] | None:
        """Start calls; return what the feed below waits for, None if it has no more input."""
        window = self._window()
        most = 2 * window if self._behind_pool else window
        while True:
            while self._inputs and len(self._calls) < window:
                self._begin(self._inputs.popleft())
            if len(self._calls) + len(self._inputs) >= most:
                return []
            item = next(below, None)
            if not isinstance(item, ReadUnit):
                return item
            self._inputs.append(item)

    def _begin(self, unit: ReadUnit) -> None:
        stats = self._stats
        if not stats.calls:
            self._setting.stats.stages.append(stats)
        where = where_of(unit, stats.calls)
        stats.calls += 1
        stats.open += 1
        if min(self._load.values()) >= 2 and len(self._load) < self._most:
            self._add_runner()
        runner = min(self._load, key=self._load.__getitem__)
        self._load[runner] += 1
        bare = unit.bare()
        generator = runner.remote(where, bare, *unit.refs)
        blocks = blocks_of(generator, bare, stats.calls, stats)
        self._calls.append(StageCall(generator, blocks, runner))

    def _take(self, call: StageCall) -> ReadUnit | list[Any] | None:
        """Return the next unit of a call; one that fails, within the limit, has ended."""
        try:
            return next(call.blocks)
        except DataError:
            self._stats.errors += 1
            allowed = self._setting.context.max_errored_blocks
            if 0 <= allowed < self._stats.errors:
                raise
            call.generator.close()
            return None

    def _window(self) -> int:
        """Return how many calls may have begun and not be read to their end."""
        setting, stats = self._setting, self._stats
        if self._compute.is_pool:
            window: float = max(2, _POOL_AHEAD * len(self._load) // self._share)
        else:
            slots, most = setting.slots(self._compute, stats.heap)
            window = min(most, _AHEAD * slots if setting.ordered else slots + 1)
        if stats.blocks:  # what calls make, as far as they run ahead, fits into the store
            ahead = (_UNREAD // 2 + 1) * stats.size // stats.blocks  # two blocks, one being made
            each = stats.per_call if self._compute.given else min(stats.per_call, ahead)
            window = min(window, setting.bytes_in_flight // (max(1, each) * self._share))
        return max(1, int(window))

    def _add_runner(self) -> None:
        """Add an actor, or the task that runs all calls."""
        context, pauses = self._setting.context, {"_generator_backpressure_num_objects": _UNREAD}
        if self._compute.is_pool:
            actor = pool_worker(self._compute, context).remote(self._work)
            self._actors.append(actor)
            runner = actor.run.options(**pauses)
        else:
            name = self._stage.name[:100]
            options = {"name": name, "max_retries": context.max_task_retries, **pauses}
            runner = _remote(task_of(self._work, name), self._compute, context, options)
        self._load[runner] = 0


def pool_worker(compute: Compute, context: DataContext) -> Any:
    """Return the remote class of the actors of a pool."""
    restarts, retries = context.max_actor_restarts, context.max_task_retries
    options = {"max_restarts": restarts, "max_task_retries": retries}
    return _remote(PoolWorker, compute, context, options)


def _remote(target: Any, compute: Compute, context: DataContext, options: Mapping[str, Any]) -> Any:
    """Return a remote function or class, which runs outside of the consumer's group."""
    selector = context.execution_options.label_selector
    placed = {"scheduling_strategy": "DEFAULT", "label_selector": selector or {}}
    return remote(**{"_preload": MODULES, **placed, **options, **compute.options})(target)


def _total(stage: Stage) -> int | None:
    """Return the number of rows that will come out, if it is there without reading.

    Units that are given in place of the source are not counted: it has none then.
    """
    files = any(isinstance(each, Read) and each.source.found for each in walk(stage))
    return None if files else count_of(stage) or None
