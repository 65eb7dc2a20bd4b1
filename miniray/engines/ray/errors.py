"""Errors on their way through Ray, which can't send each exception, and Ray's as miniray's.

A worker wraps what user code raised in a ``Carried``, which holds the pickled ``TaskError``.
"""

from __future__ import annotations

import contextlib
import os
import pickle
import re
from typing import TYPE_CHECKING, Any

import ray
from ray.exceptions import AsyncioActorExit, RayActorError, RayError, RayTaskError
from ray.experimental import internal_kv

from miniray import exceptions as ours
from miniray.common.config import config
from miniray.exceptions import ActorDiedError, DeathCause, MinirayError, TaskError

if TYPE_CHECKING:
    from collections.abc import Iterator

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
    """Carries a TaskError; Ray sees its bytes and its text only."""

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


def carried(error: Exception, name: str, actor_repr: str | None) -> Exception:
    """Wrap what a function or method has raised, in the worker."""
    if type(error) is AsyncioActorExit:
        return error
    actor_id = ray.get_runtime_context().get_actor_id()
    where = {"pid": os.getpid(), "ip": ray.util.get_node_ip_address(), "actor_id": actor_id}
    failure = TaskError.from_exception(error, name, actor_repr=actor_repr, **where)
    return Carried(pickle.dumps(failure, 5), str(failure), error)


def keep_of_constructor(failure: Exception) -> None:
    """Tell the callers of this actor why there is none: Ray gives them the text only."""
    if len(failure.args[0]) <= config().inline_limit:
        actor_id = ray.get_runtime_context().get_actor_id()
        internal_kv._internal_kv_put(_constructor(actor_id), failure.args[0])


def _constructor(actor_id: str) -> bytes:
    return b"miniray:constructor:" + actor_id.encode()


@contextlib.contextmanager
def raising() -> Iterator[None]:
    """Raise Ray's errors in the block as miniray's."""
    try:
        yield
    except RayError as error:
        raise translated(error) from None


def translated(error: BaseException) -> BaseException:
    """Return miniray's error for one of Ray; others as they are."""
    if isinstance(error, RayTaskError):
        cause: Any = translated(error.cause)
        if isinstance(cause, Carried):
            failure: TaskError = pickle.loads(cause.args[0])
        else:
            text = str(error)
            name = re.search(r"ray::([\w.<>]+)\(", text)
            failure = TaskError(name[1] if name else "", text, cause)
        return failure.as_instanceof_cause()
    if not isinstance(error, RayError):
        return error
    text = str(error)
    found: dict[str, Any] = dict(re.findall(r"^\t(class_name|pid): (.+)$", text, re.MULTILINE))
    cls: Any = next(filter(None, (vars(ours).get(c.__name__) for c in type(error).__mro__)))
    if cls is ActorDiedError and isinstance(error, RayActorError):
        about = {"actor_id": error.actor_id or "", "class_name": found.get("class_name", "")}
        if error.actor_init_failed:
            kept = internal_kv._internal_kv_get(_constructor(about["actor_id"]))
            failure = (
                pickle.loads(kept) if kept else TaskError("__init__", text, MinirayError(text))
            )
            return cls(DeathCause.CREATION_FAILED, creation_error=failure, **about)
        cause = next((cause for part, cause in _CAUSES.items() if part in text), DeathCause.UNKNOWN)
        return cls(cause, pid=int(found.get("pid", 0)), detail=text, **about)
    made: MinirayError = cls.__new__(cls, text)  # its class has the attributes, Ray the text
    Exception.__init__(made, text)
    return made
