"""Carries exceptions of user code, of any class, from one process to another.

User exceptions may have constructors that ``pickle`` can't call again, members
that can't be pickled, or classes that can't be subclassed. The functions here
pack, unpack and graft them without ever calling user constructors; the meaning of the result is up
to ``exceptions.py``. Their classes may override anything, so attributes of all exceptions are
reached through ``BaseException``.
"""

from __future__ import annotations

import logging
import pickle
import traceback
import types
from pathlib import Path
from typing import Any

from miniray.common.names import format_bytes

logger = logging.getLogger(__name__)

#: The package's folder, and those in it whose frames are no user code; an engine adds others.
PACKAGE = str(Path(__file__).parents[1])
own_folders = tuple(
    f"{PACKAGE}/{folder}/"
    for folder in (
        "common",
        "messages",
        "wire",
        "values",
        "objects",
        "calls",
        "client",
        "engines",
        "worker",
    )
)

#: Bytes that a pickled exception may take: errors travel in messages, not in shared memory.
LARGEST = 256 << 20

#: Exceptions of user code, other than Exception, that must not end the process where an
#: error is inspected. KeyboardInterrupt is not among them: it is meant for the inspector.
ENDS = (SystemExit, GeneratorExit)

_TRACEBACK: Any = vars(BaseException)["__traceback__"]
_STATE: Any = vars(BaseException)["__dict__"]

#: Characters of a traceback that are kept.
_LONGEST = 200_000


def format_traceback(error: BaseException) -> str:
    """Return the traceback as text, beginning with the first frame of user code.

    The middle of a long one is left out: printed data are no help.
    """
    frames = user_frames(error) or traceback_of(error)
    try:
        text = "".join(traceback.format_exception(type(error), error, frames))
    except (Exception, *ENDS) as problem:  # noqa: BLE001 -- user code runs here
        said = type(problem).__name__
        text = f"{''.join(traceback.format_tb(frames))}{name_of(error)}: (no text, due to {said})"
    left_out = len(text) - _LONGEST
    if left_out <= 0:
        return text
    half = _LONGEST // 2
    return f"{text[:half]}\n[... {left_out} characters are left out ...]\n{text[-half:]}"


def user_frames(error: BaseException) -> types.TracebackType | None:
    """Return the traceback from the first frame of user code on; None if there is none."""
    first = traceback_of(error)
    while first is not None and first.tb_frame.f_code.co_filename.startswith(own_folders):
        first = first.tb_next
    return first


def traceback_of(error: BaseException) -> types.TracebackType | None:
    """Return ``__traceback__``, even if the class redefines the name."""
    frames: types.TracebackType | None = _TRACEBACK.__get__(error)
    return frames


def state_of(error: BaseException) -> dict[str, Any]:
    """Return ``__dict__``, even if the class redefines the name."""
    state: dict[str, Any] = _STATE.__get__(error)
    return state


def forget_traceback(error: BaseException) -> None:
    """Drop the frames and their values; frozen classes, for one, refuse the assignment."""
    BaseException.with_traceback(error, None)


def name_of(error: BaseException) -> str:
    """Return the class of an error, with its module."""
    cls = type(error)
    return (
        f"{type.__getattribute__(cls, '__module__')}.{type.__getattribute__(cls, '__qualname__')}"
    )


def add_note(error: BaseException, note: str) -> None:
    """Add a note to an exception, in every version of Python.

    Python prints such notes below the error, from version 3.11 on.
    """
    notes: list[str] = state_of(error).setdefault("__notes__", [])
    notes.append(note)


def note_place(error: BaseException, place: str) -> None:
    """Note in an error where it was raised, for one that goes to another process as it is."""
    frames = "".join(traceback.format_tb(user_frames(error)))
    add_note(error, f"Raised in {place}\n{frames}".rstrip())


def pack(error: BaseException) -> tuple[bytes | None, str]:
    """Pickle an exception so that ``unpack`` gives an equal one.

    An exception whose own pickling does not survive the round trip is taken apart
    into class, arguments and attributes.

    Returns:
        The pickle, or None and why there is none.
    """
    parts = (type(error), _args(error), dict(state_of(error)))
    blob = _packed(error, type(error)) or _packed(parts, type(error))
    if blob is None:
        return None, "can't be pickled"
    if len(blob) > LARGEST:
        size, limit = format_bytes(len(blob)), format_bytes(LARGEST)
        return None, f"takes {size} when pickled, and may take {limit}"
    return blob, ""


def _packed(form: Any, cls: type[BaseException]) -> bytes | None:
    import cloudpickle

    try:
        blob: bytes = cloudpickle.dumps(form, protocol=5)
        return blob if isinstance(unpack(blob), cls) else None
    except (Exception, *ENDS) as problem:  # noqa: BLE001 -- user code runs here
        logger.debug("an exception can't be pickled as it is: %s", name_of(problem))
        return None


def unpack(blob: bytes) -> BaseException:
    """Make the exception of ``pack`` again; raises what its class raises when it can't."""
    form = pickle.loads(blob)
    if isinstance(form, BaseException):
        return form
    cls, args, state = form
    return rebuild(cls, args, state)


def rebuild(
    cls: type[BaseException], args: tuple[Any, ...], state: dict[str, Any]
) -> BaseException:
    """Make an exception from its parts without running its class's constructor."""
    error = _new(cls, args)
    _set_args(error, args)
    state_of(error).update(state)
    return error


def graft(cls: type[BaseException], cause: BaseException) -> BaseException:
    """Make an instance of ``cls``, a subclass of the cause's class, with the cause's state."""
    args = _args(cause)
    parts = (cause.message, cause.exceptions) if isinstance(cause, _ExceptionGroup) else args
    error = _new(cls, parts)
    _set_args(error, args)
    _copy_members(cause, error)
    state_of(error).update(state_of(cause))
    return error


class _NoGroup(BaseException):
    """Stands for exception groups where Python has none (3.10)."""

    message: str
    exceptions: tuple[BaseException, ...]


_ExceptionGroup: Any = getattr(__import__("builtins"), "BaseExceptionGroup", _NoGroup)


def _new(cls: type[BaseException], args: tuple[Any, ...]) -> BaseException:
    """Return an instance, made by the nearest base that is written in C and can make it.

    One that keeps its instances apart, as ``MemoryError`` does, makes none of a class that has
    another such base before it.
    """
    problem: TypeError | None = None
    for base in cls.__mro__:
        made_in_c = not base.__flags__ & _HEAP_TYPE
        if made_in_c and "__new__" in base.__dict__:
            try:
                error: BaseException = base.__new__(cls, *args)
            except TypeError as refused:
                problem = problem or refused
            else:
                return error
    raise problem or AssertionError("BaseException has __new__")


#: Py_TPFLAGS_HEAPTYPE: set on classes that Python code made.
_HEAP_TYPE = 1 << 9


def _args(error: BaseException) -> tuple[Any, ...]:
    """Return ``args`` as BaseException holds it, even if the class has its own property."""
    args: tuple[Any, ...] = BaseException.args.__get__(error)  # type: ignore[attr-defined]
    return args


def _set_args(error: BaseException, args: tuple[Any, ...]) -> None:
    BaseException.args.__set__(error, args)  # type: ignore[attr-defined]


def _copy_members(source: BaseException, target: BaseException) -> None:
    """Copy what lives outside ``__dict__``: C members (``errno``, ``filename``) and slots."""
    for base in type(source).__mro__:
        if base in (BaseException, Exception, object):
            continue
        for name, member in vars(base).items():
            if not isinstance(member, types.MemberDescriptorType | types.GetSetDescriptorType):
                continue
            if name in ("__dict__", "__weakref__", "args"):
                continue
            try:
                member.__set__(target, member.__get__(source))
            except (AttributeError, TypeError, ValueError):
                continue  # unset in the source, or read-only: the class computes it
