"""Checks that several configurations share. Each raises ValueError with the reason and the fix."""

from __future__ import annotations

import functools
import math
from typing import TYPE_CHECKING, Any, TypeVar

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

T = TypeVar("T")

_MISSPELLED = {
    "cpu": "CPU",
    "gpu": "GPU",
    "tpu": "TPU",
    "Memory": "memory",
    "MEMORY": "memory",
}


class RefusedArgumentError(ValueError, DeprecationWarning):
    """An argument of Ray's makes no sense here. For most of them Ray raises DeprecationWarning."""


def is_whole(value: Any, least: int) -> bool:
    """Return whether a value is a whole number that is not below ``least``."""
    return isinstance(value, int) and not isinstance(value, bool) and value >= least


def is_amount(value: Any) -> bool:
    """Return whether a value can be an amount: a finite number of 0 or more."""
    number = isinstance(value, int | float) and not isinstance(value, bool)
    return number and math.isfinite(value) and value >= 0


def check_flag(where: str, value: Any) -> None:
    """Raise ValueError if this is not True or False; ``where`` names it, as ``Class(name``."""
    if not isinstance(value, bool):
        raise ValueError(f"{where}={value!r}) must be True or False.")


def check_text(where: str, value: Any, example: str) -> None:
    """Raise ValueError if this is neither None nor text that is not empty."""
    if value is not None and (not isinstance(value, str) or not value.strip()):
        raise ValueError(f"{where}={value!r}) must be text such as {example!r}, or None.")


def check_limit(where: str, value: Any) -> None:
    """Raise ValueError if this is neither None nor a number of seconds above 0."""
    if value is not None and (not is_amount(value) or value == 0):
        raise ValueError(
            f"{where}={value!r}) must be a number of seconds above 0, or None for no limit."
        )


def check_resources(argument: str, resources: Mapping[str, float] | None) -> None:
    """Raise ValueError if these can't be amounts of resources."""
    from miniray.system.option_checks import amount as amount_of

    if resources is None:
        return
    given = f"ScalingConfig({argument}={resources!r})"
    if not hasattr(resources, "items"):
        raise ValueError(
            f'{given} must be a dictionary of amounts by resource name, such as {{"CPU": 2}}.'
        )
    for name, amount in resources.items():
        if name in _MISSPELLED:
            raise ValueError(
                f"{given} names {name!r}; resource names are case-sensitive. "
                f"Write {_MISSPELLED[name]!r}."
            )
        if not isinstance(name, str) or not name:
            raise ValueError(f"{given} has the key {name!r}; resource names are non-empty strings.")
        if not is_amount(amount):
            raise ValueError(
                f"{given} gives {name!r} as {amount!r}; an amount is a number of 0 or more."
            )
        if amount:
            # What a device resource can be asked for is the same for everything that runs.
            amount_of(f"{given}: {name!r}", amount, name)


def instance_of(argument: str, value: Any, kind: type) -> Any:
    """Return the value, or the default of its class for None; raise ValueError for other values."""
    value = kind() if value is None else value
    matches = isinstance(value, kind)
    if not matches:
        raise ValueError(
            f"{argument}={value!r} must be a miniray.train.{kind.__name__}, not a "
            f"{type(value).__module__}.{type(value).__qualname__}."
        )
    return value


def refuses(**instead: str) -> Callable[[type[T]], type[T]]:
    """Make a dataclass refuse these arguments of Ray's, and say what to do instead.

    The dataclass raises RefusedArgumentError for them, whatever their value.
    """

    def decorate(cls: type[T]) -> type[T]:
        kind: Any = cls
        init = kind.__init__

        @functools.wraps(init)
        def checked(self: T, *given: Any, **named: Any) -> None:
            for name in named.keys() & instead.keys():
                raise RefusedArgumentError(
                    f"{cls.__name__}({name}={named[name]!r}) is not supported. {instead[name]}"
                )
            init(self, *given, **named)

        kind.__init__ = checked
        return cls

    return decorate
