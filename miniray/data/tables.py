"""Tables put together, and cut into batches and blocks."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa

from miniray.data.blocks import Pickled, no_columns, pickled, ragged, values_of

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

#: Bytes below which a table of a block is copied together with others, rather than kept as a chunk.
_SMALL = 1 << 20


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
    held: list[Any] = []
    rows = 0
    for table in tables:
        start = 0
        while rows + table.num_rows - start >= size:
            stop = start + size - rows
            held.append(table.slice(start, stop - start))
            yield concat(held)
            held, rows, start = [], 0, stop
        if start < table.num_rows:
            held.append(table.slice(start, table.num_rows - start))
            rows += table.num_rows - start
    if held and not drop_last:
        yield concat(held)


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
    if table.nbytes < len(tables) * _SMALL:
        with contextlib.suppress(pa.ArrowInvalid):  # dictionaries too many for their small indices
            return table.combine_chunks()
    return table
