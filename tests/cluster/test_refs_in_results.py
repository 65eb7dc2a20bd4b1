"""Refs inside results and inside items of streams: they stay good, and nothing stays behind."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from cluster_helpers import is_alive, wait_for_file, wait_until
from object_helpers import inventory
from running_cluster import running_cluster, running_ray_cluster

import miniray
from miniray.common.runtime import current_runtime
from miniray.exceptions import RayError

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

#: What looks at the stores of nodes, or at processes.
looks_inside = pytest.mark.engine("miniray")
MIB = 1024 * 1024
STOP_GRACE = 1.0


@pytest.fixture(scope="module", autouse=True)
def two_nodes(session_root: Path, pytestconfig: pytest.Config) -> Iterator[Any]:
    """A head node, and a second node with the resource ``far``."""
    nodes = {"num_cpus": 4}, {"num_cpus": 2, "resources": {"far": 4}}
    if pytestconfig.getoption("engine") == "ray":
        with running_ray_cluster(session_root, *nodes) as cluster:
            yield cluster
        return
    with running_cluster(*nodes, variables={"MINIRAY_STOP_GRACE": str(STOP_GRACE)}) as cluster:
        yield cluster


@pytest.fixture(autouse=True)
def nothing_is_left(pytestconfig: pytest.Config) -> Iterator[None]:
    """Whatever a test does, this node has no value in shared memory after it."""
    yield
    if pytestconfig.getoption("engine") == "ray":
        return  # it does not tell
    wait_until(lambda: not inventory()["segments"], told=lambda: str(inventory()["segments"]))


@miniray.remote(num_cpus=1)
def stream(count: int, size: int) -> Iterator[Any]:
    for number in range(count):
        yield [miniray.put(np.full(size, number))]


@miniray.remote(num_cpus=1)
def endless(size: int) -> Iterator[Any]:
    number = 0
    while True:
        yield [miniray.put(np.full(size, number)), np.zeros(size)]
        number += 1


@miniray.remote(num_cpus=0)
class Streamer:
    """Streams, and tells what it keeps."""

    def stream(self, count: int, size: int) -> Iterator[Any]:
        for number in range(count):
            yield [miniray.put(np.full(size, number))]

    def endless(self, size: int) -> Iterator[Any]:
        number = 0
        while True:
            yield [miniray.put(np.full(size, number)), np.zeros(size)]
            number += 1

    def objects(self) -> int:
        runtime: Any = current_runtime()
        runtime.refs.settle()
        return len(runtime.table)

    def pid(self) -> int:
        return os.getpid()


def where(far: bool) -> dict[str, Any]:
    return {"resources": {"far": 1}} if far else {}


def numbers_in(items: list[Any]) -> list[int]:
    return [int(miniray.get(inner)[0]) for [inner] in miniray.get(items)]


def read_to_end(running: Any) -> None:
    for item in running:
        miniray.get(item)


@pytest.mark.parametrize("far", [False, True], ids=["near", "far"])
@pytest.mark.parametrize("size", [1, MIB // 4], ids=["small", "large"])
def test_refs_inside_the_items_of_a_stream_stay_good(far: bool, size: int) -> None:
    count = 300 if size == 1 else 20
    items = list(stream.options(**where(far)).remote(count, size))
    assert numbers_in(items) == list(range(count))


@pytest.mark.parametrize("far", [False, True], ids=["near", "far"])
def test_refs_inside_items_that_are_read_one_by_one_stay_good(far: bool) -> None:
    for number, item in enumerate(stream.options(**where(far)).remote(200, 1)):
        assert numbers_in([item]) == [number]


@looks_inside
def test_refs_inside_the_items_of_an_actors_stream_stay_good() -> None:
    actor = Streamer.remote()
    before = miniray.get(actor.objects.remote())
    items = list(actor.stream.remote(300, 1))
    assert numbers_in(items) == list(range(300))
    del items
    wait_until(lambda: miniray.get(actor.objects.remote()) == before)


def test_items_taken_before_a_cancel_stay_good_and_the_rest_is_freed() -> None:
    for _ in range(5):
        running = endless.remote(MIB // 32)
        taken = [next(running) for _ in range(10)]
        miniray.cancel(running)
        with pytest.raises(RayError):
            read_to_end(running)
        firsts = [int(miniray.get(inner)[0]) for inner, _ in miniray.get(taken)]
        assert firsts == list(range(10))


@looks_inside
def test_a_stream_whose_caller_is_killed_leaves_nothing_in_its_actor() -> None:
    @miniray.remote(num_cpus=0)
    class Reader:
        def read(self, actor: Any) -> int:
            self.running = actor.endless.options(_generator_backpressure_num_objects=20).remote(
                MIB // 32
            )
            self.taken = [next(self.running) for _ in range(10)]
            return os.getpid()

    actor = Streamer.remote()
    before = miniray.get(actor.objects.remote())
    reader = Reader.remote()
    os.kill(miniray.get(reader.read.remote(actor)), signal.SIGKILL)
    wait_until(lambda: miniray.get(actor.objects.remote()) == before)


@looks_inside
def test_a_call_whose_last_result_cannot_be_pickled_leaves_nothing() -> None:
    @miniray.remote(num_returns=3)
    def make() -> Any:
        return [miniray.put(1), np.zeros(MIB)], np.zeros(MIB), threading.Lock()

    results = make.remote()
    for result in results:
        with pytest.raises(TypeError, match="lock"):
            miniray.get(result)
    # The fixture sees to it that what was written before is gone while its owner lives.
    wait_until(lambda: not inventory()["segments"])


@looks_inside
def test_refs_that_a_stopped_caller_has_not_counted_outlive_their_worker(tmp_path: Path) -> None:
    running, go = tmp_path / "running", tmp_path / "go"

    @miniray.remote(max_calls=1)
    def make() -> Any:
        running.write_text(str(os.getpid()))
        wait_for_file(go)
        return [miniray.put("there")]

    @miniray.remote(num_cpus=0)
    class Caller:
        def call(self) -> int:
            self.result = make.remote()
            return os.getpid()

        def read(self) -> Any:
            return miniray.get(miniray.get(self.result)[0])

    caller = Caller.remote()
    pid = miniray.get(caller.call.remote())
    wait_until(lambda: running.exists() and running.read_text())
    worker = int(running.read_text())
    os.kill(pid, signal.SIGSTOP)
    try:
        go.touch()
        with contextlib.suppress(AssertionError):  # as it should: the worker waits for the caller
            wait_until(lambda: not is_alive(worker), timeout=3 * STOP_GRACE)
    finally:
        os.kill(pid, signal.SIGCONT)
    assert miniray.get(caller.read.remote()) == "there"
    wait_until(lambda: not is_alive(worker))
