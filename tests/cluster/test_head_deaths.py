"""A head that is killed while others die, or wait: what it knew, its successor has to hear."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from cluster_helpers import is_alive, wait_for_file, wait_until
from running_cluster import running_cluster

import miniray
from miniray.exceptions import WorkerCrashedError
from miniray.util.state import get_cluster_memory

if TYPE_CHECKING:
    from collections.abc import Iterator

    from miniray.cluster_utils import Cluster

# A head that starts again takes some seconds where other tests run too.
pytestmark = [pytest.mark.slow, pytest.mark.timeout(180)]


@pytest.fixture(scope="module")
def nodes(session_root: Path) -> Iterator[Cluster]:
    """A head that waits for others only shortly, on a node with one CPU."""
    with running_cluster({"num_cpus": 1}, variables={"MINIRAY_NODE_TIMEOUT": "5"}) as cluster:
        yield cluster


def head_pid() -> int:
    root = Path(os.environ["MINIRAY_TMPDIR"])
    records = [json.loads(path.read_text()) for path in root.glob("miniray-*/clusters/*.json")]
    [head] = [record["processes"]["head"]["pid"] for record in records if record["is_head"]]
    return int(head)


def kill_head() -> None:
    """End the head, and wait until the next one serves."""
    head = head_pid()
    os.kill(head, signal.SIGKILL)
    wait_until(lambda: not is_alive(head))
    wait_until(lambda: miniray.cluster_resources().get("CPU") == 1)


@miniray.remote(num_cpus=1)
def first(folder: Path) -> str:
    (folder / "begun").touch()
    wait_for_file(folder / "go", timeout=100)
    return "first"


@miniray.remote(num_cpus=0.5)
def second() -> str:
    return "second"


@miniray.remote(num_cpus=1)
def both(folder: Path) -> list[str]:
    return miniray.get([first.remote(folder), second.remote()])


@miniray.remote(num_cpus=0, resources={"there": 1}, max_retries=0)
def hang(folder: Path) -> None:
    (folder / "runs").touch()
    wait_for_file(folder / "never", timeout=150)


def test_a_task_that_waits_for_others_has_given_its_cpu_back_to_the_next_head_too(
    nodes: Cluster, tmp_path: Path
) -> None:
    ref = both.remote(tmp_path)
    wait_for_file(tmp_path / "begun")
    kill_head()
    (tmp_path / "go").touch()
    assert miniray.get(ref, timeout=60) == ["first", "second"]
    wait_until(lambda: miniray.available_resources().get("CPU") == 1)


@miniray.remote(num_cpus=0)
class Named:
    def ready(self) -> bool:
        return True


def test_who_follows_events_is_told_each_once_by_one_head_and_the_next(nodes: Cluster) -> None:
    words = ["list", "events", "--follow", "--limit", "1", "--json"]
    with subprocess.Popen(
        [sys.executable, "-u", "-m", "miniray", *words], stdout=subprocess.PIPE, text=True
    ) as following:
        try:
            assert following.stdout is not None
            while (line := following.stdout.readline()) != "]\n":
                assert line  # of what was there before
            actors = []
            for name in ("before", "after"):
                actors.append(Named.options(name=name).remote())
                assert miniray.get(actors[-1].ready.remote(), timeout=60)
                if name == "before":
                    kill_head()
            told = []
            while not told or "'after'" not in told[-1]["message"]:
                told.append(json.loads(following.stdout.readline()))
        finally:
            following.send_signal(signal.SIGINT)
            assert following.wait(30) == 0
    assert any("'before'" in each["message"] for each in told)
    numbers = [each["event_id"] for each in told]
    assert numbers == sorted(set(numbers))


def test_a_node_that_dies_together_with_the_head_is_missed(nodes: Cluster, tmp_path: Path) -> None:
    node = nodes.add_node(num_cpus=1, resources={"there": 1})
    ref = hang.remote(tmp_path)
    wait_for_file(tmp_path / "runs")
    head = head_pid()
    os.kill(head, signal.SIGSTOP)
    nodes.remove_node(node, allow_graceful=False)
    os.kill(head, signal.SIGKILL)
    with pytest.raises(WorkerCrashedError):
        miniray.get(ref, timeout=60)
    assert "there" not in miniray.cluster_resources()
    # The daemons know too, and do not go on asking it.
    wait_until(lambda: len(get_cluster_memory(timeout=1).nodes) == 1)
