"""Named actors: names, namespaces, lifetimes."""

from __future__ import annotations

import os
import threading
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from cluster_helpers import is_alive, wait_until

import miniray
from miniray.exceptions import ActorAlreadyExistsError, ActorDiedError
from miniray.util import list_named_actors
from miniray.util.state import list_actors

if TYPE_CHECKING:
    from collections.abc import Callable

pytestmark = pytest.mark.usefixtures("cluster")

CLUSTER = {"namespace": "home"}


@miniray.remote
class Register:
    def __init__(self, value: Any = None) -> None:
        self.value = value

    def get(self) -> Any:
        return self.value

    def set(self, value: Any) -> None:
        self.value = value

    def pid(self) -> int:
        return os.getpid()

    def block(self, path: str) -> None:
        Path(path).touch()
        threading.Event().wait()


def is_gone(name: str, namespace: str | None = None) -> Callable[[], bool]:
    """A condition: nobody has this name."""

    def condition() -> bool:
        try:
            miniray.get_actor(name, namespace)
        except ValueError:
            return True
        return False

    return condition


def test_a_named_actor_is_found_by_its_name() -> None:
    actor = Register.options(name="found").remote(5)
    other = miniray.get_actor("found")
    assert miniray.get(other.get.remote()) == 5
    assert other == actor


def test_a_name_nobody_has_is_a_value_error() -> None:
    with pytest.raises(ValueError, match=r"'nobody'.*as actors do with their last handle unless"):
        miniray.get_actor("nobody")


@pytest.mark.parametrize("name", ["", 1, None])
def test_a_name_is_a_text_that_is_not_empty(name: Any) -> None:
    with pytest.raises((TypeError, ValueError)):
        miniray.get_actor(name)


def test_an_empty_name_is_refused() -> None:
    with pytest.raises(ValueError, match="name"):
        Register.options(name="").remote()


def test_a_name_can_be_taken_only_once() -> None:
    actor = Register.options(name="taken").remote()
    with pytest.raises(ActorAlreadyExistsError, match="taken"):
        Register.options(name="taken").remote()
    with pytest.raises(ValueError, match="taken"):
        Register.options(name="taken").remote()
    assert miniray.get(actor.get.remote()) is None
    assert all(listed.class_name for listed in list_actors())  # the refused ones are not there


def test_get_if_exists_gives_the_actor_that_has_the_name() -> None:
    first = Register.options(name="shared", get_if_exists=True).remote("first")
    second = Register.options(name="shared", get_if_exists=True).remote("second")
    assert miniray.get(second.get.remote()) == "first"
    assert first == second


def test_get_if_exists_needs_a_name() -> None:
    with pytest.raises(ValueError, match="name"):
        Register.options(get_if_exists=True).remote()


def test_a_name_is_free_again_when_its_actor_is_killed() -> None:
    actor = Register.options(name="again").remote(1)
    miniray.get(actor.get.remote())
    miniray.kill(actor)
    wait_until(is_gone("again"))
    assert miniray.get(Register.options(name="again").remote(2).get.remote()) == 2


def test_a_name_is_free_again_when_the_last_handle_goes() -> None:
    actor = Register.options(name="counted").remote()
    miniray.get(actor.get.remote())
    del actor
    wait_until(is_gone("counted"))


def test_a_handle_got_by_name_does_not_keep_the_actor_alive() -> None:
    actor = Register.options(name="weak").remote()
    found = miniray.get_actor("weak")
    pid = miniray.get(found.pid.remote())
    del actor
    wait_until(lambda: not is_alive(pid))
    with pytest.raises(ActorDiedError):
        miniray.get(found.get.remote())


def test_a_call_by_such_a_handle_fails_when_the_actor_goes(tmp_path: Path) -> None:
    @miniray.remote(num_cpus=0)
    def call_from_elsewhere(begun: str) -> None:
        miniray.get(miniray.get_actor("busy").block.remote(begun))

    actor = Register.options(name="busy").remote()
    pid = miniray.get(actor.pid.remote())
    running = call_from_elsewhere.remote(str(tmp_path / "begun"))
    wait_until((tmp_path / "begun").exists)
    del actor
    wait_until(lambda: not is_alive(pid))
    with pytest.raises(ActorDiedError):
        miniray.get(running, timeout=20)


def test_names_of_one_namespace_are_not_seen_in_another() -> None:
    actor = Register.options(name="local", namespace="away").remote("away")
    with pytest.raises(ValueError, match="local"):
        miniray.get_actor("local")
    assert miniray.get(miniray.get_actor("local", namespace="away").get.remote()) == "away"
    here = Register.options(name="local").remote("here")
    assert miniray.get(miniray.get_actor("local").get.remote()) == "here"
    assert miniray.get(miniray.get_actor("local", "home").get.remote()) == "here"
    assert actor != here


def test_the_namespace_is_in_the_runtime_context() -> None:
    @miniray.remote
    def namespace() -> str:
        return miniray.get_runtime_context().namespace

    assert miniray.get_runtime_context().namespace == "home"
    assert miniray.get(namespace.remote()) == "home"


def test_a_task_finds_a_named_actor() -> None:
    actor = Register.options(name="from-task").remote(1)

    @miniray.remote
    def change() -> None:
        miniray.get(miniray.get_actor("from-task").set.remote(2))

    miniray.get(change.remote())
    assert miniray.get(actor.get.remote()) == 2


def test_a_detached_actor_outlives_its_handles_and_its_creator() -> None:
    @miniray.remote
    class Creator:
        def create(self) -> int:
            actor = Register.options(name="detached", lifetime="detached").remote("kept")
            return miniray.get(actor.pid.remote())

    creator = Creator.remote()
    pid = miniray.get(creator.create.remote())
    miniray.kill(creator)
    with pytest.raises(ActorDiedError):
        miniray.get(creator.create.remote())
    actor = miniray.get_actor("detached")
    assert miniray.get([actor.get.remote(), actor.pid.remote()]) == ["kept", pid]
    miniray.kill(actor)
    wait_until(lambda: not is_alive(pid))


def test_an_actor_ends_with_its_creator_unless_it_is_detached() -> None:
    @miniray.remote
    class Creator:
        def create(self) -> int:
            self.child = Register.options(name="child").remote()
            return miniray.get(self.child.pid.remote())

    creator = Creator.remote()
    pid = miniray.get(creator.create.remote())
    child = miniray.get_actor("child")
    miniray.kill(creator)
    wait_until(lambda: not is_alive(pid))
    with pytest.raises(ActorDiedError):
        miniray.get(child.get.remote())


@pytest.mark.parametrize("lifetime", ["forever", 1])
def test_a_lifetime_that_does_not_exist_is_refused(lifetime: Any) -> None:
    with pytest.raises((ValueError, TypeError)):
        Register.options(lifetime=lifetime)


def test_named_actors_are_listed() -> None:
    here = Register.options(name="listed").remote()
    away = Register.options(name="listed-away", namespace="away").remote()
    miniray.get([here.get.remote(), away.get.remote()])
    assert "listed" in list_named_actors()
    assert "listed-away" not in list_named_actors()
    everywhere = list_named_actors(all_namespaces=True)
    assert {"name": "listed-away", "namespace": "away"} in everywhere
    assert {"name": "listed", "namespace": "home"} in everywhere
