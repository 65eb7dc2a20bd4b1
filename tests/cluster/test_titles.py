"""What `ps`, `top` and `nvidia-smi` show of miniray's processes."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from cluster_helpers import wait_until
from running_cluster import running_cluster

import miniray

if TYPE_CHECKING:
    from collections.abc import Iterator

    from miniray.cluster_utils import Cluster


@pytest.fixture(scope="module", autouse=True)
def nodes(session_root: Path) -> Iterator[Cluster]:
    with running_cluster({"num_cpus": 1}) as cluster:
        yield cluster


def shown(pid: int) -> tuple[str, str]:
    """The command line, and the name of 15 bytes."""
    command = Path(f"/proc/{pid}/cmdline").read_bytes().rstrip(b"\0").decode()
    return command, Path(f"/proc/{pid}/comm").read_text().strip()


@miniray.remote
class Counter:
    def pid(self) -> int:
        return os.getpid()


@miniray.remote
def of_a_task() -> tuple[int, tuple[str, str]]:
    return os.getpid(), shown(os.getpid())


def test_the_worker_of_an_actor_is_called_as_its_class() -> None:
    counter = Counter.remote()
    pid = miniray.get(counter.pid.remote())
    assert shown(pid) == ("miniray: Counter", "miniray: Counte")


def test_a_class_with_a_name_that_steers_terminals_is_shown_as_text() -> None:
    evil = type("Evil\x1b[2J\nSecond", (), {"pid": lambda _self: os.getpid()})
    actor = miniray.remote(evil).remote()
    pid = miniray.get(actor.pid.remote())
    assert shown(pid)[0] == "miniray: Evil\\x1b[2J\\nSecond"


def test_a_worker_is_called_as_its_task_and_idle_when_it_has_none() -> None:
    pid, own = miniray.get(of_a_task.remote())
    assert own[0] == "miniray: of_a_task"
    wait_until(lambda: shown(pid)[0] == "miniray: idle worker")
    assert miniray.get(of_a_task.remote()) == (pid, own)


def test_head_node_and_template_are_called_so() -> None:
    counter = Counter.remote()
    pid = miniray.get(counter.pid.remote())
    template = int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
    assert shown(template)[0] == "miniray: template"
    node = int(Path(f"/proc/{template}/stat").read_text().rpartition(")")[2].split()[1])
    assert shown(node)[0] == "miniray: node"
