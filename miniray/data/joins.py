"""Joins of two datasets by key columns."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from miniray.data.blocks import concat
from miniray.data.exchange import ORDER
from miniray.data.ordered import Ordered, key_order, key_table

if TYPE_CHECKING:
    from collections.abc import Sequence

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
        right_keys: The keys of the second input.
        kind: One of ``JOINS``.
        suffixes: Behind names that both inputs have.
    """

    right_keys: tuple[str, ...] = ()
    kind: str = "inner"
    suffixes: tuple[str | None, str | None] = (None, None)
    name: str = "Join"
    keeps_count = False

    def side_keys(self, side: int) -> tuple[str, ...]:
        """Return the keys of an input."""
        return self.right_keys if side else self.keys

    def check_names(self, left: Sequence[str], right: Sequence[str]) -> tuple[list[str], list[str]]:
        """Return what the columns of both inputs are called in what comes out.

        Raises:
            ValueError: Two would have the same name.
        """
        gone = set(self.keys if self.kind == "right_outer" else self.right_keys)
        kept = [set(left), set(right) - gone]
        if self.kind == "right_outer":
            kept = [set(left) - gone, set(right)]
        both = kept[0] & kept[1]
        if self.kind.endswith(("semi", "anti")):
            both, kept = set(), [set(), set()]  # columns of one side alone come out
        if both and self.suffixes == (None, None):
            raise ValueError(
                f"Left and right columns suffixes cannot be both None (overlapping columns: "
                f"{sorted(both)}). Pass left_suffix or right_suffix to join()."
            )
        made = [
            [
                name + (suffix or "") if name in both and name not in self.side_keys(side) else name
                for name in names
            ]
            for side, (names, suffix) in enumerate(zip((left, right), self.suffixes, strict=True))
        ]
        of_right = [new for old, new in zip(right, made[1], strict=True) if old in kept[1]]
        of_left = [new for old, new in zip(left, made[0], strict=True) if old in kept[0]]
        twice = set(of_left) & set(of_right)
        if twice:
            raise ValueError(
                f"join(): both sides have {sorted(twice)} with these suffixes; use other ones."
            )
        return made[0], made[1]

    def merge(self, sides: Sequence[Sequence[Any]]) -> Any:
        """Join the rows of a partition: Arrow joins keys and row numbers, the rest is taken."""
        (left, left_keys), (right, right_keys) = (
            self._sorted(concat(tables), side) for side, tables in enumerate(sides)
        )
        keys = concat([left_keys.slice(0, 0), right_keys.slice(0, 0)]).schema
        for place, field in enumerate(keys):
            if pa.types.is_null(field.type):  # Arrow joins no keys of this type
                keys = keys.set(place, field.with_type(pa.int8()))
        rows = [
            table.cast(keys).append_column(ORDER + name, pa.array(np.arange(len(table))))
            for name, table in (("0", left_keys), ("1", right_keys))
        ]
        found = rows[0].join(
            rows[1], list(self.keys), join_type=JOINS[self.kind], use_threads=False
        )
        places = [name for name in found.column_names if name.startswith(ORDER)]
        found = found.select(sorted(places)).sort_by(
            [(name, "ascending") for name in sorted(places)]
        )
        if self.kind.endswith(("semi", "anti")):
            return (left if places == [ORDER + "0"] else right).take(found.column(0))
        names = self.check_names(left.column_names, right.column_names)
        left, right = left.take(found.column(0)), right.take(found.column(1))
        return self._together(left, right, names)

    def _together(self, left: Any, right: Any, names: tuple[list[str], list[str]]) -> Any:
        """Return rows of both inputs beside each other."""
        into_right = self.kind == "right_outer"
        pairs = dict(zip(self.keys, self.right_keys, strict=True))
        columns: list[Any] = []
        called: list[str] = []
        for name, new in zip(left.column_names, names[0], strict=True):
            values = left.column(name)
            if name in pairs and self.kind == "full_outer" and pairs[name] in right.column_names:
                other = right.column(pairs[name])
                kind = concat([pa.table({"_": v.slice(0, 0)}) for v in (values, other)])
                kind = kind.schema.field(0).type
                values = pc.coalesce(values.cast(kind), other.cast(kind))
            if name not in pairs or not into_right:
                columns.append(values)
                called.append(new)
        for name, new in zip(right.column_names, names[1], strict=True):
            if name not in self.right_keys or into_right:
                columns.append(right.column(name))
                called.append(new)
        table = pa.table(columns, names=called) if columns else left
        if self.kind in ("full_outer", "right_outer") and columns:
            sorted_by = self.right_keys if into_right else self.keys
            table = table.take(key_order(key_table(table, sorted_by, self.name), self.descending))
        return table
