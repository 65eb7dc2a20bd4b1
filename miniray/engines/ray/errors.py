"""Errors on their way through Ray, which can't send each exception, and Ray's as miniray's."""

from __future__ import annotations

import functools
import pickle
import re
from typing import TYPE_CHECKING, Any

from ray.exceptions import ActorDiedError, RayError, RayTaskError

from miniray import exceptions as ours
from miniray.exceptions import DeathCause, MinirayError, TaskError

if TYPE_CHECKING:
    from collections.abc import Callable

#: Part of Ray's sentence on a dead actor, by cause; the first that is found.
_CAUSES = {
    "ray.kill": DeathCause.KILLED,
    "owner has died": DeathCause.OWNER_DIED,
    "exit_actor": DeathCause.EXIT_ACTOR,
    "INTENDED_USER_EXIT": DeathCause.EXIT_ACTOR,
    "__ray_terminate__": DeathCause.EXIT_ACTOR,
    "references to the actor were removed": DeathCause.OUT_OF_SCOPE,
    "placement group": DeathCause.GROUP_REMOVED,
    "node has died": DeathCause.NODE_LOST,
    "node was terminated": DeathCause.NODE_LOST,
    "process has died": DeathCause.EXITED,
    "unexpectedly exit": DeathCause.EXITED,
}


class Carried(Exception):  # noqa: N818 -- it is no error of its own
    """Carries a pickled TaskError out of a worker; Ray sees its bytes and its text only.

    ``raised`` is what the user's code has raised, in the worker.
    """

    def __init__(self, pickled: bytes, text: str, raised: BaseException | None = None) -> None:
        super().__init__(pickled, text)
        self.raised = raised

    def __str__(self) -> str:
        return str(self.args[1])

    def __reduce__(self) -> Any:
        return Carried, self.args


class _Retried(type):
    """Says of a ``Carried`` whether the exception in it is one to retry."""

    types: tuple[type[BaseException], ...]

    def __instancecheck__(cls, error: object) -> bool:
        return isinstance(getattr(error, "raised", None), cls.types)


def retried(given: bool | tuple[type[BaseException], ...]) -> Any:
    """Return the option ``retry_exceptions`` for Ray, which compares with what is raised there."""
    if isinstance(given, bool):
        return given
    return [_Retried("Retried", (Exception,), {"types": given})]


def in_our_words(function: Callable[..., Any], pickled: Callable[..., object] | None = None) -> Any:
    """Have a function raise Ray's errors as miniray's.

    Args:
        function: Of Ray's, or one that calls them.
        pickled: Pickles what is passed to it once more, to name what can't be.
    """

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        try:
            return function(*args, **kwargs)
        except RayError as error:
            raise translated(error) from None
        except Exception:
            if pickled is not None:
                pickled(*args)
            raise

    return call


def translated(error: Any, call: str = "") -> Any:
    """Return miniray's error for one of Ray, which does not name its call; others as they are."""
    if isinstance(error, RayTaskError):
        return _failure(error).as_instanceof_cause()
    if not isinstance(error, RayError):
        return error
    read = getattr(error, "client_exc", None)
    if isinstance(read, BaseException):  # what a value has raised when it was read here
        return read.raised or read if type(read) is Carried else read
    text = f"{call} failed: {error}" if call else str(error)
    cls: Any = next(filter(None, (vars(ours).get(c.__name__) for c in type(error).__mro__)))
    if isinstance(error, ActorDiedError):
        return _death(error, str(error))
    made: MinirayError = cls.__new__(cls, text)  # its class has the attributes, Ray the text
    Exception.__init__(made, text)
    return made


def _failure(error: RayTaskError) -> TaskError:
    """Return what the worker has carried out, or Ray's own error of a task."""
    cause = getattr(error.cause, "client_exc", error.cause)  # Ray's error of reading a value has it
    if type(cause) is Carried:
        carried: TaskError = pickle.loads(cause.args[0])
        return carried
    text = str(error)
    name = re.search(r"ray::(?P<name>[\w.<>]+)\(", text)
    return TaskError(name["name"] if name else "", text, translated(error.cause))


def _death(error: ActorDiedError, text: str) -> ours.ActorDiedError:
    """Return why an actor died; Ray's error was made of what its head or its constructor said."""
    source = next(iter(error.args), None)
    known: dict[str, Any] = {
        "actor_id": error.actor_id or "",
        "class_name": getattr(source, "class_name", ""),
    }
    if isinstance(source, RayTaskError):
        return ours.ActorDiedError(
            DeathCause.CREATION_FAILED, creation_error=_failure(source), **known
        )
    cause = next((cause for part, cause in _CAUSES.items() if part in text), DeathCause.UNKNOWN)
    return ours.ActorDiedError(cause, pid=getattr(source, "pid", 0), detail=text, **known)
