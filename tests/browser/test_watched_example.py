"""``examples/train_vit.py``, the reference program, is watched from start to end."""

from __future__ import annotations

import contextlib
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from cluster_helpers import wait_until
from playwright.sync_api import expect

from miniray.client.command_connection import connect_for_cli
from miniray.system.session import find_clusters

if TYPE_CHECKING:
    from collections.abc import Iterator

    from playwright.sync_api import Browser, Page

pytestmark = [pytest.mark.engine("miniray"), pytest.mark.timeout(600)]

EXAMPLE = Path(__file__).resolve().parents[2] / "examples" / "train_vit.py"
#: The end of a batch, and what a rank does there in its second epoch until there is a file.
STEP = "            optimizer.step()\n"
WATCHED = """\
            while epoch == 1 and not train.collective.broadcast_from_rank_zero(Path({!r}).exists()):
                loss_fn(model(images), labels).backward()
                time.sleep(0.05)  # the browser has a processor
"""


@pytest.fixture
def seen(tmp_path: Path) -> Path:
    """The file without which the rank stays in its second epoch."""
    return tmp_path / "seen"


@pytest.fixture
def program(session_root: Path, tmp_path: Path, seen: Path) -> Iterator[subprocess.Popen[str]]:
    """The example with two epochs in each run, once its own cluster is there."""
    text = EXAMPLE.read_text()
    assert text.count(STEP) == text.count("import uuid\n") == 1
    example = tmp_path / EXAMPLE.name
    text = text.replace(STEP, STEP + WATCHED.format(str(seen)))
    example.write_text(text.replace("import uuid\n", "import time\nimport uuid\n"))
    # One worker, as each loads what it needs of PyTorch and scikit-learn for seconds.
    options = ["--workers", "1", "--epochs", "4", "--storage-path", str(tmp_path)]
    command = [sys.executable, str(example), *options]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        try:
            wait_until(lambda: any(each.ready for each in find_clusters()), timeout=180)
            yield process
        finally:
            process.kill()
    wait_until(lambda: not find_clusters(), timeout=60)


@pytest.fixture
def page(browser: Browser, program: subprocess.Popen[str]) -> Page:
    """The page of the example's cluster, which listens for browsers from now on."""
    with contextlib.closing(connect_for_cli(None, "address=", None)) as cluster:
        url = cluster.page().url
    page = browser.new_page(viewport={"width": 1280, "height": 800})
    page.goto(url)
    page.get_by_role("heading", name="Cluster", exact=True).wait_for()
    return page


def test_the_example_is_watched_from_its_first_run_to_the_end_of_its_cluster(
    page: Page, program: subprocess.Popen[str], seen: Path
) -> None:
    page.get_by_role("link", name="Train runs", exact=True).click()
    run = page.get_by_role("row").filter(has_text="vit-")
    expect(run).to_contain_text("running", timeout=120_000)
    run.get_by_role("link").click()
    shows_metrics_ranks_checkpoints_profiles_and_stacks(page)

    # The second run goes on in the folder of the first one, and stands for both when it has begun.
    seen.touch()
    page.get_by_role("link", name="Train runs", exact=True).click()
    expect(run.first).to_be_visible()
    printed, _ = program.communicate(timeout=300)
    assert "trained epochs 2 to 3" in printed
    lost = page.get_by_role("alert").filter(has_text="The connection to the cluster's page is lost")
    # Where another cluster of this machine has the page's usual port by now, that one answers.
    expect(lost.or_(page.get_by_role("textbox", name="Address or code"))).to_be_visible()


def shows_metrics_ranks_checkpoints_profiles_and_stacks(page: Page) -> None:
    """What the page of a run that trains leads to."""
    for metric in ("loss", "accuracy"):
        chart = page.locator("figure").filter(has_text=metric)
        expect(chart.locator("canvas")).to_be_visible(timeout=120_000)
    expect(page.get_by_role("table", name="Ranks").get_by_role("row")).to_have_count(2)
    expect(page.get_by_role("row").filter(has_text="checkpoint_").first).to_be_visible()
    page.get_by_role("button", name="CPU flame graph").click()
    expect(page.locator(".flame canvas")).to_be_visible(timeout=60_000)
    expect(page.locator(".flame-hottest")).to_contain_text("_engine_run_backward")

    page.get_by_role("table", name="Ranks").get_by_role("link", name="0").click()
    expect(page.get_by_role("heading", level=1)).to_contain_text("Worker")
    page.get_by_role("button", name="Stack trace").click()
    expect(page.locator(".frames").first).to_contain_text("train_func_per_worker")

    page.get_by_role("link", name="Metrics").click()
    expect(page.locator("figure canvas").first).to_be_visible(timeout=60_000)
