"""Memory that is being filled from the front, and who waits for more of it."""

from __future__ import annotations

import math
import threading
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable


#: Seconds after which those who wait for more get what is there: who sends nothing is left.
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
        #: Where somebody is to be woken; waking takes as long as copying 100 KB.
        self._wanted = math.inf
        self._ended = False
        self._moved = threading.Condition()

    def came(self, size: int) -> None:
        """So many more bytes are there."""
        self.offset += size
        if self.offset >= self._wanted:
            self.look()

    def end(self) -> None:
        """Nothing more will come."""
        self._ended = True
        self.look()

    def look(self) -> None:
        """Who waits may go on, or has been told to go."""
        with self._moved:
            self._wanted = math.inf  # those who wait on say so again
            self._moved.notify_all()

    def beyond(self, offset: int, step: int, is_over: Callable[[], bool]) -> int:
        """How much is there, once that is ``step`` more than ``offset``, or what comes in a second.

        Args:
            offset: What was read.
            step: Bytes that it is worth to wake for.
            is_over: Whether this reader is to go; see ``look``.

        Raises:
            CutOffError: it is, or nothing more will come.
        """
        woken = True
        with self._moved:
            while not (self._ended or is_over()):
                # Before it is known whether it is there: who fills looks at this after that.
                self._wanted = min(self._wanted, offset + step)
                if self.offset >= offset + (step if woken else 1):
                    break
                woken = self._moved.wait(_LATEST)
            if is_over():
                raise CutOffError("nobody waits for it any more")
            if self.offset <= offset:
                raise CutOffError("its transfer to the node that passes it on ended")
            return self.offset
