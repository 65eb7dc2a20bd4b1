"""How values of a class are pickled, where the class itself cannot say.

Holds for the process that calls it, like the table of ``copyreg``: a worker that returns
such values registers its own.
"""

from __future__ import annotations

import copyreg
import inspect
from typing import TYPE_CHECKING, Any, TypeVar

import cloudpickle

from miniray.system.option_checks import wrong_type

if TYPE_CHECKING:
    from collections.abc import Callable

T = TypeVar("T")

#: Where picklers look: all of them in that of Python, cloudpickle in its own before.
_TABLES: tuple[dict[type, Any], ...] = (
    copyreg.dispatch_table,
    cloudpickle.Pickler.dispatch_table.maps[0],
)
#: What these have for the classes that are registered here, when they are not.
_before: dict[type, list[Any]] = {}


def register_serializer(
    cls: type[T], *, serializer: Callable[[T], Any], deserializer: Callable[[Any], T]
) -> None:
    """Pickle values of a class as something else, in this process.

    Args:
        cls: The class. Its subclasses are not meant.
        serializer: Makes something of a value that can be pickled.
        deserializer: Makes the value again. Pickled along with it.

    Raises:
        TypeError: ``cls`` is not a class, or one of the others is not callable.
    """
    if not inspect.isclass(cls):
        raise wrong_type("cls", cls, "a class")
    for name, function in (("serializer", serializer), ("deserializer", deserializer)):
        if not callable(function):
            raise wrong_type(name, function, "a function of one argument")

    def reduce(value: T) -> tuple[Callable[[Any], T], tuple[Any]]:
        return deserializer, (serializer(value),)

    _before.setdefault(cls, [table.get(cls) for table in _TABLES])
    for table in _TABLES:
        table[cls] = reduce


def deregister_serializer(cls: type) -> None:
    """Pickle values of a class as the class says, again; no effect without a serializer."""
    for table, own in zip(_TABLES, _before.pop(cls, ()), strict=False):
        if own is None:
            table.pop(cls, None)
        else:
            table[cls] = own
