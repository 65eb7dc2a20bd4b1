"""Finds the libraries that ready callbacks need, and says what to install if there are none."""

from __future__ import annotations

import importlib.util
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence


def choose(callback: str, choices: Mapping[str, Sequence[str]], install: str) -> str:
    """The first module of which everything needed is installed; nothing is imported.

    Args:
        callback: Name of the callback's class, for the message.
        choices: For each module, the top-level packages that it needs.
        install: What to give to ``pip install``.

    Raises:
        ImportError: None is there.
    """
    for module, needed in choices.items():
        if all(importlib.util.find_spec(package) is not None for package in needed):
            return module
    raise ImportError(
        f"{callback} needs {' or '.join(choices)}, which is not installed. "
        f"Run `pip install {install}`."
    )
