"""Exchanges against plain lists, in many partitions, run in this process."""

from __future__ import annotations

import dataclasses
import math
import statistics
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from miniray import data

pa = pytest.importorskip("pyarrow")
pq = pytest.importorskip("pyarrow.parquet")

from miniray.data.aggregate import (  # noqa: E402 -- needs pyarrow
    AbsMax,
    AggregateFn,
    AggregateFnV2,
    AsList,
    Count,
    CountDistinct,
    Max,
    Mean,
    Min,
    Quantile,
    Std,
    Sum,
    Unique,
)
from miniray.data.blocks import table_to_rows  # noqa: E402
from miniray.data.exchange import together  # noqa: E402
from miniray.data.executor import _samples, execute, table_of  # noqa: E402
from miniray.data.feeds import Setting  # noqa: E402
from miniray.data.ordered import JOINS, Ordered  # noqa: E402
from miniray.data.sources import BlockRows, ReadUnit  # noqa: E402
from miniray.data.tables import concat  # noqa: E402

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

keys = st.one_of(st.none(), st.integers(-3, 3))
rows_of_keys = st.lists(keys, max_size=40)


@pytest.fixture(scope="module", autouse=True)
def _tiny_blocks() -> Iterator[None]:
    """Of a few rows, so that everything has many blocks and partitions."""
    context = data.DataContext.get_current()
    before, context.target_max_block_size = context.target_max_block_size, 64
    yield
    context.target_max_block_size = before


def made(dataset: Any) -> list[dict[str, Any]]:
    units = execute(dataset._plan, local=True)
    return [row for unit in units for row in table_to_rows(table_of(unit))]


def table(values: list[Any], kind: Any = None) -> Any:
    """A dataset of blocks of five rows: a key, and the row's number."""
    tables = [
        pa.table(
            {
                "k": pa.array(values[low : low + 5], kind or pa.int64()),
                "n": pa.array(range(low, low + len(values[low : low + 5])), pa.int64()),
            }
        )
        for low in range(0, len(values), 5)
    ]
    return data.from_arrow(tables or [pa.table({"k": pa.array([], pa.int64()), "n": []})])


def in_order(values: list[Any], *, descending: bool = False) -> list[int]:
    """The numbers of rows, sorted by key with null last."""
    there = [n for n, value in enumerate(values) if value is not None]
    there.sort(key=lambda n: -values[n] if descending else values[n])
    return there + [n for n, value in enumerate(values) if value is None]


@given(rows_of_keys, st.booleans())
def test_sorting_is_that_of_a_list_with_null_last(values: list[Any], descending: bool) -> None:
    rows = made(table(values).sort("k", descending))
    assert [row["n"] for row in rows] == in_order(values, descending=descending)


@given(rows_of_keys)
def test_sorting_by_two_columns_takes_each_in_its_own_direction(values: list[Any]) -> None:
    rows = made(table(values).sort(["k", "n"], [False, True]))
    last = len(values) - 1
    assert [row["n"] for row in rows] == [last - n for n in in_order(values[::-1])]


@pytest.mark.parametrize("descending", [False, True])
def test_a_sort_cuts_blocks_where_it_is_told_to(descending: bool) -> None:
    rows = table([15, None, 5, 10, 4, 9, 0, 12, 5])
    units = execute(
        rows.sort(["k", "n"], descending, boundaries=[10, 5])._plan, local=True, ordered=True
    )
    blocks = [table_of(unit).column("k").to_pylist() for unit in units]
    up = [[0, 4], [5, 5, 9], [10, 12, 15, None]]
    down = [[15, 12], [10, 9], [5, 5, 4, 0, None]]
    assert blocks == (down if descending else up)


@pytest.mark.parametrize(
    ("kind", "values"),
    [
        (pa.float64(), [2.5, float("nan"), None, -0.0, 0.0, float("-inf"), 1.0] * 3),
        (pa.string(), ["b", "", None, "ä", "a", "z", "aa"] * 3),
        (pa.bool_(), [True, None, False, True, False, None] * 3),
        (pa.timestamp("ns"), [5, None, 3, 2**60, -7, 1] * 3),
        (pa.date32(), [5, None, 3, 9, -7, 1] * 3),
        (pa.decimal128(5, 2), [None, *map(int, "5317902")]),
        (pa.float16(), [2.0, None, 1.0, -1.0, 0.5, 3.0]),
        (pa.dictionary(pa.int8(), pa.string()), ["b", None, "a", "c"] * 4),
    ],
)
def test_every_type_with_an_order_is_sorted(kind: Any, values: list[Any]) -> None:
    rows = made(table(values, kind).sort("k"))
    numbers = range(len(values))
    null = [n for n in numbers if values[n] is None]
    nan = [n for n in numbers if values[n] != values[n]]
    plain = sorted(set(numbers) - {*null, *nan}, key=lambda n: (values[n], n))
    assert [row["n"] for row in rows] == plain + nan + null


@given(st.integers(0, 60), st.integers(0, 2**31), st.integers(1, 9))
def test_a_shuffle_keeps_all_rows_and_depends_on_its_seed_alone(
    count: int, seed: int, blocks: int
) -> None:
    one = [row["n"] for row in made(table([0] * count).random_shuffle(seed=seed))]
    other = [
        row["id"] for row in made(data.range(count).random_shuffle(seed=seed, num_blocks=blocks))
    ]
    assert sorted(one) == list(range(count))
    assert one == other


def test_every_row_may_come_to_every_place_in_a_shuffle() -> None:
    seen = {
        (n, place)
        for seed in range(200)
        for place, row in enumerate(made(table([0] * 6).random_shuffle(seed=seed)))
        for n in [row["n"]]
    }
    assert seen == {(n, place) for n in range(6) for place in range(6)}


@given(st.integers(0, 40), st.integers(1, 60))
def test_a_repartition_keeps_the_order_and_makes_as_many_blocks(count: int, blocks: int) -> None:
    units = [table_of(u) for u in execute(table([0] * count).repartition(blocks)._plan, local=True)]
    assert [n for each in units for n in each.column("n").to_pylist()] == list(range(count))
    sizes = [each.num_rows for each in units]
    if count:
        assert len(sizes) == blocks
        assert max(sizes) - min(sizes) <= 1


@given(rows_of_keys, st.integers(2, 6))
def test_a_repartition_by_keys_has_equal_keys_in_one_block(values: list[Any], blocks: int) -> None:
    dataset = table(values).repartition(blocks, keys=["k"])
    units = [table_of(unit) for unit in execute(dataset._plan, local=True)]
    assert sorted(n for each in units for n in each.column("n").to_pylist()) == list(
        range(len(values))
    )
    for key in set(values):
        assert sum(key in each.column("k").to_pylist() for each in units) == 1


def test_the_first_rows_of_groups_and_joins_are_as_many_as_wanted() -> None:
    numbers = data.range(40)
    groups = numbers.groupby("id", 4).count()
    joined = numbers.join(numbers, "inner", 4, on=("id",))
    for dataset in (groups, joined, groups.sort("id"), groups.zip(numbers)):
        for first in (dataset.limit(13), dataset.limit(13).map(lambda row: row)):
            assert [row["id"] for row in made(first)] == list(range(13))


def test_what_functions_make_of_partitions_is_put_together_into_blocks() -> None:
    groups = data.range(8).groupby("id", 2).map_groups(lambda group: group)
    batches = data.range(8).repartition(2).map_batches(lambda batch: batch, batch_size=1)
    for dataset in (groups, batches):
        assert [unit.rows for unit in execute(dataset._plan, local=True)] == [4, 4]


def test_a_repartition_that_shuffles_takes_rows_in_turns() -> None:
    units = execute(table([0] * 7).repartition(3, shuffle=True)._plan, local=True)
    assert [table_of(u).column("n").to_pylist() for u in units] == [[0, 3, 6], [1, 4], [2, 5]]


def groups_of(values: list[Any]) -> dict[Any, list[int]]:
    groups: dict[Any, list[int]] = {}
    for n in in_order(values):
        groups.setdefault(values[n], []).append(n)
    return groups


@given(rows_of_keys)
def test_aggregates_of_groups_are_those_of_lists(values: list[Any]) -> None:
    aggs = (Count(), Sum("n"), Min("n"), Max("n"), Mean("n"), Std("n"), AbsMax("n"))
    lists = (AsList("n"), Unique("n"), CountDistinct("n"), Quantile("n"))
    rows = made(table(values).groupby("k").aggregate(*aggs, *lists))
    expected = [
        {
            "k": key,
            "count()": len(ns),
            "sum(n)": sum(ns),
            "min(n)": min(ns),
            "max(n)": max(ns),
            "mean(n)": pytest.approx(sum(ns) / len(ns)),
            "std(n)": pytest.approx(statistics.stdev(ns) if ns[1:] else math.nan, nan_ok=True),
            "abs_max(n)": max(ns),
            "list(n)": ns,
            "unique(n)": ns,
            "count_distinct(n)": len(ns),
            "quantile(n)": statistics.median(ns),
        }
        for key, ns in groups_of(values).items()
    ]
    assert rows == expected


@given(rows_of_keys, st.randoms(use_true_random=False))
def test_different_values_of_groups_are_those_of_lists_in_their_order(
    values: list[Any], random: Any
) -> None:
    pool = [None, *(random.randrange(2**40) for _ in range(20))]
    values, others = values * 9, [random.choice(pool) for _ in values * 9]
    columns = {"k": pa.array(values, pa.int64()), "v": pa.array(others, pa.int64())}
    grouped = data.from_arrow(pa.table(columns)).groupby("k")
    rows = made(grouped.aggregate(Unique("v"), CountDistinct("v")))
    expected = [list(dict.fromkeys(others[n] for n in ns)) for ns in groups_of(values).values()]
    assert [row["unique(v)"] for row in rows] == expected
    assert [row["count_distinct(v)"] for row in rows] == [len({*v} - {None}) for v in expected]


@given(rows_of_keys, rows_of_keys, st.integers(1, 4))
def test_groups_of_several_columns_have_the_rows_of_lists(
    first: list[Any], second: list[Any], parts: int
) -> None:
    pairs = list(zip(first, second, strict=False))
    columns = {"k": [k for k, _ in pairs], "j": [j for _, j in pairs], "n": range(len(pairs))}
    kind = pa.schema([(name, pa.int64()) for name in columns])
    numbers = data.from_arrow(pa.table(columns, kind))
    wanted: dict[Any, list[int]] = {}
    for number in sorted(range(len(pairs)), key=lambda n: [(v is None, v or 0) for v in pairs[n]]):
        wanted.setdefault(pairs[number], []).append(number)
    grouped = numbers.groupby(["k", "j"], parts)
    found = made(grouped.aggregate(AsList("n"), Sum("n")))
    assert [(row["k"], row["j"]) for row in found] == list(wanted)
    assert [row["list(n)"] for row in found] == list(wanted.values())
    assert [row["sum(n)"] for row in found] == list(map(sum, wanted.values()))
    mapped = made(
        grouped.map_groups(
            lambda group: {"n": [group.column("n").to_pylist()]}, batch_format="pyarrow"
        )
    )
    assert [row["n"] for row in mapped] == list(wanted.values())


@given(rows_of_keys, st.booleans())
def test_null_is_left_out_or_makes_the_result_null(values: list[Any], ignore: bool) -> None:
    there = [value for value in values if value is not None]
    aggs = [kind("k", ignore_nulls=ignore) for kind in (Sum, Min, Max, Mean, Std, Count)]
    (row,) = made(table(values).groupby(None).aggregate(*aggs))
    known = there and (ignore or len(there) == len(values))
    assert row.pop("count(k)") == (len(there) if ignore else len(values))
    std = statistics.stdev(there) if there[1:] else math.nan
    mean = statistics.mean(there) if there else 0
    functions = (sum, min, max, lambda _: mean, lambda _: std)
    for result, function in zip(row.values(), functions, strict=True):
        expected = pytest.approx(function(there), nan_ok=True) if known else None
        assert result == expected


@pytest.mark.parametrize(
    "values",
    [
        pa.array([2**64 - 1, None, 1], pa.uint64()),
        pa.array([1, None, 1], pa.int8()),
        pa.array(["b", None, "a"], pa.large_string()),
        pa.array([1, None, 2], pa.duration("s")),
        pa.array([1, None, 2], pa.decimal128(5, 2)),
        pa.nulls(3),
    ],
)
def test_lists_of_values_are_of_their_type(values: Any) -> None:
    dataset = data.from_arrow(
        [pa.table({"k": [0], "v": each}) for each in (values[:1], values[1:2], values[2:])]
    )
    grouped = dataset.groupby("k").aggregate(AsList("v"), Unique("v"), CountDistinct("v"))
    found = concat([table_of(unit) for unit in execute(grouped._plan, local=True)])
    there = values.to_pylist()
    assert found.schema.field("list(v)").type == pa.list_(values.type)
    assert found.schema.field("unique(v)").type == pa.list_(values.type)
    assert found.to_pylist() == [
        {
            "k": 0,
            "list(v)": there,
            "unique(v)": list(dict.fromkeys(there)),
            "count_distinct(v)": len({*there} - {None}),
        }
    ]
    (row,) = made(dataset.groupby("k").aggregate(AsList("v", ignore_nulls=True)))
    assert row["list(v)"] == [value for value in there if value is not None]


def test_a_list_of_tensors_or_objects_has_them_as_they_were() -> None:
    values = [np.arange(4).reshape(2, 2), np.arange(6).reshape(2, 3)]
    dataset = data.from_items([{"k": 0, "v": value, "o": {1, 2}} for value in values])
    (row,) = made(dataset.groupby("k").aggregate(AsList("v"), AsList("o")))
    assert [value.tolist() for value in row["list(v)"]] == [value.tolist() for value in values]
    assert row["list(o)"] == [{1, 2}] * 2


def test_a_list_has_tensors_and_objects_of_blocks_that_differ() -> None:
    columns: list[Any] = [np.ones((1, 2)), np.ones((1, 3), np.float32), [{1}], [2], [None]]
    for some in (columns[:2], columns[2:4], columns):
        dataset = data.from_arrow([{"k": [0], "v": values} for values in some])
        (row,) = made(dataset.groupby("k").aggregate(AsList("v")))
        assert [*map(str, row["list(v)"])] == [str(values[0]) for values in some]


def test_the_mean_of_integers_whose_sum_is_too_large_is_right() -> None:
    dataset = data.from_items([{"n": 2**62}] * 4)
    assert dataset.mean("n") == 2.0**62
    assert dataset.aggregate(Quantile("n")) == {"quantile(n)": 2.0**62}


def test_an_aggregation_of_ray_that_is_not_here_says_what_to_do_instead() -> None:
    with pytest.raises(ImportError, match=r"no 'ValueCounter': groupby\(column\).count\(\)"):
        from miniray.data.aggregate import ValueCounter  # noqa: F401
    with pytest.raises(AttributeError, match=r"Dataset.with_column\(\)"):
        data.range(1).groupby("id").with_column  # noqa: B018 -- what is tested


def test_bounds_of_partitions_divide_keys_of_all_units() -> None:
    units = [BlockRows.unit(pa.table({"k": range(low, low + 5)})) for low in range(95, -5, -5)]
    how = Ordered(("k",))
    with pytest.raises(StopIteration) as done:
        next(_samples(how, [units], Setting(data.DataContext(), local=True)))
    assert how.bounds(done.value.value, 4).column("k").to_pylist() == [25, 50, 75]


def test_a_side_of_a_join_without_rows_has_its_columns(tmp_path: Path) -> None:
    pq.write_table(pa.table({"k": [1], "a": [2]}), tmp_path / "a.parquet")
    nothing = data.read_parquet(str(tmp_path)).filter(expr="a > 5")
    for empty in (nothing, data.from_items([{"k": 1, "a": 2}]).limit(0)):
        joined = empty.join(data.from_items([{"k": 1, "b": 3}]), "right_outer", on=("k",))
        assert made(joined) == [{"a": None, "k": 1, "b": 3}]


def test_rows_without_columns_are_shuffled() -> None:
    assert made(data.from_items([{}] * 10).random_shuffle(seed=1)) == [{}] * 10


def test_decimals_have_a_deviation() -> None:
    values = [1, 1, 2, 9, 9, 8]  # the mean of each half has more digits than these decimals
    numbers = pa.table({"n": pa.array(values, pa.decimal128(5, 2))})
    dataset = data.from_arrow([numbers[:3], numbers[3:]])
    (row,) = made(dataset.groupby(None).aggregate(Std("n")))
    assert row["std(n)"] == pytest.approx(statistics.stdev(values), rel=1e-12)


def test_a_deviation_is_divided_by_rows_less_ddof() -> None:
    numbers = table([1, 2, 4] * 2)
    for ddof, expected in ((0, statistics.pstdev), (1, statistics.stdev)):
        found = made(numbers.groupby("k").std("n", ddof=ddof))
        assert [row["std(n)"] for row in found] == [expected([n, n + 3]) for n in range(3)]


def test_aggregates_of_a_dataset_leave_out_null_or_do_not_as_they_are_told() -> None:
    numbers = table([1, None])
    assert (numbers.sum("k"), numbers.sum("k", ignore_nulls=False)) == (1, None)
    assert numbers.unique("k") == [1, None]
    assert numbers.unique("k", ignore_nulls=True) == [1]


def test_the_largest_absolute_value_may_be_a_negative_one_or_null() -> None:
    numbers = table([3, -5, None, 4, 0, 1])
    for ignore, largest in ((True, 5), (False, None)):
        agg = AbsMax("k", ignore_nulls=ignore)
        assert made(numbers.groupby(None).aggregate(agg)) == [{"abs_max(k)": largest}]
    nothing = data.from_arrow(pa.table({"k": pa.nulls(3)}))
    assert made(nothing.groupby(None).aggregate(AbsMax("k"))) == [{"abs_max(k)": None}]


def test_an_aggregation_of_functions_sees_keys_and_rows() -> None:
    product = AggregateFn(
        init=lambda key: [key],
        accumulate_row=lambda found, row: [*found, row["n"]],
        merge=lambda one, other: one + other[1:],
        finalize=lambda found: str(found),
        name="all",
    )
    there = table([1, 2, 1, 2, 1, 1])
    for dataset in (there, there.union(there.filter(expr="n > 9"))):  # blocks without rows
        rows = made(dataset.groupby("k").aggregate(product))
        assert rows == [{"k": 1, "all": "[1, 0, 2, 4, 5]"}, {"k": 2, "all": "[2, 1, 3]"}]
    assert made(table([]).groupby("k").aggregate(product)) == []


def test_an_aggregation_as_a_class_combines_blocks() -> None:
    class Size(AggregateFnV2):
        def __init__(self) -> None:
            super().__init__("size", lambda: 0, on="n", ignore_nulls=True)

        def aggregate_block(self, block: Any) -> Any:
            return block.num_rows

        def combine(self, current_accumulator: Any, new: Any) -> Any:
            return current_accumulator + new

        def finalize(self, accumulator: Any) -> Any:
            return -accumulator

    assert made(table([1] * 7).groupby("k").aggregate(Size())) == [{"k": 1, "size": -7}]


@pytest.mark.parametrize("ignore", [True, False])
def test_an_aggregation_as_a_class_leaves_out_null_or_makes_the_result_null(ignore: bool) -> None:
    class Product(AggregateFnV2):
        def __init__(self) -> None:
            super().__init__("product", lambda: 1, on="k", ignore_nulls=ignore)

        def aggregate_block(self, block: Any) -> Any:
            return pa.compute.product(block["k"], skip_nulls=ignore, min_count=1).as_py()

        def combine(self, current_accumulator: Any, new: Any) -> Any:
            return current_accumulator * new

    for values, product in (([2, 3] * 3, 216), ([2] * 5 + [None] * 5, 32 if ignore else None)):
        found = made(table(values).groupby(None).aggregate(Product()))
        assert found == [{"product": product}]


@given(rows_of_keys)
def test_each_group_is_mapped_whole_and_in_the_order_of_keys(values: list[Any]) -> None:
    def first_and_size(group: Any) -> Any:
        return pa.table({"n": group.column("n").slice(0, 1), "size": [group.num_rows]})

    grouped = table(values).groupby("k").map_groups(first_and_size, batch_format="pyarrow")
    assert made(grouped) == [{"n": ns[0], "size": len(ns)} for ns in groups_of(values).values()]


def test_texts_of_views_are_groups() -> None:
    found = made(table(["b", None, "a", "b"], pa.string_view()).groupby("k").count())
    assert [tuple(row.values()) for row in found] == [("a", 1), ("b", 2), (None, 1)]


def test_all_rows_are_one_group_without_a_key() -> None:
    grouped = table([1, 2] * 9).groupby(None).map_groups(lambda group: {"size": [len(group["n"])]})
    assert made(grouped) == [{"size": 18}]


def test_a_function_that_fails_on_a_group_is_named_with_the_rows() -> None:
    def fails(group: Any) -> Any:
        raise ValueError("no good")

    told = r"MapGroups\(fails\) failed on rows 0 to \d of .*GroupBy: ValueError: no good"
    with pytest.raises(data.DataError, match=told):
        made(table([1, 1, 2]).groupby("k").map_groups(fails))


@given(rows_of_keys, rows_of_keys, st.sampled_from(list(JOINS)))
def test_joins_are_those_of_lists(left: list[Any], right: list[Any], kind: str) -> None:
    pairs = [
        (one, other)
        for one, key in enumerate(left)
        for other, found in enumerate(right)
        if key == found and key is not None
    ]
    lone_left = [(n, None) for n in range(len(left)) if n not in {one for one, _ in pairs}]
    lone_right = [(None, n) for n in range(len(right)) if n not in {two for _, two in pairs}]
    lefts, rights = {one for one, _ in pairs}, {two for _, two in pairs}
    expected: Any = {
        "inner": pairs,
        "left_outer": pairs + lone_left,
        "right_outer": pairs + lone_right,
        "full_outer": pairs + lone_left + lone_right,
        "left_semi": lefts,
        "right_semi": rights,
        "left_anti": set(range(len(left))) - lefts,
        "right_anti": set(range(len(right))) - rights,
    }[kind]
    dataset = table(left).join(table(right), kind, on=("k",), right_suffix="_r", num_partitions=3)
    rows = made(dataset)
    if kind.endswith(("semi", "anti")):
        own = left if kind.startswith("left") else right
        assert [row["n"] for row in rows] == [n for n in in_order(own) if n in expected]
        return
    found = [(row["n"], row["n_r"]) for row in rows]
    assert sorted(found, key=str) == sorted(expected, key=str)
    for row, (one, other) in zip(rows, found, strict=True):
        assert row["k"] == (left[one] if one is not None else right[other])


def test_columns_of_a_join_have_the_suffix_of_their_side_and_keys_may_have_two_names() -> None:
    other = table([1]).rename_columns({"k": "key"})
    joined = table([1, 1]).join(
        other, "left_outer", on="k", right_on="key", left_suffix="_l", right_suffix="_r"
    )
    assert made(joined) == [{"k": 1, "n_l": 0, "n_r": 0}, {"k": 1, "n_l": 1, "n_r": 0}]


def test_keys_of_different_numeric_types_are_joined_by_value() -> None:
    whole = data.from_arrow(pa.table({"k": pa.array([1, 2, 3], pa.int32()), "a": ["x", "y", "z"]}))
    real = data.from_arrow(pa.table({"k": [3.0, 1.0, 1.5], "b": [30, 10, 15]}))
    for parts in (1, 3):
        rows = made(whole.join(real, "inner", parts, on=("k",)))
        assert rows == [{"k": 1, "a": "x", "b": 10}, {"k": 3, "a": "z", "b": 30}]


def test_times_of_different_units_are_sorted_and_joined_by_value() -> None:
    times = [np.datetime64("2026-01-01") + np.timedelta64(n, "s") for n in range(40)]

    def of(unit: str, numbers: range) -> Any:
        column = np.array([times[n] for n in numbers], dtype=f"datetime64[{unit}]")
        return data.from_arrow(pa.table({"t": column, unit: list(numbers)}))

    joined = of("s", range(40)).join(of("us", range(40)), "inner", 4, on=("t",))
    assert [(row["s"], row["us"]) for row in made(joined)] == [(n, n) for n in range(40)]
    both = of("us", range(1, 40, 2)).union(of("s", range(0, 40, 2)))
    found = [row["us"] if row["s"] is None else row["s"] for row in made(both.sort("t"))]
    assert found == list(range(40))


def test_nan_of_either_sign_is_one_group() -> None:
    numbers = data.from_arrow(
        pa.table({"k": np.array([np.nan, -np.nan, 1, np.nan]), "n": range(4)})
    )
    found = made(numbers.groupby("k").aggregate(AsList("n"), Count()))
    assert [(row["list(n)"], row["count()"]) for row in found] == [([2], 1), ([0, 1, 3], 3)]
    signed = data.from_arrow(pa.table({"k": np.array([np.nan, -np.nan, 0.0, -0.0])}))
    assert made(signed.groupby(None).aggregate(CountDistinct("k"))) == [{"count_distinct(k)": 2}]


def test_keys_of_a_number_and_a_text_do_not_go_together() -> None:
    text = data.from_arrow(pa.table({"k": ["1"], "b": [2]}))
    for parts, error in ((1, ValueError), (3, data.DataError)):
        with pytest.raises(error, match="k has incompatible types: int64 vs string"):
            made(table([1]).join(text, "inner", parts, on=("k",)))


@pytest.mark.parametrize("parts", [1, 3])
def test_lists_structs_and_tensors_are_joined_beside_their_keys(parts: int) -> None:
    np = pytest.importorskip("numpy")
    nested = data.from_items(
        [
            {"k": n, "list": [n] * n, "struct": {"a": n}, "image": np.full((2, 2), n)}
            for n in range(4)
        ]
    )
    rows = made(nested.join(data.from_items([{"k": 2}, {"k": 9}]), "right_outer", parts, on=("k",)))
    assert [row["k"] for row in rows] == [2, 9]
    assert rows[0]["list"] == [2, 2]
    assert rows[0]["struct"] == {"a": 2}
    assert rows[0]["image"].tolist() == [[2, 2], [2, 2]]
    assert rows[1]["list"] is rows[1]["struct"] is rows[1]["image"] is None


@given(st.integers(0, 30), st.integers(1, 7))
def test_a_zip_has_the_columns_of_both(count: int, blocks: int) -> None:
    rows = made(table([5] * count).zip(data.range(count).repartition(blocks), table([6] * count)))
    assert rows == [{"k": 5, "n": n, "id": n, "k_1": 6, "n_1": n} for n in range(count)]
    ids = data.range(count)
    assert made(ids.zip(ids, ids)) == [{"id": n, "id_1": n, "id_2": n} for n in range(count)]


def test_rows_that_no_one_has_counted_are_dealt_out_and_zipped(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_text("".join(f"{n}\n" for n in ["x", *range(10)]))
    file = data.read_csv(str(tmp_path / "a.csv"))
    groups = data.range(10).groupby("id").count()
    for each, name in ((file, "x"), (groups, "id")):
        assert [row[name] for row in made(each.repartition(3))] == list(range(10))
        assert [row[f"{name}_1"] for row in made(each.zip(each))] == list(range(10))


def test_datasets_of_different_length_are_not_zipped() -> None:
    with pytest.raises(ValueError, match="the same length; these have 3, 4 rows"):
        made(data.range(3).zip(data.range(4)))
    with pytest.raises(ValueError, match="the same length; these have 3, 4 rows"):
        data.range(3).zip(data.range(4)).count()
    assert repr(data.range(3).zip(data.range(4))).startswith("shape: (?, ?)")
    assert data.range(3).zip(data.range(3)).count() == 3


@pytest.mark.parametrize("count", [0, 1])
def test_no_row_and_one_row_go_through_everything(count: int) -> None:
    one = table([1] * count)
    expected = [{"k": 1, "n": 0}] * count
    for dataset in (
        one.sort("k"),
        one.random_shuffle(seed=1),
        one.repartition(5),
        one.repartition(5, shuffle=True),
        one.repartition(5, keys=["k"]),
        one.groupby("k").map_groups(lambda group: group),
        one.join(one, "left_semi", 4, on=("k",)),
        one.sort("k").random_shuffle(seed=2).sort("n", descending=True),
    ):
        assert made(dataset) == expected
    assert one.sum("n") == (0 if count else None)
    assert one.unique("k") == [1] * count
    assert one.aggregate(Count(), Max("n")) == {"count()": count, "max(n)": 0 if count else None}
    assert made(one.groupby(None, 3).aggregate(AsList("n"))) == [{"list(n)": [0] * count}]


def test_a_dataset_of_nothing_at_all_is_sorted_grouped_and_joined() -> None:
    nothing = data.from_items([])
    assert made(nothing.sort("k")) == made(nothing.groupby("k").count()) == []
    assert made(nothing.join(table([1]), "right_outer", on=("k",))) == [{"k": 1, "n": 0}]
    assert made(nothing.join(table([1]), "full_outer", on=("k",))) == [{"k": 1, "n": 0}]
    assert made(table([1]).join(nothing, "left_outer", on=("k",))) == [{"k": 1, "n": 0}]


def test_a_missing_column_is_named_with_those_that_there_are() -> None:
    dataset = table([1])
    for call in (
        lambda: dataset.sort("x"),
        lambda: dataset.groupby("x"),
        lambda: dataset.repartition(2, keys=["x"]),
        lambda: dataset.join(dataset, "inner", on=("x",)),
        lambda: dataset.groupby("k").sum("x"),
        lambda: dataset.unique("x"),
    ):
        with pytest.raises(ValueError, match=r"no column 'x'.*columns: k, n"):
            call()
    later = dataset.map(lambda row: row)
    for lazy in (later.sort("x"), later.groupby("x").count(), later.groupby("k").sum("x")):
        with pytest.raises(data.DataError, match=r"no column 'x', but k, n"):
            made(lazy)


def test_a_column_of_lists_has_no_order() -> None:
    with pytest.raises(data.DataError, match=r"Sort: the column 'a' has the type list.*no order"):
        made(data.from_items([{"a": [1]}, {"a": [2]}]).sort("a"))


def test_an_aggregation_that_a_column_has_no_values_for_names_it_its_type_and_where() -> None:
    names = data.from_items([{"k": 1, "name": "a"}])
    told = r"^Aggregate\(sum\(name\)\) failed on rows of a table: .*'hash_sum' .*\(string.*\)$"
    with pytest.raises(data.DataError, match=told):
        names.sum("name")
    with pytest.raises(data.DataError, match=told):
        made(names.groupby("k").sum("name"))


def test_an_aggregation_of_a_user_tells_what_arrow_does_not_compute_in_it_and_where() -> None:
    def total(_: Any, block: Any) -> Any:
        return pa.compute.sum(block.column("name")).as_py()

    sums = AggregateFn(lambda _: 0, max, "sums", accumulate_block=total)
    told = r"Function 'sum' has no kernel[^\n]*\n[^\n]*, in total\n"
    with pytest.raises(data.DataError, match=told):
        data.from_items([{"k": 1, "name": "a"}]).aggregate(sums)


def test_arguments_that_make_no_sense_are_refused() -> None:
    dataset = table([1])
    for call, message in (
        (lambda: dataset.sort(None), "columns are a string or a list"),
        (lambda: dataset.sort([]), "`descending` must be true or false"),
        (lambda: dataset.sort("k", [True, False]), "`descending` must be true or false"),
        (lambda: dataset.sort(["k", "k"]), "twice"),
        (lambda: dataset.repartition(), "takes num_blocks, or target"),
        (lambda: dataset.repartition(1, 1), "takes num_blocks, or target"),
        (lambda: dataset.repartition(0), "1 or more"),
        (lambda: dataset.groupby("k", 0).count(), "1 or more"),
        (lambda: dataset.random_shuffle(num_blocks="x"), "1 or more"),
        (lambda: dataset.join(dataset, "outer", on=("k",)), "must be one of inner"),
        (lambda: dataset.join(dataset, "inner", on=5), "columns are a string or a list"),
        (lambda: dataset.join(dataset, "inner", on="k", right_on=["k", "n"]), "differ in length"),
        (lambda: dataset.join(dataset, "inner", on=("k",)), r"overlapping: \['n'\]"),
        (lambda: dataset.groupby("k").aggregate(), "needs aggregations"),
        (lambda: dataset.groupby("k").aggregate(Count(), Count()), "different names"),
        (lambda: dataset.train_test_split(0.5, shuffle=True, stratify="k"), "not both"),
    ):
        with pytest.raises(ValueError, match=message):
            call()
    with pytest.raises(TypeError, match=r"missing 1 required .*: 'on'"):
        CountDistinct()
    with pytest.raises(TypeError, match=r"CountDistinct\(\) needs the name of a column"):
        CountDistinct(None)
    assert dataset.join(dataset, "left_semi", on=("k",), validate_schemas=True).count() == 1
    with pytest.raises(TypeError, match="unexpected keyword argument 'sorted'"):
        dataset.join(dataset, "left_semi", on=("k",), sorted=True)


def test_what_is_known_of_rows_and_columns_is_known_before() -> None:
    dataset = table([2, 1]).sort("k").random_shuffle()
    assert (dataset.count(), dataset.columns()) == (2, ["k", "n"])
    assert dataset._stats is None
    assert not dataclasses.is_dataclass(dataset)


def test_quantiles_of_large_values_are_those_of_numpy_and_leave_out_nan_as_in_ray() -> None:
    rows = [("a", math.inf), ("b", 1.0), ("b", 2.0), ("b", 4.0), ("c", math.nan), ("c", 1.0)]
    rows.append(("d", math.nan))
    numbers = data.from_items([{"k": key, "n": value} for key, value in rows])
    found = made(numbers.groupby("k").aggregate(Quantile("n", q=0.75, alias_name="q")))
    assert [row["q"] for row in found] == [math.inf, 3.0, 1.0, None]
    for ignore, median in ((True, 1.5), (False, None)):
        agg = Quantile("k", ignore_nulls=ignore, alias_name="q")
        assert made(table([1, None, 2]).groupby(None).aggregate(agg)) == [{"q": median}]


def test_a_part_of_a_unit_has_its_share_of_bytes_and_random_numbers_of_its_own() -> None:
    part = ReadUnit(BlockRows(), 4, 100, refs=("a ref",), key=5).part(0, 1)
    assert (part.rows, part.size, part.key) == (1, 25, None)


def test_units_that_are_read_together_get_the_values_of_their_own_refs() -> None:
    tables = [pa.table({"n": range(low, low + 4)}) for low in (0, 4)]
    wholes = [ReadUnit(BlockRows(), 4, refs=(ref,)) for ref in ("a ref", "another")]
    inner = together([[wholes[0].part(0, 2), wholes[1].part(3, 4)]])
    unit = together([[wholes[1].part(0, 1), inner]])
    assert unit.refs == ("another", "a ref", "another")
    found = pa.concat_tables(unit.read(tables[1], tables[0], tables[1]))
    assert found["n"].to_pylist() == [4, 0, 1, 7]
