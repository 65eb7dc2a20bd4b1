"""What Ray runs: functions and classes that forward to the user's, in a process made ready."""

from __future__ import annotations

import contextlib
import functools
import inspect
import os
import pickle
import platform
import sys
from typing import TYPE_CHECKING, Any, cast

import ray
from ray.exceptions import AsyncioActorExit

from miniray.common.names import printable, short_name
from miniray.common.runtime import Exported, runtime_or_none, set_runtime
from miniray.engines.ray.errors import Carried
from miniray.engines.ray.options import as_ray, called
from miniray.engines.ray.refs import RayRef
from miniray.exceptions import TaskCancelledError, TaskError
from miniray.objects.object_ref_generator import DynamicObjectRefGenerator
from miniray.values.call_signature import CallSignature
from miniray.values.serialization import serialize

if TYPE_CHECKING:
    from collections.abc import Callable

    from miniray.common.runtime import ActorClassInfo, Runtime
    from miniray.common.specs import ActorOptions, TaskOptions

#: Methods of classes that are no methods of the actor.
_NOT_FORWARDED = {*dir(object), "__getattr__", "__del__"}
#: What Ray checks arguments against, after us: it is faster where there can be none.
_ANY, _NONE = map(inspect.signature, (lambda self, *args, **kwargs: None, lambda self: None))
#: A method, never called, by whose "decorator" Ray's handles know the ``ActorClassInfo``.
INFO = "__miniray_info__"

#: The user's instance, in the process of an actor.
_actor: Any = None


class Code(Exported):
    """A function or class of the user's, and what Ray runs for it.

    Ray unpickles it before the arguments of its calls, so that a worker is ready for those too.
    """

    def __init__(self, name: str, blob: bytes) -> None:
        super().__init__(b"", name, blob)  # Ray keeps code under names of its own
        #: Ray's function or class by what only its decorator takes.
        self._made: dict[Any, Any] = {}
        #: The last option set of a task, what calls Ray's function with it, and the call's name.
        self._prepared: tuple[Any, Any, str] = (None, None, "")

    @functools.cached_property
    def target(self) -> Any:
        """The function or class; a worker loads it at the first call."""
        return _safely(pickle.loads)(self.blob)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.target(*args, **kwargs)

    def __reduce__(self) -> Any:
        runtime = type(runtime_or_none())  # of the caller: the worker gets one of its kind
        return arrived, (runtime, self.name, self.blob, platform.node(), tuple(sys.path))

    def task(self, options: TaskOptions) -> tuple[Any, str]:
        """Return what calls the function as a task of Ray, and how errors name the call."""
        prepared = self._prepared
        if prepared[0] is not options:
            most = options.max_calls
            if most is None:  # as in Ray, if the decorator says so
                most = int("GPU" in options.resources)
            if most not in self._made:
                self._made[most] = ray.remote(max_calls=most)(_task_for(self))
            made = self._made[most].options(**as_ray(options))
            self._prepared = prepared = options, made.remote, called(self.name, options)
        return prepared[1:]

    def actor(self, info: ActorClassInfo, options: ActorOptions) -> Any:
        """Return what makes an actor of Ray of the class."""
        groups = dict(options.concurrency_groups)
        key = tuple(groups.items())
        if key not in self._made:
            self._made[key] = ray.remote(concurrency_groups=groups)(_class_for(self, info, groups))
        return self._made[key].options(**as_ray(options)).remote


def arrived(
    make_runtime: Callable[[], Runtime],
    name: str,
    blob: bytes,
    machine: str,
    paths: tuple[str, ...],
) -> Code:
    """Load a ``Code``, and attach this process if it is the first one here."""
    if runtime_or_none() is None:
        if machine == platform.node():
            sys.path += [path for path in paths if path not in sys.path]
        set_runtime(make_runtime())
        ray.util.register_serializer(
            ray.DynamicObjectRefGenerator,
            serializer=lambda made: [RayRef(ref) for ref in made._refs],
            deserializer=DynamicObjectRefGenerator,
        )
        values = ray._private.worker.global_worker.get_serialization_context()
        values._deserialize_object = _safely(values._deserialize_object)
        values.serialize = _safely(values.serialize, _named)
    return Code(name, blob)


def is_cancelled() -> bool:
    """Return whether the task that runs here was cancelled."""
    now = ray.get_runtime_context()
    # Ray does not tell asyncio actors, whose coroutines are cancelled as such.
    return not now.worker.core_worker.current_actor_is_asyncio() and bool(now.is_canceled())


def _named(error: BaseException, value: Any) -> BaseException:
    """Return the error that names what of a result can't be pickled, in place of Ray's."""
    if issubclass(type(error), Exception):
        try:
            serialize(value, returned_by=ray.get_runtime_context().get_task_name() or "")
        except Exception as named:  # noqa: BLE001
            return named
    return error


def _safely(
    step: Callable[..., Any], told: Callable[..., BaseException] = lambda error, *_: error
) -> Callable[..., Any]:
    """Have what values raise while they are read or written arrive as the error of the call.

    Of what is no Exception, SystemExit would end the worker, and the others would be cancels.

    Args:
        step: Reads or writes one.
        told: Returns the error to tell, of that and what the step was given.
    """

    def call(*args: Any, **kwargs: Any) -> Any:
        try:
            return step(*args, **kwargs)
        except BaseException as error:  # noqa: BLE001
            failure = _carried(told(error, *args), "")
        raise failure

    return call


def _carried(error: BaseException, name: str) -> Carried:
    """Wrap what a function or method of the user's has raised, or a value if there is no name.

    The caller raises it when it handles the error no more: Ray looks at exceptions that are being
    handled, and ends if one of these objects.
    """
    kind = type(error)  # to ask the error itself would run code of the user's
    if name and (kind is AsyncioActorExit or not issubclass(kind, (Exception, KeyboardInterrupt))):
        raise error
    if kind is Carried:
        return cast("Carried", error)
    where = {"pid": os.getpid(), "ip": ray.util.get_node_ip_address()}
    now, shown = ray.get_runtime_context(), None
    actor_id, called = now.get_actor_id(), now.get_task_name() or ""
    if issubclass(kind, KeyboardInterrupt) and (name or is_cancelled()):
        cancelled = TaskCancelledError(short_name(name) or called)
        cancelled.__cause__, error = error, cancelled
    if not name.endswith(called):  # the call has a name of its own
        name = printable(called)
    if _says_what_it_is(type(_actor)):
        with contextlib.suppress(Exception):  # it is the user's
            shown = repr(_actor)
    try:
        failure = TaskError.from_exception(
            error, name, actor_id=actor_id, actor_repr=shown, **where
        )
        pickled = pickle.dumps(failure, 5)
    except BaseException as problem:  # noqa: BLE001 -- user code runs in it
        failure = TaskError.untold(name, error, problem)
        pickled = pickle.dumps(failure, 5)
    return Carried(pickled, str(failure), error)


def _says_what_it_is(cls: Any) -> bool:
    return cls is not type(None) and cls.__repr__ is not object.__repr__


def _task_for(code: Code) -> Any:
    """Return the function that Ray runs for one of the user's."""
    task = _forwarding(code.target, code, code.name)
    task.__name__ = task.__qualname__ = short_name(code.name)
    task.__module__ = code.target.__module__
    if not CallSignature.of(code.target).parameters:
        vars(task)["__signature__"] = inspect.Signature()
    return task


def _class_for(code: Code, info: ActorClassInfo, groups: dict[str, int]) -> type:
    """Return the class that Ray runs for one of the user's: the same methods, which forward."""
    calls: dict[str, tuple[Any, Callable[..., Any]]] = {
        name: (inspect.getattr_static(code.target, name), functools.partial(_method, name))
        for name in info.methods
        if name not in _NOT_FORWARDED
    }
    calls["__init__"] = code.target.__init__, functools.partial(_construct, code)
    calls["__miniray_call__"] = None, _call_with_actor
    calls[INFO] = None, _method
    signatures = getattr(info, "signatures", {})
    space: dict[str, Any] = {}
    for name, (kind, call) in calls.items():
        method = _forwarding(getattr(kind, "__func__", kind), call, f"{info.name}.{name}")
        method.__name__ = method.__qualname__ = name
        takes = signatures.get(name)
        vars(method)["__signature__"] = _ANY if takes is None or takes.parameters else _NONE
        declared = info.methods.get(name)
        if declared and declared.concurrency_group in groups:
            vars(method)["__ray_concurrency_group__"] = declared.concurrency_group
        space[name] = method
    vars(space[INFO])["__ray_invocation_decorator__"] = info
    if _says_what_it_is(code.target):
        space["__repr__"] = lambda _self: repr(_actor)
    if "__miniray_shutdown__" in space:
        space["__ray_shutdown__"] = space["__miniray_shutdown__"]
    return type(short_name(info.name), (), {**space, "__module__": info.module})


# --- what methods of that class call in the worker -----------------------------------------
def _construct(code: Code, _self: Any, *args: Any, **kwargs: Any) -> Any:
    """Make the user's instance; return the coroutine if its constructor is one."""
    global _actor
    cls = code.target
    if not inspect.iscoroutinefunction(cls.__init__):
        _actor = code(*args, **kwargs)
        return None
    _actor = cls.__new__(cls)
    return _actor.__init__(*args, **kwargs)


@functools.cache
def _bound(name: str) -> Callable[..., Any]:
    # From the class: an attribute of the instance may have the same name.
    bound: Callable[..., Any] = inspect.getattr_static(type(_actor), name).__get__(
        _actor, type(_actor)
    )
    return bound


def _method(name: str, _self: Any, *args: Any, **kwargs: Any) -> Any:
    return _bound(name)(*args, **kwargs)


def _call_with_actor(_self: Any, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    return function(_actor, *args, **kwargs)


def _forwarding(kind: Any, call: Callable[..., Any], name: str) -> Any:
    """Return a function of the kind of another that runs ``call``, and sends what that raises.

    Args:
        kind: A plain, generator or coroutine function.
        call: What it runs in the worker.
        name: For errors.
    """
    kind = inspect.unwrap(kind)
    if inspect.isasyncgenfunction(kind):

        async def forward(*args: Any, **kwargs: Any) -> Any:
            try:
                async for item in call(*args, **kwargs):
                    yield item
                return
            except BaseException as error:  # noqa: BLE001
                failure = _carried(error, name)
            raise failure
    elif inspect.iscoroutinefunction(kind):

        async def forward(*args: Any, **kwargs: Any) -> Any:  # type: ignore[misc]
            try:
                return await call(*args, **kwargs)
            except BaseException as error:  # noqa: BLE001
                failure = _carried(error, name)
            raise failure
    elif inspect.isgeneratorfunction(kind):

        def forward(*args: Any, **kwargs: Any) -> Any:
            try:
                for item in call(*args, **kwargs):  # noqa: UP028
                    yield item  # not `yield from`: Ray sends values into generators
                return
            except BaseException as error:  # noqa: BLE001
                failure = _carried(error, name)
            raise failure
    else:

        def forward(*args: Any, **kwargs: Any) -> Any:
            try:
                return call(*args, **kwargs)
            except BaseException as error:  # noqa: BLE001
                failure = _carried(error, name)
            raise failure

    return forward
