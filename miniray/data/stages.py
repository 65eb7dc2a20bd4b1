"""Feeds that run the steps of a stage: in this process, in tasks, or in the actors of a pool.

A stage takes units from the feed below while its window of calls has capacity, and a call pauses
at two blocks that nobody has read. So what is in flight is bounded by windows, whatever the data.
"""

from __future__ import annotations

import collections
from typing import TYPE_CHECKING, Any

from miniray.api import get, kill
from miniray.data.feeds import OverFeed, index_of, key_of
from miniray.data.plan import Read, count_of, walk
from miniray.data.sources import BlockRows, Place, ReadUnit, TableRows
from miniray.data.stats import StageStats
from miniray.data.transforms import DataError, Where
from miniray.data.work import PoolWorker, task_of
from miniray.decorator import remote
from miniray.exceptions import MinirayError, TaskError

if TYPE_CHECKING:
    from collections.abc import Iterator

    from miniray.data.feeds import Setting, UnitFeed
    from miniray.data.plan import Stage
    from miniray.data.work import StageWork

#: What every process that reads data needs; loading it takes as long as some reads. Arrow imports
#: pandas, if it is installed, at the first value that it is given by Python: its dataset does so.
#: Units of local files come with their filesystem.
MODULES = (
    "miniray.data.parquet",
    "miniray.data.work",
    "pyarrow.dataset",
    "fsspec.implementations.local",
)
#: Objects of a call that may be unread before it pauses: two blocks and their records.
_UNREAD = 4
#: Calls in the window of a stage for each that can run at once.
_AHEAD = 2
#: Calls in the window of a pool for each actor; two of them are at the actor.
_POOL_AHEAD = 4


class InlineFeed(OverFeed):
    """Runs the steps of a stage in this process."""

    def __init__(self, below: UnitFeed, work: StageWork) -> None:
        super().__init__(below)
        self._work = work.prepared()
        self._tables: Iterator[tuple[int, Any]] | None = None
        self._key: int | None = None
        self._index = 0

    def poll(self) -> ReadUnit | None:
        while True:
            if self._tables is None:
                unit = self._below.poll()
                if unit is None:
                    self.done = self._below.done
                    return None
                where = Where(unit.label, index_of(unit, self._index))
                values = get(list(unit.refs)) if unit.refs else []
                self._tables = enumerate(self._work.tables(where, unit, values))
                self._key = unit.key
                self._index += 1
            found = next(self._tables, None)
            if found is not None:
                number, table = found
                return TableRows.unit(table, key=key_of(self._key, number))
            self._tables = None


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
        place = Place(self._number, record.number)
        key = key_of(self._key, record.number)
        content = BlockRows(self.label)
        return ReadUnit(content, record.rows, record.size, (block,), key=key, place=place)

    def _get(self, ref: Any) -> Any:
        try:
            return get(ref)
        except DataError as error:
            raise DataError(_told(error)) from None
        except TaskError as error:
            raise DataError(f"Reading {self.label} failed: {_told(error)}") from error
        except MinirayError as error:
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


class StageFeed(OverFeed):
    """Runs a stage in tasks."""

    def __init__(self, below: UnitFeed, stage: Stage, work: StageWork, setting: Setting) -> None:
        super().__init__(below)
        self._compute = stage.compute
        self._setting = setting
        self._stats = StageStats(stage.name, _total(stage) if setting.whole else None)
        self._work = work
        self._calls: collections.deque[Running] = collections.deque()
        self._index = 0
        self._start_up()

    def _start_up(self) -> None:
        """Make what runs the calls."""
        options = {
            "name": self._stats.name[:100],
            "max_retries": self._setting.context.max_task_retries,
            "_preload": MODULES,
            "_generator_backpressure_num_objects": _UNREAD,
            **_placed(self._setting),
            **self._compute.options,
        }
        self._task: Any = remote(**options)(task_of(self._work))

    def poll(self) -> ReadUnit | None:
        """Start what may start, and return the next block if it is there."""
        while True:
            self.start()
            ended = 0
            for call in list(self._calls) if not self._setting.ordered else list(self._calls)[:1]:
                unit = self._take(call)
                if unit is not None:
                    return unit
                if call.ended:
                    self._finish(call)
                    ended += 1
            if not ended:
                self.done = not self._calls and self._below.done
                if self.done:  # a pool lives until its blocks are read: it may make them again
                    self._below.close()
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
        self._stats.open -= 1

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

    def start(self) -> None:
        """Start calls while the window has room, and there is input."""
        window = self._window
        while len(self._calls) < window:
            unit = self._below.poll()
            if unit is None:
                return
            where = Where(unit.label, index_of(unit, self._index))
            self._index += 1
            if not self._stats.calls:
                self._setting.stats.stages.append(self._stats)
            self._stats.calls += 1
            self._stats.open += 1
            self._calls.append(self._call(where, unit))

    def _call(self, where: Where, unit: ReadUnit) -> Running:
        run = self._task.remote(where, unit.bare(), *unit.refs)
        return Running(run, where, self._index, unit.key)

    def waiting(self) -> list[Any]:
        """Return the call whose blocks come next, and what the feed below waits for."""
        calls = list(self._calls)
        found = [call.generator for call in (calls[:1] if self._setting.ordered else calls)]
        if len(calls) < self._window:
            found += self._below.waiting()
        return found

    def close(self) -> None:
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
        most = pool.most or max(pool.least, self._setting.slots(self._compute))
        self._most = max(1, min(most, self._setting.actors_at_most(self._compute)) // share)
        options = {
            "max_restarts": self._setting.context.max_actor_restarts,
            "_preload": MODULES,
            "max_task_retries": self._setting.context.max_task_retries,
            **_placed(self._setting),
            **self._compute.options,
        }
        self._class: Any = remote(**options)(PoolWorker)
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

    def close(self) -> None:
        super().close()
        for actor in self._load:
            kill(actor)
        self._load.clear()


def _total(stage: Stage) -> int | None:
    """Return the rows that will come out, if that costs nothing to know."""
    files = any(isinstance(each, Read) and each.source.files() for each in walk(stage))
    return None if files or not stage.inputs else count_of(stage)


def _placed(setting: Setting) -> dict[str, Any]:
    """Return where tasks and actors run: outside of the consumer's placement group."""
    selector = setting.options.label_selector
    labels = {"label_selector": selector} if selector else {}
    return {"scheduling_strategy": "DEFAULT", **labels}
