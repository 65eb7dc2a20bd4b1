"""``ActorPool``."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

import pytest
from cluster_helpers import wait_for_file

import miniray
from miniray.exceptions import ActorDiedError
from miniray.util import ActorPool

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = pytest.mark.usefixtures("cluster")


@miniray.remote
class Doubler:
    def double(self, n: int) -> int:
        return n * 2

    def wait_for(self, path: Path) -> str:
        wait_for_file(path)
        return path.name

    def fail(self, message: str) -> None:
        raise ValueError(message)

    def die(self) -> None:
        os._exit(1)

    @miniray.method(num_returns=2)
    def pair(self, n: int) -> tuple[int, int]:
        return n, n + 1


def double(actor: Any, n: int) -> Any:
    return actor.double.remote(n)


def wait_for(actor: Any, path: Path) -> Any:
    return actor.wait_for.remote(path)


def pool_of(size: int) -> ActorPool:
    return ActorPool([Doubler.remote() for _ in range(size)])


def test_map_gives_results_in_the_order_of_the_values() -> None:
    assert list(pool_of(2).map(double, range(7))) == [0, 2, 4, 6, 8, 10, 12]


def test_map_unordered_gives_results_as_they_finish(tmp_path: Path) -> None:
    (tmp_path / "fast").touch()
    results = pool_of(2).map_unordered(wait_for, [tmp_path / "slow", tmp_path / "fast"])
    assert next(results) == "fast"
    (tmp_path / "slow").touch()
    assert list(results) == ["slow"]


def test_map_starts_over_after_results_that_nobody_took() -> None:
    pool = pool_of(2)
    pool.submit(double, 100)
    pool.submit(double, 200)
    pool.submit(double, 300)
    assert list(pool.map(double, [1, 2])) == [2, 4]


def test_submitted_values_wait_for_a_free_actor() -> None:
    pool = pool_of(1)
    for n in range(4):
        pool.submit(double, n)
    assert not pool.has_free()
    results = []
    while pool.has_next():
        results.append(pool.get_next())
    assert results == [0, 2, 4, 6]
    assert pool.has_free()


def test_get_next_without_anything_submitted_is_stop_iteration() -> None:
    pool = pool_of(1)
    with pytest.raises(StopIteration):
        pool.get_next()
    with pytest.raises(StopIteration):
        pool.get_next_unordered()


def test_get_next_gives_up_after_its_timeout(tmp_path: Path) -> None:
    pool = pool_of(1)
    pool.submit(wait_for, tmp_path / "go")
    with pytest.raises(TimeoutError):
        pool.get_next(timeout=0.05)
    with pytest.raises(TimeoutError):
        pool.get_next_unordered(timeout=0.05)
    (tmp_path / "go").touch()
    assert pool.get_next(timeout=30) == "go"


def test_a_result_that_came_too_late_can_be_ignored(tmp_path: Path) -> None:
    pool = pool_of(1)
    pool.submit(wait_for, tmp_path / "go")
    pool.submit(double, 4)
    with pytest.raises(TimeoutError, match="ignored"):
        pool.get_next(timeout=0.05, ignore_if_timedout=True)
    (tmp_path / "go").touch()
    assert pool.get_next() == 8
    assert not pool.has_next()


def test_results_taken_out_of_order_end_the_order() -> None:
    pool = pool_of(2)
    pool.submit(double, 1)
    assert pool.get_next_unordered() == 2
    pool.submit(double, 2)
    assert pool.get_next() == 4


def test_an_error_is_raised_and_the_actor_used_again() -> None:
    pool = pool_of(1)
    pool.submit(lambda actor, text: actor.fail.remote(text), "bad value")
    with pytest.raises(ValueError, match="bad value"):
        pool.get_next()
    assert list(pool.map(double, [1])) == [2]


def test_a_dead_actor_leaves_the_pool() -> None:
    pool = pool_of(2)
    pool.submit(lambda actor, _: actor.die.remote(), None)
    with pytest.raises(ActorDiedError):
        pool.get_next()
    assert list(pool.map(double, [1, 2, 3])) == [2, 4, 6]
    assert pool.pop_idle() is not None
    assert pool.pop_idle() is None


def test_calls_with_several_returns_give_lists() -> None:
    pool = pool_of(1)
    results = pool.map(lambda actor, n: actor.pair.remote(n), [1, 5])
    assert list(results) == [[1, 2], [5, 6]]


def test_actors_can_be_taken_out_and_put_in() -> None:
    actor = Doubler.remote()
    pool = ActorPool([actor])
    assert pool.pop_idle() == actor
    assert pool.pop_idle() is None
    pool.push(actor)
    with pytest.raises(ValueError, match="belongs"):
        pool.push(actor)
    pool.submit(double, 3)
    with pytest.raises(ValueError, match="belongs"):
        pool.push(actor)
    assert pool.pop_idle() is None
    assert pool.get_next() == 6
