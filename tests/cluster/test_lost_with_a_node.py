"""Values that are lost with a node: for actors that restart, and several at once."""

from __future__ import annotations

import os
import signal
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from cluster_helpers import count_up, wait_until
from running_cluster import running_cluster

import miniray
from miniray.exceptions import ActorDiedError, ObjectLostError, TaskError
from miniray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from miniray.cluster_utils import Cluster, Node

MIB = 1024 * 1024


@pytest.fixture(scope="module")
def nodes(session_root: Path) -> Iterator[Cluster]:
    """A head node on which nothing runs but the driver."""
    with running_cluster({"num_cpus": 0}) as cluster:
        yield cluster


pytestmark = pytest.mark.usefixtures("nodes")


def add_node(nodes: Cluster) -> Node:
    """A node with one CPU, on which all work runs until it is lost."""
    node = nodes.add_node(num_cpus=1)
    wait_until(lambda: miniray.cluster_resources().get("CPU") == 1)
    return node


@pytest.fixture
def first(nodes: Cluster) -> Node:
    """The node on which the work of a test begins: the last one of the test before."""
    if miniray.available_resources().get("CPU") != 1:  # there is none, or it still has work
        for node in list(nodes.worker_nodes):
            nodes.remove_node(node)
        wait_until(lambda: "CPU" not in miniray.cluster_resources())
        return add_node(nodes)
    [node] = nodes.worker_nodes
    return node


def lose(nodes: Cluster, node: Node) -> Node:
    """The machine loses power, and another one joins."""
    os.kill(node.pids["node"], signal.SIGKILL)
    nodes.remove_node(node, allow_graceful=False)
    wait_until(lambda: "CPU" not in miniray.cluster_resources())
    return add_node(nodes)


def softly_on(node: Node) -> dict[str, Any]:
    """Options of what runs there as long as that node lives."""
    return {"scheduling_strategy": NodeAffinitySchedulingStrategy(node.node_id, soft=True)}


@miniray.remote(max_retries=3)
def ones(size: int) -> Any:
    return np.ones(size, dtype=np.uint8)


class Sums:
    def __init__(self, value: Any, *, more: Any = (), tag: str = "") -> None:
        self.sum = int(np.sum(value)) + int(np.sum(more))
        self.tag = tag

    def told(self) -> tuple[int, str]:
        return self.sum, self.tag


class AsyncSums(Sums):
    async def later(self) -> int:
        return self.sum


@pytest.mark.parametrize("sums", [Sums, AsyncSums])
@pytest.mark.parametrize("lifetime", [None, "detached"])
def test_what_a_restarting_actor_was_given_is_made_again_if_it_was_lost(
    nodes: Cluster, first: Node, sums: Any, lifetime: str | None
) -> None:
    made = [ones.remote(MIB) for _ in range(2)]
    small = miniray.put("small")
    options: dict[str, Any] = {"max_restarts": -1, "max_task_retries": -1, "lifetime": lifetime}
    actor = miniray.remote(sums).options(**options).remote(made[0], more=made[1], tag=small)
    assert miniray.get(actor.told.remote(), timeout=30) == (2 * MIB, "small")
    del made, small
    # The only CPU is the actor's while it starts: it gives it to the tasks that it waits for.
    second = lose(nodes, first)
    assert miniray.get(actor.told.remote(), timeout=60) == (2 * MIB, "small")
    lose(nodes, second)
    assert miniray.get(actor.told.remote(), timeout=60) == (2 * MIB, "small")
    miniray.kill(actor)


def test_an_actor_restarts_with_a_value_that_was_made_again_before(
    nodes: Cluster, first: Node
) -> None:
    value = ones.remote(MIB)
    actor = (
        miniray.remote(Sums).options(max_restarts=1, max_task_retries=1, num_cpus=0).remote(value)
    )
    assert miniray.get(actor.told.remote(), timeout=30) == (MIB, "")
    lose(nodes, first)
    assert miniray.get(value, timeout=60).sum() == MIB
    assert miniray.get(actor.told.remote(), timeout=60) == (MIB, "")


def test_a_restarting_actor_dies_of_a_value_that_nobody_can_make_again(
    nodes: Cluster, first: Node
) -> None:
    value = ones.options(max_retries=0).remote(MIB)
    actor = miniray.remote(Sums).options(max_restarts=1, max_task_retries=1).remote(value)
    assert miniray.get(actor.told.remote(), timeout=30) == (MIB, "")
    lose(nodes, first)
    with pytest.raises(ActorDiedError, match=rf"ObjectRef\({value.hex()}\)") as info:
        miniray.get(actor.told.remote(), timeout=60)
    cause = info.value.creation_error
    assert isinstance(getattr(cause, "cause", cause), ObjectLostError)


def test_what_several_lost_values_were_made_from_is_made_again_once(
    nodes: Cluster, first: Node, tmp_path: Path
) -> None:
    @miniray.remote(max_retries=1)
    def source() -> Any:
        count_up(tmp_path / "source")
        return np.ones(MIB, dtype=np.uint8)

    @miniray.remote(max_retries=1)
    def times(array: Any, number: int) -> Any:
        return array * np.uint8(number)

    made_from = source.remote()
    made = [times.remote(made_from, number) for number in range(6)]
    miniray.wait(made, num_returns=6, fetch_local=False)
    del made_from
    lose(nodes, first)
    for number, ref in enumerate(made):
        assert miniray.get(ref, timeout=60)[0] == number
    assert (tmp_path / "source").stat().st_size == 2


def test_a_generator_that_yields_less_when_it_runs_again_fails_all_that_it_was_to_make(
    nodes: Cluster, first: Node, tmp_path: Path
) -> None:
    @miniray.remote(max_retries=1, num_returns="dynamic")
    def shrinking() -> Iterator[Any]:
        for _ in range(4 - count_up(tmp_path / "runs")):
            yield np.ones(MIB, dtype=np.uint8)

    refs = list(miniray.get(shrinking.remote(), timeout=30))
    assert len(refs) == 3
    lose(nodes, first)
    for ref in refs:
        with pytest.raises(TaskError, match="shrinking"):
            miniray.get(ref, timeout=60)


class Source:
    """Makes arrays, of others or of numbers."""

    def one(self, number: int) -> Any:
        return np.full(MIB, number, dtype=np.uint8)

    def plus(self, array: Any, number: int) -> Any:
        return array + np.uint8(number)

    def several(self, count: int) -> Iterator[Any]:
        for number in range(count):
            yield self.one(number)

    async def several_async(self, count: int) -> Any:
        for number in range(count):
            yield self.one(number)


@pytest.mark.parametrize("method", ["several", "several_async"])
def test_what_an_actor_made_is_made_again_if_its_calls_may_be_repeated(
    nodes: Cluster, first: Node, method: str
) -> None:
    cls: Any = Source
    if method == "several":
        cls = type("Plain", (Source,), {"several_async": None})
    actor = miniray.remote(cls).options(max_restarts=-1, max_task_retries=-1).remote()
    sums = [actor.one.remote(5)]
    for _ in range(3):  # each of the one before, which nobody else has
        sums.append(actor.plus.remote(sums[-1], 1))
    streamed = list(getattr(actor, method).options(num_returns="streaming").remote(3))
    miniray.wait([*sums, *streamed], num_returns=7, fetch_local=False)
    sums = sums[2:]
    lose(nodes, first)
    more = actor.plus.remote(sums[-1], 10)  # waits in the actor's queue for what was lost
    assert miniray.get(more, timeout=60)[0] == 18
    assert [array[0] for array in miniray.get(sums, timeout=60)] == [7, 8]
    assert [array[0] for array in miniray.get(streamed, timeout=60)] == [0, 1, 2]
    miniray.kill(actor)


class Noting(Source):
    """Counts in a file what it makes."""

    def one(self, number: int) -> Any:
        count_up(self.path)
        return super().one(number)

    def __init__(self, path: Path) -> None:
        self.path = path


@pytest.mark.parametrize("method", ["several", "several_async"])
def test_unread_items_come_again_although_the_call_that_makes_them_waits_for_its_reader(
    nodes: Cluster, first: Node, method: str, tmp_path: Path
) -> None:
    cls: Any = Noting
    if method == "several":
        cls = type("Plain", (Noting,), {"several_async": None})
    made = tmp_path / "made"
    actor = miniray.remote(cls).options(max_restarts=-1, max_task_retries=-1).remote(made)
    stream = (
        getattr(actor, method)
        .options(num_returns="streaming", _generator_backpressure_num_objects=4)
        .remote(12)
    )
    assert miniray.get(next(stream))[0] == 0
    taken = [next(stream), next(stream)]  # they are known here, and on that node alone
    wait_until(lambda: made.stat().st_size == 3 + 4)
    lose(nodes, first)
    wait_until(lambda: made.stat().st_size == 2 * (3 + 4))
    found = [miniray.get(ref, timeout=30)[0] for ref in taken]
    found += [miniray.get(ref, timeout=30)[0] for ref in stream]
    assert found == list(range(1, 12))
    assert made.stat().st_size == 3 + 4 + 12
    miniray.kill(actor)


def test_what_an_actor_made_that_has_ended_since_is_an_error_that_says_so(
    nodes: Cluster, first: Node
) -> None:
    actor = miniray.remote(Source).options(max_restarts=-1, max_task_retries=-1).remote()
    made = actor.one.remote(5)
    miniray.wait([made], fetch_local=False)
    miniray.kill(actor)
    lose(nodes, first)
    with pytest.raises(ActorDiedError, match="killed"):
        miniray.get(made, timeout=60)
