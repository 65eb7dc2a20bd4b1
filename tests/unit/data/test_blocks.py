"""Blocks: rows and batches into Arrow tables and back; no cluster."""

from __future__ import annotations

import datetime
import io
import itertools
import json
import tracemalloc
import weakref
from typing import Any

import pytest

np = pytest.importorskip("numpy")
pa = pytest.importorskip("pyarrow")

from hypothesis import given  # noqa: E402
from hypothesis import strategies as st  # noqa: E402

from miniray.data import blocks  # noqa: E402
from miniray.data import tables as tables_  # noqa: E402
from miniray.data.transforms import MapBatches, MapRows, Udf, Where  # noqa: E402

cells = st.one_of(
    st.none(), st.integers(-(2**62), 2**62), st.text(max_size=5), st.binary(max_size=5)
)


@given(st.lists(st.fixed_dictionaries({"a": cells, "b": st.lists(st.integers(0, 9))}), max_size=9))
def test_rows_come_back_as_they_were(rows: list[dict[str, Any]]) -> None:
    assert list(blocks.table_to_rows(blocks.rows_to_table(rows))) == rows


@pytest.mark.parametrize("dtype", ["int8", "float32", "bool", "uint16"])
def test_tensors_keep_shape_and_type(dtype: str) -> None:
    array = (np.arange(24) % 2).reshape(2, 3, 4).astype(dtype)
    table = blocks.batch_to_table({"x": array})
    back = blocks.table_to_batch(table, "numpy")["x"]
    assert back.dtype == array.dtype
    assert (back == array).all()
    (_, second) = blocks.table_to_rows(table)
    assert (second["x"] == array[1]).all()
    (sliced,) = blocks.table_to_batch(table.slice(1), "numpy")["x"]
    assert (sliced == array[1]).all()


def test_tensors_of_different_shapes_keep_theirs_also_beside_others() -> None:
    ragged = blocks.rows_to_table([{"x": np.ones((2, 2))}, {"x": np.zeros(3)}])
    even = blocks.rows_to_table([{"x": np.ones((4, 1))}])
    rows = list(blocks.table_to_rows(tables_.concat([ragged, even])))
    assert [row["x"].shape for row in rows] == [(2, 2), (3,), (4, 1)]
    assert blocks.table_to_batch(ragged, "numpy")["x"][1].tolist() == [0, 0, 0]


def test_an_object_in_memory_that_is_read_like_a_file_is_a_python_object() -> None:
    table = blocks.rows_to_table([{"x": io.BytesIO(b"abc")}, {"x": None}])
    (first, second) = blocks.table_to_rows(table)
    assert (first["x"].read(), second["x"]) == (b"abc", None)


def test_python_objects_travel_pickled_but_never_out_of_a_file(tmp_path: Any) -> None:
    import pyarrow.parquet as pq

    table = blocks.rows_to_table([{"x": {1, 2}}, {"x": None}])
    assert [row["x"] for row in blocks.table_to_rows(table)] == [{1, 2}, None]
    pq.write_table(table, tmp_path / "x.parquet")
    (first, _) = blocks.table_to_rows(blocks.from_file(pq.read_table(tmp_path / "x.parquet")))
    assert isinstance(first["x"], bytes)


def test_missing_values_of_pandas_are_null_beside_times_and_numbers() -> None:
    pandas = pytest.importorskip("pandas")
    day = datetime.datetime(2020, 1, 1)
    for missing, value in ((pandas.NaT, day), (pandas.NA, 3)):
        for values in ([missing, value], [value, missing], [missing]):
            table = blocks.rows_to_table([{"x": each} for each in values])
            expected = [None if each is missing else each for each in values]
            assert [row["x"] for row in blocks.table_to_rows(table)] == expected


def test_complex_numbers_come_back_as_they_were() -> None:
    for values in (np.array([1j, 2]), np.ones((2, 3), complex)):
        rows = blocks.table_to_rows(blocks.batch_to_table({"x": values}))
        assert all((row["x"] == value).all() for row, value in zip(rows, values, strict=True))


def test_records_of_an_array_keep_the_names_of_their_fields() -> None:
    values = np.array([(1, 2.5), (2, 3.5)], dtype=[("n", "i8"), ("x", "f8")])
    rows = list(blocks.table_to_rows(blocks.batch_to_table({"r": values})))
    for made in (rows, list(blocks.table_to_rows(blocks.rows_to_table(rows)))):
        assert [(row["r"]["n"], row["r"]["x"]) for row in made] == [(1, 2.5), (2, 3.5)]


def test_integers_of_pandas_stay_integers_beside_a_null() -> None:
    pandas = pytest.importorskip("pandas")
    numbers = pandas.array([2**60 + 1, None], dtype="Int64")
    frame = pandas.DataFrame({"n": numbers, "x": [0.5, 1.5]})
    back = blocks.table_to_batch(blocks.batch_to_table(frame), "pandas")
    assert list(map(str, back.dtypes)) == ["Int64", "float64"]
    assert back["n"][0] == 2**60 + 1


def test_columns_that_are_no_longer_integers_of_pandas_reach_pandas() -> None:
    pandas = pytest.importorskip("pandas")
    numbers = pandas.DataFrame({"n": pandas.array([1, None], dtype="Int64")})
    table = blocks.batch_to_table(numbers)
    values: list[Any]
    for values in (["a", "b"], [0.5, 1.5], [{"x": 1}, {"x": 2}]):
        other = table.set_column(0, "n", pa.array(values))
        assert blocks.table_to_batch(other, "pandas")["n"].tolist() == values
    both = tables_.concat([table, pa.table({"n": [0.5]})])
    assert blocks.table_to_batch(both, "pandas")["n"].tolist()[2] == 0.5


@pytest.mark.parametrize("kind", [pa.list_(pa.int64()), pa.struct([("x", pa.int64())])])
def test_nested_types_of_arrow_in_pandas_become_values(kind: Any) -> None:
    pandas = pytest.importorskip("pandas")
    values = pandas.array(pa.array([None], kind), dtype=pandas.ArrowDtype(kind))
    table = blocks.batch_to_table(pandas.DataFrame({"x": values}))
    assert blocks.table_to_batch(table, "pandas")["x"].tolist() == [None]


@pytest.mark.parametrize("dtype", ["int8", "float64", "bool", "complex128"])
def test_masked_values_of_an_array_are_null(dtype: str) -> None:
    masked = np.ma.masked_array([1, 0, 1], mask=[False, True, False], dtype=dtype)
    rows = blocks.table_to_rows(blocks.batch_to_table({"x": masked}))
    assert [row["x"] for row in rows] == [1, None, 1]


def test_the_rows_of_a_matrix_are_tensors() -> None:
    with pytest.warns(PendingDeprecationWarning):
        matrix = np.matrix([[1, 2], [3, 4]])
    assert blocks.table_to_batch(blocks.batch_to_table({"x": matrix}), "numpy")["x"].tolist() == [
        [1, 2],
        [3, 4],
    ]


@pytest.mark.parametrize("version", [1, 2])
def test_tensors_that_ray_has_written_come_out_in_their_shape(version: int, tmp_path: Any) -> None:
    import pyarrow.parquet as pq

    kind = pa.list_(pa.uint8()) if version == 1 else pa.large_list(pa.uint8())
    name = "ray.data.arrow_tensor" + ("" if version == 1 else "_v2")
    metadata = {
        b"ARROW:extension:name": name.encode(),
        b"ARROW:extension:metadata": json.dumps([2, 2, 3]).encode(),
    }
    values = pa.array([list(range(12)), list(range(12, 24)), None], kind)
    table = pa.Table.from_arrays(
        [values], schema=pa.schema([pa.field("image", kind, metadata=metadata)])
    )
    pq.write_table(table, tmp_path / "ray.parquet")
    read = blocks.from_file(pq.read_table(tmp_path / "ray.parquet"))
    assert blocks.table_to_batch(read.slice(0, 2), "numpy")["image"].shape == (2, 2, 2, 3)
    assert read["image"].slice(2).to_pylist() == [None]
    assert blocks.from_file(read.slice(0, 0)).schema == read.schema


def test_tensors_of_different_shapes_that_ray_has_written_come_out_in_theirs(tmp_path: Any) -> None:
    import pyarrow.parquet as pq

    kind = pa.struct([("data", pa.list_(pa.uint8())), ("shape", pa.list_(pa.int64()))])
    metadata = {
        b"ARROW:extension:name": b"ray.data.arrow_variable_shaped_tensor",
        b"ARROW:extension:metadata": b"2",
    }
    cells = [{"data": [1, 2], "shape": [1, 2]}, {"data": [3, 4, 5], "shape": [3, 1]}, None]
    schema = pa.schema([pa.field("image", kind, metadata=metadata)])
    pq.write_table(pa.table([pa.array(cells, kind)], schema=schema), tmp_path / "ray.parquet")
    read = blocks.from_file(pq.read_table(tmp_path / "ray.parquet"))
    found = [row["image"] for row in blocks.table_to_rows(read)]
    assert [image if image is None else image.tolist() for image in found] == [
        [[1, 2]],
        [[3], [4], [5]],
        None,
    ]


def test_a_column_that_is_null_in_some_blocks_takes_the_type_of_the_others() -> None:
    tables = [pa.table({"a": pa.nulls(2)}), pa.table({"a": [1]}), pa.table({"a": [0.5]})]
    assert tables_.concat(tables).column("a").to_pylist() == [None, None, 1.0, 0.5]


def test_types_that_do_not_go_together_are_told_by_column() -> None:
    with pytest.raises(ValueError, match="a has incompatible types: int64 vs string"):
        tables_.concat([pa.table({"a": [1]}), pa.table({"a": ["x"]})])


@given(st.lists(st.integers(0, 7), max_size=8), st.integers(1, 9), st.booleans())
def test_batches_have_their_size_and_all_rows(sizes: list[int], size: int, drop: bool) -> None:
    bounds = np.cumsum([0, *sizes])
    tables = [pa.table({"a": np.arange(a, b)}) for a, b in itertools.pairwise(bounds)]
    made = [rows.table for rows in tables_.batched(tables, size, drop_last=drop)]
    rows = [n for table in made for n in table.column("a").to_pylist()]
    total = int(bounds[-1]) // size * size if drop else int(bounds[-1])
    assert rows == list(range(total))
    assert all(table.num_rows == size for table in made[:-1])


@given(st.lists(st.integers(1, 7), min_size=1, max_size=8), st.integers(1, 9))
def test_batches_do_not_depend_on_how_blocks_were_cut(sizes: list[int], size: int) -> None:
    rows = sum(sizes)
    numbers: Any = np.arange(rows)
    columns = {
        "int": numbers,
        "float": numbers / 2,
        "bool": numbers % 2 == 0,
        "null": [None if n % 3 else n for n in range(rows)],
        "text": [str(n) for n in range(rows)],
        "lists": [[0] * (n // 4 % 3) for n in range(rows)],
        "tensors": np.arange(rows * 4).reshape(rows, 2, 2),
    }
    whole = blocks.batch_to_table(columns)
    bounds = np.cumsum([0, *sizes])
    pieces = [whole.slice(a, b - a) for a, b in itertools.pairwise(bounds)]
    for tables in (pieces, [pa.concat_tables(pieces)]):
        made = list(tables_.batched(tables, size))
        for rows_, start in zip(made, range(0, rows, size), strict=True):
            batch = rows_.batch("numpy", writable=True)
            expected = blocks.table_to_batch(whole.slice(start, size), "numpy")
            assert list(batch) == list(expected)
            for name, array in batch.items():
                assert array.dtype == expected[name].dtype, name
                np.testing.assert_equal(list(array), list(expected[name]))
                assert array.flags.writeable
            assert rows_.batch("pyarrow") == whole.slice(start, size)


def test_blocks_are_put_together_and_cut_by_bytes() -> None:
    small = [pa.table({"a": np.arange(10)}) for _ in range(100)]
    assert [t.num_rows for t in tables_.resized(iter(small), 4000)] == [500, 500]
    large = pa.table({"a": np.arange(1000)})
    assert [t.num_rows for t in tables_.resized(iter([large]), 2000)] == [250] * 4
    (empty,) = tables_.resized(iter([large.slice(0, 0)]), 2000)
    assert empty.schema == large.schema


def test_small_batches_of_arrays_of_the_same_kinds_become_one_table() -> None:
    def made(batch: Any) -> Any:
        number = batch["n"]
        kinds = {2: number.astype(np.float32), 4: list(number), 6: number.astype(np.float32)}
        return {"n": number, "m": kinds.get(number[0], number.reshape(-1, 1, 1))}

    step = MapBatches("MapBatches", Udf(made), batch_size=2)
    tables = list(step.run(iter([pa.table({"n": np.arange(12)})]), Where("here")))
    assert [each.num_rows for each in tables] == [2, 2, 2, 2, 4]
    assert [n for each in tables for n in each["n"].to_pylist()] == list(range(12))
    assert blocks.to_numpy(tables[-1]["m"]).tolist() == [[[8]], [[9]], [[10]], [[11]]]


@pytest.mark.parametrize(("size", "expected"), [(2**15, [2**19] * 2), (2**17, [2**17] * 8)])
def test_batches_become_a_table_of_some_mib_if_they_are_smaller(size: int, expected: Any) -> None:
    whole = pa.table({"n": np.arange(2**18)})
    step = MapBatches("MapBatches", Udf(lambda batch: batch), batch_size=size)
    assert [len(each) for each in step.run(iter([whole] * 4), Where("here"))] == expected


def test_what_a_function_returns_a_view_of_is_not_kept_until_there_is_a_table() -> None:
    whole: list[Any] = []

    def first(batch: Any) -> Any:
        assert all(each() is None for each in whole)
        large = np.zeros((len(batch["n"]), 1000))
        whole.append(weakref.ref(large))
        return {"n": large[:, 0]}

    step = MapBatches("MapBatches", Udf(first), batch_size=2)
    (table,) = step.run(iter([pa.table({"n": np.arange(6)})]), Where("here"))
    assert table["n"].to_pylist() == [0] * 6
    assert len(whole) == 3


def test_a_table_that_was_handed_on_is_free_before_the_next_one_is_made() -> None:
    made: list[Any] = []

    def of_batch(batch: Any) -> Any:
        assert all(each() is None for each in made)
        table = pa.table(batch)
        made.append(weakref.ref(table))
        return table

    step = MapBatches("MapBatches", Udf(of_batch), batch_size=2)
    for table in step.run(iter([pa.table({"n": np.arange(6)})]), Where("here")):
        del table
    assert len(made) == 3


@pytest.mark.parametrize("size", [1, 2**17])
@pytest.mark.parametrize("others", [{}, {"text": ["a"]}, {"image": np.zeros((1, 2, 2))}])
def test_a_function_may_write_each_batch_into_the_same_array(size: int, others: Any) -> None:
    buffer = np.empty(size, np.int64)
    beside = {name: np.repeat(values, size, axis=0) for name, values in others.items()}

    def each_row(batch: Any) -> Any:
        for number in batch["n"]:
            buffer[:] = number
            yield {"n": buffer, **beside}

    step = MapBatches("MapBatches", Udf(each_row), batch_size=2)
    made = tables_.concat(list(step.run(iter([pa.table({"n": np.arange(6)})]), Where("here"))))
    assert made["n"].to_pylist()[::size] == list(range(6))


@pytest.mark.parametrize("value", [np.empty(2, np.int64), [0, 0]])
@pytest.mark.parametrize("kind", ["Map", "FlatMap"])
def test_a_function_may_make_each_row_of_the_same_objects(kind: str, value: Any) -> None:
    row: dict[str, Any] = {}

    def made(read: Any) -> Any:
        value[1] = read["n"]
        row.update(n=read["n"], value=value)
        return row if kind == "Map" else iter([row])

    step = MapRows(kind, Udf(made), kind)
    table = tables_.concat(list(step.run(iter([pa.table({"n": np.arange(6)})]), Where("here"))))
    assert [(each["n"], each["value"][1]) for each in blocks.table_to_rows(table)] == [
        (number, number) for number in range(6)
    ]


def test_each_of_many_batches_is_copied_once() -> None:
    looked: list[Any] = []

    class Counted(dict[str, Any]):
        def items(self) -> Any:
            looked.append(self)
            return super().items()

    one = blocks.Arrays.of({"n": np.arange(1)})
    assert one is not None
    batches = [one._replace(arrays=Counted(one.arrays)) for _ in range(100)]
    tables = list(tables_.tabulated(batches, 400))
    assert [each.num_rows for each in tables] == [50, 50]
    assert looked == [each.arrays for each in batches]


@pytest.mark.parametrize("count", [1, 20, 100])
def test_a_table_of_small_batches_takes_memory_of_about_its_size(count: int) -> None:
    tracemalloc.start()
    try:
        batches = (blocks.Arrays.of({"n": np.full(1000, number)}) for number in range(count))
        (table,) = tables_.tabulated(batches, 1_000_000)
        taken, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert table["n"].to_pylist() == [number for number in range(count) for _ in range(1000)]
    assert taken < 8000 * count * 4 / 3 + 50_000


def test_texts_too_many_for_offsets_of_32_bits_get_those_of_64(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(tables_, "_OFFSETS", 1000)
    some = pa.table({"t": ["x" * 100] * 9, "b": [b"y"] * 9, "n": range(9)})
    assert tables_.concat([some[:5], some[5:]]).schema == some.schema
    many = tables_.concat([some, some])
    assert many.schema.types == [pa.large_string(), pa.binary(), pa.int64()]
    assert many.to_pylist() == some.to_pylist() * 2


def test_categories_too_many_for_their_indices_stay_chunks_of_a_block() -> None:
    texts = [[f"{part}-{number}" for number in range(100)] for part in range(3)]
    kind = pa.dictionary(pa.int8(), pa.string())
    tables = [pa.table({"a": pa.array(each).dictionary_encode().cast(kind)}) for each in texts]
    (block,) = tables_.resized(iter(tables), 2**20)
    assert block.column("a").to_pylist() == [text for each in texts for text in each]


def test_categories_of_many_frames_go_together() -> None:
    pandas = pytest.importorskip("pandas")
    texts = [[f"{part}-{number}" for number in range(100)] for part in range(3)]
    frames = [pandas.DataFrame({"a": pandas.Categorical(each)}) for each in texts]
    table = tables_.concat(list(map(blocks.batch_to_table, frames))).combine_chunks()
    assert table.column("a").to_pylist() == [text for each in texts for text in each]


def test_a_frame_with_two_columns_of_a_name_is_refused() -> None:
    pandas = pytest.importorskip("pandas")
    with pytest.raises(ValueError, match="two columns of the same name: a, a"):
        blocks.batch_to_table(pandas.DataFrame([[1, 2]], columns=["a", "a"]))


def test_a_series_is_no_batch_and_names_of_columns_are_texts() -> None:
    pandas = pytest.importorskip("pandas")
    with pytest.raises(TypeError, match=r"a batch is a dictionary of arrays.*not Series"):
        blocks.batch_to_table(pandas.Series([1, 2]))
    assert blocks.rows_to_table([{1: 2}]).column_names == ["1"]


def test_a_series_of_pandas_is_no_row() -> None:
    pandas = pytest.importorskip("pandas")
    step = MapRows("Map(f)", Udf(lambda row: pandas.Series(row)), "Map")
    with pytest.raises(RuntimeError, match=r"a row is a dictionary.*not Series"):
        list(step.run(iter([pa.table({"a": [1]})]), Where("here")))


def test_rows_without_columns_are_counted() -> None:
    rows = [blocks.rows_to_table([{}] * 10), blocks.rows_to_table([{}] * 5)]
    assert tables_.concat(rows).num_rows == 15
    assert [table.num_rows for table in tables_.rebatched(rows, 4)] == [4, 4, 4, 3]
    assert [table.num_rows for table in tables_.resized(iter(rows), 2**20)] == [15]


def test_a_batch_of_torch_tensors_is_one_of_arrays() -> None:
    torch = pytest.importorskip("torch")
    table = blocks.batch_to_table({"x": torch.ones(2, 3), "y": [torch.zeros(2)] * 2})
    assert blocks.table_to_batch(table, "numpy")["y"].shape == (2, 2)
    (row,) = blocks.table_to_rows(blocks.rows_to_table([{"x": torch.ones(2, 2)}]))
    assert row["x"].shape == (2, 2)


def test_pandas_gets_tensors_as_cells() -> None:
    pytest.importorskip("pandas")
    table = blocks.batch_to_table({"x": np.ones((2, 3)), "y": [1, 2]})
    frame = blocks.table_to_batch(table, "pandas")
    assert list(frame.columns) == ["x", "y"]
    assert frame["x"][0].shape == (3,)
    assert blocks.batch_to_table(frame).column("y").to_pylist() == [1, 2]
    assert blocks.batch_to_table({"y": frame["y"]}).column("y").to_pylist() == [1, 2]


@pytest.mark.parametrize("kind", ["float32", "uint16", "bool", "datetime64[ns]"])
def test_numbers_of_numpy_in_rows_keep_their_type(kind: str) -> None:
    values = np.array([0, 1]).astype(kind)
    table = blocks.rows_to_table([{"x": values[0]}, {"x": values[1]}])
    assert blocks.table_to_batch(table, "numpy")["x"].dtype == kind


def test_days_of_numpy_in_rows_are_dates() -> None:
    table = blocks.rows_to_table([{"x": np.datetime64("2020-01-02")}, {"x": None}])
    assert table["x"].to_pylist() == [datetime.date(2020, 1, 2), None]


@pytest.mark.parametrize(
    ("values", "kind"),
    [
        ([np.timedelta64(1, "D"), None], pa.duration("us")),
        (
            [np.datetime64("2020-01-02T00:00", "s"), datetime.datetime(2020, 1, 2)],
            pa.timestamp("us"),
        ),
        ([np.void(b"ab")], pa.binary()),
    ],
)
def test_what_arrow_does_not_take_of_numpy_is_taken_as_of_python(values: Any, kind: Any) -> None:
    assert blocks.column(values).type == kind


@pytest.mark.parametrize("values", [[np.bytes_(b"x"), "y"], ["x", np.bytes_(b"y")], [np.True_, 1]])
def test_what_is_beside_values_of_numpy_stays_as_it_is(values: list[Any]) -> None:
    items = [value.item() if isinstance(value, np.generic) else value for value in values]
    assert [*map(repr, blocks.values_of(blocks.column(values)))] == [*map(repr, items)]
    assert blocks.values_of(blocks.column([np.float16(0.5), 300])) == [0.5, 300]
    assert blocks.column([np.float16(0.5), None]).type == pa.float16()


def test_lists_of_texts_come_back_out_of_batches_as_such() -> None:
    table = pa.table({"x": [["a"], [], None, ["b", "c"]], "y": [[["a"]], [], None, [["b"], []]]})
    again = blocks.batch_to_table(blocks.table_to_batch(table, "numpy"))
    assert (again.schema, again.to_pylist()) == (table.schema, table.to_pylist())


def test_arrays_of_no_value_have_a_type_before_there_are_any() -> None:
    kinds = [blocks.batch_to_table({"x": np.ones((n, 2, 0))}).schema for n in (0, 3)]
    assert kinds[0] == kinds[1]
    assert blocks.shown_type(kinds[0].field("x").type) == "tensor(...)[double]"


def test_tensors_of_one_shape_stay_so_if_their_numbers_differ_in_type() -> None:
    arrays = [np.ones((2, 3), kind) for kind in ("uint8", "float32", "int16")]
    rows = [{"x": array} for array in arrays]
    table = blocks.rows_to_table(rows)
    apart = [blocks.rows_to_table([row, row]).slice(1) for row in rows]
    nothing = [blocks.no_rows(pa.schema([("x", pa.null())])), table.slice(0, 0)]
    for found in (
        table,
        tables_.concat([*nothing, *apart, pa.table({"x": pa.nulls(1)})]).slice(0, 3),
    ):
        batch = blocks.table_to_batch(found, "numpy")["x"]
        assert (batch.dtype, batch.shape, batch.min()) == ("float32", (3, 2, 3), 1)


def test_arrays_of_all_rows_are_made_once_of_numbers_and_tensors_without_nulls() -> None:
    tensors = blocks.column(np.zeros((4, 2, 2), np.float32))
    assert blocks.is_plain(pa.chunked_array([tensors, tensors]))
    assert blocks.is_plain(pa.chunked_array([[1.5, 2]]))
    missing = pa.ExtensionArray.from_storage(
        pa.fixed_shape_tensor(pa.int64(), [2]), pa.array([[1, None]], pa.list_(pa.int64(), 2))
    )
    for values in (pa.chunked_array([missing]), pa.chunked_array([[1, None]])):
        assert not blocks.is_plain(values)
