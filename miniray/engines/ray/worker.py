"""What runs in Ray's workers: user code, after the process got miniray's runtime.

Ray unpickles a function or class before the arguments of its calls, so that a ``Code`` in it makes
the process ready for those too.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import pickle
import platform
import sys
from typing import TYPE_CHECKING, Any

from miniray.common.names import short_name
from miniray.common.runtime import runtime_or_none, set_runtime
from miniray.engines.ray.errors import carried, keep_of_constructor
from miniray.engines.ray.refs import loaded

if TYPE_CHECKING:
    from collections.abc import Callable

    from miniray.common.runtime import ActorClassInfo, Runtime

_METHOD = inspect.signature(lambda self, *args, **kwargs: None)
#: Methods of classes that are no methods of the actor.
_NOT_FORWARDED = {*dir(object), "__getattr__", "__del__"}


class Code:
    """A function or class of the user's, pickled; a worker loads it at the first call."""

    def __init__(self, blob: bytes, name: str, machine: str = "", paths: tuple[str, ...] = ()):
        self.blob, self.name = blob, name
        self.machine = machine or platform.node()
        self.paths = paths or tuple(sys.path)

    @functools.cached_property
    def target(self) -> Any:
        """The function or class."""
        return pickle.loads(self.blob)

    def function(self) -> Any:
        """Return the function and its name."""
        return self.target, self.name

    def __reduce__(self) -> Any:
        runtime = type(runtime_or_none())  # of the caller: the worker gets one of its kind
        return arrived, (runtime, self.blob, self.name, self.machine, self.paths)


def arrived(
    make_runtime: Callable[[], Runtime],
    blob: bytes,
    name: str,
    machine: str,
    paths: tuple[str, ...],
) -> Code:
    """Load a ``Code``, and attach this process if it is the first one here."""
    if runtime_or_none() is None:
        if machine == platform.node():
            sys.path += [path for path in paths if path not in sys.path]
        set_runtime(make_runtime())
    return Code(blob, name, machine, paths)


class HostedActor:
    """The actor of this process."""

    instance: Any = None
    info: Any = None  # its ActorClassInfo

    @classmethod
    def is_async(cls) -> bool:
        """Return whether there is one, with coroutines."""
        return cls.info is not None and cls.info.is_async

    @classmethod
    def construct(cls, code: Code, info: ActorClassInfo) -> Any:
        """Return the constructor of the actor and its name."""

        def make(*args: Any, **kwargs: Any) -> None:
            cls.instance = code.target(*args, **kwargs)

        cls.info = info
        return make, f"{info.name}.__init__"

    @classmethod
    def method(cls, name: str) -> Any:
        """Return a method and its name."""
        actor, full_name = cls.instance, f"{cls.info.name}.{name}"
        if name == "__miniray_call__":
            return lambda function, *args, **kwargs: function(actor, *args, **kwargs), full_name
        # From the class: an attribute of the instance may have the same name.
        return inspect.getattr_static(type(actor), name).__get__(actor, type(actor)), full_name


# --- what Ray is given -------------------------------------------------------------------------
def task_for(code: Code, function: Callable[..., Any]) -> Callable[..., Any]:
    """Return the function that Ray runs for one of the user's."""
    task = _forwarding(function, code.function, 0)
    task.__name__ = task.__qualname__ = short_name(code.name)
    task.__module__ = function.__module__
    return task


def class_for(code: Code, cls: type, info: ActorClassInfo) -> type:
    """Return the class that Ray runs for one of the user's: the same methods, which forward."""
    names = {name for name in info.methods if name not in _NOT_FORWARDED}
    kinds = {name: inspect.getattr_static(cls, name) for name in names} | {"__miniray_call__": None}
    space = {
        name: _forwarding(
            getattr(kind, "__func__", kind), functools.partial(HostedActor.method, name), 1
        )
        for name, kind in kinds.items()
    }
    space["__init__"] = _forwarding(None, functools.partial(HostedActor.construct, code, info), 1)
    if _says_what_it_is(cls):
        space["__repr__"] = lambda _self: repr(HostedActor.instance)
    if "__miniray_shutdown__" in space:
        space["__ray_shutdown__"] = space["__miniray_shutdown__"]
    for name, method in space.items():
        method.__name__ = method.__qualname__ = name
        vars(method)["__signature__"] = _METHOD  # else Ray takes *args for self
    return type(short_name(info.name), (), {**space, "__module__": info.module})


def _forwarding(function: Any, find: Callable[[], Any], skip: int) -> Callable[..., Any]:
    """Return what calls ``find()`` in the worker, of the kind of ``function``.

    Args:
        function: A plain, generator or coroutine function.
        find: Returns what to call, and its name for errors.
        skip: How many arguments are not for it: ``self``.
    """
    kind = inspect.unwrap(function)
    # Raised where no exception is handled: Ray looks at those, and ends the process if they object.
    if inspect.isasyncgenfunction(kind):

        async def forward(*args: Any, **kwargs: Any) -> Any:
            called, name = find()
            try:
                async for item in called(*map(loaded, args[skip:]), **kwargs):
                    yield item
                return
            except Exception as error:  # noqa: BLE001 -- whatever user code raises
                failure = _sent(error, name)
            raise failure
    elif inspect.iscoroutinefunction(kind):

        async def forward(*args: Any, **kwargs: Any) -> Any:  # type: ignore[misc]
            called, name = find()
            try:
                return await called(*map(loaded, args[skip:]), **kwargs)
            except Exception as error:  # noqa: BLE001
                failure = _sent(error, name)
            raise failure
    elif inspect.isgeneratorfunction(kind):

        def forward(*args: Any, **kwargs: Any) -> Any:
            called, name = find()
            try:
                for item in called(*map(loaded, args[skip:]), **kwargs):  # noqa: UP028
                    yield item  # not `yield from`: Ray sends values into generators
                return
            except Exception as error:  # noqa: BLE001
                failure = _sent(error, name)
            raise failure
    else:

        def forward(*args: Any, **kwargs: Any) -> Any:
            called, name = find()
            try:
                return called(*map(loaded, args[skip:]), **kwargs)
            except Exception as error:  # noqa: BLE001
                failure = _sent(error, name)
            raise failure

    return forward


def _sent(error: Exception, name: str) -> Exception:
    shown, actor = None, HostedActor.instance
    if _says_what_it_is(type(actor)):
        with contextlib.suppress(Exception):  # it is the user's
            shown = repr(actor)
    failure = carried(error, name, shown)
    if actor is None and HostedActor.info is not None:
        keep_of_constructor(failure)
    return failure


def _says_what_it_is(cls: type) -> bool:
    return any("__repr__" in vars(each) for each in cls.__mro__[:-1] if each is not type(None))
