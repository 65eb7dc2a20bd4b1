"""Names of functions and classes, and addresses, as they are shown to people."""

from __future__ import annotations

import inspect
import re
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable


#: What stands before the host in an address: a user and a password, or a token alone.
_CREDENTIALS = re.compile(r"(?<=://)([^\s/@:]*)(:[^\s/]*)?@")


def without_passwords(text: str) -> str:
    """A text with the passwords and tokens in its addresses left out: ``https://me:***@host``."""
    return _CREDENTIALS.sub(lambda found: f"{found[1]}:***@" if found[2] else "***@", text)


def short_name(name: str) -> str:
    """A qualified name without the functions around it: ``main.<locals>.f`` is ``f``, as in Ray."""
    return name.rpartition(".<locals>.")[2]


def printable(text: str) -> str:
    """The text with what could steer a terminal, or forge a line, written as an escape.

    Names of actors, resources and groups come from any program of the cluster.
    """
    if text.isprintable():
        return text
    return "".join(
        char if char.isprintable() else char.encode("unicode_escape").decode() for char in text
    )


def module_of(code: Callable[..., object]) -> str:
    """The module of a function or class; of a program's own, the program's name, as in Ray."""
    module = getattr(code, "__module__", None) or ""
    if module != "__main__":
        return module
    functions = vars(code).values() if inspect.isclass(code) else (code,)
    for function in filter(inspect.isfunction, functions):
        written = inspect.unwrap(function)  # what a decorator makes of it may be from anywhere
        if inspect.isfunction(written):
            return inspect.getmodulename(written.__code__.co_filename) or module
    return module
