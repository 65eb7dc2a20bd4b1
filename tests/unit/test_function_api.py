"""``@remote`` on functions: how tasks are asked for."""

from __future__ import annotations

import pickle
from typing import TYPE_CHECKING, Any

import cloudpickle
import pytest
from fake_runtime import FakeRuntime, fake_runtime

import miniray

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Iterator


@pytest.fixture
def runtime() -> Iterator[FakeRuntime]:
    with fake_runtime() as fake:
        yield fake


@miniray.remote
def add(a: int, b: int = 2, *, c: int = 0) -> int:
    """Add numbers."""
    return a + b + c


@miniray.remote(num_cpus=2, num_returns=2)
def pair() -> tuple[int, int]:
    return 1, 2


def test_a_task_gets_its_arguments_and_gives_its_result(runtime: FakeRuntime) -> None:
    assert miniray.get(add.remote(1, c=4)) == 7
    assert miniray.get(add.remote(add.remote(1))) == 5


def test_options_of_the_decorator_reach_the_runtime(runtime: FakeRuntime) -> None:
    first, second = pair.remote()

    assert miniray.get([first, second]) == [1, 2]
    assert runtime.asked[0].options.resources == {"CPU": 2}


def test_other_options_leave_the_function_as_it_was(runtime: FakeRuntime) -> None:
    pair.options(num_cpus=1, name="mine").remote()
    pair.remote()

    assert [call.options.resources["CPU"] for call in runtime.asked] == [1, 2]
    assert [call.options.name for call in runtime.asked] == ["mine", ""]
    assert [call.options.num_returns for call in runtime.asked] == [2, 2]


def test_a_function_is_exported_once_per_runtime(runtime: FakeRuntime) -> None:
    for _ in range(3):
        add.remote(1)
        add.options(num_cpus=0).remote(1)
    assert runtime.exports == 1

    with fake_runtime() as other:
        add.remote(1)
        assert other.exports == 1


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda: add.remote(), r"remote\(\) is missing a required argument: 'a'\."),
        (lambda: add.remote(1, 2, 3), r"remote\(\) got too many positional arguments"),
        (lambda: add.remote(1, d=2), r"remote\(\) got an unexpected keyword argument 'd'"),
        (lambda: add.remote(1, a=2), r"remote\(\) got multiple values"),
    ],
)
def test_arguments_are_checked_where_the_call_is_made(
    runtime: FakeRuntime, call: Any, words: str
) -> None:
    with pytest.raises(TypeError, match=words) as caught:
        call()

    assert "add takes (a, b=..., *, c=...)" in str(caught.value)
    assert runtime.asked == []


def test_functions_of_any_arguments_take_any(runtime: FakeRuntime) -> None:
    @miniray.remote
    def everything(*args: int, **kwargs: int) -> int:
        return sum(args) + sum(kwargs.values())

    assert miniray.get(everything.remote(1, 2, 3, x=4, self=5)) == 15


def test_a_required_keyword_is_checked_too(runtime: FakeRuntime) -> None:
    @miniray.remote
    def named(a: int, *, b: int) -> int:
        return a + b

    with pytest.raises(TypeError, match="'b'"):
        named.remote(1)
    assert miniray.get(named.remote(1, b=2)) == 3


def test_the_plain_function_is_still_there() -> None:
    assert add.__wrapped__(1, 2) == add._function(1, 2) == 3
    assert add.__name__ == "add"
    assert add.__doc__ == "Add numbers."


def test_an_async_function_is_refused() -> None:
    async def work() -> None: ...

    async def items() -> AsyncIterator[int]:
        yield 1

    for function in (work, items):
        with pytest.raises(ValueError, match=r"asyncio\.run"):
            miniray.remote(function)


def test_a_remote_function_cannot_be_made_remote_again() -> None:
    with pytest.raises(TypeError, match=r"use its \.options"):
        miniray.remote(add)  # type: ignore[type-var, call-overload]


def test_options_by_position_are_refused() -> None:
    with pytest.raises(TypeError, match="options by name"):
        miniray.remote(add, 2)  # type: ignore[call-overload]


def test_a_remote_function_can_be_sent_with_its_options(runtime: FakeRuntime) -> None:
    copy = pickle.loads(cloudpickle.dumps(pair.options(max_retries=7)))

    copy.remote()

    assert runtime.last.options.max_retries == 7
    assert runtime.last.options.resources == {"CPU": 2}
