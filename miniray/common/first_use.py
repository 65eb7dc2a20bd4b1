"""Attaches a process that uses the API without ``init()``. Imports nothing, as all import it."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable

_init: Callable[[], object] | None = None


def start_with(init: Callable[[], object]) -> None:
    """Set what attaches this process, also if another thread does so at this moment."""
    global _init
    _init = init


def attach() -> None:
    """Attach this process."""
    assert _init is not None  # given when miniray was imported
    _init()
