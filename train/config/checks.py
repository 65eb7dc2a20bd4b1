"""How configurations check what they are given: by the checks of options, and with ValueError."""

from __future__ import annotations

import functools
import math
from typing import TYPE_CHECKING, Any, TypeVar

from miniray.system import option_checks

if TYPE_CHECKING:
    from collections.abc import Callable

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


def check_field(
    config: object, name: str, rule: Callable[[str, Any], Any], *, or_none: str = ""
) -> None:
    """Check a field of a configuration by a rule of ``option_checks``.

    Args:
        config: The configuration.
        name: Of the field.
        rule: What it has to follow.
        or_none: What None does, where it is allowed: "keeps all".

    Raises:
        ValueError: It does not follow the rule.
    """
    value = getattr(config, name)
    if value is None and or_none:
        return
    where = f"{type(config).__name__}({name})"
    try:
        rule(where, value)
    except (TypeError, ValueError) as error:
        also = f" None {or_none}." if or_none else ""
        raise ValueError(f"{error}{also}") from None


def above_zero(name: str, value: Any) -> None:
    """Accept a number of seconds above 0."""
    number = isinstance(value, int | float) and not isinstance(value, bool)
    if not number or not 0 < value < math.inf:  # which NaN is not either
        raise ValueError(f"{name} must be a number of seconds above 0, not {value!r}.")


def resources(name: str, value: Any) -> None:
    """Accept amounts by the names of resources, CPU and GPU among them."""
    if not hasattr(value, "items"):
        raise ValueError(
            f'{name} must be a dictionary of amounts by resource name, such as {{"CPU": 2}}, '
            f"not {value!r}."
        )
    for resource, amount in value.items():
        if resource in _MISSPELLED:
            raise ValueError(
                f"{name} names {resource!r}; resource names are case-sensitive. "
                f"Write {_MISSPELLED[resource]!r}."
            )
        option_checks.text(f"The name of a resource in {name}", resource)
        option_checks.amount(f"{name}[{resource!r}]", amount, resource)


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

    The dataclass raises RefusedArgumentError for them, with any value.
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
