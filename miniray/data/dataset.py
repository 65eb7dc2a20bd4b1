"""``Dataset``: a lazy plan, to which methods add; what ``Consumption`` has executes it."""

from __future__ import annotations

import itertools
import random
from typing import TYPE_CHECKING, Any, cast

from miniray.data.aggregate import Max, Mean, Min, Std, Sum, Unique
from miniray.data.batches import check_whole
from miniray.data.blocks import check_format
from miniray.data.compute import check_gpu_batches, compute_of, udf_of
from miniray.data.consumption import Consumption, stored
from miniray.data.exchange import Aligned, Numbered
from miniray.data.executor import table_of
from miniray.data.expressions import Expr, parsed
from miniray.data.grouped import GroupedData, Share, key_names
from miniray.data.joins import JOINS, Join
from miniray.data.ordered import Ordered
from miniray.data.plan import (
    Apply,
    Compute,
    Exchange,
    Limit,
    Read,
    Regroup,
    Union,
    chain,
    optimised,
    schema_of,
)
from miniray.data.sources import BlocksDatasource, BlockUnit
from miniray.data.splits import sliced, streamed
from miniray.data.transforms import (
    Columns,
    FilterExpr,
    MapBatches,
    MapRows,
    Sample,
    WithColumns,
)
from miniray.data.writers import write

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from miniray.data.aggregate import AggregateFn
    from miniray.data.batches import StreamIterator
    from miniray.data.exchange import How
    from miniray.data.plan import PlanNode
    from miniray.data.transforms import Transform

#: Methods of Ray's datasets that are not here, and what to do instead.
_ABSENT = {
    "iter_jax_batches": "iter_batches() gives NumPy arrays, which JAX takes",
    "iter_tf_batches": "iter_batches() gives NumPy arrays, which TensorFlow takes",
    "summary": "aggregate() computes what is asked for",
    "to_tf": "iter_batches() gives NumPy arrays, which TensorFlow takes",
}


class Dataset(Consumption):
    """Rows in a fixed order, of which nothing is read before something asks for it.

    Made by ``miniray.data.read_parquet`` and its like. Methods return new datasets.
    """

    if not TYPE_CHECKING:  # else a type checker takes any name for one that is there

        def __getattr__(self, name):
            told = f"'{type(self).__name__}' object has no attribute {name!r}"
            if name in _ABSENT:
                told = f"miniray's datasets have no {name!r}: {_ABSENT[name]}."
            raise AttributeError(told, name=name, obj=self)

    def _apply(self, step: Transform, compute: Compute | None = None) -> Dataset:
        return Dataset(Apply((self._plan,), step, compute or Compute()))

    # --- functions ----------------------------------------------------------------------

    def map(self, fn: Callable[..., Any] | type, **options: Any) -> Dataset:
        """Call a function for each row.

        Batches are some 20 times as fast; see ``map_batches``.

        Args:
            fn: Gets a row as a dictionary and returns one. A class is made once in each actor of a
                pool, and its objects are called.
            **options: ``fn_args``, ``fn_kwargs``, ``fn_constructor_args``,
                ``fn_constructor_kwargs``; ``compute`` or ``concurrency``; options of tasks and
                actors such as ``num_cpus``, ``num_gpus``, ``memory``, ``resources``.
        """
        return self._rows("Map", "map", fn, options)

    def flat_map(self, fn: Callable[..., Any] | type, **options: Any) -> Dataset:
        """Call a function for each row, which returns a list of rows. Arguments as of ``map``."""
        return self._rows("FlatMap", "flat_map", fn, options)

    def filter(self, fn: Any = None, *, expr: Expr | str | None = None, **options: Any) -> Dataset:
        """Keep some rows.

        Args:
            fn: Gets a row, and returns whether it is kept.
            expr: An expression in place of the function, such as ``col("a") > 5`` or
                ``"a > 5 and b == 'x'"``. Parquet files are read with it.
            **options: As of ``map``.
        """
        if (fn is None) == (expr is None):
            raise ValueError("filter() takes a function or expr=, one of them.")
        if expr is None:
            return self._rows("Filter", "filter", fn, options)
        if options:
            raise ValueError(f"filter(expr=...) does not take {next(iter(options))!r}.")
        found = parsed(expr) if isinstance(expr, str) else expr
        if not isinstance(found, Expr):
            raise TypeError(f"filter(expr={expr!r:.80}) is neither an expression nor its text.")
        return self._apply(FilterExpr(found))

    def _rows(self, kind: str, caller: str, fn: Any, options: dict[str, Any]) -> Dataset:
        udf = udf_of(caller, fn, options)
        return self._apply(MapRows(udf, kind), compute_of(caller, udf, options))

    def map_batches(
        self,
        fn: Callable[..., Any] | type,
        *,
        batch_size: int | str | None = None,
        batch_format: str | None = "default",
        zero_copy_batch: bool = False,
        udf_modifying_row_count: bool | None = None,
        **options: Any,
    ) -> Dataset:
        """Call a function for each batch of rows.

        Args:
            fn: Gets a batch, and returns one or yields several. A class is made once in each
                actor of a pool, and its objects are called.
            batch_size: Rows of a batch; the last one of each task may have fewer. None: a whole
                block. ``"auto"``: about 4 MiB.
            batch_format: ``"numpy"`` (the default): a dictionary of arrays. ``"pandas"``: a
                DataFrame. ``"pyarrow"`` or None: a table.
            zero_copy_batch: Pass arrays that can't be written to, and save the copy.
            udf_modifying_row_count: False promises that as many rows come out as go in; then the
                count is known before, and a limit reads no more than it needs. True says they
                differ; a trainer expects them to be the same if nothing is said.
            **options: As of ``map``. With ``num_gpus``, ``batch_size`` must be a number.

        Raises:
            ValueError: A value makes no sense.
            TypeError: There is no such argument.
        """
        check_format("map_batches", batch_format)
        if batch_size not in (None, "auto"):
            check_whole("map_batches", "batch_size", batch_size, 1)
        udf = udf_of("map_batches", fn, options)
        compute = compute_of("map_batches", udf, options)
        check_gpu_batches(udf, compute, batch_size)
        keeps, changes = udf_modifying_row_count is False, udf_modifying_row_count is True
        step = MapBatches(udf, batch_size, batch_format, zero_copy_batch, keeps, changes)
        return self._apply(step, compute)

    # --- columns ------------------------------------------------------------------------

    def with_column(self, name: str, expr: Expr) -> Dataset:
        """Add a column, or replace one, by an expression."""
        return self.with_columns({name: expr})

    def with_columns(self, exprs: Mapping[str, Expr]) -> Dataset:
        """Add columns by expressions; all of them see the columns as they were."""
        for name, expr in exprs.items():
            if not isinstance(expr, Expr):
                raise TypeError(
                    f"with_column({name!r}, {expr!r:.60}) needs an expression, such as "
                    f"col('a') * 2; add_column() takes a function."
                )
        return self._apply(WithColumns(dict(exprs)))

    def add_column(
        self,
        col: str,
        fn: Callable[[Any], Any],
        *,
        batch_format: str | None = "pandas",
        **options: Any,
    ) -> Dataset:
        """Add a column that a function makes of a batch.

        Args:
            col: Its name.
            fn: Gets a batch, and returns the values.
            batch_format: As of ``map_batches``.
            **options: As of ``map``.
        """
        check_format("add_column", batch_format)
        udf = udf_of("add_column", _ColumnAdder(col, fn), options)
        step = MapBatches(udf, None, batch_format, keeps_count=True, label=f"AddColumn({col})")
        return self._apply(step, compute_of("add_column", udf, options))

    def select_columns(self, cols: str | Sequence[str]) -> Dataset:
        """Keep these columns, in this order. Parquet files are read with them only."""
        names = [cols] if isinstance(cols, str) else list(cols)
        if len(set(names)) < len(names):
            raise ValueError(f"select_columns({names}) names a column twice.")
        return self._apply(Columns("SelectColumns", names))

    def drop_columns(self, cols: Sequence[str]) -> Dataset:
        """Leave out these columns."""
        return self._apply(Columns("DropColumns", [cols] if isinstance(cols, str) else list(cols)))

    def rename_columns(self, names: Mapping[str, str] | Sequence[str]) -> Dataset:
        """Rename columns: new names by the old ones, or a new name for each column."""
        if not hasattr(names, "keys"):
            known = self.columns() or []
            if len(known) != len(names):
                raise ValueError(
                    f"rename_columns({list(names)}) must name each of: {', '.join(known)}."
                )
            return self._apply(Columns("RenameColumns", dict(zip(known, names, strict=True))))
        return self._apply(Columns("RenameColumns", dict(cast("Mapping[str, str]", names))))

    # --- rows ---------------------------------------------------------------------------

    def limit(self, limit: int) -> Dataset:
        """Keep the first rows; nothing behind them is read."""
        check_whole("limit", "limit", limit, 0)
        return Dataset(Limit((self._plan,), limit))

    def union(self, *other: Dataset) -> Dataset:
        """Add the rows of other datasets behind these."""
        return Dataset(Union((self._plan, *(each._plan for each in other))))

    def repartition(
        self,
        num_blocks: int | None = None,
        target_num_rows_per_block: int | None = None,
        *,
        strict: bool = False,
        shuffle: bool = False,
        keys: Sequence[str] | None = None,
        sort: bool = False,
    ) -> Dataset:
        """Make other blocks of the rows.

        Args:
            num_blocks: How many, of about as many rows each. All rows are made before.
            target_num_rows_per_block: Rows of a block, at least; blocks are made as rows come.
            strict: Exactly so many in each block but the last.
            shuffle: Take the rows in turns: each block has some of all.
            keys: Rows whose values of these columns are equal come into the same block.
            sort: Sort by the keys, which is so in any case.
        """
        del sort
        if (num_blocks is None) == (target_num_rows_per_block is None):
            raise ValueError(
                "repartition() takes num_blocks or target_num_rows_per_block, one of them."
            )
        if num_blocks is None:
            if shuffle or keys is not None:
                raise ValueError(
                    "repartition(target_num_rows_per_block=...) takes no shuffle and no keys."
                )
            check_whole("repartition", "target_num_rows_per_block", target_num_rows_per_block, 1)
            assert target_num_rows_per_block is not None
            return Dataset(Regroup((self._plan,), target_num_rows_per_block, strict))
        check_whole("repartition", "num_blocks", num_blocks, 1)
        if keys is not None:
            how: How = self._ordered("repartition", keys, False, name="Repartition")
        else:
            how = Numbered(None, name="Repartition") if shuffle else Aligned()
        return Dataset(Exchange((self._plan,), how, num_blocks))

    def random_shuffle(
        self, *, seed: int | None = None, num_blocks: int | None = None, **options: Any
    ) -> Dataset:
        """Bring all rows into another order, in which each is as likely at any place.

        Args:
            seed: From which the order is drawn; rows of the same order get the same one, whatever
                blocks they are in. Default: a new one, now.
            num_blocks: Of how many parts it is made. Default: by their bytes.
            **options: Accepted as in Ray: options of tasks, without effect.
        """
        del options
        seed = random.randrange(2**31) if seed is None else seed  # noqa: S311 -- no secret
        return Dataset(Exchange((self._plan,), Numbered(seed), num_blocks))

    def sort(
        self,
        key: str | Sequence[str],
        descending: bool | Sequence[bool] = False,
        boundaries: Sequence[int | float] | None = None,
    ) -> Dataset:
        """Sort the rows; those of equal keys keep their order, null comes last.

        Args:
            key: A column, or several, of which later ones decide where earlier ones are equal.
            descending: Large values first, for all keys or for each.
            boundaries: Values of the first key at which blocks begin. Default: as rows are.

        Raises:
            ValueError: There is no such column, or arguments do not go together.
        """
        if key is None:
            raise ValueError("The 'key' parameter cannot be None for sorting.")
        given = tuple(sorted(set(boundaries or ())))
        if not all(isinstance(each, int | float) for each in given):
            raise ValueError("The type of items in boundaries must be int or float.")
        how = self._ordered("sort", key, descending, given=given)
        return Dataset(Exchange((self._plan,), how, len(given) + 1 if given else None))

    def _ordered(self, caller: str, key: Any, descending: Any, **options: Any) -> Ordered:
        schema = schema_of(optimised(self._plan))
        names = key_names(caller, key, None if schema is None else schema.names)
        down = [descending] * len(names) if isinstance(descending, bool) else list(descending)
        if len(down) != len(names) or not names:
            raise ValueError(
                f"Length of `descending` does not match the length of the key: {down} for "
                f"{list(names)}."
            )
        return Ordered(names, tuple(down), **options)

    # --- groups and other datasets ------------------------------------------------------

    def groupby(
        self, key: str | Sequence[str] | None, num_partitions: int | None = None
    ) -> GroupedData:
        """Group rows by columns.

        Args:
            key: The columns; None: all rows are one group.
            num_partitions: Of how many parts results are made. Default: by their bytes.
        """
        return GroupedData(self._plan, Dataset, key, num_partitions)

    def aggregate(self, *aggs: AggregateFn) -> dict[str, Any] | None:
        """Return aggregations of all rows by name; None if there are no rows."""
        found: dict[str, Any] | None = self._one(self.groupby(None).aggregate(*aggs))
        return found

    def _one(self, dataset: Dataset) -> Any:
        rows = dataset.take(1)
        self._stats = dataset._stats
        return rows[0] if rows else None

    def _over(self, kind: type[Any], on: Any, **options: Any) -> Any:
        found = self._one(self.groupby(None).over(kind, on, **options))
        return next(iter(found.values())) if found is not None and len(found) == 1 else found

    def sum(self, on: str | list[str] | None = None, ignore_nulls: bool = True) -> Any:
        """Return the sum of a column, or a dictionary of those of several; None of no rows.

        Args:
            on: The columns. Default: all.
            ignore_nulls: Leave out null; otherwise it makes the result None.
        """
        return self._over(Sum, on, ignore_nulls=ignore_nulls)

    def min(self, on: str | list[str] | None = None, ignore_nulls: bool = True) -> Any:
        """Return the smallest value of columns; see ``sum``."""
        return self._over(Min, on, ignore_nulls=ignore_nulls)

    def max(self, on: str | list[str] | None = None, ignore_nulls: bool = True) -> Any:
        """Return the largest value of columns; see ``sum``."""
        return self._over(Max, on, ignore_nulls=ignore_nulls)

    def mean(self, on: str | list[str] | None = None, ignore_nulls: bool = True) -> Any:
        """Return the mean of columns; see ``sum``."""
        return self._over(Mean, on, ignore_nulls=ignore_nulls)

    def std(
        self, on: str | list[str] | None = None, ddof: int = 1, ignore_nulls: bool = True
    ) -> Any:
        """Return the standard deviation of columns, divided by rows - ddof; see ``sum``."""
        return self._over(Std, on, ddof=ddof, ignore_nulls=ignore_nulls)

    def unique(self, column: str, ignore_nulls: bool = False) -> list[Any]:
        """Return the different values of a column, in the order in which they come."""
        return self._over(Unique, column, ignore_nulls=ignore_nulls) or []

    def join(
        self,
        ds: Dataset,
        join_type: str,
        num_partitions: int | None = None,
        on: Sequence[str] = ("id",),
        right_on: Sequence[str] | None = None,
        left_suffix: str | None = None,
        right_suffix: str | None = None,
        **options: Any,
    ) -> Dataset:
        """Join with another dataset, by equal values of columns. Null equals nothing.

        Args:
            ds: The other one, on the right.
            join_type: "inner", "left_outer", "right_outer", "full_outer", "left_semi",
                "right_semi", "left_anti" or "right_anti".
            num_partitions: Of how many parts it is made. Default: by their bytes.
            on: The columns of this one.
            right_on: Those of the other one. Default: the same names.
            left_suffix: Behind names of this one that both have.
            right_suffix: Behind those of the other one.
            **options: Accepted as in Ray, without effect: ``partition_size_hint``,
                ``aggregator_ray_remote_args``, ``validate_schemas``.

        Raises:
            ValueError: There is no such join or column, or both have a column of a name.
        """
        unknown = options.keys() - {
            "partition_size_hint",
            "aggregator_ray_remote_args",
            "validate_schemas",
        }
        if unknown:
            raise TypeError(f"join() has no argument {min(unknown)!r}.")
        kind = str(getattr(join_type, "value", join_type))
        if kind not in JOINS:
            raise ValueError(f"join(join_type={join_type!r}) must be one of {', '.join(JOINS)}.")
        for name, value in (("on", on), ("right_on", right_on)):
            if value is not None and not isinstance(value, tuple | list):
                raise ValueError(f"Expected tuple or list as `{name}` (got {type(value).__name__})")
        right_on = right_on or on
        if len(right_on) != len(on) or not on:
            raise ValueError(f"join(on={list(on)}, right_on={list(right_on)}) differ in length.")
        schemas = [schema_of(optimised(each._plan)) for each in (self, ds)]
        known = [None if schema is None else schema.names for schema in schemas]
        how = Join(
            key_names("join", on, known[0]),
            (False,) * len(on),
            right_keys=key_names("join", right_on, known[1]),
            kind=kind,
            suffixes=(left_suffix, right_suffix),
        )
        if known[0] is not None and known[1] is not None:
            how.check_names(known[0], known[1])
        return Dataset(Exchange((self._plan, ds._plan), how, num_partitions))

    def zip(self, *other: Dataset) -> Dataset:
        """Add the columns of other datasets with as many rows.

        Args:
            *other: The datasets. A column whose name is taken gets "_1" behind it, and so on.

        Raises:
            ValueError: When it is executed, the numbers of rows differ.
        """
        plans = (self._plan, *(each._plan for each in other))
        return Dataset(Exchange(plans, Aligned("Zip")))

    def randomize_block_order(self, *, seed: int | None = None) -> Dataset:
        """Read the units of the source in another order, each as it is.

        Args:
            seed: From which the order is drawn. Default: a new one, now.
        """
        seed = random.randrange(2**31) if seed is None else seed  # noqa: S311 -- no secret
        found = chain(optimised(self._plan))
        if found is None:
            raise ValueError(
                "randomize_block_order() is for datasets that read files or blocks and change "
                "rows; call it before limit(), union(), repartition(), sort() and their like, or "
                "materialize()."
            )
        return Dataset(_reordered(self._plan, seed))

    def random_sample(self, fraction: float, *, seed: int | None = None) -> Dataset:
        """Keep each row with a probability, from 0 to 1."""
        if not isinstance(fraction, int | float) or not 0 <= fraction <= 1:
            raise ValueError(f"random_sample({fraction!r}) must be a number from 0 to 1.")
        seed = random.randrange(2**31) if seed is None else seed  # noqa: S311 -- no secret
        return self._apply(Sample(float(fraction), seed))

    def materialize(self) -> Any:
        """Execute the dataset, and return one whose blocks are in the object store."""
        blocks: list[Any] = []
        empty: Any = None
        for unit in self._units():
            block = unit if isinstance(unit, BlockUnit) else stored(unit)
            if block.rows:
                blocks.append(block)
            else:
                empty = empty or block
        if blocks or empty is not None:
            self._schema = self._schema or table_of((blocks or [empty])[0].part(0, 1)).schema
        made = MaterializedDataset(Read(BlocksDatasource(blocks, self._schema)))
        made._stats, made._schema = self._stats, self._schema
        return made

    # --- splits -------------------------------------------------------------------------

    def split(self, n: int, *, equal: bool = False, locality_hints: Any = None) -> list[Any]:
        """Split into n datasets of rows that follow each other.

        Args:
            n: How many.
            equal: Accepted as in Ray. Sizes differ by one row at most, and none is left out.
            locality_hints: Accepted as in Ray; blocks are read where they are.
        """
        del equal, locality_hints
        check_whole("split", "n", n, 1)
        rows, dataset = self._counted()
        least, more = divmod(rows, n)
        bounds = [number * least + min(number, more) for number in range(n + 1)]
        return dataset._between(bounds)

    def split_at_indices(self, indices: Sequence[int]) -> list[Any]:
        """Split before the rows of these numbers."""
        if not indices or list(indices) != sorted(indices) or indices[0] < 0:
            raise ValueError(f"split_at_indices({list(indices)}) must be numbers that go up.")
        rows, dataset = self._counted()
        return dataset._between([0, *(min(index, rows) for index in indices), rows])

    def split_proportionately(self, proportions: Sequence[float]) -> list[Any]:
        """Split into parts of these sizes, and one with the rest."""
        total = sum(proportions)
        if not proportions or min(proportions) <= 0 or total >= 1:
            raise ValueError(
                f"split_proportionately({list(proportions)}) must be above 0 and below 1 together."
            )
        rows, dataset = self._counted()
        ends = [int(rows * sum(proportions[:number])) for number in range(len(proportions) + 1)]
        return dataset._between([*ends, rows])

    def train_test_split(
        self,
        test_size: int | float,
        *,
        shuffle: bool = False,
        seed: int | None = None,
        stratify: str | None = None,
    ) -> tuple[Any, Any]:
        """Split into the first rows and the last ones.

        Args:
            test_size: Of the second: a number of rows, or a share of all.
            shuffle: Bring all rows into another order before.
            seed: From which that order is drawn.
            stratify: A column of whose values both parts have the same shares.

        Raises:
            TypeError: The size is no number.
            ValueError: A part would have no rows, or arguments do not go together.
        """
        if not isinstance(test_size, int | float):
            raise TypeError(f"`test_size` must be int or float got {type(test_size)}.")
        if shuffle and stratify is not None:
            raise ValueError(
                "train_test_split() takes shuffle or stratify, not both: call random_shuffle() "
                "before, and rows of a class are drawn at random."
            )
        rows, dataset = (self.random_shuffle(seed=seed) if shuffle else self)._counted()
        test = int(rows * test_size) if isinstance(test_size, float) else test_size
        if not 0 < test < rows:
            raise ValueError(
                f"train_test_split({test_size!r}) of {rows} rows leaves one part without rows."
            )
        if stratify is not None:
            groups = dataset.groupby(stratify)
            parts = [
                groups.map_groups(Share(test / rows, last=last), batch_format="pyarrow")
                for last in (False, True)
            ]
            return parts[0].materialize(), parts[1].materialize()
        train, rest = dataset._between([0, rows - test, rows])
        return train, rest

    def streaming_split(
        self, n: int, *, equal: bool = False, locality_hints: Any = None
    ) -> list[StreamIterator]:
        """Return n iterators over parts of this dataset, to be passed to as many readers.

        Each reads its own part: no reader waits for another one, and no row is left out.

        Args:
            n: How many.
            equal: Parts differ by one row at most; rows that functions leave out are counted
                before.
            locality_hints: Accepted as in Ray; blocks are read where they are.
        """
        del locality_hints
        check_whole("streaming_split", "n", n, 1)
        return streamed(self, n, Dataset, equal=equal)

    def _counted(self) -> tuple[int, Dataset]:
        """Return the number of rows, and a dataset of which ranges can be taken."""
        return sliced(self)

    def _between(self, bounds: Sequence[int]) -> list[Any]:
        from miniray.data.splits import between

        return [between(self, low, high) for low, high in itertools.pairwise(bounds)]

    # --- files --------------------------------------------------------------------------

    def write_parquet(self, path: str, **options: Any) -> None:
        """Write Parquet files into a folder.

        Args:
            path: The folder, local or as a URL.
            **options: ``filesystem``; ``mode``: "append" (the default), "create", "overwrite" or
                "ignore"; ``min_rows_per_file``; ``partition_cols``; further ones of
                ``pyarrow.parquet.write_table``.
        """
        write(self, "parquet", path, options)

    def write_csv(self, path: str, **options: Any) -> None:
        """Write CSV files into a folder. Arguments as of ``write_parquet``."""
        write(self, "csv", path, options)

    def write_json(self, path: str, **options: Any) -> None:
        """Write files with a JSON object in each line. Arguments as of ``write_parquet``."""
        write(self, "json", path, options)

    def write_numpy(self, path: str, *, column: str, **options: Any) -> None:
        """Write a column as NumPy files. Arguments as of ``write_parquet``."""
        write(self, "npy", path, {**options, "column": column})

    def write_images(
        self, path: str, column: str, file_format: str = "png", **options: Any
    ) -> None:
        """Write each cell of a column as an image. Arguments as of ``write_parquet``."""
        write(self, file_format, path, {**options, "column": column})


class MaterializedDataset(Dataset):
    """A dataset whose blocks are in the object store."""


class _ColumnAdder:
    """Adds what a function returns to a batch, as a column."""

    def __init__(self, column: str, function: Callable[[Any], Any]) -> None:
        self._column = column
        self._function = function
        self.__name__ = getattr(function, "__name__", "function")

    def __call__(self, batch: Any) -> Any:
        import pyarrow as pa

        from miniray.data.blocks import column

        values = self._function(batch)
        if isinstance(batch, pa.Table):
            return batch.append_column(self._column, column(values))
        batch = dict(batch) if isinstance(batch, dict) else batch.copy()
        batch[self._column] = values
        return batch


def _reordered(node: PlanNode, seed: int) -> PlanNode:
    import dataclasses

    if isinstance(node, Read):
        return dataclasses.replace(node, shuffle=seed)
    inputs = tuple(_reordered(each, seed) for each in node.inputs)
    return dataclasses.replace(node, inputs=inputs)  # type: ignore[type-var]
