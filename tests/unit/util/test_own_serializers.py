"""Serializers of one's own, and the search for what cannot be pickled."""

from __future__ import annotations

import io
import logging
import re
import threading
from typing import TYPE_CHECKING, Any

import pytest

from miniray.util import deregister_serializer, inspect_serializability, register_serializer
from miniray.values.serialization import deserialize, serialize

if TYPE_CHECKING:
    from collections.abc import Iterator


class Connection:
    """Holds something that cannot be pickled."""

    def __init__(self, address: str) -> None:
        self.address = address
        self.lock = threading.Lock()


def there_and_back(value: Any) -> Any:
    stored = serialize(value)
    return deserialize(stored.form, stored.payload())


@pytest.fixture
def registered() -> Iterator[None]:
    register_serializer(
        Connection, serializer=lambda each: each.address, deserializer=lambda at: Connection(at)
    )
    yield
    deregister_serializer(Connection)


@pytest.mark.usefixtures("registered")
def test_a_registered_class_is_pickled_as_the_serializer_says() -> None:
    assert there_and_back([Connection("a:1")])[0].address == "a:1"


@pytest.mark.usefixtures("registered")
def test_tensors_beside_such_values_change_nothing() -> None:
    torch = pytest.importorskip("torch")
    connection, tensor = there_and_back((Connection("a:1"), torch.ones(1000)))
    assert connection.address == "a:1"
    assert tensor.sum() == 1000


def test_a_class_that_was_taken_back_cannot_be_pickled_again() -> None:
    register_serializer(Connection, serializer=id, deserializer=str)
    deregister_serializer(Connection)
    deregister_serializer(Connection)  # a second time changes nothing
    with pytest.raises(TypeError, match="lock"):
        serialize(Connection("a:1"))


@pytest.mark.parametrize("value", [re.compile("a"), memoryview(b"a"), logging.getLogger("a")])
def test_a_serializer_goes_before_what_picklers_know_which_is_back_afterwards(value: Any) -> None:
    before = there_and_back(value)
    register_serializer(type(value), serializer=lambda _: "b", deserializer=str)
    try:
        assert there_and_back([value]) == ["b"]
    finally:
        deregister_serializer(type(value))
    assert there_and_back(value) == before
    deregister_serializer(type(value))
    assert there_and_back(value) == before


@pytest.mark.parametrize(
    ("wrong", "told"),
    [
        ({"cls": 3}, "cls must be a class, not 3"),
        ({"serializer": None}, "serializer must be a function"),
        ({"deserializer": "x"}, "deserializer must be a function"),
    ],
)
def test_what_is_no_serializer_is_refused(wrong: dict[str, Any], told: str) -> None:
    with pytest.raises(TypeError, match=told):
        register_serializer(**{"cls": Connection, "serializer": id, "deserializer": str, **wrong})


def test_the_part_at_fault_is_found_and_printed() -> None:
    connection = Connection("a:1")

    def use() -> Any:
        return connection

    text = io.StringIO()
    good, [failure] = inspect_serializability(use, print_file=text)
    assert not good
    assert failure.obj is connection.lock
    assert failure.name == "variable 'connection'.lock"
    assert failure.parent is use
    assert "variable 'connection'.lock is a lock (TypeError:" in text.getvalue()


def test_depth_limits_how_far_the_search_goes() -> None:
    nested = {"a": {"b": {"c": threading.Lock()}}}
    _, [failure] = inspect_serializability(nested, depth=2, print_file=io.StringIO())
    assert failure.name == "['a']['b']"


def test_what_can_be_pickled_is_said_so() -> None:
    text = io.StringIO()
    assert inspect_serializability([1], name="config", print_file=text) == (True, set())
    assert text.getvalue() == "config can be pickled.\n"
