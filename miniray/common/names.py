"""What is shown to people: names, addresses, amounts of memory, places in user code."""

from __future__ import annotations

import inspect
import re
import sys
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable
    from types import FrameType

#: Of the environment of a rank's process: its rank.
RANK_VARIABLE = "MINIRAY_TRAIN_RANK"
#: What stands before the host in an address: a user and a password, or a token alone.
_CREDENTIALS = r"(?<=://)(?P<user>[^\s/@:]*)(?P<password>:[^\s/]*)?@"


def without_passwords(text: str) -> str:
    """Leave the passwords and tokens out of the addresses in a text: ``https://me:***@host``."""
    return re.sub(
        _CREDENTIALS, lambda found: f"{found['user']}:***@" if found["password"] else "***@", text
    )


def short_name(name: str) -> str:
    """Cut the functions around it off a qualified name, as Ray: ``main.<locals>.f`` is ``f``."""
    return name.rsplit(".<locals>.", maxsplit=1)[-1]


def printable(text: str) -> str:
    """Return the text with what could steer a terminal, or forge a line, written as an escape.

    Names of actors, resources and groups come from any program of the cluster.
    """
    if text.isprintable():
        return text
    return "".join(
        char if char.isprintable() else char.encode("unicode_escape").decode() for char in text
    )


def module_of(code: Callable[..., object]) -> str:
    """Return the module of a function or class; for ``__main__`` the program's name, as Ray."""
    module = getattr(code, "__module__", None) or ""
    if module != "__main__":
        return module
    functions = vars(code).values() if inspect.isclass(code) else (code,)
    for function in filter(inspect.isfunction, functions):
        written = inspect.unwrap(function)  # what a decorator makes of it may be from anywhere
        if inspect.isfunction(written):
            return inspect.getmodulename(written.__code__.co_filename) or module
    return module


#: Each is 1,024 times the one before.
UNITS = ("B", "KiB", "MiB", "GiB", "TiB")


def format_bytes(amount: float, unit: int | None = None) -> str:
    """Write an amount of memory: ``512 B``, ``1.5 GiB``.

    Args:
        amount: Bytes.
        unit: Which of ``UNITS``; None: the largest of which it is at least one.
    """
    chosen = 0
    while chosen != unit and chosen < len(UNITS) - 1 and (unit is not None or abs(amount) >= 1024):
        amount /= 1024
        chosen += 1
    text = f"{amount:.1f}".removesuffix(".0")
    return f"{text} {UNITS[chosen]}"


#: A put: file, line and function. A result: the name of the task or method.
CallSite = tuple[str, int, str] | str


def user_frame() -> tuple[FrameType, int]:
    """Return the innermost frame that is not miniray's, and its ``stacklevel`` for the caller."""
    frame = sys._getframe(1)
    level = 1
    while frame.f_back is not None:
        module = frame.f_globals.get("__name__", "")
        if not (module == "miniray" or module.startswith("miniray.")):
            break
        frame = frame.f_back
        level += 1
    return frame, level


def user_stacklevel() -> int:
    """Return the ``stacklevel`` with which the caller's warning names user code."""
    _, level = user_frame()
    return level - 1


def call_site() -> tuple[str, int, str]:
    """Return the file, line and function of the innermost frame that is not miniray's."""
    frame, _ = user_frame()
    code = frame.f_code
    return code.co_filename, frame.f_lineno, getattr(code, "co_qualname", code.co_name)


def describe(made: CallSite | None) -> str:
    """Write ``FILE:LINE in FUNCTION``, or what made it; empty if that is not known."""
    if isinstance(made, tuple):
        file, line, function = made
        return f"{file}:{line} in {function}"
    return made or ""
