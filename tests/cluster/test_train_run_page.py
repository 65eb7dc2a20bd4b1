"""Train runs as somebody sees them who looks from outside: while they go on, and afterwards."""

from __future__ import annotations

import concurrent.futures
import contextlib
import re
import subprocess
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from cluster_helpers import count_up, wait_until
from prometheus_client.parser import text_string_to_metric_families
from running_cluster import running_cluster

from miniray import train
from miniray.common.runtime import current_runtime
from miniray.logs.log_files import LogQuery
from miniray.metrics.text import text
from miniray.train import Checkpoint, FailureConfig, WorkerGroupError
from miniray.train.run.page import RunPage, ended, listed
from miniray.util.logs import logs, select_logs

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from miniray.cluster_utils import Cluster

pytestmark = [pytest.mark.usefixtures("nodes"), pytest.mark.engine("miniray")]


@pytest.fixture(scope="module")
def nodes(session_root: Path) -> Iterator[Cluster]:
    """Two nodes, so that a rank and its controller may be apart from who looks."""
    with running_cluster({"num_cpus": 1}) as cluster:
        cluster.add_node(num_cpus=2)
        yield cluster


@pytest.fixture
def row(tmp_path: Path) -> Callable[[], dict[str, Any]]:
    """Waits for the run below the test's folder to be listed; returns its row."""

    def find() -> dict[str, Any]:
        runs = listed(current_runtime().head.listing("runs"))
        return next((row for row in runs if row["path"].startswith(str(tmp_path))), {})

    def wait() -> dict[str, Any]:
        wait_until(find)
        return find()

    return wait


@pytest.fixture
def running(fit: Any, tmp_path: Path) -> Iterator[Callable[..., Any]]:
    """Begins a run in a thread; its loops go on at ``go`` in the test's folder."""
    with concurrent.futures.ThreadPoolExecutor(1) as thread, contextlib.ExitStack() as leave:
        leave.callback((tmp_path / "go").touch)

        def run(loop: Any, workers: int = 2, **options: Any) -> concurrent.futures.Future[Any]:
            config = {"folder": str(tmp_path)}
            return thread.submit(fit, loop, config, workers, name="run", **options)

        yield run


def held(folder: str) -> None:
    """Wait, in a train loop, until the test says go."""
    while not Path(folder, "go").exists():
        time.sleep(0.01)


def until(page: RunPage, fits: Callable[[dict[str, Any]], Any]) -> dict[str, Any]:
    """What a page shows, once it fits; a busy machine may leave some of it out the next time."""
    shown: dict[str, Any] = {}

    def look() -> Any:
        shown.clear()
        shown.update(page.look(current_runtime().head))
        return fits(shown)

    wait_until(look)
    return shown


def rows_of(rank: dict[str, Any]) -> dict[str, int]:
    """How many rows a rank has read of each dataset; a busy machine may leave it no time to say."""
    return {name: told["rows"] for name, told in rank.get("datasets", {}).items()}


def test_a_run_that_goes_on_tells_of_each_report_and_of_its_ranks(
    running: Any, row: Any, tmp_path: Path
) -> None:
    def loop(config: dict[str, str]) -> None:
        for number, _ in enumerate(train.get_dataset_shard("numbers").iter_batches(batch_size=2)):
            train.report({"loss": 1.0 / (number + 1)})
            if number == 1:
                held(config["folder"])

    import pyarrow

    datasets = {"numbers": pyarrow.table({"n": list(range(12))})}
    run = running(loop, given={"datasets": datasets})
    page = RunPage(row()["run_id"])
    shown = until(
        page,
        lambda shown: (
            len(shown["series"]["step"]) == 2
            and [rows_of(rank) for rank in shown["ranks"]] == [{"numbers": 4}] * 2
        ),
    )
    assert shown["series"] == {"step": [0, 1], "loss": [1.0, 0.5]}
    assert (shown["run"]["state"], shown["run"]["workers"]) == ("RUNNING", 2)
    assert [rank["state"] for rank in shown["ranks"]] == ["RUNNING"] * 2
    assert all(rank["data_wait"] >= 0 and rank["pid"] > 0 for rank in shown["ranks"])
    assert [len(rank) for rank in shown["heat"]["seconds"]] == [2, 2]
    assert shown["run"]["config"]["scaling_config"]["num_workers"] == 2
    wait_until(lambda: row()["reports"] == 2)  # in the list too, though no other follows
    (tmp_path / "go").touch()
    run.result(60)
    until(page, lambda shown: shown["run"]["ended"])
    final = ended(row())
    assert (final["run"]["state"], final["run"]["reports"]) == ("FINISHED", 3)
    assert final["run"]["problem"] == ""


def test_metrics_have_how_far_a_run_is_and_what_its_ranks_wait_for(
    running: Any, row: Any, tmp_path: Path
) -> None:
    def loop(config: dict[str, str]) -> None:
        for _ in train.get_dataset_shard("numbers").iter_batches(batch_size=2):
            train.report({"loss": 0.5})
        held(config["folder"])

    import pyarrow

    datasets = {"numbers": pyarrow.table({"n": list(range(8))})}
    run = running(loop, given={"datasets": datasets})
    row()

    def values(name: str, **labels: str) -> list[float]:
        return [
            sample.value
            for family in text_string_to_metric_families(text(current_runtime().head))
            for sample in family.samples
            if sample.name == f"miniray_train_{name}" and labels.items() <= sample.labels.items()
        ]

    wait_until(lambda: values("data_rows_total", run="run", dataset="numbers") == [4.0, 4.0])
    assert values("run_info", run="run", state="RUNNING") == [1.0]
    assert values("workers", run="run") == [2.0]
    assert len(values("report_blocked_seconds_total", run="run")) == 2
    assert min(values("data_wait_seconds_total", run="run", rank="1")) >= 0
    wait_until(lambda: len(values("rank_lag_seconds", run="run")) == 2)
    (tmp_path / "go").touch()
    run.result(60)
    wait_until(lambda: values("workers", run="run") == [0.0])
    assert values("reports_total", run="run") == [2.0]
    assert values("metric", run="run", metric="loss") == [0.5]
    assert values("data_rows_total", run="run") == [4.0, 4.0]
    assert values("rank_lag_seconds", run="run") == []


def test_a_runs_checkpoints_are_in_the_metrics_after_its_end_if_nobody_has_read_them_before(
    fit: Any, tmp_path: Path
) -> None:
    def loop(config: dict[str, str]) -> None:
        for step in range(2):
            folder = Path(config["folder"], str(step))
            folder.mkdir()
            train.report({"step": step}, checkpoint=Checkpoint(folder))

    fit(loop, {"folder": str(tmp_path)}, 1, name="unread")
    counted = 'miniray_train_checkpoints_total{node="[^"]*",run="unread",outcome="complete"} 2'
    wait_until(lambda: re.search(counted, text(current_runtime().head)))
    told = text(current_runtime().head)
    for phase in ("upload", "commit"):
        assert re.search(f'checkpoint_seconds_count{{.*run="unread",phase="{phase}"}} 2', told)
    assert re.search(r'train_productive_ratio{run="unread"} 0\.\d', told)


def test_a_run_that_was_restarted_by_a_failure_says_why_in_its_attempts(
    fit: Any, row: Any, tmp_path: Path
) -> None:
    def loop(config: dict[str, str]) -> None:
        (Path(config["folder"]) / "model").mkdir(exist_ok=True)
        (Path(config["folder"]) / "model" / "file").write_text("weights")
        train.report({"n": 1}, checkpoint=Checkpoint(Path(config["folder"]) / "model"))
        attempt = count_up(Path(config["folder"], "runs"))
        print(f"words of attempt {attempt}")
        if attempt == 1:
            raise ValueError("spoilt")

    failures = FailureConfig(max_failures=1)
    fit(loop, {"folder": str(tmp_path)}, 1, name="run", failure_config=failures)
    wait_until(lambda: row()["ended"])
    page = ended(row())
    first, second = page["attempts"]
    assert (first["state"], second["state"]) == ("FAILED", "FINISHED")
    assert "spoilt" in first["reason"]
    assert first["ended"] <= second["started"]
    assert len(page["logs"]) == 2
    for number, folder in enumerate(page["logs"], 1):
        assert f"words of attempt {number}" in Path(folder, "rank_0.out").read_text()
    head = current_runtime().head
    # A later run of that name has other words.
    fit(lambda: print("others"), None, 1, name="run", storage_path=tmp_path / "elsewhere")
    found = logs(head, select_logs(head, page["run"]["run_id"], 0, LogQuery()))
    assert [each.text for each in found.lines] == ["words of attempt 1", "words of attempt 2"]
    assert [each["size"] for each in page["checkpoints"]] == [7, 7]
    assert all(Path(each["path"], "file").exists() for each in page["checkpoints"])
    assert [rank["state"] for rank in page["ranks"]] == ["RETURNED"]


def test_a_run_that_has_failed_is_listed_with_the_reason(fit: Any, row: Any) -> None:
    def loop() -> None:
        raise ValueError("spoilt")

    with pytest.raises(WorkerGroupError):
        fit(loop, workers=1, name="run")
    wait_until(lambda: row()["ended"])
    assert row()["state"] == "ERRORED"
    assert "spoilt" in row()["error"]
    assert "spoilt" in ended(row())["attempts"][0]["reason"]


DRIVER = """
import signal, sys
import miniray
from miniray import train
from miniray.train import DataParallelTrainer, RunConfig, ScalingConfig

def loop():
    print("words of a rank")
    train.report({"n": 1})
    signal.pause()

miniray.init(address=sys.argv[2])
config = RunConfig(name="run", storage_path=sys.argv[1])
DataParallelTrainer(loop, scaling_config=ScalingConfig(num_workers=1), run_config=config).fit()
"""


def test_a_run_whose_driver_was_killed_is_lost_and_its_folder_is_shown(
    nodes: Cluster, row: Any, tmp_path: Path
) -> None:
    driver = subprocess.Popen([sys.executable, "-c", DRIVER, str(tmp_path), nodes.address])
    try:
        page = RunPage(row()["run_id"])
        until(page, lambda shown: shown["series"]["step"] == [0])
    finally:
        driver.kill()
        driver.wait()
    wait_until(lambda: row()["state"] == "LOST")
    shown = ended(row())
    assert (shown["run"]["state"], shown["series"]["n"]) == ("LOST", [1])
    assert "goes on from the newest checkpoint" in shown["run"]["error"]
    head = current_runtime().head  # what its ranks printed is on their nodes
    found = logs(head, select_logs(head, shown["run"]["run_id"], None, LogQuery()))
    assert [each.text for each in found.lines] == ["words of a rank"]
