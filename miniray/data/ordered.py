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
        right_keys: The columns of a second input.
    """

    keys: tuple[str, ...]
    descending: tuple[bool, ...]
    given: tuple[Any, ...] = ()
    name: str = "Sort"
    right_keys: tuple[str, ...] = ()

    def keys_of(self, table: Any, side: int = 0) -> Any:
        """Return the keys of rows of an input, called as those of the first one."""
        return key_table(table, self.right_keys if side else self.keys, self.name, self.keys)

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
        keys = self.keys_of(table, side).select(bounds.column_names)
        # Sorting is stable: a bound comes before the rows that are equal to it.
        order = key_order(concat([bounds, keys]), self.descending).to_numpy()
        places = np.flatnonzero(order < len(bounds)) - np.arange(len(bounds))
        table = table.combine_chunks().take(order[order >= len(bounds)] - len(bounds))
        return sliced(table, [*places.tolist(), table.num_rows])

    def merge(self, sides: Sequence[Sequence[Any]]) -> Any:
        table = concat(sides[0])
        if not self.keys:
            return table
        return table.combine_chunks().take(key_order(self.keys_of(table), self.descending))


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
    """Return the numbers of rows in the order of their keys, or of the first ones of these."""
    if not keys.num_rows:
        return pa.array([], pa.int64())
    signs = ["descending" if each else "ascending" for each in descending]
    return pc.sort_indices(keys, sort_keys=list(zip(keys.column_names, signs, strict=False)))


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
        return self.how.keys_of(table.take(rows), self.side)


# --- joins ------------------------------------------------------------------------------

#: Joins of which rows of one input come out as they are.
ONE_SIDED = ("left_semi", "right_semi", "left_anti", "right_anti")
#: Ray's names of joins. Those of Arrow have spaces.
JOINS = ("inner", "left_outer", "right_outer", "full_outer", *ONE_SIDED)


@dataclasses.dataclass(frozen=True)
class Join(Ordered):
    """Joins two inputs. Rows come in the order of their keys; null is equal to nothing.

    Attributes:
        kind: One of ``JOINS``.
        suffixes: Behind names that both inputs have.
    """

    kind: str = "inner"
    suffixes: tuple[str | None, str | None] = (None, None)
    name: str = "Join"
    keeps_count = False

    def outgoing(self, left: Sequence[str], right: Sequence[str]) -> list[tuple[int, str, str]]:
        """Return the columns that come out: of which input, their names there and their new ones.

        Raises:
            ValueError: Two would have the same name.
        """
        if self.kind in ONE_SIDED:
            return []
        keys = (self.keys, self.right_keys)
        of_keys = 1 if self.kind == "right_outer" else 0  # whose keys come out
        kept = [
            (side, name)
            for side, names in enumerate((left, right))
            for name in names
            if side == of_keys or name not in keys[side]
        ]
        times = collections.Counter(name for _, name in kept)
        found = [
            (side, name, name + (self.suffixes[side] or ""))
            if times[name] > 1 and name not in keys[side]
            else (side, name, name)
            for side, name in kept
        ]
        new = [name for _, _, name in found]
        if len(set(new)) < len(new):
            raise ValueError(
                f"join(): both sides have columns of the same name, also with their suffixes "
                f"(overlapping columns: {sorted({name for name in new if new.count(name) > 1})}). "
                f"Pass left_suffix or right_suffix to join()."
            )
        return found

    def merge(self, sides: Sequence[Sequence[Any]]) -> Any:
        """Join the rows of a partition: Arrow joins keys and row numbers, the rest is taken."""
        tables = [concat(side).combine_chunks() for side in sides]
        keys = [self.keys_of(table, side) for side, table in enumerate(tables)]
        kinds = concat([each.slice(0, 0) for each in keys]).schema
        for place, field in enumerate(kinds):
            if pa.types.is_null(field.type):  # Arrow joins no keys of this type
                kinds = kinds.set(place, field.with_type(pa.int8()))
        left, right = (
            each.cast(kinds).append_column(f"{ORDER}{side}", pa.array(np.arange(len(each))))
            for side, each in enumerate(keys)
        )
        kind = self.kind.replace("_", " ")
        found = left.join(right, list(self.keys), join_type=kind, use_threads=False)
        places = sorted(name for name in found.column_names if name.startswith(ORDER))
        found = found.select([*self.keys, *places])
        found = found.take(key_order(found, [*self.descending, *(False for _ in places)]))
        rows = {int(name[-1]): tables[int(name[-1])].take(found.column(name)) for name in places}
        columns = {}
        for side, name, new in self.outgoing(*(table.column_names for table in tables)):
            of_either = self.kind == "full_outer" and not side and name in self.keys
            columns[new] = (found if of_either else rows[side]).column(name)
        return pa.table(columns) if columns else next(iter(rows.values()))
