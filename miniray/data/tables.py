"""Tables put together, and cut into batches and blocks."""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa

from miniray.data.blocks import (
    SMALL,
    Ragged,
    batch_to_table,
    is_plain,
    no_columns,
    no_rows,
    pickled,
    ragged,
    table_to_batch,
    to_numpy,
    values_of,
)

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence

#: Bytes of texts that offsets of 32 bits can tell, and the types that have such of 64 bits.
_OFFSETS = 2**31 - 1
_TEXTS = {pa.string(): pa.large_string(), pa.binary(): pa.large_binary()}


def concat(tables: Sequence[Any]) -> Any:
    """Return tables as one; null columns take the type of others, ints that of floats.

    Raises:
        ValueError: A column has types that do not go together.
    """
    if not any(table.num_columns for table in tables):  # Arrow would make no rows of them
        return no_columns(sum(table.num_rows for table in tables))
    if all(table.schema.equals(tables[0].schema) for table in tables[1:]):
        return _large(pa.concat_tables(tables))
    filled = [table for table in tables if table.num_columns or table.num_rows]
    try:
        return _large(pa.concat_tables(_alike(filled), promote_options="permissive"))
    except pa.ArrowException as error:
        raise ValueError(f"{error}. A column needs one type in all rows: convert it.") from error


def _large(table: Any) -> Any:
    """Return a table whose texts have offsets of 64 bits where those of 32 would overflow."""
    size = table.get_total_buffer_size()  # its size itself takes longer, and this is for each batch
    for place, field in enumerate(table.schema if size > _OFFSETS else ()):
        if field.type in _TEXTS and table.column(place).nbytes > _OFFSETS:
            kind = _TEXTS[field.type]
            table = table.set_column(place, field.with_type(kind), table.column(place).cast(kind))
    return table


def _alike(tables: Sequence[Any]) -> Sequence[Any]:
    """Return tables whose columns of tensors and objects have one type each."""
    types: dict[str, set[Any]] = {}
    for field in itertools.chain.from_iterable(table.schema for table in tables):
        types.setdefault(field.name, set()).add(field.type)
    for name, found in types.items():
        kinds = found - {pa.null()}
        if len(kinds) > 1 and any(isinstance(kind, pa.BaseExtensionType) for kind in kinds):
            tables = [
                each.set_column(each.column_names.index(name), name, _of_kinds(each[name], kinds))
                if name in each.column_names
                else each
                for each in tables
            ]
    return tables


def _of_kinds(values: Any, kinds: Iterable[Any]) -> Any:
    """Return a column as tensors, ragged if shapes differ, or pickled if some are no tensors."""
    if not all(isinstance(kind, Ragged | pa.FixedShapeTensorType) for kind in kinds):
        return pickled(values_of(values))
    dtype = np.result_type(*(kind.value_type.to_pandas_dtype() for kind in kinds))
    shapes = {tuple(getattr(kind, "shape", ())) for kind in kinds}
    if len(shapes) > 1 or () in shapes:
        return ragged(values_of(values), dtype)
    tensor = pa.fixed_shape_tensor(pa.from_numpy_dtype(dtype), *shapes)
    return values.cast(tensor.storage_type).cast(tensor)


@dataclasses.dataclass(frozen=True)
class Rows:
    """Some rows of a table, to be a batch.

    An array of some thousand numbers takes Arrow as long to make as one of a million: those of the
    whole table are made once, and its rows have slices of them.
    """

    whole: Any
    start: int
    num_rows: int
    #: The columns as arrays, once they are wanted; None for those that are no plain numbers.
    arrays: dict[str, Any]

    @classmethod
    def of(cls, table: Any) -> Rows:
        """Return all rows of a table."""
        return cls(table, 0, table.num_rows, {})

    def slice(self, start: int, length: int) -> Rows:
        """Return some of the rows."""
        return Rows(self.whole, self.start + start, length, self.arrays)

    @property
    def table(self) -> Any:
        """The rows as a table."""
        return self.whole.slice(self.start, self.num_rows)

    def batch(self, batch_format: str | None, *, writable: bool = False) -> Any:
        """Return the rows as a batch.

        Args:
            batch_format: As of ``table_to_batch``.
            writable: Copy arrays that share the table's memory.
        """
        if batch_format not in ("default", "numpy"):
            return table_to_batch(self.table, batch_format)
        if not self.arrays:
            for name, column in zip(self.whole.column_names, self.whole.columns, strict=True):
                self.arrays[name] = to_numpy(column) if is_plain(column) else None
        batch = {}
        for name, array in self.arrays.items():
            own = slice(self.start, self.start + self.num_rows)
            found = to_numpy(self.whole.column(name)[own]) if array is None else array[own]
            batch[name] = found.copy() if writable and not found.flags.writeable else found
        return batch


def batched(tables: Iterable[Any], size: int | None, *, drop_last: bool = False) -> Iterator[Rows]:
    """Yield batches of ``size`` rows, the last one with the rest; None: a table each."""
    if size is None:
        yield from map(Rows.of, filter(len, tables))
        return
    held: list[Rows] = []
    missing = size
    for part in (part for table in tables for part in _parts(table)):
        start = 0
        while start < part.num_rows:
            held.append(part.slice(start, min(missing, part.num_rows - start)))
            start += held[-1].num_rows
            missing -= held[-1].num_rows
            if not missing:
                yield _together(held)
                held, missing = [], size
    if held and not drop_last:
        yield _together(held)


def _parts(table: Any) -> list[Rows]:
    """Return the rows of a table in parts whose columns have one chunk each."""
    if not table.num_columns:
        return [Rows.of(table)]
    return [Rows.of(pa.Table.from_batches([batch])) for batch in table.to_batches()]


def _together(parts: list[Rows]) -> Rows:
    return parts[0] if len(parts) == 1 else Rows.of(concat([part.table for part in parts]))


def rebatched(tables: Iterable[Any], size: int) -> Iterator[Any]:
    """Yield tables of ``size`` rows each, the last one with the rest."""
    return (rows.table for rows in batched(tables, size))


def tabulated(batches: Iterable[Any], size: int) -> Iterator[Any]:
    """Yield tables as they are, and small batches of arrays together, up to ``size`` bytes.

    Batches are copied at once: a function may write its next one into the same arrays, and a view
    would keep all that it is a part of.
    """
    for kinds, alike in itertools.groupby(batches, lambda each: getattr(each, "kinds", None)):
        if kinds is None:  # tables
            yield from alike
            continue
        arrays: dict[str, Any] = {}
        rows = room = 0
        for batch in alike:
            if not arrays or batch.num_rows > room - rows:
                if rows:
                    yield _filled(arrays, rows)
                rows, room = 0, max(batch.num_rows, size * batch.num_rows // max(batch.nbytes, 1))
                arrays = {name: np.empty((room, *shape), kind) for name, kind, shape in kinds}
            start, rows = rows, rows + batch.num_rows
            for name, array in batch.arrays.items():
                arrays[name][start:rows] = array
            del batch, array  # before the next one is made
        yield _filled(arrays, rows)


def _filled(arrays: Mapping[str, Any], rows: int) -> Any:
    """Return the first rows of arrays, which keep no memory for more, as a table."""
    for array in arrays.values():
        array.resize((rows, *array.shape[1:]), refcheck=False)
        array.setflags(write=False)
    return batch_to_table(arrays)


def resized(tables: Iterable[Any], target: int) -> Iterator[Any]:
    """Yield blocks of about ``target`` bytes: small tables together, large ones in parts."""
    for whole in gathered(tables, target):
        size = whole.nbytes
        rows = whole.num_rows if size < 2 * target else whole.num_rows * target // size
        yield from rebatched([whole], max(1, rows)) if whole.num_rows else (whole,)


def gathered(tables: Iterable[Any], least: int) -> Iterator[Any]:
    """Yield small tables together, of ``least`` bytes, and large ones as they are.

    At least one comes out, without rows if there are none, so that the columns are known.
    """
    held: list[Any] = []
    size, made = 0, False
    schema = pa.schema([])
    for table in tables:
        schema = schema if len(schema) else table.schema
        if not table.num_rows:
            continue
        held.append(table)
        size += table.nbytes
        del table  # before the next one is made
        if size >= least:
            whole = [_joined(held)]
            held, size, made = [], 0, True
            yield whole.pop()
    if held or not made:
        yield _joined(held or [no_rows(schema)])


def _joined(tables: Sequence[Any]) -> Any:
    """Return tables as one whose columns have few chunks: each costs pickling and reading."""
    table = concat(tables)
    if table.nbytes < len(tables) * SMALL:
        with contextlib.suppress(pa.ArrowInvalid):  # dictionaries too many for their small indices
            return table.combine_chunks()
    return table
