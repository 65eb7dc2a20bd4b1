"""Tables put together, and cut into batches and blocks."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import math
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa

from miniray.data.blocks import (
    SMALL,
    Arrays,
    Pickled,
    batch_to_table,
    is_plain,
    no_columns,
    pickled,
    ragged,
    table_to_batch,
    to_numpy,
    values_of,
)

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence


def concat(tables: Sequence[Any]) -> Any:
    """Return tables as one; null columns take the type of others, ints that of floats.

    Raises:
        ValueError: A column has types that do not go together.
    """
    if len(tables) < 2:
        return tables[0] if tables else pa.table({})
    schema = tables[0].schema
    if not any(table.num_columns for table in tables):  # Arrow would make no rows of them
        return no_columns(sum(table.num_rows for table in tables))
    if all(table.schema.equals(schema) for table in tables[1:]):
        return pa.concat_tables(tables)
    filled = [table for table in tables if table.num_columns or table.num_rows]
    with contextlib.suppress(pa.ArrowException):
        return pa.concat_tables(filled, promote_options="permissive")
    try:
        return pa.concat_tables(_alike(filled), promote_options="permissive")
    except pa.ArrowException as error:
        raise ValueError(f"Not all rows go together. {error}") from error


def _alike(tables: Sequence[Any]) -> Sequence[Any]:
    """Return tables whose tensors of different shapes are ragged, and the rest pickled."""
    for name in {name for table in tables for name in table.column_names}:
        kinds = {t.schema.field(name).type for t in tables if name in t.column_names}
        kinds.discard(pa.null())
        special = [kind for kind in kinds if isinstance(kind, pa.BaseExtensionType)]
        if len(kinds) < 2 or not special:
            continue
        as_objects = any(isinstance(k, Pickled) for k in kinds) or len(special) < len(kinds)
        dtypes = [k.value_type.to_pandas_dtype() for k in special if not as_objects]
        changed = []
        for table in tables:
            if name in table.column_names:
                place = table.column_names.index(name)
                values = values_of(table.column(name))
                made = pickled(values) if as_objects else ragged(values, np.result_type(*dtypes))
                table = table.set_column(place, name, made)  # noqa: PLW2901
            changed.append(table)
        tables = changed
    return tables


def rebatched(tables: Iterable[Any], size: int, *, drop_last: bool = False) -> Iterator[Any]:
    """Yield tables of ``size`` rows each, the last one with what is left."""
    return map(concat, _cut(tables, size, drop_last=drop_last))


def _cut(tables: Iterable[Any], size: int, *, drop_last: bool = False) -> Iterator[list[Any]]:
    """Yield the slices of tables that have ``size`` rows together, the last ones what is left."""
    held: list[Any] = []
    rows = 0
    for table in tables:
        start = 0
        while rows + table.num_rows - start >= size:
            stop = start + size - rows
            held.append(table.slice(start, stop - start))
            yield held
            held, rows, start = [], 0, stop
        if start < table.num_rows:
            held.append(table.slice(start, table.num_rows - start))
            rows += table.num_rows - start
    if held and not drop_last:
        yield held


class _Whole:
    """A table, and its columns of plain numbers as arrays, once one of them is wanted."""

    def __init__(self, table: Any) -> None:
        self.table = table

    @functools.cached_property
    def arrays(self) -> dict[str, Any]:
        table = self.table
        columns = ((name, table.column(name)) for name in table.column_names)
        return {name: to_numpy(column) for name, column in columns if is_plain(column)}


@dataclasses.dataclass(frozen=True)
class Rows:
    """Some rows of a table, to be a batch.

    An array of some thousand numbers takes Arrow as long to make as one of a million: those of the
    whole table are made once, and its rows have slices of them.
    """

    whole: _Whole
    start: int
    num_rows: int

    @classmethod
    def of(cls, table: Any) -> Rows:
        """Return all rows of a table."""
        return cls(_Whole(table), 0, table.num_rows)

    def slice(self, start: int, length: int) -> Rows:
        """Return some of the rows."""
        return Rows(self.whole, self.start + start, length)

    @property
    def table(self) -> Any:
        """The rows as a table."""
        return self.whole.table.slice(self.start, self.num_rows)

    def batch(self, batch_format: str | None, *, writable: bool = False) -> Any:
        """Return the rows as a batch.

        Args:
            batch_format: As of ``table_to_batch``.
            writable: Copy arrays that share the table's memory.
        """
        if batch_format not in ("default", "numpy"):
            return table_to_batch(self.table, batch_format)
        arrays = self.whole.arrays
        stop = self.start + self.num_rows
        found = {name: array[self.start : stop] for name, array in arrays.items()}
        if len(arrays) < self.whole.table.num_columns:
            others = [name for name in self.whole.table.column_names if name not in arrays]
            found |= table_to_batch(self.table.select(others), "numpy")
            found = {name: found[name] for name in self.whole.table.column_names}
        if writable:
            found = {
                n: array if array.flags.writeable else array.copy() for n, array in found.items()
            }
        return found


def batched(tables: Iterable[Any], size: int, *, drop_last: bool = False) -> Iterator[Rows]:
    """Yield batches of ``size`` rows each, the last one with what is left."""
    pieces = (Rows.of(piece) for table in tables for piece in _pieces(table))
    for held in _cut(pieces, size, drop_last=drop_last):
        yield held[0] if len(held) == 1 else Rows.of(concat([each.table for each in held]))


def _pieces(table: Any) -> list[Any]:
    """Return a table in parts whose columns have one chunk each."""
    if not table.num_columns:
        return [table]
    return [pa.Table.from_batches([batch]) for batch in table.to_batches()]


class _Stack:
    """Arrays for about ``size`` bytes of rows, into which small batches of a kind are copied.

    They are copied at once: a function may write its next batch into the same arrays, and a view
    would keep all that it is a part of.
    """

    def __init__(self, first: Arrays, size: int) -> None:
        row: int = sum(kind.itemsize * math.prod(shape) for _, kind, shape in first.kinds)
        rows = max(first.num_rows, size // row)
        self._arrays = {name: np.empty((rows, *shape), kind) for name, kind, shape in first.kinds}
        self._kinds = first.kinds
        self._room = rows
        self._rows = 0

    def fits(self, batch: object) -> bool:
        """Return whether something is a batch that can be added."""
        if not isinstance(batch, Arrays):
            return False
        return batch.num_rows <= self._room and batch.kinds == self._kinds

    def add(self, batch: Arrays) -> bool:
        """Copy a batch; return whether there is place for another one like it."""
        start, self._rows = self._rows, self._rows + batch.num_rows
        self._room -= batch.num_rows
        for name, array in batch.batch.items():
            self._arrays[name][start : self._rows] = array
        return self._room >= max(1, batch.num_rows)

    def table(self) -> Any:
        """Return what was added, in memory of about its size."""
        found = {name: array[: self._rows] for name, array in self._arrays.items()}
        if self._rows < 3 * self._room:
            found = {name: array.copy() for name, array in found.items()}
        for array in found.values():
            array.setflags(write=False)
        return batch_to_table(found)


def tabulated(batches: Iterable[Any], size: int) -> Iterator[Any]:
    """Yield tables as they are, and small batches of arrays together, up to ``size`` bytes."""
    stack: _Stack | None = None
    for batch in batches:
        if stack is not None and not stack.fits(batch):
            yield stack.table()
            stack = None
        if not isinstance(batch, Arrays):
            yield batch
        else:
            stack = stack or _Stack(batch, size)
            if not stack.add(batch):
                yield stack.table()
                stack = None
        del batch  # before the next one is made
    if stack is not None:
        yield stack.table()


def resized(tables: Iterable[Any], target: int) -> Iterator[Any]:
    """Yield blocks of about ``target`` bytes: small tables together, large ones in parts.

    At least one comes out, without rows if there are none, so that the columns are known.
    """
    held: list[Any] = []
    size = 0
    first: Any = None
    made = False
    for table in tables:
        first = table if first is None or not first.num_columns else first
        if not table.num_rows:
            continue
        held.append(table)
        size += table.nbytes
        if size >= target:
            made = True
            whole = _joined(held)
            rows = whole.num_rows if size < 2 * target else whole.num_rows * target // size
            yield from rebatched([whole], max(1, rows))
            held, size = [], 0
    if held:
        yield _joined(held)
    elif not made:
        yield pa.table({}) if first is None else first.slice(0, 0)


def _joined(tables: Sequence[Any]) -> Any:
    """Return tables as one whose columns have few chunks: each costs pickling and reading."""
    table = concat(tables)
    if table.nbytes < len(tables) * SMALL:
        with contextlib.suppress(pa.ArrowInvalid):  # dictionaries too many for their small indices
            return table.combine_chunks()
    return table
