"""A training run is watched in a browser, as the tutorial for distributed training does it.

Run list, run page, worker page, stack, CPU flame graph, memory profile, metrics; then the end of
the run, and it beside another one.
"""

from __future__ import annotations

import re
import tempfile
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from playwright.sync_api import expect

from miniray import train
from miniray.train import (
    Checkpoint,
    CheckpointConfig,
    DataParallelTrainer,
    RunConfig,
    ScalingConfig,
)
from miniray.train.collective import broadcast_from_rank_zero

if TYPE_CHECKING:
    from collections.abc import Iterator

    from playwright.sync_api import Locator, Page

pytestmark = pytest.mark.engine("miniray")

CLUSTER = {"num_cpus": 4, "include_dashboard": True, "dashboard_port": 0}


def train_func_per_worker(config: dict[str, Any]) -> None:
    """An epoch is some CPU time and some memory; there is one after the other until it is told.

    It waits most of the time, as for data, so that the browser has a processor.
    """
    rank = train.get_context().get_world_rank()
    kept: list[bytes] = []
    epoch = 0
    while epoch < 3 or not broadcast_from_rank_zero(Path(config["stop"]).exists()):
        until = time.thread_time() + 0.02
        while time.thread_time() < until:
            busy_with_the_batch()
        time.sleep(0.18)
        kept = [*kept[-20:], bytes(1 << 20)]
        metrics = {"loss": 1 / (epoch + 1), "accuracy": epoch / (epoch + 1)}
        if rank == 0:
            print({"epoch_num": epoch, **metrics}, flush=True)
        with tempfile.TemporaryDirectory() as folder:
            Path(folder, "model.pt").write_bytes(bytes(1000))
            checkpoint = Checkpoint.from_directory(folder) if epoch % 20 == 0 else None
            train.report(metrics, checkpoint=checkpoint)
        epoch += 1


def busy_with_the_batch() -> int:
    return sum(range(2000))


def fit(folder: Path, name: str) -> None:
    DataParallelTrainer(
        train_func_per_worker,
        train_loop_config={"stop": str(folder / "stop")},
        scaling_config=ScalingConfig(num_workers=2),
        run_config=RunConfig(
            name=name,
            storage_path=folder / "results",
            checkpoint_config=CheckpointConfig(checkpoint_score_attribute="score"),
        ),
    ).fit()


@pytest.fixture(scope="module")
def run(cluster: Any, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """The folder of a run that goes on until there is a file "stop" in it."""
    folder = tmp_path_factory.mktemp("runs")
    fitting = threading.Thread(target=fit, args=(folder, "train_run-a"))
    fitting.start()
    yield folder
    (folder / "stop").touch()
    fitting.join()


def row(page: Page, *texts: str) -> Locator:
    rows = page.get_by_role("row")
    for text in texts:
        rows = rows.filter(has_text=text)
    return rows


def open_run(page: Page, name: str = "train_run-a") -> None:
    page.get_by_role("link", name="Train runs", exact=True).click()
    page.get_by_role("link", name=name).click()
    expect(page.get_by_role("heading", level=1)).to_contain_text(name)
    expect(chart(page, "loss").locator("canvas")).to_be_visible()  # its train loop runs


def chart(page: Page, metric: str) -> Locator:
    return page.locator("figure").filter(has_text=metric)


def test_the_list_of_runs_leads_to_a_run_with_its_workers_and_charts(page: Page, run: Path) -> None:
    page.get_by_role("link", name="Train runs", exact=True).click()
    expect(row(page, "train_run-a")).to_contain_text("running")
    row(page, "train_run-a").get_by_role("link").click()
    ranks = page.get_by_role("table", name="Ranks")
    expect(ranks.get_by_role("row")).to_have_count(3)
    expect(chart(page, "loss").locator("canvas")).to_be_visible()
    expect(chart(page, "accuracy")).to_be_visible()
    expect(row(page, "checkpoint_")).not_to_have_count(0)
    expect(page.get_by_role("table", name="Attempts")).to_contain_text("running")
    # What the controller remarks.
    expect(page.locator(".note").filter(has_text="no number as metric 'score'")).to_be_visible()


def test_the_logs_of_the_run_are_those_of_its_workers(page: Page, run: Path) -> None:
    open_run(page)
    page.get_by_label("Log of").select_option("all ranks")
    expect(page.locator(".logs pre")).to_contain_text("epoch_num")
    page.get_by_label("Only lines with").fill("'epoch_num': 1,")
    expect(page.locator(".logs pre span")).to_have_count(1)


def test_a_click_on_a_rank_shows_the_page_of_its_worker_with_its_stack(
    page: Page, run: Path
) -> None:
    open_run(page)
    page.get_by_role("table", name="Ranks").get_by_role("link", name="1").click()
    expect(page.get_by_role("heading", level=1)).to_contain_text("Rank 1, TrainWorker")
    page.get_by_role("button", name="Stack trace").click()
    expect(page.locator(".frames").first).to_contain_text("train_func_per_worker")
    page.locator("h1 .up").click()
    expect(page.get_by_role("heading", level=1)).to_contain_text("train_run-a")


def test_equal_stacks_of_ranks_stand_together(page: Page, run: Path) -> None:
    open_run(page)
    page.get_by_role("button", name="Stack trace").click()
    expect(page.locator(".frames").first).to_contain_text("train_func_per_worker")
    page.get_by_label("Rank", exact=True).select_option("rank 0")
    page.get_by_role("button", name="Stack trace").click()
    expect(page.locator(".stacks section")).not_to_have_count(0)


def test_the_cpu_of_all_ranks_is_a_flame_graph(page: Page, run: Path) -> None:
    open_run(page)
    page.get_by_role("button", name="CPU flame graph").click()
    expect(page.get_by_role("status").filter(has_text="Sampling")).to_be_visible()
    expect(page.locator(".flame canvas")).to_be_visible(timeout=20_000)
    expect(page.locator(".flame-hottest")).to_contain_text("busy_with_the_batch")


def test_the_memory_of_a_rank_is_a_flame_graph(page: Page, run: Path) -> None:
    open_run(page)
    page.get_by_label("Rank", exact=True).select_option("rank 0")
    page.get_by_role("button", name="Memory flame graph").click()
    expect(page.locator(".flame canvas")).to_be_visible(timeout=20_000)
    expect(page.locator(".flame-hottest")).to_contain_text("train_func_per_worker")


def test_metrics_of_the_cluster_are_charts(page: Page, run: Path) -> None:
    page.get_by_role("link", name="Metrics").click()
    expect(page.locator("figure canvas").first).to_be_visible(timeout=25_000)


def test_a_run_that_has_ended_stays_and_is_compared_with_another(page: Page, run: Path) -> None:
    (run / "stop").touch()
    page.get_by_role("link", name="Train runs", exact=True).click()
    expect(row(page, "train_run-a")).to_contain_text("finished")
    fit(run, "train_run-b")
    expect(row(page, "train_run-b")).to_contain_text("finished")
    for name in ("train_run-a", "train_run-b"):
        page.get_by_label(f"Compare {name}").check()
    page.get_by_role("link", name="Show 2 runs over each other").click()
    for name in ("train_run-a", "train_run-b"):
        expect(chart(page, "loss")).to_contain_text(name)
    # Its log is its own, though a later run may have its name.
    with page.expect_request(lambda asked: re.search("/api/logs.*of=[0-9a-f]{16}&", asked.url)):
        open_run(page)
    expect(page.get_by_text("It has ended")).to_be_visible()
