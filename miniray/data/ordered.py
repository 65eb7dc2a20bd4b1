"""Exchanges by the order of key columns: sorts and joins, and the base of what groups."""

from __future__ import annotations

import collections
import dataclasses
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from miniray.data.blocks import shown_type
from miniray.data.exchange import ORDER, How, sliced
from miniray.data.tables import concat
from miniray.data.transforms import DataError, TableStep

if TYPE_CHECKING:
    from collections.abc import Sequence

    from miniray.data.transforms import Where

#: Rows of a unit whose keys are looked at before the bounds of partitions are chosen.
_SAMPLED = 500


@dataclasses.dataclass(frozen=True)
class Ordered(How):
    """Brings rows into the order of columns; null comes last, and NaN before it.

    Attributes:
        descending: For each, whether large values come first.
        given: Values of the first column at which partitions begin; empty: they are chosen.
    """

    keys: tuple[str, ...]
    descending: tuple[bool, ...]
    given: tuple[Any, ...] = ()
    name: str = "Sort"

    def side_keys(self, side: int) -> tuple[str, ...]:
        """Return the columns of an input that are its keys."""
        del side
        return self.keys

    def bounds(self, samples: Sequence[Any], parts: int) -> Any:
        """Return keys that divide the samples into equal parts."""
        if self.given:
            ordered = sorted(self.given, reverse=self.descending[0])
            return pa.table({self.keys[0]: ordered})
        try:
            keys = concat(samples)
        except ValueError as error:
            raise DataError(f"{self.name}: {error}") from None
        if not keys.num_rows:
            return keys
        places = [part * keys.num_rows // parts for part in range(1, parts)]
        return keys.take(key_order(keys, self.descending).take(places))

    def cut(self, table: Any, first: int, side: int, bounds: Any) -> list[Any]:
        """Return the sorted table between the bounds, which are a table of keys."""
        keys = key_table(table, self.side_keys(side), self.name, self.keys)
        # A bound comes before the rows that are equal to it, by as many keys as it has.
        both = concat(
            [
                each.add_column(
                    bounds.num_columns, ORDER, pa.repeat(pa.scalar(number, pa.int8()), len(each))
                )
                for number, each in enumerate((bounds, keys))
            ]
        )
        down = list(self.descending)
        down.insert(bounds.num_columns, False)
        order = key_order(both, down).to_numpy()
        places = np.flatnonzero(order < len(bounds)) - np.arange(len(bounds))
        table = table.combine_chunks().take(order[order >= len(bounds)] - len(bounds))
        return sliced(table, [*places.tolist(), table.num_rows])

    def merge(self, sides: Sequence[Sequence[Any]]) -> Any:
        table = concat(sides[0])
        if not self.keys:
            return table
        order = key_order(key_table(table, self.keys, self.name), self.descending)
        return table.combine_chunks().take(order)


def key_table(table: Any, names: Sequence[str], who: str, called: Sequence[str] = ()) -> Any:
    """Return columns of a table as keys, in types that can be compared, called as before or anew.

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
    return one_zero(values).combine_chunks()


def one_zero(values: Any) -> Any:
    """Return values with one zero and one NaN, whatever their signs: Arrow looks at the bits."""
    if not pa.types.is_floating(values.type) or values.type == pa.float16():
        return values
    values = pc.add(values, pa.scalar(0, values.type))
    return pc.if_else(pc.is_nan(values), pa.scalar(float("nan"), values.type), values)


def key_order(keys: Any, descending: Sequence[bool]) -> Any:
    """Return the numbers of rows in the order of their keys."""
    if not keys.num_rows:
        return pa.array([], pa.int64())
    signs = ["descending" if each else "ascending" for each in descending]
    return pc.sort_indices(keys, sort_keys=list(zip(keys.column_names, signs, strict=True)))


@dataclasses.dataclass(frozen=True)
class KeySample(TableStep):
    """Gives keys of some rows, from which the bounds of partitions are chosen."""

    how: Ordered
    side: int
    keeps_count = False

    @property
    def name(self) -> str:  # type: ignore[override]
        return f"{self.how.name}Sample"

    def changed(self, table: Any, where: Where) -> Any:
        rows = np.arange(0, table.num_rows, max(1, table.num_rows // _SAMPLED))
        how = self.how
        return key_table(table.take(rows), how.side_keys(self.side), how.name, how.keys)


# --- joins ------------------------------------------------------------------------------

#: Ray's names of joins, and those of Arrow.
JOINS = {
    "inner": "inner",
    "left_outer": "left outer",
    "right_outer": "right outer",
    "full_outer": "full outer",
    "left_semi": "left semi",
    "right_semi": "right semi",
    "left_anti": "left anti",
    "right_anti": "right anti",
}


@dataclasses.dataclass(frozen=True)
class Join(Ordered):
    """Joins two inputs. Rows come in the order of their keys; null is equal to nothing.

    Attributes:
        kind: One of ``JOINS``.
        suffixes: Behind names that both inputs have.
    """

    right_keys: tuple[str, ...] = ()
    kind: str = "inner"
    suffixes: tuple[str | None, str | None] = (None, None)
    name: str = "Join"
    keeps_count = False

    def side_keys(self, side: int) -> tuple[str, ...]:
        return self.right_keys if side else self.keys

    def outgoing(self, left: Sequence[str], right: Sequence[str]) -> list[tuple[int, str, str]]:
        """Return the columns that come out: of which input, their names there and their new ones.

        Raises:
            ValueError: Two would have the same name.
        """
        gone: Any = ((), self.right_keys)
        if self.kind.endswith(("semi", "anti")):  # columns of one input alone come out
            gone = ((), right) if self.kind.startswith("left") else (left, ())
        elif self.kind == "right_outer":
            gone = (self.keys, ())
        kept = [
            (side, name)
            for side, names in enumerate((left, right))
            for name in names
            if name not in gone[side]
        ]
        both = set.intersection(*({name for s, name in kept if s == side} for side in (0, 1)))
        if both and self.suffixes == (None, None):
            raise ValueError(
                f"Left and right columns suffixes cannot be both None (overlapping columns: "
                f"{sorted(both)}). Pass left_suffix or right_suffix to join()."
            )
        found = []
        for side, name in kept:
            shared = name in both and name not in self.side_keys(side)
            found.append((side, name, name + (self.suffixes[side] or "") if shared else name))
        called = collections.Counter(new for _, _, new in found)
        twice = sorted(name for name, times in called.items() if times > 1)
        if twice:
            raise ValueError(
                f"join(): both sides have {twice} with these suffixes; use other ones."
            )
        return found

    def merge(self, sides: Sequence[Sequence[Any]]) -> Any:
        """Join the rows of a partition: Arrow joins keys and row numbers, the rest is taken."""
        left, right = (concat(tables).combine_chunks() for tables in sides)
        left_keys = key_table(left, self.keys, self.name)
        right_keys = key_table(right, self.right_keys, self.name, self.keys)
        keys = concat([left_keys.slice(0, 0), right_keys.slice(0, 0)]).schema
        for place, field in enumerate(keys):
            if pa.types.is_null(field.type):  # Arrow joins no keys of this type
                keys = keys.set(place, field.with_type(pa.int8()))
        left_rows, right_rows = (
            table.cast(keys).append_column(ORDER + name, pa.array(np.arange(len(table))))
            for name, table in (("0", left_keys), ("1", right_keys))
        )
        found = left_rows.join(
            right_rows, list(self.keys), join_type=JOINS[self.kind], use_threads=False
        )
        places = sorted(name for name in found.column_names if name.startswith(ORDER))
        found = found.select([*self.keys, *places])
        found = found.take(key_order(found, [*self.descending, *(False for _ in places)]))
        if self.kind.endswith(("semi", "anti")):
            (place,) = places
            return (left if self.kind.startswith("left") else right).take(found.column(place))
        rows = [
            side.take(found.column(place))
            for side, place in zip((left, right), places, strict=True)
        ]
        columns = {}
        for side, name, new in self.outgoing(left.column_names, right.column_names):
            of_either = self.kind == "full_outer" and not side and name in self.keys
            columns[new] = (found if of_either else rows[side]).column(name)
        return pa.table(columns) if columns else rows[0]
