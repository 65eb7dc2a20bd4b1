"""The methods of an actor: those of its class, and those that every actor has."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any

from miniray.worker.exits import ActorExit

if TYPE_CHECKING:
    from collections.abc import Callable


def _ready(_instance: Any) -> bool:
    return True


def _terminate(_instance: Any) -> None:
    raise ActorExit


def _call(instance: Any, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    return function(instance, *args, **kwargs)


#: Methods of the user's class that run before an actor ends by rule; Ray's name is an alias.
SHUTDOWN = ("__miniray_shutdown__", "__ray_shutdown__")

#: What is called with the actor's instance, by name; Ray's names are aliases.
BUILT_IN: dict[str, Callable[..., Any]] = {
    "__miniray_ready__": _ready,
    "__ray_ready__": _ready,
    "__miniray_terminate__": _terminate,
    "__ray_terminate__": _terminate,
    "__miniray_call__": _call,
    "__ray_call__": _call,
}


def method_of(instance: Any, name: str) -> Callable[..., Any]:
    """A method of the actor's class, which attributes of the instance do not hide, as in Ray."""
    cls = type(instance)
    bind = _binding(cls, name)  # type: ignore[arg-type] # classes are hashable
    # `__new__` may have made what passes on to an object of the class.
    return getattr(instance, name) if bind is None else bind(instance, cls)  # type: ignore[no-any-return]


@functools.lru_cache(maxsize=1024)  # a walk over the bases for each call would show in its time
def _binding(cls: type, name: str) -> Callable[..., Any] | None:
    """What binds a method to an instance and its class; None if the class does not have it."""
    for base in cls.__mro__:
        found = base.__dict__.get(name)
        if found is not None:
            return getattr(found, "__get__", lambda _instance, _cls, found=found: found)
    return None
