"""What user code raises, on its way through Ray, and Ray's own errors as miniray's."""

from __future__ import annotations

import os
import pickle
from typing import TYPE_CHECKING, Any

import ray
from ray.exceptions import ActorDiedError, RayError, RayTaskError

from miniray import exceptions as ours
from miniray.common import exception_transport as transport
from miniray.common.names import printable
from miniray.exceptions import DeathCause, TaskError

if TYPE_CHECKING:
    from collections.abc import Callable

#: Part of Ray's sentence on a dead actor, by cause; the first that is found.
_CAUSES = {
    "ray.kill": DeathCause.KILLED,
    "owner has died": DeathCause.OWNER_DIED,
    "exit_actor": DeathCause.EXIT_ACTOR,
    "node has died": DeathCause.NODE_LOST,
    "process has died": DeathCause.EXITED,
    "unexpectedly exit": DeathCause.EXITED,
}
#: Modules between the worker and user code.
_PASSED = ("ray.", "concurrent.")


class CarriedTaskError(RayTaskError):  # type: ignore[misc]
    """What a worker stores for a call that failed: a TaskError, which can carry any exception.

    Workers of the engine have it in place of Ray's class: Ray makes it of what was raised, and
    asks it for what to raise in ``get``.
    """

    def __init__(
        self, _name: str, _text: str, cause: Any, proctitle: str = "", **actor: str | None
    ) -> None:
        # A TaskError that nobody raised here is that of an argument, or was unpickled.
        if not isinstance(cause, TaskError) or cause.__traceback__ is not None:
            call = printable(proctitle.removeprefix("ray::").partition("()")[0])
            cause = _task_error(cause, call, **actor)
        self.cause: TaskError = cause
        self._actor_id = cause.actor_id  # Ray reads it when a constructor has failed

    def __reduce__(self) -> Any:
        return CarriedTaskError, ("", "", self.cause)

    def __str__(self) -> str:
        return str(self.cause)

    def as_instanceof_cause(self) -> TaskError:
        return self.cause.as_instanceof_cause()


def _task_error(error: Any, call: str, **actor: str | None) -> TaskError:
    """Wrap what user code raised, with the traceback from its first frame that is not Ray's."""
    frames = transport.traceback_of(error)
    while frames and frames.tb_frame.f_globals.get("__name__", "").startswith(_PASSED):
        frames = frames.tb_next
    BaseException.with_traceback(error, frames)
    where: dict[str, Any] = {"pid": os.getpid(), "ip": ray.util.get_node_ip_address(), **actor}
    try:
        failure = TaskError.from_exception(translated(error), call, **where)
        pickle.dumps(failure)
    except BaseException as problem:  # noqa: BLE001 -- user code runs in it
        failure = TaskError.untold(call, error, problem)
    return failure


def translated(error: Any, call: str = "") -> Any:
    """Return miniray's error for one of Ray, which does not name its call; others as they are."""
    if not isinstance(error, RayError):
        return error
    if isinstance(error, CarriedTaskError):
        return error.as_instanceof_cause()
    if isinstance(error, RayTaskError):  # of a process that is none of the engine's
        return TaskError("call", str(error), translated(error.cause)).as_instanceof_cause()
    if isinstance(error, ActorDiedError):
        return _death(error)
    read = getattr(error, "client_exc", None)
    if isinstance(read, BaseException):  # what a value has raised when it was read
        return read
    cls: Any = next(filter(None, (vars(ours).get(c.__name__) for c in type(error).__mro__)))
    text = f"{printable(call)} failed: {error}" if call else str(error)
    made = cls.__new__(cls, text)  # its class has the attributes, Ray the text
    Exception.__init__(made, text)
    made.__context__ = error.__context__
    return made


def _death(error: ActorDiedError) -> ours.ActorDiedError:
    """Return why an actor died; Ray's error was made of what its head or its constructor said."""
    source, text = next(iter(error.args), None), str(error)
    known: dict[str, Any] = {
        "actor_id": error.actor_id or "",
        "class_name": getattr(source, "class_name", ""),
    }
    if isinstance(source, RayTaskError):
        failure = translated(source)
        return ours.ActorDiedError(DeathCause.CREATION_FAILED, creation_error=failure, **known)
    cause = next((cause for part, cause in _CAUSES.items() if part in text), DeathCause.UNKNOWN)
    return ours.ActorDiedError(cause, detail=text, **known)


def is_cancelled() -> bool:
    """Return whether the task that runs here was cancelled."""
    now = ray.get_runtime_context()
    # Ray does not tell asyncio actors, whose coroutines are cancelled as such.
    return not now.worker.core_worker.current_actor_is_asyncio() and bool(now.is_canceled())


def as_exception(step: Callable[..., Any]) -> Callable[..., Any]:
    """Have what ends processes, raised by a value while it is read or written, fail the call only.

    SystemExit would end the worker; the others would be cancels.
    """

    def call(*args: Any) -> Any:
        try:
            return step(*args)
        except Exception:
            raise
        except BaseException as error:  # noqa: BLE001
            name = ray.get_runtime_context().get_task_name() or ""
            if issubclass(type(error), KeyboardInterrupt) and is_cancelled():
                raise ours.TaskCancelledError(name) from None
            raise TaskError.from_exception(error, name) from None

    return call
