"""The error for public names that are not there, Ray's among them."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping


def absent(module: str, name: str, of_ray: Mapping[str, str]) -> AttributeError:
    """The error of a module's ``__getattr__``.

    Args:
        module: Its name.
        name: What was looked up there.
        of_ray: What Ray has there and miniray has not, with what to do instead.
    """
    text = f"module {module!r} has no attribute {name!r}"
    if name in of_ray:
        text = f"miniray has no {name!r}: {of_ray[name]}."
    return AttributeError(text, name=name)
