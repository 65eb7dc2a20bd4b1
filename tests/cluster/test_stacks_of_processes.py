"""`miniray stack`: where the processes of two nodes are in their code."""

from __future__ import annotations

import asyncio
import os
import time
from typing import TYPE_CHECKING, Any

import pytest
from running_cluster import running_cluster

import miniray
from miniray.client.command_connection import CommandConnection, connect_for_cli
from miniray.profiling.looks import look
from miniray.profiling.targets import TargetError

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path


pytestmark = pytest.mark.engine("miniray")


@pytest.fixture(scope="module", autouse=True)
def cluster(session_root: Path) -> Iterator[CommandConnection]:
    with running_cluster({"num_cpus": 4}, {"num_cpus": 2, "resources": {"far": 2}}):
        connection = connect_for_cli(None, "--address", None)
        yield connection
        connection.close()


@miniray.remote
class Busy:
    def pid(self) -> int:
        return os.getpid()

    def spin(self, path: str) -> None:
        open(path, "w").close()
        while os.path.exists(path):
            sum(range(100))


@miniray.remote
class Waiting:
    async def begin(self) -> None:
        self.event = asyncio.Event()

    async def ping(self) -> None:
        """What was called before has begun."""

    async def inner(self) -> None:
        await self.event.wait()

    async def outer(self) -> None:
        await self.inner()

    async def release(self) -> None:
        self.event.set()


def await_file(path: Path) -> None:
    deadline = time.monotonic() + 30
    while not path.exists():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def frames(found: dict[str, Any]) -> dict[str, list[str]]:
    """The functions of each group's stack, by the first of those who have it."""
    return {
        each["who"][0]: [frame.partition(" (")[0].rpartition(".")[2] for frame in each["stack"]]
        for each in found["groups"]
    }


@pytest.mark.parametrize("where", [{}, {"far": 1}])
def test_a_busy_actor_shows_its_own_code_at_once(
    cluster: CommandConnection, tmp_path: Path, where: dict[str, float]
) -> None:
    busy = Busy.options(resources=where).remote()
    pid = miniray.get(busy.pid.remote())
    running = busy.spin.remote(str(tmp_path / "runs"))
    await_file(tmp_path / "runs")
    actor_id = busy._actor_id.hex()
    for of in (actor_id, str(pid)):
        found = look(cluster, of)
        assert found["way"] == "the process itself"
        assert frames(found)["MainThread"][0] == "spin"
    (tmp_path / "runs").unlink()
    miniray.get(running)


def test_coroutines_of_an_asyncio_actor_are_named_by_their_calls(
    cluster: CommandConnection,
) -> None:
    waiting = Waiting.remote()
    miniray.get(waiting.begin.remote())
    calls = [waiting.outer.remote() for _ in range(2)]
    miniray.get(waiting.ping.remote())
    found = look(cluster, "Waiting")
    own, calls_of_it = found["groups"]
    assert own == {"who": ["MainThread"], "stack": []}
    assert calls_of_it["who"] == ["Waiting.outer (coroutine)"] * 2
    assert frames(found)["Waiting.outer (coroutine)"] == ["outer", "inner", "wait"]
    miniray.get([waiting.release.remote(), *calls])


def test_equal_stacks_of_several_actors_are_shown_once(cluster: CommandConnection) -> None:
    actors = [Busy.options(name=f"idle-{number}").remote() for number in range(2)]
    pids = sorted(miniray.get([actor.pid.remote() for actor in actors]))
    found = look(cluster, "Busy")
    assert not found["notes"]
    [group] = found["groups"]
    assert group["stack"] == []
    assert sorted(group["who"]) == sorted(f"Busy (pid {pid})" for pid in pids)


def test_what_does_not_run_is_named(cluster: CommandConnection) -> None:
    with pytest.raises(TargetError, match="Nothing that runs is called 'nobody'"):
        look(cluster, "nobody")
    with pytest.raises(TargetError, match="No process of this cluster has the pid 1"):
        look(cluster, "1")
