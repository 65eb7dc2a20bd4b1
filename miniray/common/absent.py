"""The errors for public names that are not there, Ray's among them."""

from __future__ import annotations

import importlib
import sys
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable, Mapping
    from typing import NoReturn

#: How much of two names is the same, of 1, if one is taken for the other.
_NEARLY = 0.85
#: By module: names of Ray that miniray lacks, with what to do instead.
_OF_RAY: dict[str, Mapping[str, str]] = {}


def absent(
    module: str, name: str, of_ray: Mapping[str, str], known: Iterable[str] = ()
) -> AttributeError:
    """Return the error of a module's ``__getattr__``.

    Args:
        module: Its name.
        name: What was looked up there.
        of_ray: What Ray has there and miniray has not, with what to do instead.
        known: The names that it has: one that is nearly the same was probably meant.
    """
    import difflib

    meant = [] if name in of_ray else difflib.get_close_matches(name, known, 1, _NEARLY)
    text = f"module {module!r} has no attribute {name!r}"
    if meant:
        text += f". Did you mean {meant[0]!r}?"
    return AttributeError((not meant and instead_of(name, of_ray)) or text, name=name)


def instead_of(name: str, of_ray: Mapping[str, str]) -> str | None:
    """Return the text for a name that only Ray has; None if it is not known.

    Args:
        name: The name.
        of_ray: What to do instead, by the name, or by how names begin, as in ``read_*``.
    """
    for known, instead in of_ray.items():
        if name == known or (known.endswith("*") and name.startswith(known[:-1])):
            return f"miniray has no {name!r}: {instead}."
    return None


def lazy(
    module: str,
    homes: Mapping[str, str],
    modules: Collection[str] = (),
    of_ray: Mapping[str, str] = MappingProxyType({}),
) -> tuple[Callable[[str], Any], Callable[[], list[str]]]:
    """Return ``__getattr__`` and ``__dir__`` of a module that loads names when they are first used.

    Args:
        module: Its name.
        homes: The names that it has, and which modules they are in.
        modules: The modules below it that are reached as attributes.
        of_ray: What Ray has there and miniray has not, with what to do instead.
    """

    def get(name: str) -> Any:
        if name in modules:
            return importlib.import_module(f"{module}.{name}")
        if name not in homes:
            raise absent(module, name, of_ray, [*homes, *modules])
        value = getattr(importlib.import_module(homes[name]), name)
        setattr(sys.modules[module], name, value)
        return value

    def names() -> list[str]:
        return sorted({*sys.modules[module].__all__, *modules})

    tell_imports(module, of_ray)
    return get, names


def tell_imports(module: str, of_ray: Mapping[str, str]) -> None:
    """Make imports of these names from a module fail with what to do instead.

    ``from module import name`` and ``import module.name`` would else say only that there is no
    such name: Python drops the text of the error that ``__getattr__`` raises.

    Args:
        module: Its name.
        of_ray: What Ray has there and miniray has not, with what to do instead.
    """
    if not _OF_RAY:
        sys.meta_path.append(_Finder)
    _OF_RAY[module] = of_ray
    # Python queries finders only for what may be a module of a package: one without files will do.
    vars(sys.modules[module]).setdefault("__path__", [])


class _Finder:
    """Called by Python's imports for modules that no other finder has."""

    @staticmethod
    def find_spec(fullname: str, path: Any = None, target: Any = None) -> None:
        """Find no module; raise for one listed as absent."""
        del path, target
        module, _, name = fullname.rpartition(".")
        instead = instead_of(name, _OF_RAY.get(module, {}))
        if instead is not None:
            # Without a name, as Python ignores one of the module that a from-import tries.
            raise ModuleNotFoundError(instead)


class AbsentAttribute:
    """An attribute of Ray's class that ours lacks, with what to do instead."""

    def __init__(self, instead: str) -> None:
        self._instead = instead
        self._name = ""

    def __set_name__(self, owner: type, name: str) -> None:
        self._name = name

    def __get__(self, instance: object, owner: type) -> NoReturn:
        text = f"{owner.__name__} has no {self._name!r} in miniray: {self._instead}."
        raise AttributeError(text, name=self._name, obj=instance)
