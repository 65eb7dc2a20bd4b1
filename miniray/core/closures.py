"""Names what makes a function, a class or a call large, so that it can be passed another way."""

from __future__ import annotations

import inspect
import warnings
from typing import Any

import cloudpickle


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


def warn_large_arguments(args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Warn that a call carries much data, and which of its arguments is the largest."""
    named = [*((f"argument {place}", value) for place, value in enumerate(args, 1))]
    named += [(f"argument '{name}'", value) for name, value in kwargs.items()]
    size, name, value = max(
        ((_size(value), name, value) for name, value in named), key=lambda entry: entry[0]
    )
    warnings.warn(
        f"{name.capitalize()} of this call (a {type(value).__qualname__}) takes {_mib(size)}, and "
        f"every call that gets it stores a copy. If there are several, store it once with "
        f"miniray.put() and pass the ref.",
        UserWarning,
        stacklevel=6,
    )


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
    try:
        return len(cloudpickle.dumps(value, protocol=5))
    except Exception:  # noqa: BLE001 - a name that merely looks like this variable's; user code runs
        return 0
