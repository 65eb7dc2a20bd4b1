"""``DataIterator`` over every kind of data, in this process."""

from __future__ import annotations

import pickle
import threading

import pytest

pytest.importorskip("pyarrow")

import numpy as np
import pyarrow as pa
import pyarrow.dataset
import pyarrow.parquet
from hypothesis import given
from hypothesis import strategies as st

from miniray.train.data.adapt import adapt
from miniray.train.data.iterator import DataIterator


def table_of(rows):
    return pa.table({"id": list(range(rows)), "text": [f"row {n}" for n in range(rows)]})


def ids(batches):
    return [int(n) for batch in batches for n in batch["id"]]


class Squares:
    """A map-style dataset of dictionaries."""

    def __init__(self, size):
        self.size = size

    def __len__(self):
        return self.size

    def __getitem__(self, index):
        return {"id": index, "square": float(index**2)}


class Stream:
    """An iterable dataset."""

    def __init__(self, size):
        self.size = size

    def __iter__(self):
        return iter({"id": n} for n in range(self.size))


@pytest.fixture
def parquet(tmp_path, monkeypatch):
    """Files with row groups of 7 rows, 50 rows in all, each read by itself as large ones are."""
    monkeypatch.setattr("miniray.train.data.adapt._TOGETHER", 1)

    def write(rows=50, files=2, group=7):
        folder = tmp_path / "parquet"
        folder.mkdir(exist_ok=True)
        table = table_of(rows)
        step = -(-rows // files)
        for number in range(files):
            piece = table.slice(number * step, step)
            pyarrow.parquet.write_table(piece, folder / f"{number}.parquet", row_group_size=group)
        return folder

    return write


def iterators(source, world, **options):
    return [DataIterator("train", source, rank, world, **options) for rank in range(world)]


KINDS = ["table", "parquet", "fragments", "map", "stream", "pandas"]


def make(kind, rows, parquet):
    if kind == "table":
        return table_of(rows)
    if kind == "parquet":
        return str(parquet(rows))
    if kind == "fragments":
        return pyarrow.dataset.dataset(parquet(rows))
    if kind == "pandas":
        return table_of(rows).to_pandas()
    return Squares(rows) if kind == "map" else Stream(rows)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("prefetch", [0, 2])
def test_the_ranks_see_every_row_once_in_each_epoch(kind, prefetch, parquet):
    source = pickle.loads(pickle.dumps(adapt("train", make(kind, 50, parquet))))
    loaders = [
        iterator.iter_batches(batch_size=5, prefetch_batches=prefetch)
        for iterator in iterators(source, 3)
    ]
    orders = []
    for _ in range(2):
        batches = [list(loader) for loader in loaders]
        assert {len(each) for each in batches} == {4}
        orders.append([ids(each) for each in batches])
        assert sorted(row for rows in orders[-1] for row in rows) == list(range(50))
        sizes = [len(each) for each in orders[-1]]
        assert max(sizes) - min(sizes) <= 1
    assert (orders[0] == orders[1]) == (kind == "stream")  # its own code may shuffle it


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("world", [2, 3])
def test_a_pass_that_is_resumed_gives_exactly_the_rows_not_seen(kind, world, parquet):
    source = adapt("train", make(kind, 50, parquet))
    seen = []
    for iterator in iterators(source, 2):
        batches = iter(iterator.iter_batches(batch_size=4, prefetch_batches=3))
        seen += [row for _ in range(3) for row in ids([next(batches)])]
        state = iterator.state_dict()  # of the last rank, in the end
    rest = []
    for iterator in iterators(source, world):
        iterator.load_state_dict(pickle.loads(pickle.dumps(state)))
        rest += ids(iterator.iter_batches(batch_size=4))
        assert iterator.state_dict()["epoch"] == 1
    assert sorted(seen + rest) == list(range(50))


@given(
    rows=st.integers(2, 90),
    old=st.integers(1, 4),
    new=st.integers(1, 4),
    batch=st.integers(1, 9),
    local=st.one_of(st.none(), st.integers(1, 20)),
    data=st.data(),
)
def test_rows_are_seen_once_however_often_a_run_is_interrupted(rows, old, new, batch, local, data):
    rows = max(rows, old, new)
    new = old if local else new
    source = adapt("train", table_of(rows))
    first = iterators(source, old)
    loaders = [
        each.iter_batches(batch_size=batch, prefetch_batches=0, local_shuffle_buffer_size=local)
        for each in first
    ]
    stop = data.draw(st.integers(0, len(loaders[0])))
    seen, states = [], []
    for iterator, loader in zip(first, loaders, strict=True):
        batches = iter(loader)
        for _ in range(stop):
            seen += ids([next(batches)])
        states.append(iterator.state_dict())
    resumed = iterators(source, new)
    lengths, left = set(), []
    for rank, iterator in enumerate(resumed):
        iterator.load_state_dict(states[rank if new == old else 0])
        loader = iterator.iter_batches(
            batch_size=batch, prefetch_batches=0, local_shuffle_buffer_size=local
        )
        lengths.add(len(loader))
        left += ids(loader)
        assert iterator.state_dict()["epoch"] == 1
    assert set(seen + left) == set(range(rows))
    assert len(left) == max(rows - len(seen), new if len(seen) < rows else 0)
    assert len(lengths) == 1


def test_the_same_seed_gives_the_same_order_and_another_one_another():
    source = adapt("train", table_of(40))

    def order(seed):
        iterator = DataIterator("train", source, seed=seed)
        return [ids(iterator.iter_batches(batch_size=7)) for _ in range(2)]

    assert order(1) == order(1)
    assert order(1) != order(2)
    assert order(None) == [list(range(40))] * 2


def test_a_local_shuffle_mixes_the_rows_of_its_buffer_only():
    iterator = DataIterator("train", adapt("train", table_of(40)), seed=None)
    loader = iterator.iter_batches(batch_size=5, local_shuffle_buffer_size=10)
    first, second = ids(loader), ids(loader)
    for order in (first, second):
        assert order != list(range(40))
        assert [sorted(order[start : start + 10]) for start in range(0, 40, 10)] == [
            list(range(start, start + 10)) for start in range(0, 40, 10)
        ]
    assert first != second


def test_a_local_shuffle_mixes_the_items_of_a_stream_anew_in_each_epoch():
    source = adapt("train", Stream(40))
    orders = []
    for iterator in iterators(source, 2):
        loader = iterator.iter_batches(batch_size=4, local_shuffle_buffer_size=6)
        orders += [ids(loader), ids(loader)]
    for rank in (0, 1):
        one, other = orders[2 * rank : 2 * rank + 2]
        own = list(range(rank, 40, 2))
        assert own not in (one, other)
        assert one != other
        for order in (one, other):
            for start in range(0, 20, 6):
                assert sorted(order[start : start + 6]) == own[start : start + 6]


@given(
    rows=st.integers(1, 60),
    world=st.integers(1, 4),
    batch=st.integers(1, 9),
    window=st.integers(1, 20),
    drop_last=st.booleans(),
    data=st.data(),
)
def test_a_mixed_stream_goes_on_where_it_was(rows, world, batch, window, drop_last, data):
    source = adapt("train", Stream(max(rows, world)))
    counts, stop = set(), None
    for first, second in zip(iterators(source, world), iterators(source, world), strict=True):
        options = {"batch_size": batch, "drop_last": drop_last, "prefetch_batches": 0}
        whole = list(first.iter_batches(local_shuffle_buffer_size=window, **options))
        plain = DataIterator("train", source, first._rank, world).iter_batches(**options)
        assert [len(each["id"]) for each in whole] == [len(each["id"]) for each in plain]
        counts.add(len(whole))
        if stop is None:
            stop = data.draw(st.integers(0, len(whole)))
        batches = iter(second.iter_batches(local_shuffle_buffer_size=window, **options))
        seen = [next(batches) for _ in range(stop)]
        state = second.state_dict()
        third = DataIterator("train", source, first._rank, world)
        third.load_state_dict(state)
        rest = third.iter_batches(local_shuffle_buffer_size=window, **options)
        assert ids(seen) + ids(rest) == ids(whole)
    assert len(counts) == 1


def test_a_pass_that_was_left_early_is_followed_by_the_next_epoch():
    source = adapt("train", table_of(40))
    iterator, reference = (DataIterator("train", source) for _ in range(2))
    for _ in iterator.iter_batches(batch_size=8):
        break
    second = ids(iterator.iter_batches(batch_size=8))
    assert len(second) == 40
    list(reference.iter_batches(batch_size=8))
    assert ids(reference.iter_batches(batch_size=8)) == second


def test_a_pass_that_was_left_stops_its_thread():
    iterator = DataIterator("train", adapt("train", table_of(1000)))
    for _ in iterator.iter_batches(batch_size=1, prefetch_batches=2):
        break
    assert not [each for each in threading.enumerate() if "train-data" in each.name]


def test_batches_are_not_made_further_ahead_than_asked_for():
    class Watched(Squares):
        def __getitem__(self, index):
            made.append(index)
            if len(made) == 3:
                enough.set()
            return super().__getitem__(index)

    made, enough = [], threading.Event()
    batches = iter(
        DataIterator("train", adapt("train", Watched(100))).iter_batches(
            batch_size=1, prefetch_batches=2
        )
    )
    next(batches)
    assert enough.wait(10)  # one was taken, and two are ready
    batches.close()
    assert len(made) == 3


@pytest.mark.parametrize("prefetch", [0, 1])
def test_an_error_of_the_dataset_reaches_the_loop_after_the_batches_before_it(prefetch):
    class Broken(Squares):
        def __getitem__(self, index):
            if index == 3:
                raise OSError("disk on fire")
            return super().__getitem__(index)

    iterator = DataIterator("train", adapt("train", Broken(6)), seed=None)
    seen = []
    batches = iterator.iter_batches(batch_size=1, prefetch_batches=prefetch)
    with pytest.raises(OSError, match="disk on fire"):
        seen.extend(ids([batch])[0] for batch in batches)
    assert seen == [0, 1, 2]


def test_a_row_group_is_read_once_in_an_epoch_and_not_kept(parquet, monkeypatch):
    from miniray.data.parquet import ParquetDatasource

    read = []
    original = ParquetDatasource.read
    monkeypatch.setattr(
        ParquetDatasource,
        "read",
        lambda self, file, piece: read.append(piece.group) or original(self, file, piece),
    )
    source = adapt("train", parquet(49, files=1))
    for iterator in iterators(source, 2):
        list(iterator.iter_batches(batch_size=4))
    # Of 7 groups, the one in the middle is read by both ranks.
    assert len(read) == 8
    assert len(set(read)) == 7


def test_small_row_groups_are_read_together(tmp_path):
    pyarrow.parquet.write_table(table_of(100), tmp_path / "small.parquet", row_group_size=10)
    source = adapt("train", tmp_path / "small.parquet")
    assert list(source.block_sizes) == [100]
    iterator = DataIterator("train", source)
    rows = [row for batch in iterator.iter_batches(batch_size=7) for row in batch["id"].tolist()]
    assert sorted(rows) == list(range(100))
    assert rows != sorted(rows)


def test_formats_of_tables():
    table = pa.table(
        {
            "number": [1, 2, None],
            "image": pa.FixedShapeTensorArray.from_numpy_ndarray(np.ones((3, 2, 4))),
            "even": [[1, 2], [3, 4], [5, 6]],
            "ragged": [[1], [2, 3], []],
            "fixed": pa.array([[1, 2]] * 3, pa.list_(pa.int64(), 2)),
            "name": ["a", "b", "c"],
        }
    )
    iterator = DataIterator("train", adapt("train", table), seed=None)
    (batch,) = iterator.iter_batches()
    assert np.isnan(batch["number"][2])
    assert batch["image"].shape == (3, 2, 4)
    assert batch["even"].tolist() == [[1, 2], [3, 4], [5, 6]]
    assert [list(each) for each in batch["ragged"]] == [[1], [2, 3], []]
    assert batch["fixed"].shape == (3, 2)
    assert batch["name"].tolist() == ["a", "b", "c"]
    (frame,) = iterator.iter_batches(batch_format="pandas")
    assert frame["name"].tolist() == ["a", "b", "c"]
    (arrow,) = iterator.iter_batches(batch_format="pyarrow")
    assert arrow.equals(table)


def test_items_keep_their_structure():
    class Pairs(Squares):
        def __getitem__(self, index):
            return np.full(2, index), {"label": index, "name": f"n{index}"}

    iterator = DataIterator("train", adapt("train", Pairs(3)), seed=None)
    ((images, targets),) = iterator.iter_batches()
    assert images.tolist() == [[0, 0], [1, 1], [2, 2]]
    assert targets["label"].tolist() == [0, 1, 2]
    assert targets["name"].tolist() == ["n0", "n1", "n2"]


def test_tensors_of_columns():
    torch = pytest.importorskip("torch")
    table = pa.table({"x": [1.0, 2.0], "y": [0, 1]})
    iterator = DataIterator("train", adapt("train", table), seed=None)
    (batch,) = iterator.iter_torch_batches(device="cpu", dtypes={"x": torch.float32})
    assert batch["x"].dtype == torch.float32
    assert batch["y"].dtype == torch.int64
    batch["x"] += 1  # its own memory
    (again,) = iterator.iter_torch_batches(device="cpu")
    assert again["x"].tolist() == [1.0, 2.0]


def test_tensors_go_to_the_device_that_is_named_or_is_the_workers(monkeypatch):
    torch = pytest.importorskip("torch")
    table = pa.table({"x": [1.0, 2.0]})
    iterator = DataIterator("train", adapt("train", table), seed=None)
    (batch,) = iterator.iter_torch_batches(device="meta")
    assert batch["x"].device == torch.device("meta")
    monkeypatch.setattr("miniray.train.data.iterator.own_devices", lambda: [torch.device("meta")])
    (batch,) = iterator.iter_torch_batches()
    assert batch["x"].device == torch.device("meta")


def test_tensors_of_pytorch_datasets():
    torch = pytest.importorskip("torch")
    data = torch.utils.data.TensorDataset(torch.arange(10.0).unsqueeze(1), torch.arange(10))
    iterator = DataIterator("train", adapt("train", data), rank=1, world_size=2)
    batches = list(iterator.iter_torch_batches(batch_size=2, device="cpu"))
    assert [len(y) for _, y in batches] == [2, 3] or [len(y) for _, y in batches] == [2, 2, 1]
    assert all(torch.equal(x.squeeze(1), y.float()) for x, y in batches)


def test_a_collate_function_gets_arrays_of_tables_and_lists_of_items():
    pytest.importorskip("torch")
    table = DataIterator("train", adapt("train", table_of(3)), seed=None)
    collated = table.iter_torch_batches(
        device=None, collate_fn=lambda columns: columns["text"].tolist()
    )
    assert list(collated) == [["row 0", "row 1", "row 2"]]
    items = DataIterator("train", adapt("train", Squares(2)), seed=None)
    assert list(items.iter_torch_batches(device=None, collate_fn=len)) == [2]


def test_text_is_no_tensor():
    pytest.importorskip("torch")
    iterator = DataIterator("train", adapt("train", table_of(3)))
    with pytest.raises(TypeError, match=r"column 'text' has no numbers.*collate_fn"):
        list(iterator.iter_torch_batches(device="cpu"))


def test_a_slice_of_a_large_table_is_sent_without_the_rest():
    table = pa.table({"id": np.arange(100_000)}).slice(500, 10)
    source = adapt("train", table)
    assert len(pickle.dumps(source)) < 10_000
    assert ids(DataIterator("train", source, seed=None).iter_batches()) == list(range(500, 510))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"batch_size": 0}, "batch_size=0"),
        ({"batch_size": None}, "batch_size=None"),
        ({"prefetch_batches": -1}, "prefetch_batches=-1"),
        ({"local_shuffle_buffer_size": 0}, "local_shuffle_buffer_size=0"),
        ({"batch_format": "tf"}, "default, numpy, pandas, pyarrow"),
    ],
)
def test_nonsense_of_a_pass_is_refused_at_once(options, message):
    with pytest.raises(ValueError, match=message):
        DataIterator("train", adapt("train", table_of(3))).iter_batches(**options)


@pytest.mark.parametrize("kind", KINDS)
def test_less_rows_than_ranks_that_an_epoch_has_left_are_given_to_several(kind, parquet):
    """10 rows, 2 ranks, 2 batches of 2 each; 3 ranks take up the 2 rows that are left."""
    source = adapt("train", make(kind, 10, parquet))
    seen = []
    for iterator in iterators(source, 2):
        batches = iter(iterator.iter_batches(batch_size=2))
        seen += ids([next(batches), next(batches)])
    state = iterator.state_dict()
    left = []
    for iterator in iterators(source, 3):
        iterator.load_state_dict(state)
        (batch,) = iterator.iter_batches(batch_size=2)
        left += ids([batch])
        assert iterator.state_dict()["epoch"] == 1
        assert len(list(iterator.iter_batches(batch_size=2))) == 2  # of the next epoch
    assert len(left) == 3
    assert sorted(seen + list(set(left))) == list(range(10))


@pytest.mark.parametrize("kind", ["table", "stream"])
@pytest.mark.parametrize("own_state", [True, False])
def test_ranks_that_have_seen_their_last_batch_get_none_when_they_go_on(kind, own_state, parquet):
    source = adapt("train", make(kind, 7, parquet))
    states = []
    for iterator in iterators(source, 3):
        batches = iter(iterator.iter_batches(batch_size=2))
        next(batches)  # of 3 rows on rank 0
        states.append(iterator.state_dict())
    for rank, iterator in enumerate(iterators(source, 3)):
        iterator.load_state_dict(states[rank if own_state else 0])
        assert list(iterator.iter_batches(batch_size=2)) == []


def test_a_stream_without_an_item_for_each_rank_is_refused_on_all():
    for iterator in iterators(adapt("train", Stream(2)), 3):
        with pytest.raises(ValueError, match=r"'train'\] gave 2 items in epoch 0.*of 3 workers"):
            list(iterator.iter_batches(batch_size=1))
        assert list(iterator.iter_batches(batch_size=1, drop_last=True)) == []


def test_a_stream_has_no_length():
    iterator = DataIterator("train", adapt("train", Stream(3)))
    with pytest.raises(TypeError, match="no length"):
        len(iterator.iter_batches())
    with pytest.raises(ValueError, match="is for tables"):
        iterator.iter_batches(batch_format="pandas")


def test_a_resumed_pass_must_have_the_same_local_shuffle():
    source = adapt("train", table_of(20))
    iterator = DataIterator("train", source)
    next(iter(iterator.iter_batches(batch_size=2, local_shuffle_buffer_size=6)))
    other = DataIterator("train", source)
    other.load_state_dict(iterator.state_dict())
    with pytest.raises(ValueError, match="must be the same"):
        list(other.iter_batches(batch_size=2))


def test_a_state_of_a_shuffled_epoch_is_one_of_the_same_blocks(parquet):
    state = DataIterator("train", adapt("train", parquet())).state_dict()
    assert DataIterator("train", adapt("train", parquet())).state_dict() == state
    other = adapt("train", parquet(group=10))
    with pytest.raises(ValueError, match="state of other data"):
        DataIterator("train", other).load_state_dict(state)
    kept = DataIterator("train", adapt("train", parquet()), seed=None).state_dict()
    DataIterator("train", other, seed=None).load_state_dict(kept)  # no block is moved
