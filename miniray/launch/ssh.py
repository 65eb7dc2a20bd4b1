"""`miniray ssh`: a run on hosts that a user reaches by ssh. Installs nothing, and leaves nothing.

The user's own ssh is run, with their configuration, agent and known hosts: one process per host,
whose standard input is the line that the run on that host lives by.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import math
import os
import shlex
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from miniray.client.init_options import ADDRESS_VARIABLE, JOB_CONFIG_VARIABLE
from miniray.launch.events import DEADLY, ENDING, Events, StoppedError, events
from miniray.launch.lone_host import STREAMS
from miniray.launch.pipe import BEAT
from miniray.launch.program import Program, ProgramError
from miniray.launch.reach import HeadOffer, NotReachedError, first_to_answer
from miniray.security.token import TOKEN_FILE_VARIABLE, TOKEN_VARIABLE

if TYPE_CHECKING:
    from collections.abc import Callable

#: Nothing is asked on a terminal, and a host that is gone is noticed within 15 s. No process of ssh
#: stays for later connections: it would keep this one's output open.
_SSH = (
    *("ssh", "-T", "-o", "BatchMode=yes", "-o", "ControlMaster=no"),
    *("-o", "ServerAliveInterval=5", "-o", "ServerAliveCountMax=3"),
)
#: Seconds that the other hosts may take to end after the first one.
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
    #: Folder here of which the program and its workers have a copy.
    working_dir: str | None = None
    #: The program runs on this machine, and not on the first host.
    here: bool = False
    #: Seconds that it has there to end after SIGTERM; on a host that is one of the arguments.
    grace: float = 30.0

    def __post_init__(self) -> None:
        if not self.hosts:
            raise ValueError("Give the hosts: miniray ssh HOST HOST -- python train.py")
        for host in self.hosts:
            if host.startswith("-") or not host.strip():
                raise ValueError(f"A host is a name for ssh, such as user@host, not {host!r}.")

    def archive(self, index: int) -> bytes:
        """Return the files that one host gets.

        Raises:
            RuntimeEnvSetupError: They are too large or cannot be read.
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
        # in it is this one: a shell without a terminal knows nothing of virtual environments. Not
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
    """
    with events() as seen:
        session = _Session(run, seen, tell)
        try:
            session.connect()
            seen.collect()
            return session.run()
        except StoppedError as error:
            tell(f"The run was {error}.")
            return 128 + error.number
        finally:
            session.end()


@dataclasses.dataclass(eq=False)
class _Host:
    """An ssh process and what is read of it."""

    name: str
    index: int
    process: subprocess.Popen[bytes]
    output: bytes = b""
    errors: bytes = b""
    last_error: str = ""
    #: What has not ended: the process, and the streams that are read.
    open: int = 1

    @property
    def ended(self) -> bool:
        return self.open == 0

    def send(self, message: dict[str, Any] | None = None) -> None:
        """Send a line; without a message, one that says that this end lives."""
        self.write(b"\n" if message is None else json.dumps(message).encode() + b"\n")

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


class _Session:
    """Passes lines between the hosts, and the program's output on."""

    def __init__(self, run: SshRun, seen: Events, tell: Callable[[str], object]) -> None:
        self._run = run
        self._events = seen
        self._tell = tell
        self._asked = 0
        #: What the first host has told the others.
        self._published: dict[str, Any] | None = None
        self._hosts: list[_Host] = []
        #: The program, if that runs here, and its exit code.
        self._program: Program | None = None
        self._code: int | None = None
        #: When that is killed, once it was told to end.
        self._until = math.inf
        #: Has the token for that, has no name, and is read through this process.
        self._token_file = os.memfd_create("token")

    def connect(self) -> None:
        """Reach all hosts, and send the first one the program's folder."""
        for index in range(len(self._run.hosts)):
            self._connect(index)

    @property
    def _first(self) -> _Host:
        return self._hosts[0]

    def run(self) -> int:
        """Wait for the end on all hosts."""
        deadline: float | None = None
        # Also while this process waits to print, as a user reads what there is, page by page.
        signal.signal(signal.SIGALRM, self._beat)
        signal.setitimer(signal.ITIMER_REAL, BEAT, BEAT)
        while self._program is not None or not all(host.ended for host in self._hosts):
            for number in self._events.wait(min(self._until, time.monotonic() + BEAT)):
                self._stop(number)
            if self._program is not None and time.monotonic() >= self._until:
                self._program.send(signal.SIGKILL)
                self._until = math.inf
            if self._first.ended and deadline is None:
                deadline = time.monotonic() + _LAST_SECONDS
                self._close_all()
                if self._program is not None:
                    self._tell("The cluster of the hosts has ended, and so does the program.")
                    self._program.send(signal.SIGTERM)
            if deadline is not None and time.monotonic() > deadline:
                break
        if self._code is not None:
            return self._code
        code = self._first.process.wait()
        return code if code >= 0 else 128 - code

    def _close_all(self) -> None:
        for host in self._hosts:
            host.close()

    def end(self) -> None:
        """End what still runs; the hosts see that the connection is gone."""
        signal.setitimer(signal.ITIMER_REAL, 0)
        if self._program is not None:
            self._program.send(signal.SIGKILL)
            self._program.finish()
        os.close(self._token_file)
        self._close_all()
        for host in self._hosts:
            if host.process.poll() is None:
                host.process.terminate()
            host.process.wait()

    def _beat(self, _number: int, _frame: Any) -> None:
        """Handle SIGALRM."""
        for host in self._hosts:
            host.send()

    def _stop(self, number: int) -> None:
        if self._program is not None:
            self._program.pass_on(number)
            if number in DEADLY:
                self._until = min(self._until, time.monotonic() + self._run.grace)
            return
        self._asked += number in ENDING
        if self._asked <= 1:
            self._first.send({"signal": number})
            return
        self._tell("The connections are cut.")
        for host in self._hosts:
            host.process.kill()

    # --- a program here ------------------------------------------------------------------
    def _begin_here(self) -> None:
        """Run the program, all hosts of which have joined; it attaches from outside."""
        assert self._published is not None
        door = HeadOffer.parse(self._published)
        variables = {}
        if self._run.working_dir is not None:
            environment = {"working_dir": str(Path(self._run.working_dir).absolute())}
            variables[JOB_CONFIG_VARIABLE] = json.dumps({"runtime_env": environment})
        os.environ.pop(TOKEN_VARIABLE, None)  # that of another cluster, which would come first
        os.write(self._token_file, str(door.token).encode())
        variables[TOKEN_FILE_VARIABLE] = f"/proc/{os.getpid()}/fd/{self._token_file}"
        try:
            variables[ADDRESS_VARIABLE] = first_to_answer(door)
            self._program = Program(self._run.command, variables)
            self._events.when_ended(self._program.pid, self._ended_here)
        except NotReachedError as error:
            self._fail_here(1, f"This machine does not reach the hosts, as --here needs: {error}")
        except ProgramError as error:
            self._fail_here(error.code, str(error))

    def _fail_here(self, code: int, why: str) -> None:
        self._tell(why)
        self._code = code
        self._close_all()

    def _ended_here(self) -> None:
        assert self._program is not None
        self._code = self._program.finish()
        self._program, self._until = None, math.inf
        self._close_all()

    # --- one host -----------------------------------------------------------------------
    def _connect(self, index: int) -> None:
        name, archive = self._run.hosts[index], self._run.archive(index)
        process = subprocess.Popen(
            [*_SSH, "--", name, self._run.remote_command(index, archive)],
            bufsize=0,  # a line is one write, which no other one interrupts
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=None if index == 0 else subprocess.PIPE,
            start_new_session=True,  # Ctrl-C is passed on, and does not cut the connection
        )
        host = _Host(name, index, process)
        self._hosts.append(host)
        host.write(archive)
        assert process.stdout is not None
        self._read_from(host, process.stdout.fileno(), lambda data: self._output(host, data))
        if process.stderr is not None:
            self._read_from(host, process.stderr.fileno(), lambda data: self._errors(host, data))
        self._events.when_ended(process.pid, lambda: self._part_ended(host))

    def _read_from(self, host: _Host, descriptor: int, take: Callable[[bytes], None]) -> None:
        def read() -> None:
            if data := os.read(descriptor, 1 << 16):
                take(data)
            else:
                self._events.forget(descriptor)
                self._part_ended(host)

        host.open += 1
        self._events.when_readable(descriptor, read)

    def _output(self, host: _Host, data: bytes) -> None:
        host.output += data
        first = host is self._first
        while not (first and self._published is not None) and b"\n" in host.output:
            line, _, host.output = host.output.partition(b"\n")
            message = _message(line)
            if message is None:
                self._tell(f"{host.name}: {line.decode('utf-8', 'replace')}")
            elif first:
                self._published = message
                for other in self._hosts[1:]:
                    other.send(message)
            else:
                self._first.send(message)
        if first and self._published is not None and host.output:
            if not self._run.here:
                _print(host.output)
            elif self._program is None and self._code is None:
                self._begin_here()
            host.output = b""

    def _errors(self, host: _Host, data: bytes) -> None:
        *lines, host.errors = (host.errors + data).split(b"\n")
        for line in lines:
            text = line.decode("utf-8", "replace")
            if text.strip():
                host.last_error = text.strip()
                self._tell(f"{host.name}: {text}")

    def _part_ended(self, host: _Host) -> None:
        """Note the end of the process or of a stream; after the last, tell why it has failed."""
        host.open -= 1
        if not host.ended or host is self._first:
            return
        code = host.process.wait()
        if code != 0:
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
