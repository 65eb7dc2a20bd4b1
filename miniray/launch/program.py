"""The program of a run: started in a process group of its own, waited for, and not left behind."""

from __future__ import annotations

import contextlib
import functools
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
    """The program cannot be started; ``code`` is the exit code that a shell would give."""

    code = _NOT_FOUND


class Program:
    """A running program.

    It has a process group of its own, so that a signal reaches its children too, unless it has
    a terminal: that would take it for a program in the background, and refuse it input.

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

    def until_end(
        self, events: Events, grace: float, check: Callable[[], object] | None = None
    ) -> int:
        """Wait for its end, kill what it has left in its group, and return the exit code.

        Args:
            events: What comes meanwhile; it gets the signals.
            grace: Seconds that it has to end after one that ends the run.
            check: Called each second until that.
        """
        try:
            kill = functools.partial(self.send, signal.SIGKILL)
            await_child(events, self.pid, grace, self.pass_on, kill, check)
        finally:
            # It is reaped last: until then no other group can have its number.
            self.send(signal.SIGKILL)
            code = self._process.wait()
        return code if code >= 0 else 128 - code


def await_child(
    events: Events,
    pid: int,
    grace: float,
    pass_on: Callable[[int], object],
    end: Callable[[], object],
    check: Callable[[], object] | None = None,
) -> None:
    """Return when a child has ended, which has a grace after a signal that ends the run.

    Args:
        events: What comes meanwhile.
        pid: Of the child.
        grace: Seconds.
        pass_on: Takes the signals.
        end: Called when the grace is over.
        check: Called each second until it begins.
    """
    ended: list[bool] = []
    until: float | None = None
    events.when_ended(pid, lambda: ended.append(True))
    while True:
        look = None if check is None else time.monotonic() + _BETWEEN_CHECKS
        for number in events.wait(look if until is None else until):
            pass_on(number)
            if number in DEADLY and until is None:
                until = time.monotonic() + grace
        if ended:
            return
        if until is not None and time.monotonic() >= until:
            end()
            until += _BETWEEN_ENDS
        elif until is None and check is not None:
            check()
