"""Feeds: generators of units, those of a source or blocks that tasks have made, that never wait.

A feed yields a unit; or a list of generators, one of which has to go on before there is another
unit; or None, again and again, when there are no more. Its reader closes it then: a pool may have
to make its blocks again until these are read. It is read from the consumer's side; see
``executor``. ``Setting`` is the surroundings of an execution, and the limits that follow.
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import math
from collections.abc import Generator
from typing import TYPE_CHECKING, Any

from miniray.data.exchange import together
from miniray.data.sources import BlockRows, ReadUnit
from miniray.data.stats import ExecutionStats
from miniray.data.transforms import Where
from miniray.data.work import seed

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from miniray.data.context import Compute, DataContext
    from miniray.data.work import StageWork

Feed = Generator[ReadUnit | list[Any] | None, None, None]


@dataclasses.dataclass
class Setting:
    """The surroundings of an execution.

    Attributes:
        context: The settings.
        local: Run everything in this process.
        ordered: Keep the order of rows.
        share: Of how many executions of the same plan this one is: pools are divided among them.
        resources: The cluster's totals; empty if local.
        stats: Where stages count.
    """

    context: DataContext
    local: bool = False
    ordered: bool = True
    share: int = 1
    resources: Mapping[str, float] = dataclasses.field(default_factory=dict)
    stats: ExecutionStats = dataclasses.field(default_factory=ExecutionStats)

    def slots(self, compute: Compute, heap: int = 0) -> tuple[int, float]:
        """Return how many calls can run at once, and how many may in any cluster.

        Each has a heap of ``heap`` bytes; those that do not say num_cpus count as one CPU.
        """
        demand = {**compute.demand, "CPU": compute.options.get("num_cpus") or 1}
        limits = self.context.execution_options.resource_limits
        allowed: dict[str, Any] = {"CPU": limits.cpu, "GPU": limits.gpu}
        may = [
            allowed[name] / each for name, each in demand.items() if allowed.get(name) is not None
        ]
        most = max(1, min([*may, compute.most or math.inf]))
        can = [self.resources.get(name, 0) / amount for name, amount in demand.items()]
        if heap and self.resources.get("memory"):
            can.append(self.resources["memory"] / heap)
        return max(1, int(min([*can, most]))), most

    def actors(self, compute: Compute) -> tuple[int, int]:
        """Return how many actors a pool begins with, and may have: tasks need a CPU beside them.

        The first actors of all pools of the plan come before further ones.
        """
        first = compute.actors(self.share)
        most = compute.most or max(compute.least, self.slots(compute)[0])
        if each := compute.options.get("num_cpus"):
            spare = self.resources.get("CPU", 0) - 1 - self.stats.held.get("CPU", 0)
            most = min(most, first + int(spare / each))
        most = max(1, most // self.share)
        return min(most, first), most

    @property
    def bytes_in_flight(self) -> int:
        """The most bytes of blocks that a stage may have made and not handed on."""
        limit = self.context.execution_options.resource_limits.object_store_memory
        store = self.resources.get("object_store_memory", 0) / 4
        return int(limit if limit is not None else store) or 2**62


def source_feed(units: Iterable[ReadUnit]) -> Feed:
    """Yield the units of a source."""
    yield from units
    yield from itertools.repeat(None)


def union_feed(feeds: Iterable[Feed]) -> Feed:
    """Yield what several feeds give, one after another; each is closed before the next is made."""
    for each in feeds:
        with contextlib.closing(each):
            yield from itertools.takewhile(lambda item: item is not None, each)
    yield from itertools.repeat(None)


def limit_feed(below: Feed, rows: int) -> Feed:
    """Yield the first rows of a feed, which is closed when there are enough."""
    with contextlib.closing(below):
        while rows > 0:
            item = next(below)
            if isinstance(item, ReadUnit):
                item = item.part(0, rows)
                rows -= item.rows or 0
            yield item
    yield from itertools.repeat(None)


def group_feed(below: Feed, wanted: int, *, strict: bool = False, by_size: bool = False) -> Feed:
    """Put units together, so that each has as many rows as are wanted.

    Args:
        below: Gives the units.
        wanted: How many rows.
        strict: Whether no unit but the last has more or less.
        by_size: Whether bytes are wanted in place of rows.
    """
    held: list[ReadUnit] = []
    have = 0
    with contextlib.closing(below):
        while True:
            while have < wanted:
                item = next(below)
                if isinstance(item, ReadUnit):
                    held.append(item)
                    found = item.size if by_size else item.rows
                    have += wanted if found is None else found  # of unknown size: it goes alone
                elif item is not None or not held:
                    yield item
                else:  # the rest
                    break
            over, last = have - wanted, held[-1].rows
            rest: list[ReadUnit] = []
            if strict and over > 0 and last is not None:
                rest = [held[-1].part(last - over, last)]
                held[-1] = held[-1].part(0, last - over)
            whole = [held[0] if len(held) == 1 else together([held], key=held[0].key)]
            held, have, item = rest, over if rest else 0, None
            yield whole.pop()  # blocks that are held here would stay in memory


def inline_feed(below: Feed, work: StageWork) -> Feed:
    """Run the steps of a stage in this process, and yield their blocks."""
    work = work.prepared()
    user = any(step.user for step in work.steps)
    calls = 0
    with contextlib.closing(below):
        for unit in below:
            if not isinstance(unit, ReadUnit):
                yield unit
                continue
            where = where_of(unit, calls)
            calls += 1
            # Without code of the user, the program's random numbers stay as they are.
            if user:
                seed(where)
            tables = work.tables(where, unit, unit.values())
            for made, table in enumerate(tables):
                block = BlockRows.unit(table, key=key_of(unit.key, made))
                yield dataclasses.replace(block, place=(calls, made))


def where_of(unit: ReadUnit, place: int) -> Where:
    """Return the place of a call's rows: ``place`` calls of its stage come before it."""
    return Where(unit.label, place if unit.key is None else unit.key)


def key_of(key: int | None, number: int) -> int | None:
    """Return the key of a block made of a unit with a key; ``number`` blocks of it come before."""
    return None if key is None else (key * 1_000_003 + number) & 0xFFFFFFFF
