"""Where rows come from: sources, which are cut into units, each of which one task reads."""

from __future__ import annotations

import abc
import concurrent.futures
import dataclasses
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import pyarrow as pa

from miniray.data.blocks import batch_to_table, column, from_file, rows_to_table

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from miniray.common.object_ref import ObjectRef
    from miniray.data.expressions import Expr

#: Rows of one table that items or numbers are made into, at most.
_TOGETHER = 65_536
#: Files whose metadata are read at once.
_READERS = 16


class Place(NamedTuple):
    """Where a block was made."""

    #: The call of its stage.
    call: int
    #: How many blocks that call had made before.
    number: int


class ReadUnit(abc.ABC):
    """What one task reads. Reading it again gives the same rows in the same order."""

    #: How many rows it has; None if only reading tells.
    rows: int | None = None
    #: About how many bytes they take.
    size: int = 0
    #: What random numbers of functions are drawn from; None: its place among the calls.
    key: int | None = None
    #: Of a block: where it was made.
    place: Place | None = None
    #: Whether its rows are in memory, so that no task has to read them.
    made: bool = False
    #: Refs whose values ``read`` gets, in this order.
    refs: tuple[ObjectRef[Any], ...] = ()

    @property
    @abc.abstractmethod
    def label(self) -> str:
        """What it is, for messages: a file and rows."""

    @abc.abstractmethod
    def read(self, *values: Any) -> Iterator[Any]:
        """Yield the rows as tables.

        Args:
            *values: The values of ``refs``.
        """

    def part(self, start: int, stop: int) -> ReadUnit:
        """Return a unit of some of its rows; ``stop`` may be behind the last one."""
        return UnitPart(self, start, stop)

    def bare(self) -> ReadUnit:
        """Return the unit without its refs, which are arguments of the task beside it."""
        return dataclasses.replace(self, refs=()) if self.refs else self  # type: ignore[type-var]


@dataclasses.dataclass(frozen=True)
class CutWish:
    """How a source should be cut.

    Attributes:
        target: Bytes of a unit.
        parts: At least so many units, while each has ``least`` rows.
        least: Rows that are wanted together.
    """

    target: int
    parts: int = 1
    least: int = 1

    def rows_each(self, rows: int, size: int) -> int:
        """Return how many rows each unit of a source has."""
        by_bytes = -(-rows * self.target // max(size, 1)) if size > self.target else rows
        by_parts = -(-rows // self.parts)
        wanted = max(1, min(by_bytes, by_parts))
        return -(-wanted // self.least) * self.least


class Datasource(abc.ABC):
    """Data that can be cut into units."""

    #: Its name in a plan, such as "ReadParquet".
    name: str = "Read"

    @property
    def made(self) -> bool:
        """Whether all rows are in memory, so that no task has to read them."""
        return False

    @abc.abstractmethod
    def units(self, wish: CutWish) -> Iterator[ReadUnit]:
        """Yield units. Where nothing is known of the rest, the first comes before all are found."""

    def schema(self) -> Any:
        """Return the schema if it is known without reading rows, else None."""
        return None

    def count(self) -> int | None:
        """Return the number of rows if it is known without reading them, else None."""
        return None

    def files(self) -> list[str]:
        """Return the files that are read."""
        return []

    def selected(self, columns: Sequence[str]) -> Datasource | None:
        """Return a source that reads these columns only; None if it can't."""
        return None

    def filtered(self, expr: Expr) -> Datasource | None:
        """Return a source that leaves out rows; None if it can't."""
        return None


@dataclasses.dataclass(frozen=True)
class UnitPart(ReadUnit):
    """Some rows of a unit that can only be read from its beginning."""

    inner: ReadUnit
    start: int
    stop: int
    refs: tuple[ObjectRef[Any], ...] = dataclasses.field(init=False, default=())

    def __post_init__(self) -> None:
        whole = self.inner.rows
        if whole is not None:
            rows = max(0, min(self.stop, whole) - self.start)
            object.__setattr__(self, "rows", rows)
            object.__setattr__(self, "size", self.inner.size * rows // max(whole, 1))
        object.__setattr__(self, "refs", self.inner.refs)

    @property
    def label(self) -> str:
        """The inner unit and the rows."""
        return f"rows {self.start} to {self.stop - 1} of {self.inner.label}"

    def read(self, *values: Any) -> Iterator[Any]:
        """Yield the rows; what follows them is not read."""
        at = 0
        for table in self.inner.read(*values):
            low, high = max(self.start - at, 0), min(self.stop - at, table.num_rows)
            at += table.num_rows
            if low < high or at <= self.start == 0:
                yield table.slice(low, high - low)
            if at >= self.stop:
                return

    def bare(self) -> ReadUnit:
        """Return the part of the inner unit without its refs."""
        return UnitPart(self.inner.bare(), self.start, self.stop)

    def part(self, start: int, stop: int) -> ReadUnit:
        """Return a part of the inner unit."""
        return self.inner.part(self.start + start, min(self.start + stop, self.stop))


@dataclasses.dataclass(frozen=True)
class RangeUnit(ReadUnit):
    """Numbers that follow each other."""

    start: int
    stop: int
    shape: tuple[int, ...] | None

    def __post_init__(self) -> None:
        rows = self.stop - self.start
        object.__setattr__(self, "rows", rows)
        width = int(np.prod(self.shape)) if self.shape else 1
        object.__setattr__(self, "size", rows * 8 * width)

    @property
    def label(self) -> str:
        """The range."""
        return f"range({self.start}, {self.stop})"

    def read(self, *values: Any) -> Iterator[Any]:
        """Yield tables of the numbers."""
        step = max(1, _TOGETHER // max(1, int(np.prod(self.shape or (1,)))))
        for low in range(self.start, self.stop, step):
            numbers: Any = np.arange(low, min(low + step, self.stop), dtype=np.int64)
            if self.shape is None:
                yield pa.table({"id": numbers})
                continue
            ones: Any = np.ones((1, *self.shape), dtype=np.int64)
            tensors = numbers.reshape(-1, *(1 for _ in self.shape)) * ones
            yield pa.table({"data": column(tensors)})

    def part(self, start: int, stop: int) -> ReadUnit:
        """Return a range within this one."""
        return RangeUnit(self.start + start, min(self.start + stop, self.stop), self.shape)


@dataclasses.dataclass(frozen=True)
class ItemsUnit(ReadUnit):
    """Items that travel with the task, or are read from a dataset that does."""

    items: Any
    start: int
    stop: int
    refs: tuple[ObjectRef[Any], ...] = ()

    def __post_init__(self) -> None:
        object.__setattr__(self, "rows", self.stop - self.start)

    @property
    def label(self) -> str:
        """The numbers of the items."""
        return f"items {self.start} to {self.stop - 1}"

    def read(self, *values: Any) -> Iterator[Any]:
        """Yield tables of the items; one that is no dictionary is in the column "item"."""
        source = self.items if self.items is not None else values[0]
        offset = self.start if self.items is None else 0
        count = self.stop - self.start
        for low in range(0, count, _TOGETHER):
            numbers = range(offset + low, offset + min(low + _TOGETHER, count))
            rows = [source[number] for number in numbers]
            yield rows_to_table([r if isinstance(r, dict) else {"item": r} for r in rows])

    def part(self, start: int, stop: int) -> ReadUnit:
        """Return some of the items."""
        stop = min(stop, self.stop - self.start)
        items = self.items[start:stop] if self.items is not None else None
        return ItemsUnit(items, self.start + start, self.start + stop, self.refs)


@dataclasses.dataclass(frozen=True)
class TableUnit(ReadUnit):
    """Rows of a table in this process, which travel with the task."""

    table: Any
    start: int = 0
    key: int | None = None
    made = True

    def __post_init__(self) -> None:
        object.__setattr__(self, "rows", self.table.num_rows)
        object.__setattr__(self, "size", self.table.nbytes)

    @property
    def label(self) -> str:
        """The numbers of the rows."""
        return f"rows {self.start} to {self.start + self.table.num_rows - 1} of a table"

    def read(self, *values: Any) -> Iterator[Any]:
        """Yield the table."""
        yield self.table

    def part(self, start: int, stop: int) -> ReadUnit:
        """Return a slice."""
        return TableUnit(self.table.slice(start, stop - start), self.start + start)


@dataclasses.dataclass(frozen=True)
class FragmentUnit(ReadUnit):
    """A piece of a ``pyarrow.dataset.Dataset``: a row group of Parquet, or a whole file."""

    fragment: Any
    known: Any
    rows: int

    @classmethod
    def all_of(cls, dataset: Any) -> list[FragmentUnit]:
        """Return the pieces of a dataset; metadata of several files are read at once.

        Raises:
            ValueError: It is filtered or projected, so that metadata do not tell its rows.
        """
        schema = dataset.schema

        def pieces(fragment: Any) -> list[FragmentUnit]:
            if not hasattr(fragment, "row_groups"):
                return [cls(fragment, schema, fragment.count_rows())]
            return [
                cls(fragment.subset(row_group_ids=[group.id]), schema, group.num_rows)
                for group in fragment.row_groups
            ]

        with concurrent.futures.ThreadPoolExecutor(_READERS) as pool:
            return [unit for each in pool.map(pieces, dataset.get_fragments()) for unit in each]

    @property
    def label(self) -> str:
        """The file."""
        return str(self.fragment.path)

    def read(self, *values: Any) -> Iterator[Any]:
        """Yield the rows."""
        # One column after another by one thread: training has the others.
        yield from_file(self.fragment.to_table(schema=self.known, use_threads=False))


@dataclasses.dataclass(frozen=True)
class BlockUnit(ReadUnit):
    """A block in the object store, or some of its rows."""

    refs: tuple[ObjectRef[Any], ...]
    rows: int | None
    size: int
    start: int = 0
    origin: str = ""
    place: Place | None = None
    whole: bool = True
    key: int | None = None
    made = True

    @property
    def label(self) -> str:
        """The rows of the block."""
        block = f"a block of {self.origin}" if self.origin else "a block"
        if self.rows is None:
            return block
        return f"rows {self.start} to {self.start + self.rows - 1} of {block}"

    def read(self, *values: Any) -> Iterator[Any]:
        """Yield the rows."""
        table = batch_to_table(values[0])
        yield table if self.rows is None else table.slice(self.start, self.rows)

    def part(self, start: int, stop: int) -> ReadUnit:
        """Return some rows of the same block."""
        if self.rows is None:
            return UnitPart(self, start, stop)
        rows = max(0, min(stop, self.rows) - start)
        size = self.size * rows // max(self.rows, 1)
        whole = self.whole and rows == self.rows
        return BlockUnit(self.refs, rows, size, self.start + start, self.origin, whole=whole)


@dataclasses.dataclass(frozen=True)
class UnitsDatasource(Datasource):
    """Units that are there already: numbers, items, tables, blocks, or parts of another source.

    Attributes:
        parts: The units, in their order.
        known: Their schema; None: only reading tells.
        paths: The files that are read.
        name: As plans name it.
    """

    parts: Sequence[ReadUnit]
    known: Any = None
    paths: Sequence[str] = ()
    name: str = "Blocks"

    def units(self, wish: CutWish) -> Iterator[ReadUnit]:
        """Yield the units, cut where more or smaller ones are wanted; blocks for functions only."""
        rows = self.count()
        step = wish.rows_each(rows, sum(unit.size for unit in self.parts)) if rows else 0
        for unit in [unit for unit in self.parts if unit.rows != 0] or self.parts[:1]:
            if not step or not unit.rows or unit.rows <= step or (unit.refs and wish.parts <= 1):
                yield unit
                continue
            for start in range(0, unit.rows, step):
                yield unit.part(start, start + step)

    @property
    def made(self) -> bool:
        """Whether those of all units are."""
        return all(unit.made for unit in self.parts)

    def schema(self) -> Any:
        """Return the schema."""
        return self.known

    def count(self) -> int | None:
        """Return the number of rows, if all units tell it."""
        rows = [unit.rows for unit in self.parts]
        return None if None in rows else sum(filter(None, rows))

    def files(self) -> list[str]:
        """Return the files."""
        return list(self.paths)


def ranged(units: Sequence[ReadUnit], start: int, stop: int) -> list[ReadUnit]:
    """Return the units, or parts of them, of a range of rows."""
    found: list[ReadUnit] = []
    at = 0
    for unit in units:
        rows = unit.rows or 0
        low, high = max(start - at, 0), min(stop - at, rows)
        if low < high:
            found.append(unit if high - low == rows else unit.part(low, high))
        at += rows
    return found
