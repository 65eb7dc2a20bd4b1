"""A demand that needs what several tasks hold, beside a stream of small tasks."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

import pytest
from cluster_helpers import wait_until

import miniray

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path


@pytest.fixture(scope="module", autouse=True)
def cluster(session_root: Path) -> Iterator[None]:
    """Four CPUs, where nothing is set aside because of a long wait."""
    del session_root
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("MINIRAY_RESERVE_AFTER", "1000")
        miniray.init(num_cpus=4)
        yield
        miniray.shutdown()


@miniray.remote
def small(served: Path) -> None:
    if not served.exists():
        time.sleep(0.02)


@miniray.remote(num_cpus=4)
def large() -> str:
    return "done"


def test_it_is_served_while_small_tasks_go_on(tmp_path: Path) -> None:
    served = tmp_path / "served"
    running = [small.remote(served) for _ in range(4000)]  # twenty seconds of work
    wait_until(lambda: "CPU" not in miniray.available_resources())
    assert miniray.get(large.remote(), timeout=40) == "done"
    _, left = miniray.wait(running, num_returns=len(running), timeout=0)
    served.touch()
    assert left, "it had to wait for all small tasks"
    miniray.get(running, timeout=40)
