"""A runtime that runs everything at once in the test's own process, and notes what it was asked."""

from __future__ import annotations

import concurrent.futures
import contextlib
import dataclasses
import itertools
from typing import TYPE_CHECKING, Any

from miniray.common.object_ref import ObjectRef
from miniray.common.runtime import (
    ActorClassInfo,
    ActorLocation,
    BoundMethod,
    Exported,
    Runtime,
    RuntimeCalls,
    RuntimeContextData,
    RuntimeHead,
    RuntimeObjects,
    set_runtime,
)
from miniray.exceptions import ActorAlreadyExistsError, GetTimeoutError, TaskError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from miniray.common.specs import ActorOptions, TaskOptions

NODE = "0a" * 8


@dataclasses.dataclass
class Call:
    """One thing that the API asked of the runtime."""

    kind: str
    name: str
    args: tuple[Any, ...] = ()
    kwargs: dict[str, Any] = dataclasses.field(default_factory=dict)
    options: Any = None


class FakeRuntime(Runtime, RuntimeObjects, RuntimeCalls, RuntimeHead):
    """Values are in a dict; tasks and methods run inside ``submit``."""

    def __init__(self) -> None:
        self.session = object()
        self.numbers = itertools.count(1)
        self.values: dict[bytes, Any] = {}
        self.actors: dict[bytes, Any] = {}
        self.named: dict[str, ActorLocation] = {}
        self.groups: dict[bytes, tuple[str, list[dict[str, float]]]] = {}
        self.asked: list[Call] = []
        self.objects = self.calls = self.head = self
        self.exports = 0
        self.facts = RuntimeContextData("job", NODE, "worker", "ns", "127.0.0.1:1", "/tmp/a/s1")

    @property
    def last(self) -> Call:
        return self.asked[-1]

    def ref(self, value: Any = None, *, ready: bool = True) -> ObjectRef[Any]:
        ref: ObjectRef[Any] = ObjectRef(next(self.numbers).to_bytes(16, "big"), b"")
        if ready:
            self.values[ref.binary()] = value
        return ref

    def put(self, value: Any) -> ObjectRef[Any]:
        return self.ref(value)

    def get(self, refs: Sequence[ObjectRef[Any]], timeout: float | None) -> list[Any]:
        self.asked.append(Call("get", "", tuple(refs), options=timeout))
        found = []
        for ref in refs:
            if ref.binary() not in self.values:
                raise GetTimeoutError
            value = self.values[ref.binary()]
            if isinstance(value, TaskError):
                raise value.as_instanceof_cause()
            found.append(value)
        return found

    def wait(
        self,
        refs: Sequence[ObjectRef[Any]],
        *,
        num_returns: int,
        timeout: float | None,
        fetch_local: bool,
    ) -> tuple[list[ObjectRef[Any]], list[ObjectRef[Any]]]:
        ready = [ref for ref in refs if ref.binary() in self.values][:num_returns]
        return ready, [ref for ref in refs if ref not in ready]

    def future(self, ref: ObjectRef[Any]) -> concurrent.futures.Future[Any]:
        future: concurrent.futures.Future[Any] = concurrent.futures.Future()
        future.set_result(self.values[ref.binary()])
        return future

    def when_done(self, ref: ObjectRef[Any], callback: Callable[[], None]) -> None:
        callback()

    async def value_of(self, ref: ObjectRef[Any]) -> Any:
        return self.values[ref.binary()]

    def export(self, target: Callable[..., Any] | type, name: str) -> Exported:
        self.exports += 1
        exported = Exported(b"k" * 16, name, b"")
        self.values[name.encode()] = target
        return exported

    def _run(self, name: str, target: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        def value(item: Any) -> Any:
            return self.values[item.binary()] if isinstance(item, ObjectRef) else item

        try:
            return target(*map(value, args), **{key: value(item) for key, item in kwargs.items()})
        except Exception as error:
            return TaskError.from_exception(error, name)

    def _returns(self, result: Any, num_returns: int | str) -> Any:
        if num_returns == 1:
            return self.ref(result)
        if num_returns == 0:
            return None
        items = iter(self.ref(item) for item in result)
        return items if isinstance(num_returns, str) else list(items)

    def submit_task(
        self,
        function: Exported,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        options: TaskOptions,
    ) -> Any:
        self.asked.append(Call("task", function.name, args, kwargs, options))
        target = self.values[function.name.encode()]
        return self._returns(self._run(function.name, target, args, kwargs), options.num_returns)

    def create_actor(
        self,
        cls: Exported,
        info: ActorClassInfo,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        options: ActorOptions,
    ) -> ActorLocation:
        self.asked.append(Call("actor", cls.name, args, kwargs, options))
        if options.name in self.named:
            if options.get_if_exists:
                return self.named[options.name]
            raise ActorAlreadyExistsError(options.name, "ns")
        ref = self.ref()
        target = self.values[cls.name.encode()]
        self.actors[ref.binary()] = self._run(cls.name, target, args, kwargs)
        location = ActorLocation(ref, info)
        if options.name is not None:
            self.named[options.name] = location
        return location

    def submit_actor_call(
        self, method: BoundMethod, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        options = method.options
        self.asked.append(Call("call", method.name, args, kwargs, options))
        instance = self.actors[method.actor.binary()]
        built_in = {
            "__miniray_ready__": lambda: True,
            "__miniray_terminate__": lambda: None,
            "__miniray_call__": lambda function, *rest: function(instance, *rest),
        }
        target = built_in.get(method.name) or getattr(instance, method.name)
        name = f"{method.info.name}.{method.name}"
        return self._returns(self._run(name, target, args, kwargs), options.num_returns)

    def kill_actor(self, actor: ObjectRef[Any], *, no_restart: bool) -> None:
        self.asked.append(Call("kill", actor.hex(), options=no_restart))

    def cancel(self, ref: ObjectRef[Any], *, force: bool, recursive: bool) -> None:
        self.asked.append(Call("cancel", ref.hex(), options=(force, recursive)))

    def get_actor(self, name: str, namespace: str | None) -> ActorLocation:
        if name not in self.named:
            raise ValueError(f"There is no actor named {name!r}.")
        return self.named[name]

    def list_named_actors(self, all_namespaces: bool) -> list[Any]:
        dicts = [{"name": name, "namespace": "ns"} for name in self.named]
        return dicts if all_namespaces else list(self.named)

    def create_placement_group(
        self,
        bundles: Sequence[Mapping[str, float]],
        strategy: str,
        *,
        name: str,
        lifetime: str | None,
        bundle_label_selector: Sequence[Mapping[str, str]] | None,
    ) -> bytes:
        self.asked.append(Call("group", name, options=(strategy, lifetime, bundle_label_selector)))
        id = next(self.numbers).to_bytes(16, "big")
        self.groups[id] = (name, [dict(bundle) for bundle in bundles])
        return id

    def placement_group_ready(self, id: bytes, value: Any) -> ObjectRef[Any]:
        return self.ref(value)

    def remove_placement_group(self, id: bytes) -> None:
        del self.groups[id]

    def placement_group_table(self, id: bytes | None) -> dict[str, Any]:
        def table(id: bytes) -> dict[str, Any]:
            name, bundles = self.groups[id]
            return {"name": name, "bundles": dict(enumerate(bundles)), "state": "CREATED"}

        return table(id) if id is not None else {id.hex(): table(id) for id in self.groups}

    def find_placement_group(self, name: str, namespace: str | None) -> bytes | None:
        return next((id for id, (known, _) in self.groups.items() if known == name), None)

    def nodes(self) -> list[dict[str, Any]]:
        return [{"NodeID": NODE, "Alive": True, "Labels": {"zone": "a"}}]

    def cluster_resources(self) -> dict[str, float]:
        return {"CPU": 4.0}

    def available_resources(self) -> dict[str, float]:
        return {"CPU": 3.0}

    def context(self) -> RuntimeContextData:
        return self.facts

    def exit_actor(self) -> None:
        raise SystemExit(0)

    def owns_actors(self) -> bool:
        return False

    def current_actor(self) -> ActorLocation:
        return next(iter(self.named.values()))

    def shutdown(self) -> None:
        self.asked.append(Call("shutdown", ""))


@contextlib.contextmanager
def fake_runtime() -> Iterator[FakeRuntime]:
    """Make a fake runtime the one of this process for a while."""
    runtime = FakeRuntime()
    set_runtime(runtime)
    try:
        yield runtime
    finally:
        set_runtime(None)
