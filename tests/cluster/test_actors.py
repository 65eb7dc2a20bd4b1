"""Actors: creation, calls, threads, limits."""

from __future__ import annotations

import ctypes
import os
import threading
from typing import TYPE_CHECKING, Any

import pytest
from cluster_helpers import wait_for_file, wait_until

import miniray
from miniray.actor import ActorClass, ActorHandle
from miniray.common.runtime import current_runtime
from miniray.exceptions import (
    PendingCallsLimitExceeded,
    RayActorError,
    RayError,
)

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

pytestmark = pytest.mark.usefixtures("cluster")


@miniray.remote
class Counter:
    """Counts."""

    def __init__(self, start: int = 0, step: int = 1) -> None:
        self.value = start
        self.step = step

    def add(self, n: int | None = None) -> int:
        self.value += self.step if n is None else n
        return self.value

    def pid(self) -> int:
        return os.getpid()

    def wait_for(self, path: Path) -> int:
        wait_for_file(path)
        return self.value

    @miniray.method(num_returns=2)
    def pair(self) -> tuple[int, str]:
        return self.value, "second"

    @staticmethod
    def twice(n: int) -> int:
        return n * 2

    @classmethod
    def title(cls) -> str:
        return cls.__name__

    @property
    def prop(self) -> int:
        return self.value


class Base:
    def __init__(self, name: str) -> None:
        self.name = name

    def hello(self) -> str:
        return f"base {self.name}"

    def only_base(self) -> str:
        return "base"


@miniray.remote
class Derived(Base):
    def __init__(self) -> None:
        super().__init__("derived")

    def hello(self) -> str:
        return super().hello() + "!"


@miniray.remote
class BadStart:
    def __init__(self) -> None:
        raise RuntimeError("cannot start")

    def hello(self) -> str:
        return "hello"


def test_an_actor_keeps_state_between_calls() -> None:
    counter = Counter.remote(5, step=2)
    assert miniray.get([counter.add.remote() for _ in range(3)]) == [7, 9, 11]


def test_the_calls_of_one_caller_run_in_order() -> None:
    counter = Counter.remote()
    refs = [counter.add.remote() for _ in range(500)]
    assert miniray.get(refs) == list(range(1, 501))


def test_calls_run_in_order_although_an_argument_comes_late(tmp_path: Path) -> None:
    counter, other = Counter.remote(), Counter.remote(100)
    first = counter.add.remote(other.wait_for.remote(tmp_path / "go"))
    second = counter.add.remote(1)
    (tmp_path / "go").touch()
    assert miniray.get([first, second]) == [100, 101]


def test_the_arguments_of_the_next_call_can_be_loaded_while_one_runs(tmp_path: Path) -> None:
    class Ahead:
        def first(self) -> int:
            runtime = current_runtime()
            wait_until(lambda: runtime.next_arguments() is not None)
            self.found = runtime.next_arguments()
            return len(self.found or ())

        def second(self, large: bytes, *, small: int) -> tuple[bool, int]:
            assert self.found is not None
            return large is self.found[0], small

        def third(self) -> object:
            return current_runtime().next_arguments()

    actor = miniray.remote(Ahead).remote()
    large = miniray.put(bytes(2**20))
    first, second = actor.first.remote(), actor.second.remote(large, small=3)
    assert miniray.get([first, second]) == [1, (True, 3)]
    assert miniray.get(actor.third.remote()) is None


def test_each_actor_has_a_process_of_its_own() -> None:
    pids = miniray.get([Counter.remote().pid.remote() for _ in range(3)])
    assert len({*pids, os.getpid()}) == 4


def test_an_error_of_the_constructor_reaches_the_first_call() -> None:
    actor = BadStart.remote()
    with pytest.raises(RayActorError, match="cannot start"):
        miniray.get(actor.hello.remote())
    with pytest.raises(RayActorError):
        miniray.get(actor.hello.remote())


def test_wrong_constructor_arguments_are_refused_at_once() -> None:
    with pytest.raises(TypeError):
        Counter.remote(1, 2, 3)
    with pytest.raises(TypeError):
        Counter.remote(unknown=1)


def test_wrong_method_arguments_are_refused_at_once() -> None:
    counter = Counter.remote()
    with pytest.raises(TypeError):
        counter.add.remote(1, 2)


def test_refs_are_resolved_for_constructors_and_methods() -> None:
    counter = Counter.remote(miniray.put(5))
    assert miniray.get(counter.add.remote(n=miniray.put(3))) == 8


def test_static_and_class_methods_can_be_called() -> None:
    counter = Counter.remote()
    assert miniray.get(counter.twice.remote(4)) == 8
    assert miniray.get(counter.title.remote()) == "Counter"


def test_inherited_and_overridden_methods_can_be_called() -> None:
    actor = Derived.remote()
    assert miniray.get(actor.hello.remote()) == "base derived!"
    assert miniray.get(actor.only_base.remote()) == "base"


class Hiding:
    """Has attributes with the names of its methods."""

    def __init__(self) -> None:
        for name in ("busy", "items", "double", "made"):
            setattr(self, name, "hidden")

    def busy(self) -> Any:
        return vars(self)["busy"]

    def items(self) -> Iterator[Any]:
        yield vars(self)["items"]

    @staticmethod
    def double(number: int) -> int:
        return 2 * number

    @classmethod
    def made(cls) -> str:
        return cls.__name__


class AsyncHiding(Hiding):
    async def later(self) -> Any:
        return vars(self)["busy"]


@pytest.mark.parametrize(
    "hiding",
    [
        miniray.remote(Hiding),
        miniray.remote(Hiding).options(max_concurrency=2),
        miniray.remote(AsyncHiding),
    ],
    ids=["plain", "threads", "asyncio"],
)
def test_an_attribute_of_the_instance_does_not_hide_the_method_of_its_name(hiding: Any) -> None:
    actor = hiding.remote()
    calls = [actor.busy.remote(), *actor.items.remote(), actor.double.remote(4)]
    assert miniray.get(calls, timeout=30) == ["hidden", "hidden", 8]
    assert miniray.get(actor.made.remote(), timeout=30).endswith("Hiding")


def test_a_class_cannot_inherit_from_a_remote_one() -> None:
    with pytest.raises(miniray.actor.ActorClassInheritanceException, match="Keep the plain class"):

        class Special(Counter):  # type: ignore[misc, valid-type]
            pass


def test_a_method_may_return_several_values() -> None:
    counter = Counter.remote(3)
    first, second = counter.pair.remote()
    assert miniray.get([first, second]) == [3, "second"]
    assert miniray.get(counter.pair.options(num_returns=1).remote()) == (3, "second")


def test_a_class_without_decorator_can_be_made_remote() -> None:
    assert isinstance(miniray.remote(Base), ActorClass)
    actor = miniray.remote(Base).remote("plain")
    assert miniray.get(actor.hello.remote()) == "base plain"
    actor = miniray.remote(num_cpus=0)(Base).remote("with options")
    assert miniray.get(actor.hello.remote()) == "base with options"


def test_a_handle_can_be_passed_to_tasks_and_actors() -> None:
    @miniray.remote
    def use(handles: list[Any]) -> int:
        return miniray.get(handles[0].add.remote())

    @miniray.remote
    class User:
        def __init__(self, handle: Any) -> None:
            self.handle = handle

        def use(self) -> int:
            return miniray.get(self.handle.add.remote())

    counter = Counter.remote()
    assert isinstance(counter, ActorHandle)
    assert miniray.get(use.remote([counter])) == 1
    user = User.remote(counter)
    assert miniray.get(user.use.remote()) == 2
    assert miniray.get(miniray.get(miniray.put(counter)).add.remote()) == 3


def test_an_actor_made_by_a_task_lives_as_long_as_its_handle() -> None:
    @miniray.remote
    def make() -> Any:
        return Counter.remote(7)

    counter = miniray.get(make.remote())
    assert miniray.get(counter.add.remote()) == 8


def test_an_actor_knows_itself() -> None:
    @miniray.remote
    class Selfish:
        def me(self) -> Any:
            return miniray.get_runtime_context().current_actor

        def ids(self) -> tuple[Any, ...]:
            context = miniray.get_runtime_context()
            return context.get_actor_id(), context.get_actor_name(), os.getpid()

    actor = Selfish.options(name="selfish").remote()
    ids = miniray.get(actor.ids.remote())
    assert ids[1] == "selfish"
    assert miniray.get(miniray.get(actor.me.remote()).ids.remote()) == ids


def test_max_concurrency_runs_calls_in_threads() -> None:
    @miniray.remote(max_concurrency=3)
    class Meeting:
        def __init__(self) -> None:
            self.barrier = threading.Barrier(3)

        def meet(self) -> str:
            self.barrier.wait(timeout=20)
            return threading.current_thread().name

    meeting = Meeting.remote()
    assert len(set(miniray.get([meeting.meet.remote() for _ in range(3)]))) == 3


def test_max_concurrency_is_the_most_that_run_at_once(tmp_path: Path) -> None:
    @miniray.remote(max_concurrency=2)
    class Busy:
        def __init__(self) -> None:
            self.lock = threading.Lock()
            self.running = 0
            self.most = 0

        def work(self, meeting: Path) -> int:
            with self.lock:
                self.running += 1
                self.most = max(self.most, self.running)
                if self.running == 2:
                    meeting.touch()
            wait_for_file(meeting)
            with self.lock:
                self.running -= 1
                return self.most

    busy = Busy.remote()
    assert max(miniray.get([busy.work.remote(tmp_path / "two") for _ in range(8)])) == 2


def test_concurrency_groups_have_threads_of_their_own(tmp_path: Path) -> None:
    @miniray.remote(concurrency_groups={"io": 1, "compute": 1})
    class Grouped:
        @miniray.method(concurrency_group="io")
        def block(self, path: Path) -> str:
            wait_for_file(path)
            return "io"

        @miniray.method(concurrency_group="compute")
        def compute(self) -> str:
            return "compute"

        def plain(self) -> str:
            return "plain"

    actor = Grouped.remote()
    blocked = actor.block.remote(tmp_path / "go")
    assert miniray.get(actor.compute.remote(), timeout=30) == "compute"
    assert miniray.get(actor.plain.remote(), timeout=30) == "plain"
    moved = actor.plain.options(concurrency_group="io").remote()
    assert miniray.wait([moved], timeout=0.1) == ([], [moved])
    (tmp_path / "go").touch()
    assert miniray.get([blocked, moved]) == ["io", "plain"]


@pytest.mark.parametrize("actor_class", [Counter, Counter.options(max_concurrency=2)])
def test_a_call_into_a_concurrency_group_of_an_actor_that_has_none_fails(actor_class: Any) -> None:
    counter = actor_class.remote()
    misspelt = counter.add.options(concurrency_group="oi").remote()
    with pytest.raises(ValueError, match=r"'oi'.* concurrency_groups: none"):
        miniray.get(misspelt, timeout=30)
    assert miniray.get(counter.add.remote(), timeout=30) == 1


def test_max_pending_calls_limits_what_waits(tmp_path: Path) -> None:
    counter = Counter.options(max_pending_calls=3).remote()
    miniray.get(counter.__ray_ready__.remote())
    refs = [counter.wait_for.remote(tmp_path / "go")]

    def send_one() -> bool:
        refs.append(counter.add.remote())
        return False

    with pytest.raises(PendingCallsLimitExceeded):
        wait_until(send_one)
    assert 2 <= len(refs) <= 4
    (tmp_path / "go").touch()
    miniray.get(refs)
    assert miniray.get(counter.add.remote()) > 0


def test_options_of_an_actor_class_leave_the_class_alone() -> None:
    assert miniray.get(Counter.options(num_cpus=0).remote(1).add.remote()) == 2
    with pytest.raises(ValueError, match="max_retries"):
        Counter.options(max_retries=1)
    with pytest.raises(ValueError, match="num_cpu"):
        miniray.remote(num_cpu=1)(Base)


def test_an_actor_without_cpus_given_needs_none_to_live() -> None:
    actors = [Counter.remote() for _ in range(6)]
    assert miniray.get([actor.add.remote() for actor in actors], timeout=60) == [1] * 6


def test_an_actor_holds_its_resources_until_it_ends() -> None:
    first = Counter.options(num_cpus=4).remote()
    miniray.get(first.add.remote())
    assert miniray.get_runtime_context() is not None
    second = Counter.options(num_cpus=4).remote()
    ref = second.add.remote()
    assert miniray.wait([ref], timeout=0.3) == ([], [ref])
    miniray.kill(first)
    assert miniray.get(ref, timeout=30) == 1


def test_the_constructor_may_call_other_actors() -> None:
    @miniray.remote
    class Parent:
        def __init__(self) -> None:
            self.child = Counter.remote(1)
            self.start = miniray.get(self.child.add.remote())

        def value(self) -> int:
            return self.start

    assert miniray.get(Parent.remote().value.remote()) == 2


def test_a_slow_constructor_delays_the_calls_but_not_the_caller(tmp_path: Path) -> None:
    @miniray.remote
    class Slow:
        def __init__(self, path: Path) -> None:
            wait_for_file(path)

        def hello(self) -> str:
            return "hello"

    actor = Slow.remote(tmp_path / "go")
    ref = actor.hello.remote()
    assert miniray.wait([ref], timeout=0.1) == ([], [ref])
    (tmp_path / "go").touch()
    assert miniray.get(ref, timeout=30) == "hello"


def test_a_private_method_can_be_called() -> None:
    @miniray.remote
    class Private:
        def _hidden(self) -> str:
            return "found"

        def __call__(self) -> str:
            return "called"

    actor = Private.remote()
    assert miniray.get(actor._hidden.remote()) == "found"
    assert miniray.get(actor.__call__.remote()) == "called"


def test_environment_variables_of_an_actor_are_set() -> None:
    @miniray.remote(runtime_env={"env_vars": {"COLOUR": "green"}})
    class Reader:
        def colour(self) -> str | None:
            return os.environ.get("COLOUR")

    assert miniray.get(Reader.remote().colour.remote()) == "green"


def test_a_call_that_cannot_be_placed_is_still_pending_after_a_while() -> None:
    actor = Counter.options(num_cpus=100).remote()
    ref = actor.add.remote()
    assert miniray.wait([ref], timeout=0.2) == ([], [ref])
    miniray.kill(actor)
    with pytest.raises(RayError):
        miniray.get(ref, timeout=30)


def test_answers_do_not_wait_for_a_call_that_holds_the_interpreters_lock(tmp_path: Path) -> None:
    @miniray.remote
    class Native:
        def quick(self) -> str:
            return "quick"

        def hold(self, pipe: str) -> str:
            # Unlike CDLL, this keeps the lock; it returns when somebody opens the pipe to write.
            return "held" * (ctypes.PyDLL(None).open(pipe.encode(), os.O_RDONLY) > 0)

    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    actor = Native.remote()
    miniray.get(actor.quick.remote())
    quick = [actor.quick.remote() for _ in range(5)]
    held = actor.hold.remote(str(pipe))
    try:
        assert miniray.get(quick, timeout=30) == ["quick"] * 5
    finally:
        os.close(os.open(pipe, os.O_WRONLY))
    assert miniray.get(held, timeout=30) == "held"


def test_a_name_given_to_a_call_is_in_its_runtime_context() -> None:
    @miniray.remote
    class Actor:
        def __init__(self) -> None:
            self.made_by = miniray.get_runtime_context().get_task_function_name()

        def names(self) -> tuple[str | None, ...]:
            context = miniray.get_runtime_context()
            return context.get_task_name(), context.get_task_function_name(), self.made_by

    for concurrency in (1, 2):
        actor = Actor.options(max_concurrency=concurrency).remote()
        functions = f"{__name__}.Actor.names", f"{__name__}.Actor.__init__"
        assert miniray.get(actor.names.options(name="mine").remote()) == ("mine", *functions)
        assert miniray.get(actor.names.remote()) == ("Actor.names", *functions)
