"""Files that datasets are written into, materialized blocks, splits that are read elsewhere."""

from __future__ import annotations

import concurrent.futures
import datetime
import os
import time
from typing import TYPE_CHECKING, Any

import pytest

import miniray
from miniray import data
from miniray.data.expressions import col, lit

if TYPE_CHECKING:
    from pathlib import Path

np = pytest.importorskip("numpy")
pa = pytest.importorskip("pyarrow")
csv = pytest.importorskip("pyarrow.csv")
pq = pytest.importorskip("pyarrow.parquet")
pytestmark = pytest.mark.usefixtures("cluster")
CLUSTER = {"num_cpus": 2}


def ids(dataset: Any) -> list[int]:
    return [row["id"] for row in dataset.take_all()]


def test_parquet_csv_and_json_come_back_as_they_were_written(tmp_path: Path) -> None:
    dataset = data.range(100).map(lambda row: {"id": row["id"], "text": str(row["id"])})
    dataset.write_parquet(str(tmp_path / "parquet"))
    dataset.write_csv(str(tmp_path / "csv"))
    dataset.write_json(str(tmp_path / "json"))
    expected = [{"id": n, "text": str(n)} for n in range(100)]
    assert data.read_parquet(str(tmp_path / "parquet")).take_all() == expected
    assert data.read_json(str(tmp_path / "json")).take_all() == expected
    assert ids(data.read_csv(str(tmp_path / "csv"))) == list(range(100))
    dataset.write_parquet(str(tmp_path / "created"), mode="create")
    names = sorted(path.name for path in (tmp_path / "created").iterdir())
    assert names == [f"{n:06d}-000000.parquet" for n in range(len(names))]


def test_small_data_are_one_file_but_functions_before_use_all_cpus(tmp_path: Path) -> None:
    data.range(100).write_parquet(str(tmp_path / "one"))
    assert len(list((tmp_path / "one").iterdir())) == 1
    data.range(80).map(lambda row: row).write_parquet(str(tmp_path / "several"))
    assert len(list((tmp_path / "several").iterdir())) == 8


def test_json_has_the_text_of_bytes_and_refuses_other_bytes(tmp_path: Path) -> None:
    data.from_items([{"raw": "größe".encode()}]).write_json(str(tmp_path))
    assert data.read_json(str(tmp_path)).take_all() == [{"raw": "größe"}]
    with pytest.raises(data.DataError, match=r"WriteJson failed.*UnicodeDecodeError"):
        data.from_items([{"raw": b"\xff"}]).write_json(str(tmp_path))


def test_json_has_null_for_what_is_no_number_and_times_that_all_are_alike(tmp_path: Path) -> None:
    times = [datetime.datetime(2026, 1, 1), datetime.datetime(2026, 1, 1, 0, 0, 0, 5)]
    numbers = [float("nan"), [1.0, float("inf")]]
    rows = [{"x": x, "t": t} for x, t in zip(numbers, times, strict=True)]
    data.from_items(rows[:1]).union(data.from_items(rows[1:])).write_json(str(tmp_path))
    texts = sorted(path.read_text() for path in tmp_path.iterdir())
    assert texts == [
        '{"x": [1.0, null], "t": "2026-01-01 00:00:00.000005"}\n',
        '{"x": null, "t": "2026-01-01 00:00:00.000000"}\n',
    ]
    assert data.read_json(str(tmp_path)).select_columns(["t"]).count() == 2


def test_options_that_can_not_be_pickled_are_made_where_files_are_written(tmp_path: Path) -> None:
    data.range(2).write_csv(
        str(tmp_path),
        min_rows_per_file=2,
        arrow_csv_args_fn=lambda: {"write_options": csv.WriteOptions(include_header=False)},
    )
    (file,) = tmp_path.iterdir()
    assert sorted(file.read_text().split()) == ["0", "1"]  # blocks are written as they come


def test_files_are_written_as_blocks_come(tmp_path: Path) -> None:
    folder = tmp_path / "out"

    def waits(row: dict[str, Any]) -> dict[str, Any]:
        deadline = time.monotonic() + 10
        while row["id"] == 0 and len(list(folder.iterdir())) < 7 and time.monotonic() < deadline:
            time.sleep(0.01)
        return {"id": row["id"], "files": len(list(folder.iterdir()))}

    data.range(8).map(waits).write_parquet(str(folder))
    rows = {row["id"]: row["files"] for row in data.read_parquet(str(folder)).take_all()}
    assert sorted(rows) == list(range(8))
    assert rows[0] == 7


def test_two_that_append_to_a_folder_at_the_same_time_both_add_their_rows(tmp_path: Path) -> None:
    both = [data.range(40).map(lambda row, add=add: {"id": row["id"] + add}) for add in (0, 40)]
    with concurrent.futures.ThreadPoolExecutor(2) as pool:
        list(pool.map(lambda dataset: dataset.write_parquet(str(tmp_path / "out")), both))
    assert sorted(ids(data.read_parquet(str(tmp_path / "out")))) == list(range(80))


def test_modes_say_what_becomes_of_files_that_are_there(tmp_path: Path) -> None:
    folder = str(tmp_path / "x")
    data.range(5).write_parquet(folder)
    data.range(3).write_parquet(folder)
    assert data.read_parquet(folder).count() == 8
    data.range(7).write_parquet(folder, mode="ignore")
    assert data.read_parquet(folder).count() == 8
    for mode in ("create", "error"):
        with pytest.raises(ValueError, match="there are files"):
            data.range(7).write_parquet(folder, mode=mode)
    data.range(2).write_parquet(folder, mode="overwrite")
    assert data.read_parquet(folder).count() == 2
    for rows in (2, 1):  # files are removed when those that were made of them are there
        kept = data.read_parquet(folder).filter(expr=f"id < {rows}")
        kept.write_parquet(folder, mode="overwrite")
        assert ids(data.read_parquet(folder)) == list(range(rows))
    with pytest.raises(ValueError, match="mode='replace'"):
        data.range(2).write_parquet(folder, mode="replace")


def test_rows_per_file_and_folders_of_partitions(tmp_path: Path) -> None:
    dataset = data.range(100).map(lambda row: {"id": row["id"], "key": row["id"] % 2})
    dataset.write_parquet(str(tmp_path / "few"), min_rows_per_file=50, concurrency=2)
    assert len(list((tmp_path / "few").iterdir())) <= 2
    with pytest.raises(ValueError, match="min_rows_per_file is above max_rows_per_file"):
        dataset.write_parquet(str(tmp_path / "none"), min_rows_per_file=31, max_rows_per_file=30)
    dataset.write_parquet(str(tmp_path / "many"), max_rows_per_file=30, try_create_dir=True)
    rows = [pq.read_metadata(path).num_rows for path in (tmp_path / "many").iterdir()]
    assert sorted(rows) == [10, 30, 30, 30]
    dataset.write_parquet(str(tmp_path / "keys"), partition_cols=["key"])
    assert sorted(path.name for path in (tmp_path / "keys").iterdir()) == ["key=0", "key=1"]
    back = data.read_parquet(str(tmp_path / "keys"))
    assert sorted(row["id"] for row in back.take_all() if row["key"] == "1") == list(
        range(1, 100, 2)
    )


def test_a_file_has_the_rows_of_many_small_batches_and_at_least_those_asked_for(
    tmp_path: Path,
) -> None:
    dataset = data.range(6_000_000).map_batches(
        lambda table: table, batch_format="pyarrow", batch_size=100_000
    )
    dataset.write_parquet(str(tmp_path / "blocks"))
    assert len(list((tmp_path / "blocks").iterdir())) <= 8  # 46 MiB from two CPUs, 60 batches
    assert dataset.get_stats_summary()["operators"][-1]["rows"] == 6_000_000
    dataset.write_parquet(str(tmp_path / "one"), min_rows_per_file=6_000_000)
    (file,) = (tmp_path / "one").iterdir()
    assert pq.read_metadata(file).num_rows == 6_000_000


def test_a_file_that_cannot_be_written_is_named_and_leaves_nothing(tmp_path: Path) -> None:
    in_the_way = tmp_path / "000000-000000.parquet" / ".000000-000000.parquet.part"
    in_the_way.mkdir(parents=True)
    told = r"WriteParquet: .*/000000-000000\.parquet can't be written: .* \(.*range\(0, 4\)\)$"
    with pytest.raises(data.DataError, match=told):
        data.range(4).write_parquet(str(tmp_path), mode="create")
    assert not (tmp_path / in_the_way.name).exists()


def test_a_value_that_names_a_folder_names_none_elsewhere(tmp_path: Path) -> None:
    names = ["../../out", "a/b", "50%25", "x=y z"]
    folder = tmp_path / "deep" / "keys"
    items = [{"id": number, "key": name} for number, name in enumerate(names)]
    data.from_items(items).write_parquet(str(folder), partition_cols=["key"])
    assert sorted(path.name for path in tmp_path.iterdir()) == ["deep"]
    assert len(list(folder.iterdir())) == 4
    back = data.read_parquet(str(folder)).take_all()
    assert sorted((row["id"], row["key"]) for row in back) == list(enumerate(names))


def test_folders_are_named_by_categories_and_hold_at_least_one_column(tmp_path: Path) -> None:
    keys = pa.array(["a", None, "b", "a"]).dictionary_encode()
    data.from_arrow(pa.table({"key": keys, "id": range(4)})).write_parquet(
        str(tmp_path / "keys"), partition_cols=["key"]
    )
    assert sorted(path.name for path in (tmp_path / "keys").iterdir()) == [
        "key=__HIVE_DEFAULT_PARTITION__",
        "key=a",
        "key=b",
    ]
    back = data.read_parquet(str(tmp_path / "keys")).sort("id").take_all()
    assert [row["key"] for row in back] == ["a", None, "b", "a"]
    kinds = data.from_items([{"id": 0, "x": 1.0, "y": False, "z": ""}, {"id": 1, "x": None}])
    kinds.write_csv(str(tmp_path / "kinds"), partition_cols=["x", "y", "z"])
    assert data.read_csv(str(tmp_path / "kinds")).sort("id").take_all() == [
        {"id": 0, "x": "1", "y": "false", "z": ""},
        {"id": 1, "x": None, "y": None, "z": None},
    ]
    with pytest.raises(data.DataError, match="partition_cols leaves no column"):
        data.range(4).write_parquet(str(tmp_path / "none"), partition_cols=["id"])


def test_arrays_are_written_and_python_objects_refused(tmp_path: Path) -> None:
    data.range_tensor(4, shape=(2, 2)).write_numpy(str(tmp_path / "npy"), column="data")
    back = data.read_numpy(str(tmp_path / "npy")).take_all()
    assert [row["data"].tolist() for row in back] == [[[n, n], [n, n]] for n in range(4)]
    data.range_tensor(4, shape=(2,)).write_parquet(str(tmp_path / "p"))
    assert data.read_parquet(str(tmp_path / "p")).take(2)[1]["data"].tolist() == [1, 1]
    objects = data.range(2).map(lambda row: {"x": {1, 2}})
    with pytest.raises(data.DataError, match=r"'x' of row.* has Python objects"):
        objects.write_parquet(str(tmp_path / "objects"))
    assert not list((tmp_path / "objects").iterdir())


def test_images_are_read_and_written(tmp_path: Path) -> None:
    from PIL import Image

    images = np.arange(2 * 4 * 6 * 3, dtype=np.uint8).reshape(2, 4, 6, 3)
    data.from_numpy(images).write_images(str(tmp_path / "jpg"), "data", "jpg")
    assert data.read_images(str(tmp_path / "jpg")).count() == 2
    data.from_numpy(images).write_images(str(tmp_path / "png"), "data")
    back = data.read_images(str(tmp_path / "png")).take_all()
    assert [(row["image"] == image).all() for row, image in zip(back, images, strict=True)]
    (scaled,) = data.read_images(str(tmp_path / "png"), size=(2, 3), mode="L").take(1)
    expected = Image.fromarray(images[0]).resize((3, 2), Image.Resampling.BILINEAR).convert("L")
    assert scaled["image"].tolist() == np.asarray(expected).tolist()


def test_blocks_of_so_many_rows() -> None:
    dataset = data.range(95).map(lambda row: row)
    blocks = dataset.repartition(target_num_rows_per_block=10, strict=True).materialize()
    sizes = [len(batch["id"]) for batch in blocks.iter_batches(batch_size=None)]
    assert sizes == [10] * 9 + [5]
    large = dataset.repartition(1).repartition(target_num_rows_per_block=40).materialize()
    assert [len(batch["id"]) for batch in large.iter_batches(batch_size=None)] == [40, 40, 15]
    assert ids(blocks) == list(range(95))


def test_parts_that_are_read_in_actors_are_all_rows_once() -> None:
    @miniray.remote
    def read(part: Any) -> list[int]:
        return [int(n) for batch in part.iter_batches(batch_size=7) for n in batch["id"]]

    mapped = data.range(100).map(lambda row: {"id": row["id"] + 1})
    found = miniray.get([read.remote(part) for part in mapped.streaming_split(3)])
    assert [len(part) for part in found] == [34, 33, 33]
    assert sorted(n for part in found for n in part) == list(range(1, 101))
    filtered = data.range(100).filter(lambda row: row["id"] % 2 == 0)
    found = miniray.get([read.remote(part) for part in filtered.streaming_split(2)])
    assert sorted(n for part in found for n in part) == list(range(0, 100, 2))
    assert all(found)
    equal = filtered.streaming_split(3, equal=True)
    found = miniray.get([read.remote(part) for part in equal])
    assert [len(part) for part in found] == [17, 17, 16]


def test_refs_of_blocks_are_data_again() -> None:
    dataset = data.range(10).map(lambda row: row)
    refs = dataset.to_arrow_refs()
    assert ids(data.from_arrow_refs(refs)) == list(range(10))
    assert ids(data.from_arrow_refs(refs).map(lambda row: row)) == list(range(10))
    (array, *_) = miniray.get(data.range(3).to_numpy_refs(column="id"))
    assert array.tolist() == [0, 1, 2]
    assert miniray.get(data.from_numpy(np.arange(3)).to_numpy_refs())[0]["data"].tolist() == [
        0,
        1,
        2,
    ]


def test_blocks_are_a_dataset_and_several_columns_are_made_at_once() -> None:
    blocks = data.from_blocks([pa.table({"a": [1]}), pa.table({"a": [2, 3]})])
    made = blocks.with_columns({"b": col("a") * 2, "c": lit("x")})
    assert made.take_all() == [{"a": n, "b": 2 * n, "c": "x"} for n in (1, 2, 3)]
    assert blocks.size_bytes() == 24


def test_refs_of_frames_and_arrays_are_data() -> None:
    pandas = pytest.importorskip("pandas")
    frames = [miniray.put(pandas.DataFrame({"id": [n, n + 1]})) for n in (0, 2)]
    assert ids(data.from_pandas_refs(frames)) == [0, 1, 2, 3]
    arrays = [miniray.put(np.arange(n, n + 2)) for n in (0, 2)]
    assert [row["data"] for row in data.from_numpy_refs(arrays).take_all()] == [0, 1, 2, 3]


def test_blocks_given_as_refs_are_counted_where_their_rows_matter() -> None:
    refs = [miniray.put(pa.table({"id": range(start, start + 10)})) for start in (0, 10)]
    dataset = data.from_arrow_refs(refs)
    assert ids(dataset.union(dataset).limit(23)) == [*range(20), 0, 1, 2]
    assert ids(dataset.repartition(3)) == list(range(20))
    assert ids(dataset.zip(data.range(20))) == list(range(20))
    parts = [*dataset.split(2), *dataset.split_at_indices([17]), *dataset.train_test_split(3)]
    assert [len(ids(part)) for part in parts] == [10, 10, 17, 3, 17, 3]
    equal = [
        sum(len(b["id"]) for b in part.iter_batches())
        for part in dataset.streaming_split(3, equal=True)
    ]
    assert equal == [7, 7, 6]
    blocks = dataset.repartition(target_num_rows_per_block=8, strict=True).to_arrow_refs()
    assert [table.num_rows for table in miniray.get(blocks)] == [8, 8, 4]
    assert [ids(part) for part in dataset.split(2)] == [list(range(10)), list(range(10, 20))]
    train, test = dataset.train_test_split(5)
    assert (ids(train), ids(test)) == (list(range(15)), list(range(15, 20)))
    parts = dataset.streaming_split(2, equal=True)
    assert [len(list(part.iter_rows())) for part in parts] == [10, 10]


def test_refs_of_a_part_of_a_block_have_its_rows_alone() -> None:
    first, second = data.range(10).materialize().split_at_indices([4])
    tables = miniray.get([*first.to_arrow_refs(), *second.to_arrow_refs()])
    assert sum(table.num_rows for table in tables) == 10
    assert ids(data.from_arrow_refs(first.to_arrow_refs())) == [0, 1, 2, 3]


def test_the_first_rows_of_blocks_are_not_copied_by_tasks() -> None:
    made = data.range(40).map(lambda row: row).materialize()
    both = made.limit(30).union(made)
    assert ids(both) == [*range(30), *range(40)]
    assert both.get_stats_summary()["operators"] == []


def test_items_of_a_torch_dataset_are_read_in_tasks() -> None:
    class Squares:
        def __len__(self) -> int:
            return 20

        def __getitem__(self, number: int) -> dict[str, int]:
            import os

            return {"id": number * number, "pid": os.getpid(), "x": random.random()}

    import os
    import random

    dataset = data.from_torch(Squares())
    for read in (dataset, dataset.map(lambda row: row)):
        rows = read.take_all()
        assert [row["id"] for row in rows] == [n * n for n in range(20)]
        assert os.getpid() not in {row["pid"] for row in rows}
        assert [row["x"] for row in rows] == [row["x"] for row in read.take_all()]
    assert dataset.materialize().num_blocks() > 1
    assert [row["id"] for row in dataset.take(3)] == [0, 1, 4]


def test_another_order_of_blocks_has_the_same_rows() -> None:
    dataset = data.range(1000).map(lambda row: row)
    mixed = ids(dataset.randomize_block_order(seed=1))
    assert sorted(mixed) == list(range(1000)) != mixed
    assert ids(dataset.randomize_block_order(seed=1)) == mixed
    assert ids(dataset.randomize_block_order(seed=2)) != mixed


def test_pandas_and_a_column_made_by_a_function() -> None:
    pytest.importorskip("pandas")
    dataset = data.range(10).add_column("double", lambda frame: frame["id"] * 2)
    assert dataset.to_pandas()["double"].tolist() == list(range(0, 20, 2))
    same = data.range(3).add_column("id", lambda table: table["id"], batch_format="pyarrow")
    assert ids(same) == [0, 1, 2]
    frames = data.range(10).map_batches(lambda frame: frame[frame["id"] > 7], batch_format="pandas")
    assert ids(frames) == [8, 9]
    with pytest.raises(ValueError, match="has 10 rows"):
        dataset.to_pandas(limit=5)


def test_units_that_fail_are_left_out_if_so_many_may() -> None:
    context = data.DataContext.get_current()
    context.max_errored_blocks = 1
    try:

        def fails(row: dict[str, int]) -> dict[str, int]:
            if row["id"] == 3:
                raise ValueError("bad")
            return row

        dataset = data.range(80).map(fails)
        rows = ids(dataset)
        assert 60 <= len(rows) < 80
        assert "1 failed" in dataset.stats()
        context.max_errored_blocks = -1  # any number
        assert ids(data.range(80).map(lambda row: {"id": 1 // row["none"]})) == []
    finally:
        context.max_errored_blocks = 0


def test_a_limit_and_a_zip_that_are_written_have_the_rows_that_are_read(tmp_path: Path) -> None:
    def comes_last_if_first(row: dict[str, Any]) -> bool:
        other = tmp_path / "other"
        if row["id"] == 14:
            other.touch()
        deadline = time.monotonic() + 10
        while row["id"] == 0 and not other.exists() and time.monotonic() < deadline:
            time.sleep(0.1)
        return True

    tables = [pa.table({"id": range(low, low + 10)}) for low in range(0, 40, 10)]
    kept = data.from_arrow(tables).filter(comes_last_if_first)
    kept.limit(5).write_parquet(str(tmp_path / "limit"))
    assert ids(data.read_parquet(str(tmp_path / "limit"))) == list(range(5))
    (tmp_path / "other").unlink()
    data.range(40).rename_columns({"id": "to"}).zip(kept).write_parquet(str(tmp_path / "zip"))
    rows = data.read_parquet(str(tmp_path / "zip")).take_all()
    assert [row["to"] for row in rows] == [row["id"] for row in rows]


def test_a_dataset_without_a_length_is_read_by_one_task() -> None:
    class Numbers:
        def __iter__(self) -> Any:
            yield from (1, {"n": 2})

    dataset = data.from_torch(Numbers())
    assert dataset.take_all() == [{"item": 1, "n": None}, {"item": None, "n": 2}]
    assert data.from_huggingface(Numbers()).count() == 2


@pytest.mark.slow  # loading the library takes seconds in each process
def test_what_hugging_face_has_to_decode_is_read_by_tasks() -> None:
    datasets = pytest.importorskip("datasets")
    image = pytest.importorskip("PIL.Image")
    table = datasets.Dataset.from_dict({"n": [0, 1, 2]})
    assert data.from_huggingface(table.to_iterable_dataset()).take_all() == list(table)

    def pixels(row: Any) -> Any:
        return {"pixels": np.asarray(row["image"]), "by": os.getpid()}

    arrays = [np.full((4, 5, 3), number, np.uint8) for number in range(8)]
    features = datasets.Features({"image": datasets.Image()})
    images = datasets.Dataset.from_dict({"image": list(map(image.fromarray, arrays))}, features)
    found = data.from_huggingface(images).map(pixels).take_all()
    assert all(map(np.array_equal, [row["pixels"] for row in found], arrays))
    assert os.getpid() not in {row["by"] for row in found}
