"""Finds the lines of tracebacks and of Python's fatal errors in what workers write.

Pure: a line in, whether it is part of a trace out. Each stream of a worker has a state of its own.
"""

from __future__ import annotations

import enum
from typing import TYPE_CHECKING, Generic, TypeVar

if TYPE_CHECKING:
    from collections.abc import Hashable

KeyT = TypeVar("KeyT", bound="Hashable")

_TRACEBACK = "Traceback (most recent call last)"
_FATAL = "Fatal Python error: "
#: Between two tracebacks of a chain.
_CHAINED = ("During handling of the above", "The above exception was")
#: How lines of a fatal error begin that are not indented; the last of them is its last line.
_OF_FATAL = ("Current thread", "Thread 0x", "Python runtime state", "Stack (", "Extension modules")
#: So many streams are followed at once.
_MOST = 1000


class _State(enum.Enum):
    FRAMES = enum.auto()  # a traceback whose exception has not come
    ENDED = enum.auto()  # it has; another traceback of its chain may follow
    FATAL = enum.auto()  # a fatal error


class Traces(Generic[KeyT]):
    """The traces of all streams."""

    def __init__(self) -> None:
        self._states: dict[KeyT, _State] = {}

    def is_part(self, key: KeyT, line: str) -> bool:
        """Whether the next line of a stream belongs to a trace."""
        state = self._next(self._states.pop(key, None), line)
        if state is None:
            return False
        self._states[key] = state
        if len(self._states) > _MOST:
            del self._states[next(iter(self._states))]
        return True

    def is_open(self, key: KeyT) -> bool:
        """Whether more of a trace is to come in a stream."""
        return self._states.get(key) in (_State.FRAMES, _State.FATAL)

    @staticmethod
    def _next(state: _State | None, line: str) -> _State | None:
        if line.startswith(_FATAL):
            return _State.FATAL
        if _TRACEBACK in line:
            return _State.FRAMES
        blank = not line or line[0].isspace()
        if state is _State.FATAL:
            if line.startswith(_OF_FATAL[-1]):
                return _State.ENDED
            return _State.FATAL if blank or line.startswith(_OF_FATAL) else None
        if state is _State.FRAMES:
            return _State.FRAMES if blank else _State.ENDED
        if state is _State.ENDED and (blank or line.startswith(_CHAINED)):
            return _State.ENDED
        return None
