"""Plain data as bytes: how messages are written, and how received ones are read and checked.

``marshal`` allocates as many items as five bytes claim, so what comes from a process that may
mean harm is looked through before it is loaded: each claim has to be borne out by the bytes that
follow. Of what marshal knows, only plain data is taken. What is loaded is then compared with the
annotations of the handler that gets it.
"""

from __future__ import annotations

import collections.abc
import dataclasses
import functools
import inspect
import marshal
import struct
import types
import typing
from typing import TYPE_CHECKING, Any

from miniray.common.specs import Spec, field_names

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

#: Version of the format: the latest one without references to earlier items. A few bytes
#: that refer to each other may stand for more data than any machine holds.
VERSION = 2
#: Items of one message, and how deep they may be nested.
MAX_ITEMS = 4_000_000
MAX_DEPTH = 64
#: 15-bit digits of the largest integer.
_MAX_DIGITS = 20

_length = struct.Struct("<I").unpack_from
_digits = struct.Struct("<i").unpack_from
#: Bytes of what has a fixed size, by the byte that it begins with: None, True, False, int, float.
_SIZES = [0] * 256
for _code, _size in ((b"N", 1), (b"T", 1), (b"F", 1), (b"i", 5), (b"g", 9)):
    _SIZES[_code[0]] = _size
_BYTES, _TEXT, _INTERNED, _TUPLE, _LIST, _DICT, _END, _LONG = b"sut([{0l"
_STRINGS = frozenset((_BYTES, _TEXT, _INTERNED))
_SEQUENCES = frozenset((_TUPLE, _LIST))


def dumps(data: Any) -> bytes:
    """Encode plain data.

    Raises:
        ValueError: Something in it is no plain data.
    """
    return marshal.dumps(data, VERSION)


def loads(data: bytes | memoryview) -> Any:
    """Decode what ``dumps`` has made, of any origin: it is as large as it claims to be.

    Raises:
        ValueError: They are no plain data.
    """
    check(data)
    try:
        return marshal.loads(data)
    except (EOFError, TypeError, MemoryError) as error:
        raise ValueError(f"{len(data)} bytes are no plain data: {error}") from None


def check(data: bytes | memoryview) -> None:
    """Scan marshalled data without loading it.

    Raises:
        ValueError: A size in it is larger than what follows, or something is no plain data.
    """
    try:
        end = _skip(data, 0, 1, 0, MAX_ITEMS)[0]
    except (IndexError, struct.error):
        end = -1
    if end != len(data):
        raise ValueError(f"{len(data)} bytes are no plain data: they end too soon, or too late")


def _skip(data: bytes | memoryview, at: int, count: int, depth: int, left: int) -> tuple[int, int]:
    """Return where ``count`` items end, and how many more there may be in the message."""
    left -= count
    if left < 0 or depth > MAX_DEPTH:
        raise ValueError(
            f"{len(data)} bytes are no plain data that is taken: they claim more than {MAX_ITEMS} "
            f"items, or are nested deeper than {MAX_DEPTH}"
        )
    for _ in range(count):
        code = data[at]
        if code == _BYTES:
            at += 5 + _length(data, at + 1)[0]
        elif size := _SIZES[code]:
            at += size
        elif code in _STRINGS:
            at += 5 + _length(data, at + 1)[0]
        elif code in _SEQUENCES:
            at, left = _skip(data, at + 5, _length(data, at + 1)[0], depth + 1, left)
        elif code == _DICT:
            at += 1
            while data[at] != _END:
                if data[at] not in _STRINGS:  # numbers can be chosen such that all collide
                    raise ValueError("a key of a dict is neither text nor bytes")
                at, left = _skip(data, at, 2, depth + 1, left)
            at += 1
        elif code == _LONG and abs(digits := _digits(data, at + 1)[0]) <= _MAX_DIGITS:
            at += 5 + 2 * abs(digits)
        else:
            raise ValueError(f"an item begins with the byte {code}, as no plain data does")
    return at, left


#: Whole numbers beyond this fit into no message of the daemons'.
_LARGEST = 1 << 63
_NAMES = {**vars(collections.abc), **vars(typing)}
_SEQUENCE_TYPES = (
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
        self._names = [each.name for each in parameters]
        self._any_number = any(each.kind is each.VAR_POSITIONAL for each in parameters)
        single = [each for each in parameters if each.kind is not each.VAR_POSITIONAL]
        self._forms = [(each, _form(each.annotation, handler)) for each in single]
        self._checks = [check_of(form) for _, form in self._forms]
        self._specs = [
            (index, form)
            for index, (_, form) in enumerate(self._forms)
            if isinstance(form, type) and issubclass(form, Spec)
        ]
        self._least = sum(each.default is each.empty for each in single)

    def check(self, arguments: tuple[Any, ...]) -> tuple[Any, ...]:
        """Return the arguments as the handler takes them: specs are made of their fields.

        Raises:
            ValueError: It names what is wrong, and what it should be.
        """
        if len(arguments) < self._least or (
            len(arguments) > len(self._forms) and not self._any_number
        ):
            raise ValueError(
                f"{len(arguments)} arguments were given; there are {len(self._names)}: "
                f"{', '.join(self._names)}."
            )
        taken = list(arguments)
        for index, form in self._specs:
            if index < len(taken):
                taken[index] = _spec(self._names[index], taken[index], form)
        for index, (value, fits) in enumerate(zip(taken, self._checks, strict=False)):
            if not fits(value):
                parameter, form = self._forms[index]
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


#: Evaluates the annotations of a class, which takes as long as all else of a request.
_hints: Callable[[Any], dict[str, Any]] = functools.cache(typing.get_type_hints)


@functools.cache
def check_of(form: Any) -> Callable[[Any], bool]:
    """Return a function that checks the type of plain data; tuples and lists are equal to it."""
    origin, inner = typing.get_origin(form), typing.get_args(form)
    if form is None or form is types.NoneType:
        return lambda value: value is None
    if origin in (typing.Union, types.UnionType):
        return _one_of([check_of(each) for each in inner])
    if origin is tuple and inner[1:] != (...,):
        return _tuple_of([check_of(each) for each in inner])
    if origin in _SEQUENCE_TYPES or origin is tuple:
        item = check_of(inner[0])
        return lambda value: isinstance(value, list | tuple) and all(map(item, value))
    if origin in _MAPPINGS:
        key, item = map(check_of, inner)
        return lambda value: (
            isinstance(value, dict) and all(map(key, value)) and all(map(item, value.values()))
        )
    if dataclasses.is_dataclass(form):
        return _fields_of(form, [(name, check_of(hint)) for name, hint in _hints(form).items()])
    if form is int:
        return _is_whole
    if form is float:
        return lambda value: isinstance(value, float) or _is_whole(value)
    if form in (bool, str, bytes, list, tuple, dict):
        return lambda value: isinstance(value, form)
    return lambda _value: True


def _is_whole(value: Any) -> bool:
    return type(value) is int and -_LARGEST <= value < _LARGEST


def _one_of(checks: Sequence[Callable[[Any], bool]]) -> Callable[[Any], bool]:
    def fits(value: Any) -> bool:
        return any(check(value) for check in checks)

    return fits


def _tuple_of(checks: Sequence[Callable[[Any], bool]]) -> Callable[[Any], bool]:
    def fits(value: Any) -> bool:
        if not isinstance(value, list | tuple) or len(value) != len(checks):
            return False
        return all(check(item) for check, item in zip(checks, value, strict=True))

    return fits


def _fields_of(
    form: Any, checks: Sequence[tuple[str, Callable[[Any], bool]]]
) -> Callable[[Any], bool]:
    def fits(value: Any) -> bool:
        if type(value) is not form:
            return False
        return all(check(getattr(value, name)) for name, check in checks)

    return fits


def _wrong(name: str, value: Any, form: Any, shown: Any) -> str:
    """Describe in a sentence what is wrong; of several wrong fields the first."""
    if isinstance(value, Spec):
        for field, hint in _hints(form).items():
            if not check_of(hint)(getattr(value, field)):
                return _wrong(f"{name}.{field}", getattr(value, field), hint, hint)
    kind = shown.__name__ if isinstance(shown, type) else str(shown)
    return f"The argument {name} must be {kind}, not {value!r:.80} ({type(value).__name__})."
