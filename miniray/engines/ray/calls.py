"""Tasks, actors and their calls, as those of Ray."""

from __future__ import annotations

import hashlib
import pickle
import weakref
from typing import TYPE_CHECKING, Any

import ray
from ray.exceptions import ActorAlreadyExistsError as RayNameTaken
from ray.experimental import internal_kv

from miniray.common.config import config
from miniray.common.runtime import ActorClassInfo, ActorLocation, Exported, RuntimeCalls
from miniray.common.specs import MethodOptions
from miniray.engines.ray import options as as_ray
from miniray.engines.ray.errors import raising, translated
from miniray.engines.ray.refs import RayRef, by_name, unwrapped, wrapped
from miniray.engines.ray.worker import Code, class_for, task_for
from miniray.exceptions import ActorAlreadyExistsError
from miniray.values.serialization import dumps_code

if TYPE_CHECKING:
    from collections.abc import Callable

    from miniray.common.specs import ActorOptions, TaskOptions

#: Ray's methods for those that every actor has.
_BUILT_IN = {"__miniray_ready__": "__ray_ready__", "__miniray_terminate__": "__ray_terminate__"}
#: Option sets of a function that are kept ready.
_MOST_PREPARED = 64


class RayExport(Exported):
    """A function or class, with what Ray runs for it."""

    __slots__ = ("base", "prepared", "target")

    def __init__(self, key: bytes, name: str, blob: bytes, target: Any) -> None:
        super().__init__(key, name, blob)
        self.target = target
        self.base: Any = None
        #: By the id of an option set: the set, which keeps the id its own, and Ray's function.
        self.prepared: dict[int, tuple[Any, Any]] = {}

    def task(self, options: TaskOptions) -> Any:
        """Return Ray's function with these options."""
        found = self.prepared.get(id(options))
        if found is None:
            if self.base is None:
                function = task_for(Code(self.blob, self.name), self.target)
                some = {} if options.max_calls is None else {"max_calls": options.max_calls}
                self.base = ray.remote(**some)(function) if some else ray.remote(function)
            if len(self.prepared) >= _MOST_PREPARED:
                self.prepared.clear()
            found = options, self.base.options(**as_ray.for_task(options))
            self.prepared[id(options)] = found
        return found[1]

    def actor(self, info: ActorClassInfo, options: ActorOptions) -> Any:
        """Return Ray's class with these options."""
        if self.base is None:
            cls = class_for(Code(self.blob, self.name), self.target, info)
            groups = dict(options.concurrency_groups)
            self.base = ray.remote(concurrency_groups=groups)(cls) if groups else ray.remote(cls)
        return self.base.options(**as_ray.for_actor(options))


class RayCalls(RuntimeCalls):
    """Makes calls of Ray of what user code calls."""

    def __init__(self) -> None:
        #: Actors that end with this process.
        self.owned: weakref.WeakSet[RayRef] = weakref.WeakSet()

    def export(self, target: Callable[..., Any] | type, name: str) -> Exported:
        blob, _refs = dumps_code(target)
        if len(blob) > config().large_closure_warning:
            from miniray.values.closures import check_large

            check_large(target, name, len(blob), config().largest_closure)
        return RayExport(hashlib.sha256(blob).digest()[:16], name, blob, target)

    def submit_task(self, function: Any, args: Any, kwargs: Any, options: TaskOptions) -> Any:
        return wrapped(function.task(options).remote(*unwrapped(args), **by_name(kwargs)))

    def create_actor(
        self,
        cls: Any,
        info: ActorClassInfo,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        options: ActorOptions,
    ) -> ActorLocation:
        made = cls.actor(info, options)
        try:
            with raising():
                ref = RayRef(made.remote(*unwrapped(args), **by_name(kwargs)))
        except RayNameTaken:
            where = options.namespace or ray.get_runtime_context().namespace
            raise ActorAlreadyExistsError(options.name or "", where) from None
        if options.name is not None:
            # For get_actor: Ray's handle does not know all of it, and the actor may be busy.
            internal_kv._internal_kv_put(_key(ref.binary()), pickle.dumps(info, 5))
        if options.lifetime != "detached":
            self.owned.add(ref)
        return ActorLocation(ref, info)

    def submit_actor_call(
        self,
        actor: Any,
        info: ActorClassInfo,
        method: str,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        options: MethodOptions,
    ) -> Any:
        call = getattr(actor.held, _BUILT_IN.get(method, method))
        given = as_ray.for_method(options)
        declared = info.methods.get(method)
        if options.num_returns == 1 and declared and declared.num_returns == "streaming":
            given = {**given, "num_returns": 1}
        if given:
            call = call.options(**given)
        try:
            return wrapped(call.remote(*unwrapped(args), **by_name(kwargs)))
        except ray.exceptions.RayError as error:
            raise translated(error) from None

    def cancel(self, ref: Any, force: bool, recursive: bool) -> None:
        ray.cancel(ref.held, force=force, recursive=recursive)


def find_actor(name: str, namespace: str | None) -> ActorLocation:
    """Find a named actor; ValueError if there is none."""
    where = namespace or ray.get_runtime_context().namespace
    try:
        ref = RayRef(ray.get_actor(name, where))
    except ValueError:
        raise ValueError(f"There is no actor named {name!r} in namespace {where!r}.") from None
    pickled = internal_kv._internal_kv_get(_key(ref.binary()))
    if pickled:
        return ActorLocation(ref, pickle.loads(pickled))
    methods = [name for name in dir(ref.held) if not name.startswith("_")]  # made by a Ray program
    info = ActorClassInfo(name, "", dict.fromkeys(methods, MethodOptions()))
    return ActorLocation(ref, info)


def _key(id: bytes) -> bytes:
    return b"miniray:actor:" + id
