"""`miniray why`: chains from what waits to what it waits for, and deadlocks."""

from __future__ import annotations

import concurrent.futures
import threading
import time
from typing import TYPE_CHECKING, Any

import pytest
from cluster_helpers import wait_until
from running_cluster import running_cluster

import miniray
from miniray.common.runtime import current_runtime
from miniray.util.why import NothingWaitsError, why

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from miniray.cluster_utils import Cluster


@pytest.fixture(scope="module", autouse=True)
def nodes(session_root: Path) -> Iterator[Cluster]:
    with running_cluster({"num_cpus": 2, "resources": {"gate": 1}}, {"num_cpus": 2}) as cluster:
        yield cluster


def ask(of: str = "") -> dict[str, Any]:
    return why(current_runtime().head, of)


def texts(found: dict[str, Any]) -> list[str]:
    return [f"{link['name']} {link['text']}" for link in found["chain"]]


@miniray.remote
class Door:
    """Waits until it is opened."""

    def __init__(self, other: Any = None) -> None:
        self.other = other
        self.opened = threading.Event()

    def set(self, other: Any) -> None:
        self.other = other

    def pass_through(self) -> int:
        self.opened.wait(60)
        return 1

    def open(self) -> None:
        self.opened.set()

    def ask(self) -> Any:
        return miniray.get(self.other.answer.remote())

    def ask_when_both_run(self, own: Path, others: Path) -> Any:
        own.touch()
        while not others.exists():
            time.sleep(0.01)
        return self.ask()

    def answer(self) -> int:
        return 1


@miniray.remote
def double(value: int) -> int:
    return 2 * value


@miniray.remote(resources={"gate": 1})
def gated() -> int:
    return 1


@miniray.remote
class Slow:
    def __init__(self) -> None:
        self.begin()

    def begin(self) -> None:
        time.sleep(60)


@miniray.remote
class Asking:
    async def ask(self, door: Any) -> Any:
        return await door.pass_through.remote()


def test_a_chain_goes_from_the_wait_over_arguments_and_queues_to_the_running_line() -> None:
    door = Door.options(name="front", max_concurrency=1).remote()
    first = door.pass_through.remote()
    second = door.answer.remote()
    ref = double.remote(second)
    pool = concurrent.futures.ThreadPoolExecutor(1, thread_name_prefix="waiter")
    waiting = pool.submit(miniray.get, ref)
    wait_until(lambda: any("pass_through of front runs" in text for text in texts(ask(ref.hex()))))
    found = ask()
    assert not found["deadlock"]
    told = texts(found)
    assert "waiter_0 waits for 1 value" in told[0]
    assert "double is to make it" in told[1]
    assert "double waits for 1 of its arguments" in told[2]
    assert "Door.answer of front waits for its turn" in told[4]
    assert "Door.pass_through of front runs for" in told[5]
    assert any("pass_through" in frame for frame in found["chain"][5]["stack"])
    assert told[5] == texts(ask("front"))[1] or "runs for" in texts(ask("front"))[1]
    miniray.kill(door)
    with pytest.raises(miniray.exceptions.MinirayError):
        miniray.get(first)
    with pytest.raises(miniray.exceptions.MinirayError):
        waiting.result(30)
    pool.shutdown()


def test_a_coroutine_that_awaits_is_followed() -> None:
    door = Door.options(name="inner").remote()
    ref = Asking.remote().ask.remote(door)
    wait_until(lambda: "Door.pass_through of inner runs" in "".join(texts(ask(ref.hex()))))
    told = texts(ask(ref.hex()))
    assert "Asking.ask" in told[1]
    miniray.kill(door)


def test_actors_that_wait_for_each_other_are_a_deadlock(tmp_path: Path) -> None:
    left = Door.options(name="left").remote()
    right = Door.options(name="right").remote(left)
    miniray.get(left.set.remote(right))
    begun = [tmp_path / "left", tmp_path / "right"]
    refs = [left.ask_when_both_run.remote(*begun), right.ask_when_both_run.remote(*begun[::-1])]
    wait_until(lambda: ask(refs[0].hex())["deadlock"])
    found = ask("left")
    assert found["deadlock"]
    last = found["chain"][-1]
    assert last["kind"] == "deadlock"
    assert last["text"].startswith(
        "Door.ask_when_both_run of left, which waits for Door.answer of right"
    )
    miniray.kill(left)
    miniray.kill(right)


def test_an_actor_that_waits_for_itself_is_a_deadlock_and_one_with_two_threads_is_none() -> None:
    alone = Door.options(name="alone").remote()
    miniray.get(alone.set.remote(alone))
    ref = alone.ask.remote()
    wait_until(lambda: ask(ref.hex())["deadlock"])
    miniray.kill(alone)
    pair = Door.options(name="pair", max_concurrency=2).remote()
    miniray.get(pair.set.remote(pair))
    assert miniray.get(pair.ask.remote()) == 1
    blocked = [pair.pass_through.remote(), pair.ask.remote()]
    wait_until(lambda: "waits for its turn" in "".join(texts(ask(blocked[1].hex()))))
    assert not ask(blocked[1].hex())["deadlock"]  # the other thread may come to it
    assert not ask("pair")["deadlock"]
    miniray.kill(pair)


def test_what_waits_for_resources_names_them_and_who_has_them() -> None:
    holder = Door.options(name="holder", resources={"gate": 1}).remote()
    miniray.get(holder.answer.remote())
    ref = gated.remote()
    wait_until(lambda: "gate" in texts(ask(ref.hex()))[-1])
    last = texts(ask(ref.hex()))[-1]
    assert "needs gate 1" in last
    assert "Of the gate of node" in last
    assert "Door (pid" in last
    waiting = Door.options(name="waiting", resources={"gate": 1}).remote()
    wait_until(lambda: "waits for resources" in texts(ask("waiting"))[0])
    miniray.kill(waiting)
    miniray.kill(holder)
    assert miniray.get(ref) == 1


def test_an_actor_whose_constructor_runs_is_starting_with_the_line_of_it() -> None:
    slow = Slow.options(name="slow").remote()
    wait_until(lambda: ask("slow")["chain"][0]["stack"])
    [link] = ask("slow")["chain"]
    assert "is STARTING for" in link["text"]
    assert "Slow.begin" in link["stack"][-1]
    miniray.kill(slow)


def test_what_is_unknown_or_does_not_wait_says_what_is_asked_for() -> None:
    with pytest.raises(NothingWaitsError, match=r"'nobody' waits or runs: give the id of"):
        ask("nobody")
    with pytest.raises(NothingWaitsError, match="No driver waits for a value"):
        ask()
