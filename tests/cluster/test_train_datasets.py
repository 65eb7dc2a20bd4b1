"""Datasets of miniray.data in a trainer: each rank has its own rows made by tasks."""

from __future__ import annotations

import concurrent.futures
import json
import os
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from cluster_helpers import wait_until

import miniray
from miniray import train
from miniray.train import DataParallelTrainer, FailureConfig, RunConfig, ScalingConfig
from miniray.util import placement_group, remove_placement_group

if TYPE_CHECKING:
    from collections.abc import Callable

    from miniray.train import Result

np = pytest.importorskip("numpy")
pa = pytest.importorskip("pyarrow")
pytestmark = pytest.mark.usefixtures("cluster")


@pytest.fixture
def fit(tmp_path: Path) -> Callable[..., Result]:
    """Runs a train loop on two workers with datasets."""

    def run(
        loop: Any,
        datasets: Any,
        *,
        cpus: int = 1,
        workers: int = 2,
        data: train.DataConfig | None = None,
        **run: Any,
    ) -> Result:
        return DataParallelTrainer(
            loop,
            train_loop_config={"folder": str(tmp_path)},
            scaling_config=ScalingConfig(num_workers=workers, resources_per_worker={"CPU": cpus}),
            run_config=RunConfig(storage_path=tmp_path / "results", **run),
            datasets=datasets,
            dataset_config=data,
        ).fit()

    return run


def note(folder: str, name: str, value: Any) -> None:
    path = Path(folder, f"{name}-{train.get_context().get_world_rank()}-{os.getpid()}")
    path.write_text(json.dumps(value))


def noted(folder: Path, name: str) -> list[Any]:
    return [json.loads(path.read_text()) for path in sorted(folder.glob(f"{name}-*"))]


def epochs(config: dict[str, str]) -> None:
    batches = train.get_dataset_shard("train").iter_batches(batch_size=7)
    for epoch in range(2):
        read = [[int(n) for n in batch["id"]] for batch in batches]
        assert len(batches) == len(read)
        note(config["folder"], f"epoch{epoch}", read)


def rows_of(parts: list[list[list[int]]]) -> list[int]:
    return sorted(n for part in parts for batch in part for n in batch)


def test_the_ranks_share_each_epoch_and_the_next_one_has_another_order(
    fit: Any, tmp_path: Path
) -> None:
    dataset = miniray.data.range(45).map(lambda row: {"id": row["id"] + 1})
    limits = miniray.data.ExecutionResources(cpu=1)
    options = miniray.data.ExecutionOptions(resource_limits=limits)
    fit(epochs, {"train": dataset}, data=train.DataConfig(execution_options=options))
    first, second = (noted(tmp_path, f"epoch{epoch}") for epoch in range(2))
    assert rows_of(first) == rows_of(second) == list(range(1, 46))
    assert first != second
    assert [len(part) for part in first] == [4, 4]


def test_every_run_has_the_same_batches_also_without_a_cpu_for_tasks(
    fit: Any, tmp_path: Path
) -> None:
    def noisy(batch: dict[str, Any]) -> dict[str, Any]:
        return {"id": batch["id"] * 1000 + np.random.randint(1000, size=len(batch["id"]))}

    dataset = miniray.data.range(40).map_batches(noisy, batch_size=10)
    runs = []
    for cpus in (1, 1, 2):  # with the last, the two workers hold all four CPUs
        for path in tmp_path.glob("epoch*"):
            path.unlink()
        fit(epochs, {"train": dataset}, cpus=cpus)
        runs.append([noted(tmp_path, "epoch0"), noted(tmp_path, "epoch1")])
    assert runs[0] == runs[1] == runs[2]


def test_filters_leave_the_ranks_with_as_many_batches_and_lose_no_row(
    fit: Any, tmp_path: Path
) -> None:
    dataset = (
        miniray.data.range(80)
        .filter(lambda row: row["id"] % 3 == 0)
        .map_batches(lambda batch: {"id": batch["id"] + 1})
    )
    fit(epochs, {"train": dataset})
    parts = noted(tmp_path, "epoch0")
    assert rows_of(parts) == list(range(1, 81, 3))
    assert len(parts[0]) == len(parts[1])


def test_blocks_given_as_refs_lose_no_row(fit: Any, tmp_path: Path) -> None:
    refs = [miniray.put(pa.table({"id": range(start, start + 10)})) for start in (0, 10)]
    fit(epochs, {"train": miniray.data.from_arrow_refs(refs)})
    assert rows_of(noted(tmp_path, "epoch0")) == list(range(20))


def test_a_pool_of_actors_prepares_the_rows_of_the_ranks(fit: Any, tmp_path: Path) -> None:
    class Adder:
        def __call__(self, batch: dict[str, Any]) -> dict[str, Any]:
            return {"id": batch["id"] + 1}

    dataset = miniray.data.range(40).map_batches(Adder, batch_size=10, concurrency=2)
    fit(epochs, {"train": dataset})
    assert rows_of(noted(tmp_path, "epoch0")) == list(range(1, 41))


def test_a_run_goes_on_in_the_middle_of_an_epoch(fit: Any, tmp_path: Path) -> None:
    def loop(config: dict[str, str]) -> None:
        shard = train.get_dataset_shard("train")
        checkpoint = train.get_checkpoint()
        if checkpoint is not None:
            with checkpoint.as_directory() as folder:
                shard.load_state_dict(json.loads(Path(folder, "state.json").read_text()))
        seen = []
        for number, batch in enumerate(shard.iter_batches(batch_size=5)):
            seen += [int(n) for n in batch["id"]]
            if checkpoint is None and number == 3:
                folder = Path(config["folder"], f"own{train.get_context().get_world_rank()}")
                folder.mkdir()
                if train.get_context().get_world_rank() == 0:
                    (folder / "state.json").write_text(json.dumps(shard.state_dict()))
                    kept = train.Checkpoint.from_directory(folder)
                    train.report({}, checkpoint=kept)
                else:
                    train.report({})
                note(config["folder"], "before", seen)
                train.collective.barrier()  # the checkpoint needs the report of both
                if train.get_context().get_world_rank() == 0:
                    raise RuntimeError("once")
                return
        note(config["folder"], "after", seen)

    dataset = miniray.data.range(100).map(lambda row: row)
    fit(loop, {"train": dataset}, failure_config=FailureConfig(max_failures=1))
    before, after = noted(tmp_path, "before"), noted(tmp_path, "after")
    assert [len(part) for part in before + after] == [20, 20, 30, 30]
    assert sorted(n for part in before + after for n in part) == list(range(100))


def test_a_unit_that_fails_is_never_left_out(fit: Any) -> None:
    def loop(config: dict[str, str]) -> None:
        miniray.data.DataContext.get_current().max_errored_blocks = -1
        for _ in train.get_dataset_shard("train").iter_batches(batch_size=5):
            pass

    def fails(row: dict[str, Any]) -> dict[str, Any]:
        raise KeyError("gone")

    with pytest.raises(train.TrainingFailedError, match=r"failed on row 0 of .*gone"):
        fit(loop, {"train": miniray.data.range(20).map(fails)})


def test_a_dataset_has_the_same_order_on_a_cluster_of_any_size(monkeypatch: Any) -> None:
    from miniray.train.data import datasets

    def blocks(cpus: int) -> list[int]:
        monkeypatch.setattr(datasets, "cluster_resources", lambda: {"CPU": cpus})
        source = datasets.DatasetSource(miniray.data.range(10_000).map(lambda row: row))
        return list(source.block_sizes)

    assert blocks(1) == blocks(64)
    assert len(blocks(1)) > 100


def test_the_programs_of_the_template_read_tensors_that_ray_has_written(
    fit: Any, tmp_path: Path
) -> None:
    pytest.importorskip("torch")
    import pyarrow.parquet as pq

    for split, rows in (("train", 64), ("test", 32)):
        (tmp_path / split).mkdir()
        image = np.arange(rows * 32 * 32 * 3, dtype=np.uint8)
        metadata = {
            b"ARROW:extension:name": b"ray.data.arrow_tensor_v2",
            b"ARROW:extension:metadata": json.dumps([32, 32, 3]).encode(),
        }
        offsets = pa.array(range(0, len(image) + 1, 3072), pa.int64())
        lists = pa.LargeListArray.from_arrays(offsets, pa.array(image))
        fields = [
            pa.field("image", lists.type, metadata=metadata),
            pa.field("label", pa.int64()),
        ]
        labels = pa.array(np.arange(rows) % 10)
        table = pa.Table.from_arrays([lists, labels], schema=pa.schema(fields))
        pq.write_table(table, tmp_path / split / "x.parquet", row_group_size=16)

    def transform_cifar(row: dict[str, Any]) -> dict[str, Any]:
        import torch

        image = torch.as_tensor(row["image"].copy()).permute(2, 0, 1)
        row["image"] = (image / 255 - 0.5) / 0.5
        return row

    def loop(config: dict[str, str]) -> None:
        train_batches = train.get_dataset_shard("train").iter_torch_batches(batch_size=8)
        valid_batches = train.get_dataset_shard("valid").iter_torch_batches(batch_size=8)
        for _ in range(2):
            shapes = [(list(b["image"].shape), str(b["image"].dtype)) for b in train_batches]
            labels = [str(b["label"].dtype) for b in valid_batches]
        note(config["folder"], "shapes", [shapes, labels])

    train_dataset = miniray.data.read_parquet(f"{tmp_path}/train")
    test_dataset = miniray.data.read_parquet(f"{tmp_path}/test")
    assert "tensor(32, 32, 3)[uint8]" in str(train_dataset.schema())
    fit(
        loop,
        {"train": train_dataset.map(transform_cifar), "valid": test_dataset.map(transform_cifar)},
        cpus=3,  # with one for tasks: each process loads PyTorch
        workers=1,
    )
    expected = [[[[8, 3, 32, 32], "torch.float32"]] * 8, ["torch.int64"] * 4]
    assert noted(tmp_path, "shapes") == [expected]


def test_the_first_rows_of_the_next_epoch_are_made_before_it_begins(
    fit: Any, tmp_path: Path
) -> None:
    from miniray.common.runtime import current_runtime
    from miniray.util.task_records import ask_processes, dataset_rows

    def noted_calls(batch: dict[str, Any], marker: str) -> dict[str, Any]:
        with open(marker, "ab") as file:
            file.write(b"x")
        return batch

    def loop(config: dict[str, str]) -> None:
        batches = train.get_dataset_shard("train").iter_batches(batch_size=10)
        calls = Path(config["folder"], "calls")
        wait_until(lambda: calls.exists() and calls.stat().st_size == 4)
        for _ in batches:
            pass
        wait_until(lambda: calls.stat().st_size == 260)
        processes, _ = ask_processes(current_runtime().head, 10, 0)
        assert [row["total"] for row in dataset_rows(processes)] == [None]  # no end is known

    kept = {"fn_kwargs": {"marker": str(tmp_path / "calls")}}
    dataset = miniray.data.range(2560).map_batches(noted_calls, **kept)
    fit(loop, {"train": dataset}, workers=1)
    # 256 units of the first epoch, and four of each pass that has not begun.
    assert (tmp_path / "calls").stat().st_size == 260


def test_no_more_than_the_next_epoch_is_made_ahead_of_data_of_few_units(
    fit: Any, tmp_path: Path
) -> None:
    def noted_calls(batch: dict[str, Any], marker: str) -> dict[str, Any]:
        with open(marker, "ab") as file:
            file.write(b"x")
        return batch

    def loop(config: dict[str, str]) -> None:
        shard = train.get_dataset_shard("train")
        for _ in range(2):
            assert sum(len(batch["id"]) for batch in shard.iter_batches(batch_size=10)) == 3
        calls = Path(config["folder"], "calls")
        wait_until(lambda: calls.stat().st_size == 9)

    kept = {"fn_kwargs": {"marker": str(tmp_path / "calls")}}
    fit(loop, {"train": miniray.data.range(3).map_batches(noted_calls, **kept)}, workers=1)
    assert (tmp_path / "calls").stat().st_size == 9  # two epochs and the one that has not begun


def test_a_run_that_goes_on_draws_the_same_random_numbers_in_each_stage(
    fit: Any, tmp_path: Path
) -> None:
    import numpy as np

    class Drawn:
        def __call__(self, batch: dict[str, Any]) -> dict[str, Any]:
            return {**batch, "drawn": np.random.rand(len(batch["id"]))}

    def loop(config: dict[str, str]) -> None:
        shard = train.get_dataset_shard("train")
        state = Path(config["folder"], "state")
        found = []
        if state.exists():
            shard.load_state_dict(json.loads(state.read_text()))
        for epoch in range(1 if state.exists() else 0, 2):
            found = [batch["drawn"].tolist() for batch in shard.iter_batches(batch_size=10)]
            if epoch == 0:
                state.write_text(json.dumps(shard.state_dict()))
        note(config["folder"], "drawn", found)

    dataset = miniray.data.range(60).map(lambda row: row).map_batches(Drawn, concurrency=1)
    for _ in range(2):
        fit(loop, {"train": dataset}, workers=1)
    unbroken, resumed = noted(tmp_path, "drawn")
    assert unbroken == resumed


def test_pools_of_two_datasets_have_the_same_cpus_in_turns(fit: Any) -> None:
    class Same:
        def __call__(self, batch: dict[str, Any]) -> dict[str, Any]:
            return batch

    def loop(config: dict[str, str]) -> None:
        shards = [train.get_dataset_shard(name) for name in ("train", "valid")]
        for _ in range(2):
            for shard in shards:
                assert sum(len(batch["id"]) for batch in shard.iter_batches()) == 40

    # Of four CPUs one is the rank's, and one reads: the pools have no room beside each other.
    dataset = miniray.data.range(40).map_batches(Same, concurrency=1, num_cpus=2)
    fit(loop, {"train": dataset, "valid": dataset}, workers=1)


def read_through_a_pool() -> tuple[type, Callable[[dict[str, str]], None]]:
    """The class of a pool that changes nothing, and a loop that reads what comes of it."""

    class Same:
        def __call__(self, batch: dict[str, Any]) -> dict[str, Any]:
            return batch

    def loop(config: dict[str, str]) -> None:
        for _ in train.get_dataset_shard("train").iter_batches():
            pass

    return Same, loop


def test_pools_of_two_ranks_that_would_wait_for_each_other_are_refused(fit: Any) -> None:
    same, loop = read_through_a_pool()
    # Of four CPUs the ranks hold two, and one reads.
    dataset = miniray.data.range(40).map_batches(same, concurrency=1, num_cpus=1)
    told = r"each of 2 workers has .*hold 2 CPU together, of 2 that there are, of which the tasks"
    with pytest.raises(train.TrainingFailedError, match=told):
        fit(loop, {"train": dataset, "valid": dataset})
    for split in ("all", []):  # one pool fits, which both ranks use, and so do two of one rank
        given = train.DataConfig(datasets_to_split=split)
        fit(loop, {"train": dataset}, data=given)
        fit(loop, {"train": dataset, "valid": dataset}, workers=1, data=given)


def test_a_pool_waits_for_what_others_hold_for_a_while(fit: Any) -> None:
    from miniray.util.state import list_pending_demands

    same, loop = read_through_a_pool()

    def free_when_the_pool_waits() -> None:
        try:
            wait_until(lambda: "PoolWorker" in str(list_pending_demands()))
        finally:
            remove_placement_group(others)

    others = placement_group([{"CPU": 2}])
    miniray.get(others.ready(), timeout=30)
    dataset = miniray.data.range(40).map_batches(same, concurrency=1, num_cpus=2)
    with concurrent.futures.ThreadPoolExecutor(1) as thread:
        freed = thread.submit(free_when_the_pool_waits)
        fit(loop, {"train": dataset}, workers=1)
        freed.result()


def test_a_dataset_that_is_asked_for_and_never_read_leaves_nothing_running(fit: Any) -> None:
    def slow(row: dict[str, Any]) -> dict[str, Any]:
        time.sleep(0.01)
        return row

    def loop(config: dict[str, str]) -> None:
        train.get_dataset_shard("train")

    fit(loop, {"train": miniray.data.range(10_000).map(slow)})
    wait_until(lambda: miniray.available_resources().get("CPU") == 4, timeout=50)


def test_the_page_shows_how_far_each_rank_is_and_in_which_process(fit: Any, tmp_path: Path) -> None:
    from miniray.common.runtime import current_runtime
    from miniray.web.runs import DatasetTable

    def loop(config: dict[str, str]) -> None:
        batches = iter(train.get_dataset_shard("train").iter_batches(batch_size=10))
        next(batches)
        note(config["folder"], "began", os.getpid())
        wait_until(Path(config["folder"], "seen").exists)

    table = DatasetTable()

    def ranks() -> list[dict[str, Any]]:
        rows, _ = table(current_runtime().head)
        return [row for row in rows.values() if row.get("position") == 10 and row.get("run_id")]

    with concurrent.futures.ThreadPoolExecutor(1) as pool:
        fitted = pool.submit(fit, loop, {"train": miniray.data.range(100).map(lambda row: row)})
        try:
            wait_until(lambda: len(ranks()) == 2)
            shown = ranks()
        finally:
            (tmp_path / "seen").touch()
        fitted.result()
    assert {row["pid"] for row in shown} == set(noted(tmp_path, "began"))
    assert {(row["name"], row["total"]) for row in shown} == {("train", 50)}
    assert all(row["node_id"] for row in shown)
