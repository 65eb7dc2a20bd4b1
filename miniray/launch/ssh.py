"""`miniray ssh`: a run on hosts that a user reaches by ssh. Installs nothing, and leaves nothing.

The user's own ssh is run, with their configuration, agent and known hosts: one process per host,
whose standard input is the line that the run on that host lives by.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import shlex
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from miniray.launch.events import ENDING, Events, events
from miniray.launch.pipe import BEAT, NAME

if TYPE_CHECKING:
    from collections.abc import Callable

#: Nothing is asked on a terminal, and a host that is gone is noticed within 15 s.
_SSH = (
    *("ssh", "-T", "-o", "BatchMode=yes"),
    *("-o", "ServerAliveInterval=5", "-o", "ServerAliveCountMax=3"),
)
#: Seconds that the other hosts may take to end after the first one.
_LAST_SECONDS = 15.0


@dataclasses.dataclass(frozen=True)
class SshRun:
    """A run on hosts."""

    hosts: tuple[str, ...]
    command: tuple[str, ...]
    #: Interpreter on the hosts, and arguments of `miniray run` there.
    python: str = sys.executable
    arguments: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if not self.hosts:
            raise ValueError("Give the hosts: miniray ssh HOST HOST -- python train.py")
        for host in self.hosts:
            if host.startswith("-") or not host.strip():
                raise ValueError(f"A host is a name for ssh, such as user@host, not {host!r}.")

    def remote_command(self, index: int) -> str:
        """Return the command line for the shell of one host."""
        place = ("--index", str(index), "--nodes", str(len(self.hosts)), "--rendezvous", NAME)
        words = (self.python, "-m", "miniray", "run", *place, *self.arguments, "--", *self.command)
        # The program is looked for where it is here, if there is such a folder there, and `python`
        # in it is this one: a shell without a terminal knows nothing of virtual environments. Not
        # every login shell can assign to a variable in this way; so env does.
        tools, here = shlex.quote(str(Path(self.python).parent)), shlex.quote(str(Path.cwd()))
        path = f'env PATH={tools}:"$PATH" ' if Path(self.python).is_absolute() else ""
        return f"cd {here} 2>/dev/null; exec {path}{shlex.join(words)}"


def run_over_ssh(run: SshRun, tell: Callable[[str], object]) -> int:
    """Run the program; return its exit code, or that of ssh to the first host."""
    with events() as seen:
        seen.collect()
        session = _Session(run, seen, tell)
        try:
            return session.run()
        finally:
            session.end()


class _Host:
    """An ssh process and what is read of it."""

    def __init__(self, name: str, index: int, process: subprocess.Popen[bytes]) -> None:
        self.name = name
        self.index = index
        self.process = process
        self.output = b""
        self.errors = b""
        self.last_error = ""
        #: What reads a piece of each stream that is open; False: there is nothing now.
        self.streams: dict[int, Callable[[], bool]] = {}
        self.ended = False

    def send(self, message: dict[str, Any] | None = None) -> None:
        """Send a line; without a message, one that says that this end lives."""
        assert self.process.stdin is not None
        line = b"\n" if message is None else json.dumps(message).encode() + b"\n"
        with contextlib.suppress(OSError, ValueError):  # it has ended; its exit code says why
            self.process.stdin.write(line)

    def close(self) -> None:
        """End the run on this host."""
        assert self.process.stdin is not None
        with contextlib.suppress(OSError):
            self.process.stdin.close()


class _Session:
    """Passes lines between the hosts, and the program's output on."""

    def __init__(self, run: SshRun, seen: Events, tell: Callable[[str], object]) -> None:
        self._events = seen
        self._tell = tell
        self._asked = 0
        self._published = False
        self._hosts = [self._connect(run, index) for index in range(len(run.hosts))]

    @property
    def _first(self) -> _Host:
        return self._hosts[0]

    def run(self) -> int:
        """Wait for the end on all hosts."""
        deadline: float | None = None
        # Also while this process waits to print, as a user reads what there is, page by page.
        signal.signal(signal.SIGALRM, self._beat)
        signal.setitimer(signal.ITIMER_REAL, BEAT, BEAT)
        while not all(host.ended for host in self._hosts):
            for number in self._events.wait(time.monotonic() + BEAT):
                self._stop(number)
            if self._first.ended and deadline is None:
                deadline = time.monotonic() + _LAST_SECONDS
                for host in self._hosts:
                    host.close()
            if deadline is not None and time.monotonic() > deadline:
                break
        code = self._first.process.wait()
        return code if code >= 0 else 128 - code

    def end(self) -> None:
        """End what still runs; the hosts see that the connection is gone."""
        signal.setitimer(signal.ITIMER_REAL, 0)
        for host in self._hosts:
            host.close()
            if host.process.poll() is None:
                host.process.terminate()
            host.process.wait()

    def _beat(self, _number: int, _frame: Any) -> None:
        """Handle SIGALRM."""
        for host in self._hosts:
            host.send()

    def _stop(self, number: int) -> None:
        self._asked += number in ENDING
        if self._asked <= 1:
            self._first.send({"signal": number})
            return
        self._tell("The connections are cut.")
        for host in self._hosts:
            host.process.kill()

    # --- one host -----------------------------------------------------------------------
    def _connect(self, run: SshRun, index: int) -> _Host:
        name = run.hosts[index]
        process = subprocess.Popen(
            [*_SSH, "--", name, run.remote_command(index)],
            bufsize=0,  # a line is one write, which no other one interrupts
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=None if index == 0 else subprocess.PIPE,
            start_new_session=True,  # Ctrl-C is passed on, and does not cut the connection
        )
        host = _Host(name, index, process)
        assert process.stdout is not None
        self._read_from(host, process.stdout.fileno(), lambda data: self._output(host, data))
        if process.stderr is not None:
            self._read_from(host, process.stderr.fileno(), lambda data: self._errors(host, data))
        self._events.when_ended(process.pid, lambda: self._ended(host))
        return host

    def _read_from(self, host: _Host, descriptor: int, take: Callable[[bytes], None]) -> None:
        os.set_blocking(descriptor, False)

        def read() -> bool:
            try:
                data = os.read(descriptor, 1 << 16)
            except BlockingIOError:
                return False
            if data:
                take(data)
            elif descriptor in host.streams:
                del host.streams[descriptor]
                self._events.forget(descriptor)
            return bool(data)

        host.streams[descriptor] = read
        self._events.when_readable(descriptor, read)

    def _output(self, host: _Host, data: bytes) -> None:
        host.output += data
        first = host is self._first
        while not (first and self._published) and b"\n" in host.output:
            line, _, host.output = host.output.partition(b"\n")
            message = _message(line)
            if message is None:
                self._tell(f"{host.name}: {line.decode('utf-8', 'replace')}")
            elif first:
                self._published = True
                for other in self._hosts[1:]:
                    other.send(message)
            else:
                self._first.send(message)
        if first and self._published:
            _print(host.output)
            host.output = b""

    def _errors(self, host: _Host, data: bytes) -> None:
        *lines, host.errors = (host.errors + data).split(b"\n")
        for line in lines:
            text = line.decode("utf-8", "replace")
            if text.strip():
                host.last_error = text.strip()
                self._tell(f"{host.name}: {text}")

    def _ended(self, host: _Host) -> None:
        host.ended = True
        code = host.process.wait()
        # Not until the end of these: a connection that ssh keeps for later runs has them open.
        for descriptor, read in list(host.streams.items()):
            while read():
                pass
            if descriptor in host.streams:
                self._events.forget(descriptor)
        if host is not self._first and code != 0:
            why = f"ssh ended with exit code {code}: {host.last_error}".rstrip(": ")
            self._first.send({"rank": host.index, "host": host.name, "failure": why})


def _message(line: bytes) -> dict[str, Any] | None:
    """Return what a run says in a line; None: the host's shell has printed it as it began."""
    try:
        found: Any = json.loads(line)
    except ValueError:
        return None
    return found if isinstance(found, dict) else None


def _print(data: bytes) -> None:
    sys.stdout.buffer.write(data)
    sys.stdout.buffer.flush()
