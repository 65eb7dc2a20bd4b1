"""Where rows come from: sources, which are cut into units, each read by one task."""

from __future__ import annotations

import abc
import dataclasses
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np
import pyarrow as pa

from miniray.data.blocks import batch_to_table, column, rows_to_table
from miniray.data.tables import concat

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence

    from miniray.common.object_ref import ObjectRef
    from miniray.data.transforms import Transform

T = TypeVar("T")
#: Rows of a table that numbers or items are made into, at most, and bytes of items.
_TOGETHER, _BYTES = 65_536, 4 * 2**20
#: The end of rows whose number is not known.
ENDLESS = 2**62


class Content(abc.ABC):
    """A file, a block or other content that units are parts of. Its rows are read by number."""

    @property
    @abc.abstractmethod
    def label(self) -> str:
        """Its name in messages."""

    @abc.abstractmethod
    def tables(self, start: int, stop: int, *values: Any) -> Iterator[Any]:
        """Yield the rows from ``start`` up to, without, ``stop``, which may be behind the last.

        The values are those of the refs of a unit.
        """

    def take(self, start: int, stop: int, numbers: Iterable[Any], *values: Any) -> Iterator[Any]:
        """Yield rows of a range by their numbers within it: a table for each array of these."""
        table = concat(list(self.tables(start, stop, *values))).combine_chunks()
        for each in numbers:
            yield table.take(column(each))


@dataclasses.dataclass(frozen=True)
class ReadUnit:
    """The input of one task. Reading it again gives the same rows in the same order.

    Attributes:
        content: Of what.
        rows: How many rows; None if only reading shows it.
        size: About how many bytes they take.
        refs: Refs whose values reading needs, in this order, or tables of this process.
        start: The number of the first row.
        most: How many rows are wanted at most, if ``rows`` is None.
        whole: Whether it has all rows of its content.
        key: What random numbers of functions are drawn from; None: its place among the calls.
        place: Of a block: the call of its stage that made it, and how many others before.
    """

    content: Content
    rows: int | None = None
    size: int = 0
    refs: tuple[ObjectRef[Any] | pa.Table, ...] = ()
    start: int = 0
    most: int = ENDLESS
    whole: bool = True
    key: int | None = None
    place: tuple[int, int] = (0, 0)

    @property
    def label(self) -> str:
        """Its name in messages: a file and rows."""
        if self.whole or self.rows is None:
            return self.content.label
        return f"rows {self.start} to {self.start + self.rows - 1} of {self.content.label}"

    def read(self, *values: Any) -> Iterator[Any]:
        """Yield the rows as tables, given the values of ``refs``."""
        return self.content.tables(self.start, self.start + self._most, *values)

    def take(self, numbers: Iterable[Any], *values: Any) -> Iterator[Any]:
        """Yield rows by their numbers within the unit: a table for each array of these."""
        return self.content.take(self.start, self.start + self._most, numbers, *values)

    @property
    def _most(self) -> int:
        return self.most if self.rows is None else self.rows

    def part(self, start: int, stop: int) -> ReadUnit:
        """Return a unit of some of its rows, or itself; ``stop`` may be behind the last one."""
        if start == 0 and stop >= self._most:
            return self
        first, rows = self.start + start, max(0, min(stop, self._most) - start)
        part = dataclasses.replace(self, start=first, whole=False, key=None)
        if self.rows is None:
            return dataclasses.replace(part, most=rows)
        part = dataclasses.replace(part, rows=rows, size=self.size * rows // max(self.rows, 1))
        if self.table is None:
            return part
        return BlockRows.unit(self.table.slice(start, rows), part.label)  # it goes with a task

    @property
    def table(self) -> Any:
        """The table of this process that it has rows of; None if it is of anything else."""
        found = self.refs[0] if self.refs and isinstance(self.content, BlockRows) else None
        return found if isinstance(found, pa.Table) else None

    def values(self) -> list[Any]:
        """Return the values of ``refs``."""
        from miniray.api import get

        refs = [each for each in self.refs if not isinstance(each, pa.Table)]
        got = iter(get(refs) if refs else ())  # all at once: values of other nodes are on their way
        return [each if isinstance(each, pa.Table) else next(got) for each in self.refs]

    def bare(self) -> ReadUnit:
        """Return the unit without its refs, which are arguments of the task beside it."""
        return dataclasses.replace(self, refs=())


def overlapping(
    items: Iterable[T], rows_of: Callable[[T], int], start: int, stop: int
) -> Iterator[tuple[T, int, int]]:
    """Yield what has rows of a range, each with where in it these begin and end.

    What comes before the first row is yielded too, if it has none: it may have columns. What
    follows the range is not looked at.
    """
    at = 0
    for item in items:
        rows = rows_of(item)
        low, high = max(start - at, 0), min(stop - at, rows)
        at += rows
        if low < high or at == start == 0:
            yield item, low, high
        if at >= stop:
            return


def between(tables: Iterable[Any], start: int, stop: int) -> Iterator[Any]:
    """Yield a range of rows of tables; later rows are not read."""
    for table, low, high in overlapping(tables, len, start, stop):
        yield table.slice(low, high - low)


@dataclasses.dataclass(frozen=True)
class CutWish:
    """How a source should be cut.

    Attributes:
        target: Bytes of a unit.
        parts: At least this many units, while each has ``least`` rows.
        least: Rows that are wanted together.
        most: Rows that are wanted in all, at most.
    """

    target: int
    parts: int = 1
    least: int = 1
    most: int = ENDLESS

    def rows_each(self, rows: int, size: int) -> int:
        """Return how many rows each unit of a source has."""
        by_bytes = -(-rows * self.target // max(size, 1)) if size > self.target else rows
        by_parts = rows // self.parts
        wanted = max(1, min(by_bytes, by_parts))
        return -(-wanted // self.least) * self.least


class Datasource(abc.ABC):
    """Data that can be cut into units."""

    #: Its name in a plan, such as "ReadParquet".
    name: str = "Read"
    #: Whether all rows are in memory, so that no task has to read them.
    made: bool = False
    #: Whether units tell how many rows they have.
    counted: bool = False
    #: The files that are read, and their sizes.
    found: Sequence[tuple[str, int]]

    @abc.abstractmethod
    def units(self, wish: CutWish) -> Iterator[ReadUnit]:
        """Yield units; the first before all are found, unless the rest must be known."""

    def schema(self) -> Any:
        """Return the schema if it is known without reading rows, else None."""
        return None

    def count(self) -> int | None:
        """Return the number of rows if units are counted, else None."""
        return None

    def pushed(self, step: Transform) -> Datasource | None:
        """Return a source that does what a step would do; None if it can't."""
        return None


# --- contents ---------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Numbers(Content):
    """The numbers from 0 up to, without, another one; each fills a tensor if there is a shape."""

    count: int
    shape: tuple[int, ...] | None = None

    @property
    def label(self) -> str:
        return f"range(0, {self.count})"

    def tables(self, start: int, stop: int, *values: Any) -> Iterator[Any]:
        name, shape = ("id", ()) if self.shape is None else ("data", self.shape)
        ones: Any = np.ones(shape, dtype=np.int64)
        step = max(1, _TOGETHER // max(1, ones.size))
        for low in range(start, stop, step) or (start,):  # of no rows too there are columns
            numbers: Any = np.arange(low, min(low + step, stop))
            yield batch_to_table({name: np.multiply.outer(numbers, ones)})


def items_to_table(items: Iterable[Any]) -> Any:
    """Return items as a table, a row for each."""
    return rows_to_table(list(map(item_row, items)))


def tables_of_items(items: Any, numbers: Sequence[int]) -> Iterator[Any]:
    """Yield tables of items with these numbers: few if they are small, large ones some at once."""
    start, step = 0, 16
    while some := numbers[start : start + step]:
        table = items_to_table(items[number] for number in some)
        start += len(some)
        step = min(_TOGETHER, max(1, _BYTES * len(some) // max(table.nbytes, 1)))
        yield table


def item_row(item: Any) -> dict[str, Any]:
    """Return an item as a row; one that is not a dictionary is in the column "item"."""
    return item if isinstance(item, dict) else {"item": item}


@dataclasses.dataclass(frozen=True)
class BlockRows(Content):
    """Rows of a table, in the object store or in this process."""

    label: str = "a table"

    @classmethod
    def unit(cls, table: Any, label: str = "a table", key: int | None = None) -> ReadUnit:
        """Return all rows of a table of this process, which travels with a task."""
        return ReadUnit(cls(label), table.num_rows, table.nbytes, (table,), key=key)

    def tables(self, start: int, stop: int, *values: Any) -> Iterator[Any]:
        yield batch_to_table(values[0]).slice(start, stop - start)


@dataclasses.dataclass(frozen=True)
class UnitsDatasource(Datasource):
    """Units that are there already: numbers, tables, blocks, or parts of another source."""

    parts: Sequence[ReadUnit]
    known: Any = None
    found: Sequence[tuple[str, int]] = ()
    name: str = "Blocks"

    def units(self, wish: CutWish) -> Iterator[ReadUnit]:
        """Yield the units, cut where more or smaller ones are wanted; blocks for functions only."""
        rows = self.count()
        step = wish.rows_each(rows, sum(unit.size for unit in self.parts)) if rows else ENDLESS
        blocks = self.made and wish.parts <= 1
        for unit in [unit for unit in self.parts if unit.rows != 0] or self.parts[:1]:
            each = ENDLESS if blocks and unit.table is None else step
            yield from (unit.part(low, low + each) for low in range(0, unit.rows or 1, each))

    @property
    def made(self) -> bool:  # type: ignore[override]
        return all(isinstance(unit.content, BlockRows) for unit in self.parts)

    def schema(self) -> Any:
        return self.known

    @property
    def counted(self) -> bool:  # type: ignore[override]
        return all(unit.rows is not None for unit in self.parts)

    def count(self) -> int | None:
        return sum(unit.rows or 0 for unit in self.parts) if self.counted else None


def ranged(units: Sequence[ReadUnit], start: int, stop: int) -> list[ReadUnit]:
    """Return the units, or parts of them, of a range of rows; all tell how many they have."""
    found = overlapping(units, lambda unit: unit.rows or 0, start, stop)
    return [unit.part(low, high) for unit, low, high in found]
