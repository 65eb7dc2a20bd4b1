"""Whether what came from another process is of the types that its handler is annotated with.

A handler that takes apart data of a wrong type may fail half way, and leave behind what others
stumble over. So its annotations, which are there anyway, are checked before it is called.
"""

from __future__ import annotations

import collections.abc
import functools
import inspect
import types
import typing
from typing import TYPE_CHECKING, Any

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
        handler: What is annotated. What it does not annotate, or with a class, is not checked.
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

    def check(self, arguments: tuple[Any, ...]) -> None:
        """Raise a ValueError that names what is wrong, and what it should be."""
        if len(arguments) < self._least or (
            len(arguments) > len(self._forms) and not self._any_number
        ):
            raise ValueError(
                f"{len(arguments)} arguments were given; there are {len(self._forms)}: "
                f"{', '.join(parameter.name for parameter, _ in self._forms)}."
            )
        for (parameter, form), value in zip(self._forms, arguments, strict=False):
            rest = parameter.kind is parameter.VAR_POSITIONAL
            if not rest and not fits(value, form):
                raise ValueError(_wrong(parameter.name, value, form, parameter.annotation))


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
_hints = functools.cache(typing.get_type_hints)


def fits(value: Any, form: Any) -> bool:
    """Whether plain data is of a type; tuples and lists are the same to it."""
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
    if typing.is_typeddict(form):
        return _has_fields(value, form)
    if form is int or form is float:
        kinds = int if form is int else int | float
        whole = isinstance(value, kinds) and not isinstance(value, bool)
        return whole and (isinstance(value, float) or -_LARGEST <= value < _LARGEST)
    if form in (bool, str, bytes, list, tuple, dict):
        return isinstance(value, form)
    return True


def _wrong(name: str, value: Any, form: Any, shown: Any) -> str:
    """What is wrong, as a sentence; of several fields the first one."""
    if typing.is_typeddict(form) and isinstance(value, dict):
        missing = sorted(form.__required_keys__ - value.keys())
        if missing:
            return f"The argument {name} must have {', '.join(missing)}."
        for key, hint in _hints(form).items():
            if key in value and not fits(value[key], hint):
                return _wrong(f"{name}[{key!r}]", value[key], hint, hint)
    kind = shown.__name__ if isinstance(shown, type) else str(shown)
    return f"The argument {name} must be {kind}, not {value!r:.80} ({type(value).__name__})."


def _has_fields(value: Any, form: Any) -> bool:
    if not isinstance(value, dict) or not form.__required_keys__ <= value.keys():
        return False
    hints = _hints(form)
    return all(name not in value or fits(value[name], hint) for name, hint in hints.items())
