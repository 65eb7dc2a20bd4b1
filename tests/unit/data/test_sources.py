"""What is read in the driver alone: sources, columns, filters, limits, splits; no cluster."""

from __future__ import annotations

import gzip
import random
import re
from datetime import datetime
from decimal import Decimal
from pathlib import Path
from typing import Any

import pytest

import miniray

np = pytest.importorskip("numpy")
pa = pytest.importorskip("pyarrow")
pytest.importorskip("fsspec")

import pyarrow.compute as pc  # noqa: E402
import pyarrow.parquet as pq  # noqa: E402

from miniray import data  # noqa: E402
from miniray.data.blocks import batch_to_table  # noqa: E402
from miniray.data.collate_fn import (  # noqa: E402
    ArrowBatchCollateFn,
    NumpyBatchCollateFn,
    PandasBatchCollateFn,
)
from miniray.data.executor import execute, table_of  # noqa: E402
from miniray.data.expressions import col  # noqa: E402
from miniray.data.files import bunched, resolve  # noqa: E402
from miniray.data.parquet import ParquetDatasource  # noqa: E402
from miniray.data.plan import optimised, walk  # noqa: E402
from miniray.data.sources import CutWish, tables_of_items  # noqa: E402
from miniray.data.tables import concat  # noqa: E402
from miniray.data.transforms import DataError, FilterExpr  # noqa: E402
from miniray.exceptions import ObjectLostError  # noqa: E402


@pytest.fixture(autouse=True)
def _no_cluster() -> Any:
    yield
    assert not miniray.is_initialized()


@pytest.fixture
def folder(tmp_path: Path) -> str:
    for number in range(3):
        table = pa.table({"a": np.arange(100) + 100 * number, "b": ["x"] * 100})
        pq.write_table(table, tmp_path / f"{number}.parquet", row_group_size=30)
    return str(tmp_path)


def values(dataset: Any, name: str = "a") -> list[Any]:
    return [row[name] for row in dataset.take_all()]


def test_what_needs_no_function_needs_no_cluster(folder: str) -> None:
    dataset = data.read_parquet(folder)
    assert dataset.schema().names == ["a", "b"]
    assert dataset.count() == 300
    assert dataset.take(2) == [{"a": 0, "b": "x"}, {"a": 1, "b": "x"}]
    assert dataset.columns() == ["a", "b"]
    assert len(dataset.input_files()) == 3
    assert values(dataset.limit(130)) == list(range(130))


def test_reading_leaves_the_random_numbers_of_the_program_alone() -> None:
    random.seed(5)
    np.random.seed(5)
    drawn = random.random(), np.random.random()
    random.seed(5)
    np.random.seed(5)
    assert data.range(100).sort("id", descending=True).take(1) == [{"id": 99}]
    assert drawn == (random.random(), np.random.random())
    orders = [data.range(100).random_shuffle().take_all() for _ in range(2)]
    assert orders[0] != orders[1]


def test_an_s3_url_may_ask_for_no_credentials() -> None:
    s3fs = pytest.importorskip("s3fs")
    filesystem, path = resolve("s3://anonymous@bucket/folder")
    assert isinstance(filesystem, s3fs.S3FileSystem)
    assert (filesystem.anon, path) == (True, "bucket/folder")


def test_paths_are_one_or_any_that_can_be_gone_through(folder: str) -> None:
    paths = [f"{folder}/{number}.parquet" for number in range(2)]
    for given in (paths, tuple(paths), iter(paths), np.array(paths), map(Path, paths)):
        assert data.read_parquet(given).count() == 200
    with pytest.raises(ValueError, match="No path"):
        data.read_parquet(np.array([]))


@pytest.mark.parametrize("scheme", ["s3", "abfs", "file"])
def test_urls_for_a_filesystem_of_pyarrow_may_be_patterns(folder: str, scheme: str) -> None:
    everything = pa.fs.SubTreeFileSystem("/", pa.fs.LocalFileSystem())
    pattern = f"{scheme}://{folder.strip('/')}/?.parquet"
    assert data.read_parquet(pattern, filesystem=everything).count() == 300


def test_a_repr_reads_nothing(folder: str) -> None:
    dataset = data.read_parquet(folder)
    assert repr(dataset) == "shape: (?, ?)\n(Dataset isn't materialized)"
    dataset.schema()
    assert "│ int64 ┆ string │" in repr(dataset)
    assert repr(data.range(20).map(lambda row: 1 / 0)).startswith("shape: (20, ?)")


def test_a_repr_shows_columns_that_are_known_behind_steps() -> None:
    steps = data.range(9).sort("id").rename_columns({"id": "n"}).random_shuffle()
    assert repr(steps).startswith("shape: (9, 1)\n╭───────╮\n│ n     │")
    assert repr(data.range(9).drop_columns("x")).startswith("shape: (9, ?)")


def test_a_repr_shows_the_first_rows_of_what_is_in_memory() -> None:
    lines = repr(data.from_items([{"n": n, "t": "a\nb"} for n in range(20)])).split("\n")
    assert lines[:5] == ["shape: (20, 2)", "╭───────┬────────╮", "│ n     ┆ t      │", *lines[3:5]]
    assert lines[5:8] == ["╞═══════╪════════╡", "│ 0     ┆ a b    │", "│ 1     ┆ a b    │"]
    assert lines[-1] == "(Showing 10 of 20 rows)"
    assert lines[-2] == "╰───────┴────────╯"
    assert "│ id    │" in repr(data.range(0))
    assert repr(data.from_items([])) == "shape: (0, ?)\n(Showing 0 of 0 rows)"
    assert f"│ {'x' * 40} │" in repr(data.from_items(["x" * 100]))


def test_a_repr_of_blocks_that_are_lost_shows_none_of_their_rows(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def lost(unit: Any) -> Any:
        raise ObjectLostError("gone")

    dataset = data.from_arrow_refs([object()])
    monkeypatch.setattr("miniray.data.consumption.is_initialized", lambda: True)
    monkeypatch.setattr("miniray.data.sources.ReadUnit.values", lost)
    assert repr(dataset) == "shape: (?, ?)\n(Showing 0 of ? rows)"


def test_columns_and_filters_reach_the_files(folder: str, capsys: Any) -> None:
    dataset = data.read_parquet(folder).select_columns(["a"])
    dataset.explain()
    assert capsys.readouterr().out.rstrip().endswith("ReadParquet")
    assert dataset.take(1) == [{"a": 0}]
    filtered = data.read_parquet(folder, columns=["a", "b"]).filter(expr="a >= 250")
    assert values(filtered.limit(1000)) == list(range(250, 300))
    for expr in ("a != 5 and a < 7", col("a").is_in([0, 1, 2, 3, 4, 6])):
        assert values(data.read_parquet(folder).filter(expr=expr)) == [0, 1, 2, 3, 4, 6]
    pruned = data.read_parquet(folder, filter=col("a") >= 250)
    assert values(pruned.limit(1000)) == list(range(250, 300))
    with pytest.raises(ValueError, match="has no column 'c', but a, b"):
        data.read_parquet(folder, columns=["c"])


def test_tasks_read_for_what_holds_an_accelerator(folder: str, capsys: Any) -> None:
    class Model:
        def __call__(self, batch: Any) -> Any:
            return batch

    files = data.read_parquet(folder)
    for model in (Model, Model().__call__):
        for rows in (files, files.filter(expr="a > 5")):
            rows.map_batches(model, batch_size=8, num_gpus=1).explain()
            assert "   +- ReadParquet  [tasks]" in capsys.readouterr().out
    files.map_batches(Model, concurrency=2).explain()
    assert "ReadParquet->MapBatches(Model)  [pool of 2 actors]" in capsys.readouterr().out
    files.map_batches(Model, concurrency=(1, 4), num_cpus=0.5).explain()
    assert "[pool of 1 to 4 actors] {'num_cpus': 0.5}" in capsys.readouterr().out


@pytest.fixture
def opened(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The names of Parquet files in the order in which they were opened."""
    found: list[str] = []
    open_ = ParquetDatasource.open

    def noted(self: Any, path: str) -> Any:
        found.append(Path(path).stem)
        return open_(self, path)

    monkeypatch.setattr(ParquetDatasource, "open", noted)
    return found


def numbered_files(folder: Path, count: int, **further: list[int]) -> list[str]:
    """Write files of a row each, those with these numbers with a further column; their names."""
    for number in range(count):
        columns = ["a", *(name for name, those in further.items() if number in those)]
        pq.write_table(
            pa.table({name: [number] for name in columns}), folder / f"{number:03}.parquet"
        )
    return [f"{number:03}" for number in range(count)]


def test_columns_are_known_from_some_files_of_which_the_last_is_one(
    tmp_path: Path, opened: list[str]
) -> None:
    names = numbered_files(tmp_path, 31, late=[30])
    dataset = data.read_parquet(str(tmp_path))
    assert dataset.limit(2).sort("a").columns() == ["a", "late"]
    assert dataset.filter(expr="a > 0").limit(2).sort("a").columns() == ["a", "late"]
    assert sorted(opened) == names[::2]


def test_a_reader_that_wants_few_rows_opens_few_of_many_files(
    tmp_path: Path, opened: list[str]
) -> None:
    numbered_files(tmp_path, 300)
    dataset = data.read_parquet(str(tmp_path))
    assert values(dataset.limit(3), "a") == [0, 1, 2]
    assert len(set(opened)) < 100


def test_a_unit_is_there_before_all_footers_of_files_are_read(
    tmp_path: Path, opened: list[str]
) -> None:
    names = numbered_files(tmp_path, 300)
    units = data.read_parquet(str(tmp_path))._plan.units(CutWish(target=1))
    assert [table_of(next(units)).to_pylist() for _ in range(2)] == [[{"a": 0}], [{"a": 1}]]
    assert len(set(opened)) < 100
    assert [table_of(unit)["a"][0].as_py() for unit in units] == list(range(2, 300))
    assert set(opened) == set(names)


def test_files_of_which_some_have_no_rows_are_units_of_those_that_have(tmp_path: Path) -> None:
    for number in range(31):  # every other one is looked at
        pq.write_table(pa.table({"a": [number] * 100 * (number % 2)}), tmp_path / f"{number:02}.pq")
    units = list(data.read_parquet(str(tmp_path))._plan.units(CutWish(2**25)))
    assert [unit.rows for unit in units] == [1500]


def test_rows_have_a_column_that_only_files_between_have(tmp_path: Path) -> None:
    numbered_files(tmp_path, 100, between=[50])
    tables = list(map(table_of, execute(data.read_parquet(str(tmp_path))._plan, local=True)))
    rows = [row for table in tables for row in table.to_pylist()]
    assert [row["a"] for row in rows] == list(range(100))
    assert [row.get("between") for row in rows] == [None] * 50 + [50] + [None] * 49
    assert concat(tables).column_names == ["a", "between"]


def test_rows_and_orders_of_a_seed_are_the_same_whatever_footers_are_known(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def read(dataset: Any) -> list[Any]:
        tables = map(table_of, execute(optimised(dataset._plan), local=True))
        return [value for table in tables for value in table["a"].to_pylist()]

    monkeypatch.setattr(data.DataContext.get_current(), "target_max_block_size", 20_000)
    for number in range(40):
        table = pa.table({"a": [100 * number + row for row in range(10)]})
        texts = [f"{row:03}" * (300 if number < 8 else 1) for row in range(10)]
        names = ["a", "late" if number == 21 else "b"]  # no footer of those of some files has it
        table = table.append_column("b", [texts]).rename_columns(names)
        pq.write_table(table, tmp_path / f"{number:02}.parquet")
    for method in ("random_sample", "randomize_block_order"):
        dataset = data.read_parquet(str(tmp_path))
        some = getattr(dataset, method)(*[0.5] * (method == "random_sample"), seed=0)
        first = read(some)
        assert dataset.count() == 400
        assert read(some) == first
        assert read(some.limit(3)) == first[:3]


def test_bytes_of_columns_with_dots_in_their_names_are_counted(tmp_path: Path) -> None:
    table = pa.table({"a.b": range(1000), "a.c.d": range(1000), "a": [{"b": 1}] * 1000})
    pq.write_table(table, tmp_path / "a.parquet", row_group_size=100, use_dictionary=False)
    source = data.read_parquet(str(tmp_path))._plan.source
    for names in (["a.b"], ["a.b", "a.c.d"], ["a"]):
        units = list(source.selected(names).units(CutWish(target=2000)))
        assert sum(unit.size for unit in units) >= 8000 * len(names)
        assert len(units) > 4
        assert concat(list(map(table_of, units))).equals(table.select(names))


def test_columns_are_those_of_later_files_too(tmp_path: Path) -> None:
    pq.write_table(pa.table({"a": [1], "n": pa.nulls(1)}), tmp_path / "1.parquet")
    pq.write_table(pa.table({"a": [2.5], "n": ["x"], "b": [3]}), tmp_path / "2.parquet")
    dataset = data.read_parquet(str(tmp_path))
    schema = dataset.schema()
    assert (schema.names, schema.types) == (
        ["a", "n", "b"],
        [pa.float64(), pa.string(), pa.int64()],
    )
    assert dataset.select_columns("b").take_all() == [{"b": None}, {"b": 3}]
    batches = list(dataset.iter_batches(batch_size=None, batch_format="pyarrow"))
    assert {kind for batch in batches for kind in batch.schema.types} == set(schema.types)


def test_decimals_of_row_groups_equal_floats_as_those_of_tables_do(tmp_path: Path) -> None:
    table = pa.table({"a": pa.array([Decimal("0.1")], pa.decimal128(9, 2))})
    pq.write_table(table, tmp_path / "a.parquet")
    dataset = data.read_parquet(str(tmp_path))
    for given in (dataset, data.from_arrow(table)):
        assert given.filter(expr=col("a") == 0.1).count() == 1


def test_row_groups_without_a_row_that_passes_are_not_read(folder: str) -> None:
    source = data.read_parquet(folder, filter=None)._plan.source
    filtered = source.pushed(FilterExpr("Filter", col("a") > 285))
    (unit,) = filtered.units(CutWish(2**20))
    assert [(piece.path[-9:], piece.group) for piece in unit.content.pieces] == [
        ("2.parquet", 2),
        ("2.parquet", 3),
    ]


def test_folders_of_partitions_are_columns(tmp_path: Path) -> None:
    for year in (2024, 2025):
        (tmp_path / f"year={year}").mkdir()
        pq.write_table(pa.table({"a": [1]}), tmp_path / f"year={year}" / "x.parquet")
    dataset = data.read_parquet(str(tmp_path))
    assert dataset.take(5) == [{"a": 1, "year": "2024"}, {"a": 1, "year": "2025"}]
    assert dataset.schema().types == [pa.int64(), pa.string()]
    named = data.read_parquet(str(tmp_path), columns=["a", "path"], include_paths=True)
    assert named.columns() == list(named.take(1)[0]) == ["a", "path"]
    (tmp_path / "month=01%2F").mkdir()
    (tmp_path / "month=01%2F" / "x.csv").write_text("a\n1\n")
    path = str(tmp_path / "month=01%2F" / "x.csv")
    row = {"a": 1, "month": "01/", "path": path}
    assert data.read_csv(str(tmp_path), include_paths=True).take_all() == [row]
    pq.write_table(pa.table({"year": [1]}), tmp_path / "year=2024" / "x.parquet")
    assert data.read_parquet(str(tmp_path / "year=2024")).take_all() == [{"year": 1}]
    assert data.read_text(path).take(1) == [{"text": "a"}]


def test_files_outside_of_a_folder_of_a_partition_have_null_for_it(tmp_path: Path) -> None:
    for folder in (tmp_path, tmp_path / "year=2024"):
        folder.mkdir(exist_ok=True)
        pq.write_table(pa.table({"a": [1]}), folder / "x.parquet")
    dataset = data.read_parquet(str(tmp_path))
    assert dataset.columns() == ["a", "year"]
    assert dataset.take_all() == [{"a": 1, "year": None}, {"a": 1, "year": "2024"}]


def test_compressed_files_are_read(tmp_path: Path) -> None:
    for name, text in (("a.jsonl", '{"n": 1}\n{"n": 2}\n'), ("b.csv", "n\n1\n2\n")):
        for codec, ending in (("gzip", "gz"), ("bz2", "bz2"), ("zstd", "zst")):
            with pa.output_stream(f"{tmp_path}/{name}.{ending}", compression=codec) as file:
                file.write(text.encode())
    assert values(data.read_json(str(tmp_path)), "n") == [1, 2] * 3
    assert values(data.read_csv(str(tmp_path)), "n") == [1, 2] * 3
    units = list(data.read_csv(str(tmp_path))._plan.units(CutWish(1)))  # they can't be cut
    assert [table_of(unit)["n"].to_pylist() for unit in units] == [[1, 2]] * 3
    assert values(data.read_text(f"{tmp_path}/b.csv.gz"), "text") == ["n", "1", "2"]
    assert data.read_binary_files(f"{tmp_path}/b.csv.bz2").take(1) == [{"bytes": b"n\n1\n2\n"}]
    (tmp_path / "c.TSV.GZ").write_bytes(gzip.compress(b"a\tb\n1\t2\n"))
    assert data.read_csv(f"{tmp_path}/c.TSV.GZ").take_all() == [{"a": 1, "b": 2}]
    given = {"arrow_open_stream_args": {"compression": "gzip"}}
    (tmp_path / "d.packed").write_bytes(gzip.compress(b"n\n1\n"))
    assert values(data.read_csv(f"{tmp_path}/d.packed", **given), "n") == [1]
    assert values(data.read_csv(f"{tmp_path}/b.csv.gz", **given), "n") == [1, 2]


def test_names_of_files_in_folders_may_end_otherwise(tmp_path: Path) -> None:
    (tmp_path / "part-0").write_text("n\n1\n")
    with pytest.raises(FileNotFoundError, match=r"no CSV file .*\.csv.* are looked for; None: all"):
        data.read_csv(str(tmp_path))
    assert values(data.read_csv(str(tmp_path), file_extensions=None), "n") == [1]
    (tmp_path / "_hidden").mkdir()
    for hidden in (".part-0", "_SUCCESS", "_hidden/part-0"):
        (tmp_path / hidden).write_text("n\n5\n")
    assert values(data.read_csv(str(tmp_path), file_extensions=None), "n") == [1]
    (tmp_path / "b.TXT").write_text("n\n2\n")
    for extensions in (["txt"], "txt", ".TXT"):
        found = data.read_csv(str(tmp_path), file_extensions=extensions)
        assert values(found, "n") == [2]


def test_paths_may_be_missing_where_others_are_not(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_text("n\n1\n")
    paths = [str(tmp_path / "none.csv"), str(tmp_path / "a.csv")]
    with pytest.raises(FileNotFoundError, match=r"none\.csv"):
        data.read_csv(paths)
    assert values(data.read_csv(paths, ignore_missing_paths=True), "n") == [1]
    with pytest.raises(FileNotFoundError, match=r"none\.csv"):
        data.read_csv(paths[:1], ignore_missing_paths=True)
    with pytest.raises(ValueError, match="on different filesystems"):
        data.read_csv([*paths, "memory://a.csv"])


def test_two_columns_of_one_name_are_an_error_that_names_the_file(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_text("n,n\n1,2\n")
    with pytest.raises(data.DataError, match=r"a\.csv can't be read .* have the same name"):
        data.read_csv(str(tmp_path)).take_all()
    pq.write_table(pa.table({"n": [1]}), tmp_path / "1.parquet")
    pq.write_table(pa.table([[1], [2]], names=["n", "n"]), tmp_path / "2.parquet")
    with pytest.raises(data.DataError, match=r"2\.parquet can't be read .* have the same name"):
        data.read_parquet(str(tmp_path)).take_all()
    with pytest.raises(KeyError, match='"n" exists 2 times'):
        data.from_arrow(pa.table([[1], [2]], names=["n", "n"])).take_all()


def test_an_archive_of_numpy_is_no_array(tmp_path: Path) -> None:
    np.savez(tmp_path / "a.npz", x=np.arange(3))
    with pytest.raises(data.DataError, match=r"a\.npz can't be read as NumPy"):
        data.read_numpy(str(tmp_path / "a.npz")).take_all()


def test_files_of_lines_that_do_not_go_together_are_named(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_text("n,b\n1,x\n")
    (tmp_path / "b.csv").write_text("n\n1.5\n")
    assert values(data.read_csv(str(tmp_path)), "n") == [1, 1.5]
    (tmp_path / "b.csv").write_text("n\nx\n")
    with pytest.raises(data.DataError, match=r"CSV files .*a\.csv and .*b\.csv do not go together"):
        data.read_csv(str(tmp_path)).take_all()


def test_lists_of_objects_of_several_types_go_together_with_lines_of_objects(
    tmp_path: Path,
) -> None:
    (tmp_path / "a.json").write_text('[{"n": 1}, {"n": "x"}]')
    (tmp_path / "b.jsonl").write_text('{"n": 2}')
    assert values(data.read_json(str(tmp_path)), "n") == [1, "x", 2]


def test_files_whose_columns_differ_are_read_together_or_named(tmp_path: Path) -> None:
    pq.write_table(pa.table({"a": [1], "n": pa.nulls(1)}), tmp_path / "1.parquet")
    pq.write_table(pa.table({"a": [2], "n": ["x"]}), tmp_path / "2.parquet")
    pq.write_table(pa.table({"a": [3]}), tmp_path / "3.parquet")
    assert data.read_parquet(str(tmp_path)).take(9) == [
        {"a": 1, "n": None},
        {"a": 2, "n": "x"},
        {"a": 3, "n": None},
    ]
    pq.write_table(pa.table({"a": ["text"]}), tmp_path / "4.parquet")
    with pytest.raises(data.DataError, match=r"1\.parquet and .*4\.parquet do not go together"):
        data.read_parquet(str(tmp_path)).take(9)


def test_a_filter_by_a_column_that_a_file_lacks_leaves_out_its_rows(tmp_path: Path) -> None:
    pq.write_table(pa.table({"a": [1, 2], "b": [5, 6]}), tmp_path / "0.parquet")
    pq.write_table(pa.table({"a": [3]}), tmp_path / "1.parquet")
    dataset = data.read_parquet(str(tmp_path)).filter(expr="b > 5").select_columns("a")
    assert values(dataset) == [2]


def test_a_filter_compares_times_that_python_does_not_have(tmp_path: Path) -> None:
    pq.write_table(pa.table({"a": pa.array([1, 10**15], pa.timestamp("ms"))}), tmp_path / "a.pq")
    after = data.read_parquet(str(tmp_path)).filter(expr=col("a") > datetime(2000, 1, 1))
    assert after.count() == 1


def test_a_filter_that_cannot_be_computed_is_named_and_not_the_file_blamed(folder: str) -> None:
    with pytest.raises(DataError, match=r"Filter\(.*\) failed on rows of .*0\.parquet: Arrow"):
        data.read_parquet(folder).filter(expr="a > 'x'").take_all()


def test_a_file_that_is_no_parquet_is_named(tmp_path: Path) -> None:
    (tmp_path / "bad.parquet").write_bytes(b"no parquet here")
    with pytest.raises(data.DataError, match=r"bad\.parquet can't be read as Parquet"):
        data.read_parquet(str(tmp_path)).take()
    with pytest.raises(FileNotFoundError, match="There is no Parquet file at '/nowhere'"):
        data.read_parquet("/nowhere")


def test_a_file_that_is_gone_cut_off_or_damaged_is_named(folder: str) -> None:
    def told(pattern: str) -> None:
        with pytest.raises(DataError, match=pattern):
            data.read_parquet(folder).take_all()
        with pytest.raises(DataError, match=pattern):
            counted.take_all()

    counted = data.read_parquet(folder)
    assert counted.count() == 300  # their footers are known
    path = Path(folder, "1.parquet")
    whole = path.read_bytes()
    path.write_bytes(whole[:4] + bytes(len(whole) // 2) + whole[4 + len(whole) // 2 :])
    told(r"1\.parquet .*can't be read as Parquet")
    path.write_bytes(whole[: len(whole) // 2])
    told(r"1\.parquet can't be read as Parquet")
    gone = data.read_parquet(folder)
    path.unlink()
    for dataset in (counted, gone):
        with pytest.raises(
            DataError, match=r"1\.parquet can't be read as Parquet: .* No such file"
        ):
            dataset.take_all()


def test_images_and_objects_take_more_bytes_than_their_files(tmp_path: Path) -> None:
    for name, read, times in (("x.png", data.read_images, 8), ("x.json", data.read_json, 2)):
        (tmp_path / name).write_bytes(bytes(100))
        (unit,) = read(str(tmp_path))._plan.units(CutWish(2**20))
        assert unit.size == 100 * times


def test_a_unit_of_images_is_small_enough_for_a_block_of_floats(tmp_path: Path) -> None:
    for number in range(8):
        (tmp_path / f"{number}.png").write_bytes(bytes(1024))
    wish = CutWish(64 * 1024)
    units = list(data.read_images(str(tmp_path))._plan.units(wish))
    assert [4 * unit.size <= wish.target for unit in units] == [True] * 8
    (whole,) = data.read_images(str(tmp_path))._plan.units(CutWish(8 * wish.target))
    assert 4 * whole.size <= 8 * wish.target


def test_a_file_that_is_no_image_is_named(tmp_path: Path) -> None:
    pytest.importorskip("PIL")
    (tmp_path / "x.png").write_bytes(b"no image")
    with pytest.raises(data.DataError, match=r"x\.png can't be read as image: "):
        data.read_images(str(tmp_path)).take()


@pytest.mark.parametrize(("first", "later"), [("1.5", "2"), ("1", "2.5"), ("1", "x")])
def test_parts_of_a_large_csv_file_have_the_types_of_its_beginning_if_these_hold_their_values(
    tmp_path: Path, first: str, later: str
) -> None:
    lines = [f"{number:0100},{first if number < 50_000 else later}" for number in range(60_000)]
    (tmp_path / "x.csv").write_text("\n".join(["a,b", *lines, ""]))
    units = data.read_csv(str(tmp_path))._plan.units(CutWish(2**20))
    tables = list(map(table_of, units))
    assert len(tables) > 3
    kinds = [table.schema.field("b").type for table in tables]
    kept = first == "1.5"  # which holds the others
    assert (kinds == [pa.float64()] * len(tables)) is kept
    numbers = [number for table in tables for number in table["a"].to_pylist()]
    assert numbers == list(range(60_000))
    found = [text for table in tables for text in map(str, table["b"].to_pylist())]
    assert found[0] == (first if kept else "1")
    assert found[-1] == ("2.0" if kept else later)


def test_csv_json_text_numpy_and_bytes(tmp_path: Path) -> None:
    (tmp_path / "x.csv").write_text("a,b\n1,x\n2,y\n")
    assert data.read_csv(str(tmp_path / "x.csv")).take() == [{"a": 1, "b": "x"}, {"a": 2, "b": "y"}]
    (tmp_path / "x.jsonl").write_text('{"a": 1}\n{"a": 2}\n')
    assert data.read_json(str(tmp_path / "x.jsonl")).take() == [{"a": 1}, {"a": 2}]
    (tmp_path / "x.json").write_text('[{"a": 1}, {"a": 2}]')
    assert data.read_json(str(tmp_path / "x.json")).take() == [{"a": 1}, {"a": 2}]
    (tmp_path / "y.json").write_text('{\n"a": 1\n}')
    assert data.read_json(str(tmp_path / "y.json")).take() == [{"a": 1}]
    (tmp_path / "z.json").write_text("[1, 2]")
    assert data.read_json(str(tmp_path / "z.json")).take() == [{"item": 1}, {"item": 2}]
    (tmp_path / "x.tsv").write_text("a\tb\n1\t2\n")
    assert data.read_csv(str(tmp_path / "x.tsv")).take() == [{"a": 1, "b": 2}]
    (tmp_path / "x.txt").write_text("one\n\ntwo")
    text = data.read_text(str(tmp_path / "x.txt"), include_paths=True)
    assert [(row["text"], row["path"][-5:]) for row in text.take()] == [
        ("one", "x.txt"),
        ("two", "x.txt"),
    ]
    latin = tmp_path / "latin.txt"
    latin.write_bytes("ä\n\n".encode("latin-1"))
    lines = data.read_text(str(latin), encoding="latin-1", drop_empty_lines=False)
    assert values(lines, "text") == ["ä", ""]
    np.save(tmp_path / "x.npy", np.ones((3, 2)))
    assert data.read_numpy(str(tmp_path / "x.npy")).take(1)[0]["data"].tolist() == [1, 1]
    np.save(tmp_path / "o.npy", np.array([{}], dtype=object))
    with pytest.raises(data.DataError, match=r"o\.npy can't be read as NumPy"):
        data.read_numpy(str(tmp_path / "o.npy")).take(1)
    assert data.read_binary_files(str(tmp_path / "x.txt")).take(1) == [{"bytes": b"one\n\ntwo"}]


def test_lines_of_a_file_that_is_cut_are_all_there_once(tmp_path: Path) -> None:
    (tmp_path / "x.csv").write_text("a\n" + "".join(f"{n}\n" for n in range(1000)))
    lines = [f'{{"a": {n}}}' for n in range(1000)]
    for name in ("x.jsonl", "x.json"):
        (tmp_path / name).write_text("\n".join(lines))
    for dataset in (
        data.read_csv(str(tmp_path / "x.csv")),
        data.read_json(str(tmp_path / "x.jsonl")),
        data.read_json(str(tmp_path / "x.json")),
    ):
        for target in (7, 100, 1001):
            units = list(dataset._plan.source.units(CutWish(target)))
            assert len(units) > 1
            tables = [table_of(unit) for unit in units]
            found = [row["a"] for table in tables for row in table.to_pylist()]
            assert found == list(range(1000))
    given = data.read_csv(str(tmp_path / "x.csv"), parse_options=pa.csv.ParseOptions())
    assert len(list(given._plan.units(CutWish(100)))) == 1  # quotes of the user may hold line ends
    (tmp_path / "list.json").write_text(f"[{','.join(lines)}]")
    whole = data.read_json(str(tmp_path / "list.json"))
    assert len(list(whole._plan.source.units(CutWish(100)))) == 1
    assert values(whole) == list(range(1000))


@pytest.mark.parametrize("before", [b"\n", b"\r\n", b"\n\n"])
def test_csv_that_does_not_begin_with_its_names_is_read_whole(
    tmp_path: Path, before: bytes
) -> None:
    rows = b"".join(b"%d,%d\r\n" % (number, -number) for number in range(30))
    (tmp_path / "n.csv").write_bytes(before + b"a,b\r\n" + rows)
    source = data.read_csv(str(tmp_path))._plan.source
    tables = [table for unit in source.units(CutWish(20)) for table in unit.read()]
    assert [row for table in tables for row in table.to_pylist()] == [
        {"a": number, "b": -number} for number in range(30)
    ]


def test_files_that_do_not_tell_their_size_are_cut(tmp_path: Path) -> None:
    (tmp_path / "n.txt").write_text("".join(f"{number}\n" for number in range(100)))
    source = data.read_text(f"simplecache::file://{tmp_path}/n.txt")._plan.source
    units = list(source.units(CutWish(20)))
    found = [table.column("text").to_pylist() for unit in units for table in unit.read()]
    assert len(units) > 1
    assert [line for lines in found for line in lines] == [str(number) for number in range(100)]


def test_an_object_over_several_lines_of_a_file_that_is_cut_is_told(tmp_path: Path) -> None:
    path = tmp_path / "x.json"
    path.write_text('{"a": 0}\n' + '{"a":\n1}\n' * 100)
    units = list(data.read_json(str(path))._plan.source.units(CutWish(99)))
    with pytest.raises(data.DataError, match=r"x\.json .* object of a large file must be a line"):
        list(map(table_of, units))


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ('{"a": 1}\n{"a": 2}\n{bad', "in row 2"),
        ('{"a": 1}\n{"a": "x"}', r"Column\(/a\) changed from number to string in row 1"),
        ('[{"a": 1},\n{bad]', "line 2 column 2"),
    ],
)
def test_a_json_file_that_is_wrong_says_where(tmp_path: Path, text: str, said: str) -> None:
    (tmp_path / "x.json").write_text(text)
    with pytest.raises(data.DataError, match=rf"x\.json can't be read as JSON: .*{said}"):
        data.read_json(str(tmp_path / "x.json")).take_all()


def test_rows_without_columns_are_mapped_one_by_one(tmp_path: Path) -> None:
    pq.write_table(pa.table({"a": range(100)}), tmp_path / "x.parquet")
    none = data.read_parquet(str(tmp_path / "x.parquet")).select_columns([])
    mapped = optimised(none.map(lambda row: {"n": len(row)})._plan)
    tables = [table_of(unit) for unit in execute(mapped, local=True)]
    assert [row for table in tables for row in table.to_pylist()] == [{"n": 0}] * 100


def test_names_of_files_and_folders_may_have_the_signs_of_patterns(tmp_path: Path) -> None:
    folder = tmp_path / "a[1]"
    folder.mkdir()
    (folder / "b[2].txt").write_text("one")
    for path in (folder, folder / "b[2].txt", tmp_path / "a?1]" / "*.txt"):
        assert values(data.read_text(str(path)), "text") == ["one"]


def test_small_files_are_read_together(tmp_path: Path) -> None:
    for number in range(100):
        (tmp_path / f"{number:03d}.txt").write_text(f"{number}\n" * 10)
    units = list(data.read_text(str(tmp_path))._plan.source.units(CutWish(2**20)))
    assert len(units) == 1
    assert values(data.read_text(str(tmp_path)), "text")[-1] == "99"
    assert list(bunched([3, 3, 5, 9, 1], int, 6)) == [[3, 3], [5], [9], [1]]


def test_items_ranges_tensors_arrays_and_frames() -> None:
    assert data.from_items([1, {"a": 2}]).take() == [
        {"item": 1, "a": None},
        {"item": None, "a": 2},
    ]
    assert data.range_tensor(2, shape=(2, 2)).take(2)[1]["data"].tolist() == [[1, 1], [1, 1]]
    assert data.from_numpy(np.arange(3)).take() == [{"data": n} for n in range(3)]
    pandas = pytest.importorskip("pandas")
    assert data.from_pandas(pandas.DataFrame({"a": [1, 2]})).take() == [{"a": 1}, {"a": 2}]
    assert data.from_pandas(pandas.DataFrame({"a": [1]})).to_pandas()["a"].tolist() == [1]


def test_a_frame_without_rows_has_the_columns_that_are_known(folder: str) -> None:
    pytest.importorskip("pandas")
    frame = data.read_parquet(folder).filter(expr="a > 1000").rename_columns({"b": "c"}).to_pandas()
    assert frame.dtypes.to_dict()["a"] == np.int64
    assert list(frame) == ["a", "c"]


def test_files_are_read_in_a_random_order_each_of_them_whole(tmp_path: Path) -> None:
    for number in range(20):
        pq.write_table(pa.table({"a": [2 * number, 2 * number + 1]}), tmp_path / f"{number:02}.pq")
    found = values(data.read_parquet(str(tmp_path), shuffle="files"))
    assert sorted(found) == list(range(40)) != found
    assert all(second == first + 1 for first, second in zip(found[::2], found[1::2], strict=True))


def test_a_plan_is_printed_when_it_begins_if_that_is_wanted(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(data.DataContext.get_current(), "print_on_execution_start", True)
    dataset = data.range(4).sort("id")
    assert capsys.readouterr().out == ""
    dataset.take_all()
    assert capsys.readouterr().out == "Sort\n   +- ReadRange\n"


def test_columns_are_added_renamed_and_dropped() -> None:
    dataset = data.from_arrow(pa.table({"a": [1, 2], "b": [3, 4]}))
    added = dataset.with_column(column_name="c", expr=col("a") + col("b"))
    assert added.take(1) == [{"a": 1, "b": 3, "c": 4}]
    assert dataset.rename_columns({"a": "x"}).take(1) == [{"x": 1, "b": 3}]
    assert dataset.rename_columns(["x", "y"]).columns() == ["x", "y"]
    assert dataset.drop_columns(["b"]).take(1) == [{"a": 1}]
    assert dataset.select_columns(["b"]).columns() == ["b"]
    with pytest.raises(data.DataError, match="has no column 'z', but a, b"):
        dataset.drop_columns(["z"]).take()


def test_a_step_that_cannot_be_done_is_named() -> None:
    dataset = data.from_arrow(pa.table({"a": [1, 2], "b": [3, 4]}))
    with pytest.raises(
        data.DataError, match=r"RenameColumns\(a\): .* two columns of the same name"
    ):
        dataset.rename_columns({"a": "b"}).take()
    with pytest.raises(data.DataError, match=r"Filter\(\(a \+ 1\)\) failed on rows of a table"):
        dataset.filter(expr="a + 1").take()
    long = data.from_items([{"a": "secret" * 1000}]).with_column("a", col("a").cast(pa.int64()))
    with pytest.raises(data.DataError, match=r"WithColumns\(a\) failed .* Failed to parse") as told:
        long.take()
    assert len(str(told.value)) < 4100  # the value is cut off
    assert "File " not in str(told.value)  # no code of the user


def test_functions_of_rows_are_called_for_as_many_as_a_limit_keeps() -> None:
    called: list[int] = []

    def noted(row: Any) -> Any:
        called.append(row["id"])
        return row

    plan = optimised(data.range(100).map(noted).limit(3)._plan)
    assert sum(unit.rows or 0 for unit in execute(plan, local=True)) == 3
    assert called == [0, 1, 2]


def test_unions_and_limits_of_limits() -> None:
    dataset = data.range(5).union(data.range(3), data.range(2))
    assert dataset.count() == 10
    assert [row["id"] for row in dataset.take_all()] == [0, 1, 2, 3, 4, 0, 1, 2, 0, 1]
    assert data.range(100).limit(7).limit(20).count() == 7


def test_a_limit_holds_over_files_together_whose_rows_nobody_knows(tmp_path: Path) -> None:
    for number in range(3):
        text = "".join(f"{n}\n" for n in range(10 * number, 10 * number + 10))
        (tmp_path / f"{number}.csv").write_text("a\n" + text)
    one, two, three = (data.read_csv(str(tmp_path / f"{number}.csv")) for number in range(3))
    assert values(one.union(two).limit(7)) == list(range(7))
    assert values(one.union(two, three.limit(3)).limit(22)) == list(range(22))


def test_splits_are_ranges_of_rows(folder: str) -> None:
    dataset = data.read_parquet(folder)
    parts = dataset.split(7)
    assert [part.count() for part in parts] == [43, 43, 43, 43, 43, 43, 42]
    assert [n for part in parts for n in values(part.limit(99))] == list(range(300))
    first, second, third = data.range(10).split_at_indices([3, 7])
    assert [part.count() for part in (first, second, third)] == [3, 4, 3]
    assert [part.count() for part in data.range(10).split_proportionately([0.2, 0.5])] == [2, 5, 3]
    tied = data.range(10).split_proportionately([0.2, 0.05])
    assert [part.count() for part in tied] == [1, 1, 8]
    with pytest.raises(ValueError, match="10 rows are too few"):
        data.range(10).split_proportionately([0.1, 0.05])
    assert [part.count() for part in data.range(100).train_test_split(0.29)] == [71, 29]
    assert [part.count() for part in data.range(3).train_test_split(0.1)] == [2, 1]
    train, test = data.range(10).train_test_split(0.3)
    assert (values(train, "id"), values(test, "id")) == (list(range(7)), [7, 8, 9])


def test_samples_and_orders_come_from_a_seed(folder: str) -> None:
    sample = data.range(1000).random_sample(0.3, seed=5)
    assert sample.take_all() == sample.take_all()
    assert 200 < len(sample.take_all()) < 400
    assert sample.take_all() != data.range(1000).random_sample(0.3, seed=6).take_all()
    two = data.from_arrow([pa.table({"a": range(100)})] * 2).random_sample(0.5, seed=5)
    first, second = (table_of(unit) for unit in execute(two._plan, local=True))
    assert first != second  # of each unit other rows
    source = data.read_parquet(folder).split(10)
    assert len(source) == 10


def test_batches_of_each_format() -> None:
    dataset = data.range(10)
    assert [len(batch["id"]) for batch in dataset.iter_batches(batch_size=4)] == [4, 4, 2]
    sizes = [len(b["id"]) for b in dataset.iter_batches(batch_size=4, drop_last=True)]
    assert sizes == [4, 4]
    (table,) = dataset.iter_batches(batch_format="pyarrow")
    assert table.num_rows == 10
    mixed = dataset.iter_batches(local_shuffle_buffer_size=10, local_shuffle_seed=1)
    (batch,) = mixed
    assert sorted(batch["id"]) == list(range(10)) != batch["id"].tolist()
    assert [again["id"].tolist() for again in mixed] == [batch["id"].tolist()]
    with pytest.raises(ValueError, match="batch_format='dask'"):
        dataset.iter_batches(batch_format="dask")
    assert dataset.take_batch(3)["id"].tolist() == [0, 1, 2]
    assert len(dataset.take_all(limit=10)) == 10
    with pytest.raises(ValueError, match="the dataset has more rows"):
        dataset.take_all(limit=9)


def test_large_data_in_the_driver_bring_a_warning(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("pandas")
    monkeypatch.setattr("miniray.data.consumption._MUCH", 79)
    with pytest.warns(UserWarning, match="needs a batch at a time"):
        data.range(10).to_pandas()


def test_batches_of_tensors() -> None:
    torch = pytest.importorskip("torch")
    dataset = data.range_tensor(4, shape=(2,))
    batches = dataset.iter_torch_batches(batch_size=3, dtypes=torch.float32)
    shapes = [batch["data"].shape for batch in batches]
    assert shapes == [(3, 2), (1, 2)]
    by_name = {"dtypes": {"data": torch.float16}, "drop_last": True}
    (whole,) = dataset.iter_torch_batches(batch_size=3, **by_name)
    assert (whole["data"].shape, whole["data"].dtype) == ((3, 2), torch.float16)
    assert len(list(batches)) == 2  # each iteration reads anew
    (collated,) = dataset.iter_torch_batches(collate_fn=lambda arrays: arrays["data"].sum())
    assert collated == 12

    class Rows(ArrowBatchCollateFn):
        def __call__(self, batch: Any) -> Any:
            return batch.num_rows

    class Sum(NumpyBatchCollateFn):
        def __call__(self, batch: Any) -> Any:
            return int(batch["data"].sum())

    assert list(dataset.iter_torch_batches(collate_fn=Sum())) == [12]

    class Frame(PandasBatchCollateFn):
        def __call__(self, batch: Any) -> Any:
            return list(batch.columns)

    assert list(dataset.iter_torch_batches(batch_size=2, collate_fn=Rows())) == [2, 2]
    assert list(dataset.iter_torch_batches(collate_fn=Frame())) == [["data"]]


def test_names_of_ray_that_are_not_here_say_what_to_do_instead() -> None:
    dataset = data.range(3)
    for owner in (dataset, dataset.iterator()):
        with pytest.raises(AttributeError, match=r"iter_batches\(\) gives NumPy arrays"):
            owner.iter_jax_batches()
    with pytest.raises(AttributeError, match=r"union\(\) and random_shuffle"):
        dataset.mix(dataset)
    with pytest.raises(AttributeError, match='give mode="append"'):
        _ = data.SaveMode


def test_numbers_of_numpy_are_numbers() -> None:
    dataset = data.range(np.int64(20))
    one, two = np.int32(1), np.uint8(2)
    assert dataset.take(two) == dataset.limit(two).take_all() == data.range(2).take_all()
    assert len(dataset.take_batch(two)["id"]) == len(dataset.split(two)) == 2
    shuffled = {"local_shuffle_buffer_size": two, "local_shuffle_seed": one}
    sizes = [len(batch["id"]) for batch in dataset.iter_batches(batch_size=two, **shuffled)]
    assert sizes == [2] * 10
    batches = data.range(1000).iter_batches(batch_size=np.uint8(100))
    assert [len(batch["id"]) for batch in batches] == [100] * 10
    for method in ("random_shuffle", "randomize_block_order"):
        rows = [getattr(dataset, method)(seed=seed).take_all() for seed in (1, one)]
        assert rows[0] == rows[1]
    samples = [dataset.random_sample(0.5, seed=seed).take_all() for seed in (1, one)]
    assert samples[0] == samples[1]
    assert len(list(dataset.repartition(two)._tables())) == 2
    assert dataset.repartition(target_num_rows_per_block=two).count() == 20
    assert dataset.random_shuffle(seed=one, num_blocks=two).count() == 20
    assert dataset.groupby("id", num_partitions=two).count().count() == 20
    assert dataset.join(dataset, "inner", two, on=["id"]).count() == 20


def test_arguments_that_make_no_sense_are_told() -> None:
    class Model:
        def __call__(self, batch: Any) -> Any:
            return batch

    dataset = data.range(3)
    with pytest.raises(ValueError, match="needs a batch_size"):
        dataset.map_batches(Model, num_gpus=1)
    with pytest.raises(ValueError, match=r"'num_cpu' is not an option of an actor\. Did you mean"):
        dataset.map(Model, num_cpu=1)
    with pytest.raises(ValueError, match=r"map\(Model, .* must be an ActorPoolStrategy"):
        dataset.map(Model, compute=data.TaskPoolStrategy(2))
    for wrong in (0, (), (2,), (1, 2)):
        with pytest.raises(ValueError, match=re.escape(f"concurrency={wrong}")):
            dataset.map(lambda row: row, concurrency=wrong)
    for wrong in ((), (2,), (2, 1)):
        with pytest.raises(ValueError, match=re.escape(f"concurrency={wrong}")):
            dataset.map(Model, concurrency=wrong)
    for option in ({"name": "x"}, {"lifetime": "detached"}, {"max_pending_calls": 1}):
        with pytest.raises(TypeError, match=rf"map\(\) has no argument '{next(iter(option))}'"):
            dataset.map(Model, **option)
    with pytest.raises(TypeError, match=r"map\(\) has no argument 'num_returns'"):
        dataset.map(lambda row: row, num_returns=2)

    async def later(batch: Any) -> Any:
        return batch

    with pytest.raises(TypeError, match=r"map_batches\(later\) is async"):
        dataset.map_batches(later)
    assert data.ActorPoolStrategy(size=2, max_tasks_in_flight_per_actor=2).bounds == (2, 2)
    for sizes in ({"size": 2, "max_size": 3}, {"max_size": 3, "initial_size": 5}):
        with pytest.raises(ValueError, match="size alone, or 1 <= min_size"):
            data.ActorPoolStrategy(**sizes)
    with pytest.raises(ValueError, match=r"map\(fn_constructor_args=\) is for classes"):
        dataset.map(lambda row: row, fn_constructor_args=(1,))
    with pytest.raises(NotImplementedError, match=r"is known after materialize\(\)"):
        dataset.num_blocks()
    with pytest.raises(TypeError, match=r"add_column\(\) takes a function .* not 5"):
        dataset.add_column("x", 5)
    with pytest.raises(TypeError, match="by the columns' names"):
        dataset.with_columns([col("id")])
    with pytest.raises(ValueError, match=r"size=\(-1, 2\)"):
        data.read_images("nowhere", size=(-1, 2))
    with pytest.raises(ValueError, match="batch_format='x'"):
        dataset.take_batch(batch_format="x")
    with pytest.raises(AttributeError, match="no 'to_tf': iter_batches"):
        dataset.to_tf()
    with pytest.raises(TypeError, match=r"write_parquet\(\).*Did you mean 'compression'"):
        dataset.write_parquet("nowhere", compresion="gzip")
    with pytest.raises(TypeError, match=r"takes an expression, such as col\('a'\) > 5"):
        dataset.filter(expr=pc.field("id") > 1)
    with pytest.raises(AttributeError, match="no 'write_sql': write from a function"):
        dataset.write_sql("insert into t values (?)", None)
    with pytest.raises(AttributeError, match=r"'read_parqet'\. Did you mean 'read_parquet'\?"):
        data.read_parqet("nowhere")
    with pytest.raises(AttributeError, match="no 'read_sql': read it in a function"):
        data.read_sql("select 1", None)
    with pytest.raises(AttributeError, match="Did you mean 'target_max_block_size'"):
        data.DataContext.get_current().target_max_blocksize = 5
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        dataset.nothing  # noqa: B018
    with pytest.raises(ValueError, match=r"file_format='gif'\) is none of .*'png'"):
        dataset.write_images("nowhere", "id", file_format="gif")
    with pytest.raises(ValueError, match=r"write_parquet\(\): there is no column 'key'"):
        dataset.write_parquet("nowhere", partition_cols=["key"])
    with pytest.raises(ValueError, match=r"write_numpy\(\): there is no column 'none'"):
        dataset.write_numpy("nowhere", column="none")
    with pytest.raises(ValueError, match="min_rows_per_file='many'"):
        dataset.write_parquet("nowhere", min_rows_per_file="many")
    with pytest.raises(ValueError, match=r"size=5\) must be \(height, width\)"):
        data.read_images("nowhere", size=5)
    with pytest.raises(TypeError, match=r"read_csv\(\) has no argument 'kind'\.$"):
        data.read_csv("nowhere", kind="CSV")
    with pytest.raises(TypeError, match=r"read_csv\(\) .* 'shufle'\. Did you mean 'shuffle'\?"):
        data.read_csv("nowhere", shufle="files")
    for method in (dataset.iter_batches, dataset.iter_torch_batches):
        with pytest.raises(ValueError, match=rf"^{method.__name__}\(batch_size=0\)"):
            method(batch_size=0)
    with pytest.raises(ValueError, match="num_cpus must be a finite number"):
        dataset.map(lambda row: row, num_cpus=-1)
    with pytest.raises(ValueError, match="'max_retries' is an option of tasks"):
        dataset.map_batches(Model, max_retries=2)
    with pytest.raises(TypeError, match=r"union\(\) takes datasets of miniray.data, not \[1\]"):
        dataset.union([1])
    with pytest.raises(ValueError, match=r"random_sample\(seed='x'\)"):
        dataset.random_sample(0.5, seed="x")


def test_a_dataset_of_hugging_face_has_the_rows_of_its_tables() -> None:
    datasets = pytest.importorskip("datasets")
    table = datasets.Dataset.from_dict({"n": [0, 1, 2], "text": ["a", "b", None]})
    assert data.from_huggingface(table).schema().names == ["n", "text"]
    rows = [{"n": 2, "text": None}, {"n": 0, "text": "a"}]
    assert data.from_huggingface(table.select([2, 0])).take_all() == rows
    with pytest.raises(TypeError, match=r"takes one dataset, and not \['train'\]"):
        data.from_huggingface(datasets.DatasetDict({"train": table}))


def test_features_of_hugging_face_are_looked_through_for_what_must_be_decoded() -> None:
    from miniray.data.read_api import must_be_decoded

    class Image:
        def decode_example(self, value: Any) -> Any:
            return value

    class Several:
        feature = Image()

    for features in ({"a": Image()}, {"a": [Image()]}, {"a": Several()}, {"b": {"c": Image()}}):
        assert must_be_decoded(features)
    assert not must_be_decoded({"a": int, "b": [str]})


def test_ten_thousand_small_files_are_a_few_units(tmp_path: Path) -> None:
    for number in range(10_000):
        (tmp_path / f"{number:05d}.bin").write_bytes(number.to_bytes(2, "big") * 2048)
    (read,) = walk(data.read_binary_files(str(tmp_path))._plan)
    units = list(read.source.units(CutWish(2**25)))
    assert len(units) < 4
    rows = [cell[:2] for unit in units for t in unit.read() for cell in t["bytes"].to_pylist()]
    assert rows == [number.to_bytes(2, "big") for number in range(10_000)]


def test_columns_of_a_union_are_those_of_all_its_datasets() -> None:
    both = data.from_items([{"a": 1}]).union(data.from_items([{"a": 1.5, "b": "x"}]))
    assert both.schema().types == [pa.float64(), pa.string()]
    assert data.range(1).map(lambda row: row).columns(fetch_if_missing=False) is None


def test_sources_in_memory_take_what_ray_takes_as_advice() -> None:
    table = pa.table({"a": [1, 2]})
    assert data.from_arrow(table, override_num_blocks=2).count() == 2
    with pytest.raises(TypeError, match=r"from_arrow\(\) has no argument 'blocks'"):
        data.from_arrow(table, blocks=2)
    with pytest.raises(TypeError, match=r"one dataset, and not \['train'\]"):
        data.from_huggingface({"train": table})


def test_a_column_without_values_is_a_tensor_of_nan() -> None:
    pytest.importorskip("torch")
    (batch,) = data.from_items([{"x": None}, {"x": None}]).iter_torch_batches(device=None)
    assert batch["x"].isnan().all()
    with pytest.raises(TypeError, match="'x' has no numbers"):
        list(data.from_items([{"x": True}, {"x": None}]).iter_torch_batches())


def test_files_whose_tensors_differ_in_shape_are_read_together(tmp_path: Path) -> None:
    for number in (1, 2):
        table = batch_to_table({"x": np.ones((2, number))})
        pq.write_table(table, tmp_path / f"{number}.parquet")
    rows = data.read_parquet(str(tmp_path)).take_all()
    assert [row["x"].shape for row in rows] == [(1,), (1,), (2,), (2,)]


def test_files_whose_tensors_differ_in_the_type_of_their_numbers_are_read_as_one_type(
    tmp_path: Path,
) -> None:
    tables = [{"x": np.ones((2, 3), "uint8")}, {"x": np.ones((2, 3), "float32")}, {"x": [None]}]
    for number, table in enumerate(tables):
        pq.write_table(batch_to_table(table), tmp_path / f"{number}.parquet")
    dataset = data.read_parquet(str(tmp_path))
    (unit,) = dataset._plan.source.units(CutWish(2**20))
    read = list(unit.read())
    assert [table.num_rows for table in read] == [2, 2, 1]
    assert {table.schema.types[0] for table in read} == set(dataset.schema().types)


def test_many_small_items_of_a_dataset_are_few_tables_and_large_ones_many() -> None:
    small = list(tables_of_items(range(100_000), range(1, 100_000)))
    assert [n for table in small for n in table.column("item").to_pylist()] == [*range(1, 100_000)]
    assert len(small) == 3
    large = tables_of_items([np.zeros(2**17)] * 50, range(50))
    assert [len(table) for table in large] == [16, *[4] * 8, 2]
