"""The errors for public names that are not there, Ray's among them."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Mapping

#: By package: what Ray has there and miniray has not, with what to do instead.
_OF_RAY: dict[str, Mapping[str, str]] = {}


def absent(module: str, name: str, of_ray: Mapping[str, str]) -> AttributeError:
    """The error of a module's ``__getattr__``.

    Args:
        module: Its name.
        name: What was looked up there.
        of_ray: What Ray has there and miniray has not, with what to do instead.
    """
    text = f"module {module!r} has no attribute {name!r}"
    if name in of_ray:
        text = _instead(name, of_ray[name])
    return AttributeError(text, name=name)


def tell_imports(package: str, of_ray: Mapping[str, str]) -> None:
    """Let imports of these names from a package fail with what to do instead.

    ``from package import name`` and ``import package.name`` would else say only that there is no
    such name: Python drops the text of the error that ``__getattr__`` raises.

    Args:
        package: Its name; only a package is asked for modules.
        of_ray: What Ray has there and miniray has not, with what to do instead.
    """
    if not _OF_RAY:
        sys.meta_path.append(_Finder)
    _OF_RAY[package] = of_ray


class _Finder:
    """Asked by Python's imports for modules that nobody else has found."""

    @staticmethod
    def find_spec(fullname: str, path: Any = None, target: Any = None) -> None:
        """Find nothing; raise for what is known to be absent."""
        del path, target
        package, _, name = fullname.rpartition(".")
        if name in _OF_RAY.get(package, ()):
            # Without a name, as Python ignores one of the module that a from-import tries.
            raise ModuleNotFoundError(_instead(name, _OF_RAY[package][name]))


def _instead(name: str, instead: str) -> str:
    return f"miniray has no {name!r}: {instead}."
