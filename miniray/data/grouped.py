"""``GroupedData``: what ``Dataset.groupby`` returns."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any

from miniray.data.aggregate import (
    ALL,
    LISTED,
    ROWS,
    AggregateFn,
    Combine,
    Count,
    Max,
    Mean,
    Min,
    Partial,
    Std,
    Sum,
    grouped_by,
)
from miniray.data.blocks import check_format
from miniray.data.context import compute_of, udf_of
from miniray.data.ordered import Ordered, key_table
from miniray.data.plan import Apply, Exchange, optimised, schema_of
from miniray.data.transforms import MapBatches

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from miniray.data.plan import PlanNode


@dataclasses.dataclass(frozen=True)
class MapGroups(MapBatches):
    """Calls a function for each group of a partition, whose rows are sorted by key."""

    keys: tuple[str, ...] = ()
    called = ", a group,"

    def batches(self, tables: Iterator[Any]) -> Iterator[Any]:
        for table in tables:
            if not self.keys or not table.num_rows:
                yield table
                continue
            keys = key_table(table, self.keys, self.name)
            for rows in grouped_by(keys, keys.column_names, [LISTED]).column(ROWS):
                yield table.slice(rows[0].as_py(), len(rows))


def known_columns(plan: PlanNode) -> list[str] | None:
    """Return the columns of a plan; None if only executing it tells."""
    schema = schema_of(optimised(plan))
    return None if schema is None else list(schema.names)


def key_names(caller: str, key: Any, columns: Sequence[str] | None) -> tuple[str, ...]:
    """Return the names of key columns.

    Args:
        caller: The method, for messages.
        key: A name, or several.
        columns: Those that there are, if they are known.

    Raises:
        ValueError: They are no names, or no such columns.
    """
    names = (key,) if isinstance(key, str) else key
    if not isinstance(names, list | tuple) or not all(isinstance(name, str) for name in names):
        raise ValueError(f"{caller}({key!r}): key must be a string or a list of strings.")
    if len(set(names)) < len(names):
        raise ValueError(f"{caller}({list(names)}) names a column twice.")
    missing = [name for name in names if columns and name not in columns]
    if missing:
        raise ValueError(
            f"{caller}(): there is no column {missing[0]!r} in the dataset. The dataset has "
            f"columns: {', '.join(columns or ())}."
        )
    return tuple(names)


class Aggregating:
    """Aggregations of columns.

    Of a dataset each returns the value of a column, a dictionary of those of several, or None of
    no rows; of its groups a dataset with a row for each. ``on``: a column, or a list of columns;
    by default all. ``ignore_nulls``: leave out null, which otherwise makes the result null.
    """

    def _over(self, kind: type[AggregateFn], on: Any, **options: Any) -> Any:
        """Aggregate each of the columns."""
        raise NotImplementedError

    def sum(self, on: str | list[str] | None = None, ignore_nulls: bool = True) -> Any:
        """Compute sums."""
        return self._over(Sum, on, ignore_nulls=ignore_nulls)

    def min(self, on: str | list[str] | None = None, ignore_nulls: bool = True) -> Any:
        """Find the smallest values."""
        return self._over(Min, on, ignore_nulls=ignore_nulls)

    def max(self, on: str | list[str] | None = None, ignore_nulls: bool = True) -> Any:
        """Find the largest values."""
        return self._over(Max, on, ignore_nulls=ignore_nulls)

    def mean(self, on: str | list[str] | None = None, ignore_nulls: bool = True) -> Any:
        """Compute means."""
        return self._over(Mean, on, ignore_nulls=ignore_nulls)

    def std(
        self, on: str | list[str] | None = None, ddof: int = 1, ignore_nulls: bool = True
    ) -> Any:
        """Compute standard deviations, divided by rows - ddof."""
        return self._over(Std, on, ddof=ddof, ignore_nulls=ignore_nulls)


class GroupedData(Aggregating):
    """The groups of a dataset.

    Args:
        dataset: The dataset.
        key: The columns whose values name the groups; None: all rows are one group.
        num_partitions: Of how many parts results are made. Default: by their bytes.
    """

    def __init__(self, dataset: Any, key: Any, num_partitions: int | None = None) -> None:
        self._dataset = dataset
        self._columns = known_columns(dataset._plan)
        self._keys = () if key is None else key_names("groupby", key, self._columns)
        self._partitions = num_partitions

    def aggregate(self, *aggs: AggregateFn) -> Any:
        """Return a dataset with a row for each group, in the order of their keys.

        Args:
            *aggs: Of ``miniray.data.aggregate``.

        Raises:
            TypeError: One is no aggregation.
            ValueError: There is none, or two have the same name.
        """
        for agg in aggs:
            if not isinstance(agg, AggregateFn):
                raise TypeError(f"aggregate({agg!r:.60}) is no miniray.data.aggregate.AggregateFn.")
            if agg.on is not None:
                key_names(agg.name, agg.on, self._columns)
        names = [*self._keys, *(agg.name for agg in aggs)]
        if not aggs or len(set(names)) < len(names):
            raise ValueError(f"aggregate() needs aggregations of different names, not {names}.")
        keys = self._keys or (ALL,)
        below = Apply((self._dataset._plan,), Partial(keys, aggs))
        how = Combine(keys, (False,) * len(keys), aggs=aggs)
        return self._dataset._of(Exchange((below,), how, self._partitions))

    def _over(self, kind: type[Any], on: Any, **options: Any) -> Any:
        """Aggregate all columns that are no keys, if ``on`` is None."""
        if on is None:
            known = self._columns or self._dataset.columns() or []
            on = [name for name in known if name not in self._keys]
        columns = [on] if isinstance(on, str) else list(on)
        if not columns:
            raise ValueError("At least 1 column to aggregate on has to be provided")
        return self.aggregate(*(kind(column, **options) for column in columns))

    def count(self) -> Any:
        """Return how many rows each group has."""
        return self.aggregate(Count())

    def map_groups(
        self,
        fn: Callable[..., Any] | type,
        *,
        zero_copy_batch: bool = True,
        batch_format: str | None = "default",
        **options: Any,
    ) -> Any:
        """Call a function for each group, in the order of their keys.

        Args:
            fn: Gets all rows of a group as a batch, and returns one or yields several.
            zero_copy_batch: Pass arrays that can't be written to, and save the copy.
            batch_format: As of ``Dataset.map_batches``.
            **options: As of ``Dataset.map``.
        """
        check_format("map_groups", batch_format)
        udf = udf_of("map_groups", fn, options)
        how = Ordered(self._keys, (False,) * len(self._keys), name="GroupBy")
        plan = self._dataset._plan
        below = Exchange((plan,), how, self._partitions if self._keys else 1)
        step = MapGroups(
            udf, "MapGroups", None, batch_format, zero_copy_batch, True, keys=self._keys
        )
        return self._dataset._of(Apply((below,), step, compute_of("map_groups", udf, options)))

    def __repr__(self) -> str:
        return f"GroupedData(key={list(self._keys)})"
