"""``Dataset``: a lazy plan, to which methods add; the methods of ``Consumption`` execute it."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from miniray.data.batches import check_whole
from miniray.data.blocks import check_format
from miniray.data.consumption import stored
from miniray.data.context import TASKS, Compute, DataContext, called_with
from miniray.data.executor import table_of
from miniray.data.expressions import Expr, parsed
from miniray.data.plan import (
    Limit,
    Read,
    Stage,
    Union,
    chain,
    is_numbered,
    optimised,
    stacked,
)
from miniray.data.rearranged import Rearranging, drawn, key_names
from miniray.data.sources import CutWish, UnitsDatasource, ranged
from miniray.data.transforms import (
    Columns,
    FilterExpr,
    MapBatches,
    MapRows,
    Sample,
    WithColumns,
)
from miniray.data.writers import IMAGES, write

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from miniray.data.plan import PlanNode
    from miniray.data.sources import ReadUnit
    from miniray.data.transforms import Transform


class Dataset(Rearranging):
    """Rows in a fixed order, read only on demand.

    Made by ``miniray.data.read_parquet`` and its like. Methods return new datasets.
    """

    def _of(self, plan: PlanNode) -> Dataset:
        return Dataset(plan)

    def _apply(self, step: Transform, compute: Compute = TASKS) -> Dataset:
        return Dataset(Stage((self._plan,), (step,), compute))

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
        found = _checked("filter", parsed(expr) if isinstance(expr, str) else expr)
        return self._apply(FilterExpr(f"Filter({found!r})", found))

    def _rows(self, kind: str, caller: str, fn: Any, options: dict[str, Any]) -> Dataset:
        udf, compute = called_with(caller, fn, options)
        return self._apply(MapRows(f"{kind}({udf.name})", udf, kind), compute)

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
                differ; a trainer expects them to be the same by default.
            **options: As of ``map``. With ``num_gpus``, ``batch_size`` must be a number.

        Raises:
            ValueError: A value makes no sense, or there is no such argument.
        """
        check_format("map_batches", batch_format)
        if batch_size not in (None, "auto"):
            batch_size = check_whole("map_batches", "batch_size", batch_size, 1)
        udf, compute = called_with("map_batches", fn, options)
        gpus = compute.options.get("num_gpus")
        if gpus and not isinstance(batch_size, int):  # a block may not fit its memory
            raise ValueError(f"map_batches(num_gpus={gpus}) needs a batch_size that fits the GPU.")
        name, changes = f"MapBatches({udf.name})", udf_modifying_row_count
        step = MapBatches(name, udf, batch_size, batch_format, zero_copy_batch, changes)
        return self._apply(step, compute)

    # --- columns ------------------------------------------------------------------------

    def with_column(self, column_name: str, expr: Expr) -> Dataset:
        """Add a column, or replace one, by an expression."""
        return self.with_columns({column_name: expr})

    def with_columns(self, exprs: Mapping[str, Expr]) -> Dataset:
        """Add columns by expressions; all of them see the columns as they were."""
        if not isinstance(exprs, Mapping):
            raise TypeError(f"with_columns({exprs!r:.80}) takes expressions by the columns' names.")
        for expr in exprs.values():
            _checked("with_column", expr)
        return self._apply(WithColumns(f"WithColumns({', '.join(exprs)})", dict(exprs)))

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
        called_with("add_column", fn, {})  # it raises what is no function

        def added(batch: Any) -> Any:
            if hasattr(batch, "assign"):  # a DataFrame
                return batch.assign(**{col: fn(batch)})
            names = getattr(batch, "column_names", batch)
            return {**{name: batch[name] for name in names}, col: fn(batch)}

        udf, compute = called_with("add_column", added, options)
        step = MapBatches(f"AddColumn({col})", udf, None, batch_format, changes_count=False)
        return self._apply(step, compute)

    def select_columns(self, cols: str | Sequence[str]) -> Dataset:
        """Keep these columns, in this order. Parquet files are read with them only."""
        return self._columns("SelectColumns", "select", list(key_names("select_columns", cols)))

    def drop_columns(self, cols: str | Sequence[str]) -> Dataset:
        return self._columns("DropColumns", "drop_columns", list(key_names("drop_columns", cols)))

    def rename_columns(self, names: Mapping[str, str] | Sequence[str]) -> Dataset:
        """Rename columns: new names by the old ones, or a new name for each column."""
        if not isinstance(names, Mapping):
            known = self.columns() or []
            if len(known) != len(names):
                raise ValueError(f"rename_columns({list(names)}) must name each of {known}.")
            names = dict(zip(known, names, strict=True))
        return self._columns("RenameColumns", "rename_columns", dict(names))

    def _columns(self, kind: str, method: str, names: Any) -> Dataset:
        return self._apply(Columns(f"{kind}({', '.join(names)})", method, names))

    # --- rows ---------------------------------------------------------------------------

    def limit(self, limit: int) -> Dataset:
        """Keep the first rows; later rows are not read."""
        return Dataset(Limit((self._plan,), check_whole("limit", "limit", limit, 0)))

    def union(self, *other: Dataset) -> Dataset:
        """Add the rows of other datasets behind these."""
        return Dataset(Union(self._plans("union", other)))

    def randomize_block_order(self, *, seed: int | None = None) -> Dataset:
        """Read the units of the source in another order, drawn from the seed, each as it is."""
        seed = drawn("randomize_block_order", seed)
        found = chain(optimised(self._plan))
        if found is None:
            raise ValueError("Call randomize_block_order() before limit(), sort() and the like.")
        read, stages = found
        return Dataset(stacked(dataclasses.replace(read, shuffle=seed), stages))

    def random_sample(self, fraction: float, *, seed: int | None = None) -> Dataset:
        """Keep each row with a probability, from 0 to 1."""
        if not isinstance(fraction, int | float) or not 0 <= fraction <= 1:
            raise ValueError(f"random_sample({fraction!r}) must be a number from 0 to 1.")
        return self._apply(Sample(float(fraction), drawn("random_sample", seed)))

    def materialize(self) -> Any:
        """Execute the dataset, and return one whose blocks are in the object store."""
        blocks = [stored(unit) for unit in self._units()]
        full = [block for block in blocks if block.rows != 0]
        if blocks:
            self._schema = self._schema or table_of((full or blocks)[0].part(0, 1)).schema
        plan = Read(UnitsDatasource(full, self._schema))
        return MaterializedDataset(plan, self._schema, self._stats)

    # --- splits -------------------------------------------------------------------------

    def split(self, n: int, *, equal: bool = False, locality_hints: Any = None) -> list[Any]:
        """Split into n datasets of rows that follow each other.

        Args:
            n: How many.
            equal: Accepted as in Ray. Sizes differ by one row at most, and none is left out.
            locality_hints: Accepted as in Ray; blocks are read where they are.
        """
        n = check_whole("split", "n", n, 1)
        return self._between(lambda rows: [-(-number * rows // n) for number in range(n + 1)])

    def split_at_indices(self, indices: Sequence[int]) -> list[Any]:
        """Split before the rows of these numbers."""
        if not indices or list(indices) != sorted(indices) or indices[0] < 0:
            raise ValueError(f"split_at_indices({list(indices)}) must be numbers that go up.")
        return self._between(lambda rows: [0, *(min(index, rows) for index in indices), rows])

    def split_proportionately(self, proportions: Sequence[float]) -> list[Any]:
        """Split into parts of these sizes, and one with the rest; each has a row, or more.

        Raises:
            ValueError: There are not enough rows, or the proportions make no sense.
        """
        total = sum(proportions)
        if not proportions or min(proportions) <= 0 or total >= 1:
            raise ValueError(f"split_proportionately({proportions}) must be above 0 and below 1.")

        def ends(rows: int) -> list[int]:
            found = [int(rows * share) for share in itertools.accumulate(proportions)]
            for place in range(len(found) - 1, 0, -1):
                found[place - 1] = min(found[place - 1], found[place] - 1)
            if found[0] < 1:
                raise ValueError(f"split_proportionately({proportions}): {rows} rows are too few.")
            return [0, *found, rows]

        return self._between(ends)

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
            stratify: A column; both parts have the same shares of its values.

        Raises:
            TypeError: The size is not a number.
            ValueError: A part would have no rows, or arguments do not go together.
        """
        if not isinstance(test_size, int | float):
            raise TypeError(f"`test_size` must be int or float got {type(test_size)}.")
        if shuffle and stratify is not None:
            raise ValueError("train_test_split() takes shuffle or stratify, not both.")
        dataset = (self.random_shuffle(seed=seed) if shuffle else self)._counted()
        rows = dataset.count()
        is_share = isinstance(test_size, float)
        test = rows - int(rows * (1 - test_size)) if is_share else int(test_size)
        if not 0 < test < rows:
            raise ValueError(f"train_test_split({test_size}) of {rows} rows leaves a part empty.")
        if stratify is not None:
            share = test_size if is_share else test / rows

            def part(group: Any, *, last: bool) -> Any:
                first = group.num_rows - int(group.num_rows * share)
                return group.slice(first) if last else group.slice(0, first)

            groups = dataset.groupby(stratify)
            train, rest = (
                groups.map_groups(part, fn_kwargs={"last": last}, batch_format="pyarrow")
                for last in (False, True)
            )
            return train.materialize(), rest.materialize()
        train, rest = dataset._between(lambda rows: [0, rows - test, rows])
        return train, rest

    def streaming_split(
        self, n: int, *, equal: bool = False, locality_hints: Any = None
    ) -> list[Dataset]:
        """Return n parts of this dataset, to be passed to as many readers.

        Each reads its own part: no reader waits for another one, and no row is left out.

        Args:
            n: How many.
            equal: Parts differ by one row at most; rows that functions leave out are counted
                before.
            locality_hints: Accepted as in Ray; blocks are read where they are.
        """
        n = check_whole("streaming_split", "n", n, 1)
        plan = optimised(self._plan)
        if equal or is_numbered(plan) or chain(plan) is None:
            return self.split(n)
        # Rows are not known: every n-th unit.
        return self._parts(lambda units: [units[number::n] for number in range(n)], 4 * n)

    def _counted(self) -> Dataset:
        """Return a dataset of these rows that has ranges: this one, or its blocks."""
        plan = optimised(self._plan)
        if is_numbered(plan) and chain(plan) is not None:
            return self
        blocks: Dataset = self.materialize()
        if not is_numbered(blocks._plan):
            # Those that were given as refs do not tell their rows: tasks count them.
            blocks = blocks._of(Stage((blocks._plan,), ())).materialize()
        return blocks

    def _between(self, ends: Callable[[int], Sequence[int]]) -> list[Any]:
        """Return the ranges of rows between numbers that are computed of their count, lazily."""
        dataset = self._counted()
        pairs = list(itertools.pairwise(ends(dataset.count())))
        return dataset._parts(lambda units: [ranged(units, low, high) for low, high in pairs])

    def _parts(self, cut: Callable[[list[ReadUnit]], list[Any]], least: int = 1) -> list[Any]:
        """Return datasets of some units of the source each; at least this many are wanted."""
        found = chain(optimised(self._plan))
        assert found is not None
        read, stages = found
        source = read.source
        units = list(read.units(CutWish(DataContext.get_current().target_max_block_size, least)))
        reads = [
            Read(UnitsDatasource(part, source.schema(), source.found, "Split"))
            for part in cut(units)
        ]
        return [type(self)(stacked(each, stages), self._schema) for each in reads]

    # --- files --------------------------------------------------------------------------

    def write_parquet(self, path: str, **options: Any) -> None:
        """Write Parquet files into a folder.

        Args:
            path: The folder, local or as a URL.
            **options: ``filesystem``; ``mode``: "append" (the default), "create", "overwrite" or
                "ignore"; ``min_rows_per_file``, ``max_rows_per_file``; ``partition_cols``; further
                ones of ``pyarrow.parquet.write_table``, or in ``arrow_parquet_args_fn`` a function
                that makes them. Those of ``pyarrow.csv.write_csv`` are made by
                ``arrow_csv_args_fn``.
        """
        write(self, "parquet", path, **options)

    def write_csv(self, path: str, **options: Any) -> None:
        """Write CSV files into a folder. Arguments as of ``write_parquet``."""
        write(self, "csv", path, **options)

    def write_json(self, path: str, **options: Any) -> None:
        """Write files with a JSON object in each line. Arguments as of ``write_parquet``."""
        write(self, "json", path, **options)

    def write_numpy(self, path: str, *, column: str, **options: Any) -> None:
        """Write a column as NumPy files. Arguments as of ``write_parquet``."""
        write(self, "npy", path, column=column, **options)

    def write_images(
        self, path: str, column: str, file_format: str = "png", **options: Any
    ) -> None:
        """Write each cell of a column as an image. Arguments as of ``write_parquet``.

        Raises:
            ValueError: ``file_format`` is not png, jpg, jpeg, bmp, tiff or webp.
        """
        if file_format not in IMAGES:
            raise ValueError(f"write_images(file_format={file_format!r}) is none of {IMAGES}.")
        write(self, file_format, path, column=column, **options)


def _checked(caller: str, expr: Any) -> Expr:
    """Return an expression; TypeError if it is none."""
    if not isinstance(expr, Expr):
        raise TypeError(f"{caller}({expr!r:.80}) takes an expression, such as col('a') > 5.")
    return expr


class MaterializedDataset(Dataset):
    """A dataset whose blocks are in the object store."""
