"""A pipe by which the daemon sees how long memory stays mapped where it gets no word of it.

Children that user code forks have mapped what their parent had, and a driver that has left its
cluster may look at its values on. This process has one end of a pipe, which its children inherit
and never use; the daemon has the other, which ends with the last of them.
"""

from __future__ import annotations

import itertools
import os
import threading
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable

    from miniray.wire.node_link import NodeLink


class Liveness:
    """This process's end of it: another one after each fork. Thread-safe."""

    def __init__(self, link: NodeLink) -> None:
        self._link = link
        self._numbers = itertools.count(1).__next__
        self._views = itertools.count(1).__next__
        #: What is mapped here at present, by a number of its own.
        self._mapped: dict[int, None] = {}
        self._asked = False
        self._left = False
        #: The pipe in hand: its number, 0 if there is none yet, its descriptor, and which file
        #: that is: some programs close all descriptors and have others under the same numbers.
        self._number = 0
        self._fd = -1
        self._file: tuple[int, int] | None = None
        # Held while this process forks: its child must have the pipe that it named before.
        self._lock = threading.RLock()

    def begin(self) -> None:
        """Something is about to be mapped: have a pipe before it is."""
        if not self._asked:
            self._asked = True
            self._ask()

    def _ask(self) -> None:
        number = self._numbers()

        def came(error: Any, _result: Any, fd: int) -> None:
            if error is None:  # else it has no descriptors left, or is gone
                self._take(number, fd)

        self._link.node_request_async("liveness", (number,), came)

    def _take(self, number: int, fd: int) -> None:
        status = os.fstat(fd)
        with self._lock:
            self._close()
            self._number, self._fd, self._file = number, fd, (status.st_dev, status.st_ino)
        if self._left:
            self._look()

    def _close(self) -> None:
        fd, self._fd, self._number = self._fd, -1, 0
        if fd < 0:
            return
        try:
            status = os.fstat(fd)
        except OSError:  # it was closed by user code
            return
        if (status.st_dev, status.st_ino) == self._file:
            os.close(fd)

    # --- views ---------------------------------------------------------------------
    def mapped(self, gone: Callable[[], None]) -> Callable[[], None]:
        """Something was mapped; returns what to call when it is unmapped, which calls ``gone``."""
        view = self._views()
        self._mapped[view] = None

        def unmapped() -> None:
            self._mapped.pop(view, None)
            gone()
            if self._left:
                self._look()

        return unmapped

    def leave(self) -> None:
        """This process leaves its cluster: the pipe ends with what it still looks at."""
        self._left = True
        self._look()

    def _look(self) -> None:
        if not self._mapped:
            with self._lock:
                self._close()

    # --- forks ---------------------------------------------------------------------
    def before_fork(self) -> None:
        """What is mapped now is mapped in the child too, which inherits the pipe in hand."""
        self._lock.acquire()
        self._link.node_notice("forked", self._number)

    def after_fork(self) -> None:
        """In the parent: it has a child, or could not fork. The next one gets another pipe."""
        had_one = self._number != 0
        self._lock.release()
        if had_one:
            self._ask()
