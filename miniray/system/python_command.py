"""How a new interpreter is told to run a module of miniray.

Its users are at work where little may be imported: this module imports nothing of miniray.
"""

from __future__ import annotations

import os

_PACKAGE_PARENT = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))


def python_command(module: str) -> str:
    """What an interpreter is given with ``-c`` to run ``main`` of a module of miniray.

    The current folder is left out of sys.path: a file of the user's may not shadow a module.
    """
    return (
        "import sys; sys.path = [p for p in sys.path if p];"
        f"{_PACKAGE_PARENT!r} in sys.path or sys.path.append({_PACKAGE_PARENT!r});"
        f"from {module} import main; main()"
    )
