"""Names what makes a function, a class or a call large, so that it can be passed another way."""

from __future__ import annotations

import inspect
import sys
import warnings
import weakref
from collections.abc import Sized
from typing import TYPE_CHECKING, Any

import cloudpickle

from miniray.config import config

if TYPE_CHECKING:
    import pickle
    from types import CodeType

#: How far up the stack from here the user's call of ``.remote()`` is.
_CALLER = 6
#: More than any call carries.
_TOLD = sys.maxsize
#: Places in user code whose calls were looked at, by code and line: bytes of the largest of them.
_looked_at: weakref.WeakKeyDictionary[CodeType, dict[int, int]] = weakref.WeakKeyDictionary()


def check_large(target: Any, name: str, size: int, largest: int) -> None:
    """Warn that pickling ``target`` drags in much data, with the largest variables.

    Raises:
        ValueError: it is more than ``largest`` bytes.
    """
    parts = sorted(_sizes(target), key=lambda part: -part[1])[:3]
    listed = ", ".join(f"{what} ({_mib(part)})" for what, part in parts if part > size // 20)
    culprit = f" The largest it refers to: {listed}." if listed else ""
    if size > largest:
        raise ValueError(
            f"{name} is {_mib(size)} when pickled, and may be {_mib(largest)}.{culprit} Pass large "
            f"values as arguments, once through miniray.put()."
        )
    warnings.warn(
        f"{name} is {_mib(size)} when pickled, and every worker that runs it loads all of "
        f"that.{culprit} Pass large values as arguments, once through miniray.put().",
        UserWarning,
        stacklevel=5,
    )


def warn_large_arguments(args: tuple[Any, ...], kwargs: dict[str, Any], size: int) -> None:
    """Warn that a call carries much data, and name it; once for each place that calls.

    Data may be meant to be large. A function, a method or an object of the user's is more likely
    to have dragged it in: of those, less is told. A place is looked at again when its calls carry
    twice as much, since a look takes as long as pickling what they carry.

    Args:
        args: Positional arguments of the call.
        kwargs: The others.
        size: Bytes that they take when pickled.
    """
    caller = sys._getframe(_CALLER - 1)
    sizes = _looked_at.setdefault(caller.f_code, {})
    if size < 2 * sizes.get(caller.f_lineno, 0):
        return
    sizes[caller.f_lineno] = size
    named = [(f"argument {number}", value) for number, value in enumerate(args, 1)]
    named += [(f"argument '{name}'", value) for name, value in kwargs.items()]
    drags = [(_size(value), name, value) for name, value in named if not _is_data(value)]
    if drags:
        size, name, value = max(drags, key=lambda entry: entry[0])
        if size > config().large_closure_warning:
            sizes[caller.f_lineno] = _TOLD
            parts = [(part, what) for what, part in _parts(value) if part > size // 20]
            largest = f" The largest in it: {max(parts)[1]}." if parts else ""
            _warn(
                f"{name.capitalize()} of this call (a {type(value).__qualname__}) drags in "
                f"{_mib(size)}, and every call stores a copy.{largest} Pass only what is needed, "
                f"or store it once with miniray.put() and pass the ref."
            )
            return
    size, name, value = max(
        ((_size(value), name, value) for name, value in named), key=lambda entry: entry[0]
    )
    if size > config().large_argument_warning:
        sizes[caller.f_lineno] = _TOLD
        _warn(
            f"{name.capitalize()} of this call (a {type(value).__qualname__}) takes {_mib(size)}, "
            f"and every call that gets it stores a copy. If there are several, store it once with "
            f"miniray.put() and pass the ref."
        )


def _warn(text: str) -> None:
    warnings.warn(text, UserWarning, stacklevel=_CALLER + 1)


def _is_data(value: Any) -> bool:
    """Whether a value is a container of data, and not something that refers to it besides."""
    return isinstance(value, Sized | int | float) or hasattr(type(value), "__array__")


def _parts(value: Any) -> list[tuple[str, int]]:
    """What a function refers to, or the object of a method, or any other, consists of."""
    if inspect.isfunction(value):
        return _sizes(value)
    owner = getattr(value, "__self__", value)
    parts = getattr(owner, "__dict__", {})
    kind = type(owner).__qualname__
    return [(f"attribute '{name}' of {kind}", _size(part)) for name, part in parts.items()]


def _mib(size: int) -> str:
    return f"{size / (1 << 20):.1f} MiB"


def _sizes(target: Any) -> list[tuple[str, int]]:
    functions = (
        [member for member in vars(target).values() if inspect.isfunction(member)]
        if inspect.isclass(target)
        else [target]
    )
    sizes = []
    for function in functions:
        if not inspect.isfunction(function):
            continue
        try:
            found = inspect.getclosurevars(function)
        except ValueError:  # a variable of the closure has no value yet
            continue
        variables = {**found.globals, **found.nonlocals}
        for name, value in variables.items():
            if not inspect.ismodule(value):
                sizes.append((f"variable '{name}' of {function.__qualname__}", _size(value)))
    return sizes


def _size(value: Any) -> int:
    buffers: list[pickle.PickleBuffer] = []
    try:
        pickled = len(cloudpickle.dumps(value, protocol=5, buffer_callback=buffers.append))
        return pickled + sum(buffer.raw().nbytes for buffer in buffers)
    except Exception:  # noqa: BLE001 - a name that merely looks like this variable's; user code runs
        return 0
