"""A demand that needs what several tasks hold, beside a stream of small tasks."""

from __future__ import annotations

import time
from typing import Any

import pytest
from cluster_helpers import wait_until

import miniray

CLUSTER = {"num_cpus": 4}

pytestmark = pytest.mark.usefixtures("cluster")


@miniray.remote
def small() -> None:
    time.sleep(0.02)


@miniray.remote(num_cpus=4)
def large() -> str:
    return "done"


def test_it_is_served_while_small_tasks_go_on() -> None:
    running: list[Any] = [small.remote() for _ in range(1200)]  # six seconds of work
    wait_until(lambda: "CPU" not in miniray.available_resources())
    began = time.monotonic()
    assert miniray.get(large.remote(), timeout=30) == "done"
    took = time.monotonic() - began
    _, left = miniray.wait(running, num_returns=len(running), timeout=0)
    assert left, f"the small tasks had ended after {took:.1f} s"
    for ref in left:
        miniray.cancel(ref)
    del running, left
    wait_until(lambda: miniray.available_resources() == miniray.cluster_resources())
