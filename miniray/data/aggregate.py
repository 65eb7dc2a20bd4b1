"""Aggregations: what is computed of the rows of each group, in parts that are put together.

Each table is aggregated by itself; what comes of that, small as a rule, is brought together by key
and combined. Counts, sums and their like are computed by Arrow, all others by calls in Python.
"""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from miniray.data.blocks import column, pickled, table_to_rows, values_of
from miniray.data.ordered import Ordered, key_order, key_table, one_zero
from miniray.data.tables import concat
from miniray.data.transforms import DataError, Transform, Where, failed

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

#: The key of the one group of aggregations without keys.
ALL = "__miniray_all__"


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
        if not isinstance(name, str):
            raise TypeError(f"AggregateFn(name={name!r}) must be a text.")
        self.name = name
        self._init, self._merge, self._finalize = init, merge, finalize
        self._row, self._block = accumulate_row, accumulate_block

    def partial(self, key: Any, table: Any) -> Any:
        """Return the accumulator of rows of one group."""
        accumulator = self._init(key)
        if self._block is not None:
            return self._block(accumulator, table)
        assert self._row is not None
        for row in table_to_rows(table):
            accumulator = self._row(accumulator, row)
        return accumulator

    def merged(self, accumulators: Sequence[Any]) -> Any:
        """Return the result of the accumulators of one group."""
        found, *others = accumulators
        for each in others:
            found = self._merge(found, each)
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
        if not name:
            raise ValueError(f"Non-empty string has to be provided as name (got {name})")
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
        found = self._zero()
        for each in there:
            found = self.combine(found, each)
        return self.finalize(found)


class _Collected(AggregateFn):
    """What Python makes of values that Arrow has reduced in each table: base of some."""

    def __init__(
        self, word: str, on: str | None, ignore_nulls: bool, alias_name: str | None
    ) -> None:
        self.name, self.on = alias_name or f"{word}({on or ''})", on
        self._ignore_nulls = ignore_nulls

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

    def __init__(self, on: str, alias_name: str | None = None, ignore_nulls: bool = False) -> None:
        super().__init__("list", on, ignore_nulls, alias_name)


class Unique(_Collected):
    """The different values of each group, as a list."""

    def __init__(
        self, on: str | None = None, ignore_nulls: bool = False, alias_name: str | None = None
    ) -> None:
        super().__init__("unique", on, ignore_nulls, alias_name)

    def partial(self, key: Any, table: Any) -> Any:
        values = one_zero(table.column(self.on))
        return pc.unique(values.drop_null() if self._ignore_nulls else values).to_pylist()

    def result(self, values: list[Any]) -> Any:
        return pc.unique(pa.array(values)).to_pylist()


class CountDistinct(Unique):
    """How many different values each group has."""

    def __init__(self, on: str, ignore_nulls: bool = True, alias_name: str | None = None) -> None:
        super().__init__(on, ignore_nulls, alias_name or f"count_distinct({on})")

    def result(self, values: list[Any]) -> Any:
        return len(super().result(values))


class Quantile(_Collected):
    """A quantile of each group, between two values where none is at its place."""

    def __init__(
        self,
        on: str | None = None,
        q: float = 0.5,
        ignore_nulls: bool = True,
        alias_name: str | None = None,
    ) -> None:
        super().__init__("quantile", on, ignore_nulls, alias_name)
        self._q = q

    def result(self, values: list[Any]) -> Any:
        if not values or None in values:
            return None
        return float(np.quantile(np.asarray(values, dtype=float), self._q))


class _ByArrow(AggregateFn):
    """What Arrow computes of tables, and again of the results.

    Attributes:
        word: In the name of the results.
        parts: Functions of Arrow: for rows, and for what these gave.
    """

    word = ""
    parts: tuple[tuple[str, str], ...] = ()

    def __init__(
        self, on: str | None = None, ignore_nulls: bool = True, alias_name: str | None = None
    ) -> None:
        self.name, self.on = alias_name or f"{self.word}({on or ''})", on
        self._ignore_nulls = ignore_nulls

    def options(self, function: str) -> Any:
        """Return the options of a function of Arrow."""
        if function == "count":
            return pc.CountOptions("only_valid" if self._ignore_nulls else "all")
        if function == "variance":
            return pc.VarianceOptions(ddof=0, skip_nulls=self._ignore_nulls)
        return pc.ScalarAggregateOptions(skip_nulls=self._ignore_nulls, min_count=1)

    def result(self, parts: Sequence[Any]) -> Any:
        """Return the results of all groups."""
        return parts[0]


class Count(_ByArrow):
    """How many rows each group has, or values of a column.

    Args:
        on: The column. Default: rows are counted.
        ignore_nulls: Leave out null.
        alias_name: The column of the results.
    """

    word = "count"
    parts = (("count", "sum"),)

    def __init__(
        self, on: str | None = None, ignore_nulls: bool = False, alias_name: str | None = None
    ) -> None:
        super().__init__(on, ignore_nulls, alias_name)


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
    """The standard deviation of each group.

    Args:
        on: The column.
        ddof: What is taken from the number of values before it divides.
        ignore_nulls: Leave out null; otherwise it makes the result null.
        alias_name: The column of the results.
    """

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
        groups = zip(*(part.to_pylist() for part in parts), strict=True)
        return pa.array([self._one(*map(list, group)) for group in groups], pa.float64())

    def _one(self, counts: list[Any], means: list[Any], variances: list[Any]) -> float | None:
        if None in means:
            if not self._ignore_nulls or not any(counts):
                return None
            there = [place for place, mean in enumerate(means) if mean is not None]
            counts, means, variances = ([v[p] for p in there] for v in (counts, means, variances))
        n, mean, variance = map(np.asarray, (counts, means, variances))
        total = int(n.sum())
        if total <= self._ddof:
            return float("nan")
        squares = (n * variance).sum() + (n * (mean - (n * mean).sum() / total) ** 2).sum()
        return float(np.sqrt(squares / (total - self._ddof)))


# --- carrying out -----------------------------------------------------------------------


def runs(keys: Any) -> list[tuple[int, int]]:
    """Return where each group of sorted keys begins and ends."""
    if not keys.num_rows:
        return []
    differs = np.zeros(keys.num_rows - 1, bool)  # from the next row
    for values in keys.combine_chunks().columns:
        found = pc.dictionary_encode(values.chunk(0), null_encoding="encode").indices.to_numpy()
        differs |= found[1:] != found[:-1]
    ends = [*(np.flatnonzero(differs) + 1).tolist(), keys.num_rows]
    return list(zip([0, *ends[:-1]], ends, strict=True))


def _grouped(keys: Any, wanted: Sequence[tuple[str, Any, str, Any]]) -> tuple[Any, list[Any]]:
    """Return the keys of groups, in order, and columns that Arrow computes for them.

    Args:
        keys: The keys of rows.
        wanted: For each column its name, the values, the function and its options.
    """
    table = keys
    calls = []
    for place, (_, values, function, options) in enumerate(wanted):
        table = table.append_column(f"__{place}", values)
        calls.append((f"__{place}", function, options))
    found = table.group_by(keys.column_names, use_threads=False).aggregate(calls)
    found = found.take(key_order(found.select(keys.column_names), [False] * keys.num_columns))
    made = [found.column(f"{name}_{function}") for name, function, _ in calls]
    return found.select(keys.column_names), made


def _part(place: int, number: int) -> str:
    return f"__miniray_{place}_{number}"


@dataclasses.dataclass(frozen=True)
class Partial(Transform):
    """Aggregates each table by itself."""

    keys: tuple[str, ...]
    aggs: tuple[AggregateFn, ...]
    keeps_count = False

    @property
    def name(self) -> str:  # type: ignore[override]
        return f"Aggregate({', '.join(agg.name for agg in self.aggs)})"

    def run(self, tables: Iterator[Any], where: Where) -> Iterator[Any]:
        for table in tables:
            if not table.num_columns:
                continue
            for agg in self.aggs:
                if agg.on is not None and agg.on not in table.column_names:
                    raise DataError(
                        f"{self.name}: {where.label} has no column {agg.on!r}, but "
                        f"{', '.join(table.column_names)}."
                    )
            try:
                yield self._table(table)
            except DataError:
                raise
            except Exception as error:
                raise failed(self.name, where, "rows", error) from error

    def _table(self, table: Any) -> Any:
        keys = pa.table({ALL: np.zeros(table.num_rows, np.int8)})
        if self.keys != (ALL,):
            keys = key_table(table, self.keys, self.name)
        groups = []
        if not all(isinstance(agg, _ByArrow) for agg in self.aggs):
            order = key_order(keys, [False] * keys.num_columns)
            table, keys = table.combine_chunks().take(order), keys.take(order)
            groups = runs(keys)
        wanted = []
        made = {}
        for place, agg in enumerate(self.aggs):
            if isinstance(agg, _ByArrow):
                values = table.column(agg.on) if agg.on is not None else keys.column(0)
                if pa.types.is_null(values.type) and isinstance(agg, Std):
                    values = values.cast(pa.float64())
                for number, (function, _) in enumerate(agg.parts):
                    options = agg.options(function)
                    if agg.on is None:
                        options = pc.CountOptions("all")
                    wanted.append((_part(place, number), values, function, options))
                continue
            names = keys.column_names
            first = keys.take(pa.array([low for low, _ in groups], pa.int64())).to_pylist()
            ids = [tuple(row.values()) if len(names) > 1 else row[names[0]] for row in first]
            made[_part(place, 0)] = pickled(
                [
                    agg.partial(None if self.keys == (ALL,) else key, table.slice(low, high - low))
                    for key, (low, high) in zip(ids, groups, strict=True)
                ]
            )
        found, columns = _grouped(keys, wanted)
        for (name, *_), values in zip(wanted, columns, strict=True):
            found = found.append_column(name, values)
        for name, values in made.items():
            found = found.append_column(name, values)
        return found


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
        table, keys = self._sorted(table, 0)
        wanted = []
        for place, agg in enumerate(self.aggs):
            if isinstance(agg, _ByArrow):
                for number, (_, function) in enumerate(agg.parts):
                    name = _part(place, number)
                    options = None if function == "list" else agg.options(function)
                    wanted.append((name, table.column(name), function, options))
        made, columns = _grouped(keys, wanted)
        parts = {name: values for (name, *_), values in zip(wanted, columns, strict=True)}
        groups = runs(keys)
        for place, agg in enumerate(self.aggs):
            if isinstance(agg, _ByArrow):
                own = [parts[_part(place, number)] for number in range(len(agg.parts))]
                made = made.append_column(agg.name, agg.result(own))
                continue
            values = values_of(table.column(_part(place, 0)))
            try:
                results = [agg.merged(values[low:high]) for low, high in groups]
            except Exception as error:
                raise failed(self.name, Where("the groups"), agg.name, error) from error
            made = made.append_column(agg.name, column(results))
        return made.drop_columns([ALL]) if self.keys == (ALL,) else made
