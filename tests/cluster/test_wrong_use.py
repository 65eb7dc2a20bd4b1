"""Wrong use of a cluster is told with what to do instead."""

from __future__ import annotations

import functools
import threading
import warnings
from typing import Any

import numpy as np
import pytest

import miniray

pytestmark = pytest.mark.usefixtures("cluster")


@miniray.remote
def add(a: int, b: int = 1) -> int:
    return a + b


@miniray.remote
class Counter:
    def __init__(self, start: int = 0) -> None:
        self.value = start

    def add(self, amount: int = 1) -> int:
        self.value += amount
        return self.value


def test_wrong_use_is_told_what_to_do() -> None:
    call: Any = add
    with pytest.raises(TypeError, match=r"add\.remote\(\.\.\.\)"):
        call(1)
    call = Counter
    with pytest.raises(TypeError, match=r"Counter\.remote\(\.\.\.\)"):
        call()
    handle: Any = Counter.remote()
    with pytest.raises(TypeError, match=r"add\.remote\(\.\.\.\)"):
        handle.add()
    call = miniray.get
    with pytest.raises(ValueError, match="takes an ObjectRef or a list of them, not 5"):
        call(5)
    with pytest.raises(TypeError, match="item 1 is 'x'"):
        call([miniray.put(1), "x"])
    with pytest.raises(TypeError, match="one flat list"):
        call([[miniray.put(1)]])
    with pytest.raises(ValueError, match="Make a list of its refs"):
        call(miniray.put(n) for n in range(2))
    with pytest.raises(TypeError, match="Make a list of its refs"):
        miniray.wait({miniray.put(1)})  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="Give it a function that calls this one"):
        miniray.remote(functools.partial(pow, 2))
    with pytest.raises(ValueError, match=r"Call it with \.remote\("):
        call(add)  # forgot .remote()
    with pytest.raises(ValueError, match=r"Call it with \.remote\("):
        call(handle.add)


def test_what_is_too_large_for_the_head_is_an_error_where_it_is_given() -> None:
    handle = Counter.options(runtime_env={"env_vars": {"LARGE": "x" * (64 << 20)}})
    with pytest.raises(ValueError, match=r"'create_actor' to the head takes 64 MiB; it may take"):
        handle.remote()
    assert miniray.get(Counter.remote().add.remote(), timeout=30) == 1


def test_an_actor_class_may_be_passed_and_used_elsewhere() -> None:
    @miniray.remote
    def make(cls: Any) -> int:
        return miniray.get(cls.remote(10).add.remote(5))

    assert miniray.get(make.remote(Counter)) == 15


def test_refs_and_handles_print_as_what_they_are() -> None:
    ref = add.remote(1)
    assert repr(ref) == f"ObjectRef({ref.hex()})"
    handle = Counter.remote()
    assert repr(handle).startswith("Actor(Counter, ")
    assert "Counter.add" in repr(handle.add)
    assert repr(add) == "RemoteFunction(add)"
    assert "Counter" in repr(Counter)
    assert str([ref]) == f"[ObjectRef({ref.hex()})]"


def test_a_function_that_drags_in_much_data_is_named_with_its_variable() -> None:
    table = np.zeros(2_000_000)

    @miniray.remote
    def lookup(place: int) -> float:
        return float(table[place])

    @miniray.remote
    class Lookup:
        def at(self, place: int) -> float:
            return float(table[place])

    with pytest.warns(UserWarning, match=r"lookup is 15\.3 MiB.*variable 'table'") as caught:
        assert miniray.get(lookup.remote(3)) == 0.0
    assert caught[0].filename == __file__
    with pytest.warns(UserWarning, match=r"Lookup is 15\.3 MiB.*'table' of .*Lookup.at") as caught:
        assert miniray.get(Lookup.remote().at.remote(3)) == 0.0
    assert caught[0].filename == __file__


def test_a_very_large_argument_is_named() -> None:
    size = miniray.remote(lambda small, data=None: data.nbytes)
    data = np.zeros(110 << 20, dtype=np.uint8)
    with pytest.warns(UserWarning, match=r"Argument 'data'.*ndarray.*110\.0 MiB.*put\(") as caught:
        assert miniray.get(size.remote(1, data=data)) == data.nbytes
    assert caught[0].filename == __file__
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert miniray.get(size.remote(1, data=miniray.put(data))) == data.nbytes


def test_an_argument_that_drags_in_much_data_is_named_with_what_it_is() -> None:
    class Model:
        def __init__(self) -> None:
            self.name = "small"
            self.table = np.zeros(2_000_000)

        def answer(self) -> int:
            return 1

    call = miniray.remote(lambda function: function())
    model = Model()
    table = model.table
    found = r"drags in 15\.3 MiB.*largest in it: attribute 'table' of .*Model\."
    with pytest.warns(UserWarning, match=r"Argument 1 .*method.*" + found) as caught:
        assert miniray.get(call.remote(model.answer)) == 1
    assert caught[0].filename == __file__
    with pytest.warns(UserWarning, match=r"Argument 'function'.*drags in.*variable 'table' of"):
        assert miniray.get(call.remote(function=lambda: table[0])) == 0.0
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # what is plainly data may be as large
        assert miniray.get(miniray.remote(len).remote(table)) == len(table)


def test_an_argument_that_cannot_be_pickled_is_named_down_to_the_attribute() -> None:
    class Config:
        def __init__(self) -> None:
            self.name = "fine"
            self.options = {"lock": threading.Lock()}

    with pytest.raises(TypeError, match=r"options\['lock'\] is a lock"):
        add.remote(Config())
    with pytest.raises(TypeError, match=r"options\['lock'\] is a lock"):
        miniray.put(Config())
    assert miniray.get(add.remote(1)) == 2
