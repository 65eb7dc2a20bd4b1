"""Feeds: they give units, those of a source or blocks that tasks have made, and never wait.

They are polled from the consumer's side; see ``executor``. ``Setting`` is what all of an execution
know of their surroundings, and the limits that follow.
"""

from __future__ import annotations

import collections
import dataclasses
from typing import TYPE_CHECKING, Any

from miniray.data.exchange import together
from miniray.data.stats import ExecutionStats
from miniray.data.transforms import DataError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from miniray.data.context import DataContext, ExecutionOptions
    from miniray.data.plan import Compute
    from miniray.data.sources import ReadUnit


@dataclasses.dataclass
class Setting:
    """What an execution knows of its surroundings.

    Attributes:
        context: The settings.
        local: Run everything in this process.
        ordered: Keep the order of rows.
        whole: The rows of the plan's source are read, all of them and once.
        share: Of how many executions of the same plan this one is: pools are divided among them.
        resources: The cluster's totals; empty if local.
        pooled: CPUs that pools of the plan hold at least, at one time.
        stats: Where stages count.
    """

    context: DataContext
    local: bool = False
    ordered: bool = True
    whole: bool = True
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
        demand = {**compute.demand, "CPU": compute.options.get("num_cpus", 1)}
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
        least = compute.actors(self.share)
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


class UnitFeed:
    """Gives units, one after another, without waiting."""

    done = False

    def start(self) -> None:
        """Start what can run before anything is asked for."""

    def poll(self) -> ReadUnit | None:
        """Return the next unit; None if there is none yet, or, if ``done``, none any more."""
        raise NotImplementedError

    def waiting(self) -> list[Any]:
        """Return the generators of which one must go on before ``poll`` can give anything."""
        return []

    def close(self) -> None:
        """Stop what runs."""


class SourceFeed(UnitFeed):
    """The units of a source."""

    def __init__(self, units: Iterator[ReadUnit]) -> None:
        self._units = units

    def poll(self) -> ReadUnit | None:
        unit = next(self._units, None)
        self.done = unit is None
        return unit


class UnionFeed(UnitFeed):
    """What several feeds give, one feed after another."""

    def __init__(self, makers: Sequence[Callable[[], UnitFeed]]) -> None:
        self._makers = collections.deque(makers)
        self._current: UnitFeed | None = None

    def poll(self) -> ReadUnit | None:
        while True:
            if self._current is None:
                if not self._makers:
                    self.done = True
                    return None
                self._current = self._makers.popleft()()
            unit = self._current.poll()
            if unit is not None or not self._current.done:
                return unit
            self._current.close()
            self._current = None

    def waiting(self) -> list[Any]:
        return self._current.waiting() if self._current is not None else []

    def close(self) -> None:
        self._makers.clear()
        if self._current is not None:
            self._current.close()


class OverFeed(UnitFeed):
    """A feed over another one."""

    def __init__(self, below: UnitFeed) -> None:
        self._below = below

    def waiting(self) -> list[Any]:
        return self._below.waiting()

    def close(self) -> None:
        self._below.close()


class LimitFeed(OverFeed):
    """The first rows of a feed, which is closed when there are enough."""

    def __init__(self, below: UnitFeed, rows: int) -> None:
        super().__init__(below)
        self._left = rows

    def poll(self) -> ReadUnit | None:
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


class HeadFeed(LimitFeed):
    """The first rows of each unit, where nobody knows how many these have."""

    def poll(self) -> ReadUnit | None:
        unit = self._below.poll()
        self.done = self._below.done
        return unit if unit is None else unit.part(0, self._left)


class GroupFeed(OverFeed):
    """Puts units together, so that each has as many rows as are wanted.

    Args:
        below: Gives the units.
        rows: How many are wanted.
        strict: Whether no unit but the last has more or less.
    """

    def __init__(self, below: UnitFeed, rows: int, *, strict: bool) -> None:
        super().__init__(below)
        self._rows = rows
        self._strict = strict
        self._held: list[ReadUnit] = []
        self._have = 0

    def poll(self) -> ReadUnit | None:
        while self._have < self._rows:
            unit = self._below.poll()
            if unit is None:
                break
            self._held.append(unit)
            # Units with an unknown number of rows are not put together with others.
            self._have += self._rows if unit.rows is None else unit.rows
        if self._have < self._rows and not self._below.done:
            return None
        group, self._held = self._held, []
        over, self._have = self._have - self._rows, 0
        if not group:
            self.done = True
            return None
        if self._strict and over > 0 and group[-1].rows is not None:
            last = group[-1].rows
            self._held = [group[-1].part(last - over, last)]
            group[-1] = group[-1].part(0, last - over)
            self._have = over
        return group[0] if len(group) == 1 else together([group], key=group[0].key)


def index_of(unit: ReadUnit, place: int) -> int:
    """Return what random numbers of a call are drawn from."""
    return place if unit.key is None else unit.key


def key_of(key: int | None, number: int) -> int | None:
    """Return the key of a block, of so many before, that was made of what has a key."""
    return None if key is None else (key * 1_000_003 + number) & 0xFFFFFFFF
