"""`miniray ssh`: a run on hosts that a user reaches by ssh. Installs nothing, and leaves no files.

The user's own ssh is run, with their configuration, agent and known hosts: one process per host,
whose standard input keeps the run on that host alive.
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

from miniray.client.init_options import ADDRESS_VARIABLE, JOB_CONFIG_VARIABLE
from miniray.launch.events import ENDING, Events, events
from miniray.launch.lone_host import STREAMS
from miniray.launch.pipe import BEAT
from miniray.launch.program import Program
from miniray.launch.reach import HeadOffer, NotReachedError, first_to_answer
from miniray.security.token import TOKEN_FILE_VARIABLE, TOKEN_VARIABLE

if TYPE_CHECKING:
    from collections.abc import Callable

#: ssh never prompts on a terminal, and a host that is gone is noticed within 15 s. No process of
#: ssh stays for later connections: it would keep this one's output open.
_SSH = (
    *("ssh", "-T", "-o", "BatchMode=yes", "-o", "ControlMaster=no"),
    *("-o", "ServerAliveInterval=5", "-o", "ServerAliveCountMax=3"),
)
#: Seconds that the hosts have to end after the first one.
_LAST_SECONDS = 15.0
#: Runs in the place of a program that runs here: says that all hosts have joined, and stays.
_STAYS = "import signal; print(flush=True); signal.pause()"
#: Runs the program in a copy of a folder that comes by standard input, and its workers too; a
#: signal ends those, and not this shell before it has removed the copy. One line, as not every
#: login shell takes more in quotes.
_IN_A_COPY = (
    'trap : HUP INT TERM; d=$(mktemp -d) && cd "$d" && {unpack} && '
    'export {variable}="{{\\"runtime_env\\": {{\\"working_dir\\": \\"$d\\"}}}}" && {run}; '
    'code=$?; rm -rf "$d"; exit $code'
)


@dataclasses.dataclass(frozen=True)
class SshRun:
    """A run on hosts."""

    hosts: tuple[str, ...]
    command: tuple[str, ...]
    #: Interpreter on the hosts, and arguments of `miniray run` there.
    python: str = sys.executable
    arguments: tuple[str, ...] = ()
    #: Folder here; the program and its workers get a copy.
    working_dir: str | None = None
    #: The program runs on this machine, and not on the first host.
    here: bool = False
    #: Seconds that it has there to end after SIGTERM; on a host that is one of the arguments.
    grace: float = 30.0

    def archive(self, index: int) -> bytes:
        """Return the files that one host gets.

        Raises:
            RuntimeEnvSetupError: The files are too large or cannot be read.
        """
        if self.working_dir is None or self.here or index > 0:
            return b""
        from miniray.runtime_env.packages import pack
        from miniray.runtime_env.scan import scan

        return pack(scan(Path(self.working_dir), ()))

    def remote_command(self, index: int, archive: bytes = b"") -> str:
        """Return the command line for the shell of one host, which gets an archive or none."""
        place = ("--index", str(index), "--nodes", str(len(self.hosts)), "--rendezvous", STREAMS)
        command = (self.python, "-c", _STAYS) if self.here else self.command
        words = (self.python, "-m", "miniray", "run", *place, *self.arguments, "--", *command)
        # The program is looked for where it is here, if there is such a folder there, and `python`
        # in it is this one: a shell without a terminal enters no virtual environment. Not
        # every login shell can assign to a variable in this way; so env does.
        tools, here = shlex.quote(str(Path(self.python).parent)), shlex.quote(str(Path.cwd()))
        path = f'env PATH={tools}:"$PATH" ' if Path(self.python).is_absolute() else ""
        run = f"{path}{shlex.join(words)}"
        if not archive:
            return f"cd {here} 2>/dev/null; exec {run}"
        program = f"from miniray.launch.pipe import unpack_input; unpack_input({len(archive)})"
        unpack = shlex.join((self.python, "-c", program))
        script = _IN_A_COPY.format(unpack=unpack, variable=JOB_CONFIG_VARIABLE, run=run)
        return f"exec sh -c {shlex.quote(script)}"


def run_over_ssh(run: SshRun, tell: Callable[[str], object]) -> int:
    """Run the program; return its exit code, or that of ssh to the first host.

    Raises:
        RuntimeEnvSetupError: Its folder is too large or cannot be read.
        ProgramError, NotReachedError: It runs here, and cannot be started or reach the hosts.
        StoppedError: A signal came before that.
    """
    with events() as seen:
        session = _Session(run, seen, tell)
        try:
            return session.run()
        finally:
            session.end()


@dataclasses.dataclass(eq=False)
class _Host:
    """An ssh process and its output."""

    name: str
    index: int
    process: subprocess.Popen[bytes]
    output: bytes = b""
    last_line: str = ""
    #: What has not ended: the process, and the stream that is read.
    open: int = 2

    def send(self, message: dict[str, Any]) -> None:
        """Send a line."""
        self.write(json.dumps(message).encode() + b"\n")

    def write(self, data: bytes) -> None:
        """Send bytes."""
        assert self.process.stdin is not None
        with contextlib.suppress(OSError, ValueError):  # it has ended; its exit code says why
            while data:
                data = data[self.process.stdin.write(data) :]

    def close(self) -> None:
        """End the run on this host."""
        assert self.process.stdin is not None
        with contextlib.suppress(OSError):
            self.process.stdin.close()


@dataclasses.dataclass(eq=False)
class _Session:
    """Passes lines between the hosts, and the program's output on."""

    _run: SshRun
    _events: Events
    _tell: Callable[[str], object]

    def __post_init__(self) -> None:
        self._asked = 0
        #: The first host's message to the others, and whether all have joined then.
        self._published: dict[str, Any] | None = None
        self._joined = False
        #: When hosts are no longer waited for.
        self._until: float | None = None
        self._hosts: list[_Host] = []
        #: What runs here, if anything.
        self._program: Program | None = None

    @property
    def _first(self) -> _Host:
        return self._hosts[0]

    def run(self) -> int:
        """Reach all hosts, and wait for their ends."""
        for index in range(len(self._run.hosts)):
            self._connect(index)
        self._events.collect()
        # Also while this process waits to print, as a user reads what there is, page by page.
        signal.signal(signal.SIGALRM, self._beat)
        signal.setitimer(signal.ITIMER_REAL, BEAT, BEAT)
        code = self._run_here() if self._run.here else None
        while any(host.open for host in self._hosts):
            if self._until is not None and time.monotonic() >= self._until:
                break
            self._pass_on()
        if code is None:
            code = self._first.process.wait()
        return code if code >= 0 else 128 - code

    def _close_all(self) -> None:
        for host in self._hosts:
            host.close()

    def end(self) -> None:
        """End what still runs; the hosts see that the connection is gone."""
        signal.setitimer(signal.ITIMER_REAL, 0)
        self._close_all()
        for host in self._hosts:
            if host.process.poll() is None:
                host.process.terminate()
            host.process.wait()

    def _beat(self, _number: int, _frame: Any) -> None:
        """Handle SIGALRM: say that this end lives."""
        for host in self._hosts:
            host.write(b"\n")

    def _pass_on(self) -> None:
        """Wait until something happens; the first host gets the signals, if that is one."""
        for number in self._events.wait(self._until):
            self._asked += number in ENDING
            if self._asked <= 1:
                self._first.send({"signal": number})
                continue
            self._tell("The connections are cut.")
            for host in self._hosts:
                host.process.kill()

    def _run_here(self) -> int | None:
        """Run the program once all hosts have joined; None: they have ended before.

        It attaches from outside, and has the token in a file without a name, which is read through
        this process.
        """
        while self._first.open and not self._joined:
            self._pass_on()
        if not self._joined or self._published is None:
            return None
        door = HeadOffer.parse(self._published)
        os.environ.pop(TOKEN_VARIABLE, None)  # that of another cluster, which would come first
        with os.fdopen(os.memfd_create("token"), "wb", buffering=0) as token:
            token.write(str(door.token).encode())
            variables = {TOKEN_FILE_VARIABLE: f"/proc/{os.getpid()}/fd/{token.fileno()}"}
            if self._run.working_dir is not None:
                environment = {"working_dir": str(Path(self._run.working_dir).absolute())}
                variables[JOB_CONFIG_VARIABLE] = json.dumps({"runtime_env": environment})
            try:
                variables[ADDRESS_VARIABLE] = first_to_answer(door)
                self._program = Program(self._run.command, variables)
                return self._program.until_end(self._events, self._run.grace)
            except NotReachedError as error:
                raise NotReachedError(
                    f"This machine does not reach the hosts, as --here needs: {error}"
                ) from None
            finally:
                self._program = None
                self._close_all()

    # --- one host -----------------------------------------------------------------------
    def _connect(self, index: int) -> None:
        name, archive = self._run.hosts[index], self._run.archive(index)
        process = subprocess.Popen(
            [*_SSH, "--", name, self._run.remote_command(index, archive)],
            bufsize=0,  # a line is one write, which no other one interrupts
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=None if index == 0 else subprocess.STDOUT,
            start_new_session=True,  # Ctrl-C is passed on, and does not cut the connection
        )
        host = _Host(name, index, process)
        self._hosts.append(host)
        host.write(archive)
        assert process.stdout is not None
        self._events.when_readable(process.stdout.fileno(), lambda: self._read(host))
        self._events.when_ended(process.pid, lambda: self._part_ended(host))

    def _read(self, host: _Host) -> None:
        """Take what a host prints: lines, and of the first one then the program's output."""
        assert host.process.stdout is not None
        descriptor = host.process.stdout.fileno()
        data = os.read(descriptor, 1 << 16)
        first = host is self._first
        host.output += data
        if not data:
            self._events.forget(descriptor)
            if not (first and self._published is not None):
                host.output += b"\n"  # a last line that the host has not ended is one too
        while not (first and self._published is not None) and b"\n" in host.output:
            line, _, host.output = host.output.partition(b"\n")
            message = _message(line) if first else None
            if message is not None:
                self._published = message
                for other in self._hosts[1:]:
                    other.send(message)
            elif (text := line.decode("utf-8", "replace").rstrip()).strip():
                host.last_line = text.strip()
                self._tell(f"{host.name}: {text}")
        if first and self._published is not None and host.output:
            self._joined = True
            if not self._run.here:
                sys.stdout.buffer.write(host.output)
                sys.stdout.buffer.flush()
            host.output = b""
        if not data:
            self._part_ended(host)

    def _part_ended(self, host: _Host) -> None:
        """Note the end of the process, or of its output; when both have ended, the host has."""
        host.open -= 1
        if host.open:
            return
        if host is self._first:
            self._until = time.monotonic() + _LAST_SECONDS
            self._close_all()
            if self._program is not None:
                self._tell("The cluster of the hosts has ended, and so does the program.")
                self._events.note(signal.SIGTERM)
        elif code := host.process.wait():
            why = f"ssh ended with exit code {code}: {host.last_line}".rstrip(": ")
            self._first.send({"rank": host.index, "host": host.name, "failure": why})


def _message(line: bytes) -> dict[str, Any] | None:
    """Return what a run says in a line; None: the host's shell has printed it as it began."""
    with contextlib.suppress(ValueError):
        found: Any = json.loads(line)
        return found if isinstance(found, dict) else None
    return None
