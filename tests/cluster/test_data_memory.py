"""What is in flight is bounded, whatever the data; one CPU is enough."""

from __future__ import annotations

import contextlib
import os
import time
from pathlib import Path
from typing import Any

import pytest
from cluster_helpers import processes_with, wait_until
from object_helpers import known_objects

import miniray
from miniray import data

np = pytest.importorskip("numpy")
pytest.importorskip("pyarrow")
pytestmark = pytest.mark.usefixtures("cluster")
CLUSTER = {"num_cpus": 1, "object_store_memory": 50 * 2**20}
MIB = 2**20


@pytest.fixture(autouse=True)
def _blocks_of_a_mebibyte() -> Any:
    context = data.DataContext.get_current()
    before, context.target_max_block_size = context.target_max_block_size, MIB
    yield
    context.target_max_block_size = before


def large(marker: str) -> Any:
    """A function that makes a mebibyte of each row, and counts them in a file."""

    def function(row: dict[str, Any]) -> dict[str, Any]:
        with open(marker, "ab") as file:
            file.write(b"x")
        return {"id": row["id"], "data": np.full(MIB // 8, row["id"])}

    return function


@pytest.mark.parametrize("rows", [60, 240])
def test_as_much_is_in_flight_of_four_times_the_data(tmp_path: Path, rows: int) -> None:
    marker = str(tmp_path / "made")
    most = read = 0
    for row in data.range(rows).map(large(marker)).iter_rows():
        assert row["id"] == read
        read += 1
        most = max(most, os.path.getsize(marker) - read)
    assert read == rows
    # Two calls in the window, each with two blocks unread and rows of one in the making.
    assert most < 40


def test_a_pool_whose_blocks_are_larger_than_expected_pauses(tmp_path: Path) -> None:
    marker = str(tmp_path / "made")

    class Larger:
        def __init__(self) -> None:
            self.function = large(marker)

        def __call__(self, row: dict[str, Any]) -> dict[str, Any]:
            return self.function(row)

    most = read = 0
    for row in data.range(100).map(lambda row: row).map(Larger, concurrency=1).iter_rows():
        assert row["id"] == read
        read += 1
        if read == 1:
            time.sleep(0.5)  # a slow reader
        most = max(most, os.path.getsize(marker) - read)
    assert read == 100
    assert most < 40


def test_stages_pass_on_more_than_the_store_holds() -> None:
    class Negative:
        def __call__(self, batch: dict[str, Any]) -> dict[str, Any]:
            return {"id": batch["id"], "data": -batch["data"]}

    def made(row: dict[str, Any]) -> dict[str, Any]:
        return {"id": row["id"], "data": np.full(MIB // 8, row["id"])}

    dataset = data.range(100).map(made).map_batches(Negative, concurrency=1)
    found = [(row["id"], int(row["data"][0])) for row in dataset.iter_rows()]
    assert found == [(n, -n) for n in range(100)]


def test_a_reader_that_never_reads_leaves_all_cpus_to_others_and_then_no_value(
    tmp_path: Path,
) -> None:
    marker = tmp_path / "made"
    batches = iter(data.range(300).map(large(str(marker))).iter_batches())
    wait_until(lambda: marker.exists() and miniray.available_resources().get("CPU") == 1)
    assert marker.stat().st_size < 40
    others = data.range(60).map(large(str(tmp_path / "others"))).iter_rows()
    assert [row["id"] for row in others] == list(range(60))
    assert marker.stat().st_size < 40
    del batches
    wait_until(lambda: not known_objects() and miniray.available_resources().get("CPU") == 1)


def test_a_data_set_is_materialized_that_is_larger_than_the_store() -> None:
    def made(row: dict[str, Any]) -> dict[str, Any]:
        return {"id": row["id"], "data": np.full(MIB // 8, row["id"])}

    kept = data.range(75).map(made).materialize()
    for _ in range(2):
        assert [row["id"] for row in kept.iter_rows()] == list(range(75))


def test_a_pool_that_would_leave_no_cpu_to_those_that_feed_it_is_refused() -> None:
    class Same:
        def __call__(self, batch: Any) -> Any:
            return batch

    dataset = data.range(10).map(lambda row: row).map_batches(Same, num_cpus=1, concurrency=1)
    with pytest.raises(data.DataError, match="hold 1 CPU together, of 1 that there are"):
        dataset.take_all()
    wait_until(lambda: miniray.available_resources().get("CPU") == 1)


def memory() -> int:
    """Bytes of this process and those of the cluster; what they share counts in parts."""
    total = 0
    for pid in {os.getpid(), *processes_with("MINIRAY_TMPDIR", os.environ["MINIRAY_TMPDIR"])}:
        with contextlib.suppress(OSError):  # it has ended
            for line in Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines():
                if line.startswith("Pss:"):
                    total += int(line.split()[1]) * 1024
    return total


def test_ten_times_the_data_takes_as_much_memory_in_all_processes(tmp_path: Path) -> None:
    import pyarrow as pa
    import pyarrow.parquet as pq

    def doubled(batch: dict[str, Any]) -> dict[str, Any]:
        return {"x": batch["x"] * 2}

    def most(files: int) -> int:
        """Bytes that reading so many files of 8 MiB takes."""
        peak = 0
        rows = 0
        folder = str(tmp_path / str(files))
        dataset = data.read_parquet(folder).map_batches(doubled, batch_size=2**14)
        for number, batch in enumerate(dataset.iter_batches(batch_size=2**14)):
            rows += len(batch["x"])
            if not number % 25:
                peak = max(peak, memory())
        assert rows == files * 2**20
        return peak

    for files in (3, 30):
        (tmp_path / str(files)).mkdir()
        for number in range(files):
            table = pa.table({"x": np.arange(2**20) + number})
            pq.write_table(table, tmp_path / f"{files}/{number}.parquet", row_group_size=2**18)
    most(3)  # processes and modules are there
    # One more block in flight is some tens of MiB; all that is read more would be 216.
    assert most(30) < most(3) + 100 * MIB


def test_a_row_larger_than_the_store_is_an_error_that_says_so() -> None:
    def huge(row: dict[str, Any]) -> dict[str, Any]:
        return {"data": np.zeros(75 * MIB // 8)}

    with pytest.raises(data.DataError, match=r"on range\(0, 1\): ObjectStoreFullError: A value"):
        data.range(1).map(huge).take_all()


def test_a_row_group_larger_than_the_store_is_read(tmp_path: Path) -> None:
    import pyarrow as pa
    import pyarrow.parquet as pq

    table = pa.table({"x": np.random.default_rng(1).integers(2**62, size=2**23)})
    pq.write_table(table, tmp_path / "x.parquet", row_group_size=2**23, use_dictionary=False)
    dataset = data.read_parquet(str(tmp_path)).map_batches(lambda batch: batch)
    seen = sum(len(batch["x"]) for batch in dataset.iter_batches(batch_size=2**16))
    assert seen == 2**23
    (stage,) = dataset.get_stats_summary()["operators"]
    assert stage["heap"] > 16 * MIB  # of a process with its modules


def test_a_call_pauses_at_two_blocks_that_nobody_has_read(tmp_path: Path) -> None:
    marker = tmp_path / "made"

    def blocks(batch: dict[str, Any]) -> Any:
        for number in range(50):
            with marker.open("ab") as file:
                file.write(b"x")
            yield {"data": np.full(3 * MIB // 16, number)}

    batches = iter(data.range(1).map_batches(blocks).iter_batches(batch_size=None))
    wait_until(lambda: marker.exists() and marker.stat().st_size >= 2)
    wait_until(lambda: miniray.available_resources().get("CPU") == 1)
    assert marker.stat().st_size <= 3  # with one that is made
    assert len(list(batches)) == 50
