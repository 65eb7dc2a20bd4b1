"""Memory that is being filled from the front, and who waits for more of it."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable


#: Bytes that come before those who wait for more are woken, which takes as long as copying 100 KB.
STEP = 1 << 20
#: Seconds after which they get what is there, however little: who sends nothing is left.
_LATEST = 1.0


class CutOffError(Exception):
    """The other end left before the end, or the memory is filled no further."""


class Filling:
    """Memory that is being filled, from the front.

    Args:
        offset: Bytes that are there.
    """

    def __init__(self, offset: int) -> None:
        self.offset = offset
        self._told = offset
        self._ended = False
        self._moved = threading.Condition()

    def came(self, size: int) -> None:
        """So many more bytes are there."""
        self.offset += size
        if self.offset - self._told >= STEP:
            with self._moved:
                self._told = self.offset
                self._moved.notify_all()

    def end(self) -> None:
        """Nothing more will come."""
        with self._moved:
            self._ended = True
            self._moved.notify_all()

    def look(self) -> None:
        """Who reads may have been told to go."""
        with self._moved:
            self._moved.notify_all()

    def beyond(self, offset: int, is_over: Callable[[], bool]) -> int:
        """How much is there, once it is more than ``offset``: what comes in a second, or ``STEP``.

        Args:
            offset: What was read.
            is_over: Whether this reader is to go; see ``look``.

        Raises:
            CutOffError: it is, or nothing more will come.
        """
        with self._moved:
            while not (self.offset > offset or self._ended or is_over()):
                self._moved.wait(_LATEST)
            if is_over():
                raise CutOffError("nobody waits for it any more")
            if self.offset <= offset:
                raise CutOffError("its transfer to the node that passes it on ended")
            return self.offset
