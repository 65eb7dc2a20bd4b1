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


@pytest.fixture
def program(
    request: pytest.FixtureRequest, session_root: Path, tmp_path: Path
) -> Iterator[subprocess.Popen[str]]:
    """The example with these options, which starts a cluster of its own, once that is there."""
    options = [*request.param.split(), "--storage-path", str(tmp_path)]
    command = [sys.executable, str(EXAMPLE), *options]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        try:
            wait_until(lambda: any(each.ready for each in find_clusters()), timeout=180)
            yield process
        finally:
            process.kill()
    wait_until(lambda: not find_clusters(), timeout=60)


def watched(browser: Browser) -> Page:
    """The page of the example's cluster, which listens for browsers from now on."""
    with contextlib.closing(connect_for_cli(None, "address=", None)) as cluster:
        url = cluster.page().url
    page = browser.new_page(viewport={"width": 1280, "height": 800})
    page.goto(url)
    page.get_by_role("heading", name="Cluster", exact=True).wait_for()
    return page


@pytest.mark.parametrize("program", ["--epochs 2 --workers 1"], indirect=True)
def test_the_example_is_watched_from_its_first_run_to_the_end_of_its_cluster(
    browser: Browser, program: subprocess.Popen[str]
) -> None:
    page = watched(browser)
    page.get_by_role("link", name="Train runs", exact=True).click()
    # The second run goes on in the folder of the first one, and stands for both when it has begun.
    runs = page.get_by_role("row").filter(has_text="vit-")
    expect(runs.first).to_be_visible(timeout=120_000)
    printed, _ = program.communicate(timeout=300)
    assert "trained epochs 1 to 1" in printed
    lost = page.get_by_role("alert").filter(has_text="The connection to the cluster's page is lost")
    # Where another cluster of this machine has the page's usual port by now, that one answers.
    expect(lost.or_(page.get_by_role("textbox", name="Address or code"))).to_be_visible()


@pytest.mark.parametrize("program", ["--epochs 1000000"], indirect=True)  # as long as we look
@pytest.mark.usefixtures("program")
def test_the_example_shows_its_metrics_ranks_checkpoints_profiles_and_stacks_while_it_trains(
    browser: Browser,
) -> None:
    page = watched(browser)
    page.get_by_role("link", name="Train runs", exact=True).click()
    run = page.get_by_role("row").filter(has_text="vit-")
    expect(run).to_contain_text("running", timeout=120_000)
    run.get_by_role("link").click()
    for metric in ("loss", "accuracy"):
        chart = page.locator("figure").filter(has_text=metric)
        expect(chart.locator("canvas")).to_be_visible(timeout=120_000)
    expect(page.get_by_role("table", name="Ranks").get_by_role("row")).to_have_count(3)
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
