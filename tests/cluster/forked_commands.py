"""The `miniray` command in processes that are forked from one that has imported it.

Starting an interpreter and importing takes longer than what most commands do. A command is a
process of its own here too, with arguments, environment, session, streams and exit code; only what
Python itself reads at its start is that of the server. ``CommandLine.popen`` and
``CommandLine.shell`` start the installed command.
"""

from __future__ import annotations

import contextlib
import gc
import os
import pickle
import selectors
import signal
import socket
import subprocess
import sys
import sysconfig
import threading
import time
from typing import Any, NamedTuple

#: The path of the installed command, which is that of the forked ones too.
INSTALLED = f"{sysconfig.get_path('scripts')}/miniray"
#: Variables that Python, its libraries' loader, or the choice of an encoding read at the start.
READ_AT_START = ("PYTHON", "LD_", "LC_", "LANG", "PATH")


class _Files(NamedTuple):
    """Descriptors that a request comes with."""

    #: Arguments, environment and folder, pickled.
    request: int
    stdout: int
    stderr: int
    #: Gets a line with the pid, and one with the exit code.
    status: int


class CommandServer:
    """Forks commands in a process that is no child of this one, and ends with this one."""

    def __init__(self) -> None:
        self._control, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        # No test may take it for a process of its own.
        own = ("MINIRAY_", "TMPDIR")
        environment = {name: os.environ[name] for name in os.environ if not name.startswith(own)}
        with theirs:
            subprocess.run(
                [sys.executable, __file__, str(theirs.fileno())],
                pass_fds=[theirs.fileno()],
                env=environment,
                cwd="/",
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                check=True,
            )

    def run(
        self, arguments: tuple[str, ...], environment: dict[str, str], timeout: float
    ) -> subprocess.CompletedProcess[str]:
        """Run a command to its end, as `subprocess.run` does that captures its output."""
        command = [INSTALLED, *arguments]
        request = os.memfd_create("request")
        pipes = [os.pipe() for _ in range(3)]
        with open(request, "r+b") as file:
            pickle.dump((command, environment, os.getcwd()), file)
            file.flush()
            files = _Files(request, *(end for _, end in pipes))
            socket.send_fds(self._control, [b"."], list(files))
        for _, end in pipes:
            os.close(end)
        stdout, stderr, status = _read([begin for begin, _ in pipes], command, timeout)
        return subprocess.CompletedProcess(
            command, int(status.split()[1]), stdout.decode(), stderr.decode()
        )


def _read(pipes: list[int], command: list[str], timeout: float) -> list[bytes]:
    """Read pipes to their ends, of which the last one tells the pid of the command first."""
    deadline = time.monotonic() + timeout
    texts = dict.fromkeys(pipes, b"")
    with contextlib.ExitStack() as opened, selectors.PollSelector() as selector:
        for pipe in pipes:
            opened.callback(os.close, pipe)
            selector.register(pipe, selectors.EVENT_READ)
        while selector.get_map():
            ready = selector.select(max(deadline - time.monotonic(), 0))
            if not ready:
                for pid in texts[pipes[-1]].split()[:1]:
                    with contextlib.suppress(ProcessLookupError):
                        os.kill(int(pid), signal.SIGKILL)
                raise subprocess.TimeoutExpired(command, timeout, *list(texts.values())[:2])
            for key, _ in ready:
                text = os.read(key.fd, 1 << 16)
                texts[key.fd] += text
                if not text:
                    selector.unregister(key.fd)
    return list(texts.values())


_lock = threading.Lock()
_servers: list[CommandServer] = []


def run_forked(
    arguments: tuple[str, ...], environment: dict[str, str], timeout: float
) -> subprocess.CompletedProcess[str]:
    """Run a command to its end, by the server of this process, which the first call starts."""
    with _lock:
        if not _servers:
            _servers.append(CommandServer())
    return _servers[0].run(arguments, environment, timeout)


# --- the server -----------------------------------------------------------------------------------


def _serve(control: socket.socket) -> _Files:
    """Fork a process for each request until the tests end; return in the forked ones."""
    running: dict[int, int] = {}
    selector = selectors.PollSelector()  # without a descriptor of its own
    selector.register(control, selectors.EVENT_READ)
    while True:
        for key, _ in selector.select():
            if key.fd in running:
                _tell_end(key.fd, running.pop(key.fd))
                selector.unregister(key.fd)
                os.close(key.fd)
                continue
            asked, received, _, _ = socket.recv_fds(control, 1, len(_Files._fields))
            if not asked:
                os._exit(0)
            files = _Files(*received)
            pid = os.fork()
            if pid == 0:
                for fd in (*running, *running.values()):
                    os.close(fd)
                return files
            os.write(files.status, b"%d\n" % pid)
            for fd in files[:3]:
                os.close(fd)
            pidfd = os.pidfd_open(pid)
            running[pidfd] = files.status
            selector.register(pidfd, selectors.EVENT_READ)


def _tell_end(pidfd: int, status: int) -> None:
    ended = os.waitid(os.P_PIDFD, pidfd, os.WEXITED)
    assert ended is not None
    code = ended.si_status if ended.si_code == os.CLD_EXITED else -ended.si_status
    with contextlib.suppress(BrokenPipeError):  # nobody waits for it any more
        os.write(status, b"%d\n" % code)
    os.close(status)


def _become(files: _Files) -> None:
    """Make this forked process the one that was asked for."""
    os.setsid()
    with open(files.request, "rb") as file:
        file.seek(0)
        sys.argv, environment, folder = pickle.load(file)
    os.dup2(files.stdout, 1)
    os.dup2(files.stderr, 2)
    for fd in files[1:]:
        os.close(fd)
    os.chdir(folder)
    os.environ.clear()
    os.environ.update(environment)
    sys.path[0] = os.path.dirname(sys.argv[0])


def _main() -> Any:
    control = socket.socket(fileno=int(sys.argv[1]))
    if os.fork() != 0:
        os._exit(0)
    os.setsid()
    from miniray.cli.main import _COMMANDS, main
    from miniray.common.config import config

    for name in _COMMANDS:
        _COMMANDS[name]
    gc.freeze()
    files = _serve(control)
    control.close()
    _become(files)
    config.cache_clear()
    return main()


if __name__ == "__main__":
    sys.exit(_main())
