"""``@remote`` on classes: how actors are made, and what handles and methods do."""

from __future__ import annotations

import asyncio
import copy
import functools
import gc
import pickle
import weakref
from typing import TYPE_CHECKING, Any

import cloudpickle
import pytest
from fake_runtime import FakeRuntime, fake_runtime

import miniray
from miniray.actor import ActorHandle, exit_actor
from miniray.common.object_ref import ObjectRef

if TYPE_CHECKING:
    from collections.abc import Iterator


@pytest.fixture
def runtime() -> Iterator[FakeRuntime]:
    with fake_runtime() as fake:
        yield fake


class Base:
    def inherited(self) -> str:
        return "base"


class Plain(Base):
    """Counts."""

    LIMIT = 3

    def __init__(self, start: int = 0, *, step: int = 1) -> None:
        self.count = start
        self.step = step

    def add(self, times: int = 1) -> int:
        self.count += times * self.step
        return self.count

    @miniray.method(num_returns=2, max_task_retries=5)
    def pair(self) -> tuple[int, int]:
        return self.count, self.step

    def items(self) -> Iterator[int]:
        yield from range(self.count)

    @staticmethod
    def double(number: int) -> int:
        return 2 * number

    @classmethod
    def limit(cls, factor: int) -> int:
        return cls.LIMIT * factor

    @miniray.method
    @staticmethod
    def triple(number: int) -> int:
        return 3 * number

    @functools.lru_cache  # noqa: B019
    def cached(self, number: int) -> int:
        return number

    def _private(self) -> str:
        return "private"

    def __len__(self) -> int:
        return self.count


Counter: Any = miniray.remote(Plain)


def test_every_kind_of_method_can_be_called(runtime: FakeRuntime) -> None:
    counter = Counter.remote(1)

    assert miniray.get(counter.inherited.remote()) == "base"
    assert miniray.get(counter.double.remote(4)) == 8
    assert miniray.get(counter.limit.remote(2)) == 6
    assert miniray.get(counter.triple.remote(4)) == 12
    assert miniray.get(counter.cached.remote(4)) == 4
    assert miniray.get(counter._private.remote()) == "private"
    assert miniray.get(counter.__len__.remote()) == 1


def test_every_actor_has_the_built_in_methods_by_both_names(runtime: FakeRuntime) -> None:
    counter = Counter.remote(5)

    assert miniray.get(counter.__miniray_ready__.remote()) is True
    assert miniray.get(counter.__ray_ready__.remote()) is True
    assert miniray.get(counter.__ray_call__.remote(lambda self, n: self.count + n, 2)) == 7
    counter.__ray_terminate__.remote()
    assert runtime.last.name == "__miniray_terminate__"


def test_options_of_methods_come_from_the_decorator_and_the_call(runtime: FakeRuntime) -> None:
    counter = Counter.remote()

    counter.pair.options(name="mine", concurrency_group="io").remote()

    assert runtime.last.options.num_returns == 2
    assert runtime.last.options.max_task_retries == 5
    assert runtime.last.options.concurrency_group == "io"
    assert runtime.last.options.name == "mine"
    assert counter.add.options(num_returns=0).remote() is None


def test_options_of_the_actor_reach_the_runtime_and_the_handle(runtime: FakeRuntime) -> None:
    actor_class = miniray.remote(num_gpus=0.5, max_restarts=2)(Plain)

    handle = actor_class.options(max_task_retries=3, max_pending_calls=9).remote()

    assert runtime.last.options.resources == {"GPU": 0.5}
    assert runtime.last.options.max_restarts == 2
    assert handle._info.max_task_retries == 3
    assert handle._info.max_pending_calls == 9


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda: Counter.remote(1, 2), r"Plain takes \(start=\.\.\., \*, step=\.\.\.\)"),
        (lambda: Counter.remote(start=1, end=2), "'end'"),
        (lambda: Counter.remote().add.remote(1, 2), r"Plain\.add\.remote\(\) got too many"),
        (lambda: Counter.remote().double.remote(), "'number'"),
        (lambda: Counter.remote().limit.remote(1, 2), "too many"),
        (lambda: Counter.remote().triple.remote(), "'number'"),
    ],
)
def test_arguments_are_checked_where_the_call_is_made(
    runtime: FakeRuntime, call: Any, words: str
) -> None:
    with pytest.raises(TypeError, match=words):
        call()


def test_an_unknown_method_is_refused_with_a_suggestion(runtime: FakeRuntime) -> None:
    with pytest.raises(AttributeError, match=r"Plain has no method 'ad'\. Did you mean 'add'"):
        Counter.remote().ad  # noqa: B018


def test_who_reads_an_attribute_of_an_actor_is_told_where_it_can_be_read(
    runtime: FakeRuntime,
) -> None:
    with pytest.raises(AttributeError, match=r"no method 'state'\. .* add a method"):
        Counter.remote().state  # noqa: B018
    with pytest.raises(ValueError, match=r"Actor\(Plain, .* Call one of its methods"):
        miniray.get(Counter.remote())  # type: ignore[call-overload]


def test_rays_own_way_to_call_says_what_to_do(runtime: FakeRuntime) -> None:
    for callee in (Counter, Counter.remote().add, miniray.remote(print)):
        with pytest.raises(TypeError, match=r"no '_remote': use \.options\(\.\.\.\)\.remote"):
            callee._remote(args=(1,), num_cpus=1)


def test_the_plain_class_can_be_reached_through_the_remote_one() -> None:
    assert Counter.__wrapped__ is Plain
    assert Counter.LIMIT == 3
    assert Counter.double(4) == 8
    assert Counter.__doc__ == "Counts."
    assert Counter.__name__ == "Plain"


def test_an_actor_with_async_methods_is_an_asyncio_actor(runtime: FakeRuntime) -> None:
    class Async:
        async def work(self) -> None: ...

    class AsyncItems:
        async def items(self) -> Any:
            yield 1

    assert miniray.remote(Async).remote()._info.is_async
    assert miniray.remote(AsyncItems).remote()._info.is_async
    assert not Counter.remote()._info.is_async


def test_a_handle_is_gone_at_once_though_its_methods_were_used(runtime: FakeRuntime) -> None:
    gc.disable()
    try:
        counter = Counter.remote()
        counter.add.remote()
        counter.pair.options(num_returns=1).remote()
        handle, ref = weakref.ref(counter), weakref.ref(counter._ref)
        runtime.asked.clear()
        del counter
        assert handle() is None
        assert ref() is None
    finally:
        gc.enable()


def test_a_method_keeps_its_actor_alive(runtime: FakeRuntime) -> None:
    add = Counter.remote(1).add

    assert miniray.get(add.remote()) == 2


def test_a_method_is_looked_up_once(runtime: FakeRuntime) -> None:
    counter = Counter.remote()

    assert counter.add is counter.add


def test_handles_compare_by_the_actor(runtime: FakeRuntime) -> None:
    counter, other = Counter.remote(), Counter.remote()
    same = pickle.loads(pickle.dumps(counter))

    assert same == counter
    assert hash(same) == hash(counter)
    assert counter != other
    assert len({counter, same, other}) == 2
    assert repr(counter) == f"Actor(Plain, {counter._actor_id.hex()})"


def test_a_handle_that_was_sent_calls_the_same_actor(runtime: FakeRuntime) -> None:
    counter = Counter.remote(1)
    sent = pickle.loads(cloudpickle.dumps({"handle": counter, "method": counter.add}))

    assert miniray.get(sent["handle"].add.remote()) == 2
    assert miniray.get(sent["method"].remote()) == 3
    assert len(sent["handle"].pair.remote()) == 2
    with pytest.raises(TypeError, match="too many"):
        sent["handle"].add.remote(1, 2)


def test_a_handle_that_is_sent_does_not_spell_what_its_class_has_by_default() -> None:
    counter = ActorHandle(ObjectRef(bytes(16), b""), Counter._info)

    assert b"generator_backpressure" not in pickle.dumps(counter)


def test_a_copy_of_a_handle_is_the_handle(runtime: FakeRuntime) -> None:
    counter = Counter.remote()

    assert copy.copy(counter) is counter
    assert copy.deepcopy([counter])[0] is counter


def test_a_handle_lists_its_methods(runtime: FakeRuntime) -> None:
    listed = dir(Counter.remote())

    assert {"add", "pair", "inherited", "__ray_ready__"} <= set(listed)
    assert not [name for name in listed if name.startswith("__miniray")]


def test_a_remote_class_lists_its_methods_and_its_own() -> None:
    assert {"add", "pair", "inherited", "remote", "options"} <= set(dir(Counter))


def test_probing_a_handle_for_protocols_finds_none(runtime: FakeRuntime) -> None:
    counter = Counter.remote()

    assert not hasattr(counter, "__array__")
    assert not asyncio.iscoroutine(counter)
    assert not callable(counter)


def test_a_method_in_an_unknown_concurrency_group_is_refused_at_the_decorator() -> None:
    class Grouped:
        @miniray.method(concurrency_group="oi")
        def work(self) -> None: ...

    with pytest.raises(ValueError, match="'oi', which the actor does not have"):
        miniray.remote(concurrency_groups={"io": 2})(Grouped)
    assert miniray.remote(concurrency_groups={"oi": 2})(Grouped)


def test_a_method_with_a_name_that_handles_use_is_refused() -> None:
    class Clash:
        def _ref(self) -> None: ...

    with pytest.raises(TypeError, match="Rename the method"):
        miniray.remote(Clash)


@pytest.mark.parametrize(
    ("use", "error", "words"),
    [
        (lambda: miniray.method(num_cpus=1), ValueError, "'num_cpus' is an option of"),
        (lambda: miniray.method(num_returns=-1), ValueError, "num_returns"),
        (lambda: miniray.method(3), TypeError, "used as @method"),
        (lambda: miniray.method(num_returns="streaming")(len), ValueError, "generator"),
    ],
)
def test_the_method_decorator_checks_its_use(use: Any, error: type[Exception], words: str) -> None:
    with pytest.raises(error, match=words):
        use()


def test_a_marked_method_is_still_a_plain_method() -> None:
    assert Plain(1).pair() == (1, 1)
    assert Plain.triple(2) == 6


def test_exit_actor_is_for_actors_only(runtime: FakeRuntime) -> None:
    with pytest.raises(TypeError, match="in a method of an actor"):
        exit_actor()
