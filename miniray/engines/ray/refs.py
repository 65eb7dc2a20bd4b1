"""Refs and generators of miniray that stand for Ray's, and calls that take and return them.

Ray counts references itself: each object here holds Ray's own, and pickles as that.
"""

from __future__ import annotations

import copyreg
from typing import TYPE_CHECKING, Any

import cloudpickle.cloudpickle as our_cloudpickle
import ray
from ray.cloudpickle import cloudpickle as their_cloudpickle
from ray.exceptions import RayError

from miniray.common.object_ref import ObjectRef
from miniray.engines.ray.errors import translated
from miniray.objects.object_ref_generator import ObjectRefGenerator
from miniray.values.serialization import serialize_arguments

if TYPE_CHECKING:
    from collections.abc import Callable


class RayRef(ObjectRef[Any]):
    """Holds Ray's ref, or its handle of an actor; its caller knows the name of the call."""

    __slots__ = ("call", "held")

    def __init__(self, held: Any, call: str = "") -> None:
        self._owner_node = b""  # miniray does not count it
        self.held, self.call = held, call

    @property
    def _id(self) -> bytes:  # type: ignore[override]
        # Not before somebody asks: over Ray Client that waits for the server.
        id: bytes = getattr(self.held, "_actor_id", self.held).binary()
        return id

    def __reduce__(self) -> Any:
        return RayRef, (self.held,)


class RayGenerator(ObjectRefGenerator[Any]):
    """The refs of a generator's values, as Ray gives them."""

    def __init__(self, held: Any) -> None:
        self.held = held

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


def submit(
    remote: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], call: str = ""
) -> Any:
    """Call a function of Ray with its own refs, and return miniray's for what it returns.

    Args:
        remote: The function.
        args: Refs among them are replaced by Ray's, whose values Ray passes on.
        kwargs: Likewise.
        call: How errors name what was called.
    """
    held = [each.held if isinstance(each, RayRef) else each for each in args]
    named = {k: v.held if isinstance(v, RayRef) else v for k, v in kwargs.items()}
    try:
        found = remote(*held, **named)
    except RayError as error:
        raise translated(error) from None
    except Exception:
        serialize_arguments(args, kwargs)  # names what can't be pickled
        raise
    if isinstance(found, ray.ObjectRefGenerator):
        return RayGenerator(found)
    if isinstance(found, list):
        return [RayRef(each, call) for each in found] or None
    return None if found is None else RayRef(found, call)


def _reduce(held: Any) -> Any:
    return their_cloudpickle.loads, (their_cloudpickle.dumps(held),)


# Ray's own pickler knows these. Others, as for errors or by users, would lose who owns the value,
# and let an actor end with the handle that was pickled.
copyreg.pickle(ray.ObjectRef, _reduce)
copyreg.pickle(ray.actor.ActorHandle, _reduce)

# Ray's pickler sends the user's code, and miniray's its errors: a class is to be one to both.
for _name in ("_DYNAMIC_CLASS_TRACKER_BY_CLASS", "_DYNAMIC_CLASS_TRACKER_BY_ID"):
    _known: Any = getattr(their_cloudpickle, _name)
    _known.update(getattr(our_cloudpickle, _name))
    setattr(our_cloudpickle, _name, _known)
