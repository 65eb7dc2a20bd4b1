"""Exchanges by the order of key columns: sorts and joins, and the base of groupings."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from miniray.data.blocks import shown_type
from miniray.data.exchange import ORDER, How, sliced
from miniray.data.tables import concat
from miniray.data.transforms import DataError, TableStep, Where, check_columns, told

if TYPE_CHECKING:
    from collections.abc import Sequence

#: Rows of a unit whose keys are looked at before the bounds of partitions are chosen.
_SAMPLED = 500


@dataclasses.dataclass(frozen=True)
class Ordered(How):
    """Brings rows into the order of columns; null comes last, and NaN before it.

    Attributes:
        descending: For each, whether large values come first; empty: for none.
        right_keys: The columns of a second input.
        boundaries: Values of the first key at which partitions are cut; empty: by samples.
    """

    keys: tuple[str, ...]
    descending: tuple[bool, ...] = ()
    name: str = "Sort"
    right_keys: tuple[str, ...] = ()
    boundaries: tuple[Any, ...] = ()

    def keys_of(self, table: Any, side: int = 0) -> Any:
        """Return the keys of rows of an input, called as those of the first one."""
        return key_table(table, self.right_keys if side else self.keys, self.name, self.keys)

    def bounds(self, samples: Sequence[Any], parts: int) -> Any:
        """Return keys that divide the samples into equal parts, or those that are given."""
        given = [pa.table({self.keys[0]: list(self.boundaries)})] if self.boundaries else samples
        with told(self.name, Where("all inputs"), "keys"):
            keys = concat(given)
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
    """Return columns of a table as keys, in types that can be compared, with the same or new names.

    Raises:
        DataError: A column is missing, or its values have no order.
    """
    if not table.num_columns and not table.num_rows:  # it was empty before anything was known
        return pa.table([pa.nulls(0) for _ in names], names=list(called or names))
    check_columns(f"{who}: the data", names, table)
    columns = [_comparable(table, name, who) for name in names]
    return pa.table(columns, names=list(called or names))


def _comparable(table: Any, name: str, who: str) -> Any:
    values = table.column(name)
    if pa.types.is_dictionary(values.type):
        values = values.cast(values.type.value_type)
    kind = values.type
    if pa.types.is_nested(kind) or isinstance(kind, pa.BaseExtensionType):
        raise DataError(
            f"{who}: the column {name!r} has the type {shown_type(kind)}, which has no order."
        )
    views = {pa.string_view(): pa.large_string(), pa.binary_view(): pa.large_binary()}
    if kind in (*views, pa.float16()):
        values = values.cast(views.get(kind, pa.float32()))
    return one_zero(values).combine_chunks()


def one_zero(values: Any) -> Any:
    """Return values with one zero and one NaN, of any sign before: Arrow compares the bits."""
    if not pa.types.is_floating(values.type) or values.type == pa.float16():
        return values
    values = pc.add(values, pa.scalar(0, values.type))
    return pc.if_else(pc.is_nan(values), pa.scalar(float("nan"), values.type), values)


def key_order(keys: Any, descending: Sequence[bool] = ()) -> Any:
    """Return the numbers of rows in the order of their keys; all but the first ones ascend."""
    down = dict(zip(keys.column_names, descending, strict=False))
    order = [(name, "descending" if down.get(name) else "ascending") for name in keys.column_names]
    return pc.sort_indices(keys, sort_keys=order)


@dataclasses.dataclass(frozen=True)
class KeySample(TableStep):
    """Gives keys of some rows, for the choice of the bounds of partitions."""

    name: str
    how: Ordered
    side: int
    keeps_count = False

    def changed(self, table: Any, where: Where) -> Any:
        rows = np.arange(0, table.num_rows, max(1, table.num_rows // _SAMPLED))
        return self.how.keys_of(table.take(rows), self.side)


# --- joins ------------------------------------------------------------------------------

#: Joins that return rows of one input unchanged.
ONE_SIDED = ("left_semi", "right_semi", "left_anti", "right_anti")
#: Ray's names of joins. Arrow's have spaces.
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

    def outgoing(self, *names: Sequence[str]) -> list[dict[str, str]]:
        """Return the columns of each input that come out, with their new names.

        Args:
            *names: The columns of each input.

        Raises:
            ValueError: Two would have the same name.
        """
        if self.kind in ONE_SIDED:
            return []
        without = 0 if self.kind == "right_outer" else 1  # the input whose keys do not come out
        keys = (self.keys, self.right_keys)
        kept = [
            [name for name in own if side != without or name not in keys[side]]
            for side, own in enumerate(names)
        ]
        both = set.intersection(*map(set, kept))
        found = []
        for own, own_keys, suffix in zip(kept, keys, self.suffixes, strict=True):
            changed = both.difference(own_keys)
            found.append({name: name + (suffix or "") * (name in changed) for name in own})
        new = [name for each in found for name in each.values()]
        if twice := sorted({name for name in new if new.count(name) > 1}):
            raise ValueError(f"join() needs left_suffix or right_suffix (overlapping: {twice}).")
        return found

    def merge(self, sides: Sequence[Sequence[Any]]) -> Any:
        """Join the rows of a partition: Arrow joins keys and row numbers, the rest is taken."""
        tables = [concat(side).combine_chunks() for side in sides]
        keys = [self.keys_of(table, side) for side, table in enumerate(tables)]
        kinds = concat([each.slice(0, 0) for each in keys]).schema
        if not tables[0].num_columns:  # it was empty before anything was known
            tables[0] = kinds.empty_table()
        # Arrow joins no keys of null.
        kinds = [f.with_type(pa.int8()) if pa.types.is_null(f.type) else f for f in kinds]
        left, right = (
            each.cast(pa.schema(kinds)).append_column(f"{ORDER}{side}", [np.arange(len(each))])
            for side, each in enumerate(keys)
        )
        kind = self.kind.replace("_", " ")
        found = left.join(right, list(self.keys), join_type=kind, use_threads=False)
        places = sorted(name for name in found.column_names if name.startswith(ORDER))
        found = found.select([*self.keys, *places])
        found = found.take(key_order(found))
        rows = {int(name[-1]): tables[int(name[-1])].take(found.column(name)) for name in places}
        columns = {}
        for side, names in enumerate(self.outgoing(*(table.column_names for table in tables))):
            for name, new in names.items():
                of_either = self.kind == "full_outer" and not side and name in self.keys
                columns[new] = (found if of_either else rows[side]).column(name)
        return pa.table(columns) if columns else next(iter(rows.values()))
