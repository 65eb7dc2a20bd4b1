"""Checks that what came from another process is of the types that its handler takes.

A handler that takes apart data of a wrong type may fail half way, and leave behind what others
stumble over. So its annotations, which are there anyway, are checked before it is called.
"""

from __future__ import annotations

import collections.abc
import dataclasses
import functools
import inspect
import types
import typing
from typing import TYPE_CHECKING, Any

from miniray.common.specs import Spec, field_names

if TYPE_CHECKING:
    from collections.abc import Callable

#: Whole numbers beyond this fit into no message of the daemons'.
_LARGEST = 1 << 63
_NAMES = {**vars(collections.abc), **vars(typing)}
_SEQUENCES = (
    list,
    collections.abc.Sequence,
    collections.abc.Iterable,
    collections.abc.Container,
    collections.abc.Collection,
)
_MAPPINGS = (dict, collections.abc.Mapping)


class Arguments:
    """The arguments of one handler.

    Args:
        handler: What is annotated. What it does not annotate is not checked.
        given: How many of its parameters do not come from the other process.
    """

    def __init__(self, handler: Callable[..., Any], given: int) -> None:
        parameters = list(inspect.signature(handler).parameters.values())[given:]
        self._forms = [(each, _form(each.annotation, handler)) for each in parameters]
        self._any_number = any(each.kind is each.VAR_POSITIONAL for each in parameters)
        self._least = sum(
            each.default is each.empty and each.kind is not each.VAR_POSITIONAL
            for each in parameters
        )

    def check(self, arguments: tuple[Any, ...]) -> tuple[Any, ...]:
        """Return the arguments as the handler takes them: specs are made of their fields.

        Raises:
            ValueError: It names what is wrong, and what it should be.
        """
        if len(arguments) < self._least or (
            len(arguments) > len(self._forms) and not self._any_number
        ):
            raise ValueError(
                f"{len(arguments)} arguments were given; there are {len(self._forms)}: "
                f"{', '.join(parameter.name for parameter, _ in self._forms)}."
            )
        taken = list(arguments)
        for index, (parameter, form) in enumerate(self._forms[: len(taken)]):
            if parameter.kind is parameter.VAR_POSITIONAL:
                break
            value = arguments[index]
            if isinstance(form, type) and issubclass(form, Spec):
                value = taken[index] = _spec(parameter.name, value, form)
            if not fits(value, form):
                raise ValueError(_wrong(parameter.name, value, form, parameter.annotation))
        return tuple(taken)


def _spec(name: str, data: Any, form: type[Spec]) -> Spec:
    try:
        return form.from_wire(data)
    except (TypeError, ValueError, KeyError):
        raise ValueError(
            f"The argument {name} must be the values of the fields of {form.__name__}, "
            f"{', '.join(field_names(form))}; not {data!r:.80} ({type(data).__name__})."
        ) from None


def _form(annotation: Any, handler: Callable[..., Any]) -> Any:
    if annotation is inspect.Parameter.empty:
        return Any
    if not isinstance(annotation, str):
        return annotation
    scope = getattr(inspect.unwrap(handler), "__globals__", {})
    try:
        return eval(annotation, {**_NAMES, **scope})  # noqa: S307 - it is this program's own text
    except NameError:  # a class that is imported for type checkers only
        return Any


@functools.cache
def _parts(form: Any) -> tuple[Any, tuple[Any, ...]]:
    return typing.get_origin(form), typing.get_args(form)


#: Evaluates the annotations of a class, which takes as long as all else of a request.
_hints: Callable[[Any], dict[str, Any]] = functools.cache(typing.get_type_hints)


def fits(value: Any, form: Any) -> bool:
    """Return whether plain data is of a type; tuples and lists are the same to it."""
    origin, inner = _parts(form)
    if form is None or form is types.NoneType:
        return value is None
    if origin in (typing.Union, types.UnionType):
        return any(fits(value, each) for each in inner)
    if origin is tuple and inner[1:] != (...,):
        return (
            isinstance(value, list | tuple)
            and len(value) == len(inner)
            and all(map(fits, value, inner))
        )
    if origin in _SEQUENCES or origin is tuple:
        return isinstance(value, list | tuple) and all(fits(each, inner[0]) for each in value)
    if origin in _MAPPINGS:
        return isinstance(value, dict) and all(
            fits(key, inner[0]) and fits(each, inner[1]) for key, each in value.items()
        )
    if dataclasses.is_dataclass(form):
        return type(value) is form and all(
            fits(getattr(value, field), hint) for field, hint in _hints(form).items()
        )
    if form is int or form is float:
        kinds = int if form is int else int | float
        whole = isinstance(value, kinds) and not isinstance(value, bool)
        return whole and (isinstance(value, float) or -_LARGEST <= value < _LARGEST)
    if form in (bool, str, bytes, list, tuple, dict):
        return isinstance(value, form)
    return True


def _wrong(name: str, value: Any, form: Any, shown: Any) -> str:
    """Describe in a sentence what is wrong; of several fields the first one."""
    if isinstance(value, Spec):
        for field, hint in _hints(form).items():
            if not fits(getattr(value, field), hint):
                return _wrong(f"{name}.{field}", getattr(value, field), hint, hint)
    kind = shown.__name__ if isinstance(shown, type) else str(shown)
    return f"The argument {name} must be {kind}, not {value!r:.80} ({type(value).__name__})."
