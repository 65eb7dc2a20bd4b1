"""What a task of a dataset does with the units that it is given."""

import dataclasses
import random
import threading
import types

import numpy as np
import pytest

from miniray import data
from miniray.data.exchange import together
from miniray.data.files import resolve
from miniray.data.sources import BlockRows, Content, CutWish, ReadUnit
from miniray.data.transforms import MapBatches, Udf, Where
from miniray.data.work import PoolWorker, StageWork, seed
from miniray.data.writers import Writer

pa = pytest.importorskip("pyarrow")


@dataclasses.dataclass(frozen=True, eq=False)
class Remote(Content):
    """Two tables, before the second of which connections are lost."""

    first: int
    losses: list[str]
    label = "a remote file"

    def tables(self, start, stop, *values):
        yield pa.table({"id": [self.first]})
        if self.losses:
            raise OSError(self.losses.pop())
        yield pa.table({"id": [self.first + 1]})


def ids(*contents):
    unit = together([[ReadUnit(content) for content in contents]])
    work = StageWork((), 0, data.DataContext().retried_io_errors)
    tables = work.tables(Where("here", 0), unit, ())
    return [number for table in tables for number in table.column("id").to_pylist()]


LOST = "AWS Error NETWORK_CONNECTION"


def test_each_of_several_files_that_are_read_together_is_read_again_where_its_connection_was_lost():
    assert ids(Remote(0, []), Remote(2, [LOST] * 2), Remote(4, [LOST] * 2)) == list(range(6))


def test_a_file_is_not_read_again_without_end_nor_after_other_errors():
    lost, gone = [LOST] * 9, ["gone"] * 2
    with pytest.raises(OSError, match=LOST):
        ids(Remote(0, []), Remote(2, lost))
    assert len(lost) == 6
    with pytest.raises(OSError, match="gone"):
        ids(Remote(0, []), Remote(2, gone))
    assert len(gone) == 1


class Waits:
    """A class that is called until the batch after its own was made."""

    def __init__(self, made):
        self.made = made

    def __call__(self, batch):
        assert self.made[batch["n"][0].as_py() + 1].wait(20)
        return batch


def test_the_next_batch_is_made_while_an_object_of_a_class_is_called():
    made = [threading.Event() for _ in range(4)]

    def tables():
        for number, event in enumerate(made[:-1]):
            event.set()
            yield pa.table({"n": [number]})
        made[-1].set()

    udf = Udf(Waits, init_args=(made,))
    step = MapBatches("MapBatches", udf, batch_size=1, batch_format="pyarrow").prepared()
    rows = [table.column("n").to_pylist() for table in step.run(tables(), Where("here"))]
    assert rows == [[0], [1], [2]]


def test_a_reader_that_stops_ends_the_thread_that_reads_ahead_and_an_error_comes_in_its_turn():
    class Same:
        def __call__(self, batch):
            return batch

    def tables():
        for number in range(3):
            yield pa.table({"id": [number]})
        raise OSError("gone")

    step = MapBatches("MapBatches", Udf(Same), batch_size=1, batch_format="pyarrow").prepared()
    found = step.run(tables(), Where("here"))
    assert next(found).num_rows == 1
    found.close()
    assert not [each for each in threading.enumerate() if each.name.startswith("miniray-batches")]
    found = step.run(tables(), Where("here"))
    assert [next(found).column("id").to_pylist() for _ in range(3)] == [[0], [1], [2]]
    with pytest.raises(OSError, match="gone"):
        next(found)


@dataclasses.dataclass(frozen=True, eq=False)
class Numbers(Content):
    """A file of some numbers; ``read`` is set when it is read."""

    numbers: list[int]
    read: threading.Event = dataclasses.field(default_factory=threading.Event)
    label = "numbers"

    def tables(self, start, stop, *values):
        assert not self.read.is_set()
        self.read.set()
        yield pa.table({"n": self.numbers})


class Block(Numbers, BlockRows):
    """A block of some numbers."""


class Drawing:
    """A class that draws random numbers, and tells the first number of each batch."""

    def __init__(self, called):
        self.called = called

    def __call__(self, batch):
        self.called(int(batch["n"][0]))
        return {"n": batch["n"], "x": np.random.random(len(batch["n"]))}


class Pool:
    """An actor of a pool, and the queue of its calls."""

    def __init__(self, monkeypatch, calls, called=lambda number: None, batch_size=1):
        self.queue = list(calls)
        runtime = types.SimpleNamespace(
            next_arguments=lambda: self.queue[0] if self.queue else None
        )
        monkeypatch.setattr("miniray.data.work.runtime_or_none", lambda: runtime)
        step = MapBatches("MapBatches", Udf(Drawing, init_args=(called,)), batch_size)
        self.worker = PoolWorker(StageWork((step,), 2**20))

    def rows(self):
        """The rows of the first call: its numbers, each with what was drawn."""
        tables = list(self.worker.run(*self.queue.pop(0)))[::2]
        return [tuple(row.values()) for table in tables for row in table.to_pylist()]

    def numbers(self):
        return [number for number, _ in self.rows()]


def calls_of(*contents):
    return [(Where("here", n), ReadUnit(each)) for n, each in enumerate(contents)]


def test_an_actor_of_a_pool_reads_its_next_block_while_its_class_works_on_the_last_batch(
    monkeypatch,
):
    blocks = [Block([0, 1]), Block([2, 3]), Block([4])]
    behind = {1: blocks[1], 3: blocks[2]}
    late = []

    def called(number):
        if number in behind and not behind[number].read.wait(20):
            late.append(number)

    pool = Pool(monkeypatch, calls_of(*blocks), called)
    assert [pool.numbers() for _ in blocks] == [[0, 1], [2, 3], [4]]
    assert not late


def test_an_actor_of_a_pool_reads_one_block_ahead_however_small_they_are(monkeypatch):
    blocks = [Block([n]) for n in range(4)]
    pool = Pool(monkeypatch, calls_of(*blocks), batch_size=8)
    assert pool.numbers() == [0]
    assert blocks[1].read.wait(20)
    assert not any(block.read.is_set() for block in blocks[2:])
    assert [pool.numbers() for _ in blocks[1:]] == [[1], [2], [3]]


def test_random_numbers_of_a_class_are_those_of_its_call_whether_it_was_begun_before_or_not(
    monkeypatch,
):
    def blocks():
        return [Block([0, 1]), Block([2, 3]), Block([4])]

    pool = Pool(monkeypatch, calls_of(*blocks()))
    found = [pool.rows() for _ in blocks()]
    assert found == [Pool(monkeypatch, [call]).rows() for call in calls_of(*blocks())]


def test_a_call_that_was_begun_and_is_cancelled_gives_no_rows_to_the_one_behind_it(monkeypatch):
    blocks = [Block([0, 1]), Block([2]), Block([3])]
    pool = Pool(monkeypatch, calls_of(*blocks))
    pool.rows()
    assert blocks[1].read.wait(20)
    del pool.queue[0]
    assert pool.numbers() == [3]
    threads = [each for each in threading.enumerate() if each.name.startswith("miniray-batches")]
    for each in threads:
        each.join(20)
    assert not any(each.is_alive() for each in threads)


def test_random_numbers_of_all_libraries_are_set_from_the_number_of_the_unit():
    torch = pytest.importorskip("torch")
    drawn = []
    for index in (1, 1, 2):
        seed(Where("here", index))
        drawn.append((random.random(), np.random.random(), float(torch.rand(1))))
    assert drawn[0] == drawn[1]
    assert not set(drawn[0]) & set(drawn[2])


@pytest.mark.parametrize("kinds", [(Block, Numbers), (Numbers, Block)])
def test_files_are_read_in_their_call_only_as_that_may_run_code_of_the_user(monkeypatch, kinds):
    units = [kind([n]) for n, kind in enumerate(kinds)]
    pool = Pool(monkeypatch, calls_of(*units))
    assert pool.numbers() == [0]
    assert not units[1].read.is_set()
    assert pool.numbers() == [1]


@pytest.mark.parametrize("fails", [None, OSError("full"), ValueError("no"), SystemExit("ended")])
def test_a_file_is_written_aside_and_renamed_when_it_is_whole(tmp_path, fails):
    filesystem, folder = resolve(str(tmp_path))
    name, aside = "000009-000000-token.parquet", ".000009-000000-token.parquet.part"

    def options():
        assert [path.name for path in tmp_path.iterdir()] == [aside]
        if fails is not None:
            raise fails
        return {}

    writer = Writer("WriteParquet", "parquet", filesystem, folder, 7, "-token", "", (), 0, options)
    made = writer.run(iter([pa.table({"n": [1, 2]})]), Where("here", 2))
    if fails is None:
        assert [(each.num_rows, each.num_columns) for each in made] == [(2, 0)]
        assert [path.name for path in tmp_path.iterdir()] == [name]
        return
    with pytest.raises(data.DataError, match=f"WriteParquet.*{fails}"):
        list(made)
    assert not list(tmp_path.iterdir())


def test_small_files_are_one_batch_where_no_size_is_given(tmp_path):
    for number in range(100):
        (tmp_path / f"{number:02d}.bin").write_bytes(bytes([number]))
    (unit,) = data.read_binary_files(str(tmp_path))._plan.source.units(CutWish(2**20))
    batches = []

    def noted(batch):
        batches.append(len(batch["bytes"]))
        return batch

    for size in (None, "auto"):
        work = StageWork((MapBatches("MapBatches", Udf(noted), size),), 2**20)
        (table,) = work.tables(Where("here"), unit, ())
        assert table.column("bytes").to_pylist() == [bytes([number]) for number in range(100)]
    assert batches == [100, 100]
    batches.clear()
    large = BlockRows.unit(pa.table({"bytes": [bytes(2**20)] * 10}))
    list(work.tables(Where("here"), large, large.values()))
    assert batches == [3, 3, 3, 1]  # of 4 MiB at most


def test_large_row_groups_are_cut_so_that_each_cpu_has_a_part_and_small_ones_further(tmp_path):
    import pyarrow.parquet as pq

    numbers = np.random.default_rng(1).integers(2**62, size=2**20)
    for rows, parts in ((2**20, 2), (2**16, 8)):
        path = str(tmp_path / f"{rows}.parquet")
        table = pa.table({"n": numbers[:rows]})
        pq.write_table(table, path, row_group_size=rows, use_dictionary=False)
        source = data.read_parquet(path)._plan.source
        units = list(source.units(CutWish(2**30, parts=8)))
        assert [unit.rows for unit in units] == [rows // parts] * parts


def test_a_row_group_is_read_and_decoded_in_parts(tmp_path):
    import pyarrow.parquet as pq

    table = pa.table({"n": np.random.default_rng(1).integers(2**62, size=2**23)})  # 64 MiB
    pq.write_table(table, tmp_path / "n.parquet", row_group_size=2**23, use_dictionary=False)
    (unit,) = data.read_parquet(str(tmp_path))._plan.source.units(CutWish(2**30))
    before, held = pa.total_allocated_bytes(), []
    for part in unit.read():
        held.append(pa.total_allocated_bytes() - before)
        del part
    assert max(held) < 32 * 2**20


def test_long_texts_of_a_dictionary_are_decoded_some_at_a_time(tmp_path):
    import pyarrow.parquet as pq

    numbers = np.arange(140_000) % 100
    texts = pa.DictionaryArray.from_arrays(numbers, [str(each) * 1000 for each in range(100)])
    pq.write_table(pa.table({"text": texts}), tmp_path / "texts.parquet", store_schema=False)
    (unit,) = data.read_parquet(str(tmp_path))._plan.source.units(CutWish(2**30))
    rows = [table.num_rows for table in unit.read()]
    assert sum(rows) == 140_000
    assert max(rows) <= 2**17
