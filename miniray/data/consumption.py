"""What executes a dataset and gives something of it to the caller."""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import warnings
from typing import TYPE_CHECKING, Any

from miniray.api import is_initialized, put
from miniray.data.batches import Reading, check_whole
from miniray.data.blocks import check_format, no_rows, shown_type, table_to_batch, table_to_rows
from miniray.data.executor import execute, table_of
from miniray.data.plan import Exchange, Limit, Read, count_of, explained, optimised, schema_of, walk
from miniray.data.sources import BlockRows, ReadUnit, UnitsDatasource
from miniray.data.stats import ExecutionStats
from miniray.data.tables import concat
from miniray.data.transforms import check_columns
from miniray.exceptions import MinirayError

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from miniray.data.plan import PlanNode

#: Bytes in the driver that bring a warning.
_MUCH = 2 * 2**30
#: Rows of blocks that are shown of a dataset, and signs of a cell, at most.
_SHOWN, _WIDTH = 10, 40


@dataclasses.dataclass(frozen=True)
class DataSchema:
    """The columns of a dataset; ``base_schema`` is their schema of Arrow."""

    base_schema: Any

    @property
    def names(self) -> list[str]:
        """The names of the columns."""
        return list(self.base_schema.names)

    @property
    def types(self) -> list[Any]:
        """Their types, of Arrow."""
        return list(self.base_schema.types)

    def __str__(self) -> str:
        names = ["Column", "------", *self.names]
        kinds = ["Type", "----", *map(shown_type, self.types)]
        width = max(map(len, names))
        return "\n".join(f"{n:<{width}}  {kind}" for n, kind in zip(names, kinds, strict=True))

    __repr__ = __str__


class Consumption(Reading):
    """The methods of a dataset that execute it.

    Args:
        plan: What it is made of.
        schema: Its columns, if they are known.
        stats: What its execution has done, if there was one.
    """

    def __init__(
        self, plan: PlanNode, schema: Any = None, stats: ExecutionStats | None = None
    ) -> None:
        self._plan = plan
        self._schema = schema
        self._stats = stats

    def _units(
        self, plan: PlanNode | None = None, *, ordered: bool | None = None
    ) -> Iterator[ReadUnit]:
        root = optimised(plan or self._plan)
        stats = self._stats = ExecutionStats(root.name)
        return execute(root, stats=stats, ordered=ordered)

    def _tables(self, plan: PlanNode | None = None) -> Iterator[Any]:
        return map(self._table, self._units(plan))

    def _table(self, unit: ReadUnit) -> Any:
        table = table_of(unit)
        if self._schema is None and table.num_columns:
            self._schema = table.schema
        return table

    def take(self, limit: int = 20) -> list[dict[str, Any]]:
        """Return the first rows, at most ``limit``, as dictionaries."""
        plan = Limit((self._plan,), check_whole("take", "limit", limit, 0))
        return [row for table in self._tables(plan) for row in table_to_rows(table)]

    def take_batch(self, batch_size: int = 20, *, batch_format: str | None = "default") -> Any:
        """Return the first rows as a batch; the formats are those of ``iter_batches``.

        Raises:
            ValueError: The dataset is empty.
        """
        check_format("take_batch", batch_format)
        batch_size = check_whole("take_batch", "batch_size", batch_size, 1)
        table = _whole(self._tables(Limit((self._plan,), batch_size)))
        if not table.num_rows:
            raise ValueError("take_batch(): the dataset is empty.")
        return table_to_batch(table, batch_format)

    def take_all(self, limit: int | None = None) -> list[dict[str, Any]]:
        """Return all rows as dictionaries.

        Raises:
            ValueError: There are more than ``limit``.
        """
        if limit is None:
            return list(itertools.chain.from_iterable(map(table_to_rows, self._tables())))
        rows = self.take(limit + 1)
        if len(rows) > limit:
            raise ValueError(f"take_all(limit={limit}): the dataset has more rows.")
        return rows

    def show(self, limit: int = 20) -> None:
        """Print the first rows."""
        for row in self.take(limit):
            print(row)  # noqa: T201 -- what it is for

    def count(self) -> int:
        """Return the number of rows: from metadata of files if that suffices, else by executing."""
        known = count_of(optimised(self._plan))
        if known is None:
            units = self._units(ordered=False)
            known = sum(table_of(u).num_rows if u.rows is None else u.rows for u in units)
        return known

    def schema(self, fetch_if_missing: bool = True) -> DataSchema | None:
        """Return the columns and their types, None if there are no rows.

        Without functions they are known from files' metadata; otherwise the first row is made,
        or None is returned if ``fetch_if_missing`` is False.
        """
        if self._schema is None:
            self._schema = schema_of(optimised(self._plan))
        if self._schema is None and fetch_if_missing:
            plan = self._plan
            while isinstance(plan, Exchange) and plan.how.keeps_count and len(plan.inputs) == 1:
                (plan,) = plan.inputs  # its rows are those of its input
            any(table.num_columns for table in self._tables(Limit((plan,), 1)))  # keeps the first
        return None if self._schema is None else DataSchema(self._schema)

    def columns(self, fetch_if_missing: bool = True) -> list[str] | None:
        """Return the names of the columns. Arguments as of ``schema``."""
        schema = self.schema(fetch_if_missing)
        return None if schema is None else schema.names

    def num_blocks(self) -> int:
        """Return the number of blocks; NotImplementedError if the dataset is not materialized."""
        blocks = self._blocks()
        if blocks is None:
            raise NotImplementedError("num_blocks() is known after materialize().")
        return len(blocks)

    def size_bytes(self) -> int:
        """Return the bytes of all blocks, by executing the dataset if it is not materialized."""
        blocks = self._blocks()
        return sum(unit.size for unit in (self._units(ordered=False) if blocks is None else blocks))

    def _blocks(self) -> Sequence[ReadUnit] | None:
        """Return the blocks of a materialized dataset; None if it is not."""
        source = self._plan.source if isinstance(self._plan, Read) else None
        return source.parts if isinstance(source, UnitsDatasource) and source.made else None

    def input_files(self) -> list[str]:
        """Return the files that are read."""
        reads = [node for node in walk(self._plan) if isinstance(node, Read)]
        return list(dict.fromkeys(path for read in reads for path, _ in read.source.found))

    def iterator(self) -> Consumption:
        """Return what reads this dataset, and can be passed on: the dataset itself."""
        return self

    def to_pandas(self, limit: int | None = None) -> Any:
        """Return all rows as a DataFrame of pandas.

        Raises:
            ValueError: There are more than ``limit``.
        """
        table = _whole(self._tables())
        if limit is not None and table.num_rows > limit:
            raise ValueError(f"to_pandas(limit={limit}): the dataset has {table.num_rows} rows.")
        if not table.num_columns and (known := self.schema(fetch_if_missing=False)):
            table = no_rows(known.base_schema)
        return table_to_batch(table, "pandas")

    def to_arrow_refs(self) -> list[Any]:
        """Return refs of the blocks, each a table of Arrow."""
        return [stored(unit, whole=True).refs[0] for unit in self._units()]

    def to_numpy_refs(self, *, column: str | None = None) -> list[Any]:
        """Return refs of the blocks: dictionaries of arrays, or arrays of one column."""
        refs = []
        for table in self._tables():
            check_columns("to_numpy_refs(): the data", [column] if column else (), table)
            arrays = table_to_batch(table, "numpy")
            refs.append(put(arrays if column is None else arrays[column]))
        return refs

    def stats(self) -> str:
        """Return what the newest execution has done, by operator; "" if there was none."""
        return "" if self._stats is None else self._stats.text()

    def get_stats_summary(self) -> dict[str, Any]:
        """Return the figures of ``stats()`` as plain values."""
        return (self._stats or ExecutionStats()).summary()

    def explain(self) -> None:
        """Print the plan, and which of its steps run together."""
        steps, stages = explained(self._plan, stages=False), explained(optimised(self._plan))
        text = f"-------- Logical Plan --------\n{steps}\n-------- Stages --------\n{stages}"
        print(text)  # noqa: T201 -- what it is for

    def __repr__(self) -> str:
        files = self.input_files()  # into which it does not look
        known = None
        with contextlib.suppress(ValueError, MinirayError):  # said when it is executed
            known = None if files else count_of(self._plan)
            self._schema = self._schema or (None if files else schema_of(optimised(self._plan)))
        blocks = self._blocks()
        shown: list[dict[str, Any]] = []
        for unit in blocks or ():
            if len(shown) < _SHOWN and (unit.table is not None or is_initialized()):
                with contextlib.suppress(MinirayError):  # a block may be lost
                    shown += table_to_rows(self._table(unit.part(0, _SHOWN - len(shown))))
        rows = "?" if known is None else known
        fields = list(self._schema or ())
        lines = [f"shape: ({rows}, {'?' if self._schema is None else len(fields)})"]
        if fields:
            names = [field.name for field in fields]
            head = [names, ["---"] * len(names), [shown_type(field.type) for field in fields]]
            lines += _box(head, [[str(row.get(name)) for name in names] for row in shown])
        showing = f"(Showing {len(shown)} of {rows} rows)"
        return "\n".join([*lines, "(Dataset isn't materialized)" if blocks is None else showing])


def _box(head: list[list[str]], rows: list[list[str]]) -> list[str]:
    """Return a table as lines of text; cells are cut to fit."""
    texts = [[" ".join(cell.split())[:_WIDTH] for cell in row] for row in head + rows]
    widths = [max(map(len, column)) for column in zip(*texts, strict=True)]
    found = [f"│ {' ┆ '.join(map(str.ljust, row, widths))} │" for row in texts]
    top, middle, bottom = (
        first + crossing.join(line * (width + 2) for width in widths) + last
        for first, line, crossing, last in ("╭─┬╮", "╞═╪╡", "╰─┴╯")
    )
    below = [middle] if rows else []
    return [top, *found[: len(head)], *below, *found[len(head) :], bottom]


def _whole(tables: Iterator[Any]) -> Any:
    """Return tables as one; warn if it is large."""
    kept = list(tables)
    size = sum(table.nbytes for table in kept)
    if size > _MUCH:
        told = f"{size >> 30} GiB are in this process; iter_batches() needs a batch at a time."
        warnings.warn(told, stacklevel=3)
    return concat([table for table in kept if table.num_rows] or kept[:1])


def stored(unit: ReadUnit, *, whole: bool = False) -> ReadUnit:
    """Return a unit whose rows are a block in the object store, and if ``whole`` all of one."""
    is_block = isinstance(unit.content, BlockRows) and unit.table is None
    if is_block and (not whole or (unit.whole and unit.rows is not None)):
        return unit
    table = table_of(unit)
    return ReadUnit(BlockRows(), table.num_rows, table.nbytes, (put(table),))
