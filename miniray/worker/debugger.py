"""``breakpoint()`` in a worker: pdb on a Unix socket, for the terminal of `miniray debug`.

The thread at the breakpoint waits until a process of the same user that holds
the cluster's key attaches; when that terminal goes away, the program goes on. Finding
the waiting breakpoints is the command's business (``cli/debug.py``).
"""

from __future__ import annotations

import itertools
import json
import logging
import os
import pdb
import socket
import sys
import time
from typing import TYPE_CHECKING, Any

from miniray.calls import context
from miniray.common.config import config
from miniray.exceptions import AuthenticationError
from miniray.security.challenge import demand_blocking, require_own_uid

if TYPE_CHECKING:
    import types

logger = logging.getLogger(__name__)

#: A waiting breakpoint listens on a socket of this prefix in the session's socket folder.
SOCKET_PREFIX = "debug-"
#: What a terminal sends to the breakpoint's socket to get the debugger.
ATTACH = b"attach\n"

_numbers = itertools.count(1)


def debug(frame: types.FrameType, folder: str, key: bytes) -> None:
    """Wait for a terminal, then debug a frame from there.

    Args:
        frame: Where ``breakpoint()`` was called.
        folder: The session's folder of sockets.
        key: The cluster's socket key.
    """
    id = f"{os.getpid()}-{next(_numbers)}"
    code = frame.f_code
    print(  # noqa: T201 - the driver's terminal shows it
        f"breakpoint() at {code.co_filename}:{frame.f_lineno} in {code.co_name} waits. "
        f"Attach from a terminal of {socket.gethostname()} with: miniray debug {id}",
        file=sys.stderr,
        flush=True,
    )
    sock = _await_terminal(folder, f"{SOCKET_PREFIX}{id}", key, _describe(frame))
    _RemotePdb(_Terminal(sock), _caller(frame)).set_trace(frame)


def _describe(frame: types.FrameType) -> bytes:
    """Encode what `miniray debug` shows, as a line of JSON."""
    running = context.execution.get()
    facts = {
        "file": frame.f_code.co_filename,
        "line": frame.f_lineno,
        "function": frame.f_code.co_name,
        "task": running.name if running is not None else "",
        "pid": os.getpid(),
        "since": time.time(),
    }
    return json.dumps(facts).encode() + b"\n"


def _await_terminal(folder: str, name: str, key: bytes, description: bytes) -> socket.socket:
    """Listen until a terminal attaches; those that only list breakpoints get the description."""
    path = os.path.join(folder, name)
    unready = os.path.join(folder, f"new-{name}")
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as listener:
        listener.bind(unready)
        listener.listen()
        os.rename(unready, path)  # every process that sees it can connect to it
        try:
            while True:
                sock, _ = listener.accept()
                try:
                    if _wants_to_attach(sock, key, description):
                        return sock
                except (AuthenticationError, OSError) as error:
                    logger.warning("a terminal could not attach to a breakpoint: %s", error)
                sock.close()
        finally:
            os.unlink(path)


def _wants_to_attach(sock: socket.socket, key: bytes, description: bytes) -> bool:
    require_own_uid(sock)
    deadline = time.monotonic() + config().auth_timeout
    demand_blocking(sock, key, deadline)
    sock.settimeout(config().auth_timeout)
    sock.sendall(description)
    said = b""
    while len(said) < len(ATTACH):
        data = sock.recv(len(ATTACH) - len(said))
        if not data:
            return False
        said += data
    sock.settimeout(None)
    return said == ATTACH


def _caller(frame: types.FrameType) -> types.FrameType | None:
    """Find the frame of the worker's own code that called the user's."""
    caller = frame.f_back
    while caller is not None:
        if caller.f_globals.get("__name__", "").startswith("miniray.worker."):
            return caller
        caller = caller.f_back
    return None


class _Terminal:
    """The other end's keyboard and screen; when it is gone, reading returns end of file."""

    encoding = "utf-8"

    def __init__(self, sock: socket.socket) -> None:
        self._sock = sock
        self._lines = sock.makefile("r", encoding="utf-8", errors="replace")

    def readline(self) -> str:
        try:
            return self._lines.readline()
        except OSError:
            return ""

    def write(self, text: str) -> int:
        try:
            self._sock.sendall(text.encode("utf-8", "backslashreplace"))
        except OSError as error:
            logger.debug("a debugger's terminal is gone: %s", error)  # the next read reports it
        return len(text)

    def flush(self) -> None:
        """Do nothing: ``write`` does not buffer."""

    def close(self) -> None:
        self._lines.close()
        self._sock.close()


class _RemotePdb(pdb.Pdb):
    """pdb whose session ends when the program runs freely or the user's function returns."""

    def __init__(self, terminal: _Terminal, caller: types.FrameType | None) -> None:
        streams: Any = terminal
        super().__init__(stdin=streams, stdout=streams, nosigint=True)
        self._terminal = terminal
        self._caller = caller

    def stop_here(self, frame: types.FrameType) -> bool:
        if self._caller is not None and frame is self._caller:
            self.do_detach("")
            return False
        return super().stop_here(frame)

    def set_continue(self) -> None:
        super().set_continue()
        if not self.breaks:
            self._end("The program goes on.")

    def set_quit(self) -> None:
        super().set_quit()
        self._end("The task ends with BdbQuit.")

    def do_detach(self, arg: str) -> bool | None:
        """detach: Let the program go on without a debugger, as Ctrl-D does."""
        self.clear_all_breaks()
        self.set_continue()
        return True

    do_EOF = do_detach  # noqa: N815 - pdb's name

    def _end(self, message: str) -> None:
        self._caller = None
        self.message(message)
        self._terminal.close()
