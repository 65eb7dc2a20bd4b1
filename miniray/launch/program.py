"""The program of a run: started in a process group of its own, and not left behind."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

#: What shells answer for a program that is not there.
_NOT_FOUND = 127


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
