"""Names of functions and classes as they are shown to people."""

from __future__ import annotations


def short_name(name: str) -> str:
    """A qualified name without the functions around it: ``main.<locals>.f`` is ``f``, as in Ray."""
    return name.rpartition(".<locals>.")[2]
