"""What ends processes or cancels calls, raised by values that are pickled and unpickled."""

from __future__ import annotations

import asyncio
import os
import sys
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from cluster_helpers import count_up, wait_for_file, wait_until

import miniray
from miniray.exceptions import ActorDiedError, RayTaskError, TaskCancelledError

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Iterator
    from pathlib import Path

pytestmark = pytest.mark.usefixtures("cluster")

MIB = 1024 * 1024
KINDS = [SystemExit, KeyboardInterrupt, asyncio.CancelledError]


class RaisesInGet:
    """Its unpickling raises an instance of a class."""

    def __init__(self, kind: type[BaseException], size: int = 10) -> None:
        self.content = kind, np.ones(size, dtype=np.uint8)

    def __reduce__(self) -> Any:
        return raise_one, self.content


class RaisesInPut:
    """Its pickling does."""

    def __init__(self, kind: type[BaseException]) -> None:
        self.kind = kind

    def __reduce__(self) -> Any:
        return raise_one(self.kind)


def raise_one(kind: type[BaseException], _payload: Any = None) -> Any:
    raise kind("of a value")


class Plain:
    def take(self, value: Any) -> str:
        return type(value).__name__

    def make(self, kind: type[BaseException]) -> Any:
        return RaisesInPut(kind)

    def stream(self, kind: type[BaseException]) -> Iterator[Any]:
        yield 1
        yield RaisesInPut(kind)

    def pid(self) -> int:
        return os.getpid()


class Async:
    async def take(self, value: Any) -> str:
        return type(value).__name__

    async def make(self, kind: type[BaseException]) -> Any:
        return RaisesInPut(kind)

    async def stream(self, kind: type[BaseException]) -> AsyncIterator[Any]:
        yield 1
        yield RaisesInPut(kind)

    async def pid(self) -> int:
        return os.getpid()


@pytest.fixture(
    params=[(Plain, {}), (Plain, {"max_concurrency": 2}), (Async, {})],
    ids=["plain", "threads", "asyncio"],
)
def actor(request: pytest.FixtureRequest) -> Any:
    cls, options = request.param
    return miniray.remote(cls).options(**options).remote()


def raised_by(ref: Any) -> BaseException:
    with pytest.raises(RayTaskError, match="of a value") as info:
        miniray.get(ref, timeout=30)
    return info.value.cause


@pytest.mark.parametrize("kind", KINDS)
def test_an_actor_lives_on_whatever_its_arguments_raise(
    actor: Any, kind: type[BaseException]
) -> None:
    pid = miniray.get(actor.pid.remote())
    for size in (10, MIB):
        value = RaisesInGet(kind, size)
        refs = [actor.take.remote(value), actor.take.remote(miniray.put(value))]
        assert [type(raised_by(ref)) for ref in refs] == [kind] * 2
    assert miniray.get(actor.pid.remote(), timeout=30) == pid


@pytest.mark.parametrize("kind", KINDS)
def test_an_actor_lives_on_whatever_its_results_raise(
    actor: Any, kind: type[BaseException]
) -> None:
    pid = miniray.get(actor.pid.remote())
    assert type(raised_by(actor.make.remote(kind))) is kind
    items = actor.stream.remote(kind)
    assert miniray.get(next(items)) == 1
    assert type(raised_by(next(items))) is kind
    assert miniray.get(actor.pid.remote(), timeout=30) == pid


@pytest.mark.parametrize("kind", KINDS)
def test_a_task_fails_with_what_its_values_raise_and_is_not_repeated(
    kind: type[BaseException], tmp_path: Path
) -> None:
    @miniray.remote
    def take(_value: Any) -> None:
        """Do nothing."""

    @miniray.remote
    def make() -> Any:
        count_up(tmp_path / "runs")
        return RaisesInPut(kind)

    captured = RaisesInGet(kind)

    @miniray.remote
    def capture() -> Any:
        return captured

    @miniray.remote(num_returns=2)
    def some() -> Any:
        yield 1
        yield RaisesInPut(kind)

    for ref in (take.remote(captured), make.remote(), capture.remote()):
        assert type(raised_by(ref)) is kind
    assert (tmp_path / "runs").stat().st_size == 1
    first, second = some.remote()
    assert miniray.get(first) == 1
    assert type(raised_by(second)) is kind


@pytest.mark.parametrize("kind", [SystemExit, KeyboardInterrupt])
@pytest.mark.parametrize("cls", [Plain, Async])
def test_an_actor_whose_constructor_cannot_have_its_argument_says_why(
    cls: Any, kind: type[BaseException]
) -> None:
    class Actor(cls):  # type: ignore[misc]
        def __init__(self, value: Any) -> None:
            self.value = value

    actor = miniray.remote(Actor).remote(RaisesInGet(kind))
    with pytest.raises(ActorDiedError, match="of a value") as info:
        miniray.get(actor.pid.remote(), timeout=30)
    error = info.value.creation_error
    assert error is not None
    assert type(error.cause) is kind


class Slow:
    """Its unpickling begins, and waits until a file exists."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        (self.folder / "begun").touch()
        wait_for_file(self.folder / "go", timeout=20)  # Ray ends no unpickling before that


def test_a_cancel_that_comes_while_an_argument_is_unpickled_is_a_cancel(tmp_path: Path) -> None:
    @miniray.remote
    def take(_value: Any) -> None:
        """Do nothing."""

    ref = take.remote(Slow(tmp_path))
    wait_for_file(tmp_path / "begun")
    miniray.cancel(ref)
    with pytest.raises(TaskCancelledError):
        miniray.get(ref, timeout=30)


class Exit:
    """Its unpickling ends whoever does it, unless a file exists; there is another value in it."""

    def __init__(self, there: Path, inner: Any) -> None:
        self.content = there, np.ones(MIB, dtype=np.uint8), inner

    def __reduce__(self) -> Any:
        return exit_or_read, self.content


def exit_or_read(there: Path, payload: Any, inner: Any) -> Any:
    if not there.exists():
        sys.exit("not yet")
    return len(payload), inner


def test_what_ends_a_program_in_get_ends_it_and_leaves_the_value_as_it_was(tmp_path: Path) -> None:
    there = tmp_path / "there"
    ref = miniray.put(Exit(there, miniray.put(b"x" * MIB)))
    with pytest.raises(SystemExit, match="not yet"):
        miniray.get(ref)
    with pytest.raises(SystemExit, match="not yet"):
        miniray.get([miniray.put(1), ref])
    with pytest.raises(SystemExit, match="not yet"):
        ref.future().result(30)
    with pytest.raises(SystemExit, match="not yet"):
        asyncio.run(awaited(ref))
    there.touch()
    length, inner = miniray.get(ref)
    assert length == len(miniray.get(inner)) == MIB
    del ref, inner
    wait_until(lambda: not any(node["ObjectStoreUsed"] for node in miniray.nodes()))


async def awaited(ref: Any) -> Any:
    return await ref


class ElsewhereError(Exception):
    """Can be unpickled in the process that made it only; another one ends."""

    def __init__(self) -> None:
        super().__init__(f"of process {os.getpid()}")
        self.pid = os.getpid()

    def __reduce__(self) -> Any:
        return exit_elsewhere, (self.pid,)


def exit_elsewhere(pid: int) -> Exception:
    if pid != os.getpid():
        sys.exit("not here")
    return ElsewhereError()


def test_an_exception_whose_unpickling_ends_processes_ends_none() -> None:
    @miniray.remote(max_retries=1, retry_exceptions=[ValueError])
    def fail() -> None:
        raise ElsewhereError

    for _ in range(2):
        with pytest.raises(RayTaskError, match=r"ElsewhereError: of process"):
            miniray.get(fail.remote(), timeout=30)
