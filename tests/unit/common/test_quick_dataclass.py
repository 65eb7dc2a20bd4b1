"""A quick dataclass does what a dataclass does."""

from __future__ import annotations

import copy
import dataclasses
import pickle
from typing import Any

import pytest

from miniray.common.quick_dataclass import quick_dataclass


def _classes(decorator: Any) -> tuple[type, type, type]:
    @decorator(frozen=True)
    class Value:
        a: int
        b: str = dataclasses.field(default="", repr=False)
        c: Any = dataclasses.field(default=None, compare=False)

    @decorator
    class Changing:
        a: Any
        b: dict[str, int] = dataclasses.field(default_factory=dict)

        def __repr__(self) -> str:
            return "its own"

    @decorator(frozen=True, slots=True)
    class Empty:
        pass

    return Value, Changing, Empty


@pytest.mark.parametrize(
    "look",
    [
        lambda value, *_: repr(value(1, "b", 2)).rpartition(".")[2],
        lambda value, *_: value(1, "b", 2) == value(1, "b", 3) != value(1, "c"),
        lambda value, *_: hash(value(1, "b", 2)) == hash(value(1, "b")),
        lambda value, *_: dataclasses.asdict(dataclasses.replace(value(1), b="c")),
        lambda _, changing, __: repr(changing(1)),
        lambda _, changing, __: changing(1) == changing(1, {}) != changing(1, {"b": 1}),
        lambda _, changing, __: changing.__hash__,
        lambda value, changing, _: value(1) == changing(1),
        lambda _, __, empty: (empty() == empty(), empty.__slots__, hash(empty()) == hash(())),
    ],
)
def test_it_compares_hashes_and_shows_itself_as_a_dataclass(look: Any) -> None:
    assert look(*_classes(quick_dataclass)) == look(*_classes(dataclasses.dataclass))


def test_one_within_itself_is_shown() -> None:
    @quick_dataclass
    class Own:
        inner: Any = None

    own = Own()
    own.inner = own
    assert repr(own).endswith("Own(inner=...)")


@quick_dataclass(frozen=True)
class Copied:
    a: int
    b: tuple[int, ...] = ()


def test_it_can_be_pickled_and_copied() -> None:
    value = Copied(1, (2,))
    assert pickle.loads(pickle.dumps(value)) == copy.copy(value) == value
