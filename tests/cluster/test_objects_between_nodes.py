"""Values that move between nodes, and that are made again when a node takes them with it."""

from __future__ import annotations

import functools
import gc
import itertools
import os
import random
import signal
import sys
import threading
from typing import TYPE_CHECKING, Any

import numpy as np
import psutil
import pytest
from cluster_helpers import count_up, is_alive, wait_for_file, wait_until
from object_helpers import inventory, known_objects, movers_of
from running_cluster import running_cluster
from watched_output import watch

import miniray
from miniray.common.config import config
from miniray.common.runtime import current_runtime
from miniray.exceptions import (
    ObjectLostError,
    OwnerDiedError,
    RayActorError,
    RayTaskError,
    TaskCancelledError,
)
from miniray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from miniray.cluster_utils import Cluster, Node

MIB = 1024 * 1024


@pytest.fixture(scope="module")
def nodes(session_root: Path) -> Iterator[Cluster]:
    """A head node, and one with the resource ``far``, that tell often what they store."""
    with running_cluster(
        {"num_cpus": 4},
        {"num_cpus": 4, "resources": {"far": 100}},
        variables={"MINIRAY_HEARTBEAT_INTERVAL": "0.05"},
    ) as cluster:
        yield cluster


def used_bytes() -> dict[str, int]:
    """Bytes in the object store of each living node, as of its last heartbeat."""
    return {n["NodeID"]: n["ObjectStoreUsed"] for n in miniray.nodes() if n["Alive"]}


def stores_are_empty() -> bool:
    return not any(used_bytes().values())


def no_entry_is_left() -> bool:
    gc.collect()  # an error that a test caught and its frame, which holds refs, hold each other
    current_runtime().refs.drain()  # type: ignore[attr-defined]
    return not known_objects()


@pytest.fixture(autouse=True)
def nothing_is_left(nodes: Cluster) -> Iterator[None]:
    """Whatever a test does, all stores are empty after it."""
    yield
    wait_until(stores_are_empty)


@pytest.fixture
def third(nodes: Cluster) -> Iterator[Node]:
    """A node for one test, with the resource ``third``, that it may kill."""
    node = nodes.add_node(num_cpus=2, resources={"third": 100})
    wait_until(lambda: miniray.cluster_resources().get("third") == 100)
    yield node
    nodes.remove_node(node)
    wait_until(lambda: "third" not in miniray.cluster_resources())


def kill(node: Node) -> None:
    """The machine loses power."""
    os.kill(node.pids["node"], signal.SIGKILL)
    node.stop(graceful=False)


def softly_on(node: Node) -> dict[str, Any]:
    """Options of a task that runs there as long as that node lives."""
    return {"scheduling_strategy": NodeAffinitySchedulingStrategy(node.node_id, soft=True)}


@miniray.remote(num_cpus=0)
class Holder:
    """Holds refs and values under names."""

    def __init__(self) -> None:
        self.held: dict[Any, Any] = {}

    def hold(self, name: Any, value: Any) -> None:
        self.held[name] = value

    def give(self, name: Any) -> Any:
        return self.held[name]

    def drop(self, name: Any = None) -> None:
        if name is None:
            self.held.clear()
        else:
            self.held.pop(name, None)

    def sum(self, array: Any) -> int:
        return int(array.sum())

    def sum_of(self, refs: list[Any]) -> int:
        return sum(int(miniray.get(ref).sum()) for ref in refs)

    def make(self, size: int) -> Any:
        return np.ones(size, dtype=np.uint8)

    def put(self, size: int) -> list[Any]:
        return [miniray.put(np.ones(size, dtype=np.uint8))]

    def run(self, function: Any, *args: Any) -> Any:
        return function(self, *args)

    def pid(self) -> int:
        return os.getpid()

    def entries(self) -> int:
        table = current_runtime().table  # type: ignore[attr-defined]
        return sum(not table.is_actor(entry.id) for entry in table.snapshot())


FarHolder = Holder.options(resources={"far": 1})
ThirdHolder = Holder.options(resources={"third": 1})


@miniray.remote(num_cpus=0)
def ones(size: int) -> Any:
    return np.ones(size, dtype=np.uint8)


# --- moving ----------------------------------------------------------------------------
def test_many_readers_share_one_transfer_and_one_copy(nodes: Cluster) -> None:
    size = 32 * MIB
    holders = [FarHolder.remote() for _ in range(6)]
    miniray.get([holder.pid.remote() for holder in holders])
    ref = miniray.put(np.ones(size, dtype=np.uint8))
    assert miniray.get([holder.sum.remote(ref) for holder in holders]) == [size] * 6
    far = nodes.worker_nodes[0].node_id
    wait_until(lambda: used_bytes()[far] > 0)
    assert used_bytes()[far] < 2 * size


def test_a_value_owned_by_one_node_and_stored_on_another_is_freed_on_both() -> None:
    ref = FarHolder.remote().make.remote(4 * MIB)
    assert miniray.get(ref).sum() == 4 * MIB
    wait_until(lambda: sum(value > 0 for value in used_bytes().values()) == 2)
    del ref
    wait_until(stores_are_empty)


def test_a_ref_passes_through_processes_of_three_nodes(third: Node) -> None:
    holders = [Holder.remote(), FarHolder.remote(), ThirdHolder.remote()]
    there = softly_on(third)

    @miniray.remote(num_cpus=0)
    def hand(refs: list[Any], chain: list[Any]) -> None:
        miniray.get(chain[0].hold.remote("it", refs))
        if len(chain) > 1:
            miniray.get(hand.options(**there).remote(refs, chain[1:]))

    ref = miniray.put(np.ones(MIB, dtype=np.uint8))
    miniray.get(hand.remote([ref], holders))
    del ref
    for holder in holders:
        [found] = miniray.get(holder.give.remote("it"))
        assert miniray.get(found).sum() == MIB
        del found
    miniray.get([holder.drop.remote() for holder in holders])
    wait_until(stores_are_empty)


def test_a_value_dropped_while_it_moves_leaves_no_copy() -> None:
    holder = FarHolder.remote()
    for _ in range(10):
        holder.sum.remote(np.ones(8 * MIB, dtype=np.uint8))
        holder.sum.remote(miniray.put(np.ones(8 * MIB, dtype=np.uint8)))
    assert miniray.get(holder.sum.remote(np.ones(1))) == 1
    wait_until(stores_are_empty)


# --- owners that end -----------------------------------------------------------------------
@pytest.mark.parametrize("far", [False, True], ids=["here", "elsewhere"])
def test_a_worker_killed_before_it_tells_of_its_result_leaves_nothing(far: bool) -> None:
    def die_when_written(_self: Any) -> Any:
        memory = current_runtime().shared_memory  # type: ignore[attr-defined]
        write = memory.write

        def write_and_die(*args: Any) -> None:
            write(*args)
            current_runtime().link.flush()  # type: ignore[attr-defined]
            os.kill(os.getpid(), signal.SIGKILL)

        memory.write = write_and_die
        return np.ones(MIB, dtype=np.uint8)

    kept = ones.remote(MIB)
    holder = (FarHolder if far else Holder).remote()
    mine = miniray.get(holder.make.remote(MIB))
    with pytest.raises(RayActorError):
        miniray.get(holder.run.remote(die_when_written))
    assert mine.sum() == miniray.get(kept).sum() == MIB
    del mine, kept
    wait_until(stores_are_empty)


def test_values_stored_elsewhere_are_freed_when_their_owner_is_killed() -> None:
    owner = Holder.remote()

    def keep_results(self: Any) -> int:
        self.held["refs"] = [ones.options(resources={"far": 1}).remote(MIB) for _ in range(3)]
        return len(miniray.wait(self.held["refs"], num_returns=3)[0])

    assert miniray.get(owner.run.remote(keep_results)) == 3
    wait_until(lambda: sum(used_bytes().values()) >= 3 * MIB)
    os.kill(miniray.get(owner.pid.remote()), signal.SIGKILL)
    wait_until(stores_are_empty)


def test_values_stored_elsewhere_are_freed_when_their_owners_node_dies(third: Node) -> None:
    owner = ThirdHolder.remote()

    def keep_results(self: Any) -> int:
        self.held["refs"] = [ones.options(resources={"far": 1}).remote(MIB) for _ in range(3)]
        return len(miniray.wait(self.held["refs"], num_returns=3)[0])

    assert miniray.get(owner.run.remote(keep_results)) == 3
    wait_until(lambda: sum(used_bytes().values()) >= 3 * MIB)
    kill(third)
    wait_until(stores_are_empty)


@pytest.mark.parametrize("size", [10, 4 * MIB], ids=["small", "big"])
def test_what_a_worker_that_ended_by_rule_owned_elsewhere_stays_good(size: int) -> None:
    @miniray.remote(max_calls=1, num_cpus=0)
    def make() -> Any:
        ref = ones.options(resources={"far": 1}).remote(size)
        return os.getpid(), [ref, miniray.put([ref])]

    pid, refs = miniray.get(make.remote())
    wait_until(lambda: not os.path.exists(f"/proc/{pid}"))
    holder = FarHolder.remote()
    assert miniray.get(holder.sum_of.remote([refs[0]])) == size
    miniray.get(holder.hold.remote("it", refs))
    assert miniray.get(refs[0]).sum() == size
    [nested] = miniray.get(refs[1])
    assert miniray.get(nested).sum() == size
    del refs, nested
    assert miniray.get(holder.sum_of.remote(miniray.get(holder.give.remote("it"))[:1])) == size
    miniray.get(holder.drop.remote())


def test_what_was_left_to_a_daemon_is_freed_when_its_node_dies(third: Node) -> None:
    @miniray.remote(max_calls=1, num_cpus=0, resources={"third": 1})
    def make() -> Any:
        return os.getpid(), [ones.options(resources={"far": 1}).remote(MIB)]

    pid, refs = miniray.get(make.remote())
    wait_until(lambda: not os.path.exists(f"/proc/{pid}"))
    miniray.wait(refs)
    wait_until(lambda: sum(used_bytes().values()) >= MIB)
    kill(third)
    wait_until(stores_are_empty)
    with pytest.raises((OwnerDiedError, ObjectLostError)):
        miniray.get(refs[0])


# --- copies that outlive their node ------------------------------------------------------------
def read_and_let_go(holder: Any, refs: list[Any]) -> None:
    """Leave copies on the node of an actor, which nobody has mapped."""
    assert miniray.get(holder.sum_of.remote(refs)) == MIB * len(refs)


def test_a_copy_takes_the_place_of_a_value_whose_node_died(third: Node) -> None:
    made = ThirdHolder.remote().make.remote(MIB)  # which nobody can make again
    reader = FarHolder.remote()
    read_and_let_go(reader, [made])
    kill(third)
    assert miniray.get(made, timeout=30).sum() == MIB  # moved here from the node of the reader
    read_and_let_go(reader, [made])
    other = Holder.remote()
    read_and_let_go(other, [made])
    del made
    wait_until(stores_are_empty)


def test_values_that_nobody_copied_are_told_from_those_that_somebody_did(third: Node) -> None:
    actor = ThirdHolder.remote()
    refs = [actor.make.remote(MIB) for _ in range(20)]
    readers = [FarHolder.remote(), Holder.remote()]
    for number, reader in enumerate(readers):
        read_and_let_go(reader, refs[number:15])  # most of them have two copies
    miniray.wait(refs, num_returns=len(refs), fetch_local=False)
    kill(third)
    with pytest.raises(ObjectLostError, match=f"{third.node_id}.*results of actors"):
        miniray.get(refs[17], timeout=30)
    assert sum(int(array.sum()) for array in miniray.get(refs[:15], timeout=30)) == 15 * MIB
    for ref in refs[15:]:
        with pytest.raises(ObjectLostError, match="results of actors"):
            miniray.get(ref, timeout=30)
    del refs, ref
    wait_until(stores_are_empty)


def test_a_copy_is_read_rather_than_a_task_run_again(third: Node, tmp_path: Path) -> None:
    @miniray.remote(num_cpus=0, max_retries=3)
    def make() -> Any:
        count_up(tmp_path / "runs")
        return np.ones(MIB, dtype=np.uint8)

    ref = make.options(**softly_on(third)).remote()
    read_and_let_go(FarHolder.remote(), [ref])
    kill(third)
    assert miniray.get(ref, timeout=30).sum() == MIB
    assert (tmp_path / "runs").stat().st_size == 1


@pytest.mark.parametrize("read", [False, True], ids=["only dropped", "read"])
def test_a_copy_of_what_a_worker_that_ended_left_behind_is_kept(third: Node, read: bool) -> None:
    @miniray.remote(max_calls=1, num_cpus=0)
    def make() -> Any:
        return os.getpid(), [ones.options(resources={"third": 1}, max_retries=0).remote(MIB)]

    pid, refs = miniray.get(make.remote())
    reader = FarHolder.remote()
    read_and_let_go(reader, refs)
    wait_until(lambda: not os.path.exists(f"/proc/{pid}"))
    kill(third)
    if read:
        assert miniray.get(refs[0], timeout=30).sum() == MIB
        read_and_let_go(reader, refs)
    del refs
    wait_until(stores_are_empty)


def test_a_borrower_reads_a_copy_of_a_value_whose_node_died(third: Node) -> None:
    made = [ThirdHolder.remote().make.remote(MIB)]
    reader, borrower = FarHolder.remote(), Holder.remote()
    miniray.get(borrower.hold.remote("it", made))
    read_and_let_go(reader, made)
    kill(third)

    def total(self: Any) -> int:
        return int(miniray.get(self.held["it"][0]).sum())

    assert miniray.get(borrower.run.remote(total), timeout=30) == MIB
    del made
    assert miniray.get(borrower.run.remote(total), timeout=30) == MIB
    miniray.get(borrower.drop.remote())


def test_a_copy_goes_with_its_owner_when_both_nodes_of_a_value_are_gone(third: Node) -> None:
    owner, source = Holder.remote(), ThirdHolder.remote()

    def keep(self: Any, source: Any) -> list[Any]:
        self.held["refs"] = [source.make.remote(MIB)]
        return list(self.held["refs"])

    refs = miniray.get(owner.run.remote(keep, source))
    read_and_let_go(FarHolder.remote(), refs)
    kill(third)
    wait_until(lambda: "third" not in miniray.cluster_resources())
    os.kill(miniray.get(owner.pid.remote()), signal.SIGKILL)
    wait_until(stores_are_empty)


# --- readers that do other things meanwhile ------------------------------------------------------
@miniray.remote(num_cpus=0)
class Loop:
    """An asyncio actor that tells in which order its methods begin."""

    def __init__(self) -> None:
        self.begun: list[str] = []

    async def total(self, name: str, array: Any) -> int:
        self.begun.append(name)
        return int(array.sum())

    async def begin(self, name: str) -> list[str]:
        self.begun.append(name)
        return self.begun


def test_an_asyncio_actor_serves_others_while_an_argument_is_on_its_way(third: Node) -> None:
    loop, other = Loop.remote(), Holder.remote()
    miniray.get([loop.begin.remote("first"), other.pid.remote()])
    ref = ThirdHolder.remote().make.remote(64 * MIB)
    miniray.wait([ref], fetch_local=False)
    os.kill(third.pids["node"], signal.SIGSTOP)
    try:
        total = loop.total.remote("with the argument", ref)
        behind = loop.begin.remote("behind it")
        cancelled = loop.total.remote("cancelled", ref)
        miniray.cancel(cancelled)
        last = loop.begin.remote("behind the cancelled one")
        with pytest.raises(TaskCancelledError):
            miniray.get(cancelled, timeout=30)

        def call(_self: Any, loop: Any) -> Any:
            return miniray.get(loop.begin.remote("by another"))

        assert miniray.get(other.run.remote(call, loop), timeout=30) == ["first", "by another"]
    finally:
        os.kill(third.pids["node"], signal.SIGCONT)
    assert miniray.get(total, timeout=30) == 64 * MIB
    in_order = ["with the argument", "behind it", "behind the cancelled one"]
    assert miniray.get(behind, timeout=30)[2:4] == in_order[:2]
    assert miniray.get(last, timeout=30)[2:] == in_order


def test_an_argument_of_an_asyncio_actor_that_is_lost_is_made_again(third: Node) -> None:
    ref = ones.options(max_retries=1, **softly_on(third)).remote(MIB)
    miniray.wait([ref], fetch_local=False)
    loop = Loop.remote()
    assert miniray.get(loop.begin.remote("first"))
    kill(third)
    calls = [loop.total.remote("again", ref), loop.begin.remote("behind it")]
    assert miniray.get(calls[0], timeout=30) == MIB
    assert miniray.get(calls[1], timeout=30)


# --- values that are made again ---------------------------------------------------------------
def test_a_source_that_dies_during_a_transfer_costs_a_retry_only(third: Node) -> None:
    ref = ones.options(max_retries=1, **softly_on(third)).remote(64 * MIB)
    miniray.wait([ref], fetch_local=False)
    os.kill(third.pids["node"], signal.SIGSTOP)  # the transfer begins and stands still
    results: list[int] = []
    reader = threading.Thread(target=lambda: results.append(int(miniray.get(ref).sum())))
    reader.start()
    reader.join(0.3)
    assert reader.is_alive()
    kill(third)
    reader.join(30)
    assert results == [64 * MIB]


def test_a_source_killed_half_way_through_a_transfer_leaves_nothing(third: Node) -> None:
    size = 256 * MIB
    ref = ThirdHolder.remote().make.remote(size)  # nobody can make it again
    miniray.wait([ref], fetch_local=False)
    errors: list[BaseException] = []

    def read() -> None:
        try:
            miniray.get(ref)
        except ObjectLostError as error:
            errors.append(error)

    reader = threading.Thread(target=read)
    reader.start()
    wait_until(lambda: any(segment["state"] == "WRITING" for segment in inventory()["segments"]))
    kill(third)
    reader.join(30)
    assert third.node_id in str(errors[0])
    wait_until(lambda: not inventory()["segments"])


def test_a_transfer_whose_source_is_killed_half_way_goes_on_from_another_copy(
    third: Node,
) -> None:
    size = 128 * MIB
    ref = ThirdHolder.remote().make.remote(size)  # nobody can make it again
    copied = FarHolder.remote()
    assert miniray.get(copied.sum.remote(ref)) == size
    sums: list[int] = []
    reader = threading.Thread(target=lambda: sums.append(int(miniray.get(ref).sum())))
    reader.start()
    wait_until(lambda: any(segment["state"] == "WRITING" for segment in inventory()["segments"]))
    kill(third)
    reader.join(40)
    assert sums == [size]


def test_a_chain_of_results_is_made_again(third: Node, tmp_path: Path) -> None:
    @miniray.remote(num_cpus=0, max_retries=1)
    def first() -> Any:
        count_up(tmp_path / "first")
        return np.ones(MIB, dtype=np.uint8)

    @miniray.remote(num_cpus=0, max_retries=1)
    def add(array: Any, more: list[Any]) -> Any:
        count_up(tmp_path / "add")
        return array + miniray.get(more[0])

    there = softly_on(third)
    begin = first.options(**there).remote()
    middle = add.options(**there).remote(begin, [begin])
    end = add.options(**there).remote(middle, [middle])
    miniray.wait([end], fetch_local=False)
    del begin, middle  # their values are freed, what made them is remembered
    kill(third)
    assert miniray.get(end, timeout=30)[0] == 4
    assert (tmp_path / "first").stat().st_size == 2
    assert (tmp_path / "add").stat().st_size == 4


def test_a_lost_argument_is_made_again_for_tasks_and_actors(third: Node) -> None:
    ref = ones.options(max_retries=3, **softly_on(third)).remote(MIB)
    holder = FarHolder.remote()
    assert miniray.get(holder.pid.remote())
    miniray.wait([ref], fetch_local=False)
    kill(third)
    calls = [holder.sum.remote(ref), holder.sum_of.remote([ref])]
    assert miniray.get(calls, timeout=30) == [MIB, MIB]

    @miniray.remote(num_cpus=0)
    def total(array: Any) -> int:
        return int(array.sum())

    assert miniray.get(total.remote(ref), timeout=30) == MIB


def test_a_borrower_gets_the_value_that_the_owner_made_again(third: Node) -> None:
    ref = ones.options(max_retries=1, **softly_on(third)).remote(MIB)
    holder = FarHolder.remote()
    miniray.get(holder.hold.remote("it", [ref]))
    miniray.wait([ref], fetch_local=False)
    kill(third)

    def total(self: Any) -> int:
        return int(miniray.get(self.held["it"][0]).sum())

    assert miniray.get(holder.run.remote(total), timeout=30) == MIB
    miniray.get(holder.drop.remote())


def test_a_lost_value_can_be_awaited(third: Node) -> None:
    import asyncio

    ref = ones.options(max_retries=1, **softly_on(third)).remote(MIB)
    future_ref = ones.options(max_retries=1, **softly_on(third)).remote(MIB)
    miniray.wait([ref, future_ref], num_returns=2, fetch_local=False)
    kill(third)

    async def read() -> int:
        return int((await ref).sum())

    assert asyncio.run(asyncio.wait_for(read(), 30)) == MIB
    assert future_ref.future().result(30).sum() == MIB


def test_several_results_of_one_task_are_made_again(third: Node) -> None:
    @miniray.remote(num_cpus=0, max_retries=1, num_returns=3)
    def three() -> Any:
        return [np.full(MIB, n, dtype=np.uint8) for n in range(3)]

    refs = three.options(**softly_on(third)).remote()
    miniray.wait(refs, num_returns=3, fetch_local=False)
    kill(third)
    assert [int(array[0]) for array in miniray.get(refs, timeout=30)] == [0, 1, 2]


@pytest.mark.parametrize("ended", [True, False], ids=["ended", "running"])
def test_items_of_a_generator_are_made_again(third: Node, tmp_path: Path, ended: bool) -> None:
    @miniray.remote(num_cpus=0, max_retries=1)
    def items() -> Any:
        first = count_up(tmp_path / "runs") == 1
        for n in range(4):
            if n == 3 and first and not ended:
                wait_for_file(tmp_path / "go")
            yield n if n == 1 else np.full(MIB, n, dtype=np.uint8)

    @miniray.remote(num_cpus=0, resources={"far": 0.01})
    def first_of(array: Any) -> int:
        return int(array[0])

    stream = items.options(**softly_on(third)).remote()
    refs = [next(stream) for _ in range(3)]
    if ended:
        refs += list(stream)
    dropped = refs.pop(0)
    del dropped
    kill(third)
    assert miniray.get(first_of.remote(refs[1]), timeout=30) == 2
    assert miniray.get(refs[0]) == 1
    (tmp_path / "go").touch()
    refs += list(stream)
    assert miniray.get(refs[2], timeout=30)[0] == 3


def test_a_stream_of_which_some_items_are_made_again_does_not_warn_of_the_others(
    third: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    @miniray.remote(num_cpus=0, max_retries=1, _generator_backpressure_num_objects=2)
    def items() -> Any:
        try:
            for n in range(9):
                yield np.full(MIB, n, dtype=np.uint8)
        finally:
            print("no more is made", file=sys.stderr)

    shown = watch(monkeypatch, "stderr")
    stream = items.options(**softly_on(third)).remote()
    refs = [next(stream) for _ in range(2)]
    kill(third)
    assert [miniray.get(ref, timeout=30)[0] for ref in refs] == [0, 1]
    stream.close()  # a run of the stream itself, which may have made them too, waits for its reader
    shown.wait_for("no more is made")
    assert "yielded more values" not in shown.getvalue()


@miniray.remote(num_cpus=0, max_retries=1)
def joined(first: Any, others: Any) -> Any:
    """A large value, made from one that is given as a value or a ref, and from refs in a list."""
    return np.concatenate([first, *miniray.get(others)])


def test_what_was_made_from_values_that_were_dropped_is_made_again(third: Node) -> None:
    given = np.full(MIB, 1, dtype=np.uint8)
    refs = []
    for first in (given, miniray.put(given)):
        others = [miniray.put(np.full(MIB, n, dtype=np.uint8)) for n in (2, 3)]
        refs.append(joined.options(**softly_on(third)).remote(first, others))
    del first, others
    miniray.wait(refs, num_returns=2, fetch_local=False)
    kill(third)
    made = miniray.get(refs, timeout=30)
    assert [[int(array[n * MIB]) for n in range(3)] for array in made] == [[1, 2, 3]] * 2
    del refs, made
    wait_until(lambda: not inventory()["segments"])


def test_items_of_a_generator_under_a_decorator_are_made_again(third: Node) -> None:
    """What streams is then any iterator, or whatever else has items; all are read, or some."""

    def as_kind(function: Any) -> Any:
        @functools.wraps(function)
        def decorated(kind: Any, count: int) -> Any:
            return kind(list(function(kind, count)))

        return decorated

    @miniray.remote(num_cpus=0, max_retries=1, _generator_backpressure_num_objects=2)
    @as_kind
    def items(_kind: Any, count: int) -> Any:
        for n in range(count):
            yield np.full(MIB, n, dtype=np.uint8)

    asked = [*itertools.product([iter, list], [1, 9])]
    streams = [items.options(**softly_on(third)).remote(*arguments) for arguments in asked]
    read = [
        [next(stream) for _ in range(min(count, 2))]
        for stream, (_, count) in zip(streams, asked, strict=True)
    ]
    kill(third)
    for refs, arguments in zip(read, asked, strict=True):
        found = [miniray.get(ref, timeout=30) for ref in refs]
        sizes = [(array.size, array[0]) for array in found]
        assert sizes == [(MIB, n) for n in range(len(refs))], arguments


def test_items_of_a_generator_with_large_arguments_are_made_again(third: Node) -> None:
    @miniray.remote(num_cpus=0, max_retries=1)
    def parts(whole: Any, ref: Any) -> Any:
        yield from np.split(whole, 2)
        yield miniray.get(ref[0])

    ref = [miniray.put(np.full(MIB, 9, dtype=np.uint8))]
    stream = parts.options(**softly_on(third)).remote(np.full(2 * MIB, 7, dtype=np.uint8), ref)
    refs = list(stream)
    del ref, stream
    refs.pop(0)
    kill(third)
    assert [int(miniray.get(ref, timeout=30)[-1]) for ref in refs] == [7, 9]
    del refs
    wait_until(lambda: not inventory()["segments"])


def test_what_may_be_needed_again_is_kept_no_longer_than_its_result(third: Node) -> None:
    """And not at all for results that are lost together with this program."""
    here = miniray.get_runtime_context().get_node_id()
    for node, segments in ((third.node_id, 2), (here, 1)):
        where = NodeAffinitySchedulingStrategy(node, soft=False)
        first, other = np.ones(MIB, dtype=np.uint8), miniray.put(np.ones(MIB, dtype=np.uint8))
        ref = joined.options(scheduling_strategy=where).remote(first, [other])
        miniray.wait([ref], fetch_local=False)
        del first, other
        wait_until(lambda count=segments: len(inventory()["segments"]) == count)
        del ref
        wait_until(lambda: not inventory()["segments"])


def test_what_cannot_be_made_again_says_why(third: Node) -> None:
    task, maker = ones.options(max_retries=0, **softly_on(third)), ThirdHolder.remote()
    lost = {
        "max_retries": [task.remote(MIB) for _ in range(3)],
        "results of actors": [maker.make.remote(MIB) for _ in range(3)],
    }
    miniray.wait([*itertools.chain(*lost.values())], num_returns=6, fetch_local=False)
    holder = FarHolder.remote()
    assert miniray.get(holder.pid.remote())
    kill(third)
    for reason, (owned, borrowed, given) in lost.items():
        for read in (owned, holder.sum_of.remote([borrowed]), holder.sum.remote(given)):
            with pytest.raises(ObjectLostError, match=reason) as info:
                miniray.get(read, timeout=30)
            assert third.node_id in str(info.value)
            name = "ones" if reason == "max_retries" else "Holder.make"
            assert f"it was a result of {name}, and" in str(info.value)


def test_calls_that_an_argument_was_lost_for_are_named(third: Node) -> None:
    lost = ones.options(max_retries=0, **softly_on(third)).remote(MIB)
    miniray.wait([lost], fetch_local=False)
    kill(third)

    @miniray.remote(num_cpus=0)
    def add(first: int, second: Any) -> int:
        return first + int(second.sum())

    result = add.remote(1, second=lost)
    for ref, told in (
        (result, "add() did not run: this is the error of its argument 'second'."),
        (FarHolder.remote().sum.remote(lost), "Holder.sum() did not run: this is the error of"),
        (add.remote(2, result), "add() did not run: this is the error of its argument 'second'."),
    ):
        with pytest.raises(ObjectLostError) as info:
            miniray.get(ref, timeout=30)
        assert isinstance(info.value, RayTaskError)
        assert str(info.value).splitlines()[-1].startswith(told)


def test_a_put_value_of_a_dead_node_is_lost_with_its_owner(third: Node) -> None:
    [ref] = miniray.get(ThirdHolder.remote().put.remote(MIB))
    kill(third)
    with pytest.raises(OwnerDiedError, match=f"on node {third.node_id[:8]}"):
        miniray.get(ref, timeout=30)


def test_a_task_runs_again_as_often_as_it_may_and_no_more(nodes: Cluster) -> None:
    ref = None
    for round in range(3):
        node = nodes.add_node(num_cpus=1, resources={"third": 100})
        wait_until(lambda: miniray.cluster_resources().get("third") == 100)
        if ref is None:
            ref = ones.options(max_retries=1, resources={"third": 1}).remote(MIB)
            miniray.wait([ref], fetch_local=False)
        kill(node)
        nodes.remove_node(node)
        wait_until(lambda: "third" not in miniray.cluster_resources())
        if round == 0:
            node = nodes.add_node(num_cpus=1, resources={"third": 100})
            reader = ThirdHolder.remote()  # there, so that there is no copy elsewhere
            assert miniray.get(reader.sum.remote(ref), timeout=30) == MIB
            kill(node)
            nodes.remove_node(node)
            wait_until(lambda: "third" not in miniray.cluster_resources())
            with pytest.raises(ObjectLostError, match="max_retries"):
                miniray.get(ref, timeout=30)
            return


def test_a_result_stays_readable_where_it_was_read_before(third: Node) -> None:
    ref = ThirdHolder.remote().make.remote(MIB)
    array = miniray.get(ref)
    kill(third)
    wait_until(lambda: "third" not in miniray.cluster_resources())
    assert array.sum() == MIB
    assert miniray.get(ref).sum() == MIB


# --- everything at once ------------------------------------------------------------------------
def test_a_random_history_leaves_no_object_anywhere() -> None:
    seed = random.randrange(1 << 30)
    print(f"seed {seed}")
    rng = random.Random(seed)
    actors = [Holder.remote(), Holder.remote(), FarHolder.remote(), FarHolder.remote()]
    baseline = miniray.get([actor.entries.remote() for actor in actors])
    wait_until(no_entry_is_left, timeout=20, told=known_objects)  # of the tests before
    mine: list[Any] = []  # pairs of a ref and the sum of its array
    held: dict[tuple[int, int], int] = {}  # what each actor holds: name → sum
    passed = itertools.count(5)

    def size() -> int:
        return rng.choice([10, 1000, MIB // 4, MIB])

    def make_here() -> None:
        n = size()
        mine.append(([miniray.put(np.ones(n, dtype=np.uint8))], n))

    def make_there() -> None:
        n = size()
        mine.append((miniray.get(rng.choice(actors).put.remote(n)), n))

    def result_of_an_actor() -> None:
        n = size()
        mine.append(([rng.choice(actors).make.remote(n)], n))

    def result_of_a_task() -> None:
        n = size()
        where = {"resources": {"far": 1}} if rng.random() < 0.5 else {}
        mine.append(([ones.options(**where).remote(n)], n))

    def join() -> None:
        some = rng.sample(mine, min(len(mine), 3))
        mine.append(([ref for refs, _ in some for ref in refs], sum(total for _, total in some)))

    def nest() -> None:
        refs, total = rng.choice(mine)
        outer = miniray.put([refs, np.ones(size(), dtype=np.uint8)])
        mine.append((miniray.get(outer)[0], total))

    def hand_over() -> None:
        actor, name = rng.randrange(4), rng.randrange(5)
        refs, total = rng.choice(mine)
        actors[actor].hold.remote(name, refs)
        held[actor, name] = total

    def hand_on() -> None:
        if held:
            (actor, name), total = rng.choice(list(held.items()))
            other = rng.randrange(4)

            def pass_on(self: Any, name: int, other: Any, new_name: int) -> None:
                miniray.get(other.hold.remote(new_name, self.held[name]))

            if other != actor:
                # A name of its own: nothing orders this call behind what others sent there.
                new_name = next(passed)
                miniray.get(actors[actor].run.remote(pass_on, name, actors[other], new_name))
                held[other, new_name] = total

    def take_back() -> None:
        if held:
            (actor, name), total = rng.choice(list(held.items()))
            mine.append((miniray.get(actors[actor].give.remote(name)), total))

    def drop_there() -> None:
        if held:
            actor, name = rng.choice(list(held))
            del held[actor, name]
            actors[actor].drop.remote(name)

    def drop_here() -> None:
        mine.pop(rng.randrange(len(mine)))

    def read_here() -> None:
        refs, total = rng.choice(mine)
        assert sum(int(array.sum()) for array in miniray.get(refs)) == total

    def read_there() -> None:
        refs, total = rng.choice(mine)
        assert miniray.get(rng.choice(actors).sum_of.remote(refs)) == total

    steps = [
        make_here, make_there, result_of_an_actor, result_of_a_task, join, nest, hand_over,
        hand_over, hand_on, take_back, drop_there, drop_here, drop_here, read_here, read_there,
    ]  # fmt: skip
    make_here()
    for _ in range(400):
        rng.choice(steps)()
        if not mine:
            make_here()
        while len(mine) > 20:
            drop_here()

    mine.clear()
    miniray.get([actor.drop.remote() for actor in actors])
    wait_until(stores_are_empty)
    wait_until(
        lambda: miniray.get([actor.entries.remote() for actor in actors]) == baseline, timeout=10
    )

    wait_until(no_entry_is_left, timeout=20, told=known_objects)


def test_an_actor_that_dies_while_others_read_from_it_leaves_nothing() -> None:
    source = FarHolder.remote()
    refs = [miniray.get(source.put.remote(MIB))[0] for _ in range(5)]
    holder = Holder.remote()
    pid = miniray.get(source.pid.remote())
    reads = [holder.sum_of.remote([ref]) for ref in refs]
    os.kill(pid, signal.SIGKILL)
    for read in reads:
        try:
            assert miniray.get(read, timeout=30) == MIB
        except OwnerDiedError:
            pass
    with pytest.raises(RayActorError):
        miniray.get(source.pid.remote())
    wait_until(stores_are_empty)


def test_calls_that_a_stopped_actor_elsewhere_has_no_room_for_outlive_their_caller(
    nodes: Cluster,
) -> None:
    """Those of a worker that ends by rule: they wait in it for credits."""

    @miniray.remote(num_cpus=0, resources={"far": 1})
    class Counter:
        def __init__(self) -> None:
            self.count = 0

        def pid(self) -> int:
            return os.getpid()

        def add(self, _data: bytes) -> None:
            self.count += 1

        def get(self) -> int:
            return self.count

    @miniray.remote(num_cpus=0, max_calls=1)
    def call_often(counter: Any, count: int) -> int:
        for _ in range(count):
            counter.add.remote(bytes(90_000))
        return os.getpid()

    counter = Counter.remote()
    pid = miniray.get(counter.pid.remote())
    os.kill(pid, signal.SIGSTOP)
    count = 2 * config().relay_window // 90_000
    caller = miniray.get(call_often.remote(counter, count), timeout=30)
    assert psutil.pid_exists(caller)
    os.kill(pid, signal.SIGCONT)
    wait_until(lambda: miniray.get(counter.get.remote(), timeout=30) == count)
    wait_until(lambda: not is_alive(caller))


@pytest.mark.parametrize("sends", [True, False], ids=["sends", "receives"])
def test_a_transfer_whose_mover_is_killed_goes_on(nodes: Cluster, third: Node, sends: bool) -> None:
    reader = ThirdHolder.remote()
    assert nodes.head_node is not None
    node = nodes.head_node if sends else third

    def large_value_came() -> bool:
        return bool(miniray.get(reader.sum.remote(np.ones(2 * MIB, dtype=np.uint8))))

    for _ in range(2):
        # A value that meets a mover's end comes without one; the next has a new mover started.
        wait_until(lambda: large_value_came() and len(movers_of(node)) == 1)
        [mover] = movers_of(node)
        total = reader.sum.remote(np.ones(64 * MIB, dtype=np.uint8))
        mover.kill()
        assert miniray.get(total) == 64 * MIB
        mover.wait(10)  # on a busy machine it may outlive the transfer
        # If the transfer was over before, the next one finds that the mover is gone.
        assert large_value_came()


def test_small_values_need_no_mover(third: Node) -> None:
    reader = ThirdHolder.remote()
    assert miniray.get(reader.sum.remote(np.ones(MIB // 2, dtype=np.uint8))) == MIB // 2
    assert not movers_of(third)
