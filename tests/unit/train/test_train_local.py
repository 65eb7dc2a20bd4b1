"""Local mode: the loop runs in this process, with the controller in a thread beside it."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import threading
from pathlib import Path

import pyarrow
import pytest

import miniray
from miniray import train
from miniray.train import (
    Backend,
    Callback,
    CheckpointConfig,
    ControllerError,
    DataParallelTrainer,
    FailureConfig,
    Result,
    RunConfig,
    ScalingConfig,
    WorkerGroupError,
)
from miniray.train.callbacks import ProgressCallback
from miniray.train.controller.attempt import Attempt
from miniray.train.data_parallel_trainer import LOCAL_VARIABLE, is_local
from miniray.train.storage.storage import RunStorage


@pytest.fixture
def fit(tmp_path):
    """Runs a train loop in this process."""

    def run(loop, config=None, **run_options):
        run_options.setdefault("storage_path", tmp_path / "runs")
        return DataParallelTrainer(
            loop,
            train_loop_config=config,
            scaling_config=ScalingConfig(num_workers=0),
            run_config=RunConfig(**run_options),
        ).fit()

    return run


def save(folder, text):
    folder.mkdir()
    (folder / "model").write_text(text)
    return train.Checkpoint.from_directory(folder)


def test_the_loop_runs_in_the_thread_that_called_fit_and_no_cluster_is_started(fit):
    place = fit(lambda: [os.getpid(), threading.get_ident()]).return_value
    assert place == [os.getpid(), threading.get_ident()]
    assert not miniray.is_initialized()


def test_the_loop_reports_and_reads_as_on_a_worker(fit, tmp_path):
    def loop(config):
        context = train.get_context()
        assert train.get_checkpoint() is None
        for epoch in range(3):
            train.report({"epoch": epoch}, checkpoint=save(tmp_path / str(epoch), f"{epoch}"))
        with train.get_checkpoint().as_directory() as folder:
            assert os.listdir(folder) == ["model"]
        train.report({"epoch": 3, "lr": config["lr"]})
        ranks = [context.get_world_rank(), context.get_local_rank(), context.get_node_rank()]
        sizes = [context.get_world_size(), context.get_local_world_size()]
        return [*ranks, *sizes, context.get_experiment_name()]

    result = fit(loop, {"lr": 0.1}, name="mine")
    assert result.return_value == [0, 0, 0, 1, 1, "mine"]
    assert result.metrics == {"epoch": 3, "lr": 0.1}
    assert result.checkpoint.path.endswith("checkpoint_000002")
    assert len(result.best_checkpoints) == 3
    assert Result.from_path(result.path).metrics == result.metrics


@pytest.mark.parametrize(("keep", "best"), [(1, [1]), (2, [2, 1]), (None, [3, 2, 1])])
def test_of_the_best_checkpoints_there_are_as_many_as_are_kept(fit, tmp_path, keep, best):
    def loop():
        for epoch, loss in enumerate([3, 1, 2]):
            train.report({"loss": loss}, checkpoint=save(tmp_path / str(epoch), "x"))

    rule = CheckpointConfig(keep, checkpoint_score_attribute="loss", checkpoint_score_order="min")
    result = fit(loop, checkpoint_config=rule)
    for found in (result, Result.from_path(result.path)):
        assert [metrics["loss"] for _, metrics in found.best_checkpoints] == best
        assert found.checkpoint.path.endswith("checkpoint_000002")  # the latest is kept beside them
        assert os.listdir(found.checkpoint.path) == ["model"]


def test_a_run_goes_on_from_its_newest_checkpoint(fit, tmp_path):
    def loop():
        begin = train.get_checkpoint()
        train.report({"n": 1}, checkpoint=save(tmp_path / f"from-{begin is not None}", "x"))
        return begin is not None

    assert [fit(loop, name="mine").return_value for _ in range(2)] == [False, True]


def test_runs_of_several_threads_do_not_mix_in_one_process(fit):
    runs, refused = threading.Event(), threading.Event()

    def loop():
        runs.set()
        assert refused.wait(60)
        train.report({"name": train.get_context().get_experiment_name()})

    results = []
    first = threading.Thread(target=lambda: results.append(fit(loop, name="first")))
    first.start()
    assert runs.wait(60)
    with pytest.raises(RuntimeError, match=r"second can't begin .* another thread .*num_workers=1"):
        fit(loop, name="second")
    refused.set()
    first.join()
    assert results[0].metrics == {"name": "first"}
    assert fit(loop, name="second").metrics == {"name": "second"}


def test_a_train_loop_that_fits_another_one_goes_on_with_its_own_session_and_data(tmp_path):
    def fit_on(rows, loop, name):
        return DataParallelTrainer(
            loop,
            scaling_config=ScalingConfig(num_workers=0),
            run_config=RunConfig(storage_path=tmp_path, name=name),
            datasets={"train": pyarrow.table({"rows": rows})},
        ).fit()

    def rows():
        batch = next(iter(train.get_dataset_shard("train").iter_batches(batch_size=9)))
        return sorted(batch["rows"].tolist())

    def inner():
        train.report({"inner": rows()})

    def outer():
        found = fit_on([1, 2], inner, "inner").metrics
        name = train.get_context().get_experiment_name()
        train.report({**found, "outer": rows(), "name": name})

    result = fit_on([3], outer, "outer")
    assert result.metrics == {"inner": [1, 2], "outer": [3], "name": "outer"}


@pytest.mark.parametrize("same", ["trainer", "config"])
def test_a_run_without_a_name_goes_on_when_it_is_fitted_again(tmp_path, same):
    def loop():
        begun = train.get_checkpoint() is not None
        train.report({}, checkpoint=save(tmp_path / str(begun), "x"))
        return begun

    config = RunConfig(storage_path=tmp_path / "runs")

    def make():
        scaling = ScalingConfig(num_workers=0)
        return DataParallelTrainer(loop, scaling_config=scaling, run_config=config)

    first = make()
    second = first if same == "trainer" else make()
    results = [first.fit(), second.fit()]
    assert [result.return_value for result in results] == [False, True]
    assert results[0].path == results[1].path == f"{tmp_path}/runs/{config.name}"


def test_a_loop_does_not_go_on_without_a_checkpoint_that_could_not_be_uploaded(fit, tmp_path):
    def loop():
        checkpoint = save(tmp_path / "a", "a")
        shutil.rmtree(tmp_path / "a")
        with contextlib.suppress(FileNotFoundError):
            train.report({"epoch": 0}, checkpoint)
        save(tmp_path / "a", "a")
        train.report({"epoch": 0}, checkpoint)  # again
        shutil.rmtree(tmp_path / "a")
        with contextlib.suppress(FileNotFoundError):
            train.report({"epoch": 1}, checkpoint)
        train.report({"epoch": 2})

    with pytest.raises(WorkerGroupError) as caught:
        fit(loop, name="mine")
    assert isinstance(caught.value.worker_failures[0], FileNotFoundError)
    result = Result.from_path(tmp_path / "runs" / "mine")
    assert result.metrics == {"epoch": 0}
    assert [metrics["epoch"] for _, metrics in result.best_checkpoints] == [0]


def test_a_loop_that_fails_is_not_started_again(fit):
    def loop():
        calls.append(1)
        raise ValueError("boom")

    calls = []
    with pytest.raises(WorkerGroupError, match="boom"):
        fit(loop, failure_config=FailureConfig(max_failures=1))
    assert calls == [1]


def test_an_exception_in_the_loop_is_the_cause_of_the_runs(fit):
    class Special(Exception):
        pass

    def loop():
        train.report({"n": 1})
        raise Special("boom")

    with pytest.raises(WorkerGroupError, match=r"\[Rank 0\].*boom") as caught:
        fit(loop)
    assert isinstance(caught.value.__cause__, Special)  # with the frames, for a debugger
    assert caught.value.__cause__.__traceback__ is not None


def test_exit_in_the_loop_is_a_failure_as_on_a_worker(fit):
    with pytest.raises(WorkerGroupError, match="SystemExit: 3"):
        fit(lambda: exit(3))


def test_ctrl_c_in_the_loop_stops_the_run(fit, tmp_path):
    def loop():
        train.report({"n": 1})
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        fit(loop, name="mine")
    with pytest.raises(RuntimeError, match="only inside a train loop"):
        train.get_context()
    facts = json.loads((tmp_path / "runs" / "mine" / "run.json").read_text())
    assert facts["state"] == "ABORTED"


@pytest.fixture
def interrupt():
    """Ctrl-C, whoever has started this process."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield lambda: signal.pthread_kill(threading.main_thread().ident, signal.SIGINT)
    signal.signal(signal.SIGINT, before)


@pytest.fixture
def stopping(monkeypatch):
    """Set when a run waits for its uploads before it stops."""
    stops, drain = threading.Event(), Attempt.drain

    async def drained(attempt):
        stops.set()
        await drain(attempt)

    monkeypatch.setattr(Attempt, "drain", drained)
    return stops


def upload_by_hand(checkpoint, name):
    place = train.get_context().get_storage().build_checkpoint_path_from_name(name)
    shutil.copytree(checkpoint.path, place)
    return train.Checkpoint(place)


def left_by(run):
    """How a run that was stopped has ended, and what there is of its checkpoints."""
    result = Result.from_path(run)
    assert "was stopped" in str(result.error)
    names = sorted(path.name for path in run.glob("checkpoint_*"))
    return names, [checkpoint.path.rpartition("/")[2] for checkpoint, _ in result.best_checkpoints]


def test_ctrl_c_cuts_an_upload_of_the_train_loop_off(fit, tmp_path, interrupt):
    def upload(checkpoint, name):
        upload_by_hand(checkpoint, name)
        interrupt()
        pytest.fail("the upload went on")

    def loop():
        train.report({}, save(tmp_path / "a", "a"), checkpoint_upload_fn=upload)

    with pytest.raises(KeyboardInterrupt):
        fit(loop, name="mine")
    assert left_by(tmp_path / "runs" / "mine") == ([], [])


def test_ctrl_c_lets_an_upload_in_the_background_end(
    fit, tmp_path, interrupt, stopping, monkeypatch, caplog
):
    monkeypatch.setattr("miniray.train.run.local.TELL_AFTER", 0)
    begun = threading.Event()

    def upload(checkpoint, name):
        begun.set()
        assert stopping.wait(30)
        return upload_by_hand(checkpoint, name)  # asks the session

    def loop():
        mode = train.CheckpointUploadMode.ASYNC
        for name in "ab":
            checkpoint = save(tmp_path / name, name)
            train.report({}, checkpoint, checkpoint_upload_mode=mode, checkpoint_upload_fn=upload)
        assert begun.wait(30)
        interrupt()
        pytest.fail("the loop went on")

    with pytest.raises(KeyboardInterrupt):
        fit(loop, name="mine")
    assert left_by(tmp_path / "runs" / "mine") == (["checkpoint_000000"], ["checkpoint_000000"])
    assert "Press Ctrl-C again to stop at once" in caplog.text


def test_ctrl_c_twice_does_not_wait_for_an_upload_in_the_background(
    fit, tmp_path, interrupt, stopping
):
    begun, over = threading.Event(), threading.Event()

    def upload(checkpoint, name):
        upload_by_hand(checkpoint, name)
        begun.set()
        assert stopping.wait(30)
        interrupt()
        over.wait(30)
        raise OSError("too late")

    def loop():
        mode = train.CheckpointUploadMode.ASYNC
        checkpoint = save(tmp_path / "a", "a")
        train.report({}, checkpoint, checkpoint_upload_mode=mode, checkpoint_upload_fn=upload)
        assert begun.wait(30)
        interrupt()

    with pytest.raises(KeyboardInterrupt):
        fit(loop, name="mine")
    assert not over.is_set()
    over.set()
    assert left_by(tmp_path / "runs" / "mine") == ([], [])


def test_a_failure_of_the_controller_ends_a_loop_that_reports(fit):
    class Broken(Callback):
        def after_report(self, run_context, metrics, checkpoint):
            failed.set()
            raise ZeroDivisionError

    def loop():
        train.report({"n": 0})
        assert failed.wait(30)
        while True:
            train.report({"n": 1})

    failed = threading.Event()
    with pytest.raises(ControllerError) as caught:
        fit(loop, callbacks=[Broken()])
    assert isinstance(caught.value.controller_failure.cause, ZeroDivisionError)


def test_a_run_that_has_failed_has_no_upload_left_that_goes_on(fit, tmp_path):
    begun, failed, uploaded = threading.Event(), threading.Event(), threading.Event()

    def slow(checkpoint, name):
        begun.set()
        assert failed.wait(30)
        uploaded.set()
        raise OSError("no room")

    def loop():
        mode = train.CheckpointUploadMode.ASYNC
        folder = save(tmp_path / "a", "a")
        train.report({}, folder, checkpoint_upload_mode=mode, checkpoint_upload_fn=slow)
        assert begun.wait(30)
        failed.set()
        raise ValueError("once")

    with pytest.raises(WorkerGroupError):
        fit(loop)
    assert uploaded.is_set()


def test_collective_calls_of_one_rank_return_at_once(fit):
    def loop():
        train.collective.barrier()
        return train.collective.broadcast_from_rank_zero({"a": 1})

    assert fit(loop).return_value == {"a": 1}


def test_the_loop_reads_the_whole_dataset(tmp_path):
    pyarrow = pytest.importorskip("pyarrow")

    def loop():
        shard = train.get_dataset_shard("train")
        return sorted(int(n) for batch in shard.iter_batches(batch_size=2) for n in batch["n"])

    result = DataParallelTrainer(
        loop,
        scaling_config=ScalingConfig(num_workers=0),
        run_config=RunConfig(storage_path=tmp_path),
        datasets={"train": pyarrow.table({"n": list(range(5))})},
    ).fit()
    assert result.return_value == [0, 1, 2, 3, 4]
    with pytest.raises(RuntimeError, match="only inside a train loop"):
        train.get_dataset_shard("train")


def test_the_storage_may_be_in_memory(fit, tmp_path):
    def loop():
        train.report({"n": 1}, save(tmp_path / "a", "a"))

    result = fit(loop, storage_path=f"memory://{tmp_path.name}", name="mine")
    with result.checkpoint.as_directory() as folder:
        assert Path(folder, "model").read_text() == "a"
    assert Result.from_path(f"memory://{tmp_path.name}/mine").metrics == {"n": 1}


def test_what_a_run_leaves_is_what_others_leave_without_the_output_of_workers(fit):
    path = Path(fit(lambda: train.report({"n": 1})).path)
    left = {"config.json", "metrics.csv", "metrics.jsonl", "run.json"}
    assert {each.name for each in path.iterdir() if not each.name.startswith(".")} == left


def test_the_display_knows_how_far_the_run_goes(fit, capsys, monkeypatch):
    monkeypatch.setattr("miniray.train.run.display.ProgressMeter.is_due", lambda *_: True)
    fit(
        lambda: [train.report({"step": n}) for n in range(3)],
        callbacks=[ProgressCallback(total_steps=3)],
    )
    assert "step 2/3" in capsys.readouterr().out


def test_a_storage_that_can_not_be_used_fails_before_the_loop(fit, tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(ControllerError):
        fit(lambda: pytest.fail("the loop ran"), storage_path=tmp_path / "file")


def threads_of_runs():
    return {each.name for each in threading.enumerate() if each.name.startswith("train-")}


def test_no_thread_is_left_when_a_run_is_over(fit):
    fit(lambda: train.report({"n": 1}))
    assert not threads_of_runs()


def test_a_run_whose_storage_the_loop_can_not_read_does_not_go_on(fit, tmp_path, monkeypatch):
    def facts_in_threads(storage):
        if threading.current_thread() is threading.main_thread():
            raise PermissionError("403 Forbidden")
        return facts(storage)

    facts = RunStorage.run_facts
    monkeypatch.setattr(RunStorage, "run_facts", facts_in_threads)
    with pytest.raises(PermissionError, match="403"):
        fit(lambda: pytest.fail("the loop ran"), name="mine")
    assert not threads_of_runs()
    assert json.loads((tmp_path / "runs/mine/run.json").read_text())["state"] == "ABORTED"


def test_the_variable_makes_runs_local(tmp_path, monkeypatch):
    monkeypatch.setenv(LOCAL_VARIABLE, "1")
    result = DataParallelTrainer(
        lambda: [train.get_context().get_world_size(), os.getpid()],
        scaling_config=ScalingConfig(num_workers=4, use_gpu=True),
        run_config=RunConfig(storage_path=tmp_path),
    ).fit()
    assert result.return_value == [1, os.getpid()]


def test_one_worker_is_a_worker(monkeypatch):
    monkeypatch.delenv(LOCAL_VARIABLE, raising=False)
    assert not is_local(ScalingConfig(num_workers=1))
    assert is_local(ScalingConfig(num_workers=0))
    monkeypatch.setenv(LOCAL_VARIABLE, "0")
    assert not is_local(ScalingConfig())


def test_the_variable_is_0_or_1(monkeypatch):
    monkeypatch.setenv(LOCAL_VARIABLE, "maybe")
    with pytest.raises(ValueError, match="MINIRAY_TRAIN_LOCAL must be 0 or 1"):
        is_local(ScalingConfig())


@pytest.mark.parametrize("fails", ["join", "loop"])
def test_a_backend_leaves_the_process_as_it_was_also_after_a_failure(tmp_path, fails):
    left = []

    class Watched(Backend):
        def join_local(self, config):
            if fails == "join":
                raise ZeroDivisionError
            return super().join_local(config)

        def leave_local(self):
            left.append(fails)

    class Config(train.BackendConfig):
        def make_backend(self):
            return Watched()

    trainer = DataParallelTrainer(
        lambda: 1 / 0,
        backend_config=Config(),
        scaling_config=ScalingConfig(num_workers=0),
        run_config=RunConfig(storage_path=tmp_path),
    )
    with pytest.raises((WorkerGroupError, ZeroDivisionError)):
        trainer.fit()
    assert left == [fails]


def test_a_return_value_that_can_not_be_sent_is_told_as_that(fit):
    with pytest.raises(WorkerGroupError, match=r"what the train loop returned.*cannot be pickled"):
        fit(lambda: threading.Lock())
