"""Rows about calls of actors and tasks with small values."""

from __future__ import annotations

from typing import Any

from _common import Engine, Figure, at_once, rate, row


class Plain:
    """A plain actor."""

    def call(self, value: Any = None) -> None:
        """Does nothing."""


class Async:
    """An asyncio actor."""

    async def call(self) -> None:
        """Does nothing."""


def nothing() -> None:
    """A task that does nothing."""


def started(engine: Engine, actor_class: type) -> tuple[Any, Any]:
    """The package of a running cluster, and an actor in it that has answered."""
    ray = engine.start()
    actor = ray.remote(actor_class).remote()
    ray.get(actor.call.remote())
    return ray, actor


@row("actor_call", Figure("actor call, one at a time", "/s", 8_000))
def actor_call(engine: Engine) -> float:
    ray, actor = started(engine, Plain)
    return rate(lambda: ray.get(actor.call.remote()))


@row("actor_calls", Figure("actor calls, 1,000 in flight", "/s", 60_000))
def actor_calls(engine: Engine) -> float:
    ray, actor = started(engine, Plain)
    return rate(at_once(ray, actor.call.remote), 1000)


@row("callers", Figure("2 callers, 2 actors", "/s", 60_000))
def callers(engine: Engine) -> float:
    ray, actor = started(engine, Plain)
    second = ray.remote(Plain).remote()
    package = engine.name

    class Caller:
        def __init__(self, actors: list[Any]) -> None:
            self.actors = actors

        def run(self, count: int) -> None:
            import importlib

            api = importlib.import_module(package)
            api.get([a.call.remote() for _ in range(count // 2) for a in self.actors])

    calling = [ray.remote(Caller).remote([actor, second]) for _ in range(2)]
    return rate(lambda: ray.get([caller.run.remote(1000) for caller in calling]), 2000)


@row("async_call", Figure("asyncio actor, one at a time", "/s", 5_000))
def async_call(engine: Engine) -> float:
    ray, actor = started(engine, Async)
    return rate(lambda: ray.get(actor.call.remote()))


@row("async_calls", Figure("asyncio actor, 1,000 in flight", "/s", 40_000))
def async_calls(engine: Engine) -> float:
    ray, actor = started(engine, Async)
    return rate(at_once(ray, actor.call.remote), 1000)


@row("task", Figure("task, one at a time", "/s", 5_000))
def task(engine: Engine) -> float:
    ray = engine.start()
    remote = ray.remote(nothing)
    return rate(lambda: ray.get(remote.remote()))


@row("tasks", Figure("tasks, 1,000 in flight", "/s", 30_000))
def tasks(engine: Engine) -> float:
    ray = engine.start()
    return rate(at_once(ray, ray.remote(nothing).remote), 1000, seconds=4.0)


@row("argument_100k", Figure("call with a 100 KiB argument, one at a time", "/s", 4_000))
def argument_100k(engine: Engine) -> float:
    ray, actor = started(engine, Plain)
    value = b"x" * (100 * 1024)
    return rate(lambda: ray.get(actor.call.remote(value)))


@row("wait", Figure("wait on 1,000 refs, one by one", "/s", 30), limit=120)
def wait(engine: Engine) -> float:
    ray = engine.start()
    remote = ray.remote(nothing)

    def one_by_one() -> None:
        left = [remote.remote() for _ in range(1000)]
        while left:
            _, left = ray.wait(left)

    return rate(one_by_one, seconds=4.0)
