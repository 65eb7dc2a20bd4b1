"""The map of devices shows how much each one is really used, as its driver's tool tells."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

import pytest
from playwright.sync_api import expect

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from playwright.sync_api import Page

pytestmark = pytest.mark.engine("miniray")

CLUSTER = {"num_cpus": 1, "num_gpus": 2, "include_dashboard": True, "dashboard_port": 0}
#: Index, UUID, busy in percent, MiB in use and in all, watts, degrees, errors of two kinds.
TOOL = """#!/bin/sh
echo "0, GPU-0, 37, 20390, 81559, 123.4, 41, 0, 0"
echo "1, GPU-1, 0, 0, 81559, 60, 30, 0, 0"
"""


@pytest.fixture(scope="module", autouse=True)
def tool(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """A stand-in for ``nvidia-smi``, before the cluster starts."""
    folder: Path = tmp_path_factory.mktemp("tools")
    (folder / "nvidia-smi").write_text(TOOL)
    (folder / "nvidia-smi").chmod(0o755)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PATH", f"{folder}:{os.environ['PATH']}")
        yield


def test_real_use_stands_below_what_is_granted(page: Page) -> None:
    devices = page.locator(".device")
    expect(devices).to_have_count(2)
    expect(devices.first.locator(".real:not(.memory)")).to_have_attribute("title", "busy 37 %")
    memory = devices.first.locator(".real.memory")
    expect(memory).to_have_attribute("title", "memory 19.9 GiB of 79.6 GiB")
    assert "41 °C" in (devices.first.get_attribute("title") or "")
    expect(devices.nth(1).locator(".real:not(.memory)")).to_have_attribute("title", "busy 0 %")
