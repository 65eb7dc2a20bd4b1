# ruff: noqa: TC001, TC003 -- written as users write it
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


Counter = miniray.remote(Plain)
assert_type(Counter.remote(1, step=2), ActorHandle[Plain])
assert_type(Counter.remote(number), ActorHandle[Plain])
assert_type(Counter.options(num_cpus=1).remote(1), ActorHandle[Plain])
assert_type(miniray.remote(num_cpus=1)(Plain).remote(1), ActorHandle[Plain])
anything: ActorClass[Plain] = Counter
counter = Counter.remote(1)
assert_type(counter.unmarked.remote(1), ObjectRef[Any])


def use(proxy: ActorProxy[Plain]) -> None:
    proxy.add.remote(1)


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
