"""Values on their way between nodes: broadcasts, waits, what moves early and what stops."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import time
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from cluster_helpers import wait_until
from object_helpers import inventory, movers_of, node_tables
from running_cluster import running_cluster

import miniray
from miniray.exceptions import GetTimeoutError, TaskCancelledError

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from miniray.cluster_utils import Cluster, Node

MIB = 1024 * 1024


@pytest.fixture(scope="module")
def nodes(session_root: Path) -> Iterator[Cluster]:
    """A head node, and two with a resource each, that tell often what they store."""
    with running_cluster(
        {"num_cpus": 4},
        {"num_cpus": 4, "resources": {"far": 100}},
        {"num_cpus": 4, "resources": {"source": 100}},
        variables={"MINIRAY_HEARTBEAT_INTERVAL": "0.05", "MINIRAY_TRANSFER_STALL": "2"},
    ) as cluster:
        yield cluster


def used_bytes() -> dict[str, int]:
    """Bytes in the object store of each living node, as of its last heartbeat."""
    return {n["NodeID"]: n["ObjectStoreUsed"] for n in miniray.nodes() if n["Alive"]}


def whole_bytes() -> int:
    """Bytes of the values of this node; of what is on its way only its room is there."""
    return sum(each["size"] for each in inventory()["segments"] if each["state"] != "WRITING")


def stores_are_empty() -> bool:
    return not any(used_bytes().values())


@pytest.fixture(autouse=True)
def nothing_is_left(nodes: Cluster) -> Iterator[None]:
    """Whatever a test does, all stores are empty after it."""
    yield
    wait_until(stores_are_empty)


def far(nodes: Cluster) -> Node:
    return nodes.worker_nodes[0]


def source(nodes: Cluster) -> Node:
    return nodes.worker_nodes[1]


@contextlib.contextmanager
def frozen(node: Node) -> Iterator[None]:
    """A node whose daemon does nothing for a while."""
    os.kill(node.pids["node"], signal.SIGSTOP)
    try:
        yield
    finally:
        os.kill(node.pids["node"], signal.SIGCONT)


@miniray.remote(num_cpus=0)
class Reader:
    def __init__(self) -> None:
        self.kept: list[Any] = []

    def ready(self) -> int:
        return os.getpid()

    def sum(self, *arrays: Any) -> int:
        return sum(int(array.sum()) for array in arrays)

    def get(self, refs: list[Any]) -> int:
        return sum(int(miniray.get(ref).sum()) for ref in refs)

    def whole_bytes(self) -> int:
        return whole_bytes()

    def tables(self) -> dict[str, int]:
        return node_tables()

    def wait_for(self, path: str) -> None:
        while not os.path.exists(path):
            time.sleep(0.01)


FarReader = Reader.options(resources={"far": 1})


@miniray.remote(num_cpus=0, resources={"source": 1})
def ones(size: int) -> Any:
    return np.ones(size, dtype=np.uint8)


def there(size: int) -> Any:
    """A value in the memory of the source node, of which no other node has a copy."""
    ref = ones.remote(size)
    assert miniray.wait([ref], timeout=30, fetch_local=False)[0] == [ref]
    return ref


# --- broadcasts ----------------------------------------------------------------------------
def test_a_value_read_on_many_nodes_has_one_copy_on_each(nodes: Cluster) -> None:
    size = 8 * MIB
    more = [nodes.add_node(num_cpus=1, resources={f"more{n}": 1}) for n in range(2)]
    try:
        readers = [Reader.options(resources={f"more{n}": 1}).remote() for n in range(2)]
        readers += [FarReader.remote() for _ in range(2)]
        miniray.get([reader.ready.remote() for reader in readers])
        ref = miniray.put(np.ones(size, dtype=np.uint8))
        assert miniray.get([reader.sum.remote(ref) for reader in readers]) == [size] * 4
        wait_until(lambda: sum(used > 0 for used in used_bytes().values()) == 4)
        assert max(used_bytes().values()) < 2 * size
        del ref
        wait_until(stores_are_empty)
    finally:
        for node in more:
            nodes.remove_node(node)


def test_readers_get_their_value_though_nodes_that_pass_it_on_die(nodes: Cluster) -> None:
    size = 48 * MIB
    more = [nodes.add_node(num_cpus=1, resources={f"more{n}": 1}) for n in range(4)]
    try:
        readers = [Reader.options(resources={f"more{n}": 1}).remote() for n in range(4)]
        miniray.get([reader.ready.remote() for reader in readers])
        ref = miniray.put(np.ones(size, dtype=np.uint8))
        sums = [reader.sum.remote(ref) for reader in readers]
        ids = [node.node_id for node in more]
        wait_until(lambda: any(used_bytes().get(id, 0) for id in ids))
        for node in more[:2]:  # those that asked first
            os.kill(node.pids["node"], signal.SIGKILL)
        assert miniray.get(sums[2:], timeout=60) == [size] * 2
    finally:
        for node in more:
            node.stop(graceful=False)
            nodes.remove_node(node)
    wait_until(lambda: len(used_bytes()) == 3)


# --- waiting for values to be here -----------------------------------------------------------
def test_wait_brings_what_comes_next_while_others_are_ready(nodes: Cluster) -> None:
    ready, later = miniray.put(1), [there(MIB) for _ in range(2)]
    assert miniray.wait([ready, *later], num_returns=1, timeout=30) == ([ready], later)
    wait_until(lambda: whole_bytes() >= 2 * MIB)
    with frozen(source(nodes)):  # no more is needed from there
        assert [int(array.sum()) for array in miniray.get(later, timeout=10)] == [MIB] * 2


@pytest.mark.parametrize("count", [1, 12])
def test_wait_counts_a_value_when_it_is_on_this_node(nodes: Cluster, count: int) -> None:
    refs = [there(MIB) for _ in range(count)]
    with frozen(source(nodes)):
        assert miniray.wait(refs, num_returns=count, timeout=0.3) == ([], refs)
        elsewhere = miniray.wait(refs, num_returns=count, timeout=0, fetch_local=False)
        assert elsewhere == (refs, [])
    assert miniray.wait(refs, num_returns=count, timeout=30) == (refs, [])
    assert miniray.wait(refs, num_returns=count, timeout=0) == (refs, [])
    with frozen(source(nodes)):  # no more is needed from there
        assert sum(int(array.sum()) for array in miniray.get(refs, timeout=10)) == count * MIB


def test_wait_without_patience_begins_to_bring_a_value(nodes: Cluster) -> None:
    ref = there(MIB)
    with frozen(source(nodes)):
        assert miniray.wait([ref], timeout=0) == ([], [ref])
    wait_until(lambda: miniray.wait([ref], timeout=0)[0] == [ref])


def test_wait_counts_a_value_that_another_process_of_this_node_has_read(nodes: Cluster) -> None:
    ref = there(MIB)
    reader = Reader.options(resources={"node:__internal_head__": 0.001}).remote()
    assert miniray.get(reader.sum.remote(ref)) == MIB
    assert miniray.wait([ref], timeout=0) == ([ref], [])


def test_what_wait_brings_stops_with_the_last_ref(nodes: Cluster) -> None:
    ref = there(MIB)
    with frozen(source(nodes)):
        assert miniray.wait([ref], timeout=0.1) == ([], [ref])
        del ref
    wait_until(stores_are_empty)


# --- what stops -------------------------------------------------------------------------------
def test_get_that_runs_out_of_time_stops_the_transfer(nodes: Cluster) -> None:
    ref = there(4 * MIB)
    with frozen(source(nodes)):
        with pytest.raises(GetTimeoutError, match="another node"):
            miniray.get(ref, timeout=0.2)
        with pytest.raises(GetTimeoutError, match="another node"):
            miniray.get([ref, ref], timeout=0)
    here = nodes.head_node
    assert here is not None
    reader = FarReader.remote()
    assert miniray.get(reader.sum.remote(ref)) == 4 * MIB  # all that was asked there is answered
    wait_until(lambda: used_bytes()[here.node_id] == 0)  # as of its next heartbeat
    assert miniray.get(ref, timeout=30).sum() == 4 * MIB
    assert miniray.get(ref, timeout=0).sum() == 4 * MIB


def test_awaiting_a_value_on_its_way_can_be_cancelled(nodes: Cluster) -> None:
    ref = there(4 * MIB)

    async def read() -> Any:
        return await ref

    async def main() -> int:
        with pytest.raises(asyncio.TimeoutError):
            await asyncio.wait_for(read(), 0.2)
        os.kill(source(nodes).pids["node"], signal.SIGCONT)
        return int((await read()).sum())

    with frozen(source(nodes)):
        assert asyncio.run(main()) == 4 * MIB


def test_a_call_that_waits_for_its_arguments_can_be_cancelled(nodes: Cluster) -> None:
    ref = there(MIB)

    @miniray.remote(num_cpus=0, resources={"far": 1})
    def total(array: Any) -> int:
        return int(array.sum())

    assert miniray.get(total.remote(np.ones(1))) == 1
    with frozen(source(nodes)):
        call = total.remote(ref)
        assert miniray.wait([call], timeout=0.3) == ([], [call])
        miniray.cancel(call)
        with pytest.raises(TaskCancelledError):
            miniray.get(call, timeout=10)
    assert miniray.get(total.remote(ref)) == MIB


def test_a_reader_killed_half_way_leaves_nothing(nodes: Cluster) -> None:
    ref = there(64 * MIB)
    reader = FarReader.remote()
    pid = miniray.get(reader.ready.remote())
    call = reader.sum.remote(ref)
    wait_until(lambda: used_bytes()[far(nodes).node_id] > 0)
    os.kill(pid, signal.SIGKILL)
    wait_until(lambda: miniray.wait([call], timeout=0)[0])
    del ref
    wait_until(stores_are_empty)


# --- arguments that move early -------------------------------------------------------------------
def test_arguments_move_while_their_call_waits_in_the_queue(nodes: Cluster, tmp_path: Path) -> None:
    reader = FarReader.remote()
    go = tmp_path / "go"
    busy = reader.wait_for.remote(str(go))
    refs = [there(MIB), there(2 * MIB)]
    call = reader.sum.remote(*refs)
    other = FarReader.remote()
    wait_until(lambda: miniray.get(other.whole_bytes.remote()) >= 3 * MIB)
    assert miniray.wait([busy, call], timeout=0) == ([], [busy, call])
    with frozen(source(nodes)):
        go.touch()
        assert miniray.get(call, timeout=10) == 3 * MIB


def test_arguments_of_a_call_cancelled_in_the_queue_do_not_move(
    nodes: Cluster, tmp_path: Path
) -> None:
    reader = FarReader.remote()
    go = tmp_path / "go"
    busy = reader.wait_for.remote(str(go))
    refs = [there(MIB), there(MIB)]
    with frozen(source(nodes)):
        calls = [reader.sum.remote(ref) for ref in refs]
        for call in calls:
            miniray.cancel(call)
        go.touch()
        miniray.get(busy)
        for call in calls:
            with pytest.raises(TaskCancelledError):
                miniray.get(call, timeout=10)
    assert miniray.get(reader.sum.remote(np.ones(1))) == 1
    wait_until(lambda: used_bytes()[source(nodes).node_id] > 2 * MIB)
    wait_until(lambda: used_bytes()[far(nodes).node_id] == 0)  # as of its next heartbeat


def test_a_method_that_waits_for_its_arguments_can_be_cancelled(nodes: Cluster) -> None:
    reader, other = FarReader.remote(), FarReader.remote()
    miniray.get([reader.ready.remote(), other.ready.remote()])
    ref = there(MIB)
    with frozen(source(nodes)):
        call = reader.sum.remote(ref)
        wait_until(lambda: miniray.get(other.tables.remote())["requests"])
        miniray.cancel(call)
        with pytest.raises(TaskCancelledError):
            miniray.get(call, timeout=10)
        assert miniray.get(reader.sum.remote(np.ones(1))) == 1
    assert miniray.get(reader.sum.remote(ref)) == MIB


def test_arguments_of_a_call_that_cannot_run_are_wanted_no_more(nodes: Cluster) -> None:
    @miniray.remote(num_cpus=0, resources={"far": 1}, concurrency_groups={"io": 1})
    class Grouped:
        def take(self, _array: Any) -> None:
            pass

        def tables(self) -> dict[str, int]:
            return node_tables()

    actor = Grouped.remote()
    ref = there(MIB)
    with pytest.raises(ValueError, match="concurrency group"):
        miniray.get(actor.take.options(concurrency_group="none").remote(ref))
    wait_until(lambda: not miniray.get(actor.tables.remote())["requests for copies"])


def test_several_values_of_one_get_move_together(nodes: Cluster) -> None:
    refs = [there(MIB) for _ in range(4)]
    here = nodes.head_node
    assert here is not None
    arrays = miniray.get(refs, timeout=30)
    assert [int(array.sum()) for array in arrays] == [MIB] * 4
    wait_until(lambda: used_bytes()[here.node_id] >= 4 * MIB)


@pytest.mark.parametrize("sends", [True, False], ids=["sends", "receives"])
def test_a_value_arrives_though_the_mover_of_a_node_is_stopped(nodes: Cluster, sends: bool) -> None:
    reader = FarReader.remote()
    assert miniray.get(reader.sum.remote(np.ones(2 * MIB, dtype=np.uint8))) == 2 * MIB
    here = nodes.head_node
    assert here is not None
    [mover] = movers_of(here if sends else far(nodes))
    mover.suspend()
    total = reader.sum.remote(np.ones(64 * MIB, dtype=np.uint8))
    assert miniray.get(total, timeout=50) == 64 * MIB
    wait_until(lambda: not mover.is_running())
    assert miniray.get(reader.sum.remote(np.ones(2 * MIB, dtype=np.uint8))) == 2 * MIB
