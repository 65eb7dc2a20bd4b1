"""The program of a run: started in a process group of its own, waited for, and not left behind."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import signal
import subprocess
import sys
import time
from typing import TYPE_CHECKING

from miniray.launch.events import DEADLY

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from miniray.launch.events import Events

#: What shells answer for a program that is not there.
_NOT_FOUND = 127
#: Seconds between two attempts to end a child, and between two checks of the run.
_BETWEEN_ENDS, _BETWEEN_CHECKS = 0.1, 1.0


class ProgramError(OSError):
    """The program cannot be started; ``code`` is what a shell would exit with."""

    code = _NOT_FOUND


class Program:
    """A running program.

    It has a process group of its own, so that a signal reaches its children too, unless it has
    a terminal: that would take it for a program in the background, and let it read nothing.

    Args:
        command: The program and its arguments.
        variables: Of its environment, beside those of this process.
        stdin: Whether it gets the standard input of this process.

    Raises:
        ProgramError: It cannot be started.
    """

    def __init__(
        self, command: Sequence[str], variables: Mapping[str, str], *, stdin: bool = True
    ) -> None:
        self._has_group = not (stdin and sys.stdin is not None and sys.stdin.isatty())
        try:
            self._process = subprocess.Popen(
                command,
                env={**os.environ, **variables},
                stdin=None if stdin else subprocess.DEVNULL,
                start_new_session=self._has_group,
            )
        except OSError as error:
            raise ProgramError(f"{command[0]} cannot be started: {error.strerror}.") from None

    @property
    def pid(self) -> int:
        """Of its first process."""
        return self._process.pid

    def send(self, number: int) -> None:
        """Send a signal to the program and its children."""
        with contextlib.suppress(ProcessLookupError):
            if self._has_group:
                os.killpg(self.pid, number)
            else:
                os.kill(self.pid, number)

    def pass_on(self, number: int) -> None:
        """Send a signal that this process got, unless a terminal has sent it to both."""
        if self._has_group or number != signal.SIGINT:
            self.send(number)

    def finish(self) -> int:
        """Wait for its end, kill what it has left in its group, and return the exit code."""
        # It is reaped last: until then no other group can have its number.
        os.waitid(os.P_PID, self.pid, os.WEXITED | os.WNOWAIT)
        if self._has_group:
            self.send(signal.SIGKILL)
        code = self._process.wait()
        return code if code >= 0 else 128 - code


@dataclasses.dataclass(eq=False)
class ChildWait:
    """Waits for the end of a child, which has a grace after a signal that ends the run."""

    _events: Events
    #: Seconds.
    _grace: float
    #: When the child is ended.
    _until: float | None = None

    def until_end(
        self,
        pid: int,
        pass_on: Callable[[int], object],
        end: Callable[[], object],
        check: Callable[[], object] | None = None,
    ) -> None:
        """Return when the child has ended.

        Args:
            pid: Of the child.
            pass_on: Takes the signals that come.
            end: Called when the grace is over.
            check: Called each second until that begins.
        """
        ended: list[bool] = []
        self._events.when_ended(pid, lambda: ended.append(True))
        while True:
            look = None if check is None else time.monotonic() + _BETWEEN_CHECKS
            for number in self._events.wait(look if self._until is None else self._until):
                pass_on(number)
                if number in DEADLY:
                    self.limit()
            if ended:
                return
            if self._until is not None and time.monotonic() >= self._until:
                end()
                self._until += _BETWEEN_ENDS
            elif self._until is None and check is not None:
                check()

    def limit(self) -> None:
        """Begin the grace, if it has not begun."""
        if self._until is None:
            self._until = time.monotonic() + self._grace
