"""Training runs go on when the head is killed and starts again."""

from __future__ import annotations

import os
import signal
import threading
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from cluster_helpers import is_alive, wait_for_file, wait_until
from running_cluster import running_cluster
from test_head_deaths import head_pid

import miniray
from miniray import train
from miniray.train import DataParallelTrainer, RunConfig, ScalingConfig
from miniray.util.state import list_placement_groups

if TYPE_CHECKING:
    from collections.abc import Iterator

    from miniray.cluster_utils import Cluster

# A head that starts again takes some seconds where other tests run too.
pytestmark = [pytest.mark.slow, pytest.mark.timeout(180)]


@pytest.fixture(scope="module")
def nodes(session_root: Path) -> Iterator[Cluster]:
    with running_cluster({"num_cpus": 2}, variables={"MINIRAY_NODE_TIMEOUT": "5"}) as cluster:
        yield cluster


def loop(config: dict[str, Any]) -> int:
    """Report a checkpoint before the head is killed, and one afterwards."""
    folder = Path(config["folder"])
    context = train.get_context()
    files = folder / f"files{context.get_world_rank()}"
    files.mkdir()
    checkpoint = train.Checkpoint.from_directory(files)
    for epoch in range(2):
        train.report({"epoch": epoch}, checkpoint)
        train.collective.barrier()
        (folder / "begun").touch()
        wait_for_file(folder / "go", timeout=100)
    return context.get_world_size()


def kill_head() -> None:
    head = head_pid()
    os.kill(head, signal.SIGKILL)
    wait_until(lambda: not is_alive(head))
    wait_until(lambda: miniray.cluster_resources().get("CPU") == 2)


def waiting() -> list[Any]:
    groups = list_placement_groups()
    return [each for each in groups if each.state == "PENDING" and "train-" in (each.name or "")]


@pytest.mark.parametrize(
    "when", ["runs", "runs and has no room to grow", "waits for its resources"]
)
def test_a_run_goes_on_when_the_head_starts_again(
    nodes: Cluster, tmp_path: Path, when: str
) -> None:
    def interrupt() -> None:
        if when == "waits for its resources":
            wait_until(waiting)
        else:
            wait_for_file(tmp_path / "begun", timeout=100)
        if when == "runs and has no room to grow":
            wait_until(waiting)
        kill_head()
        if when == "waits for its resources":
            added.append(nodes.add_node(num_cpus=1))
        (tmp_path / "go").touch()

    sizes: dict[str, Any] = {
        "runs": 2,
        "runs and has no room to grow": (2, 4),
        "waits for its resources": 3,
    }
    added: list[Any] = []
    interrupting = threading.Thread(target=interrupt)
    interrupting.start()
    result = DataParallelTrainer(
        loop,
        train_loop_config={"folder": str(tmp_path)},
        scaling_config=ScalingConfig(
            num_workers=sizes[when], elastic_resize_monitor_interval_s=0.1
        ),
        run_config=RunConfig(name="run", storage_path=tmp_path / "runs"),
    ).fit()
    interrupting.join()
    assert result.return_value == (3 if added else 2)
    assert result.metrics == {"epoch": 1}
    for node in added:
        nodes.remove_node(node)
    wait_until(lambda: miniray.available_resources().get("CPU") == 2)
