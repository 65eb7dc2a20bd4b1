"""What the programs of ``test_object_model.py`` are made of: values, an actor, tasks.

A value tells its label by its content and, if it is in shared memory, by its size.
"""

from __future__ import annotations

import os
import pickle
import signal
from typing import TYPE_CHECKING, Any

import numpy as np
from object_helpers import inventory

import miniray
from miniray.common.runtime import current_runtime
from miniray.exceptions import OwnerDiedError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

KIB = 1024
#: The smallest large value; each further label adds a step, so that a size tells the label.
LARGE = 128 * KIB
STEP = 8 * KIB


def value_of(label: int, large: bool, refs: list[Any]) -> dict[str, Any]:
    """The value of a label."""
    size = LARGE + label * STEP if large else 100
    return {"label": label, "data": np.full(size, label % 251, dtype=np.uint8), "refs": refs}


def is_right(value: dict[str, Any]) -> bool:
    """Whether a value is as it was made."""
    data = value["data"]
    return bool((data == value["label"] % 251).all()) and data.size in (
        100,
        LARGE + value["label"] * STEP,
    )


def read(ref: Any) -> int | str:
    """The label of a value; what the error says if its owner was killed."""
    try:
        value = miniray.get(ref, timeout=30)
    except OwnerDiedError as error:
        return str(error)
    assert is_right(value)
    return int(value["label"])


def owned_ids() -> list[bytes]:
    """The objects that this process owns."""
    table = current_runtime().table  # type: ignore[attr-defined]
    return [
        entry.id
        for entry in table.snapshot()
        if table.is_owned(entry.id) and not table.is_actor(entry.id)
    ]


def fork_and_drop(holds: Callable[[], Any]) -> None:
    """Fork; the child lets go of what the parent holds, and ends."""
    child = os.fork()
    if child == 0:
        try:
            holds()
        finally:
            os._exit(0)
    os.waitpid(child, 0)


#: Children that stay, by pid: what ends when this process does, or lets go of them.
_children: dict[int, int] = {}


def fork_and_stay() -> int:
    """Fork; the child keeps what it has inherited, and ends when it is told to. Its pid."""
    over, stay = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(stay)
        os.read(over, 1)
        os._exit(0)
    os.close(over)
    _children[child] = stay
    return child


def end_child(pid: int) -> None:
    """Kill a child that stays."""
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
    os.close(_children.pop(pid))


@miniray.remote(num_cpus=0)
class Actor:
    """Holds refs, and values that it has read, in slots."""

    def __init__(self) -> None:
        self.refs: dict[int, Any] = {}
        self.views: dict[int, Any] = {}

    def put(self, slot: int, label: int, large: bool, inside: list[int]) -> bytes:
        self.refs[slot] = miniray.put(value_of(label, large, [self.refs[s] for s in inside]))
        return self.refs[slot].binary()

    def make(self, label: int, large: bool, inside: list[int]) -> Any:
        return value_of(label, large, [self.refs[s] for s in inside])

    def put_for(self, label: int, large: bool, inside: list[int]) -> list[Any]:
        return [miniray.put(self.make(label, large, inside))]

    def keep(self, slot: int, refs: list[Any]) -> None:
        self.refs[slot] = refs[0]

    def keep_value(self, slot: int, value: Any) -> None:
        assert is_right(value)
        self.views[slot] = value

    def view(self, slot: int, to: int) -> None:
        self.views[to] = miniray.get(self.refs[slot])

    def give(self, slot: int) -> list[Any]:
        return [self.refs[slot]]

    def send(self, slot: int, other: Any, to: int) -> None:
        miniray.get(other.keep.remote(to, [self.refs[slot]]))

    def drop(self, slot: int) -> None:
        self.refs.pop(slot, None)
        self.views.pop(slot, None)

    def read(self, slot: int) -> int | str:
        return read(self.refs[slot])

    def views_are_right(self) -> bool:
        return all(map(is_right, self.views.values()))

    def pickle(self, slot: int) -> None:
        pickle.dumps(self.refs[slot])

    def fork(self) -> None:
        fork_and_drop(lambda: (self.refs.clear(), self.views.clear()))

    def fork_and_stay(self) -> int:
        return fork_and_stay()

    def end_child(self, pid: int) -> None:
        end_child(pid)

    def owned_ids(self) -> list[bytes]:
        return owned_ids()

    def entries(self) -> int:
        return len(current_runtime().table)  # type: ignore[attr-defined]

    def clear(self) -> None:
        self.refs.clear()
        self.views.clear()

    def inventory(self) -> Any:
        return inventory()

    def pid(self) -> int:
        return os.getpid()


@miniray.remote(num_cpus=0)
def make(label: int, large: bool, refs: list[Any]) -> Any:
    return value_of(label, large, refs)


@miniray.remote(num_cpus=0, _generator_backpressure_num_objects=2)
def stream(label: int, count: int, large: bool, refs: list[Any]) -> Iterator[Any]:
    for number in range(count):
        yield value_of(label + number, large, refs)


@miniray.remote(num_cpus=0)
def pass_on(refs: list[Any]) -> list[Any]:
    return refs


def _put_in_task(label: int, large: bool, refs: list[Any]) -> tuple[int, list[Any]]:
    return os.getpid(), [miniray.put(value_of(label, large, refs))]


put_in_task = miniray.remote(num_cpus=0)(_put_in_task)
put_and_end = miniray.remote(num_cpus=0, max_calls=1)(_put_in_task)
