"""Datasets of a trainer, read by real workers."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path
from typing import Any

import pytest
from cluster_helpers import count_up, wait_until

from miniray import train
from miniray.train import DataConfig, FailureConfig

pa = pytest.importorskip("pyarrow")
pytest.importorskip("numpy")
pytestmark = pytest.mark.usefixtures("cluster")


def note(folder: str, name: str, value: Any) -> None:
    Path(folder, f"{name}-{train.get_context().get_world_rank()}-{os.getpid()}").write_text(
        json.dumps(value)
    )


def noted(folder: Path, name: str) -> list[Any]:
    return [json.loads(path.read_text()) for path in sorted(folder.glob(f"{name}-*"))]


def test_each_worker_reads_its_part_of_each_dataset(fit: Any, tmp_path: Path) -> None:
    def loop(config: dict[str, str]) -> None:
        batches = train.get_dataset_shard("train").iter_batches(batch_size=4)
        for epoch in range(2):
            rows = [int(n) for batch in batches for n in batch["id"]]
            note(config["folder"], f"train{epoch}", rows)
        (valid,) = train.get_dataset_shard("valid").iter_batches()
        note(config["folder"], "valid", valid["id"].tolist())

    table = pa.table({"id": list(range(21))})
    pa.parquet = pytest.importorskip("pyarrow.parquet")
    pa.parquet.write_table(table, tmp_path / "valid.parquet", row_group_size=5)
    datasets = {"train": table, "valid": tmp_path / "valid.parquet"}
    given = DataConfig(datasets_to_split=["train"], datasets_to_shuffle=["train"])
    config = {"folder": str(tmp_path)}
    fit(loop, config, given={"datasets": datasets, "dataset_config": given})
    epochs = [noted(tmp_path, f"train{epoch}") for epoch in range(2)]
    for parts in epochs:
        assert sorted(map(len, parts)) == [10, 11]
        assert sorted(parts[0] + parts[1]) == list(range(21))
    assert epochs[0] != epochs[1]
    assert noted(tmp_path, "valid") == [list(range(21))] * 2


def test_a_large_table_is_sent_once_and_read_without_a_copy(fit: Any) -> None:
    def loop() -> int:
        import psutil

        process = psutil.Process()
        shard = train.get_dataset_shard()
        before = process.memory_info().rss - process.memory_info().shared
        (batch,) = shard.iter_batches(batch_format="pyarrow", batch_size=rows, prefetch_batches=0)
        assert batch.num_rows == rows
        return int(process.memory_info().rss - process.memory_info().shared - before)

    rows = 4_000_000
    numpy = pytest.importorskip("numpy")
    table = pa.table({"value": numpy.arange(rows)})
    config = DataConfig(datasets_to_shuffle=[], datasets_to_split=[])
    given = {"datasets": {"train": table}, "dataset_config": config}
    grown = fit(loop, given=given).return_value
    assert grown < table.nbytes / 2


def test_a_run_that_is_started_again_reads_what_it_had_not_read(fit: Any, tmp_path: Path) -> None:
    def loop(config: dict[str, str]) -> None:
        rank = train.get_context().get_world_rank()
        shard = train.get_dataset_shard("train")
        seen: list[int] = []
        if (checkpoint := train.get_checkpoint()) is not None:
            with checkpoint.as_directory() as folder:
                saved = json.loads(Path(folder, f"rank{rank}").read_text())
            shard.load_state_dict(saved["state"])
            seen = saved["seen"]
        for step, batch in enumerate(shard.iter_batches(batch_size=3)):
            seen += [int(n) for n in batch["id"]]
            folder = Path(config["folder"], f"{rank}-{step}-{os.getpid()}")
            folder.mkdir()
            state = {"state": shard.state_dict(), "seen": seen}
            (folder / f"rank{rank}").write_text(json.dumps(state))
            train.report({}, checkpoint=train.Checkpoint.from_directory(folder))
            if step == 2 and rank == 0 and count_up(Path(config["folder"], "crashes")) == 1:
                wait_until(train.get_context().get_storage().records)
                os.kill(os.getpid(), signal.SIGKILL)
        note(config["folder"], "seen", seen)

    datasets = {"train": pa.table({"id": list(range(40))})}
    fit(
        loop,
        {"folder": str(tmp_path)},
        given={"datasets": datasets},
        failure_config=FailureConfig(max_failures=1),
        callbacks=[train.JSONCallback(tmp_path / "metrics.jsonl", all_ranks=True)],
    )
    parts = noted(tmp_path, "seen")
    assert sorted(parts[0] + parts[1]) == list(range(40))
    rows = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert [row["rank"] for row in rows] == [0, 1] * (len(rows) // 2)
    numbers = [row["number"] for row in rows[::2]]
    assert numbers == sorted(set(numbers))  # also over the restart


def test_a_callback_ends_the_run_by_name_if_it_fails(fit: Any) -> None:
    class Broken(train.Callback):
        def after_report(self, run_context: Any, metrics: Any, checkpoint: Any) -> None:
            raise OSError("tracking server is gone")

    def loop() -> None:
        train.report({})
        signal.pause()

    with pytest.raises(train.ControllerError, match=r"Broken failed in after_report") as caught:
        fit(loop, callbacks=[Broken()])
    assert isinstance(caught.value.controller_failure, train.CallbackError)
    assert isinstance(caught.value.controller_failure.cause, OSError)
