"""Run the steps of a stage in tasks, or in the actors of a pool.

A stage takes units from the feed below while its window of calls has capacity, and a call pauses
at two blocks that nobody has read. So what is in flight is bounded by windows, whatever the data.
"""

from __future__ import annotations

import collections
from typing import TYPE_CHECKING, Any

from miniray.api import get, is_initialized, kill
from miniray.data.feeds import index_of, key_of
from miniray.data.plan import Read, Stage, count_of, walk
from miniray.data.sources import BlockRows, Place, ReadUnit
from miniray.data.stats import StageStats
from miniray.data.transforms import DataError, Where
from miniray.data.work import PoolWorker, task_of
from miniray.decorator import remote
from miniray.exceptions import ActorDiedError, MinirayError, TaskError

if TYPE_CHECKING:
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


class Running:
    """A call of a stage: gives its blocks in order."""

    def __init__(
        self, generator: Any, where: Where, number: int, key: int | None, actor: Any = None
    ) -> None:
        self.generator = generator
        self.label = where.label
        self.actor = actor
        self._key = key
        self._number = number
        self._block: Any = None
        self._rows = 0

    def take(self, stats: StageStats) -> ReadUnit | None:
        """Return the next block, if it is there.

        Raises:
            DataError: The call has failed.
        """
        block = self._block = self._block or self._next()
        ref = self._next() if block is not None else None
        if ref is None:
            if block is not None and self.generator.is_finished():
                self._block = None
                self._get(block)  # an error comes last
            return None
        self._block = None
        record = self._get(ref)
        if record.first != self._rows:
            raise DataError(
                f"{self.label} ran again after its process had died, and gave other rows than "
                f"before. Functions must make the same of the same rows."
            )
        self._rows += record.rows
        stats.add(record)
        place = Place(self._number, record.number)
        key = key_of(self._key, record.number)
        content = BlockRows(f"a block of {self.label}")
        return ReadUnit(content, record.rows, record.size, (block,), key=key, place=place)

    def _next(self) -> Any:
        """Return the next ref, if it is there. Ray may announce one at the end, where none is."""
        return next(self.generator, None) if self.generator.next_ready() else None

    def _get(self, ref: Any) -> Any:
        try:
            return get(ref)
        except DataError as error:
            raise DataError(_told(error)) from None
        except TaskError as error:
            raise DataError(f"Reading {self.label} failed: {_told(error)}") from error
        except MinirayError as error:
            if isinstance(error, ActorDiedError) and error.creation_error is not None:
                raise DataError(_told(error.creation_error)) from None
            raise DataError(f"The task for {self.label} has ended: {error}") from error

    @property
    def ended(self) -> bool:
        """Whether all was taken."""
        return self._block is None and self.generator.is_finished()


def _told(error: MinirayError) -> str:
    """Return the text of an error of a task, without the task's own traceback."""
    cause = getattr(error, "cause", None)
    if cause is None or isinstance(cause, DataError):
        return str(cause or error)
    return f"{type(cause).__name__}: {cause}"


class TaskStage:
    """Runs a stage in tasks."""

    def __init__(self, stage: Stage, work: StageWork, setting: Setting) -> None:
        self._stage = stage
        self._compute = stage.compute
        self._work = work
        self._setting = setting
        self._stats = StageStats(stage.name, _total(stage) if setting.whole else None)
        self._calls: collections.deque[Running] = collections.deque()
        self._inputs: collections.deque[ReadUnit] = collections.deque()  # no call has them yet
        below = stage.inputs[0] if stage.inputs else None
        #: A pool that feeds this stage does not wait until that has CPUs.
        self._behind_pool = isinstance(below, Stage) and below.compute.pool is not None
        self._index = 0
        self._ended = False  # there is no more input

    def feed(self, below: Feed) -> Feed:
        """Run the stage over another feed, and yield its blocks.

        It starts calls while the window has room, and there is input.
        """
        self._start_up()
        try:
            while True:
                yield self._next(below)
        finally:
            for call in self._calls:
                call.generator.close()
            self._end()
            below.close()

    def _next(self, below: Feed) -> ReadUnit | list[Any] | None:
        while True:
            waiting = self._start(below)
            calls = list(self._calls)[: 1 if self._setting.ordered else None]
            ended = False
            for call in calls:
                unit = self._take(call)
                if unit is not None:
                    return unit
                if call.ended:
                    ended = True
                    self._finish(call)
            if not ended:
                break
        if not self._calls and not self._inputs and self._ended:
            below.close()
            return None
        return [call.generator for call in calls] + waiting

    def _start(self, below: Feed) -> list[Any]:
        """Start calls; return what the feed below waits for if there was not enough input."""
        window = self._window
        most = 2 * window if self._behind_pool else window
        while True:
            if self._inputs and len(self._calls) < window:
                self._begin(self._inputs.popleft())
            elif self._ended or len(self._calls) + len(self._inputs) >= most:
                return []
            elif isinstance(item := next(below), list):
                return item
            elif item is None:
                self._ended = True
            else:
                self._inputs.append(item)

    def _begin(self, unit: ReadUnit) -> None:
        where = Where(unit.label, index_of(unit, self._index))
        self._index += 1
        if not self._stats.calls:
            self._setting.stats.stages.append(self._stats)
        self._stats.calls += 1
        self._stats.open += 1
        self._calls.append(self._call(where, unit))

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
        self._stats.open -= 1

    @property
    def _window(self) -> int:
        """The calls that may have begun and are not read to their end."""
        slots = self._setting.slots(self._compute, self._stats.heap)
        window = _AHEAD * slots if self._setting.ordered else slots + 1
        return self._bounded(int(min(window, self._setting.allowed(self._compute))))

    def _bounded(self, window: int) -> int:
        """Return a window that what the calls make, as far as they run ahead, fits into."""
        stats = self._stats
        if not stats.blocks:
            return max(1, window)
        ended = max(1, stats.calls - len(self._calls))
        ahead = (_UNREAD // 2 + 1) * stats.size // stats.blocks  # two blocks, and one being made
        each = max(1, min(stats.size // ended, ahead))
        return max(1, min(window, self._setting.bytes_in_flight // each))

    def _start_up(self) -> None:
        """Make what runs the calls."""
        name = self._stage.name[:100]
        self._task: Any = self._remote(
            task_of(self._work, name),
            name=name,
            max_retries=self._setting.context.max_task_retries,
            _generator_backpressure_num_objects=_UNREAD,
        )

    def _remote(self, target: Any, **options: Any) -> Any:
        """Return a remote function or class, which runs outside of the consumer's group."""
        selector = self._setting.options.label_selector
        options |= {"label_selector": selector} if selector else {}
        placed = {"_preload": MODULES, "scheduling_strategy": "DEFAULT"}
        return remote(**{**placed, **options, **self._compute.options})(target)

    def _call(self, where: Where, unit: ReadUnit) -> Running:
        run = self._task.remote(where, unit.bare(), *unit.refs)
        return Running(run, where, self._index, unit.key)

    def _end(self) -> None:
        """End what runs the calls."""


class PoolStage(TaskStage):
    """Runs a stage in the actors of a pool, which live until what they have made was read."""

    def _start_up(self) -> None:
        """Start the first actors."""
        pool = self._compute.pool
        assert pool is not None
        share = self._setting.share
        most = pool.most or max(pool.least, self._setting.slots(self._compute))
        self._most = max(1, min(most, self._setting.actors_at_most(self._compute)) // share)
        context = self._setting.context
        self._class: Any = self._remote(
            PoolWorker,
            max_restarts=context.max_actor_restarts,
            max_task_retries=context.max_task_retries,
        )
        self._load: dict[Any, int] = {}
        # An actor that does not say num_cpus keeps none: tasks of other stages find theirs.
        for _ in range(min(self._most, self._compute.actors(share))):
            self._grow()

    def _grow(self) -> None:
        self._load[self._class.remote(self._work)] = 0

    @property
    def _window(self) -> int:
        return self._bounded(_POOL_AHEAD * len(self._load))

    def _call(self, where: Where, unit: ReadUnit) -> Running:
        if min(self._load.values()) >= 2 and len(self._load) < self._most:
            self._grow()
        actor = min(self._load, key=self._load.__getitem__)
        self._load[actor] += 1
        run = actor.run.options(
            num_returns="streaming", _generator_backpressure_num_objects=_UNREAD
        )
        generator = run.remote(where, unit.bare(), *unit.refs)
        return Running(generator, where, self._index, unit.key, actor)

    def _finish(self, call: Running) -> None:
        super()._finish(call)
        self._load[call.actor] -= 1

    def _end(self) -> None:
        if is_initialized():  # else they have ended with their cluster
            for actor in self._load:
                kill(actor)


def _total(stage: Stage) -> int | None:
    """Return the rows that will come out, if that costs nothing to know."""
    files = any(isinstance(each, Read) and each.source.files() for each in walk(stage))
    return None if files or not stage.inputs else count_of(stage)
