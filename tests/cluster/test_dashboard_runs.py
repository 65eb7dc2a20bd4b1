"""A train run as the page's server streams it."""

from __future__ import annotations

import concurrent.futures
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from page_client import PageClient, rows_until

from miniray import train

if TYPE_CHECKING:
    from collections.abc import Iterator

pytestmark = pytest.mark.engine("miniray")

CLUSTER = {"num_cpus": 3, "include_dashboard": True, "dashboard_port": 0}


@pytest.fixture
def page(cluster: Any) -> PageClient:
    return PageClient.let_in()


def test_a_train_run_is_streamed_to_its_end_and_drawn_with_others(
    page: PageClient, fit: Any, tmp_path: Path
) -> None:
    go = tmp_path / "go"

    def loop(config: dict[str, str]) -> None:
        train.report({"loss": 2.0})
        while not Path(config["go"]).exists():
            time.sleep(0.01)
        train.report({"loss": 1.0})

    with concurrent.futures.ThreadPoolExecutor(1) as thread:
        run = thread.submit(fit, loop, {"go": str(go)}, name="run")
        try:
            with page.events("runs") as events:
                (id,) = rows_until(events, len)
            with page.events(f"run:{id}") as events:
                running = _told(events, lambda told: told["series"].get("loss") == [2.0])
                assert running["run"]["state"] == "RUNNING"
                go.touch()
                ended = _told(events, lambda told: told["run"]["ended"])
        finally:
            go.touch()
        run.result(60)
    assert ended["series"] == {"step": [0, 1], "loss": [2.0, 1.0]}
    assert ended["attempts"][0]["state"] == "FINISHED"
    with page.events("runs") as events:
        row = rows_until(events, lambda rows: rows[id]["ended"])[id]
    assert (row["state"], row["reports"], row["metrics"]) == ("FINISHED", 2, {"loss": 1.0})
    with page.events(f"runs,run:{id},run:unknown") as events:
        told = {}
        while len(told) < 3:
            event = next(events)
            told[event["topic"]] = event
    assert told[f"run:{id}"]["summary"]["series"] == ended["series"]
    assert "no run unknown" in told["run:unknown"]["error"]


def _told(events: Iterator[Any], fits: Any) -> dict[str, Any]:
    """The summary of a run's stream, once it fits."""
    summaries = (event["summary"] for event in events if "run" in event.get("summary", {}))
    return next(summary for summary in summaries if fits(summary))
