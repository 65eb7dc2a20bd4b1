"""The ready callbacks, told of a run as the controller tells them."""

from __future__ import annotations

import csv
import json
import sys
import types
from typing import ClassVar

import pytest
from hypothesis import given
from hypothesis import strategies as st

from miniray.train import (
    Checkpoint,
    CSVCallback,
    JSONCallback,
    MLflowCallback,
    RunConfig,
    ScalingConfig,
    TensorBoardCallback,
)
from miniray.train.base.states import RunState
from miniray.train.callbacks import CallbackRunner, RunContext
from miniray.train.callbacks.ready import CsvFile, JsonLinesFile
from miniray.train.storage.filesystem import resolve


@pytest.fixture
def run(tmp_path):
    """Tells a callback of a run with these reports, each the metrics of every rank."""

    def tell(callback, reports, *, first=0, end=RunState.FINISHED, path=None):
        filesystem, path = resolve(path or tmp_path / "run")
        context = RunContext("run", path, RunConfig(), ScalingConfig(), filesystem)
        runner = CallbackRunner([callback], context)
        runner.start()
        for number, metrics in enumerate(reports, first):
            checkpoint = Checkpoint(f"{path}/checkpoint_{number:06}") if number % 2 else None
            runner.tell_report(number, metrics, checkpoint)
        if end is RunState.ERRORED:
            runner.tell("after_exception", {1: ValueError("boom")})
        runner.end(end, "boom" if end is RunState.ERRORED else None)

    return tell


def rows_of(path):
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


def test_csv_gets_a_column_when_a_metric_appears(run, tmp_path):
    path = tmp_path / "metrics.csv"
    run(CSVCallback(path), [[{"loss": 0.5}], [{"loss": 0.25, "eval": {"accuracy": 1}}]])
    run(CSVCallback(path), [[{"lr": 0.1}]], first=2)
    rows = rows_of(path)
    assert [row["number"] for row in rows] == ["0", "1", "2"]
    assert [row["loss"] for row in rows] == ["0.5", "0.25", ""]
    assert [row["eval/accuracy"] for row in rows] == ["", "1", ""]
    assert [row["lr"] for row in rows] == ["", "", "0.1"]
    assert [row["checkpoint"] for row in rows] == ["", "checkpoint_000001", ""]


def test_json_lines_hold_what_was_reported(run, tmp_path):
    path = tmp_path / "folder" / "metrics.jsonl"
    run(JSONCallback(path, all_ranks=True), [[{"loss": 1, "deep": {"a": [1]}}, {"loss": 2}]])
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    assert [(row["rank"], row["metrics"]) for row in rows] == [
        (0, {"loss": 1, "deep": {"a": [1]}}),
        (1, {"loss": 2}),
    ]


def test_ranks_without_a_report_have_no_row(run, tmp_path):
    alone, every = tmp_path / "alone.jsonl", tmp_path / "every.jsonl"
    for path, all_ranks in ((alone, False), (every, True)):
        run(JSONCallback(path, all_ranks=all_ranks), [[{}, {"loss": 2}]])
    assert alone.read_text() == ""
    assert [json.loads(line)["rank"] for line in every.read_text().splitlines()] == [1]


@pytest.mark.parametrize("kind", [JsonLinesFile, CsvFile])
@pytest.mark.parametrize("half", ["1,half of", "x" * 10_000])
def test_half_a_row_of_a_killed_process_is_removed(kind, half, tmp_path):
    path = tmp_path / "file"
    for value in ("first", "a line\nand \\ more"):
        file = kind(path)
        file.append([{"a": value}])
        file.close()
        with path.open("a") as broken:
            broken.write(half)
    file = kind(path)
    file.append([{"a": "last", "b": 1}])
    file.close()
    lines = path.read_text().splitlines()
    assert len(lines) == (4 if kind is CsvFile else 3)
    assert half not in path.read_text()


@given(rows=st.lists(st.dictionaries(st.sampled_from("abcd"), st.integers()), max_size=8))
def test_a_csv_file_holds_every_value_of_every_row(rows, tmp_path_factory):
    path = tmp_path_factory.mktemp("csv") / "file.csv"
    file = CsvFile(path)
    rows = [{"n": number, **row} for number, row in enumerate(rows)]
    file.append(rows)
    file.close()
    found = [{key: int(value) for key, value in row.items() if value} for row in rows_of(path)]
    assert found == rows


@pytest.mark.parametrize("kind", [CSVCallback, JSONCallback])
def test_a_file_that_can_not_be_written_is_refused_at_once(kind, tmp_path):
    with pytest.raises(ValueError, match=f"{kind.__name__}.*must be a local path"):
        kind("s3://bucket/metrics")
    with pytest.raises(ValueError, match="is a folder"):
        kind(tmp_path)


class FakeWriter:
    """What TensorBoardCallback uses of a SummaryWriter."""

    made: ClassVar[list] = []

    def __init__(self, folder, flush_secs):
        self.folder, self.events, self.closed = folder, [], False
        FakeWriter.made.append(self)

    def add_scalar(self, key, value, step):
        self.events.append((key, value, step))

    def add_text(self, key, text, step):
        self.events.append((key, text, step))

    def close(self):
        self.closed = True


@pytest.fixture
def writer(monkeypatch):
    """A stand-in for tensorboardX."""
    module = types.ModuleType("tensorboardX")
    module.SummaryWriter = FakeWriter
    module.__spec__ = types.SimpleNamespace()
    monkeypatch.setitem(sys.modules, "tensorboardX", module)
    monkeypatch.setattr(FakeWriter, "made", [])
    return FakeWriter.made


def test_tensorboard_gets_the_numbers_of_rank_0(run, writer, tmp_path):
    metrics = {"loss": 0.5, "name": "x", "best": True, "eval": {"n": 3}}
    run(TensorBoardCallback(), [[metrics, {"loss": 9}]], first=4, end=RunState.ERRORED)
    assert writer[0].folder == str(tmp_path / "run" / "tensorboard")
    assert writer[0].events == [
        ("loss", 0.5, 4),
        ("eval/n", 3.0, 4),
        ("failure", "rank 1: ValueError('boom')", 4),
    ]
    assert writer[0].closed


def test_tensorboard_counts_the_steps_of_a_metric(run, writer, tmp_path):
    run(TensorBoardCallback(tmp_path / "events", step_key="step"), [[{"step": 70, "loss": 1}]])
    assert writer[0].folder == str(tmp_path / "events")
    assert ("loss", 1.0, 70) in writer[0].events
    with pytest.raises(Exception, match="needs a whole number of this name"):
        run(TensorBoardCallback(step_key="step"), [[{"loss": 1}]])


def test_tensorboard_wants_to_know_where_if_the_run_is_not_local(run, writer):
    with pytest.raises(Exception, match="Say where to write events"):
        run(TensorBoardCallback(), [], path="memory://bucket/run")


@pytest.mark.parametrize(
    ("kind", "install"), [(TensorBoardCallback, "tensorboardX"), (MLflowCallback, "mlflow")]
)
def test_a_library_that_is_missing_is_named_when_the_callback_is_made(kind, install, monkeypatch):
    for module in ("tensorboardX", "tensorboard", "mlflow"):
        monkeypatch.setitem(sys.modules, module, None)
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(ImportError, match=f"{kind.__name__} needs .*pip install {install}"):
        kind()
