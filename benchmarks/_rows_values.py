"""Rows about values: small and large, put, got and passed."""

from __future__ import annotations

import functools
import importlib
from typing import Any

from _common import GIB, MIB, Engine, Figure, rate, row


@functools.cache
def array(mebibytes: int) -> Any:
    """An array whose pages exist, so that only the engine's work is timed."""
    import numpy as np

    return np.ones(mebibytes * MIB, dtype=np.uint8)


class Reader:
    """An actor that takes values."""

    def take(self, value: Any) -> int:
        return len(value)

    def echo(self, value: Any) -> Any:
        return value


@row("put_small", Figure("put of a small value", "/s", 50_000))
def put_small(engine: Engine) -> float:
    ray = engine.start()

    def put() -> None:
        for _ in range(100):
            ray.put(0)

    return rate(put, 100)


@row("get_small", Figure("get of a small value", "/s", 200_000))
def get_small(engine: Engine) -> float:
    ray = engine.start()
    ref = ray.put(0)

    def get() -> None:
        for _ in range(100):
            ray.get(ref)

    return rate(get, 100)


@row(
    "put_100m",
    Figure("put of 100 MiB, dropped", "GiB/s", 5.5),
    Figure("put of 100 MiB, ten kept", "GiB/s"),
)
def put_100m(engine: Engine) -> tuple[float, float]:
    ray = engine.start()
    value = array(100)

    def ten() -> None:
        kept = [ray.put(value) for _ in range(10)]
        assert len(kept) == 10

    size = 100 * MIB / GIB
    return rate(lambda: ray.put(value), seconds=3.0) * size, rate(ten, 10, seconds=3.0) * size


@row("get_100m", Figure("get of 100 MiB", "/s", 20_000))
def get_100m(engine: Engine) -> float:
    ray = engine.start()
    ref = ray.put(array(100))
    return rate(lambda: ray.get(ref))


@row("read_100m", Figure("actor reads a 100 MiB ref", "/s", 4_000))
def read_100m(engine: Engine) -> float:
    ray = engine.start()
    reader = ray.remote(Reader).remote()
    ref = ray.put(array(100))
    return rate(lambda: ray.get(reader.take.remote(ref)))


@row("echo_10m", Figure("actor echoes 10 MiB", "GiB/s", 4.0))
def echo_10m(engine: Engine) -> float:
    ray = engine.start()
    reader = ray.remote(Reader).remote()
    value = array(10)
    # Two ways, so twice the size.
    return rate(lambda: ray.get(reader.echo.remote(value))) * 2 * 10 * MIB / GIB


@row("get_refs", Figure("get of a value that holds 10,000 refs", "/s", 50), limit=120)
def get_refs(engine: Engine) -> float:
    ray = engine.start()
    package = engine.name

    def make() -> list[Any]:
        api = importlib.import_module(package)
        return [api.put(1) for _ in range(10_000)]

    ref = ray.remote(make).remote()
    return rate(lambda: ray.get(ref))
