"""Where in user code an object was made."""

from __future__ import annotations

import sys

#: A put: file, line and function. A result: the name of the task or method.
CallSite = tuple[str, int, str] | str


def call_site() -> tuple[str, int, str]:
    """File, line and function of the innermost frame that is not miniray's."""
    frame = sys._getframe(1)
    while True:
        module = frame.f_globals.get("__name__", "")
        outer = frame.f_back
        if outer is None or not (module == "miniray" or module.startswith("miniray.")):
            code = frame.f_code
            return code.co_filename, frame.f_lineno, getattr(code, "co_qualname", code.co_name)
        frame = outer


def describe(made: CallSite | None) -> str:
    """``FILE:LINE in FUNCTION``, or what made it; empty if that is not known."""
    if isinstance(made, tuple):
        file, line, function = made
        return f"{file}:{line} in {function}"
    return made or ""
