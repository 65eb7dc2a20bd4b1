"""What train loops report: uploads in the background, collectives, what a run's folder holds."""

from __future__ import annotations

import json
import os
import shutil
import signal
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from cluster_helpers import wait_for_file
from fsspec.implementations.dirfs import DirFileSystem
from fsspec.implementations.local import LocalFileSystem
from train_helpers import printed

from miniray import train
from miniray.train import (
    Checkpoint,
    CheckpointUploadMode,
    ControllerError,
    FailureConfig,
    Result,
    StorageNotSharedError,
    WorkerGroupError,
)

# A file system's class can only be imported: it keeps locks.
IMPORTED_BY_WORKERS = True

pytestmark = pytest.mark.usefixtures("cluster")


def save(folder: Path, text: str = "weights") -> Checkpoint:
    folder.mkdir(parents=True)
    (folder / f"model{train.get_context().get_world_rank()}").write_text(text)
    return Checkpoint.from_directory(folder)


def my_folder(config: dict[str, str], name: object) -> Path:
    return Path(config["folder"], f"rank{train.get_context().get_world_rank()}", str(name))


def test_an_upload_in_the_background_does_not_hold_the_loop(fit: Any, tmp_path: Path) -> None:
    def upload_when_told(checkpoint: Checkpoint, name: str) -> Checkpoint:
        wait_for_file(go)
        storage = train.get_context().get_storage()
        target = storage.build_checkpoint_path_from_name(name)
        Path(target).mkdir(exist_ok=True)
        for file in Path(checkpoint.path).iterdir():
            Path(target, file.name).write_text(file.read_text())
        return Checkpoint(target)

    def loop(config: dict[str, str]) -> list[str]:
        for epoch in range(3):
            train.report(
                {"epoch": epoch},
                save(my_folder(config, epoch), str(epoch)),
                checkpoint_upload_mode=CheckpointUploadMode.ASYNC,
                checkpoint_upload_fn=upload_when_told,
            )
        train.report({"epoch": 3})
        go.touch()  # nothing was uploaded before
        found = train.get_all_reported_checkpoints()
        return [f"{each.checkpoint.path[-6:]} {each.metrics['epoch']}" for each in found]

    go = tmp_path / "go"
    result = fit(loop, {"folder": str(tmp_path)})
    assert result.return_value == ["000000 0", "000001 1", "000002 2"]
    assert result.metrics == {"epoch": 3}
    assert not list(tmp_path.glob("rank*/*"))  # deleted after the upload
    with result.checkpoint.as_directory() as folder:
        assert sorted(os.listdir(folder)) == ["model0", "model1"]


def test_finishing_waits_for_the_uploads_in_the_background(fit: Any, tmp_path: Path) -> None:
    def loop(config: dict[str, str]) -> None:
        for epoch in range(5):
            saved = save(my_folder(config, epoch), "x" * 1_000_000)
            mode = CheckpointUploadMode.ASYNC
            train.report({"epoch": epoch}, saved, f"epoch={epoch}", checkpoint_upload_mode=mode)

    result = fit(loop, {"folder": str(tmp_path)})
    names = [Path(checkpoint.path).name for checkpoint, _ in result.best_checkpoints]
    assert names == [f"epoch={epoch}" for epoch in range(5)]


def test_uploads_that_wait_in_the_background_are_recorded_when_the_loop_fails(
    fit: Any, tmp_path: Path
) -> None:
    def loop(config: dict[str, str]) -> None:
        rank = train.get_context().get_world_rank()

        def upload(checkpoint: Checkpoint, name: str) -> Checkpoint:
            time.sleep(0.5)  # a slow storage
            target = Path(train.get_context().get_storage().path, name)
            shutil.copytree(checkpoint.path, target)
            return Checkpoint.from_directory(target)

        for epoch in range(3):
            saved = save(my_folder(config, epoch), "x") if rank == 0 else None
            train.report(
                {"epoch": epoch},
                saved,
                checkpoint_upload_mode=CheckpointUploadMode.ASYNC,
                checkpoint_upload_fn=upload,
            )
        train.collective.barrier()  # every rank has reported
        if rank == 0:
            raise ValueError("after its reports")
        signal.pause()

    with pytest.raises(WorkerGroupError, match="after its reports"):
        fit(loop, {"folder": str(tmp_path)}, name="failing")
    result = Result.from_path(tmp_path / "results" / "failing")
    assert [metrics["epoch"] for _, metrics in result.best_checkpoints] == [0, 1, 2]


def test_an_upload_in_the_background_that_fails_ends_the_run_with_what_it_raised(
    fit: Any, tmp_path: Path
) -> None:
    def loop(config: dict[str, str]) -> None:
        saved = None
        if train.get_context().get_world_rank() == 1:
            saved = Checkpoint.from_directory(my_folder(config, "gone"))
        train.report({}, saved, checkpoint_upload_mode=CheckpointUploadMode.ASYNC)
        signal.pause()

    with pytest.raises(WorkerGroupError, match=r"upload of report 0.*TemporaryDirectory") as e:
        fit(loop, {"folder": str(tmp_path)})
    ((rank, failure),) = e.value.worker_failures.items()
    assert rank == 1
    assert isinstance(failure, FileNotFoundError)
    assert "[Rank 1] FileNotFoundError" in str(e.value)


def test_what_the_users_own_upload_raises_in_the_background_is_the_failure_of_its_rank(
    fit: Any, tmp_path: Path
) -> None:
    class OwnError(ValueError):
        pass

    def upload(checkpoint: Checkpoint, name: str) -> Checkpoint:
        raise OwnError(name)

    def loop(config: dict[str, str]) -> None:
        folder = my_folder(config, "files")
        folder.mkdir(parents=True)
        train.report(
            {},
            Checkpoint.from_directory(folder),
            checkpoint_upload_mode=CheckpointUploadMode.ASYNC,
            checkpoint_upload_fn=upload,
        )

    with pytest.raises(WorkerGroupError) as e:
        fit(loop, {"folder": str(tmp_path)}, workers=1)
    failure = e.value.worker_failures[0]
    assert type(failure).__name__ == "OwnError"
    assert isinstance(failure, ValueError)
    assert failure.args == ("checkpoint_000000",)
    assert failure.__dict__["__notes__"] == ["Raised in the background upload of report 0."]


def test_reports_of_rank_0_alone_are_enough_for_metrics(fit: Any) -> None:
    def loop() -> None:
        if train.get_context().get_world_rank() == 0:
            for step in range(30):
                train.report({"step": step})

    result = fit(loop, workers=3)
    assert result.metrics == {"step": 29}
    assert list(result.metrics_dataframe["step"]) == list(range(30))


def test_all_ranks_get_what_rank_0_hands_out(fit: Any, tmp_path: Path) -> None:
    def loop(config: dict[str, str]) -> int:
        rank = train.get_context().get_world_rank()
        for number in range(50):
            own = {"number": number, "rank": rank}
            got = train.collective.broadcast_from_rank_zero(own)
            assert got == {"number": number, "rank": 0}
        Path(config["folder"], f"here{rank}").touch()
        train.collective.barrier()
        return len(list(Path(config["folder"]).glob("here*")))

    assert fit(loop, {"folder": str(tmp_path)}, workers=3).return_value == 3


def test_a_rank_that_dies_is_named_with_what_the_others_did(fit: Any, tmp_path: Path) -> None:
    def loop(config: dict[str, str]) -> None:
        rank = train.get_context().get_world_rank()
        train.report({"step": 0})
        if rank == 0:
            Path(config["folder"], "near").touch()
            train.collective.barrier()
        elif rank == 1:
            signal.pause()
        wait_for_file(Path(config["folder"], "near"))
        os.kill(os.getpid(), signal.SIGKILL)

    with pytest.raises(WorkerGroupError) as caught:
        fit(loop, {"folder": str(tmp_path)}, workers=3)
    text = str(caught.value)
    assert 2 in caught.value.worker_failures
    assert "[Rank 2]" in text
    assert "rank 1 was in its train loop" in text


def test_a_barrier_that_a_rank_does_not_come_to_ends_after_a_time(
    fit: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    def loop() -> None:
        if train.get_context().get_world_rank() == 0:
            train.collective.barrier()
        signal.pause()

    monkeypatch.setenv("MINIRAY_TRAIN_COLLECTIVE_TIMEOUT", "0.2")
    monkeypatch.setattr("miniray.train.data_parallel_trainer.tunables", tunables_now)
    with pytest.raises(WorkerGroupError, match="rank 0 still waited for rank 1"):
        fit(loop)


def tunables_now() -> Any:
    """The tunables as the environment says now; those of the process were read long ago."""
    from miniray.common.config import config

    return config.__wrapped__()


def test_a_rank_that_returns_ends_the_barrier_of_the_others(fit: Any) -> None:
    def loop() -> None:
        if train.get_context().get_world_rank() == 0:
            train.collective.barrier()

    with pytest.raises(WorkerGroupError, match="Rank 1 returned from its train loop, while rank 0"):
        fit(loop)


def test_the_folder_of_a_run_holds_its_configuration_metrics_and_output(
    fit: Any, tmp_path: Path
) -> None:
    def loop(config: dict[str, Any]) -> None:
        rank = train.get_context().get_world_rank()
        print(f"rank {rank} says hello")
        print("and warns", file=sys.stderr)
        train.report({"loss": 0.5, "eval": {"accuracy": 0.25}})

    path = Path(fit(loop, {"lr": 0.1}, name="kept").path)
    assert json.loads((path / "config.json").read_text())["train_loop_config"] == {"lr": 0.1}
    row = json.loads((path / "metrics.jsonl").read_text())
    assert row["metrics"] == {"loss": 0.5, "eval": {"accuracy": 0.25}}
    assert (path / "metrics.csv").read_text().startswith("number,time,checkpoint,loss,eval/acc")
    for rank in range(2):
        logs = path / "logs" / "attempt_001"
        assert printed(logs / f"rank_{rank}.out") == f"rank {rank} says hello\n"
        assert printed(logs / f"rank_{rank}.err") == "and warns\n"
    fit(loop, {"lr": 0.1}, name="kept")
    assert (path / "logs" / "attempt_002" / "rank_1.out").exists()
    assert Result.from_path(path).metrics_dataframe.shape == (2, 2)


def test_the_output_of_a_rank_that_was_killed_is_kept(fit: Any, tmp_path: Path) -> None:
    def loop() -> None:
        print("the last words", flush=True)
        if train.get_context().get_world_rank() == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        signal.pause()

    with pytest.raises(WorkerGroupError):
        fit(loop, name="killed")
    logs = tmp_path / "results" / "killed" / "logs" / "attempt_001"
    assert printed(logs / "rank_1.out") == "the last words\n"


class OwnFolder(DirFileSystem):  # type: ignore[misc]
    """A folder of its own in each process, as a local path is on each machine."""

    def __reduce__(self) -> Any:
        return own_folder, (os.path.dirname(self.path),)


def own_folder(base: str) -> OwnFolder:
    return OwnFolder(f"{base}/{os.getpid()}", LocalFileSystem(auto_mkdir=True))


def test_a_storage_that_the_workers_do_not_share_is_named_and_not_retried(
    fit: Any, tmp_path: Path
) -> None:
    start = time.monotonic()
    with pytest.raises(ControllerError, match="not shared by the machines") as caught:
        fit(
            lambda: None,
            storage_path="runs",
            storage_filesystem=own_folder(str(tmp_path)),
            failure_config=FailureConfig(max_failures=-1),
        )
    assert isinstance(caught.value.controller_failure, StorageNotSharedError)
    assert "ranks 0 and 1 on" in str(caught.value)
    assert time.monotonic() - start < 30
