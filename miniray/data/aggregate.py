"""Aggregations: what is computed of the rows of each group, in parts that are put together.

Each table is aggregated by itself; what comes of that, small as a rule, is brought together by key
and combined. Counts, sums and their like are computed by Arrow, all others by calls in Python.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from miniray.data.blocks import column, pickled, shown_type, table_to_rows, values_of
from miniray.data.ordered import Ordered, key_order, key_table, one_zero
from miniray.data.tables import concat
from miniray.data.transforms import DataError, Transform, Where, check_columns, told

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

#: The key of the one group of aggregations without keys.
ALL = "__miniray_all__"
#: The column of row numbers, and of those of each group, which the call has ``grouped_by`` tell.
ROW, ROWS = "__miniray_row__", "__miniray_row___list"
LISTED = (ROW, "list", None)


class AggregateFn:
    """An aggregation made of functions.

    Args:
        init: Makes the accumulator of a group, of its key.
        merge: Makes one accumulator of two.
        name: The column of the results.
        accumulate_row: Returns an accumulator with a row, a dictionary, added.
        accumulate_block: Returns one with a table of rows added; in place of ``accumulate_row``.
        finalize: Makes the result of an accumulator.
    """

    #: The column that is read; None: any may be.
    on: str | None = None
    name: str

    def __init__(
        self,
        init: Callable[[Any], Any],
        merge: Callable[[Any, Any], Any],
        name: str,
        accumulate_row: Callable[[Any, Any], Any] | None = None,
        accumulate_block: Callable[[Any, Any], Any] | None = None,
        finalize: Callable[[Any], Any] | None = None,
    ) -> None:
        if (accumulate_row is None) == (accumulate_block is None):
            raise ValueError("Exactly one of accumulate_row or accumulate_block must be provided.")
        self.name = name
        self._init, self._merge, self._finalize = init, merge, finalize
        self._row: Any = accumulate_row
        self._block = accumulate_block

    def partial(self, key: Any, table: Any) -> Any:
        """Return the accumulator of rows of one group."""
        if self._block is not None:
            return self._block(self._init(key), table)
        return functools.reduce(self._row, table_to_rows(table), self._init(key))

    def merged(self, accumulators: Sequence[Any]) -> Any:
        """Return the result of the accumulators of one group."""
        found = functools.reduce(self._merge, accumulators)
        return found if self._finalize is None else self._finalize(found)


class AggregateFnV2(AggregateFn):
    """An aggregation as a class, with ``aggregate_block``, ``combine`` and maybe ``finalize``.

    Args:
        name: The column of the results.
        zero_factory: Makes the accumulator of no rows.
        on: The column that is aggregated; None: whole rows.
        ignore_nulls: Leave out accumulators that are None; otherwise one makes the result None.
    """

    def __init__(
        self, name: str, zero_factory: Callable[[], Any], *, on: str | None, ignore_nulls: bool
    ) -> None:
        self.name, self.on = name, on
        self._zero, self._ignore_nulls = zero_factory, ignore_nulls

    def aggregate_block(self, block: Any) -> Any:
        """Return the accumulator of a table of rows."""
        raise NotImplementedError

    def combine(self, current_accumulator: Any, new: Any) -> Any:
        """Return one accumulator of two."""
        raise NotImplementedError

    def finalize(self, accumulator: Any) -> Any:
        """Return the result of an accumulator."""
        return accumulator

    def partial(self, key: Any, table: Any) -> Any:
        return self.aggregate_block(table)

    def merged(self, accumulators: Sequence[Any]) -> Any:
        there = [each for each in accumulators if each is not None]
        if not there or (len(there) < len(accumulators) and not self._ignore_nulls):
            return None
        return self.finalize(functools.reduce(self.combine, there, self._zero()))


class _OfColumn(AggregateFn):
    """An aggregation of a column: base of the named ones.

    Args:
        on: The column.
        ignore_nulls: Leave out null; otherwise it is a value, or makes the result null. Default:
            True, but for lists, different values and counts of rows.
        alias_name: The column of the results. Default: as "sum(column)".
    """

    #: In the name of the results.
    word = ""
    leaves_out_nulls = True
    needs_column = True

    def __init__(
        self,
        on: str | None = None,
        ignore_nulls: bool | None = None,
        alias_name: str | None = None,
    ) -> None:
        if on is None and self.needs_column:
            raise TypeError(f"{type(self).__name__}() needs the name of a column.")
        self.name, self.on = alias_name or f"{self.word}({on or ''})", on
        self._ignore_nulls = self.leaves_out_nulls if ignore_nulls is None else ignore_nulls


class _Collected(_OfColumn):
    """An aggregation in Python over the values of a column, collected from all tables."""

    def partial(self, key: Any, table: Any) -> Any:
        values = table.column(self.on)
        return (values.drop_null() if self._ignore_nulls else values).to_pylist()

    def merged(self, accumulators: Sequence[Any]) -> Any:
        return self.result([value for each in accumulators for value in each])

    def result(self, values: list[Any]) -> Any:
        """Return the result of all values of a group."""
        return values


class AsList(_Collected):
    """The values of each group, as a list."""

    word = "list"

    def __init__(self, on: str, alias_name: str | None = None, ignore_nulls: bool = False) -> None:
        super().__init__(on, ignore_nulls, alias_name)


class Unique(_Collected):
    """The different values of each group, as a list."""

    word = "unique"
    leaves_out_nulls = False

    def partial(self, key: Any, table: Any) -> Any:
        values = one_zero(table.column(self.on))
        return pc.unique(values.drop_null() if self._ignore_nulls else values).to_pylist()

    def result(self, values: list[Any]) -> Any:
        return pc.unique(pa.array(values)).to_pylist()


class CountDistinct(Unique):
    """How many different values each group has."""

    word = "count_distinct"
    leaves_out_nulls = True

    def result(self, values: list[Any]) -> Any:
        return len(super().result(values))


class Quantile(_Collected):
    """A quantile of each group, between two values where none is at its place."""

    word = "quantile"

    def __init__(
        self,
        on: str | None = None,
        q: float = 0.5,
        ignore_nulls: bool = True,
        alias_name: str | None = None,
    ) -> None:
        super().__init__(on, ignore_nulls, alias_name)
        self._q = q

    def result(self, values: list[Any]) -> Any:
        if not values or None in values:
            return None
        return float(np.quantile(np.asarray(values, dtype=float), self._q))


class _ByArrow(_OfColumn):
    """What Arrow computes of tables, and again of the results.

    Attributes:
        parts: Functions of Arrow: for rows, and for what these gave.
    """

    parts: tuple[tuple[str, str], ...] = ()

    def options(self, function: str) -> Any:
        if function == "list":
            return None
        if function == "count":
            return pc.CountOptions("only_valid" if self._ignore_nulls and self.on else "all")
        if function == "variance":
            return pc.VarianceOptions(ddof=0, skip_nulls=self._ignore_nulls)
        return pc.ScalarAggregateOptions(skip_nulls=self._ignore_nulls, min_count=1)

    def result(self, parts: Sequence[Any]) -> Any:
        """Return the results of all groups."""
        return parts[0]


class Count(_ByArrow):
    """How many rows each group has, or values of a column."""

    word = "count"
    parts = (("count", "sum"),)
    leaves_out_nulls = False
    needs_column = False


class Sum(_ByArrow):
    """The sum of each group."""

    word = "sum"
    parts = (("sum", "sum"),)


class Min(_ByArrow):
    """The smallest value of each group."""

    word = "min"
    parts = (("min", "min"),)


class Max(_ByArrow):
    """The largest value of each group."""

    word = "max"
    parts = (("max", "max"),)


class AbsMax(_ByArrow):
    """The largest absolute value of each group."""

    word = "abs_max"
    parts = (("min", "min"), ("max", "max"))

    def result(self, parts: Sequence[Any]) -> Any:
        if pa.types.is_null(parts[0].type):
            return parts[0]
        return pc.max_element_wise(*map(pc.abs, parts), skip_nulls=False)


class Mean(_ByArrow):
    """The mean of each group."""

    word = "mean"
    parts = (("sum", "sum"), ("count", "sum"))

    def result(self, parts: Sequence[Any]) -> Any:
        total, count = parts
        return pc.divide(total.cast(pa.float64()), count.cast(pa.float64()))


class Std(_ByArrow):
    """The standard deviation of each group; ``ddof`` is taken from the number that divides."""

    word = "std"
    parts = (("count", "list"), ("mean", "list"), ("variance", "list"))

    def __init__(
        self,
        on: str | None = None,
        ddof: int = 1,
        ignore_nulls: bool = True,
        alias_name: str | None = None,
    ) -> None:
        super().__init__(on, ignore_nulls, alias_name)
        self._ddof = ddof

    def result(self, parts: Sequence[Any]) -> Any:
        """Put counts, means and variances of parts of each group together."""
        lists = [part.combine_chunks() for part in parts]
        group = pc.list_parent_indices(lists[0]).to_numpy()
        flat = [each.flatten().cast(pa.float64()).to_numpy(zero_copy_only=False) for each in lists]
        known = lists[1].flatten().is_valid().to_numpy(zero_copy_only=False)
        n, mean, variance = (np.where(known, values, 0.0) for values in flat)
        total = np.bincount(group, n)
        with np.errstate(divide="ignore", invalid="ignore"):  # of groups that have no result
            center = np.bincount(group, n * mean) / total
            squares = np.bincount(group, n * (variance + (mean - center[group]) ** 2))
            found = np.sqrt(squares / (total - self._ddof))
        found[total <= self._ddof] = np.nan
        unknown = np.bincount(group, ~known) > 0
        return pa.array(found, mask=total == 0 if self._ignore_nulls else unknown)


# --- carrying out -----------------------------------------------------------------------


def grouped_by(table: Any, keys: Sequence[str], calls: Sequence[tuple[str, str, Any]]) -> Any:
    """Return the keys of each group, in order, with what calls of Arrow compute of its rows.

    A call is a column, a function and its options, or ``LISTED`` for the numbers of the rows.
    """
    if LISTED in calls:
        table = table.append_column(ROW, pa.array(np.arange(table.num_rows)))
    found = table.group_by(list(keys), use_threads=False).aggregate(list(calls))
    return found.take(key_order(found.select(keys), [False] * len(keys)))


def _calls(aggs: Sequence[AggregateFn], *, again: bool) -> list[tuple[str, str, Any]]:
    """Return what Arrow computes for aggregations, of columns that are called by their places."""
    found = [] if all(isinstance(agg, _ByArrow) for agg in aggs) else [LISTED]
    for place, agg in enumerate(aggs):
        if isinstance(agg, _ByArrow):
            for one, two in agg.parts:
                name, function = (_column(place, one), two) if again else (_column(place), one)
                found.append((name, function, agg.options(function)))
    return found


def _column(place: int, *functions: str) -> str:
    return "_".join([f"__miniray_{place}", *functions])


@dataclasses.dataclass(frozen=True)
class Partial(Transform):
    """Aggregates each table by itself."""

    name: str
    keys: tuple[str, ...]
    aggs: tuple[AggregateFn, ...]
    keeps_count = False

    def run(self, tables: Iterator[Any], where: Where) -> Iterator[Any]:
        for table in tables:
            if not table.num_columns:
                continue
            used = [agg.on for agg in self.aggs if agg.on is not None]
            check_columns(f"{self.name}: {where.label}", used, table)
            with told(self.name, where):
                yield self._table(table, where)

    def _table(self, table: Any, where: Where) -> Any:
        keys = pa.table({ALL: np.zeros(table.num_rows, np.int8)})
        if self.keys != (ALL,):
            keys = key_table(table, self.keys, self.name)
        columns = keys
        for place, agg in enumerate(self.aggs):
            if not isinstance(agg, _ByArrow):
                continue
            values = keys.column(0) if agg.on is None else table.column(agg.on)
            if pa.types.is_null(values.type) and isinstance(agg, Std):
                values = values.cast(pa.float64())
            columns = columns.append_column(_column(place), values)
        try:
            found = grouped_by(columns, self.keys, _calls(self.aggs, again=False))
        except pa.ArrowNotImplementedError:
            used = dict.fromkeys(agg.on for agg in self.aggs if agg.on is not None)
            typed = [f"{name} ({shown_type(table.field(name).type)})" for name in used]
            raise DataError(
                f"{self.name} can't be computed of {', '.join(typed)}, as in {where.label}."
            ) from None
        if ROWS not in found.column_names:
            return found
        whole = table.combine_chunks()
        rows = [whole.take(numbers.values) for numbers in found.column(ROWS)]
        ids = [self._key(*key.values()) for key in found.select(self.keys).to_pylist()]
        for place, agg in enumerate(self.aggs):
            if not isinstance(agg, _ByArrow):
                found = found.append_column(
                    _column(place), pickled(list(map(agg.partial, ids, rows)))
                )
        return found.drop_columns([ROWS])

    def _key(self, *values: Any) -> Any:
        """Return the key of a group as users know it."""
        return None if self.keys == (ALL,) else values if values[1:] else values[0]


@dataclasses.dataclass(frozen=True)
class Combine(Ordered):
    """Combines what tables gave by themselves. Groups come in the order of their keys."""

    aggs: tuple[AggregateFn, ...] = ()
    name: str = "Aggregate"
    keeps_count = False

    def merge(self, sides: Sequence[Sequence[Any]]) -> Any:
        table = concat(sides[0])
        if not table.num_columns:
            return table
        found = grouped_by(table, self.keys, _calls(self.aggs, again=True))
        made = found.select(self.keys)
        for place, agg in enumerate(self.aggs):
            if isinstance(agg, _ByArrow):
                results = agg.result([found.column(_column(place, *part)) for part in agg.parts])
            else:
                values = values_of(table.column(_column(place)))
                groups = [[values[n] for n in rows] for rows in found.column(ROWS).to_pylist()]
                with told(self.name, Where("the groups"), agg.name):
                    results = column(list(map(agg.merged, groups)))
            made = made.append_column(agg.name, results)
        return made.drop_columns([ALL]) if self.keys == (ALL,) else made
