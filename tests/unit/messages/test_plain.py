"""Bytes of others are looked through before anything is made of them."""

from __future__ import annotations

import marshal
import random
import struct
import tracemalloc
from typing import Any

import pytest

from miniray.messages import plain

_LEAVES = (
    None,
    True,
    False,
    0,
    -1,
    2**31,
    -(2**40),
    2**64,
    0.5,
    float("inf"),
    "",
    "text",
    "é",
    b"",
)


def _made(rng: random.Random, depth: int) -> Any:
    kind = rng.randrange(6 if depth else 3)
    if kind < 2:
        return rng.choice(_LEAVES)
    if kind == 2:
        return rng.randbytes(rng.randrange(50))
    items = [_made(rng, depth - 1) for _ in range(rng.randrange(5))]
    if kind == 3:
        return items
    return tuple(items) if kind == 4 else {f"key {n}": each for n, each in enumerate(items)}


@pytest.mark.parametrize("seed", range(20))
def test_plain_data_comes_back_as_it_was(seed: int) -> None:
    rng = random.Random(seed)
    for _ in range(100):
        data = _made(rng, 5)
        assert plain.loads(plain.dumps(data)) == data
        assert plain.loads(memoryview(plain.dumps(data))) == data


@pytest.mark.parametrize("kind", [bytes([code]) for code in range(256) if code != ord("i")])
def test_a_size_that_is_not_borne_out_takes_no_memory(kind: bytes) -> None:
    tracemalloc.start()
    try:
        for size in (0x7FFFFFFF, 0x7FFFFFF, 1_000_000):
            for rest in (b"", b"N" * 40):
                with pytest.raises(ValueError, match="byte"):
                    plain.loads(kind + struct.pack("<I", size) + rest)
        assert tracemalloc.get_traced_memory()[1] < 1 << 20
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize(
    "data",
    [
        [[]] * 100 + [{1, 2}],
        frozenset([1]),
        {1: 2},
        {(1, 2): 3},
        1 << 400,
        1j,
        ...,
        compile("1", "f", "eval"),
    ],
    ids=lambda data: type(data).__name__,
)
def test_what_is_no_plain_data_is_refused(data: Any) -> None:
    with pytest.raises(ValueError, match=r"plain data|key of a dict"):
        plain.loads(marshal.dumps(data, 2))


def test_data_that_refers_to_itself_is_refused() -> None:
    bomb: Any = (b"x" * 10,)
    for _ in range(40):
        bomb = (bomb, bomb)
    with pytest.raises(ValueError, match="plain data"):
        plain.loads(marshal.dumps(bomb))


def test_data_that_is_nested_too_deep_or_has_too_many_items_is_refused() -> None:
    deep: Any = ()
    for _ in range(plain.MAX_DEPTH + 1):
        deep = (deep,)
    with pytest.raises(ValueError, match="nested deeper"):
        plain.loads(plain.dumps(deep))
    with pytest.raises(ValueError, match="items"):
        plain.loads(plain.dumps([None] * (plain.MAX_ITEMS + 1)))
    with pytest.raises(ValueError, match="end too soon, or too late"):
        plain.loads(plain.dumps(5) + b"N")


@pytest.mark.parametrize("seed", range(5))
def test_whatever_is_changed_in_a_message_it_is_refused_or_read(seed: int) -> None:
    rng = random.Random(seed)
    tracemalloc.start()
    try:
        for _ in range(2000):
            data = bytearray(plain.dumps(_made(rng, 5)))
            for _ in range(rng.randrange(1, 4)):
                data[rng.randrange(len(data))] = rng.randrange(256)
            try:
                plain.loads(bytes(data))
            except ValueError:
                continue
        assert tracemalloc.get_traced_memory()[1] < 1 << 20
    finally:
        tracemalloc.stop()
