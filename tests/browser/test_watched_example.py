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

pytestmark = [pytest.mark.engine("miniray"), pytest.mark.timeout(900)]

EXAMPLE = Path(__file__).resolve().parents[2] / "examples" / "train_vit.py"
#: Long enough for a profile of five seconds, and some looks, in the first of its two runs.
EPOCHS = 40


@pytest.fixture
def program(session_root: Path, tmp_path: Path) -> Iterator[subprocess.Popen[str]]:
    """The example, which starts a cluster of its own, once that is there."""
    command = [
        sys.executable,
        str(EXAMPLE),
        "--epochs",
        str(EPOCHS),
        "--storage-path",
        str(tmp_path),
    ]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        try:
            wait_until(lambda: any(each.ready for each in find_clusters()), timeout=180)
            yield process
        finally:
            process.kill()


def watched(browser: Browser) -> Page:
    """The page of the example's cluster, which listens for browsers from now on."""
    with contextlib.closing(connect_for_cli(None, "address=", None)) as cluster:
        url = cluster.page().url
    page = browser.new_page(viewport={"width": 1280, "height": 800})
    page.goto(url)
    page.get_by_role("heading", name="Cluster", exact=True).wait_for()
    return page


def test_the_example_is_watched_from_its_first_run_to_the_end_of_its_cluster(
    browser: Browser, program: subprocess.Popen[str]
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
    page.get_by_role("link", name="Train runs", exact=True).click()
    # The second run goes on in the folder of the first one, and stands for both.
    expect(run).to_contain_text("finished", timeout=400_000)
    printed, _ = program.communicate(timeout=400)
    assert f"trained epochs {EPOCHS // 2} to {EPOCHS - 1}" in printed
    expect(page.get_by_role("alert")).to_contain_text(
        "The connection to the cluster's page is lost"
    )
