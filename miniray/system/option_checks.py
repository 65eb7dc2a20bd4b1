"""Checks of single option values, shared by tasks, actors, methods and bundles.

Each check takes the option's name and value and returns the value in its one form,
or raises an error that names the option, the value given and what is allowed. Which
options exist, and what they add up to, is ``options.py``'s business.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from miniray.common.amounts import UNIT
from miniray.common.labels import check_key, check_value, parse_condition
from miniray.common.names import printable

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

#: The resource table counts in fixed point.
SMALLEST_AMOUNT = 1 / UNIT
#: No cluster has more, not even of bytes of memory.
LARGEST_AMOUNT = 10**19
#: Of numbers that are only counted or compared.
LARGEST_NUMBER = 2**63 - 1
#: Of what is made for each: results, and calls that run at once.
LARGEST_COUNT = 1_000_000

#: What the resources option must not name, and what to use instead.
OWN_OPTION = {
    "CPU": "num_cpus",
    "GPU": "num_gpus",
    "memory": "memory",
    "object_store_memory": "memory",
}


def shown(value: object) -> str:
    if isinstance(value, int) and value.bit_length() > 256:
        return f"a number of {value.bit_length()} bits"
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:77]}..."


def suggestion(word: str, known: Iterable[str]) -> str:
    """Return `` Did you mean 'x'?`` if a known word is close, else an empty string."""
    import difflib

    close = difflib.get_close_matches(word, list(known), n=2)
    return f" Did you mean {' or '.join(map(repr, close))}?" if close else ""


def wrong_type(name: str, value: object, allowed: str) -> TypeError:
    return TypeError(f"{name} must be {allowed}, not {shown(value)} ({type(value).__name__}).")


def plain_text(value: str) -> str:
    """Return a text as an exact ``str``, which NumPy's and those of enums are not.

    What goes to other processes has to be: ``marshal`` writes subclasses as bytes, or refuses them.
    """
    return str.__str__(value)


def plain_number(value: float) -> float:
    """Return a number as an exact ``int`` or ``float``, as ``plain_text`` does it for texts."""
    return int(value) if isinstance(value, int) else float(value)


def boolean(name: str, value: Any) -> bool:
    """Accept True or False."""
    if not isinstance(value, bool):
        raise wrong_type(name, value, "True or False")
    return value


def text(name: str, value: Any) -> str:
    if not isinstance(value, str):
        raise wrong_type(name, value, "a string")
    if not value:
        raise ValueError(f"{name} must not be an empty string.")
    return plain_text(value)


def call_name(name: str, value: Any) -> str:
    """Accept a non-empty string; escape what could steer the terminals that errors are shown on."""
    return printable(text(name, value))


def whole(minimum: int, also: str = "", most: int = LARGEST_NUMBER) -> Callable[[str, Any], int]:
    """Return a check for a whole number; ``also`` says what the smallest one means."""

    def check(name: str, value: Any) -> int:
        allowed = f"a whole number of at least {minimum}{f' ({also})' if also else ''}"
        if isinstance(value, bool) or not isinstance(value, int):
            raise wrong_type(name, value, allowed)
        if value < minimum:
            raise ValueError(f"{name} must be {allowed}, not {shown(value)}.")
        if value > most:
            raise ValueError(f"{name} must be at most {most:,}, not {shown(value)}.")
        return int(value)

    return check


def size(minimum: int) -> Callable[[str, Any], int]:
    """Return a check for an amount of bytes; ``700e6`` is a whole number too."""
    whole_number = whole(minimum, "bytes")

    def check(name: str, value: Any) -> int:
        is_number = isinstance(value, float) and math.isfinite(value)
        return whole_number(name, int(value) if is_number else value)

    return check


def one_of(*allowed: str) -> Callable[[str, Any], str]:
    def check(name: str, value: Any) -> str:
        if value not in allowed:
            raise ValueError(
                f"{name} must be one of {', '.join(map(repr, allowed))}, not {shown(value)}."
            )
        return allowed[allowed.index(value)]

    return check


def amount(name: str, value: Any, resource: str = "") -> float:
    """Accept an amount in units that a device of ``resource`` can serve."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise wrong_type(name, value, "a number of bytes" if resource == "memory" else "a number")
    if not 0 <= value < math.inf:  # which NaN is not either
        raise ValueError(f"{name} must be a finite number of at least 0, not {shown(value)}.")
    if value > LARGEST_AMOUNT:
        raise ValueError(f"{name} must be at most {LARGEST_AMOUNT:.0e}, not {shown(value)}.")
    if 0 < value < SMALLEST_AMOUNT:
        raise ValueError(f"{name} can't be finer than {SMALLEST_AMOUNT}, but {value} was given.")
    if resource not in ("", "CPU", "memory"):
        _check_devices(name, value, resource)
    return plain_number(value)


def _check_devices(name: str, value: float, resource: str) -> None:
    from miniray.accelerators.registry import DEVICE_RESOURCES, check_amount

    try:
        check_amount(resource, value)
    except ValueError as error:
        raise ValueError(f"{name}={value} is not possible: {error}") from None
    if resource in DEVICE_RESOURCES and value > 1 and value != int(value):
        raise ValueError(
            f"{name} must be a fraction up to 1 (a share of one device) or a whole number of "
            f"devices, not {value}. Use {int(value)} or {int(value) + 1}."
        )


def memory(name: str, value: Any) -> int:
    """Accept bytes of memory, and round them down."""
    return int(amount(name, value, "memory"))


def resources(name: str, value: Any) -> dict[str, float]:
    """Accept amounts of custom resources (and accelerators without an option) by name."""
    if not isinstance(value, Mapping):
        raise wrong_type(name, value, "a dict of resource name to amount")
    for resource in value:
        if not isinstance(resource, str) or not resource:
            raise wrong_type(f"A resource name in {name}", resource, "a non-empty string")
        if resource in OWN_OPTION:
            raise ValueError(
                f"{name} must not contain {resource!r}; "
                f"use the option {OWN_OPTION[resource]} instead."
            )
    return {
        plain_text(resource): amount(f"{name}[{resource!r}]", given, resource)
        for resource, given in value.items()
    }


def num_returns(name: str, value: Any) -> int | str:
    """Accept a number of results: a number, "streaming" or "dynamic"."""
    if isinstance(value, str):
        return one_of("streaming", "dynamic")(name, value)
    return whole(0, most=LARGEST_COUNT)(name, value)


def exceptions(name: str, value: Any) -> bool | tuple[type[BaseException], ...]:
    """Accept True, False, or the exception classes that are retried."""
    if isinstance(value, bool):
        return value
    if not isinstance(value, list | tuple):
        raise wrong_type(name, value, "True, False or a list of exception classes")
    for item in value:
        if not isinstance(item, type) or not issubclass(item, BaseException):
            raise wrong_type(f"Each item of {name}", item, "an exception class")
    return tuple(value)


def concurrency_groups(name: str, value: Any) -> dict[str, int]:
    """Accept the number of calls of each group that run at once: ``{"io": 2, "compute": 4}``."""
    if isinstance(value, list | tuple):  # Ray's list form: [{"name": "io", "max_concurrency": 2}]
        try:
            value = {group["name"]: group["max_concurrency"] for group in value}
        except (TypeError, KeyError):
            raise ValueError(
                f'{name} as a list must hold dicts with "name" and "max_concurrency", '
                f"not {shown(value)}."
            ) from None
    if not isinstance(value, Mapping):
        raise wrong_type(name, value, "a dict of group name to number of concurrent calls")
    return {
        text(f"A group name in {name}", group): whole(1, most=LARGEST_COUNT)(
            f"{name}[{group!r}]", limit
        )
        for group, limit in value.items()
    }


def labels(name: str, value: Any) -> dict[str, str]:
    """Accept labels of a node: keys and values."""
    checked = _label_texts(name, value, "value")
    for key, label in checked.items():
        check_value(f"{name}[{key!r}]", label)
    return checked


def label_selector(name: str, value: Any, *, of_bundle: bool = False) -> dict[str, str]:
    """Accept conditions on labels: ``x``, ``!x``, ``in(x, y)``, ``!in(x, y)``, ``exists()``.

    And ``same(x)`` of a bundle.
    """
    checked = _label_texts(name, value, "condition")
    for key, condition in checked.items():
        parse_condition(f"{name}[{key!r}]", key, condition, of_bundle)
    return checked


def _label_texts(name: str, value: Any, what: str) -> dict[str, str]:
    """Accept a dict of texts by label; ``what`` names the texts in messages."""
    if not isinstance(value, Mapping):
        raise wrong_type(name, value, f"a dict of label to {what}")
    for key, text in value.items():
        if not isinstance(key, str):
            raise wrong_type(f"A label in {name}", key, "a string")
        check_key(f"A label in {name}", key)
        if not isinstance(text, str):
            raise wrong_type(f"{name}[{key!r}]", text, "a string")
    return {plain_text(key): plain_text(text) for key, text in value.items()}


def fallbacks(name: str, value: Any) -> tuple[dict[str, str], ...]:
    """Accept selectors to try after ``label_selector``: ``[{"label_selector": {...}}, ...]``."""
    if not isinstance(value, list | tuple):
        raise wrong_type(name, value, "a list of dicts")
    found = []
    for index, given in enumerate(value):
        where = f"{name}[{index}]"
        if not isinstance(given, Mapping):
            raise wrong_type(where, given, 'a dict with "label_selector"')
        if set(given) != {"label_selector"}:
            raise ValueError(
                f'{where} must have "label_selector" and nothing else, not {shown(given)}.'
            )
        found.append(label_selector(f"{where}['label_selector']", given["label_selector"]))
    return tuple(found)


def runtime_env(_name: str, value: Any) -> dict[str, Any]:
    """Accept a runtime environment in its one form."""
    from miniray.runtime_env.validate import validate

    return validate(value)


def names(name: str, value: Any) -> tuple[str, ...]:
    """Accept a list of module names."""
    if isinstance(value, str) or not all(isinstance(item, str) for item in value):
        raise wrong_type(name, value, "a list of module names")
    return tuple(map(plain_text, value))
