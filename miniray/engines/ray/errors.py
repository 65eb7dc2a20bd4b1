"""What user code raises, on its way through Ray, and Ray's own errors as miniray's."""

from __future__ import annotations

import collections
import concurrent.futures
import os
import pickle
from typing import Any

import ray
from ray.exceptions import ActorDiedError, RayError, RayTaskError

from miniray import exceptions as ours
from miniray.common import exception_transport as transport
from miniray.common.names import printable
from miniray.exceptions import DeathCause, TaskError

#: Part of Ray's sentence on a dead actor, by cause; the first that is found.
_CAUSES = {
    "ray.kill": DeathCause.KILLED,
    "owner has died": DeathCause.OWNER_DIED,
    "exit_actor": DeathCause.EXIT_ACTOR,
    "node has died": DeathCause.NODE_LOST,
    "process has died": DeathCause.EXITED,
    "unexpectedly exit": DeathCause.EXITED,
}
# Between the worker and user code.
_between = "python/ray", *ray.__path__, *concurrent.futures.__path__
transport.own_folders += tuple(f"{path}/" for path in _between)
#: Names of the last calls, by Ray's ids of their tasks: its errors lack them.
_calls: collections.OrderedDict[bytes, str] = collections.OrderedDict()
_MOST = 10_000


def name_call(ref: Any, call: str) -> None:
    """Make errors of the value of Ray's ref name the call."""
    _calls[ref.task_id().binary()] = call
    if len(_calls) > _MOST:
        _calls.popitem(last=False)  # one step, as other threads call too


def call_of(ref: Any) -> str:
    """Return the name of the call that makes a value; empty if it is not known."""
    return _calls.get(ref.task_id().binary(), "") if ref else ""


class CarriedTaskError(RayTaskError):  # type: ignore[misc]
    """What a worker stores for a call that failed: a TaskError, which can carry any exception.

    Ray makes it of the exception raised, in place of its own, and ``get`` raises what it returns.
    """

    def __init__(self, _name: str, _text: str, cause: Any, proctitle: str = "", **actor: Any):
        # A TaskError that was not raised here is that of an argument, or was unpickled.
        if not isinstance(cause, TaskError) or cause.__traceback__ is not None:
            call = printable(proctitle.removeprefix("ray::").partition("()")[0])
            cause = _task_error(cause, call, **actor)
        self.cause: Any = cause
        self._actor_id = cause.actor_id  # Ray reads it when a constructor has failed
        self.args = "", "", cause  # the arguments for unpickling

    def __str__(self) -> str:
        return str(self.cause)

    def as_instanceof_cause(self) -> Any:
        return getattr(self.cause, "as_instanceof_cause", lambda: self.cause)()


def _task_error(error: Any, call: str, **actor: Any) -> TaskError:
    """Wrap an exception of user code."""
    BaseException.with_traceback(error, transport.user_frames(error))
    actor |= {"pid": os.getpid(), "ip": ray.util.get_node_ip_address()}
    try:
        failure = TaskError.from_exception(translated(error), call, **actor)
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
        return _death(error, str(error), *error.args[:1])
    if isinstance(read := getattr(error, "client_exc", None), BaseException):
        return read  # what a value has raised when it was read
    cls: Any = next(filter(None, (vars(ours).get(c.__name__) for c in type(error).__mro__)))
    text = f"{printable(call)} failed: {error}" if call else str(error)
    made = cls.__new__(cls, text)  # its class has the attributes, Ray the text
    Exception.__init__(made, text)
    return made


def _death(error: ActorDiedError, text: str, source: Any = None) -> ours.ActorDiedError:
    """Return why an actor died; Ray's error has the text of its head or the constructor's error."""
    known: dict[str, Any] = {"actor_id": error.actor_id or ""}
    if isinstance(source, RayTaskError):
        known["creation_error"] = translated(source)
        return ours.ActorDiedError(DeathCause.CREATION_FAILED, **known)
    known["class_name"] = getattr(source, "class_name", "")
    cause = next((cause for part, cause in _CAUSES.items() if part in text), DeathCause.UNKNOWN)
    return ours.ActorDiedError(cause, detail=text, **known)


def translate_values(*, in_worker: bool) -> None:
    """Make this process read Ray's errors as miniray's."""
    values = ray._private.worker.global_worker.get_serialization_context()
    read = values.deserialize_objects
    if in_worker:
        read, values.serialize = as_exception(read), as_exception(values.serialize)
    values.deserialize_objects = lambda stored, refs, *others: list(
        map(_carried, read(stored, refs, *others), refs)
    )


def _carried(value: Any, ref: Any) -> Any:
    """Return what Ray has read; an error is wrapped so that futures raise miniray's, too."""
    if not isinstance(value, RayError) or isinstance(value, CarriedTaskError):
        return value
    made = CarriedTaskError.__new__(CarriedTaskError)
    made.cause = translated(value, call_of(ref))
    return made


def as_exception(step: Any) -> Any:
    """Keep exceptions of reading or writing a value from ending the worker or cancelling."""

    def call(*args: Any) -> Any:
        try:
            return step(*args)
        except Exception:
            raise
        except BaseException as error:  # noqa: BLE001
            now = ray.get_runtime_context()
            name = now.get_task_name() or ""
            if issubclass(type(error), KeyboardInterrupt) and now.worker.is_canceled:
                raise ours.TaskCancelledError(name) from None
            raise TaskError.from_exception(error, name) from None

    return call
