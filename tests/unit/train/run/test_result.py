from __future__ import annotations

import importlib.util
import sys

import pytest

from miniray.train import Checkpoint, Result
from miniray.train.controller.feed import Row
from miniray.train.run.display import format_row
from miniray.train.storage.metrics_log import MetricsLog, read_rows
from miniray.train.storage.storage import RunStorage, default_checkpoint_name


@pytest.fixture
def run_folder(tmp_path):
    """The folder of a run with three checkpoints."""
    storage = RunStorage(tmp_path, "run")
    storage.write_run_facts({"token": "t", "state": "FINISHED"})
    log = MetricsLog(storage)
    (tmp_path / "files").mkdir()
    (tmp_path / "files" / "model").write_text("weights")
    for number, loss in enumerate([0.5, 0.1, 0.3]):
        name = default_checkpoint_name(number)
        metrics = {"eval": {"loss": loss}, "epoch": number}
        upload = storage.upload(Checkpoint.from_directory(tmp_path / "files"), name)
        storage.commit(number, [upload], metrics)
        log.append([{"number": number, "time": 0.0, "checkpoint": name, "metrics": metrics}])
    log.close()
    return tmp_path / "run"


def test_the_results_of_a_folder_are_read_back(run_folder):
    result = Result.from_path(run_folder)
    assert result.metrics == {"eval": {"loss": 0.3}, "epoch": 2}
    assert result.checkpoint.path == f"{run_folder}/checkpoint_000002"
    assert [metrics["epoch"] for _, metrics in result.best_checkpoints] == [0, 1, 2]
    assert result.error is None
    assert result.path == str(run_folder)
    assert result.filesystem.get_file_info(result.path).type.name == "Directory"


def test_a_result_can_be_made_by_hand_as_for_a_test(run_folder):
    best = Checkpoint(f"{run_folder}/checkpoint_000001")
    result = Result({"loss": 0.1}, best, None, str(run_folder), [(best, {"loss": 0.1})])
    assert result.get_best_checkpoint("loss", "min") == best
    assert result.filesystem.get_file_info(result.path).type.name == "Directory"
    assert "checkpoint_000001" in str(result)
    assert Result(metrics=None, checkpoint=None, error=None, path="/run").best_checkpoints == []


def test_the_best_checkpoint_of_any_metric_is_found(run_folder):
    result = Result.from_path(f"{run_folder}/")
    assert result.get_best_checkpoint("eval/loss", "min").path.endswith("checkpoint_000001")
    assert result.get_best_checkpoint("eval/loss", "max").path.endswith("checkpoint_000000")
    with pytest.raises(ValueError, match="'max' or 'min'"):
        result.get_best_checkpoint("epoch", "best")
    with pytest.raises(RuntimeError, match="There are: epoch, eval/loss"):
        result.get_best_checkpoint("accuracy", "max")


def test_a_failed_run_reads_back_its_error(run_folder):
    storage = RunStorage(run_folder.parent, "run")
    storage.write_run_facts({"token": "t", "state": "ERRORED", "error": "[Rank 1] boom"})
    assert "[Rank 1] boom" in str(Result.from_path(run_folder).error)


def test_a_folder_without_a_run_is_refused(tmp_path):
    with pytest.raises(RuntimeError, match=r"no run\.json"):
        Result.from_path(tmp_path)


def test_a_folder_that_does_not_exist_is_told_as_that(tmp_path):
    with pytest.raises(RuntimeError, match=r"/missing does not exist") as caught:
        Result.from_path(tmp_path / "missing")
    assert "run.json" not in str(caught.value)
    with pytest.raises(RuntimeError, match=r"/missing does not exist"):
        Result.from_path("memory://missing")


def test_a_printed_result_can_be_read_by_a_person(run_folder):
    text = str(Result.from_path(run_folder))
    assert text.splitlines() == [
        "Result of a training run",
        f"  path: {run_folder}",
        "  metrics:",
        "    eval/loss: 0.3",
        "    epoch: 2",
        f"  checkpoint: {run_folder}/checkpoint_000002 (the latest)",
        "  kept: checkpoint_000000, checkpoint_000001, checkpoint_000002",
    ]


def test_a_printed_result_is_short_also_if_there_is_much_in_it():
    kept = [(Checkpoint(f"/runs/a/{number}"), {}) for number in range(7)]
    metrics = {"curve": list(range(20_000))}
    text = str(Result(metrics, kept[-1][0], None, "/runs/a", kept, return_value=metrics))
    assert len(text) < 800
    assert "  kept: 2 others, then 2, 3, 4, 5, 6" in text.splitlines()
    row = format_row(Row(0, metrics, None))
    assert row.startswith("report 0: curve=[0, 1, 2,")
    assert len(row) < 300


def test_a_printed_result_names_no_kept_checkpoints_where_none_are_known():
    text = str(Result({"loss": 0.1}, Checkpoint("/runs/a/best"), None, "/runs/a"))
    assert text.splitlines()[-1] == "  checkpoint: /runs/a/best (the latest)"


def test_a_folder_directly_below_the_root_is_a_path_like_any_other(monkeypatch):
    seen = []
    monkeypatch.setattr(RunStorage, "exists", lambda self: seen.append((self.path, self.name)))
    for path in ("/run", "/run/", "file:///run"):
        with pytest.raises(RuntimeError, match=r"^/run "):
            Result.from_path(path)
    assert seen == [("/run", "run")] * 3


def test_the_results_of_a_url_are_read_back(run_folder):
    result = Result.from_path(f"file://{run_folder}")
    assert result.metrics == {"eval": {"loss": 0.3}, "epoch": 2}


def test_without_pandas_a_dataframe_is_refused_with_the_fix(run_folder, monkeypatch):
    monkeypatch.setitem(sys.modules, "pandas", None)
    with pytest.raises(ImportError, match="pip install pandas"):
        Result.from_path(run_folder).metrics_dataframe  # noqa: B018


@pytest.mark.skipif(importlib.util.find_spec("pandas") is None, reason="pandas is not installed")
def test_the_dataframe_has_a_row_for_each_report(run_folder):
    frame = Result.from_path(run_folder).metrics_dataframe
    assert list(frame["eval/loss"]) == [0.5, 0.1, 0.3]


def test_half_a_line_at_the_end_of_the_metrics_is_left_out(run_folder):
    with (run_folder / "metrics.jsonl").open("a") as file:
        file.write('{"number": 3, "met')
    assert len(read_rows(RunStorage(run_folder.parent, "run"))) == 3


def test_metrics_reach_a_filesystem_that_can_not_append(tmp_path):
    import fsspec

    options = {"auto_mkdir": True}
    remote = fsspec.filesystem(
        "dir", path=str(tmp_path), target_protocol="file", target_options=options
    )
    storage = RunStorage("runs", "run", remote)
    for number in range(3):  # each log continues what the one before it left
        log = MetricsLog(storage)
        log.append([{"number": number, "metrics": {"loss": number}}])
        assert [row["number"] for row in read_rows(storage)] == list(range(number + 1))
        if number < 2:
            log.close()
    assert storage.files.read("metrics.csv") == "number,loss\n0,0\n1,1\n"
    log.close()
    assert storage.files.names(".metrics") == set()
    assert len((storage.files.read("metrics.jsonl") or "").splitlines()) == 3


def test_rows_are_not_written_again_with_each_row(tmp_path):
    import fsspec

    remote = fsspec.filesystem("dir", path=str(tmp_path), target_protocol="file")
    storage = RunStorage("runs", "run", remote)
    log = MetricsLog(storage)
    for number in range(100):
        log.append([{"number": number, "metrics": {}}])
    log.sync()
    pieces = sorted(storage.files.names(".metrics"))
    assert pieces == ["000000000000.jsonl", "000000000001.jsonl"]  # the first at once
    assert len(read_rows(storage)) == 100


def test_a_row_after_half_a_line_is_kept(run_folder):
    with (run_folder / "metrics.jsonl").open("a") as file:
        file.write('{"number": 3, "met')
    storage = RunStorage(run_folder.parent, "run")
    MetricsLog(storage).append([{"number": 4, "metrics": {"loss": 1}}])
    assert [row["number"] for row in read_rows(storage)] == [0, 1, 2, 4]


def test_a_run_that_was_stopped_has_an_error_that_says_so(run_folder):
    storage = RunStorage(run_folder.parent, "run")
    storage.write_run_facts({"token": "t", "state": "ABORTED"})
    assert "was stopped before it had finished" in str(Result.from_path(run_folder).error)


@pytest.mark.parametrize("state", ["INITIALIZING", "RUNNING"])
def test_a_run_that_has_not_ended_says_so(tmp_path, state):
    storage = RunStorage(tmp_path, "run")
    storage.write_run_facts({"token": "a-1", "run_id": "a", "state": state})
    result = Result.from_path(tmp_path / "run")
    assert result.error is None
    assert f"state: {state} when this was last written" in str(result)
