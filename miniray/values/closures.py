"""Warnings that name what makes a function, a class or a call large."""

from __future__ import annotations

import collections
import itertools
import sys
import warnings
import weakref
from collections.abc import Sized
from typing import TYPE_CHECKING, Any

from miniray.common.config import config
from miniray.common.names import user_frame, user_stacklevel
from miniray.values.picklers import parts_of
from miniray.values.serialization import dumps_code, pickled

if TYPE_CHECKING:
    from collections.abc import Callable
    from types import CodeType

    from miniray.common.object_ref import ObjectRef
    from miniray.values.picklers import Part

#: More than any call carries.
_TOLD = sys.maxsize
#: Places in user code whose calls were examined, by code and line: bytes of the largest of them.
_looked_at: weakref.WeakKeyDictionary[CodeType, dict[int, int]] = weakref.WeakKeyDictionary()


def dumps_checked(
    target: Callable[..., Any] | type, name: str
) -> tuple[bytes, list[ObjectRef[Any]]]:
    """Pickle code as ``dumps_code`` does, and check its size.

    Raises:
        TypeError: It cannot be pickled and has no module to be imported from.
        ValueError: It drags in more data than code may.
    """
    blob, refs = dumps_code(target)
    if len(blob) > config().large_closure_warning:
        check_large(target, name, len(blob), config().largest_closure)
    return blob, refs


def check_large(target: Any, name: str, size: int, largest: int) -> None:
    """Warn that pickling ``target`` drags in much data, with the largest variables.

    Raises:
        ValueError: it is more than ``largest`` bytes.
    """
    parts = sorted(_largest(target), reverse=True)[:3]
    listed = ", ".join(f"{what} ({_mib(part)})" for part, what in parts if part > size // 20)
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
        stacklevel=user_stacklevel(),
    )


def warn_large_arguments(args: tuple[Any, ...], kwargs: dict[str, Any], size: int) -> None:
    """Warn that a call carries much data, and name it; once for each place that calls.

    Data may be meant to be large. A function, a method or an object of the user's is more likely to
    have dragged it in: for those, the limit is lower. A place is examined again when its calls
    carry twice as much, since a look takes as long as pickling what they carry.
    """
    caller, _ = user_frame()
    sizes = _looked_at.setdefault(caller.f_code, {})
    if size < 2 * sizes.get(caller.f_lineno, 0):
        return
    sizes[caller.f_lineno] = size
    named = [(f"argument {number}", value) for number, value in enumerate(args, 1)]
    named += [(f"argument '{name}'", value) for name, value in kwargs.items()]
    sizes_of = [(_size(value), name, value) for name, value in named]
    drags = [(size, name, value) for size, name, value in sizes_of if not _is_data(value)]
    if drags:
        size, name, value = max(drags, key=lambda entry: entry[0])
        if size > config().large_closure_warning:
            sizes[caller.f_lineno] = _TOLD
            part, what = max(_largest(value), default=(0, ""))
            largest = f" The largest in it: {what}." if part > size // 20 else ""
            _warn(
                f"{name.capitalize()} of this call (a {type(value).__qualname__}) drags in "
                f"{_mib(size)}, and every call stores a copy.{largest} Pass only what is needed, "
                f"or store it once with miniray.put() and pass the ref."
            )
            return
    size, name, value = max(sizes_of, key=lambda entry: entry[0])
    if size > config().large_argument_warning:
        sizes[caller.f_lineno] = _TOLD
        _warn(
            f"{name.capitalize()} of this call (a {type(value).__qualname__}) takes {_mib(size)}, "
            f"and every call that gets it stores a copy. If there are several, store it once with "
            f"miniray.put() and pass the ref."
        )


def _warn(text: str) -> None:
    warnings.warn(text, UserWarning, stacklevel=user_stacklevel())


#: Types of plain data.
_PLAIN = (int, float, complex, str, bytes, bytearray, memoryview, type(None))
#: Items of a container that are examined, as they are mostly of one kind, and how deep.
_SAMPLE, _LEVELS = 20, 3


def _is_data(value: Any, levels: int = _LEVELS) -> bool:
    """Return whether a value is plain data, not an object that refers to data."""
    kind = type(value)
    if isinstance(value, _PLAIN) or hasattr(kind, "__array__"):
        return True
    if kind in _CONTAINERS:
        items = value.values() if kind is dict else value
        sample = itertools.islice(items, _SAMPLE if levels else 0)
        return all(_is_data(item, levels - 1) for item in sample)
    return isinstance(value, Sized) and not hasattr(value, "__dict__")  # a table of a library's


#: Types of plain data that hold only their items.
_CONTAINERS = frozenset((list, tuple, dict, set, frozenset, collections.deque))
#: Share of the whole from which on a part alone is named.
_MOST = 0.8
#: Containers of more items than that are named as a whole.
_FEW = 20
#: How deep the largest part is looked for.
_DEPTH = 10


def _largest(value: Any) -> list[tuple[int, str]]:
    """Return bytes of the parts of a value, with the way to what makes each large."""
    return [
        (size, _innermost(part, value, size, _DEPTH))
        for part in _parts(value)
        if (size := _size(part.value))
    ]


def _innermost(part: Part, whole: Any, size: int, depth: int) -> str:
    """Describe the part, or the one inside that makes it large."""
    inside = _parts(part.value) if depth else []
    for inner in inside:
        inner_size = _size(inner.value)
        if inner_size > _MOST * size:
            return _innermost(inner, part.value, inner_size, depth - 1)
    return f"{part.words()} of {getattr(whole, '__qualname__', type(whole).__qualname__)}"


def _parts(value: Any) -> list[Part]:
    """Return the parts that are worth a look: plain data has none."""
    if _is_data(value) or (type(value) in _CONTAINERS and len(value) > _FEW):
        return []
    return parts_of(value)


def _mib(size: int) -> str:
    return f"{size / (1 << 20):.1f} MiB"


def _size(value: Any) -> int:
    try:
        return pickled(value).size
    except Exception:  # noqa: BLE001 - a name that merely looks like this variable's; user code runs
        return 0
