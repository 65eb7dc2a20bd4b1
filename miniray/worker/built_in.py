"""The methods of an actor: those of its class, and those that every actor has."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from miniray.messages.errors import ActorExit

if TYPE_CHECKING:
    from collections.abc import Callable


def _ready(_instance: Any) -> bool:
    return True


def _terminate(_instance: Any) -> None:
    raise ActorExit


def _call(instance: Any, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    return function(instance, *args, **kwargs)


#: Methods of the user's class that run at the planned exit of an actor; Ray's name is an alias.
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
    """Find a method of the actor's class; attributes of the instance do not hide it, as in Ray."""
    if name in getattr(instance, "__dict__", ()):
        cls = type(instance)
        for base in cls.__mro__:
            if name in base.__dict__:
                found = base.__dict__[name]
                bind = getattr(found, "__get__", None)
                return found if bind is None else bind(instance, cls)  # type: ignore[no-any-return]
    return getattr(instance, name)  # type: ignore[no-any-return]
