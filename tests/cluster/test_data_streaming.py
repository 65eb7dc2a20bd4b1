"""Datasets through real tasks and actors: rows, order, pools, errors, limits."""

from __future__ import annotations

import ctypes
import os
import signal
import subprocess
import sys
import textwrap
import threading
import time
import traceback
import warnings
from typing import TYPE_CHECKING, Any

import pytest

import miniray

if TYPE_CHECKING:
    from pathlib import Path

np = pytest.importorskip("numpy")
pa = pytest.importorskip("pyarrow")
pytestmark = pytest.mark.usefixtures("cluster")
CLUSTER = {"num_cpus": 2}


@pytest.fixture
def folder(tmp_path: Path) -> str:
    """Three Parquet files of 1,000 rows in row groups of 300."""
    import pyarrow.parquet as pq

    for number in range(3):
        table = pa.table({"a": np.arange(1000) + 1000 * number, "b": ["x"] * 1000})
        pq.write_table(table, tmp_path / f"{number}.parquet", row_group_size=300)
    return str(tmp_path)


def test_tasks_have_the_threads_of_their_cpus_and_what_forks_them_has_none_of_its_own() -> None:
    def threads(batch: dict[str, Any]) -> dict[str, Any]:
        tasks = os.listdir(f"/proc/{os.getppid()}/task")
        numpy = sys.modules.get("numpy._core._multiarray_umath")
        library = ctypes.CDLL(None if numpy is None else numpy.__file__)
        blas = getattr(library, "scipy_openblas_get_num_threads64_", lambda: 1)
        return {"parent": [len(tasks)], "blas": [blas()]}

    assert miniray.data.range(1).map_batches(threads).take_all() == [{"parent": 1, "blas": 1}]


def test_files_are_read_mapped_and_filtered_in_their_order(folder: str) -> None:
    rows = (
        miniray.data.read_parquet(folder)
        .map_batches(lambda batch: {"a": batch["a"] * 2}, batch_size=100)
        .map(lambda row: {"c": row["a"] + 1})
        .filter(lambda row: row["c"] % 4 == 1)
        .take_all()
    )
    assert rows == [{"c": 2 * a + 1} for a in range(0, 3000, 2)]


def test_files_of_lines_are_cut_into_parts_for_several_tasks(tmp_path: Path) -> None:
    numbers = range(1000)
    (tmp_path / "a.csv").write_text("n,b\n" + "".join(f"{n},x\n" for n in numbers))
    (tmp_path / "a.jsonl").write_text("".join(f'{{"n": {n}}}\n' for n in numbers))
    (tmp_path / "a.txt").write_text("".join(f"{n}\n" for n in numbers))
    read = miniray.data
    parts = read.read_csv(str(tmp_path / "a.csv")).map_batches(lambda batch: batch).take_all()
    assert parts == [{"n": n, "b": "x"} for n in numbers]
    (tmp_path / "b.csv").write_text("code\n" + "007\n" * 200 + "x\n" * 200)
    codes = read.read_csv(str(tmp_path / "b.csv")).map(lambda row: row).take_all()
    assert [row["code"] for row in codes] == ["007"] * 200 + ["x"] * 200
    lines = read.read_json(str(tmp_path / "a.jsonl")).map_batches(lambda batch: batch).take_all()
    assert lines == [{"n": n} for n in numbers]
    texts = read.read_text(str(tmp_path / "a.txt")).map(lambda row: row).take_all()
    assert texts == [{"text": str(n)} for n in numbers]


def test_a_class_is_made_once_in_each_actor_of_a_pool() -> None:
    class Adder:
        def __init__(self, number: int, *, factor: int) -> None:
            import os

            self.number = number * factor
            self.pid = os.getpid()

        def __call__(self, batch: dict[str, Any]) -> dict[str, Any]:
            ids = batch["id"]
            return {"id": ids + self.number, "pid": np.full(len(ids), self.pid)}

    dataset = miniray.data.range(1000).map_batches(
        Adder,
        batch_size=10,
        concurrency=2,
        fn_constructor_args=(5,),
        fn_constructor_kwargs={"factor": 2},
    )
    rows = dataset.take_all()
    assert [row["id"] for row in rows] == list(range(10, 1010))
    assert len({row["pid"] for row in rows}) == 2


def test_a_pool_begins_with_as_many_actors_as_it_is_told() -> None:
    class Pid:
        def __call__(self, batch: dict[str, Any]) -> dict[str, Any]:
            return {"pid": [os.getpid()] * len(batch["id"])}

    pool = miniray.data.ActorPoolStrategy(min_size=1, max_size=2, initial_size=2)
    dataset = miniray.data.range(8).map_batches(Pid, batch_size=1, compute=pool)
    assert len({row["pid"] for row in dataset.take_all()}) == 2


def test_a_pool_gets_further_actors_while_calls_wait() -> None:
    class Pid:
        def __call__(self, batch: dict[str, Any]) -> dict[str, Any]:
            time.sleep(0.05)
            return {"pid": [os.getpid()] * len(batch["id"])}

    dataset = miniray.data.range(32).map_batches(Pid, batch_size=1, concurrency=(1, 2))
    assert len({row["pid"] for row in dataset.take_all()}) == 2


def test_a_function_that_is_expected_to_keep_the_number_of_rows_is_checked() -> None:
    def one(batch: dict[str, Any]) -> dict[str, Any]:
        return {"id": batch["id"][:1]}

    dataset = miniray.data.range(8)
    told = r"MapBatches\(one\) returned 1 rows for the 8 .* pass udf_modifying_row_count=True"
    with pytest.raises(miniray.data.DataError, match=told):
        dataset.repartition(1).map_batches(one, udf_modifying_row_count=False).take_all()
    assert dataset.repartition(1).map_batches(one).take_all() == [{"id": 0}]


def test_tasks_feed_a_pool_which_feeds_tasks() -> None:
    class Negative:
        def __call__(self, row: dict[str, Any]) -> dict[str, Any]:
            return {"id": -row["id"]}

    dataset = (
        miniray.data.range(500)
        .map(lambda row: {"id": row["id"] + 1})
        .map(Negative, compute=miniray.data.ActorPoolStrategy(min_size=1, max_size=2))
        .map_batches(lambda batch: {"id": batch["id"] * 2})
    )
    assert [row["id"] for row in dataset.take_all()] == [-2 * (n + 1) for n in range(500)]
    assert dataset.stats().count("Operator") == 3


def test_a_flat_map_and_a_generator_give_any_number_of_rows() -> None:
    def repeated(row: dict[str, Any]) -> list[dict[str, Any]]:
        return [row] * (row["id"] % 3)

    def halves(batch: dict[str, Any]) -> Any:
        middle = len(batch["id"]) // 2
        yield {"id": batch["id"][:middle]}
        yield {"id": batch["id"][middle:]}

    expected = [n for n in range(100) for _ in range(n % 3)]
    rows = miniray.data.range(100).flat_map(repeated).take_all()
    assert [row["id"] for row in rows] == expected
    rows = miniray.data.range(100).map_batches(halves, batch_size=10).take_all()
    assert [row["id"] for row in rows] == list(range(100))


def test_a_few_rows_are_divided_among_all_cpus_if_a_function_follows(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    dataset = miniray.data.range(20).map(lambda row: row)
    calls = []
    for number in (4, 1):  # for each CPU
        context = miniray.data.DataContext.get_current()
        monkeypatch.setattr(context, "read_op_min_num_blocks", number)
        assert len(dataset.take_all()) == 20
        (stage,) = dataset.get_stats_summary()["operators"]
        calls.append(stage["calls"])
        assert stage["wall"] > 0 < stage["cpu"]
        assert dataset.get_stats_summary()["waited"] > 0
    assert calls == [10, 2]


def test_as_many_tasks_run_at_once_as_are_allowed(tmp_path: Path) -> None:
    def alone(batch: dict[str, Any]) -> dict[str, Any]:
        with open(tmp_path / "running", "x"):  # fails beside another one
            time.sleep(0.05)
        (tmp_path / "running").unlink()
        return batch

    assert miniray.data.range(400).map_batches(alone, concurrency=1).count() == 400


def test_pools_that_leave_no_cpu_together_are_refused() -> None:
    class Same:
        def __call__(self, batch: Any) -> Any:
            return batch

    one = {"num_cpus": 1, "concurrency": 1}
    dataset = miniray.data.range(10).map_batches(Same, **one)
    assert dataset.count() == 10
    told = "hold 2 CPU together, of 2 that there are, of which the tasks"
    with pytest.raises(miniray.data.DataError, match=told):
        dataset.map_batches(Same, **one).take_all()
    assert dataset.union(dataset).count() == 20  # one after another


def test_pools_of_two_datasets_that_one_loop_reads_are_refused_if_both_would_wait() -> None:
    class Same:
        def __call__(self, batch: dict[str, Any]) -> dict[str, Any]:
            return batch

    dataset = miniray.data.range(40).map_batches(Same, batch_size=10, concurrency=1, num_cpus=1)
    told = "and of datasets that are not read to their end hold 2 CPU together, of 2"
    with pytest.raises(miniray.data.DataError, match=told):
        list(zip(dataset.iter_rows(), dataset.iter_rows(), strict=True))
    outer = iter(dataset.iter_rows())
    next(outer)
    with pytest.raises(miniray.data.DataError, match=told):
        dataset.count()
    assert len(list(outer)) == 39
    assert dataset.count() == 40


def test_a_limit_stops_the_tasks() -> None:
    @miniray.remote(num_cpus=0)
    class Counter:
        def __init__(self) -> None:
            self.rows = 0

        def add(self, rows: int) -> None:
            self.rows += rows

        def total(self) -> int:
            return self.rows

    counter = Counter.remote()

    def count(batch: dict[str, Any]) -> dict[str, Any]:
        miniray.get(counter.add.remote(len(batch["id"])))
        return batch

    rows = miniray.data.range(10**6).map_batches(count, batch_size=100).take(5)
    assert rows == [{"id": n} for n in range(5)]
    assert miniray.get(counter.total.remote()) < 10**6
    kept = miniray.data.range(10**6).map(lambda row: row).limit(7)
    assert kept.count() == 7
    assert len(kept.take_all()) == 7


def test_many_first_rows_of_large_data_are_read_by_tasks_and_a_few_are_not() -> None:
    dataset = miniray.data.range(10_000_000)
    for rows, calls in ((100, 0), (6_000_000, 2)):
        first = dataset.limit(rows)
        assert sum(len(batch["id"]) for batch in first.iter_batches(batch_size=None)) == rows
        operators = first.get_stats_summary()["operators"]
        assert sum(each["calls"] for each in operators) == calls


def test_an_error_names_the_operator_the_file_and_the_row(folder: str) -> None:
    def fails(row: dict[str, Any]) -> dict[str, Any]:
        if row["a"] == 1300:
            raise KeyError("gone")
        return row

    dataset = miniray.data.read_parquet(folder).map(fails)
    with pytest.raises(miniray.data.DataError) as caught:
        dataset.take_all()
    told = str(caught.value)
    assert told.startswith("Map(fails) failed on row ")
    assert "1.parquet" in told
    assert "KeyError: 'gone'" in told
    assert "in fails" in told
    assert "/miniray/data/" not in told
    assert told.count("File ") == 1
    frames = traceback.extract_tb(caught.value.__traceback__)
    # The first look for a block, which begins the calls, may find that one has failed already.
    expected = (["take_all", "_drained"], ["take_all", "_units", "execute", "_drained"])
    assert [frame.name for frame in frames[1:]] in expected

    class Fails:
        def __call__(self, row: dict[str, Any]) -> dict[str, Any]:
            return fails(row)

    read = miniray.data.read_parquet(folder).map(lambda row: row)
    with pytest.raises(miniray.data.DataError, match=r"Map\(Fails\) failed on row .*1\.parquet"):
        read.map(Fails, concurrency=1).take_all()


def test_large_data_of_the_program_are_no_reason_for_a_warning() -> None:
    numbers = np.arange(13 * 2**20)  # 13 MiB for each of 8 calls
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        kept = miniray.data.from_numpy(numbers).map_batches(lambda batch: batch)
        assert kept.sum("data") == numbers.sum()

        class Model:
            def __call__(self, batch: Any) -> Any:
                return batch

        assert kept.map_batches(Model, concurrency=1).sum("data") == numbers.sum()
        parts = miniray.data.from_numpy(numbers).split_at_indices([7, 2**20])
        ends = [part.map(lambda row: row).take(1)[0]["data"] for part in parts[1:]]
        assert ends == [7, 2**20]
        assert miniray.data.from_numpy(numbers).sort("data", descending=True).take(1) == [
            {"data": len(numbers) - 1}
        ]


def test_a_constructor_that_fails_is_named_and_shows_its_own_stack_only() -> None:
    class Model:
        def __init__(self, path: str) -> None:
            raise FileNotFoundError(path)

        def __call__(self, batch: Any) -> Any:
            return batch

    dataset = miniray.data.range(10).map_batches(
        Model, concurrency=1, fn_constructor_args=("weights.pt",)
    )
    with pytest.raises(miniray.data.DataError) as caught:
        dataset.take_all()
    told = str(caught.value)
    assert told.startswith("MapBatches(Model): Model() failed: FileNotFoundError: weights.pt\n")
    assert told.count("File ") == 1


def test_what_cannot_be_pickled_is_named_in_the_function_that_refers_to_it() -> None:
    lock = threading.Lock()

    def locked(row: Any) -> Any:
        with lock:
            return row

    with pytest.raises(TypeError, match=r"Map\(locked\) cannot .* variable 'lock' is a lock"):
        miniray.data.range(10).map(locked).take_all()


@pytest.mark.parametrize(
    ("function", "told"),
    [
        (lambda batch: {"a": [1, 2], "b": [1]}, "differ in length"),
        (lambda batch: 5, "not int"),
        (lambda batch: __import__("sys").exit(3), "SystemExit: 3"),
        (lambda batch: next(iter(())), r"MapBatches\(<lambda>\) failed on .*: StopIteration"),
    ],
)
def test_a_function_that_misbehaves_is_told_by_name(function: Any, told: str) -> None:
    with pytest.raises(miniray.data.DataError, match=told):
        miniray.data.range(10).map_batches(function).take_all()


def test_a_function_may_write_into_its_batch_unless_nothing_is_copied() -> None:
    def writes(batch: dict[str, Any]) -> dict[str, Any]:
        batch["id"] += 1
        return batch

    assert miniray.data.range(3).map_batches(writes).take_all()[-1] == {"id": 3}
    with pytest.raises(miniray.data.DataError, match="read-only"):
        miniray.data.range(3).map_batches(writes, zero_copy_batch=True).take_all()


def test_data_with_no_rows_run_through_and_keep_their_columns() -> None:
    dataset = miniray.data.from_arrow(pa.table({"a": pa.array([], pa.int64())}))
    assert dataset.map(lambda row: row).take_all() == []
    assert dataset.map_batches(lambda batch: batch).count() == 0
    assert miniray.data.range(10).filter(lambda row: False).take_all() == []
    assert miniray.data.range(0).map(lambda row: row).take_all() == []
    assert dataset.schema().names == ["a"]


def test_a_row_larger_than_a_block_is_one() -> None:
    context = miniray.data.DataContext.get_current()
    before, context.target_max_block_size = context.target_max_block_size, 2**20
    try:

        def large(row: dict[str, Any]) -> dict[str, Any]:
            return {"id": row["id"], "data": np.full(2**19, row["id"], np.int64)}

        rows = miniray.data.range(5).map(large).iter_rows()
        assert [(row["id"], int(row["data"].sum())) for row in rows] == [
            (n, n * 2**19) for n in range(5)
        ]
    finally:
        context.target_max_block_size = before


def test_random_numbers_of_functions_are_the_same_in_every_run() -> None:
    def drawn(batch: dict[str, Any]) -> dict[str, Any]:
        return {"x": np.random.random(len(batch["id"]))}

    dataset = miniray.data.range(1000).map_batches(drawn, batch_size=50)
    assert dataset.take_all() == dataset.take_all()


def test_random_numbers_of_a_class_are_the_same_for_any_number_of_actors() -> None:
    class Drawn:
        def __call__(self, batch: dict[str, Any]) -> dict[str, Any]:
            return {**batch, "x": np.random.random(len(batch["id"]))}

    blocks = miniray.data.range(1000).map_batches(lambda batch: batch, batch_size=25)
    one, two = (
        blocks.map_batches(Drawn, batch_size=10, concurrency=actors).take_all() for actors in (1, 2)
    )
    assert one == two
    assert [row["id"] for row in one] == list(range(1000))


#: Stands for PyTorch: it is loaded when the task has begun, or after a minute.
TORCH = """
import pathlib, time
begun = pathlib.Path({begun!r})
deadline = time.monotonic() + 60
while not begun.exists() and time.monotonic() < deadline:
    time.sleep(0.01)

class Tensor: pass

class cuda:
    is_available = staticmethod(bool)

def from_numpy(array):
    return array
"""


def test_tasks_run_while_pytorch_is_loaded(tmp_path: Path) -> None:
    begun = tmp_path / "begun"
    (tmp_path / "torch/utils/data/_utils").mkdir(parents=True)
    (tmp_path / "torch/utils/data/_utils/pin_memory.py").write_text("pin_memory = None")
    (tmp_path / "torch/__init__.py").write_text(TORCH.format(begun=str(begun)))
    program = f"""
        import sys
        sys.path.insert(0, {str(tmp_path)!r})
        import miniray
        from pathlib import Path

        begun = Path({str(begun)!r})

        def touched(batch):
            begun.touch()
            return batch

        miniray.init(num_cpus=1)
        batches = miniray.data.range(10).map_batches(touched).iter_torch_batches()
        assert "torch" not in sys.modules
        reader = iter(batches)
        assert begun.exists() and "torch" in sys.modules
        assert [len(batch["id"]) for batch in reader] == [10]
    """
    subprocess.run([sys.executable, "-c", textwrap.dedent(program)], check=True, timeout=120)


def test_batches_that_nobody_reads_may_outlive_their_cluster() -> None:
    program = """
        import miniray

        class Model:
            def __call__(self, batch):
                return batch

        def begun():
            miniray.init(address="local", num_cpus=1)
            return iter(miniray.data.range(10).map_batches(Model, concurrency=1).iter_batches())

        reader = begun()
        miniray.shutdown()
        del reader
        assert not miniray.is_initialized()
        reader = begun()
    """
    run = [sys.executable, "-c", textwrap.dedent(program)]
    done = subprocess.run(run, check=True, timeout=120, capture_output=True, text=True)
    assert "Error" not in done.stderr, done.stderr


def test_a_pool_goes_on_while_what_follows_it_waits_for_a_cpu(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def slow(batch: dict[str, Any], path: Path) -> Any:
        deadline = time.monotonic() + 60
        for number in range(5):
            while len(list(path.iterdir())) < number:  # it holds a CPU meanwhile
                assert time.monotonic() < deadline, f"the pool was called {number - 1} times"
                time.sleep(0.01)
            yield {"id": [number]}

    class Model:
        def __call__(self, batch: dict[str, Any], path: Path) -> dict[str, Any]:
            (path / str(batch["id"][0])).touch()
            return batch

    monkeypatch.setattr(miniray.data.DataContext.get_current(), "target_max_block_size", 1)
    rows = (
        miniray.data.range(1)
        .map_batches(slow, fn_args=[tmp_path], num_cpus=1)
        .map_batches(Model, fn_args=[tmp_path], concurrency=1)
        .map(lambda row: row, num_cpus=2)
        .take_all()
    )
    assert rows == [{"id": number} for number in range(5)]


def test_two_pipelines_go_on_side_by_side() -> None:
    one = iter(miniray.data.range(1000).map(lambda row: row).iter_rows())
    other = iter(miniray.data.range(1000).map(lambda row: {"id": -row["id"]}).iter_rows())
    assert [(next(one)["id"], next(other)["id"]) for _ in range(1000)] == [
        (n, -n) for n in range(1000)
    ]


def test_a_dataset_can_be_read_within_a_task() -> None:
    dataset = miniray.data.range(100).map(lambda row: {"id": row["id"] + 1})

    @miniray.remote
    def total() -> int:
        return sum(row["id"] for row in dataset.iter_rows())

    assert miniray.get(total.remote()) == 5050


def test_a_materialized_dataset_reads_nothing_again() -> None:
    dataset = miniray.data.range(1000).map(lambda row: row).materialize()
    assert dataset.num_blocks() >= 1
    assert repr(dataset).startswith("shape: (1000, 1)")
    assert [row["id"] for row in dataset.take_all()] == list(range(1000))
    assert dataset.map(lambda row: {"b": row["id"]}).count() == 1000


def test_a_reader_that_stops_early_leaves_nothing_running() -> None:
    from cluster_helpers import wait_until

    def endless(batch: dict[str, Any]) -> Any:
        while True:
            yield batch

    batches = miniray.data.range(10**5).map_batches(endless, batch_size=1000).iter_batches()
    reader = iter(batches)
    assert len(next(reader)["id"]) == 256
    reader.close()  # type: ignore[attr-defined]
    wait_until(lambda: miniray.available_resources().get("CPU") == 2, timeout=20)


def test_a_reader_that_stops_early_ends_a_function_that_takes_long(tmp_path: Path) -> None:
    from cluster_helpers import wait_until

    def slow(batch: dict[str, Any]) -> dict[str, Any]:
        (tmp_path / "begun").touch()
        time.sleep(60)
        return batch

    reader = iter(miniray.data.range(1000).map_batches(slow).iter_batches())
    wait_until((tmp_path / "begun").exists)
    del reader
    wait_until(lambda: miniray.available_resources().get("CPU") == 2, timeout=20)


def test_a_reader_of_a_pool_that_stops_early_leaves_nothing_running() -> None:
    from cluster_helpers import wait_until

    class Slow:
        def __call__(self, batch: dict[str, Any]) -> dict[str, Any]:
            time.sleep(0.01)
            return batch

    blocks = miniray.data.range(10**5).map_batches(lambda batch: batch, batch_size=1000)
    pool = blocks.map_batches(Slow, batch_size=500, concurrency=2, num_cpus=0.5)
    reader = iter(pool.iter_batches(batch_size=100))
    assert list(next(reader)["id"]) == list(range(100))
    reader.close()  # type: ignore[attr-defined]
    wait_until(lambda: miniray.available_resources().get("CPU") == 2, timeout=20)


def test_ctrl_c_ends_the_wait_for_a_block_and_the_tasks(tmp_path: Path) -> None:
    from cluster_helpers import wait_until

    begun = tmp_path / "begun"

    def slow(row: dict[str, Any], path: str) -> dict[str, Any]:
        with open(path, "ab") as file:
            file.write(b"x")
        time.sleep(0.02)
        return row

    def interrupt() -> None:
        wait_until(begun.exists, timeout=50)
        signal.raise_signal(signal.SIGINT)

    rows = miniray.data.range(100_000).repartition(target_num_rows_per_block=20, strict=True)
    mapped = rows.map(slow, fn_args=[str(begun)])
    thread = threading.Thread(target=interrupt)
    thread.start()
    with pytest.raises(KeyboardInterrupt):
        mapped.take_all()
    thread.join()
    wait_until(lambda: miniray.available_resources().get("CPU") == 2, timeout=50)
    assert begun.stat().st_size < 1000


def test_what_comes_first_is_read_first_where_order_is_not_to_be_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    read = tmp_path / "read"

    def waits(row: dict[str, Any]) -> dict[str, Any]:
        deadline = time.monotonic() + 10
        while row["id"] == 0 and not read.exists() and time.monotonic() < deadline:
            time.sleep(0.01)
        return row

    options = miniray.data.ExecutionOptions(preserve_order=False)
    monkeypatch.setattr(miniray.data.DataContext.get_current(), "execution_options", options)
    rows = iter(miniray.data.range(8).map(waits).iter_rows())
    first = next(rows)["id"]
    read.touch()
    assert first > 0
    assert sorted(row["id"] for row in rows) == sorted({*range(8)} - {first})


def test_small_data_is_divided_among_a_pool_behind_steps_without_functions() -> None:
    class Model:
        def __call__(self, batch: dict[str, Any]) -> dict[str, Any]:
            return batch

    for actors, cuts in ((1, 8), (4, 16)):  # four for each of two CPUs, or for each actor
        rows = miniray.data.range(1600).filter(expr="id < 1500")
        scored = rows.map_batches(Model, batch_size=10, concurrency=actors)
        assert [row["id"] for row in scored.take_all()] == list(range(1500))
        read, called = scored.get_stats_summary()["operators"]
        assert read["calls"] == cuts
        assert called["calls"] >= cuts - 1


def told() -> list[dict[str, Any]]:
    """Return what the page shows of all executions."""
    from miniray.common.runtime import current_runtime
    from miniray.util.task_records import ask_processes, dataset_rows

    return dataset_rows(ask_processes(current_runtime().head, 10, 0)[0])


def test_an_operator_whose_rows_all_went_into_an_exchange_has_finished() -> None:
    from cluster_helpers import wait_until

    dataset = miniray.data.range(1000).map(lambda row: row).sort("id")
    batches = iter(dataset.iter_batches(batch_size=10))
    next(batches)
    expected = {"ReadRange->Map(<lambda>)": "FINISHED", "Sort": "RUNNING"}
    wait_until(lambda: {row["operator"]: row["state"] for row in told()} == expected, told=told)
    del batches


def test_a_running_dataset_tells_rows_and_what_each_operator_waits_for() -> None:
    from cluster_helpers import wait_until

    class Model:
        def __call__(self, batch: dict[str, Any]) -> dict[str, Any]:
            return batch

    dataset = miniray.data.range(1000).map(lambda row: row)
    batches = iter(dataset.map_batches(Model, concurrency=1).iter_batches(batch_size=10))
    next(batches)
    wait_until(lambda: {row["waits_for"] for row in told()} == {"its reader"}, told=told)
    rows = {row["operator"]: row for row in told()}
    list(batches)
    assert told() == []
    assert list(rows) == ["ReadRange->Map(<lambda>)", "MapBatches(Model)"]
    for row in rows.values():
        assert (row["name"], row["total"]) == ("MapBatches(Model)", 1000) or row["total"] is None
        assert 0 < row["rows"] <= 1000
        assert row["waits_for"] == "its reader"
        assert row["pid"]


def test_blocks_without_rows_do_not_tell_the_columns_that_functions_make() -> None:
    tables = [pa.table({"id": range(low, high)}) for low, high in ((0, 10), (10, 10), (10, 30))]
    mapped = miniray.data.from_arrow(tables).filter(lambda row: row["id"] > 15)
    renamed = mapped.map(lambda row: {"to": row["id"] - 16})
    doubled = mapped.flat_map(lambda row: [{"to": row["id"] - 16}] * 2)
    assert renamed.schema().names == doubled.schema().names == ["to"]
    found = [
        renamed.sort("to"),
        renamed.repartition(2),
        renamed.groupby("to").count().select_columns(["to"]),
        renamed.filter(expr="to >= 0"),
        renamed.rename_columns({"to": "a"}).rename_columns({"a": "to"}),
        doubled.filter(expr="to >= 0").groupby("to").count().select_columns(["to"]),
    ]
    for each in found:
        assert each.take_all() == [{"to": number} for number in range(14)]
