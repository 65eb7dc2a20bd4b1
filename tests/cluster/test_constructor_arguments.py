"""What actors were made with: it is there for every start, and gone when they are."""

from __future__ import annotations

import os
import signal
import threading
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from cluster_helpers import wait_until
from object_helpers import inventory
from running_cluster import running_cluster

import miniray
from miniray.exceptions import ActorAlreadyExistsError, ActorDiedError, OwnerDiedError

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from miniray.cluster_utils import Cluster

SIZE = 1 << 18


@pytest.fixture(scope="module", autouse=True)
def nodes(session_root: Path) -> Iterator[Cluster]:
    with running_cluster({"num_cpus": 2}, namespace="test") as cluster:
        yield cluster


@pytest.fixture(autouse=True)
def nothing_is_left(nodes: Cluster) -> Iterator[None]:
    """Whatever a test does, this node keeps no value after it."""
    yield

    def kept() -> Any:
        found = inventory()
        return found["segments"] or found["adopted"]

    wait_until(lambda: not kept(), told=lambda: str(kept()))


def another_driver(nodes: Cluster) -> None:
    miniray.shutdown()
    miniray.init(address=nodes.address, namespace="test")


@miniray.remote(num_cpus=0, max_restarts=-1, max_task_retries=-1)
class Holder:
    """Knows what it was made with."""

    def __init__(self, *values: Any) -> None:
        self.values = values

    def sum(self) -> int:
        return sum(self.total(value) for value in self.values)

    def total(self, value: Any) -> int:
        if isinstance(value, list):
            return sum(self.total(item) for item in value)
        return int((miniray.get(value) if isinstance(value, miniray.ObjectRef) else value).sum())

    def pid(self) -> int:
        return os.getpid()


def ones() -> Any:
    return np.ones(SIZE, dtype=np.uint8)


def make(name: str, **options: Any) -> Any:
    """An actor with every way in which an array can be given, four of them."""
    nested, inside = miniray.put(ones()), miniray.put([miniray.put(ones())])
    holder = Holder.options(name=name, lifetime="detached", **options)
    return holder.remote(ones(), [nested], inside, miniray.put(ones()))


def restart(actor: Any) -> None:
    pid = miniray.get(actor.pid.remote())
    miniray.kill(actor, no_restart=False)
    wait_until(lambda: miniray.get(actor.pid.remote()) != pid)


def test_a_detached_actor_starts_again_when_the_driver_that_made_it_has_ended(
    nodes: Cluster,
) -> None:
    assert miniray.get(make("again").sum.remote()) == 4 * SIZE
    another_driver(nodes)
    actor = miniray.get_actor("again")
    restart(actor)
    assert miniray.get(actor.sum.remote()) == 4 * SIZE
    miniray.kill(actor)


def test_a_detached_actor_starts_for_the_first_time_when_its_driver_has_ended(
    nodes: Cluster,
) -> None:
    make("later", resources={"later": 1})
    another_driver(nodes)
    node = nodes.add_node(num_cpus=1, resources={"later": 1})
    actor = miniray.get_actor("later")
    assert miniray.get(actor.sum.remote()) == 4 * SIZE
    miniray.kill(actor)
    nodes.remove_node(node)


@pytest.mark.parametrize("size", [10, SIZE])
def test_what_a_detached_actor_was_given_later_is_lost_with_the_driver_which_is_named(
    nodes: Cluster, size: int
) -> None:
    @miniray.remote(num_cpus=0)
    class Keeper:
        def __init__(self, made_with: list[Any]) -> None:
            self.made_with = made_with

        def keep(self, refs: list[Any]) -> None:
            self.given = refs

        def read(self) -> tuple[int, str]:
            with pytest.raises(OwnerDiedError) as error:
                miniray.get(self.given)
            return int(miniray.get(self.made_with[0]).sum()), error.value.owner

    keeper = Keeper.options(name="keeper", lifetime="detached").remote([miniray.put(ones())])
    miniray.get(keeper.keep.remote([miniray.put(np.ones(size))]))
    another_driver(nodes)
    keeper = miniray.get_actor("keeper")
    made_with, owner = miniray.get(keeper.read.remote())
    assert made_with == SIZE
    assert owner.startswith(f"the driver (pid {os.getpid()}) on node ")
    miniray.kill(keeper)


def test_large_arguments_outlive_a_creator_that_is_killed() -> None:
    @miniray.remote(num_cpus=0)
    class Creator:
        def make(self) -> int:
            actor = Holder.options(name="orphan", lifetime="detached").remote(ones())
            assert miniray.get(actor.sum.remote()) == SIZE
            return os.getpid()

    creator = Creator.remote()
    os.kill(miniray.get(creator.make.remote()), signal.SIGKILL)
    actor = miniray.get_actor("orphan")
    restart(actor)
    assert miniray.get(actor.sum.remote()) == SIZE
    miniray.kill(actor)


def test_a_detached_actor_ends_with_a_creator_that_never_had_its_arguments() -> None:
    @miniray.remote(num_cpus=0)
    def never() -> None:
        threading.Event().wait()

    @miniray.remote(num_cpus=0)
    class Creator:
        def make(self) -> int:
            self.ref = never.remote()
            Holder.options(name="stuck", lifetime="detached").remote(self.ref)
            return os.getpid()

    creator = Creator.remote()
    pid = miniray.get(creator.make.remote())
    call = miniray.get_actor("stuck").sum.remote()
    os.kill(pid, signal.SIGKILL)
    with pytest.raises(ActorDiedError, match="created it ended"):
        miniray.get(call, timeout=30)


def test_refs_in_the_value_of_an_argument_are_counted_by_a_detached_actor() -> None:
    @miniray.remote(num_cpus=0)
    class Creator:
        def make(self, refs: list[Any]) -> int:
            holder = Holder.options(name="heir", lifetime="detached")
            return miniray.get(holder.remote(refs[0]).sum.remote())

    outer = miniray.put([miniray.put(ones())])
    creator = Creator.remote()
    assert miniray.get(creator.make.remote([outer])) == SIZE
    miniray.kill(creator)
    del outer, creator
    actor = miniray.get_actor("heir")
    miniray.put(None)  # counts what was dropped
    assert miniray.get(actor.sum.remote()) == SIZE
    miniray.kill(actor)


def test_an_actor_that_never_restarts_keeps_of_its_arguments_what_it_looks_at() -> None:
    large = miniray.put(ones())
    kept = miniray.put(ones())

    @miniray.remote(num_cpus=0)
    class Reader:
        def __init__(self, by_value: Any, by_ref: Any, refs: list[Any]) -> None:
            self.sizes = by_value.size + by_ref.size
            self.refs = refs

        def total(self) -> int:
            return int(self.sizes + miniray.get(self.refs[0]).size)

        def pid(self) -> int:
            return os.getpid()

    reader = Reader.remote(ones(), large, [kept])
    del large, kept
    assert miniray.get(reader.total.remote()) == 3 * SIZE
    wait_until(lambda: len(inventory()["segments"]) == 1)
    assert miniray.get(reader.total.remote()) == 3 * SIZE
    again = Reader.options(max_restarts=1, max_task_retries=-1)
    restartable = again.remote(ones(), ones(), [miniray.put(ones())])
    restart(restartable)
    assert miniray.get(restartable.total.remote()) == 3 * SIZE


def test_arguments_of_an_actor_that_is_not_made_are_freed() -> None:
    first = Holder.options(name="one").remote()
    miniray.get(first.pid.remote())
    again = Holder.options(name="one", get_if_exists=True).remote(ones())
    assert miniray.get(again.sum.remote()) == 0
    with pytest.raises(ActorAlreadyExistsError):
        Holder.options(name="one").remote(ones())
    with pytest.raises(ValueError, match="nowhere"):
        Holder.options(runtime_env={"working_dir": "/nowhere"}).remote(ones())
    wait_until(lambda: not inventory()["segments"])
