"""The methods of a dataset that bring rows into other places, group them, or join datasets."""

from __future__ import annotations

import dataclasses
import random
from typing import TYPE_CHECKING, Any

from miniray.common.absent import AbsentAttribute
from miniray.data.aggregate import (
    ALL,
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
    Unique,
    grouped_by,
)
from miniray.data.batches import check_whole
from miniray.data.blocks import check_format
from miniray.data.consumption import Consumption
from miniray.data.context import called_with
from miniray.data.exchange import Aligned, Numbered
from miniray.data.ordered import JOINS, Join, Ordered, key_table
from miniray.data.plan import Exchange, PlanNode, Regroup, Stage, optimised, schema_of
from miniray.data.tables import Rows
from miniray.data.transforms import MapBatches

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from miniray.data.exchange import How


@dataclasses.dataclass(frozen=True)
class MapGroups(MapBatches):
    """Calls a function for each group of a partition, whose rows are sorted by key."""

    keys: tuple[str, ...] = ()

    def batches(self, tables: Iterator[Any]) -> Iterator[Rows]:
        for table in filter(len, tables):
            whole = Rows.of(table)
            if not self.keys:
                yield whole
                continue
            keys = key_table(table, self.keys, self.name)
            for rows in grouped_by(keys, self.keys).column(ROWS):
                yield whole.slice(rows[0].as_py(), len(rows))


def known_columns(plan: PlanNode) -> list[str] | None:
    """Return the columns of a plan; None if only executing it shows them."""
    schema = schema_of(optimised(plan))
    return None if schema is None else list(schema.names)


def key_names(caller: str, key: Any, columns: Sequence[str] | None = None) -> tuple[str, ...]:
    """Return ``key``, one or several names of columns, as a tuple.

    Raises:
        ValueError: They are no names, or not among the columns, if these are known.
    """
    names = (key,) if isinstance(key, str) else key
    if not isinstance(names, list | tuple) or not all(isinstance(name, str) for name in names):
        raise ValueError(f"{caller}({key!r}): columns are a string or a list of strings.")
    if len(set(names)) < len(names):
        raise ValueError(f"{caller}({list(names)}) names a column twice.")
    known = columns or names
    for name in names:
        if name not in known:
            there = ", ".join(known)
            raise ValueError(f"{caller}(): there is no column {name!r} among the columns: {there}.")
    return tuple(names)


class Aggregating:
    """Aggregations of columns.

    Of a dataset each returns the value of a column, or a dictionary of those of several; they are
    None if there are no rows. Of groups each returns a dataset with a row for each group. ``on``: a
    column, or a list of columns; by default all. ``ignore_nulls``: leave out null, which otherwise
    makes the result null.
    """

    def _over(self, kind: type[AggregateFn], on: Any, **options: Any) -> Any:
        raise NotImplementedError

    def sum(self, on: str | list[str] | None = None, ignore_nulls: bool = True) -> Any:
        return self._over(Sum, on, ignore_nulls=ignore_nulls)

    def min(self, on: str | list[str] | None = None, ignore_nulls: bool = True) -> Any:
        return self._over(Min, on, ignore_nulls=ignore_nulls)

    def max(self, on: str | list[str] | None = None, ignore_nulls: bool = True) -> Any:
        return self._over(Max, on, ignore_nulls=ignore_nulls)

    def mean(self, on: str | list[str] | None = None, ignore_nulls: bool = True) -> Any:
        return self._over(Mean, on, ignore_nulls=ignore_nulls)

    def std(
        self, on: str | list[str] | None = None, ddof: int = 1, ignore_nulls: bool = True
    ) -> Any:
        """Compute standard deviations, divided by rows - ddof."""
        return self._over(Std, on, ddof=ddof, ignore_nulls=ignore_nulls)


def _parts(caller: str, name: str, number: int | None) -> int | None:
    """Return a number of blocks or partitions of the user, or None."""
    return None if number is None else check_whole(caller, name, number, 1)


class GroupedData(Aggregating):
    """The groups of a dataset; see ``Dataset.groupby``."""

    def __init__(self, dataset: Any, key: Any, num_partitions: int | None = None) -> None:
        self._dataset = dataset
        self._columns = known_columns(dataset._plan)
        self._keys = () if key is None else key_names("groupby", key, self._columns)
        partitions = _parts("groupby", "num_partitions", num_partitions)
        self._partitions = partitions if self._keys else 1

    def aggregate(self, *aggs: AggregateFn) -> Any:
        """Return a dataset with a row for each group, in the order of their keys.

        Args:
            *aggs: Of ``miniray.data.aggregate``.

        Raises:
            TypeError: One is not an aggregation.
            ValueError: There is none, or two have the same name.
        """
        for agg in aggs:
            if not isinstance(agg, AggregateFn):
                raise TypeError(f"aggregate({agg!r:.60}) is no miniray.data.aggregate.AggregateFn.")
            if agg.on is not None:
                key_names("aggregate", agg.on, self._columns)
        names = [*self._keys, *(agg.name for agg in aggs)]
        if not aggs or len(set(names)) < len(names):
            raise ValueError(f"aggregate() needs aggregations of different names, not {names}.")
        keys = self._keys or (ALL,)
        step = Partial(f"Aggregate({', '.join(agg.name for agg in aggs)})", keys, aggs)
        below = Stage((self._dataset._plan,), (step,))
        how = Combine(keys, aggs=aggs)
        return self._dataset._of(Exchange((below,), how, self._partitions))

    def _over(self, kind: type[Any], on: Any, **options: Any) -> Any:
        """Aggregate all columns that are no keys, if ``on`` is None."""
        if on is None:
            known = self._columns or self._dataset.columns() or []
            on = [name for name in known if name not in self._keys]
        columns = [on] if isinstance(on, str) else list(on)
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
        udf, compute = called_with("map_groups", fn, options)
        how = Ordered(self._keys, name="GroupBy")
        below = Exchange((self._dataset._plan,), how, self._partitions)
        name, keys = f"MapGroups({udf.name})", self._keys
        step = MapGroups(name, udf, None, batch_format, zero_copy_batch, True, keys=keys)
        return self._dataset._of(Stage((below,), (step,), compute))

    with_column = AbsentAttribute("Dataset.with_column() gives each row the same")


def drawn(caller: str, seed: int | None) -> int:
    """Return a seed of the user, or a new one."""
    if seed is None:
        return random.randrange(2**31)  # noqa: S311 -- no secret
    return check_whole(caller, "seed", seed, 0)


class Rearranging(Consumption, Aggregating):
    """The methods of a dataset that need all rows before they give the first."""

    def _of(self, plan: PlanNode) -> Any:
        raise NotImplementedError

    def _plans(self, caller: str, others: Sequence[Any]) -> tuple[PlanNode, ...]:
        """Return the plans of this dataset and of others; TypeError if one is not a dataset."""
        for each in others:
            if not isinstance(each, Rearranging):
                raise TypeError(f"{caller}() takes datasets of miniray.data, not {each!r:.60}.")
        return (self._plan, *(each._plan for each in others))

    def repartition(
        self,
        num_blocks: int | None = None,
        target_num_rows_per_block: int | None = None,
        *,
        strict: bool = False,
        shuffle: bool = False,
        keys: Sequence[str] | None = None,
        sort: bool = False,
    ) -> Any:
        """Make other blocks of the rows.

        Args:
            num_blocks: How many, of about as many rows each. All rows are made before.
            target_num_rows_per_block: Rows of each block but the last; they are made as rows come.
            strict: Accepted as in Ray: no block has more or fewer in any case.
            shuffle: Take the rows in turns: each block has some of all.
            keys: Rows whose values of these columns are equal come into the same block, sorted.
            sort: Accepted as in Ray, for keys.
        """
        rows = target_num_rows_per_block
        given = shuffle or keys is not None or sort
        if (num_blocks is None) == (rows is None) or (given and rows is not None):
            raise ValueError(
                "repartition() takes num_blocks, or target_num_rows_per_block and no shuffle, keys."
            )
        if rows is not None:
            rows = check_whole("repartition", "target_num_rows_per_block", rows, 1)
            return self._of(Regroup((self._plan,), rows, strict=True))
        if keys is not None:
            how: How = self._ordered("repartition", keys, False, "Repartition")
        else:
            how = Numbered(None, name="Repartition") if shuffle else Aligned()
        parts = _parts("repartition", "num_blocks", num_blocks)
        return self._of(Exchange((self._plan,), how, parts))

    def random_shuffle(self, *, seed: int | None = None, num_blocks: int | None = None) -> Any:
        """Bring all rows into another order, in which each is as likely at any place.

        Before a trainer that reorders the rows in each epoch it is left out, with a warning: that
        mixes the units of the data, and the rows within each. ``materialize()`` keeps it.

        Args:
            seed: From which the order is drawn; rows of the same order get the same one, however
                they are cut into blocks. Default: a new one, now.
            num_blocks: Of how many parts it is made. Default: by their bytes.
        """
        how = Numbered(drawn("random_shuffle", seed))
        parts = _parts("random_shuffle", "num_blocks", num_blocks)
        return self._of(Exchange((self._plan,), how, parts))

    def sort(
        self,
        key: str | Sequence[str],
        descending: bool | Sequence[bool] = False,
        boundaries: Sequence[Any] = (),
    ) -> Any:
        """Sort the rows; those of equal keys keep their order, null comes last.

        Args:
            key: A column, or several: later ones decide where earlier ones are equal.
            descending: Large values first, for all keys or for each.
            boundaries: Values of the first key at which a block begins. Default: by their bytes.

        Raises:
            ValueError: There is no such column, or arguments do not go together.
        """
        how = self._ordered("sort", key, descending)
        how = dataclasses.replace(how, boundaries=tuple(boundaries or ()))
        return self._of(Exchange((self._plan,), how, len(boundaries) + 1 if boundaries else None))

    def _ordered(self, caller: str, key: Any, descending: Any, name: str = "Sort") -> Ordered:
        names = key_names(caller, key, known_columns(self._plan))
        down = [descending] * len(names) if isinstance(descending, bool) else list(descending)
        if len(down) != len(names) or not names or not {True, False}.issuperset(down):
            raise ValueError(f"`descending` must be true or false for each key: {down}, {names}.")
        return Ordered(names, tuple(down), name)

    # --- groups and other datasets ------------------------------------------------------

    def groupby(
        self, key: str | Sequence[str] | None, num_partitions: int | None = None
    ) -> GroupedData:
        """Group rows by columns.

        Args:
            key: The columns; None: all rows are one group.
            num_partitions: Of how many parts results are made. Default: by their bytes.
        """
        return GroupedData(self, key, num_partitions)

    def aggregate(self, *aggs: AggregateFn) -> dict[str, Any]:
        """Return aggregations of all rows by name."""
        return self._one(self.groupby(None).aggregate(*aggs))

    def _one(self, dataset: Any) -> dict[str, Any]:
        (row,) = dataset.take(1)
        self._stats = dataset._stats
        return row  # type: ignore[no-any-return]

    def _over(self, kind: type[Any], on: Any, **options: Any) -> Any:
        found = self._one(self.groupby(None)._over(kind, on, **options))
        return next(iter(found.values())) if len(found) == 1 else found

    def unique(self, column: str, ignore_nulls: bool = False) -> list[Any]:
        """Return the different values of a column, in the order in which they come."""
        return self._over(Unique, column, ignore_nulls=ignore_nulls)  # type: ignore[no-any-return]

    def join(
        self,
        ds: Rearranging,
        join_type: str,
        num_partitions: int | None = None,
        on: str | Sequence[str] = ("id",),
        right_on: str | Sequence[str] | None = None,
        left_suffix: str | None = None,
        right_suffix: str | None = None,
        *,
        partition_size_hint: int | None = None,
        aggregator_ray_remote_args: Any = None,
        validate_schemas: bool = False,
    ) -> Any:
        """Join with another dataset, by equal values of columns. Null equals nothing.

        Args:
            ds: The other one, on the right.
            join_type: "inner", "left_outer", "right_outer", "full_outer", "left_semi",
                "right_semi", "left_anti" or "right_anti".
            num_partitions: Of how many parts it is made. Default: by their bytes.
            on: The columns of this one.
            right_on: Key columns of the other one. Default: the same names.
            left_suffix: Behind names of this one that both have.
            right_suffix: Behind those of the other one.
            partition_size_hint: Accepted as in Ray.
            aggregator_ray_remote_args: Accepted as in Ray.
            validate_schemas: Accepted as in Ray: schemas are compared in any case.

        Raises:
            ValueError: There is no such join or column, or both have a column of a name.
        """
        if join_type not in JOINS:
            raise ValueError(f"join(join_type={join_type!r}) must be one of {', '.join(JOINS)}.")
        plans = self._plans("join", [ds])
        left, right = map(known_columns, plans)
        keys, right_keys = key_names("join", on, left), key_names("join", right_on or on, right)
        if len(right_keys) != len(keys) or not keys:
            raise ValueError(f"join(on={keys}, right_on={right_keys}) differ in length.")
        suffixes = left_suffix, right_suffix
        how = Join(keys, right_keys=right_keys, kind=join_type, suffixes=suffixes)
        if left is not None and right is not None:
            how.outgoing(left, right)
        parts = _parts("join", "num_partitions", num_partitions)
        return self._of(Exchange(plans, how, parts))

    def zip(self, *other: Rearranging) -> Any:
        """Add the columns of other datasets with as many rows.

        Args:
            *other: The datasets. A column whose name is taken gets "_1" behind it, and so on.

        Raises:
            ValueError: When it is executed, the numbers of rows differ.
        """
        return self._of(Exchange(self._plans("zip", other), Aligned("Zip")))
