"""Aggregations: values of the rows of each group, computed in parts that are combined.

Each table is aggregated by itself; the results, small as a rule, are brought together by key and
combined. Those that are named here are computed by Arrow and NumPy for all groups at once, those
of users by a call for each group.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from miniray.common.absent import lazy
from miniray.data.blocks import Pickled, column, pickled, table_to_rows, values_of
from miniray.data.exchange import sliced
from miniray.data.ordered import Ordered, key_order, key_table, one_zero
from miniray.data.tables import concat
from miniray.data.transforms import TableStep, Where, check_columns, told

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

#: The key of the one group of aggregations without keys.
ALL = "__miniray_all__"
#: The column of row numbers, and of the lists of them per group that ``LISTED`` adds.
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

    #: Functions of Arrow: for rows, and for their results. Empty: ``partials`` makes these.
    parts: ClassVar[tuple[tuple[str, str], ...]] = ()
    #: Tests of a type: values become floats before they are aggregated if it passes one.
    floats: ClassVar[tuple[Callable[[Any], bool], ...]] = ()
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

        def by_row(found: Any, table: Any) -> Any:
            row: Any = accumulate_row
            return functools.reduce(row, table_to_rows(table), found)

        self.name = name
        self._init, self._block, self._merge = init, accumulate_block or by_row, merge
        self._finalize = finalize or (lambda found: found)

    def of_nothing(self) -> Any:
        """Return the result of no rows."""
        return self._finalize(self._init(None))

    def partials(self, table: Any, keys: Any, rows: Any) -> Any:
        """Return the accumulators of all groups, as a column.

        Args:
            table: The rows of all groups.
            keys: The key columns, with a row for each group.
            rows: For each group the list of the numbers of its rows.
        """
        found = [tuple(key.values()) for key in keys.to_pylist()]
        ids = [None if keys.column_names == [ALL] else key if key[1:] else key[0] for key in found]
        ends = np.cumsum(pc.list_value_length(rows)).tolist()
        groups = sliced(table.take(rows.flatten()), ends)
        return pickled(list(map(self._block, map(self._init, ids), groups)))

    def results(self, *parts: Any) -> Any:
        """Return the results of all groups.

        Args:
            *parts: What the second functions of ``parts`` have made; if there are none, all
                accumulators, and for each group the list of the numbers of its own.
        """
        made, rows = parts
        values = values_of(made)
        groups = ([values[n] for n in each] for each in rows.to_pylist())
        return column([self._finalize(functools.reduce(self._merge, each)) for each in groups])


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
        def merge(one: Any, other: Any) -> Any:
            if one is None or other is None:
                return (other if one is None else one) if ignore_nulls else None
            return self.combine(one, other)

        super().__init__(
            lambda _: None if ignore_nulls else zero_factory(),
            merge,
            name,
            accumulate_block=lambda found, block: merge(found, self.aggregate_block(block)),
            finalize=lambda found: None if found is None else self.finalize(found),
        )
        self.on = self._target_col_name = on  # the latter as Ray calls it

    def aggregate_block(self, block: Any) -> Any:
        """Return the accumulator of a table of rows."""
        raise NotImplementedError

    def combine(self, current_accumulator: Any, new: Any) -> Any:
        """Return one accumulator of two."""
        raise NotImplementedError

    def finalize(self, accumulator: Any) -> Any:
        """Return the result of an accumulator."""
        return accumulator


class _OfColumn(AggregateFn):
    """An aggregation of a column: base of the named ones.

    Args:
        on: The column.
        ignore_nulls: Leave out null; otherwise it is a value, or makes the result null. Default:
            True, but for lists, different values and counts of rows.
        alias_name: The column of the results. Default: as "sum(column)".

    Attributes:
        word: In the name of the results.
        nothing: The result of no rows.
    """

    word: str
    leaves_out_nulls = True
    nothing: Any = None

    def __init__(
        self, on: str, ignore_nulls: bool | None = None, alias_name: str | None = None
    ) -> None:
        if on is None:
            raise TypeError(f"{type(self).__name__}() needs the name of a column.")
        self.on = on
        self.name = alias_name or f"{self.word}({on})"
        self._ignore_nulls = self.leaves_out_nulls if ignore_nulls is None else ignore_nulls

    def of_nothing(self) -> Any:
        return self.nothing

    def options(self, function: str) -> Any:
        """Return the options of a function of Arrow."""
        skip = self._ignore_nulls
        if function == "list":
            return None
        if function == "count":
            return pc.CountOptions("only_valid" if skip else "all")
        if function == "variance":
            return pc.VarianceOptions(ddof=0, skip_nulls=skip)
        return pc.ScalarAggregateOptions(skip_nulls=skip, min_count=1)

    def results(self, *parts: Any) -> Any:
        return parts[0]


def _groups(lists: Any) -> Any:
    """Return for each value of lists the number of its list."""
    return pc.list_parent_indices(lists).to_numpy()


class _OfLists(_OfColumn):
    """An aggregation of the list of all values of a group: base of such.

    Attributes:
        distinct: Whether the list has each value once.
    """

    distinct = False
    nothing: Any = ()

    def partials(self, table: Any, keys: Any, rows: Any) -> Any:
        values = table.column(self.on)
        if pa.types.is_dictionary(values.type):
            values = values.cast(values.type.value_type)
        values = values.take(rows.flatten()).combine_chunks()
        return self._lists(values, _groups(rows), len(rows))

    def results(self, *parts: Any) -> Any:
        made, rows = parts
        lists = made.combine_chunks().take(rows.flatten())
        return self.of_lists(self._lists(lists.flatten(), _groups(rows)[_groups(lists)], len(rows)))

    def _lists(self, values: Any, group: Any, groups: int) -> Any:
        """Return the list of the values of each group; ``group`` has the one of each value."""
        if self._ignore_nulls:
            group, values = group[np.asarray(values.is_valid())], values.drop_null()
        if self.distinct:
            values = one_zero(values)
            pairs = {"group": group, "value": values, ROW: np.arange(len(group))}
            # Arrow gives pairs in any order.
            found = pa.table(pairs).group_by(["group", "value"], use_threads=False)
            first = np.sort(found.aggregate([(ROW, "min")]).column(f"{ROW}_min"))
            group, values = group[first], values.take(first)
        ends = np.cumsum(np.bincount(group, minlength=groups))
        return pa.ListArray.from_arrays(np.append(0, ends).astype(np.int32), values)

    def of_lists(self, lists: Any) -> Any:
        """Return the results of all groups, of the lists of their values."""
        return lists


class AsList(_OfLists):
    """The values of each group, as a list."""

    word = "list"

    def __init__(self, on: str, alias_name: str | None = None, ignore_nulls: bool = False) -> None:
        super().__init__(on, ignore_nulls, alias_name)

    def partials(self, table: Any, keys: Any, rows: Any) -> Any:
        lists = super().partials(table, keys, rows)
        if isinstance(lists.type.value_type, pa.BaseExtensionType):  # other tables may have others
            return pickled([values_of(each.values) for each in lists])
        return lists

    def results(self, *parts: Any) -> Any:
        made, rows = parts
        if not isinstance(made.type, Pickled):
            return super().results(*parts)
        values = values_of(made)
        return pickled([[v for n in each for v in values[n]] for each in rows.to_pylist()])


class Unique(_OfLists):
    """The different values of each group, as a list."""

    word = "unique"
    leaves_out_nulls = False
    distinct = True


class CountDistinct(Unique):
    """How many different values each group has."""

    word = "count_distinct"
    leaves_out_nulls = True
    nothing = 0

    def of_lists(self, lists: Any) -> Any:
        return pc.list_value_length(lists).cast(pa.int64())


class Quantile(_OfLists):
    """A quantile of each group, between two values where none is at its place, without NaN."""

    word = "quantile"
    nothing = None

    def __init__(
        self, on: str, q: float = 0.5, ignore_nulls: bool = True, alias_name: str | None = None
    ) -> None:
        super().__init__(on, ignore_nulls, alias_name)
        self._q = q

    def of_lists(self, lists: Any) -> Any:
        options = pc.QuantileOptions(self._q, skip_nulls=self._ignore_nulls)
        numbers = (each.values.cast(pa.float64(), safe=False) for each in lists)
        found = (pc.quantile(each, options=options)[0].as_py() for each in numbers)
        return pa.array(found, pa.float64())


class Count(_OfColumn):
    """How many rows each group has, or values of a column."""

    word = "count"
    parts = (("count", "sum"),)
    nothing = 0

    def __init__(
        self, on: str | None = None, ignore_nulls: bool = False, alias_name: str | None = None
    ) -> None:
        super().__init__(on or "", ignore_nulls and on is not None, alias_name)
        self.on = on


class Sum(_OfColumn):
    """The sum of each group."""

    word = "sum"
    parts = (("sum", "sum"),)


class Min(_OfColumn):
    """The smallest value of each group."""

    word = "min"
    parts = (("min", "min"),)


class Max(_OfColumn):
    """The largest value of each group."""

    word = "max"
    parts = (("max", "max"),)


class AbsMax(_OfColumn):
    """The largest absolute value of each group."""

    word = "abs_max"
    parts = (("min", "min"), ("max", "max"))

    def results(self, *parts: Any) -> Any:
        if pa.types.is_null(parts[0].type):
            return parts[0]
        return pc.max_element_wise(*map(pc.abs, parts), skip_nulls=False)


class Mean(_OfColumn):
    """The mean of each group."""

    word = "mean"
    parts = (("sum", "sum"), ("count", "sum"))
    floats = (pa.types.is_null, pa.types.is_integer)  # whose sum may be too large

    def results(self, *parts: Any) -> Any:
        return pc.divide(*(part.cast(pa.float64()) for part in parts))


class Std(_OfColumn):
    """The standard deviation of each group; ``ddof`` is taken from the number that divides."""

    word = "std"
    parts = (("count", "list"), ("mean", "list"), ("variance", "list"))
    floats = (*Mean.floats, pa.types.is_decimal)  # whose mean is rounded as they are

    def __init__(
        self, on: str, ddof: int = 1, ignore_nulls: bool = True, alias_name: str | None = None
    ) -> None:
        super().__init__(on, ignore_nulls, alias_name)
        self._ddof = ddof

    def results(self, *parts: Any) -> Any:
        """Put counts, means and variances of parts of each group together."""
        lists = [part.combine_chunks() for part in parts]
        group = _groups(lists[0])
        flat = [each.flatten().cast(pa.float64()) for each in lists]
        null = np.bincount(group, flat[1].is_null().to_numpy(zero_copy_only=False)) > 0
        n, mean, variance = (each.fill_null(0).to_numpy() for each in flat)
        total = np.bincount(group, n)
        with np.errstate(divide="ignore", invalid="ignore"):  # of groups that have no result
            center = np.bincount(group, n * mean) / total
            squares = np.bincount(group, n * (variance + (mean - center[group]) ** 2))
            found = np.sqrt(squares / (total - self._ddof))
        found[total <= self._ddof] = np.nan
        return pa.array(found, mask=total == 0 if self._ignore_nulls else null)


# --- carrying out -----------------------------------------------------------------------


def grouped_by(table: Any, keys: Sequence[str], calls: Sequence[Any] = (LISTED,)) -> Any:
    """Return the keys of each group, in order, with the results of calls of Arrow on its rows.

    A call is a column, a function and its options, or ``LISTED`` for the numbers of the rows.
    """
    if LISTED in calls:
        table = table.append_column(ROW, pa.array(np.arange(table.num_rows)))
    found = table.group_by(list(keys), use_threads=False).aggregate(list(calls))
    return found.take(key_order(found.select(keys)))


def _calls(aggs: Sequence[Any], step: int) -> list[Any]:
    """Return the calls of Arrow on rows, or in step 1 on their results, in columns by place."""
    found: list[Any] = [] if all(agg.parts for agg in aggs) else [LISTED]
    for place, agg in enumerate(aggs):
        for part in agg.parts:
            call = _column(place, *part[:step]), part[step], agg.options(part[step])
            found.append(call)
    return found


def _column(place: int, *functions: str) -> str:
    return "_".join([f"__miniray_{place}", *functions])


@dataclasses.dataclass(frozen=True)
class Partial(TableStep):
    """Aggregates each table by itself."""

    name: str
    keys: tuple[str, ...]
    aggs: tuple[AggregateFn, ...]
    keeps_count = False

    def schema(self, schema: Any) -> Any:
        return None

    def changed(self, table: Any, where: Where) -> Any:
        used = [agg.on for agg in self.aggs if agg.on is not None]
        check_columns(f"{self.name}: {where.label}", used, table)
        with told(self.name, where):
            columns = pa.table({ALL: np.zeros(table.num_rows, np.int8)})
            if self.keys != (ALL,):
                columns = key_table(table, self.keys, self.name)
            for place, agg in enumerate(self.aggs):
                values = columns.column(0) if agg.on is None else table.column(agg.on)
                if any(is_kind(values.type) for is_kind in agg.floats):
                    values = values.cast(pa.float64(), safe=False)
                columns = columns.append_column(_column(place), values)
            found = grouped_by(columns, self.keys, _calls(self.aggs, 0))
            if ROWS not in found.column_names:
                return found
            whole, keys = table.combine_chunks(), found.select(self.keys)
            rows = found.column(ROWS).combine_chunks()
            for place, agg in enumerate(self.aggs):
                if not agg.parts:
                    found = found.append_column(_column(place), agg.partials(whole, keys, rows))
            return found.drop_columns([ROWS])


@dataclasses.dataclass(frozen=True)
class Combine(Ordered):
    """Combines what tables gave by themselves. Groups come in the order of their keys."""

    aggs: tuple[Any, ...] = ()
    name: str = "Aggregate"
    keeps_count = False

    def merge(self, sides: Sequence[Sequence[Any]]) -> Any:
        table = concat(sides[0])
        if not table.num_rows and self.keys == (ALL,):
            with told(self.name, Where("no rows")):
                return pa.table({agg.name: column([agg.of_nothing()]) for agg in self.aggs})
        if not table.num_columns:
            return table
        found = grouped_by(table, self.keys, _calls(self.aggs, 1))
        made = found.select([key for key in self.keys if key != ALL])
        for place, agg in enumerate(self.aggs):
            parts = [found.column(_column(place, *part)) for part in agg.parts]
            parts = parts or [table.column(_column(place)), found.column(ROWS).combine_chunks()]
            with told(self.name, Where("the groups"), agg.name):
                made = made.append_column(agg.name, agg.results(*parts))
        return made


#: Aggregations of Ray that are not here, and what to do instead.
_ABSENT = {
    "Approximate*": "Quantile() and groupby(column).count() are exact",
    "MissingValuePercentage": "Count(column, ignore_nulls=True) beside Count() tells it",
    "ValueCounter": "groupby(column).count() has how often each value comes",
    "VectorizedAggregateFnV2": "AggregateFnV2 gets tables of Arrow",
    "ZeroPercentage": "Mean() of a column that is 1 where the other is zero tells it",
}

if not TYPE_CHECKING:  # else a type checker takes any name for one that is there
    __getattr__, _ = lazy(__name__, {}, of_ray=_ABSENT)
