"""Refs, actors' ids and generators that stand for Ray's.

Ray counts references itself: each object here holds Ray's own, and pickles as that.
"""

from __future__ import annotations

import copyreg
from typing import Any

import ray
import ray.cloudpickle

from miniray.common.object_ref import ObjectRef
from miniray.engines.ray.errors import in_our_words
from miniray.objects.object_ref_generator import ObjectRefGenerator


class RayRef(ObjectRef[Any]):
    """A ref that holds Ray's; in its caller it names the call, too."""

    __slots__ = ("call", "held")

    def __init__(self, held: Any, call: str = "") -> None:
        self._owner_node = b""  # miniray does not count it
        self.held, self.call = held, call

    @property
    def _id(self) -> bytes:  # type: ignore[override]
        # Not before somebody asks: over Ray Client that waits for the server.
        id: bytes = self.held.binary()
        return id

    def __reduce__(self) -> Any:
        return type(self), (self.held,)


class RayActorRef(RayRef):
    """Holds Ray's handle of an actor, and how its methods are called."""

    __slots__ = ("methods",)

    def __init__(self, held: Any) -> None:
        super().__init__(held)
        #: By name: the options that a method was called with last, and what calls it with those.
        self.methods: dict[str, tuple[Any, Any]] = {}

    @property
    def _id(self) -> bytes:  # type: ignore[override]
        id: bytes = self.held._actor_id.binary()
        return id


class RayGenerator(ObjectRefGenerator[Any]):
    """The refs of a generator's values, as Ray gives them."""

    def __init__(self, held: Any) -> None:
        self.held = held

    @in_our_words
    def __next__(self) -> RayRef:
        return RayRef(next(self.held))

    async def __anext__(self) -> RayRef:
        return RayRef(await self.held.__anext__())

    def completed(self) -> RayRef:
        return RayRef(self.held.completed())

    def next_ready(self) -> bool:
        # Ray says yes at the end, too, if that has come since it asked for the item.
        return bool(self.held.next_ready() and not self.held.is_finished())

    def is_finished(self) -> bool:
        return bool(self.held.is_finished())

    def call_ref(self) -> RayRef:
        return RayRef(self.held)

    def close(self) -> None:
        if not self.held.is_finished():
            ray.cancel(self.held)

    def __del__(self) -> None:
        # Ray would run the task to its end.
        if ray is not None and ray.is_initialized():
            self.close()

    def __repr__(self) -> str:
        return f"ObjectRefGenerator({self.held!r})"


def wrapped(found: Any, call: str) -> Any:
    """Return what a call gives to the user, for what Ray has returned."""
    if isinstance(found, ray.ObjectRefGenerator):
        return RayGenerator(found)
    if isinstance(found, list):
        return [RayRef(each, call) for each in found] or None
    return None if found is None else RayRef(found, call)


def unwrapped(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[list[Any], dict[str, Any]]:
    """Return arguments with Ray's refs, which it replaces by their values."""
    held = [each.held if isinstance(each, RayRef) else each for each in args]
    return held, {k: v.held if isinstance(v, RayRef) else v for k, v in kwargs.items()}


def _reduce(held: Any) -> Any:
    return ray.cloudpickle.loads, (ray.cloudpickle.dumps(held),)


# Ray's own pickler knows these. Others, as for code or by users, would lose who owns the value.
copyreg.pickle(ray.ObjectRef, _reduce)
copyreg.pickle(ray.actor.ActorHandle, _reduce)
