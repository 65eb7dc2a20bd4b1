"""What a user may give as a dataset, and what is said about everything else."""

from __future__ import annotations

import copy
import functools
import pickle
import random

import pytest

pytest.importorskip("pyarrow")

import pyarrow as pa
import pyarrow.dataset
import pyarrow.parquet

import miniray
from miniray.data import DataError, ExecutionOptions, ExecutionResources, executor
from miniray.data.feeds import source_feed
from miniray.data.plan import Read, Stage, explained
from miniray.data.sources import BlockRows, ReadUnit, UnitsDatasource
from miniray.data.transforms import MapBatches, Udf
from miniray.train import DataConfig, DataParallelTrainer, ScalingConfig
from miniray.train.data.adapt import adapt
from miniray.train.data.iterator import DataIterator
from miniray.train.data.order import Span
from miniray.train.data.shards import Datasets, Shards, get_dataset_shard
from miniray.train.data.units import HubRows, UnitsSource, chosen


def table_of(rows):
    return pa.table({"id": list(range(rows))})


def ids(dataset):
    batches = DataIterator("train", adapt("train", dataset), seed=None).iter_batches(batch_size=4)
    return [int(n) for batch in batches for n in batch["id"]]


@pytest.fixture
def folder(tmp_path):
    """Two Parquet files of 5 rows each, one in a folder below."""
    (tmp_path / "data" / "more").mkdir(parents=True)
    pa.parquet.write_table(table_of(10).slice(0, 5), tmp_path / "data" / "a.parquet")
    pa.parquet.write_table(table_of(10).slice(5, 5), tmp_path / "data" / "more" / "b.parquet")
    (tmp_path / "data" / "notes.txt").write_text("no data")
    return tmp_path / "data"


def test_parquet_is_given_as_a_folder_a_file_a_pattern_or_a_list(folder):
    assert ids(folder) == list(range(10))
    assert ids(str(folder / "a.parquet")) == list(range(5))
    assert ids(f"{folder}/*/*.parquet") == list(range(5, 10))
    assert ids([folder / "a.parquet", f"{folder}/more"]) == list(range(10))
    assert ids(f"file://{folder}/a.parquet") == list(range(5))


def test_parquet_is_read_from_other_filesystems(folder):
    fsspec = pytest.importorskip("fsspec")
    bucket = fsspec.filesystem("memory")
    bucket.pipe_file("/data-kinds/a.parquet", (folder / "a.parquet").read_bytes())
    try:
        assert ids("memory://data-kinds/a.parquet") == list(range(5))
        assert ids("memory://data-kinds/*.parquet") == list(range(5))
        with pytest.raises(ValueError, match="different filesystems"):
            adapt("train", [folder / "a.parquet", "memory://data-kinds/a.parquet"])
    finally:
        bucket.rm("/data-kinds", recursive=True)


def test_a_pyarrow_dataset_keeps_its_partitions(tmp_path):
    table = pa.table({"id": [0, 1, 2, 3], "day": ["a", "a", "b", "b"]})
    pyarrow.dataset.write_dataset(
        table, tmp_path, format="parquet", partitioning=["day"], partitioning_flavor="hive"
    )
    dataset = pyarrow.dataset.dataset(tmp_path, partitioning="hive")
    batches = DataIterator("train", adapt("train", dataset), seed=None).iter_batches()
    rows = [pair for batch in batches for pair in zip(batch["id"], batch["day"], strict=True)]
    assert rows == [(0, "a"), (1, "a"), (2, "b"), (3, "b")]


def test_other_files_of_a_pyarrow_dataset_are_read_whole(tmp_path):
    for number in range(2):
        (tmp_path / f"{number}.csv").write_text(f"id\n{number}\n{number}\n")
    assert ids(pyarrow.dataset.dataset(tmp_path, format="csv")) == [0, 0, 1, 1]


def test_a_pyarrow_dataset_in_memory_is_a_table():
    assert ids(pyarrow.dataset.dataset(table_of(3))) == [0, 1, 2]


def test_a_filtered_pyarrow_dataset_is_refused(folder):
    dataset = pyarrow.dataset.dataset(folder / "a.parquet").filter(pyarrow.dataset.field("id") > 2)
    with pytest.raises(ValueError, match=r"\['train'\]: .*Remove the filtering"):
        adapt("train", dataset)


def test_a_list_of_dictionaries_is_a_dataset():
    assert ids([{"id": 4}, {"id": 5}]) == [4, 5]


def test_a_record_batch_is_a_table():
    assert ids(table_of(3).to_batches()[0]) == [0, 1, 2]


@pytest.mark.parametrize("other", [{"id": ["x"]}, {"id": pa.array([1], "int32")}, {"b": [1]}])
def test_files_with_different_columns_are_refused(folder, other):
    pa.parquet.write_table(pa.table(other), folder / "c.parquet")
    with pytest.raises(ValueError, match=r"a.parquet has id: int64, .*c.parquet has (id|b): "):
        adapt("train", folder)


def test_a_rank_gets_the_columns_of_the_files_and_no_others(tmp_path):
    (tmp_path / "day=monday").mkdir()
    pa.parquet.write_table(pa.table({"id": [1, 2]}), tmp_path / "day=monday" / "a.parquet")
    (batch,) = DataIterator("train", adapt("train", tmp_path)).iter_batches()
    assert list(batch) == ["id"]


def test_errors_of_a_dataset_keep_their_type(folder):
    rows = miniray.data.read_parquet(str(folder / "notes.txt"))
    with pytest.raises(DataError, match=r"notes.txt can't be read as Parquet"):
        adapt("train", rows)


def test_what_is_no_parquet_file_is_refused(folder):
    with pytest.raises(ValueError, match=r"datasets\['train'\].*is a Parquet file: .*notes.txt"):
        adapt("train", folder / "notes.txt")


@pytest.mark.parametrize("path", ["nothing", "nothing/*.parquet", "more/../empty"])
def test_a_path_without_files_is_refused(folder, path):
    (folder / "empty").mkdir()
    with pytest.raises(FileNotFoundError, match=r"datasets\['train'\].*no Parquet file at"):
        adapt("train", folder / path)


@pytest.mark.parametrize(
    ("dataset", "message"),
    [
        (5, "which is no dataset. Give a dataset of miniray.data"),
        ({"a": [1]}, "Give a dataset of miniray.data"),
        (list, "That is a class"),
        (iter([1]), "can be read only once"),
        (b"x", "Give a dataset of miniray.data"),
    ],
)
def test_what_is_no_dataset_is_refused_with_what_can_be_given(dataset, message):
    with pytest.raises(TypeError, match=rf"datasets\['train'\] is .*{message}"):
        adapt("train", dataset)


def test_a_data_loader_is_refused_with_what_to_do():
    torch = pytest.importorskip("torch")
    loader = torch.utils.data.DataLoader([1, 2])
    with pytest.raises(TypeError, match="prepare_data_loader"):
        adapt("train", loader)


def train_on(datasets, workers=2, **config):
    return DataParallelTrainer(
        print,
        scaling_config=ScalingConfig(num_workers=workers),
        datasets=datasets,
        dataset_config=DataConfig(**config),
    )


def test_a_trainer_refuses_bad_datasets_when_it_is_made():
    with pytest.raises(TypeError, match="must be a dictionary"):
        train_on([1, 2])
    with pytest.raises(TypeError, match="non-empty strings"):
        train_on({3: [1, 2]})
    with pytest.raises(ValueError, match=r"\['train'\] has 3 rows, less than one for each of 4"):
        train_on({"train": [1, 2, 3]}, workers=4)
    with pytest.raises(ValueError, match=r"\['train'\] has 0 rows"):
        train_on({"train": []}, datasets_to_split=[])
    train_on({"train": [1, 2, 3]}, workers=4, datasets_to_split=[])


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"datasets_to_split": "train"}, '"all" or a list'),
        (
            {"datasets_to_shuffle": ["valid"]},
            "'valid', but the trainer's datasets are: train",
        ),
        ({"seed": -1}, "seed=-1"),
        ({"seed": 0.5}, "seed=0.5"),
    ],
)
def test_nonsense_in_a_data_config_is_refused(config, message):
    with pytest.raises(ValueError, match=message):
        train_on({"train": [1, 2]}, **config)


def test_what_is_not_split_is_whole_on_every_rank_and_in_one_order():
    sources = {"train": adapt("train", table_of(8)), "valid": adapt("valid", table_of(4))}
    datasets = Datasets(
        sources, DataConfig(datasets_to_split=["train"], datasets_to_shuffle=["train"])
    )
    for rank in range(2):
        shards = Shards(datasets, rank, 2)
        assert len(shards.get("train").iter_batches(batch_size=1)) == 4
        (batch,) = shards.get("valid").iter_batches()
        assert batch["id"].tolist() == [0, 1, 2, 3]
        assert shards.get("train") is shards.get("train")


def test_options_of_execution_are_for_all_datasets_or_by_name():
    options = ExecutionOptions(resource_limits=ExecutionResources(cpu=1))
    assert DataConfig("all", options, enable_shard_locality=False).options("train") is options
    by_name = DataConfig(execution_options={"train": options})
    assert (by_name.options("train"), by_name.options("valid")) == (options, None)
    with pytest.raises(ValueError, match=r"execution_options=True\) must be .*ExecutionOptions"):
        DataConfig(execution_options=True)


def test_a_dataset_is_executed_with_the_options_that_it_was_given(monkeypatch):
    options = ExecutionOptions(resource_limits=ExecutionResources(cpu=1))
    source = adapt("train", miniray.data.range(4), options=options)
    assert source._context.execution_options is options
    asked = []
    monkeypatch.setattr(
        "miniray.train.data.datasets.execute", lambda plan, **given: iter([asked.append(given)])
    )
    source.tables(iter(()), 1, local=True)
    assert asked[0]["context"].execution_options is options
    assert asked[0]["ordered"]  # in any case


def test_random_numbers_of_a_unit_are_others_in_the_next_epoch():
    source = adapt("train", miniray.data.range(4), shuffled=True)
    keys = [source.selected(0, Span(4, 0, 4, None), epoch).key for epoch in (0, 1, 1)]
    assert keys[0] != keys[1] == keys[2]


def test_each_rank_begins_with_another_actor_of_a_pool():
    class Same:
        def __call__(self, row):
            return row

    source = adapt("train", miniray.data.range(4).map(Same, concurrency=2))
    given = [source.through([["a", "b"]], rank)._stages[-1].compute.given for rank in range(3)]
    assert given == [["a", "b"], ["b", "a"], ["a", "b"]]


def test_ranks_that_hold_all_cpus_say_so_once(caplog, monkeypatch):
    monkeypatch.setattr("miniray.train.data.datasets.is_cpu_left", lambda: False)
    monkeypatch.setattr("miniray.train.data.datasets._warned", False)
    sources = [adapt("train", miniray.data.range(4)) for _ in range(2)]
    assert [source.is_local() for source in sources * 2] == [True] * 4
    (told,) = caplog.messages
    assert "hold all CPUs" in told


def test_the_default_options_of_ingest_are_a_copy_to_be_changed() -> None:
    from miniray.data import DataContext

    options = DataConfig.default_ingest_options()
    options.resource_limits.object_store_memory = 10e9
    assert DataConfig(execution_options=options).options("train") is options
    assert DataContext.get_current().execution_options.resource_limits.object_store_memory is None


def test_a_configuration_that_prepares_datasets_as_rays_do_is_refused_when_it_is_defined():
    with pytest.raises(TypeError, match=r"Own\.configure is how Ray's trainers prepare"):
        type("Own", (DataConfig,), {"configure": lambda self, *args, **kwargs: {}})


@pytest.mark.parametrize(
    ("name", "instead"),
    [("iter_rows", "to_pylist"), ("to_torch", "iter_torch_batches"), ("schema", "pyarrow")],
)
def test_a_method_that_only_rays_iterators_have_says_what_to_do_instead(name, instead):
    iterator = DataIterator("train", adapt("train", table_of(1)))
    with pytest.raises(AttributeError, match=rf"has no '{name}': .*{instead}"):
        getattr(iterator, name)
    with pytest.raises(AttributeError, match=r"has no 'nothing'$"):
        iterator.nothing  # noqa: B018


def test_a_function_that_returns_a_dataset_is_called():
    assert ids(lambda: table_of(5)) == ids(functools.partial(table_of, 5)) == [0, 1, 2, 3, 4]
    with pytest.raises(TypeError, match=r"is 5 of type .*, which is no dataset"):
        adapt("train", lambda: 5)


def test_an_unknown_dataset_is_refused_with_those_that_there_are():
    shards = Shards(Datasets({"train": adapt("train", table_of(1))}), 0, 1)
    with pytest.raises(KeyError, match="no such dataset, but 'train'"):
        shards.get("valid")
    assert shards.get(None) is shards.get("train")
    with pytest.raises(KeyError, match="needs a name"):
        Shards(Datasets(), 0, 1).get(None)


def test_shards_are_there_in_a_train_loop_only():
    with pytest.raises(RuntimeError, match="only inside a train loop"):
        get_dataset_shard("train")


def test_a_dataset_that_can_not_be_pickled_is_named():
    def put(source):
        raise TypeError("cannot pickle '_io.TextIOWrapper' object")

    with pytest.raises(TypeError, match=r"datasets\['train'\] can't be sent.*TextIOWrapper"):
        Datasets({"train": 1}).published(put)


def test_a_shuffle_is_left_out_where_each_epoch_has_an_order_of_its_own(folder):
    rows = miniray.data.read_parquet(str(folder)).random_shuffle(seed=1)
    source = adapt("train", rows.select_columns(["id"]), shuffled=True)
    assert list(source.block_sizes) == [10]
    assert "RandomShuffle" not in explained(source._plan)


def test_a_shuffle_that_is_left_out_is_told_where_an_epoch_mixes_less(caplog):
    def same(row):
        return row

    rows = miniray.data.range(1000).random_shuffle(seed=1)
    for dataset in (rows.map(same), rows.select_columns(["id"]), miniray.data.range(9).map(same)):
        adapt("train", dataset, shuffled=True)
    (told,) = caplog.messages  # all others are of one unit, or have no shuffle
    assert "orders the 334 units" in told


class HubDataset:
    """Gives tables by slices and lists of numbers, as ``datasets.Dataset`` does for Arrow."""

    def __init__(self, rows):
        self.table = table_of(rows)
        self.asked = []

    def __len__(self):
        return self.table.num_rows

    def __getitem__(self, rows):
        found = self.table[rows] if isinstance(rows, slice) else self.table.take(rows)
        self.asked.append(found.num_rows)
        return found


def test_rows_of_a_hugging_face_dataset_are_read_a_part_at_a_time():
    dataset = HubDataset(40_000)
    source = UnitsSource([ReadUnit(HubRows(dataset), len(dataset))])
    seen = []
    for rank in range(2):
        shard = DataIterator("train", source, rank, 2)
        seen += [int(n) for batch in shard.iter_batches(batch_size=1000) for n in batch["id"]]
    assert sorted(seen) == list(range(40_000)) != seen
    assert max(dataset.asked) < 20_000
    dataset.asked.clear()
    large = UnitsSource([ReadUnit(HubRows(dataset), len(dataset), len(dataset) * 2**20)])
    next(iter(DataIterator("train", large, 0, 1).iter_batches(batch_size=1, prefetch_batches=0)))
    assert dataset.asked == [16]  # of 1 MiB each
    dataset.asked.clear()
    kept = DataIterator("train", source, seed=None).iter_batches(batch_size=1000)
    assert [int(n) for batch in kept for n in batch["id"]] == list(range(40_000))
    assert max(dataset.asked) == 1024


def test_datasets_are_told_the_epoch_and_asked_for_several_items_as_by_pytorch():
    class Stream:
        def set_epoch(self, epoch):
            self.epoch = epoch

        def __iter__(self):
            return iter([self.epoch])

    class Items:
        def __len__(self):
            return 10

        def __getitem__(self, number):
            raise AssertionError

        def __getitems__(self, numbers):
            return [{"id": number} for number in numbers]

    epochs = DataIterator("train", adapt("train", Stream())).iter_batches(batch_size=1)
    assert [[int(batch[0]) for batch in epochs] for _ in range(3)] == [[0], [1], [2]]
    items = DataIterator("train", adapt("train", Items()), seed=None).iter_batches(batch_size=4)
    assert [batch["id"].tolist() for batch in items] == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9]]


def test_units_that_are_too_large_to_be_reordered_are_cut(tmp_path, monkeypatch):
    pa.parquet.write_table(table_of(1000), tmp_path / "a.parquet")
    whole = adapt("train", miniray.data.read_parquet(str(tmp_path)), shuffled=True)
    assert list(whole.block_sizes) == [1000]
    monkeypatch.setattr("miniray.train.data.datasets._LARGEST", 3000)
    cut = adapt("train", miniray.data.read_parquet(str(tmp_path)), shuffled=True)
    assert len(cut.block_sizes) > 2
    assert sum(cut.block_sizes) == 1000


@pytest.mark.parametrize("kind", ["files", "part of files", "tables"])
def test_data_sorted_by_label_come_in_units_of_several_labels(kind, tmp_path, monkeypatch):
    monkeypatch.setattr("miniray.train.data.datasets._MIXED", 200)
    rows = pa.table({"id": range(2000), "label": [n // 200 for n in range(2000)]})
    tables = [rows.slice(first, 100) for first in range(0, 2000, 100)]
    if kind == "tables":
        data = miniray.data.from_arrow(tables)
    else:
        for number, table in enumerate(tables):
            pa.parquet.write_table(table, tmp_path / f"{number:02}.parquet", row_group_size=10)
        data = miniray.data.read_parquet(str(tmp_path))
        data = data.train_test_split(500)[0] if kind == "part of files" else data
    source = adapt("train", data, shuffled=True)
    seen, labels = [], []
    for block, size in enumerate(source.block_sizes):
        unit = source.selected(block, Span(size, 0, size, key=1), epoch=0)
        found = pa.concat_tables(unit.read(*unit.values()))
        seen += found["id"].to_pylist()
        labels.append(len(set(found["label"].to_pylist())))
    count = 1500 if kind == "part of files" else 2000
    assert sorted(seen) == list(range(count))
    assert len(labels) >= count // 200
    assert min(labels) >= 6  # of neighbours, two at most


def test_the_pool_of_a_filter_that_has_run_is_not_started_again_for_steps_without_functions(
    monkeypatch,
):
    class Even:
        def __call__(self, row):
            return row["id"] % 2 == 0

    rows = miniray.data.range(9)
    monkeypatch.setattr("miniray.train.data.datasets._made", lambda dataset: rows._plan)
    filtered = rows.filter(Even, concurrency=1, num_gpus=1)
    source = adapt("train", filtered.rename_columns({"id": "number"}))
    assert source.pools == []
    assert source.stays


@pytest.mark.parametrize("mapped", [False, True])
def test_ranks_get_no_footers_of_files(mapped, tmp_path):
    wide = pa.table({f"column {n}": range(2000) for n in range(30)})
    pa.parquet.write_table(wide, tmp_path / "a.parquet", row_group_size=10)
    data = miniray.data.read_parquet(str(tmp_path))
    source = adapt("train", data.map(copy.copy) if mapped else data, shuffled=True)
    footer = pa.parquet.read_metadata(tmp_path / "a.parquet").serialized_size
    assert len(pickle.dumps(source)) < footer / 2


def test_row_groups_that_are_units_are_not_cut_to_be_mixed(tmp_path, monkeypatch):
    monkeypatch.setattr("miniray.train.data.datasets._MIXED", 90)
    for number in range(3):
        pa.parquet.write_table(table_of(100), tmp_path / f"{number}.parquet")
    source = adapt("train", miniray.data.read_parquet(str(tmp_path)), shuffled=True)
    assert list(source.block_sizes) == [100, 100, 100]
    assert [len(unit.content.sides[0]) for unit in source._units] == [1, 1, 1]


@pytest.mark.parametrize("kind", ["table", "file"])
def test_a_rank_copies_some_of_the_rows_at_a_time_and_keeps_none(kind, tmp_path):
    rows = pa.table({"id": range(100), "data": pa.array([bytes(2**20)] * 100)})
    given = rows
    if kind == "file":
        pa.parquet.write_table(rows, tmp_path / "a.parquet", use_dictionary=False)
        given, rows = str(tmp_path), None
    iterator = DataIterator("train", adapt("train", given))
    before = pa.total_allocated_bytes()
    most = 0
    for _batch in iterator.iter_batches(batch_size=4, batch_format="pyarrow", prefetch_batches=0):
        most = max(most, pa.total_allocated_bytes() - before)
    del _batch
    assert most < (100 * (kind == "file") + 50) * 2**20
    assert pa.total_allocated_bytes() - before < 2**20


def test_files_that_have_fewer_rows_than_when_they_were_counted_are_an_error():
    source = UnitsSource([ReadUnit(BlockRows(), 12, refs=(table_of(10),))])
    with pytest.raises(DataError, match="ended 2 rows too early"):
        list(DataIterator("train", source, seed=None).iter_batches(batch_size=4))


def test_random_numbers_of_functions_are_the_same_in_every_run_of_a_rank_that_makes_them():
    def noise(batch):
        return {"x": [random.random() for _ in range(batch.num_rows)]}

    unit = BlockRows.unit(table_of(4))
    step = MapBatches("Noise", Udf(noise), batch_format="pyarrow")
    plan = Stage((Read(UnitsDatasource([unit])),), (step,))

    def drawn():
        below = source_feed([chosen(unit, Span(4, 1, 3, key=None), key=5)])
        made = executor.execute(plan, below=below, local=True)
        return [executor.table_of(each)["x"].to_pylist() for each in made]

    assert drawn() == drawn()
