"""Runs and files in S3: a real server of its own, reached through s3fs and through pyarrow."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from miniray import data, train
from miniray.train import (
    Checkpoint,
    CheckpointConfig,
    CheckpointUploadMode,
    DataParallelTrainer,
    FailureConfig,
    Result,
    RunConfig,
    ScalingConfig,
)
from miniray.train.storage.storage import RunStorage

if TYPE_CHECKING:
    from collections.abc import Iterator

VARIABLES = {
    "AWS_ACCESS_KEY_ID": "test",
    "AWS_SECRET_ACCESS_KEY": "test",
    "AWS_DEFAULT_REGION": "us-east-1",
    "AWS_EC2_METADATA_DISABLED": "true",
}


@pytest.fixture(scope="module")
def s3() -> Iterator[str]:
    """URL of the server. The variables that clients read are set, also for workers."""
    program = str(Path(__file__).with_name("s3_server.py"))
    server = subprocess.Popen(
        [sys.executable, program],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    )
    assert server.stdout is not None
    assert server.stdin is not None
    patch = pytest.MonkeyPatch()
    try:
        url = server.stdout.readline().strip()
        assert url.startswith("http://"), "the S3 server did not start"
        for name, value in {**VARIABLES, "AWS_ENDPOINT_URL": url}.items():
            patch.setenv(name, value)
        make_bucket()
        yield url
    finally:
        patch.undo()
        server.stdin.close()
        server.wait(30)
        server.stdout.close()


def make_bucket() -> None:
    import s3fs

    s3fs.S3FileSystem(skip_instance_cache=True).mkdir("runs")


@pytest.fixture(scope="module")
def cluster_with_s3(s3: str, cluster: Any) -> Any:
    """A cluster that was started after the server, so that its processes know the variables."""
    return cluster


def pyarrow_filesystem() -> Any:
    from pyarrow.fs import S3FileSystem

    endpoint = os.environ["AWS_ENDPOINT_URL"].removeprefix("http://")
    return S3FileSystem(endpoint_override=endpoint, scheme="http")


def save(folder: Path, **files: str) -> Checkpoint:
    folder.mkdir(parents=True)
    for name, text in files.items():
        (folder / name).write_text(text)
    return Checkpoint.from_directory(folder)


def read(checkpoint: Checkpoint) -> dict[str, str]:
    with checkpoint.as_directory() as folder:
        return {path.name: path.read_text() for path in Path(folder).iterdir()}


@pytest.mark.usefixtures("s3")
@pytest.mark.parametrize("client", ["s3fs", "options", "pyarrow"])
def test_checkpoints_are_kept_in_s3(client: str, tmp_path: Path) -> None:
    if client == "s3fs":
        storage = RunStorage("s3://runs/by-s3fs", "run")
    elif client == "options":
        endpoint = os.environ["AWS_ENDPOINT_URL"].removeprefix("http://")
        storage = RunStorage(f"s3://runs/by-url?endpoint_override={endpoint}&scheme=http", "run")
        assert storage.path == "runs/by-url/run"
    else:
        storage = RunStorage("runs/by-pyarrow", "run", pyarrow_filesystem())
    storage.write_run_facts({"token": "t", "state": "FINISHED"})
    for number, name in enumerate(["checkpoint_000000", "epoch=1"]):
        uploads = [
            storage.upload(
                save(tmp_path / f"{name}{rank}", **{f"m{rank}": name, "same": "s"}), name
            )
            for rank in range(2)
        ]
        storage.commit(number, uploads, {"number": number})
    storage.upload(save(tmp_path / "incomplete", m="x"), "epoch=2")
    storage.files.write(".manifests/epoch=3.json", '{"name": "epoch=3", "num')
    assert [record.name for record in storage.records()] == ["checkpoint_000000", "epoch=1"]
    assert storage.delete_incomplete() == 2
    assert storage.files.names() == {"run.json", ".manifests", "checkpoint_000000", "epoch=1"}
    result = Result.from_path(f"s3://{storage.path}")
    assert read(result.checkpoint) == {"m0": "epoch=1", "m1": "epoch=1", "same": "s"}
    result.checkpoint.set_metadata({"a": 1})
    result.checkpoint.update_metadata({"b": 2})
    assert result.checkpoint.get_metadata() == {"a": 1, "b": 2}
    storage.delete("epoch=1")
    assert [record.name for record in storage.records()] == ["checkpoint_000000"]
    with pytest.raises(FileNotFoundError, match="no longer keeps it"):
        result.checkpoint.to_directory()


@pytest.mark.usefixtures("cluster_with_s3")
def test_a_run_trains_fails_and_goes_on_with_its_checkpoints_in_s3(tmp_path: Path) -> None:
    def loop(config: dict[str, str]) -> list[int]:
        rank = train.get_context().get_world_rank()
        start = 0
        if (checkpoint := train.get_checkpoint()) is not None:
            start = int(read(checkpoint)[f"epoch{rank}"]) + 1
        for epoch in range(start, 4):
            folder = Path(config["folder"], f"{rank}-{epoch}-{os.getpid()}")
            train.report(
                {"epoch": epoch},
                save(folder, **{f"epoch{rank}": str(epoch)}),
                checkpoint_upload_mode=CheckpointUploadMode.ASYNC,
            )
            if epoch == 1 and start == 0:
                train.get_all_reported_checkpoints()
                train.collective.barrier()
                raise RuntimeError("once")
        return [start]

    result = DataParallelTrainer(
        loop,
        train_loop_config={"folder": str(tmp_path)},
        scaling_config=ScalingConfig(num_workers=2),
        run_config=RunConfig(
            storage_path="s3://runs/trained",
            name="run",
            failure_config=FailureConfig(max_failures=1),
            checkpoint_config=CheckpointConfig(num_to_keep=2),
        ),
    ).fit()
    assert result.return_value == [2]
    assert [metrics["epoch"] for _, metrics in result.best_checkpoints] == [2, 3]
    assert read(result.checkpoint) == {"epoch0": "3", "epoch1": "3"}
    again = Result.from_path("s3://runs/trained/run")
    assert again.metrics == {"epoch": 3}
    assert list(again.metrics_dataframe["epoch"]) == [0, 1, 2, 3]
    assert again.path == "runs/trained/run"


@pytest.mark.parametrize("client", ["s3fs", "pyarrow"])
@pytest.mark.usefixtures("cluster_with_s3")
def test_datasets_are_written_to_s3_and_read_by_tasks(client: str) -> None:
    where = {"filesystem": pyarrow_filesystem()} if client == "pyarrow" else {}
    folder = f"{'' if where else 's3://'}runs/data-{client}"
    rows = data.range(100).map_batches(lambda batch: {**batch, "part": batch["id"] % 2})
    rows.write_parquet(f"{folder}/rows", partition_cols=["part"], max_rows_per_file=10, **where)
    found = data.read_parquet(f"{folder}/rows", **where)
    assert found.schema().names == ["id", "part"]
    assert found.count() == 100
    assert {row["part"]: row["id"] % 2 for row in found.take_all()} == {"0": 0, "1": 1}
    assert len(found.take(2)) == 2
    assert found.filter(expr="id < 10").map_batches(lambda batch: batch).sum("id") == sum(range(10))
    with pytest.raises(
        data.DataError, match=r"failed on row 0 of .*runs/data-.*part=0/.*\.parquet"
    ):
        found.map(lambda row: row["none"]).take()
    rows.write_csv(f"{folder}/lines", **where)
    lines = data.read_csv(f"{folder}/lines/*.csv", include_paths=True, **where)
    assert {row["path"].partition("/lines/")[0] for row in lines.take_all()} == {
        f"runs/data-{client}"
    }
    rows.limit(5).write_csv(f"{folder}/lines", mode="overwrite", **where)
    assert data.read_text(f"{folder}/lines", **where).take(1) == [{"text": '"id","part"'}]
    assert data.read_csv(f"{folder}/lines", **where).count() == 5
    with pytest.raises(FileNotFoundError, match=r"no Parquet file at .*/none"):
        data.read_parquet(f"{folder}/none", **where)
