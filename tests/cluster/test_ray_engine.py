"""A program of miniray on a Ray cluster: what no test of the public API shows by itself."""

from __future__ import annotations

import pickle
from typing import Any

import pytest

import miniray
from miniray.exceptions import ActorDiedError, DeathCause, EngineError, TaskError

pytestmark = [pytest.mark.engine("ray"), pytest.mark.usefixtures("cluster")]


class Untold(Exception):
    """Can't be pickled, and its constructor can't be called again."""

    def __init__(self, one: int, two: int) -> None:
        super().__init__(f"{one} and {two}")
        self.stays_here = lambda: one


def test_an_exception_that_ray_cannot_send_arrives_with_its_class() -> None:
    @miniray.remote
    def fails() -> None:
        raise Untold(1, 2)

    with pytest.raises(TaskError, match="1 and 2") as caught:
        miniray.get(fails.remote())
    assert "Untold" in str(caught.value)


def test_refs_pass_through_other_picklers() -> None:
    ref = miniray.put("kept")

    @miniray.remote
    def read(pickled: bytes) -> str:
        return miniray.get(pickle.loads(pickled))

    assert miniray.get(read.remote(pickle.dumps(ref))) == "kept"


def test_state_is_refused_with_the_command_of_ray() -> None:
    from miniray.util import state

    with pytest.raises(EngineError, match="`ray list actors`"):
        state.list_actors()


def test_an_actor_that_was_killed_says_so() -> None:
    @miniray.remote
    class Victim:
        def nothing(self) -> None: ...

    victim = Victim.remote()
    miniray.get(victim.nothing.remote())
    miniray.kill(victim)
    with pytest.raises(ActorDiedError) as caught:
        miniray.get(victim.nothing.remote())
    assert caught.value.cause is DeathCause.KILLED


def test_an_actor_finds_itself_and_others_by_name() -> None:
    @miniray.remote
    class Named:
        def me(self) -> Any:
            return miniray.get_runtime_context().current_actor

        def twice(self, n: int) -> int:
            return 2 * n

    named = Named.options(name="engine-named").remote()
    assert miniray.get(named.me.remote()) == named
    found = miniray.get_actor("engine-named")
    assert miniray.get(found.twice.remote(2)) == 4
    with pytest.raises(TypeError, match="takes"):  # it knows the signatures
        found.twice.remote()


def test_a_dataset_is_read_to_its_end() -> None:
    pytest.importorskip("pyarrow")
    for _ in range(5):
        assert miniray.data.range(100).map(lambda row: row).materialize().count() == 100
