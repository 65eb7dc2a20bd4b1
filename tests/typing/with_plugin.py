# ruff: noqa: TC001, TC003 -- written as users write it
"""What mypy knows with ``plugins = ["miniray.mypy_plugin"]``; never run."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from typing import Any, Generic, TypeVar

from typing_extensions import Self, assert_type

import miniray
from miniray import ActorHandle, ObjectRef, ObjectRefGenerator
from miniray.actor import ActorProxy
from miniray.util import ActorPool

number: ObjectRef[int] = miniray.put(1)
text: ObjectRef[str] = miniray.put("x")


@miniray.remote
class Counter:
    def __init__(self, start: int, *, step: int = 1) -> None:
        self.count = start

    @miniray.method
    def add(self, times: int, note: str = "") -> int:
        assert_type(self.note("x"), str)
        return self.count

    @miniray.method(num_returns=2)
    def pair(self) -> tuple[int, str]:
        return self.count, "x"

    @miniray.method(concurrency_group="io")
    async def fetch(self, url: str) -> bytes:
        return b""

    @miniray.method
    def items(self) -> Iterator[int]:
        yield 1

    @miniray.method
    async def slow_items(self) -> AsyncIterator[int]:
        yield 1

    @miniray.method
    @staticmethod
    def triple(number: int) -> int:
        return 3 * number

    @miniray.method
    def tag(self, number: int, *notes: str, **tags: int) -> float:
        assert_type(self.tag(1, "x", red=2), float)
        return 1.0

    @miniray.method(num_returns=2)
    def tags(self, **tags: int) -> tuple[int, str]:
        return self.count, "x"

    @miniray.method()
    async def slow_tags(self, **tags: int) -> bytes:
        return b""

    @miniray.method
    def tagged_items(self, **tags: int) -> Iterator[str]:
        yield ""

    @miniray.method
    def positional(self, /, self_: int, **self_too: int) -> str:
        return ""

    @miniray.method
    def note(self, text: str) -> str:
        return text

    def unmarked(self, numbers: list[int]) -> dict[str, int]:
        return {}

    async def unmarked_async(self) -> float:
        return 1.0

    @classmethod
    def unmarked_class(cls, number: int) -> str:
        return ""

    def untyped(self, anything):  # type: ignore[no-untyped-def]
        return anything


@miniray.remote(num_gpus=0.5)
class User:
    def use(self, counter: ActorHandle[Counter]) -> int:
        assert_type(counter.add.remote(1), ObjectRef[int])
        return miniray.get(counter.add.remote(1))


class Plain:
    def __init__(self, number: int) -> None:
        self.number = number

    def get(self) -> int:
        return self.number


T = TypeVar("T")
K = TypeVar("K")
V = TypeVar("V")


class Table(Generic[K, V]):
    def __init__(self, key: K, value: V) -> None:
        self.values = {key: value}

    @miniray.method
    def get(self, key: K) -> V:
        return self.values[key]

    @miniray.method
    def keys(self) -> Iterator[K]:
        yield from self.values

    @miniray.method
    @staticmethod
    def static(values: list[int]) -> list[int]:
        return values

    def unmarked(self, key: K) -> V:
        return self.values[key]

    @miniray.method
    def itself(self) -> Self:
        return self

    @miniray.method
    def paired(self, other: list[T]) -> dict[K, T]:
        return dict(zip(self.values, other, strict=True))

    def unmarked_paired(self, other: T) -> tuple[K, T]:
        return next(iter(self.values)), other


@miniray.remote
class Prices(Table[str, V]):
    pass


counter = Counter.remote(1, step=2)
assert_type(counter, ActorHandle[Counter])
assert_type(Counter.remote(number, step=number), ActorHandle[Counter])
assert_type(Counter.options(num_cpus=2).remote(1), ActorHandle[Counter])
assert_type(User.remote(), ActorHandle[User])

# Methods take values and refs, by position and by name.
assert_type(counter.add.remote(1), ObjectRef[int])
assert_type(counter.add.remote(number, text), ObjectRef[int])
assert_type(counter.add.remote(times=number, note="x"), ObjectRef[int])
assert_type(counter.pair.remote(), list[ObjectRef[Any]])
assert_type(counter.fetch.remote("x"), ObjectRef[bytes])
assert_type(counter.items.remote(), ObjectRefGenerator[int])
assert_type(counter.slow_items.remote(), ObjectRefGenerator[int])
assert_type(counter.triple.remote(2), ObjectRef[int])
assert_type(counter.tag.remote(1, "x", red=2), ObjectRef[float])
assert_type(counter.tag.remote(number, text, red=number), ObjectRef[float])
assert_type(counter.tags.remote(red=number), list[ObjectRef[Any]])
assert_type(counter.slow_tags.remote(red=number), ObjectRef[bytes])
assert_type(counter.tagged_items.remote(red=1), ObjectRefGenerator[str])
assert_type(counter.positional.remote(1, red=number), ObjectRef[str])
assert_type(counter.add.options(num_returns=2).remote(1), list[ObjectRef[Any]])
assert_type(counter.add.options(concurrency_group="io").remote(1), ObjectRef[int])
assert_type(User.remote().use.remote(counter), ObjectRef[int])

# Methods without a mark are known too.
assert_type(counter.unmarked.remote([1]), ObjectRef[dict[str, int]])
assert_type(counter.unmarked_async.remote(), ObjectRef[float])
assert_type(counter.unmarked_class.remote(1), ObjectRef[str])
assert_type(counter.untyped.remote(1, 2, 3), ObjectRef[Any])
assert_type(counter.__ray_ready__.remote(), ObjectRef[Any])


# Generic classes, and methods inherited from them.
prices = Prices.remote("apple", 1.5)
assert_type(prices, ActorHandle[Prices[float]])
assert_type(prices.get.remote("apple"), ObjectRef[float])
assert_type(prices.get.remote(key=text), ObjectRef[float])
assert_type(prices.keys.remote(), ObjectRefGenerator[str])
assert_type(prices.unmarked.remote(text), ObjectRef[float])
assert_type(prices.static.remote([1]), ObjectRef[list[int]])
assert_type(prices.itself.remote(), ObjectRef[Prices[float]])
assert_type(prices.paired.remote([1]), ObjectRef[dict[str, int]])
assert_type(prices.paired.remote(miniray.put([1])), ObjectRef[dict[str, int]])
assert_type(prices.unmarked_paired.remote(1), ObjectRef[tuple[str, int]])
assert_type(Prices.options(num_cpus=2).remote("apple", 1.5), ActorHandle[Prices[float]])
Tables = miniray.remote(Table)
assert_type(Tables.remote("apple", 1.5), ActorHandle[Table[str, float]])
assert_type(Tables.options(num_cpus=2).remote(1, "x").get.remote(1), ObjectRef[str])
assert_type(miniray.remote(num_cpus=1)(Table).remote(1, "x"), ActorHandle[Table[int, str]])


@miniray.remote
def same(thing: T) -> T:
    return thing


@miniray.remote(num_cpus=1)
def each(things: list[T], *, times: int = 1) -> Iterator[T]:
    yield from things


assert_type(same.remote(1), ObjectRef[int])
assert_type(same.options(num_cpus=2).remote("x"), ObjectRef[str])
assert_type(each.remote([1], times=number), ObjectRefGenerator[int])
assert_type(each.remote(miniray.put(["x"])), ObjectRefGenerator[str])


def use_table(table: ActorHandle[Table[int, bytes]]) -> bytes:
    return miniray.get(table.get.remote(number))


# A proxy, which is what there is without the plugin, is a handle.
def use_proxy(proxy: ActorProxy[Counter]) -> ActorProxy[Counter]:
    assert_type(proxy, ActorHandle[Counter])
    assert_type(proxy.unmarked.remote([1]), ObjectRef[dict[str, int]])
    return proxy


assert_type(use_proxy(counter), ActorHandle[Counter])
assert_type(miniray.remote(num_cpus=1)(Plain).remote(1), ActorHandle[Plain])
assert_type(miniray.remote(Plain).remote(number).get.remote(), ObjectRef[int])
proxy: ActorProxy[Plain] = miniray.remote(Plain).remote(1)
assert_type(proxy.get.remote(), ObjectRef[int])
miniray.kill(proxy)

# get() and wait() keep the types.
assert_type(miniray.get(counter.add.remote(1)), int)
assert_type(miniray.get([counter.add.remote(1)]), list[int])
assert_type(miniray.wait([number]), tuple[list[ObjectRef[int]], list[ObjectRef[int]]])
for ref in counter.items.remote():
    assert_type(miniray.get(ref), int)

pool = ActorPool([counter])
pool.submit(lambda actor, amount: actor.add.remote(amount), 1)
numbers: ActorPool[int] = ActorPool([counter])
numbers.submit(lambda actor, amount: actor.add.remote(amount), "x")  # error: arg-type


async def main() -> None:
    assert_type(await counter.add.remote(1), int)


counter.ad.remote(1)  # error: attr-defined
counter.add.remote("x")  # error: call-overload
counter.add.remote(text)  # error: arg-type
counter.add.remote()  # error: call-overload
counter.add.remote(1, "x", 2)  # error: call-overload
counter.add.remote(1, nota="x")  # error: call-overload
counter.tag.remote(1, red="x")  # error: call-overload
counter.tags.remote(red="x")  # error: arg-type
counter.unmarked.remote([""])  # error: list-item
counter.triple.remote("x")  # error: call-overload
counter.pair.remote(1)  # error: call-arg
prices.get.remote(1)  # error: call-overload
prices.unmarked.remote(1)  # error: call-overload
prices.paired.remote(1)  # error: call-overload
same.remote()  # error: call-overload
same.remote(number)  # error: arg-type
each.remote([1], times="x")  # error: call-overload
Tables.remote(1)  # error: call-overload
use_table(prices)  # error: arg-type
Counter.remote()  # error: call-arg
Counter.remote("x")  # error: arg-type
Counter.remote(1, stop=2)  # error: call-arg
Counter.options(num_cpus=2).remote("x")  # error: call-overload
User.remote().use.remote(User.remote())  # error: arg-type
