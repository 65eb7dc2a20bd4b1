# ruff: noqa: TC003 -- written as users write it
"""What every type checker knows, without miniray's plugin for mypy; never run."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from typing_extensions import assert_type

import miniray
from miniray import ActorHandle, ObjectRef, ObjectRefGenerator
from miniray.actor import ActorClass, ActorProxy

number: ObjectRef[int] = miniray.put(1)
text: ObjectRef[str] = miniray.put("x")
list_of_numbers: ObjectRef[list[int]] = miniray.put([1])


@miniray.remote
def scale(factor: int, note: str = "", *, exact: bool = False) -> float:
    return 1.0


@miniray.remote(num_cpus=2)
def with_options(factor: int) -> int:
    return factor


@miniray.remote(num_returns=2)
def pair(factor: int) -> tuple[int, str]:
    return factor, "x"


@miniray.remote(num_returns=0)
def nothing() -> None: ...


@miniray.remote
def items(count: int) -> Iterator[str]:
    yield ""


@miniray.remote
def total(*numbers: int) -> int:
    return sum(numbers)


@miniray.remote
def tagged(factor: int, numbers: list[int], *notes: str, **tags: str) -> int:
    return factor


# Values by position and by name; refs by position, also beside values by name.
assert_type(scale.remote(1), ObjectRef[float])
assert_type(scale.remote(1, "x", exact=True), ObjectRef[float])
assert_type(scale.remote(factor=1), ObjectRef[float])
assert_type(scale.remote(number), ObjectRef[float])
assert_type(scale.remote(number, text), ObjectRef[float])
assert_type(scale.remote(1, text), ObjectRef[float])
assert_type(scale.remote(number, exact=True), ObjectRef[float])
assert_type(scale.remote(number, note="x"), ObjectRef[float])
assert_type(scale.remote(1, text, exact=True), ObjectRef[float])
assert_type(scale.options(num_cpus=2).remote(number), ObjectRef[float])
assert_type(scale.options(num_returns=2).remote(1), list[ObjectRef[Any]])
assert_type(scale.options(num_returns=1).remote(1), ObjectRef[Any])
assert_type(with_options.remote(number), ObjectRef[int])
assert_type(pair.remote(1), list[ObjectRef[Any]])
assert_type(items.remote(3), ObjectRefGenerator[str])
assert_type(total.remote(1, number, 3), ObjectRef[int])
assert_type(tagged.remote(number, list_of_numbers, "x", colour="red"), ObjectRef[int])
assert_type(miniray.get(scale.remote(1)), float)
assert_type(miniray.get([scale.remote(1), scale.remote(2)]), list[float])
assert_type(miniray.get(next(items.remote(3))), str)
first, second = pair.remote(1)
assert_type(first, ObjectRef[Any])


class Plain:
    def __init__(self, start: int, *, step: int = 1) -> None:
        self.count = start

    @miniray.method
    def add(self, times: int) -> int:
        assert_type(self.add(1), int)
        return self.count

    def unmarked(self, times: int) -> int:
        return times

    @miniray.method
    def tag(self, **tags: int) -> str:
        return ""

    @miniray.method(num_returns=2)
    async def pair(self, times: int) -> tuple[int, int]:
        return times, times

    @miniray.method
    def items(self, count: int) -> Iterator[str]:
        yield ""


# What an actor class returns has the methods that are marked, exactly.
Counter = miniray.remote(Plain)
counter = Counter.remote(1, step=2)
assert_type(counter, ActorProxy[Plain])
assert_type(Counter.remote(number, step=2), ActorProxy[Plain])
assert_type(Counter.options(num_cpus=1).remote(1), ActorProxy[Plain])
assert_type(miniray.remote(num_cpus=1)(Plain).remote(1), ActorProxy[Plain])
anything: ActorClass[Plain] = Counter
assert_type(anything.remote(1), ActorProxy[Plain])
assert_type(counter.add.remote(1), ObjectRef[int])
assert_type(counter.add.remote(number), ObjectRef[int])
assert_type(counter.add.remote(times=1), ObjectRef[int])
assert_type(counter.tag.remote(red=1), ObjectRef[str])
assert_type(counter.pair.remote(number), list[ObjectRef[Any]])
assert_type(counter.items.remote(3), ObjectRefGenerator[str])
assert_type(counter.add.options(num_returns=0).remote(1), None)
assert_type(miniray.get(counter.add.remote(1)), int)
assert_type(miniray.get([counter.add.remote(1)]), list[int])
miniray.kill(counter)


def use(proxy: ActorProxy[Plain], handle: ActorHandle[Plain]) -> None:
    assert_type(proxy.add.remote(1), ObjectRef[int])
    # A handle has any method.
    assert_type(handle.unmarked.remote("x"), ObjectRef[Any])
    assert_type(handle.add.remote("x"), ObjectRef[Any])
    miniray.kill(handle)


use(counter, miniray.get_actor("counter"))
use(miniray.get_actor("counter"), miniray.get_actor("counter"))

counter.add.remote("x")  # error: call-overload
counter.add.remote()  # error: call-overload
counter.ad.remote(1)  # error: union-attr
counter.unmarked.remote(1)  # error: attr-defined
use(counter, counter)  # error: arg-type
miniray.kill(number)  # error: arg-type
nothing.remote(1)  # error: call-arg
scale.remote()  # error: call-overload
scale.remote("x")  # error: call-overload
scale.remote(text)  # error: arg-type
scale.remote(1, 2)  # error: call-overload
scale.remote(1, exakt=True)  # error: call-overload
scale.remote(number, exakt=True)  # error: call-overload
scale.remote(number, exact="x")  # error: call-overload
scale.remote(text, exact=True)  # error: arg-type
scale.remote(factor=number)  # error: call-overload
tagged.remote(number, [1], colour=3)  # error: call-overload
total.remote("x")  # error: call-overload
Counter.remote()  # error: call-overload
Counter.remote("x")  # error: call-overload
miniray.get(3)  # error: call-overload
miniray.get([3])  # error: arg-type
miniray.wait(number)  # error: arg-type
miniray.remote(3)  # error: call-overload
print(miniray.nothing)  # error: attr-defined
print(miniray.exceptions.NothingError)  # error: attr-defined
