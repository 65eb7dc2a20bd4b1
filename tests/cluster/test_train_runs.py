"""Training runs with real workers, without a framework."""

from __future__ import annotations

import os
import signal
import socket
import sys
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from cluster_helpers import (
    count_up,
    is_alive,
    processes_with,
    wait_for_file,
    wait_for_text,
    wait_until,
)

import miniray
from miniray import train
from miniray.train import (
    CheckpointConfig,
    ControllerError,
    FailureConfig,
    Result,
    WorkerGroupError,
)

if TYPE_CHECKING:
    from collections.abc import Callable

pytestmark = pytest.mark.usefixtures("cluster")


def save(folder: Path, **files: str) -> train.Checkpoint:
    folder.mkdir(parents=True)
    for name, text in files.items():
        (folder / name).write_text(text)
    return train.Checkpoint.from_directory(folder)


def test_every_worker_knows_its_place(fit: Any, tmp_path: Path) -> None:
    def loop(config: dict[str, str]) -> str:
        context = train.get_context()
        place = [
            context.get_world_rank(),
            context.get_local_rank(),
            context.get_world_size(),
            context.get_local_world_size(),
            context.get_node_rank(),
        ]
        Path(config["folder"], f"{place[0]}").write_text(f"{place} {context.get_experiment_name()}")
        return f"value of rank {place[0]}"

    result = fit(loop, {"folder": str(tmp_path)}, workers=3, name="places")
    assert [(tmp_path / str(rank)).read_text() for rank in range(3)] == [
        f"[{rank}, {rank}, 3, 3, 0] places" for rank in range(3)
    ]
    assert result.return_value == "value of rank 0"
    assert result.metrics is None
    assert result.checkpoint is None


def test_the_train_loop_runs_in_the_main_thread_of_its_process(fit: Any) -> None:
    def loop() -> int:
        signal.signal(signal.SIGUSR1, signal.SIG_DFL)  # raises in any other thread
        return os.getpid()

    assert fit(loop, workers=1).return_value != os.getpid()


def test_the_best_checkpoints_are_kept_and_hold_the_files_of_all_ranks(
    fit: Any, tmp_path: Path
) -> None:
    def loop(config: dict[str, str]) -> None:
        rank = train.get_context().get_world_rank()
        for epoch, accuracy in enumerate([0.1, 0.9, 0.5, 0.7]):
            folder = Path(config["folder"], f"{rank}-{epoch}")
            checkpoint = save(folder, **{f"shard{rank}": str(epoch)})
            train.report({"accuracy": accuracy, "rank": rank}, checkpoint=checkpoint)

    config = CheckpointConfig(num_to_keep=2, checkpoint_score_attribute="accuracy")
    result = fit(loop, {"folder": str(tmp_path)}, checkpoint_config=config)
    assert result.metrics == {"accuracy": 0.7, "rank": 0}
    assert [metrics["accuracy"] for _, metrics in result.best_checkpoints] == [0.7, 0.9]
    best = result.get_best_checkpoint("accuracy", "max")
    with best.as_directory() as folder:
        assert {path.name: path.read_text() for path in Path(folder).iterdir()} == {
            "shard0": "1",
            "shard1": "1",
        }
    assert sorted(path.name for path in Path(result.path).glob("checkpoint_*")) == [
        "checkpoint_000001",
        "checkpoint_000003",
    ]
    assert Result.from_path(result.path).metrics == result.metrics


def test_a_report_does_not_wait_for_slower_ranks(fit: Any, tmp_path: Path) -> None:
    def loop(config: dict[str, str]) -> None:
        done = Path(config["folder"], "done")
        if train.get_context().get_world_rank() == 1:
            wait_for_file(done)
        for step in range(100):
            train.report({"step": step})
        done.touch()

    assert fit(loop, {"folder": str(tmp_path)}).metrics == {"step": 99}


def test_a_report_costs_little_and_waits_for_nobody(fit: Any) -> None:
    def loop() -> tuple[float, float]:
        start, busy = time.perf_counter(), time.process_time()
        for step in range(4000):
            train.report({"step": step, "loss": 0.5})
        return 4000 / (time.perf_counter() - start), 4000 / (time.process_time() - busy)

    result = fit(loop)
    per_second, per_second_of_cpu = result.return_value
    # A machine that does much else may be slow; one that waits in each report is far slower.
    assert per_second > 200
    assert per_second_of_cpu > 2000
    assert result.metrics == {"step": 3999, "loss": 0.5}


def test_an_exception_names_its_rank_and_keeps_its_traceback(fit: Any) -> None:
    def loop() -> None:
        if train.get_context().get_world_rank() == 1:
            raise ValueError("out of data")
        signal.pause()

    with pytest.raises(WorkerGroupError) as caught:
        fit(loop)
    assert list(caught.value.worker_failures) == [1]
    assert isinstance(caught.value.worker_failures[1], ValueError)
    assert "[Rank 1] ValueError: out of data" in str(caught.value)
    assert 'raise ValueError("out of data")' in str(caught.value)


def test_a_rank_whose_process_dies_ends_the_run(fit: Any) -> None:
    def loop() -> None:
        if train.get_context().get_world_rank() == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        signal.pause()

    with pytest.raises(WorkerGroupError, match=r"\[Rank 1\] .*SIGKILL") as caught:
        fit(loop)  # rank 0 would wait for ever
    assert "Traceback" not in str(caught.value)  # of the controller, which tells nobody anything


def test_a_rank_that_returns_before_a_checkpoint_that_needs_it_is_named(
    fit: Any, tmp_path: Path
) -> None:
    def loop(config: dict[str, str]) -> None:
        train.report({})
        if train.get_context().get_world_rank() == 0:
            train.report({}, checkpoint=save(Path(config["folder"], "files"), a="1"))
            signal.pause()

    with pytest.raises(WorkerGroupError, match="Rank 1 returned after 1 reports") as caught:
        fit(loop, {"folder": str(tmp_path)})
    assert "rank 0 was in its train loop" in str(caught.value)


def serve_actor() -> Any:
    @miniray.remote
    class Sum:
        def add(self, one: int, other: int) -> int:
            return one + other

    return Sum.remote()


def serve_thread() -> Any:
    listener = socket.create_server(("127.0.0.1", 0))

    def serve() -> None:
        with listener, listener.accept()[0] as connected:
            connected.sendall(b"3")

    threading.Thread(target=serve).start()
    return listener.getsockname()


@pytest.mark.parametrize("serve", [serve_actor, serve_thread])
def test_what_a_rank_that_has_returned_left_for_the_others_lives_on(
    fit: Any, tmp_path: Path, serve: Callable[[], Any]
) -> None:
    def loop(config: dict[str, Path]) -> None:
        rank, pid = train.get_context().get_world_rank(), config["pid"]
        server = train.collective.broadcast_from_rank_zero(serve() if rank == 0 else None)
        if rank == 0:
            config["returns"].touch()
        elif rank == 2:  # returns next, and leaves nothing
            wait_for_file(config["returns"])
            pid.write_text(str(os.getpid()))
        else:
            other = int(wait_for_text(pid))
            wait_until(lambda: not is_alive(other))
            if isinstance(server, tuple):
                with socket.create_connection(server) as connected:
                    assert connected.recv(1) == b"3"
            else:
                assert miniray.get(server.add.remote(1, 2)) == 3

    fit(loop, {"pid": tmp_path / "pid", "returns": tmp_path / "returns"}, workers=3)


def test_a_train_loop_that_exits_has_failed(fit: Any) -> None:
    with pytest.raises(WorkerGroupError, match="SystemExit: 3"):
        fit(lambda: sys.exit(3), workers=1)


def test_a_failed_run_goes_on_from_its_newest_checkpoint(fit: Any, tmp_path: Path) -> None:
    def loop(config: dict[str, str]) -> list[int]:
        rank = train.get_context().get_world_rank()
        start = 0
        if (checkpoint := train.get_checkpoint()) is not None:
            with checkpoint.as_directory() as folder:
                start = int(Path(folder, "epoch").read_text()) + 1
        epochs = []
        for epoch in range(start, 4):
            epochs.append(epoch)
            folder = Path(config["folder"], f"{rank}-{epoch}-{os.getpid()}")
            saved = save(folder, epoch=str(epoch)) if rank == 0 else None
            train.report({"epoch": epoch}, checkpoint=saved)
            if epoch == 1 and rank == 1 and count_up(Path(config["folder"], "crashes")) == 1:
                wait_until(train.get_context().get_storage().records)
                os.kill(os.getpid(), signal.SIGKILL)
        return epochs

    result = fit(loop, {"folder": str(tmp_path)}, failure_config=FailureConfig(max_failures=1))
    assert result.metrics == {"epoch": 3}
    # Rank 1's last report may have died with it, so the run went on from epoch 0 or from 1.
    assert result.return_value in ([1, 2, 3], [2, 3])


def test_a_run_of_the_same_name_continues_the_older_one(fit: Any, tmp_path: Path) -> None:
    def loop(config: dict[str, str]) -> str | None:
        older = train.get_checkpoint()
        train.report({}, checkpoint=save(Path(config["folder"], str(os.getpid())), a="1"))
        return older and Path(older.path).name

    config = {"folder": str(tmp_path)}
    assert fit(loop, config, workers=1, name="again").return_value is None
    assert fit(loop, config, workers=1, name="again").return_value == "checkpoint_000000"


@pytest.mark.parametrize("again", ["run", "attempt"])
def test_a_loop_that_begins_anew_writes_over_the_checkpoints_that_it_named_before(
    fit: Any, tmp_path: Path, again: str
) -> None:
    def loop(config: dict[str, Any]) -> None:
        rank = train.get_context().get_world_rank()
        older = train.get_checkpoint()
        version = "first" if older is None else "second"
        for epoch in range(3):
            folder = Path(config["folder"], version, f"{rank}-{epoch}")
            checkpoint = save(folder, **{f"rank{rank}": version, version: ""})
            train.report({"is": version}, checkpoint, checkpoint_dir_name=f"epoch_{epoch}")
        train.get_all_reported_checkpoints()
        if older is None and config["fails"]:
            raise RuntimeError("boom")

    config = {"folder": str(tmp_path), "fails": again == "attempt"}
    options = {"name": "again", "failure_config": FailureConfig(max_failures=1)}
    result = fit(loop, config, **options)
    if again == "run":
        result = fit(loop, config, **options)
    kept = [(Path(each.path).name, metrics) for each, metrics in result.best_checkpoints]
    assert kept == [(f"epoch_{epoch}", {"is": "second"}) for epoch in range(3)]
    for checkpoint, _ in Result.from_path(result.path).best_checkpoints:
        files = {file.name: file.read_text() for file in Path(checkpoint.path).iterdir()}
        assert files == {"rank0": "second", "rank1": "second", "second": ""}


def test_a_run_that_failed_goes_on_from_its_checkpoint_when_it_is_started_again(
    fit: Any, tmp_path: Path
) -> None:
    def loop(config: dict[str, Any]) -> list[int]:
        start = 0
        if (checkpoint := train.get_checkpoint()) is not None:
            with checkpoint.as_directory() as folder:
                start = int(Path(folder, "epoch").read_text()) + 1
        for epoch in range(start, 4):
            if epoch == config["fails_at"]:
                raise ValueError("out of data")
            folder = Path(config["folder"], f"{os.getpid()}-{epoch}")
            train.report({"epoch": epoch}, checkpoint=save(folder, epoch=str(epoch)))
        return list(range(start, 4))

    config = {"folder": str(tmp_path), "fails_at": 2}
    with pytest.raises(WorkerGroupError, match="out of data"):
        fit(loop, config, workers=1, name="again")
    again = fit(loop, {**config, "fails_at": None}, workers=1, name="again")
    assert again.return_value == [2, 3]
    assert [metrics["epoch"] for _, metrics in again.best_checkpoints] == [0, 1, 2, 3]
    elsewhere = {"name": "again", "storage_path": tmp_path / "other"}
    assert fit(loop, {**config, "fails_at": None}, workers=1, **elsewhere).return_value[0] == 0


def test_a_storage_path_that_can_not_be_used_is_the_controllers_error(
    fit: Any, tmp_path: Path
) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(ControllerError) as caught:
        fit(lambda: None, storage_path=tmp_path / "file")
    text = str(caught.value)
    assert f"The storage path {tmp_path / 'file'} can't be used: NotADirectoryError" in text
    assert "Traceback" not in text  # of our own code, which says nothing more


def all_is_free() -> bool:
    """Whether nobody holds resources; Ray counts values among those of its object store."""
    free, there = miniray.available_resources(), miniray.cluster_resources()
    return all(free.get(name) == there[name] for name in there if name != "object_store_memory")


def test_after_a_run_its_workers_are_gone_and_their_resources_free(
    fit: Any, tmp_path: Path
) -> None:
    def loop(config: dict[str, str]) -> None:
        Path(config["folder"], str(os.getpid())).touch()

    wait_until(all_is_free)  # what an earlier run has held may be told late
    fit(loop, {"folder": str(tmp_path)})
    pids = [int(path.name) for path in tmp_path.iterdir() if path.name.isdigit()]
    assert len(pids) == 2
    wait_until(lambda: not any(is_alive(pid) for pid in pids), timeout=10)
    wait_until(all_is_free, timeout=10)


def test_ctrl_c_stops_the_workers(fit: Any, tmp_path: Path) -> None:
    def loop(config: dict[str, str]) -> None:
        Path(config["folder"], f"pid{os.getpid()}").touch()
        if len(list(Path(config["folder"]).glob("pid*"))) == 2:
            os.kill(int(config["driver"]), signal.SIGINT)
        signal.pause()

    with pytest.raises(KeyboardInterrupt):
        fit(loop, {"folder": str(tmp_path), "driver": str(os.getpid())})
    pids = [int(path.name.removeprefix("pid")) for path in tmp_path.glob("pid*")]
    assert len(pids) == 2
    wait_until(lambda: not any(is_alive(pid) for pid in pids), timeout=10)


def test_workers_get_their_runtime_environment(fit: Any) -> None:
    environment = {"env_vars": {"TRAIN_TEST_VARIABLE": "1"}}
    result = fit(
        lambda: os.environ["TRAIN_TEST_VARIABLE"], workers=1, worker_runtime_env=environment
    )
    assert result.return_value == "1"
    wait_until(lambda: not processes_with("TRAIN_TEST_VARIABLE", "1"), timeout=10)


def test_an_environment_of_workers_may_be_empty(fit: Any) -> None:
    assert fit(lambda: 1, workers=1, worker_runtime_env={"env_vars": {}}).return_value == 1


def test_a_callback_sees_each_report(fit: Any, tmp_path: Path) -> None:
    class Listener(train.UserCallback):
        def __init__(self, path: str) -> None:
            self.path = path

        def after_report(self, run_context: Any, metrics: Any, checkpoint: Any) -> None:
            with Path(self.path).open("a") as file:
                file.write(f"{[each['rank'] for each in metrics]}\n")

    def loop() -> None:
        for _ in range(2):
            train.report({"rank": train.get_context().get_world_rank()})

    fit(loop, callbacks=[Listener(str(tmp_path / "seen"))])
    assert (tmp_path / "seen").read_text() == "[0, 1]\n[0, 1]\n"
