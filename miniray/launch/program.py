"""The program of a run: started in a process group of its own, and never left behind."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

#: Reads whom it guards, then until this process ends, and kills that: a group, which has a negative
#: number, or a process with all that descends from it. As a program of its own, since nothing else
#: outlives this process when it is killed. Slurm may send it the signals of a step too.
_GUARD = """
end() {
    kill -s STOP "$1"  # until it is killed it starts no other
    for children in /proc/"$1"/task/*/children; do
        list=  # of the caller, if this process has ended meanwhile
        read -r list < "$children"
        for each in $list; do end "$each"; done
    done
    kill -s KILL "$1"
}
trap '' HUP INT TERM
read -r guarded || exit
read -r _
case $guarded in
    -*) kill -s KILL -- "$guarded" ;;
    *) end "$guarded" ;;
esac
"""
#: What shells answer for a program that is not there.
_NOT_FOUND = 127


class ProgramError(OSError):
    """The program cannot be started; ``code`` is what a shell would exit with."""

    code = _NOT_FOUND


class Program:
    """A running program.

    It has a process group of its own, so that a signal reaches its children too, unless it has
    a terminal: that would take it for a program in the background, and let it read nothing.
    If this process is killed, a guard kills the group; at a terminal the program's descendants.

    Args:
        command: The program and its arguments.
        variables: Of its environment, beside those of this process.
        stdin: Whether it gets the standard input of this process.
    """

    def __init__(
        self, command: Sequence[str], variables: Mapping[str, str], *, stdin: bool = True
    ) -> None:
        self._has_group = not (stdin and sys.stdin is not None and sys.stdin.isatty())
        self._guard = _start_guard()
        try:
            self._process = subprocess.Popen(
                command,
                env={**os.environ, **variables},
                stdin=None if stdin else subprocess.DEVNULL,
                start_new_session=self._has_group,
                # It names itself before it is the program, which so never runs without a guard.
                preexec_fn=self._name_guarded,  # noqa: PLW1509
            )
        except OSError as error:
            self._end_guard()
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
        # It is reaped last: until then nothing else can have its number, which the guard knows.
        os.waitid(os.P_PID, self.pid, os.WEXITED | os.WNOWAIT)
        if self._has_group:
            self.send(signal.SIGKILL)
        self._end_guard()
        code = self._process.wait()
        return code if code >= 0 else 128 - code

    def _name_guarded(self) -> None:
        """Tell the guard whom it guards, in the process that becomes the program.

        Other threads of this process may hold locks that nobody releases there: nothing but a
        system call is safe.
        """
        assert self._guard.stdin is not None
        pid = os.getpid()
        os.write(self._guard.stdin.fileno(), b"%d\n" % (-pid if self._has_group else pid))

    def _end_guard(self) -> None:
        self._guard.kill()
        self._guard.communicate()


def _start_guard() -> subprocess.Popen[bytes]:
    return subprocess.Popen(
        ["/bin/sh", "-c", _GUARD, "miniray-guard"],
        stdin=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )
