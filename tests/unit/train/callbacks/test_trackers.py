"""The callbacks for TensorBoard and MLflow with the libraries themselves."""

from __future__ import annotations

import importlib.util
from typing import TYPE_CHECKING, Any

import pytest

from miniray.train import (
    Checkpoint,
    MLflowCallback,
    RunConfig,
    ScalingConfig,
    TensorBoardCallback,
)
from miniray.train.base.states import RunState
from miniray.train.callbacks import CallbackRunner, RunContext
from miniray.train.storage.filesystem import resolve

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(180),
    pytest.mark.skipif(
        importlib.util.find_spec("mlflow") is None, reason="they come with the extra 'trackers'"
    ),
]


def start(callback: Any, folder: Path) -> CallbackRunner:
    filesystem, path = resolve(folder)
    context = RunContext("my run", path, RunConfig(), ScalingConfig(num_workers=2), filesystem)
    runner = CallbackRunner([callback], context)
    runner.start()
    return runner


def test_tensorboard_writes_a_file_that_holds_the_numbers(tmp_path: Path) -> None:
    from tensorboardX.proto.event_pb2 import Event

    runner = start(TensorBoardCallback(), tmp_path)
    for number in range(3):
        runner.tell_report(number, [{"loss": 1 / (number + 1), "eval": {"n": number}}], None)
    runner.end(RunState.FINISHED, None)
    (file,) = (tmp_path / "tensorboard").iterdir()
    data, events = file.read_bytes(), []
    while data:  # length, its checksum, the event, its checksum
        length = int.from_bytes(data[:8], "little")
        events.append(Event.FromString(data[12 : 12 + length]))
        data = data[16 + length :]
    found = [
        (value.tag, event.step, round(value.simple_value, 4))
        for event in events
        for value in event.summary.value
    ]
    assert found == [
        pair for n in range(3) for pair in (("loss", n, round(1 / (n + 1), 4)), ("eval/n", n, n))
    ]


def test_mlflow_has_a_run_that_goes_on(tmp_path: Path, monkeypatch: Any) -> None:
    import mlflow

    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    uri = (tmp_path / "mlruns").as_uri()
    folder = tmp_path / "it's a run"
    for first, end in ((0, RunState.ERRORED), (2, RunState.FINISHED)):
        callback = MLflowCallback(uri, "experiment", params={"lr": 0.1}, tags={"team": "a"})
        runner = start(callback, folder)
        for number in range(first, first + 2):
            checkpoint = Checkpoint(folder / f"checkpoint_{number}")
            runner.tell_report(number, [{"loss": 10 - number, "name": "x"}], checkpoint)
        runner.end(end, "boom" if end is RunState.ERRORED else None)
    client = mlflow.MlflowClient(tracking_uri=uri)
    experiment = client.get_experiment_by_name("experiment")
    (run,) = client.search_runs([experiment.experiment_id])
    assert run.info.status == "FINISHED"
    assert run.info.run_name == "my run"
    assert run.data.params["lr"] == "0.1"
    assert run.data.params["num_workers"] == "2"
    assert run.data.tags["team"] == "a"
    assert run.data.tags["miniray.error"] == "boom"
    assert run.data.tags["miniray.checkpoint"].endswith("checkpoint_3")
    history = client.get_metric_history(run.info.run_id, "loss")
    assert [(each.step, each.value) for each in history] == [(0, 10), (1, 9), (2, 8), (3, 7)]
