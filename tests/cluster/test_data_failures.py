"""Processes that die in the middle of a unit: no row is lost, none comes twice."""

from __future__ import annotations

import os
import signal
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from cluster_helpers import wait_until
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import miniray
from miniray import data

if TYPE_CHECKING:
    from collections.abc import Callable

np = pytest.importorskip("numpy")
pa = pytest.importorskip("pyarrow")
pytestmark = pytest.mark.usefixtures("cluster")
CLUSTER = {"num_cpus": 2}


def dies_once(folder: Path, at: int) -> Callable[[Any], Any]:
    """A function that kills its process at the batch that has a row, the first time."""
    marker = str(folder / "died")

    def function(batch: Any) -> Any:
        if at in batch["id"] and not os.path.exists(marker):
            Path(marker).touch()
            os.kill(os.getpid(), signal.SIGKILL)
        return {"id": batch["id"], "x": np.random.random(len(batch["id"]))}

    return function


def rows_of(dataset: Any) -> list[int]:
    return [row["id"] for row in dataset.take_all()]


@pytest.mark.parametrize("at", [0, 555, 999])
def test_a_worker_that_dies_in_a_unit_is_made_up_for(tmp_path: Path, at: int) -> None:
    dataset = data.range(1000).map_batches(dies_once(tmp_path, at), batch_size=10)
    assert rows_of(dataset) == list(range(1000))
    assert (tmp_path / "died").exists()


def test_an_actor_of_a_pool_that_dies_is_started_again(tmp_path: Path) -> None:
    function = dies_once(tmp_path, 555)

    class Model:
        def __call__(self, batch: Any) -> Any:
            return function(batch)

    dataset = data.range(1000).map_batches(Model, batch_size=10, concurrency=2)
    assert rows_of(dataset) == list(range(1000))
    assert (tmp_path / "died").exists()


@pytest.mark.parametrize("at", [200, 213, 219])
def test_an_actor_that_dies_while_it_reads_ahead_of_its_call_loses_no_row_and_doubles_none(
    tmp_path: Path, at: int
) -> None:
    function = dies_once(tmp_path, at)

    class Model:
        def __call__(self, batch: Any) -> Any:
            return function(batch)

    pad = [bytes(2**14)] * 20  # blocks are in shared memory
    tables = [pa.table({"id": range(n, n + 20), "pad": pad}) for n in range(0, 1000, 20)]
    blocks = data.from_arrow_refs([miniray.put(table) for table in tables])
    dataset = blocks.map_batches(Model, batch_size=5, concurrency=1)
    assert rows_of(dataset) == list(range(1000))
    assert (tmp_path / "died").exists()


def test_a_worker_that_dies_while_its_blocks_are_read(tmp_path: Path) -> None:
    def large(batch: Any) -> Any:
        for n in batch["id"]:
            yield {"id": np.full(2**17, n), "pid": np.full(2**17, os.getpid())}

    context = data.DataContext.get_current()
    before, context.target_max_block_size = context.target_max_block_size, 2**20
    try:
        found: list[int] = []
        killed = False
        for batch in data.range(20).map_batches(large).iter_batches(batch_size=2**17):
            found.append(int(batch["id"][0]))
            if not killed and len(found) == 3:
                killed = True
                os.kill(int(batch["pid"][0]), signal.SIGKILL)
        assert found == list(range(20))
    finally:
        context.target_max_block_size = before


def test_a_unit_that_gives_other_rows_when_it_runs_again_is_an_error(tmp_path: Path) -> None:
    marker = str(tmp_path / "died")

    def changing(batch: Any) -> Any:
        again = os.path.exists(marker)
        for n in batch["id"]:
            if n == 15 and not again:
                Path(marker).touch()
                os.kill(os.getpid(), signal.SIGKILL)
            yield {"id": np.full(3 * 2**16 if again else 2**17, n)}

    context = data.DataContext.get_current()
    before, context.target_max_block_size = context.target_max_block_size, 2**20
    try:
        with pytest.raises(data.DataError, match="gave other rows than before"):
            data.range(160).map_batches(changing).count()  # units of 20 rows
    finally:
        context.target_max_block_size = before


def test_a_worker_that_dies_while_it_writes_leaves_each_row_once(tmp_path: Path) -> None:
    folder, died = tmp_path / "out", tmp_path / "died"

    def dies_when_files_are_there(batch: Any) -> Any:
        for n in batch["id"]:
            if n == 8 and not died.exists():  # of a unit of rows 6 to 8
                wait_until(lambda: len(list(folder.glob("000002-*.parquet"))) == 2)
                died.touch()
                os.kill(os.getpid(), signal.SIGKILL)
            yield {"id": np.full(2**17, n)}

    context = data.DataContext.get_current()
    before, context.target_max_block_size = context.target_max_block_size, 2**20
    try:
        data.range(24).map_batches(dies_when_files_are_there).write_parquet(str(folder))
    finally:
        context.target_max_block_size = before
    assert died.exists()
    counted = data.read_parquet(str(folder)).groupby("id").count().take_all()
    assert counted == [{"id": n, "count()": 2**17} for n in range(24)]


@pytest.mark.parametrize("pool", [False, True], ids=["tasks", "pool"])
def test_a_function_that_ends_its_process_each_time_is_named_with_the_rows(
    tmp_path: Path, pool: bool
) -> None:
    def ends(batch: Any) -> Any:
        Path(tmp_path, str(os.getpid())).touch()
        os._exit(3)

    class Ends:
        def __call__(self, batch: Any) -> Any:
            ends(batch)

    context = data.DataContext.get_current()
    before = context.max_actor_restarts, context.max_task_retries
    context.max_actor_restarts = context.max_task_retries = 0
    try:
        dataset = data.range(10).map_batches(Ends if pool else ends, concurrency=1)
        told = r"MapBatches\(.nds\) failed on rows 0 to \d of range\(0, 10\): .* with code 3"
        with pytest.raises(data.DataError, match=told):
            dataset.take_all()
        assert len(list(tmp_path.iterdir())) == 1  # it is not repeated
    finally:
        context.max_actor_restarts, context.max_task_retries = before


operations = st.lists(
    st.one_of(
        st.tuples(st.just("map"), st.integers(1, 5)),
        st.tuples(st.just("filter"), st.integers(2, 4)),
        st.tuples(st.just("flat_map"), st.integers(0, 2)),
        st.tuples(st.just("limit"), st.integers(0, 40)),
        st.tuples(st.just("batches"), st.integers(1, 9)),
        st.tuples(st.just("union"), st.integers(0, 5)),
        st.tuples(st.just("repartition"), st.integers(1, 9)),
        st.tuples(st.just("blocks"), st.integers(1, 9)),
        st.tuples(st.just("rearrange"), st.integers(0, 9)),
        st.tuples(st.just("groups"), st.integers(1, 3)),
    ),
    max_size=4,
)


def applied(dataset: Any, rows: list[int], kind: str, n: int) -> tuple[Any, list[int]]:
    """The dataset and the plain list after an operation."""
    match kind:
        case "map":
            return dataset.map(lambda row: {"id": row["id"] + n}), [row + n for row in rows]
        case "filter":
            return dataset.filter(lambda row: row["id"] % n == 0), [r for r in rows if r % n == 0]
        case "flat_map":
            return dataset.flat_map(lambda row: [row] * n), [row for row in rows for _ in range(n)]
        case "limit":
            return dataset.limit(n), rows[:n]
        case "batches":
            made = dataset.map_batches(lambda batch: {"id": batch["id"] * 2}, batch_size=n)
            return made, [row * 2 for row in rows]
        case "union":
            return dataset.union(data.range(n)), rows + list(range(n))
        case "blocks":
            return dataset.repartition(n), rows
        case "rearrange":
            return dataset.random_shuffle(seed=n).sort("id"), sorted(rows)
        case "groups":
            return dataset.groupby("id").map_groups(lambda group: group), sorted(rows)
        case "dies":
            at = rows[n % len(rows)] if rows else 0
            made = dataset.map_batches(dies_once(Path(tempfile.mkdtemp()), at))
            return made.select_columns(["id"]), rows
    return dataset.repartition(target_num_rows_per_block=n), rows


@settings(suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture])
@given(st.integers(0, 60), operations, st.integers(0, 4), st.integers(0, 60))
def test_a_pipeline_gives_what_plain_lists_give_though_a_worker_dies_in_it(
    size: int, steps: list[tuple[str, int]], place: int, at: int
) -> None:
    dataset, rows = data.range(size), list(range(size))
    for kind, n in [*steps[:place], ("dies", at), *steps[place:]]:
        dataset, rows = applied(dataset, rows, kind, n)
    assert rows_of(dataset) == rows
    assert dataset.count() == len(rows)
