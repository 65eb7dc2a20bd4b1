"""``MinirayError``, the base of all errors, and ``TaskError``, which wraps what user code raised.

Both are public as names of ``miniray.exceptions``; they live here to keep the
mixing of a user's exception class with our own in one place.
"""

from __future__ import annotations

import functools
import io
import linecache
import logging
import pickle
import re
import sys
from typing import Any, NamedTuple

from miniray.common import exception_transport as transport

logger = logging.getLogger(__name__)

_PUBLIC_MODULE = "miniray.exceptions"
_FRAME = re.compile(r'(?P<indent> *)File "(?P<file>[^"]+)", line (?P<line>\d+), in ')


class MinirayError(Exception):
    """Base of all errors of miniray."""

    __module__ = _PUBLIC_MODULE

    def __reduce__(self) -> tuple[Any, ...]:
        return transport.rebuild, (type(self), self.args, dict(self.__dict__))


class TaskFailure(NamedTuple):
    """The fields of a TaskError, which its properties describe."""

    function_name: str
    traceback_str: str
    cause: BaseException
    pid: int = 0
    ip: str = ""
    actor_id: str | None = None
    actor_repr: str | None = None


class TaskError(MinirayError):
    """A task or an actor method raised an exception.

    Or it did not run, as one of its arguments has an error; or it was cancelled while it ran.
    ``get`` raises ``as_instanceof_cause()``, which is also an instance of the
    exception's own class, so that ``except ValueError`` works.
    """

    __module__ = _PUBLIC_MODULE

    def __init__(
        self,
        function_name: str,
        traceback_str: str,
        cause: BaseException,
        *,
        pid: int = 0,
        ip: str = "",
        actor_id: str | None = None,
        actor_repr: str | None = None,
    ) -> None:
        super().__init__(function_name, traceback_str)
        self._facts: TaskFailure
        # One entry of __dict__, since the class may be mixed with any user class.
        self.__dict__["_facts"] = TaskFailure(
            function_name, traceback_str, cause, pid, ip, actor_id, actor_repr
        )

    @classmethod
    def untold(cls, function_name: str, error: BaseException, problem: BaseException) -> TaskError:
        """Return what stands for an exception whose class raises another one when it is looked at.

        Neither of the two is printed: that runs the same code again.
        """
        text = (
            f"An exception of class {transport.name_of(error)}, which can't be sent: "
            f"a {transport.name_of(problem)} was raised when it was inspected."
        )
        return cls(function_name, text, MinirayError(text))

    @classmethod
    def from_exception(cls, error: BaseException, function_name: str, **where: Any) -> TaskError:
        """Wrap what user code raised; ``where`` are the other attributes.

        The error of a task that this one waited for keeps its original cause, and its
        own traceback is part of the new one.
        """
        cause = error.cause if isinstance(error, TaskError) else error
        return cls(function_name, transport.format_traceback(error), cause, **where)

    @property
    def function_name(self) -> str:
        """Qualified name of the function or method."""
        return self._facts.function_name

    @property
    def traceback_str(self) -> str:
        """The traceback as it was in the worker."""
        return self._facts.traceback_str

    @property
    def cause(self) -> BaseException:
        """What was raised; a MinirayError with its text where it could not come along."""
        return self._facts.cause

    @property
    def pid(self) -> int:
        """Process id of the worker, or 0."""
        return self._facts.pid

    @property
    def ip(self) -> str:
        """Address of the worker's node, or empty."""
        return self._facts.ip

    @property
    def actor_id(self) -> str | None:
        """Hex id of the actor, or None for a task."""
        return self._facts.actor_id

    @property
    def actor_repr(self) -> str | None:
        """``repr`` of the actor, where its class defines one."""
        return self._facts.actor_repr

    def as_instanceof_cause(self) -> TaskError:
        """Return this error as an instance of the cause's class too, with its attributes.

        Returns self where the class can't be subclassed, and for exceptions that would end
        the process (SystemExit), the loop or generator (StopIteration, GeneratorExit) or the
        task of an event loop (CancelledError) that only waits for the result.
        """
        cause = self.cause
        cause_class: Any = type(cause)
        if cause_class in type(self).__mro__ or isinstance(cause, _control_flow()):
            return self
        try:
            cls = _dual_class(cause_class)
            dual = cls and transport.graft(cls, cause)
        except Exception as problem:  # noqa: BLE001 -- user code runs in it
            _tell_plain(cause_class, problem)
            return self
        if not isinstance(dual, TaskError):
            return self
        transport.state_of(dual)["_facts"] = self._facts
        return dual

    def __str__(self) -> str:
        place = [f"pid={self.pid}"] if self.pid else []
        place += [f"ip={self.ip}"] if self.ip else []
        place += [f"actor_id={self.actor_id}"] if self.actor_id else []
        place += [f"repr={self.actor_repr}"] if self.actor_repr else []
        where = f" ({', '.join(place)})" if place else ""
        return f"{self.function_name}() failed{where}\n{_with_sources(self.traceback_str).rstrip()}"

    def __repr__(self) -> str:
        try:
            cause = repr(self.cause)
        except Exception:  # noqa: BLE001 -- a class of the user's; the printed error is another one
            cause = f"a {transport.name_of(self.cause)}"
        return f"TaskError({self.function_name}: {cause})"

    def __reduce__(self) -> tuple[Any, ...]:
        blob, why_not = transport.pack(self.cause)
        facts = self._facts._replace(cause=MinirayError(transport.name_of(self.cause)))
        mixed = type(self) is not TaskError
        return _rebuild_task_error, (facts, blob, mixed, why_not)


def _with_sources(text: str) -> str:
    """Add source lines that only this process has, such as a notebook's, to a traceback."""
    lines = text.splitlines(keepends=True)
    for number in range(len(lines) - 1, -1, -1):
        frame = _FRAME.match(lines[number])
        entry = frame and linecache.cache.get(frame["file"])
        if not frame or not entry or len(entry) != 4:
            continue
        _size, changed, source, _path = entry
        if changed is not None:  # it is a real file
            continue
        indent = frame["indent"] + "  "
        if lines[number + 1 : number + 2] and lines[number + 1].startswith(indent):
            continue  # the line is there
        code = "".join(source[int(frame["line"]) - 1 :][:1]).strip()
        if code:
            lines.insert(number + 1, f"{indent}{code}\n")
    return "".join(lines)


class _TextOnly(pickle.Unpickler):
    """Loads an error without what is the user's in it."""

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) == (__name__, _rebuild_task_error.__name__):
            return lambda facts, *_: facts.traceback_str
        ours = module in (__name__, _PUBLIC_MODULE) and "." not in name
        if ours or (module, name) == (transport.rebuild.__module__, transport.rebuild.__name__):
            return super().find_class(module, name)
        raise pickle.UnpicklingError(f"{module}.{name} may be the user's")


def text_only(pickled: bytes) -> Any:
    """Return a pickled error, loaded without the user's code.

    Returns:
        The error, with texts in place of each TaskError in it; the traceback of a TaskError; None
        if only the user's code has it.
    """
    try:
        return _TextOnly(io.BytesIO(pickled)).load()
    except pickle.UnpicklingError:
        return None


def last_line(pickled: bytes) -> str:
    """Return the last line of a pickled error's text; empty if only the user's code has it."""
    text = str(text_only(pickled) or "")
    return text.rstrip().split("\n")[-1].strip()


def wrap_pickled(function_name: str, text: str, cause: BaseException, pickled: bytes) -> bytes:
    """Return a pickled TaskError of a cause that stays as it was pickled."""
    facts = TaskFailure(function_name, text, MinirayError(transport.name_of(cause)))
    return pickle.dumps(_Pickled(facts, pickled), 5)


class _Pickled:
    """What is unpickled as a TaskError."""

    def __init__(self, facts: TaskFailure, cause: bytes) -> None:
        self._parts = (facts, cause, False, "")

    def __reduce__(self) -> tuple[Any, ...]:
        return _rebuild_task_error, self._parts


def _control_flow() -> tuple[type[BaseException], ...]:
    """Return the exceptions with which Python controls processes, generators and tasks."""
    flow = (SystemExit, KeyboardInterrupt, GeneratorExit, StopIteration, StopAsyncIteration)
    asyncio = sys.modules.get("asyncio")  # without it there is no CancelledError
    return flow if asyncio is None else (*flow, asyncio.CancelledError)


@functools.lru_cache(maxsize=256)
def _dual_class(cause_class: Any) -> type[BaseException] | None:
    """Return a subclass of both TaskError and the user's class, or None if there can't be one."""
    namespace = {
        "__module__": _PUBLIC_MODULE,
        "__doc__": TaskError.__doc__,
        # The user's class must not get its own way of printing, pickling, assigning or raising.
        "__setattr__": object.__setattr__,
        "with_traceback": BaseException.with_traceback,
        "__init__": TaskError.__init__,
    }
    try:
        return type(f"TaskError({cause_class.__name__})", (TaskError, cause_class), namespace)
    except (Exception, *transport.ENDS) as problem:  # noqa: BLE001 -- metaclasses may raise anything
        _tell_plain(cause_class, problem)
        return None


def _tell_plain(cause_class: Any, problem: BaseException) -> None:
    logger.warning(
        "%s can't be subclassed (%s), so errors of it are raised as TaskError only; "
        "the exception itself is in the attribute `cause`.",
        type.__getattribute__(cause_class, "__name__"),
        problem,
    )


def _rebuild_task_error(
    facts: TaskFailure, blob: bytes | None, mixed: bool, why_not: str
) -> TaskError:
    """Make a TaskError again; a cause that can't come along is replaced by a description."""
    cause: BaseException
    if blob is None:
        cause = MinirayError(f"An exception of class {facts.cause}, which {why_not}.")
    else:
        try:
            cause = transport.unpack(blob)
        except (Exception, *transport.ENDS) as problem:  # noqa: BLE001 -- user code runs here
            cause = MinirayError(f"An exception of class {facts.cause} (can't load it: {problem}).")
    error = TaskError.__new__(TaskError, facts.function_name, facts.traceback_str)
    error.__dict__["_facts"] = facts._replace(cause=cause)
    return error.as_instanceof_cause() if mixed else error
