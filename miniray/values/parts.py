"""The parts of a value, for messages that name the one at fault.

Each part is what pickling the value pickles too. The caller decides what is wrong with it.
"""

from __future__ import annotations

import collections
import dis
import functools
import inspect
import types
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Iterator

#: Parts of one value that are looked at.
_MOST = 10_000


class Part(NamedTuple):
    """A part of a value that is pickled with it."""

    #: "attribute", "item", "element", "variable", "global variable" or "default".
    kind: str
    #: Of the attribute, the variable or the parameter; key or index of an item.
    name: str
    value: Any

    def step(self) -> str:
        """Return the way from the whole to the part, as the text of a path."""
        if self.kind == "attribute":
            return f".{self.name}"
        if self.kind == "item":
            return f"[{self.name}]"
        if self.kind == "element":
            return "{an element}"
        return f": {self.words()}"

    def words(self) -> str:
        if self.kind == "default":
            return f"default of {self.name!r}"
        return f"{self.kind} {self.name!r}" if self.name else f"an {self.kind}"


def parts_of(value: Any) -> list[Part]:
    """Return the parts of a value, or none where they are not known."""
    try:
        return [part for part, _ in zip(_parts(value), range(_MOST), strict=False)]
    except Exception:  # noqa: BLE001 - user code runs in it; another error is being described
        return []


def _parts(value: Any) -> Iterator[Part]:
    if inspect.isfunction(value):
        yield from _of_function(value)
    elif inspect.ismethod(value):
        yield Part("attribute", "__self__", value.__self__)
        yield Part("attribute", "__func__", value.__func__)
    elif inspect.isclass(value):
        for name, member in vars(value).items():
            part = _function_of(member)
            if inspect.isfunction(part) or not (name.startswith("__") or name == "_abc_impl"):
                yield Part("attribute", name, part)
    elif isinstance(value, functools.partial):
        for name in ("func", "args", "keywords"):
            yield Part("attribute", name, getattr(value, name))
    else:
        yield from _items(value)
        # One of miniray's says itself why it cannot be pickled.
        if type(value).__module__.partition(".")[0] != "miniray":
            yield from _attributes(value)


def _function_of(member: Any) -> Any:
    if isinstance(member, staticmethod | classmethod):
        return member.__func__
    return member.fget if isinstance(member, property) else member


def _items(value: Any) -> Iterator[Part]:
    if isinstance(value, dict):
        for key, item in value.items():
            yield Part("item", repr(key), item)
    elif isinstance(value, list | tuple | collections.deque):
        for index, item in enumerate(value):
            yield Part("item", str(index), item)
    elif isinstance(value, set | frozenset):
        for item in value:
            yield Part("element", "", item)


def _attributes(value: Any) -> Iterator[Part]:
    cls = type(value)
    if getattr(cls, "__getstate__", None) is not getattr(object, "__getstate__", None):
        state = value.__getstate__()
        if not isinstance(state, dict):
            yield Part("attribute", "__getstate__()", state)
            return
    else:
        state = getattr(value, "__dict__", None) or {}
        for base in cls.__mro__:
            for name, member in vars(base).items():
                if isinstance(member, types.MemberDescriptorType) and hasattr(value, name):
                    yield Part("attribute", name, getattr(value, name))
    for name, part in state.items():
        yield Part("attribute", str(name), part)


def _of_function(function: types.FunctionType) -> Iterator[Part]:
    code = function.__code__
    for name, cell in zip(code.co_freevars, function.__closure__ or (), strict=True):
        if cell != types.CellType():  # it has a value
            yield Part("variable", name, cell.cell_contents)
    names = function.__globals__
    for name in dict.fromkeys(_globals(code)):
        if name in names and not inspect.ismodule(names[name]):
            yield Part("global variable", name, names[name])
    defaults = function.__defaults__ or ()
    parameters = code.co_varnames[: code.co_argcount]
    for name, default in zip(parameters[len(parameters) - len(defaults) :], defaults, strict=True):
        yield Part("default", name, default)
    for name, default in (function.__kwdefaults__ or {}).items():
        yield Part("default", name, default)


def _globals(code: types.CodeType) -> Iterator[str]:
    """Yield names of globals that a function, or one that it defines, reads."""
    for instruction in dis.get_instructions(code):
        if instruction.opname in ("LOAD_GLOBAL", "LOAD_NAME"):
            yield instruction.argval
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield from _globals(constant)
