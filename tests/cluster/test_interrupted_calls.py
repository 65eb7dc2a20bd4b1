"""Ctrl-C, or a cancel, at any point of ``.remote()`` and ``put``: nothing is left behind.

The signal is brought at the first point of a call where Python could run its handler, then at the
second, and so on until a call passes without it.
"""

from __future__ import annotations

import asyncio
import signal
import sys
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from cluster_helpers import wait_until

import miniray
from miniray.common.runtime import current_runtime
from miniray.exceptions import TaskCancelledError
from miniray.messages import protocol as p
from miniray.util.placement_group import placement_group, remove_placement_group
from miniray.util.state import list_actors, list_pending_demands

if TYPE_CHECKING:
    from collections.abc import Callable
    from types import FrameType

pytestmark = pytest.mark.usefixtures("cluster")

CLUSTER = {"num_cpus": 4, "resources": {"child": 1000}}

PACKAGE = str(Path(miniray.__file__).parent)


class AtPoint:
    """Acts once, at the n-th point of miniray's code where this thread may run a signal's handler.

    That is where a function begins, and where one that is written in C has returned.
    """

    def __init__(self, number: int, act: Callable[[], None]) -> None:
        self.left = number
        self.act = act

    def __call__(self, frame: FrameType, event: str, _arg: object) -> None:
        if event in ("call", "c_return") and frame.f_code.co_filename.startswith(PACKAGE):
            self.left -= 1
            if self.left == 0:
                self.act()


def run_with(point: AtPoint, call: Callable[[], Any]) -> Any:
    sys.setprofile(point)
    try:
        return call()
    finally:
        sys.setprofile(None)


@miniray.remote(max_retries=0, resources={"child": 1}, num_cpus=0)
def never_ends(_argument: object = None) -> None:
    threading.Event().wait()


@miniray.remote(resources={"child": 1}, num_cpus=0)
def never_yields() -> Any:
    threading.Event().wait()
    yield 1


@miniray.remote(num_cpus=0)
class Waiter:
    async def never_ends(self, _argument: object = None) -> None:
        await asyncio.Event().wait()

    async def answer(self) -> int:
        return 1


@miniray.remote(num_cpus=0, resources={"child": 1})
class Idle:
    pass


@miniray.remote(resources={"child": 1}, num_cpus=0)
def one() -> int:
    return 1


def runtime() -> Any:
    return current_runtime()


LARGE = bytearray(1 << 21)


def everything_is_as_before(entries: int) -> None:
    """No call is under way, no value is kept, nothing of the cluster is held, all of it works."""
    calls, table = runtime().call_table, runtime().table

    def settled() -> bool:
        runtime().refs.drain()
        return not calls.open and len(table) <= entries

    wait_until(settled, told=lambda: (calls.open, len(table), entries))
    wait_until(lambda: miniray.available_resources().get("child") == 1000)
    assert not list_pending_demands()
    assert miniray.get(one.remote(), timeout=30) == 1


def interrupt() -> None:
    signal.raise_signal(signal.SIGINT)


@pytest.mark.timeout(120)
@pytest.mark.parametrize(
    "what",
    ["task", "large argument", "stream", "method", "actor", "named actor", "put", "group"],
)
def test_ctrl_c_at_any_point_leaves_nothing_behind(what: str) -> None:
    waiter = Waiter.remote()
    assert miniray.get(waiter.answer.remote()) == 1
    call, undo = {
        "task": (never_ends.remote, miniray.cancel),
        "large argument": (lambda: never_ends.remote(LARGE), miniray.cancel),
        "stream": (never_yields.remote, miniray.cancel),
        "method": (waiter.never_ends.remote, miniray.cancel),
        "actor": (Idle.remote, miniray.kill),
        "named actor": (lambda: Idle.options(name="idle").remote(), miniray.kill),
        "put": (lambda: miniray.put(LARGE), lambda _ref: None),
        "group": (lambda: placement_group([{"child": 1}]), remove_placement_group),
    }[what]
    undo(call())  # what is made once is there
    everything_is_as_before(1 << 30)
    entries = len(runtime().table)
    for number in range(1, 10_000):
        point = AtPoint(number, interrupt)
        runtime().refs.settle()  # the name of the actor before is free
        try:
            made = run_with(point, call)
        except KeyboardInterrupt:
            assert point.left <= 0
        else:
            undo(made)
            del made
            break
    assert number > 20, "the call was not watched"
    everything_is_as_before(entries)
    alive = [("class_name", "=", "Idle"), ("state", "!=", "DEAD")]
    wait_until(lambda: not list_actors(filters=alive))


@pytest.mark.timeout(120)
def test_ctrl_c_at_any_point_of_reading_a_value_leaves_nothing_mapped() -> None:
    def read() -> int:
        return int(miniray.get(miniray.put(np.ones(1 << 18, dtype=np.uint8)))[-1])

    assert read() == 1
    watched = AtPoint(1 << 30, interrupt)
    run_with(watched, read)
    points = (1 << 30) - watched.left  # about as many as there are each time
    assert points > 20, "reading was not watched"
    for number in range(1, points + 1):
        point = AtPoint(number, interrupt)
        try:
            run_with(point, read)
            if point.left <= 0:
                time.sleep(30)  # Python has ignored it, so it comes again
                raise AssertionError("Ctrl-C had no effect")
        except KeyboardInterrupt:
            assert point.left <= 0
    everything_is_as_before(1 << 30)
    wait_until(lambda: not any(node["ObjectStoreUsed"] for node in miniray.nodes()))


@pytest.mark.timeout(120)
def test_a_cancel_at_any_point_of_remote_reaches_what_was_started() -> None:
    @miniray.remote(max_retries=0)
    def start_another(number: int) -> bool:
        def cancel() -> None:
            """What the arrival of a cancel does."""
            on_cancel = runtime().peers.on_kind[p.PEER_CANCEL]
            running = on_cancel.__self__.interruption.running
            on_cancel(running.caller, (p.PEER_CANCEL, running.number, False, True))

        miniray.get(one.remote())  # what is made once is there
        point = AtPoint(number, cancel)
        miniray.cancel(run_with(point, never_ends.remote))
        return point.left > 0

    for number in range(1, 10_000, 3):  # each costs a turn to a worker and back
        try:
            assert miniray.get(start_another.remote(number), timeout=30)
        except TaskCancelledError:
            continue
        break
    assert number > 20, "the call was not watched"
    everything_is_as_before(1 << 30)
