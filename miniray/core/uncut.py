"""Steps of the runtime that a cancel does not cut off: what they have made would be nobody's.

A cancel is a signal whose handler raises in the main thread between any two instructions. It
asks here whether it may; if not, the step raises when it is over. Waits within a step may be
cut off: who waits there knows what to undo.
"""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Any, TypeVar

if TYPE_CHECKING:
    from collections.abc import Callable
    from types import CodeType, FrameType

F = TypeVar("F", bound="Callable[..., Any]")

_steps: set[CodeType] = set()
_waits: set[CodeType] = set()


class Late:
    """Whether a cancel came in the middle of a step."""

    __slots__ = ("came",)

    def __init__(self) -> None:
        self.came = False

    def heed(self) -> None:
        """A step is over: end what was cancelled, if it was a step of the main thread."""
        if threading.get_ident() == threading.main_thread().ident:
            self.came = False
            raise KeyboardInterrupt


late = Late()


def uncut(step: F) -> F:
    """Mark a function that is not cut off; its caller looks at ``late`` after it."""
    _steps.add(step.__code__)
    return step


def cuttable(wait: F) -> F:
    """Mark a function that is, wherever it is called."""
    _waits.add(wait.__code__)
    return wait


def may_cut(frame: FrameType | None) -> bool:
    """Whether an exception may be raised there."""
    while frame is not None:
        if frame.f_code in _waits:
            return True
        if frame.f_code in _steps:
            return False
        frame = frame.f_back
    return True
