"""Exchanges by the order of key columns: sorting, and the base of what groups and joins."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from miniray.data.blocks import concat, shown_type
from miniray.data.exchange import How, sliced
from miniray.data.transforms import DataError, Transform

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from miniray.data.transforms import Where

#: Rows of a unit whose keys are looked at before the bounds of partitions are chosen.
_SAMPLED = 500


@dataclasses.dataclass(frozen=True)
class Ordered(How):
    """Brings rows into the order of columns; null comes last, and NaN before it.

    Attributes:
        keys: Names of the columns.
        descending: For each, whether large values come first.
        given: Values of the first column at which partitions begin; empty: they are chosen.
    """

    keys: tuple[str, ...]
    descending: tuple[bool, ...]
    given: tuple[Any, ...] = ()
    name: str = "Sort"

    @property
    def sampled(self) -> bool:  # type: ignore[override]
        """Unless bounds were given."""
        return not self.given

    def side_keys(self, side: int) -> tuple[str, ...]:
        """Return the columns of an input that are its keys."""
        del side
        return self.keys

    def bounds(self, samples: Sequence[Any], parts: int) -> Sequence[Any]:
        """Return keys that divide the samples into equal parts."""
        if self.given:
            return [(value,) for value in sorted(self.given, reverse=self.descending[0])]
        try:
            keys = concat(samples)
        except ValueError as error:
            raise DataError(f"{self.name}: {error}") from None
        keys = _plain(keys.take(key_order(keys, self.descending)))
        places = [part * keys.num_rows // parts for part in range(1, parts)]
        return [tuple(_row(keys, place)) for place in places] if keys.num_rows else []

    def cut(self, table: Any, first: int, side: int, bounds: Sequence[Any]) -> list[Any]:
        """Return the sorted table between the bounds."""
        table, keys = self._sorted(table, side)
        keys = _plain(keys)
        ends = [_place(keys, bound, self.descending) for bound in bounds]
        return sliced(table, [*ends, table.num_rows])

    def merge(self, sides: Sequence[Sequence[Any]]) -> Any:
        """Return the rows in order; those of equal keys stay in theirs."""
        if not self.keys:
            return concat(sides[0])
        return self._sorted(concat(sides[0]), 0)[0]

    def _sorted(self, table: Any, side: int) -> tuple[Any, Any]:
        keys = key_table(table, self.side_keys(side), self.name, self.keys)
        order = key_order(keys, self.descending)
        return table.combine_chunks().take(order), keys.take(order)


def key_table(table: Any, names: Sequence[str], who: str, called: Sequence[str] = ()) -> Any:
    """Return the columns of a table that are its keys, in types that can be compared.

    Args:
        table: The rows.
        names: The columns.
        who: What needs them, for messages.
        called: Other names for them in what is returned.

    Raises:
        DataError: A column is missing, or its values have no order.
    """
    missing = [name for name in names if name not in table.column_names]
    if missing and (table.num_columns or table.num_rows):
        raise DataError(
            f"{who}: there is no column {missing[0]!r}, but "
            f"{', '.join(table.column_names) or 'none'}."
        )
    columns = [_comparable(table, name, who) for name in names] if not missing else None
    return pa.table(columns or [pa.nulls(0) for _ in names], names=list(called or names))


def _comparable(table: Any, name: str, who: str) -> Any:
    values = table.column(name)
    if pa.types.is_dictionary(values.type):
        values = values.cast(values.type.value_type)
    kind = values.type
    if pa.types.is_nested(kind) or isinstance(kind, pa.BaseExtensionType):
        raise DataError(
            f"{who}: the column {name!r} has the type {shown_type(kind)}, whose values have no "
            f"order. Add a column of numbers or text to use in its place."
        )
    views = {pa.string_view(): pa.large_string(), pa.binary_view(): pa.large_binary()}
    if kind in (*views, pa.float16()):
        values = values.cast(views.get(kind, pa.float32()))
    if pa.types.is_floating(values.type):
        values = pc.add(values, pa.scalar(0, values.type))  # -0.0 is the same key as 0.0
    return values.combine_chunks()


def key_order(keys: Any, descending: Sequence[bool]) -> Any:
    """Return the numbers of rows in the order of their keys."""
    if not keys.num_rows:
        return pa.array([], pa.int64())
    signs = ["descending" if each else "ascending" for each in descending]
    return pc.sort_indices(keys, sort_keys=list(zip(keys.column_names, signs, strict=True)))


def _plain(keys: Any) -> Any:
    """Return keys with times as numbers, which Python can compare whatever their unit."""
    for place, field in enumerate(keys.schema):
        if pa.types.is_temporal(field.type):
            width = pa.int32() if field.type.bit_width == 32 else pa.int64()
            column = keys.column(place).cast(width)
            keys = keys.set_column(place, field.name, column)
    return keys.combine_chunks()


def _row(keys: Any, place: int) -> list[Any]:
    return [column[place].as_py() for column in keys.columns]


def _place(keys: Any, bound: Sequence[Any], descending: Sequence[bool]) -> int:
    """Return how many of the sorted keys come before a bound."""
    low, high = 0, keys.num_rows
    while low < high:
        middle = (low + high) // 2
        if _before(_row(keys, middle), bound, descending):
            low = middle + 1
        else:
            high = middle
    return low


def _before(row: Sequence[Any], bound: Sequence[Any], descending: Sequence[bool]) -> bool:
    for own, other, down in zip(row, bound, descending, strict=False):
        kinds = [2 if v is None else int(v != v) for v in (own, other)]  # 1 is NaN
        if kinds[0] != kinds[1]:
            return kinds[0] < kinds[1]
        if not kinds[0] and own != other:
            return bool(own > other) if down else bool(own < other)
    return False


@dataclasses.dataclass(frozen=True)
class KeySample(Transform):
    """Gives keys of some rows, from which the bounds of partitions are chosen."""

    how: Ordered
    side: int
    keeps_count = False

    @property
    def name(self) -> str:  # type: ignore[override]
        """The name of the exchange."""
        return f"{self.how.name}Sample"

    def run(self, tables: Iterator[Any], where: Where) -> Iterator[Any]:
        """Yield the keys."""
        for table in tables:
            rows = np.arange(0, table.num_rows, max(1, table.num_rows // _SAMPLED))
            part = table.take(rows)
            yield key_table(part, self.how.side_keys(self.side), self.how.name, self.how.keys)
