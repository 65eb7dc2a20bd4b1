"""Starting a node: from the options of a command or of init() to running processes.

A new process becomes the node daemon and forks the template and, for a new cluster, the head; it
answers through a pipe when the node is ready, or with the reason why not.
"""

from __future__ import annotations

import contextlib
import dataclasses
import fcntl
import json
import os
import pickle
import subprocess
import sys
import time
from typing import TYPE_CHECKING, Any

from miniray.common.config import config
from miniray.common.process_state import python_command
from miniray.system.boot_options import BootError, BootOptions, BootResult

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from miniray.system.session import Session

#: Seconds, on a busy machine, until a new interpreter has done its imports and its own timeouts
#: begin: their messages are better than that there was no answer.
_UNTIL_STARTED = 20.0
#: Characters of a line of its log in an error.
_LONGEST_LINE = 500


class _UnexplainedError(BootError):
    """The node did not say why it could not start; its log may."""


def start_limit() -> float:
    """Return the seconds that a node may take to be ready, or to say why it is not.

    Longer than the node itself waits for its head: its own error says more.
    """
    return config().start_timeout + _UNTIL_STARTED


class StartingNode:
    """A node that this process is starting.

    Args:
        options: Options of the node.
        env_vars: Variables of the node and its workers, beside those of this process.
        address_variable: One that has ``address``, if what they start is to attach to it.

    Raises:
        OSError: Its folders could not be made.
    """

    def __init__(
        self,
        options: BootOptions,
        env_vars: Mapping[str, str] | None = None,
        address_variable: str | None = None,
    ) -> None:
        from miniray.system.session import StartingSign, create_session

        self._session = create_session(options.temp_dir)
        #: Of its head, if it has one that listens on a socket of this machine alone.
        self.address = f"unix:{self._session.head_socket}"
        self.session_dir = str(self._session.folder)
        self._sign: StartingSign | None = None
        self._process: subprocess.Popen[bytes] | None = None
        variables = {**(env_vars or {})}
        if address_variable is not None:
            variables[address_variable] = self.address
        try:
            self._sign = StartingSign(self._session)
            self._process, self.answers = _spawn(options, self._session, variables)
        except BaseException:
            self.give_up()
            raise

    def ready(self, meanwhile: Callable[[], object] | None = None) -> StartedNode:
        """Wait until it is ready. ``answers`` is readable when that takes no time any more.

        Args:
            meanwhile: Called while it starts.

        Raises:
            BootError: It could not be started; the text is one line for the user.
            MinirayError: The head refused it.
        """
        assert self._process is not None
        try:
            if meanwhile is not None:
                meanwhile()
            answer = _read_answer(self.answers, start_limit(), self._process)
            if "error" in answer:
                self._process.wait()
                raise pickle.loads(bytes.fromhex(answer["error"]))
        except BaseException as error:
            last_line = self.give_up()
            if isinstance(error, _UnexplainedError):
                why = f" The last line of its log: {last_line}" if last_line else ""
                raise BootError(f"{error}{why}") from None
            raise
        assert self._sign is not None
        self._sign.end()
        return StartedNode(self._process, BootResult(**answer))

    def give_up(self) -> str:
        """Kill it, and remove what it leaves; return the last line of its log."""
        from miniray.system.session import remove_session

        if self._process is not None:
            self._process.kill()
            self._process.wait()
        last_line = _last_line(self._session)
        if self._sign is not None:
            self._sign.end()
        remove_session(self._session, keep_logs=False)
        return last_line


class StartedNode:
    """The process of a node, and what it reported when it was ready."""

    def __init__(self, process: subprocess.Popen[bytes], result: BootResult) -> None:
        self.process = process
        self.result = result


def start_node(options: BootOptions) -> BootResult:
    """Start a node and wait until it is ready.

    Raises:
        BootError: it could not be started; the text is one line for the user.
        MinirayError: the head refused it.
        OSError: its folders could not be made.
    """
    return launch(options).result


def launch(
    options: BootOptions,
    env_vars: Mapping[str, str] | None = None,
    meanwhile: Callable[[], object] | None = None,
) -> StartedNode:
    """Do as ``start_node``, and return the process too, so that its end can be awaited.

    Args:
        options: Options of the node.
        env_vars: Variables of the node and its workers, beside those of this process.
        meanwhile: Called while it starts.
    """
    return StartingNode(options, env_vars).ready(meanwhile)


def _last_line(session: Session) -> str:
    """Return what the node wrote last; empty if it wrote nothing."""
    try:
        text = (session.logs / "node.log").read_text(errors="replace")
    except OSError:
        return ""
    return text.rstrip().split("\n")[-1][:_LONGEST_LINE]


def _spawn(
    options: BootOptions, session: Session, env_vars: Mapping[str, str]
) -> tuple[subprocess.Popen[bytes], int]:
    """Start the new process; returns it and the descriptor of its answer."""
    from miniray.system.session import SESSION_VARIABLE

    read, write = _pipe()
    log = session.logs / "node.log"
    request = json.dumps(
        {
            "options": dataclasses.asdict(options),
            "session": [session.id, str(session.folder), str(session.socket_dir)],
            "answer": write,
        }
    )
    try:
        with log.open("ab") as output:
            process = subprocess.Popen(
                [sys.executable, "-c", python_command("miniray.node.boot")],
                stdin=subprocess.PIPE,
                stdout=output,
                stderr=output,
                pass_fds=(write,),
                start_new_session=True,
                env=_environment({**env_vars, SESSION_VARIABLE: session.id}),
            )
    finally:
        os.close(write)
    assert process.stdin is not None
    with contextlib.suppress(BrokenPipeError), process.stdin as stdin:
        stdin.write(request.encode())
    return process, read


def _environment(variables: Mapping[str, str]) -> dict[str, str]:
    """Add variables to this process's.

    Without the token, which the node gets by a pipe, and the mark of a run: its program is killed.
    """
    from miniray.security.token import TOKEN_FILE_VARIABLE, TOKEN_VARIABLE
    from miniray.system.session import RUN_VARIABLE

    left_out = (TOKEN_VARIABLE, TOKEN_FILE_VARIABLE, RUN_VARIABLE)
    environment = {name: os.environ[name] for name in os.environ if name not in left_out}
    return {**environment, **variables}


def _pipe() -> tuple[int, int]:
    """Make a pipe beside the standard streams, even if these are closed: the child has its own."""
    ends = os.pipe()
    try:
        read, write = (fcntl.fcntl(end, fcntl.F_DUPFD_CLOEXEC, 3) for end in ends)
    finally:
        for end in ends:
            os.close(end)
    return read, write


def _read_answer(fd: int, timeout: float, process: subprocess.Popen[bytes]) -> dict[str, Any]:
    import select

    deadline = time.monotonic() + timeout
    data = b""
    try:
        while True:
            ready, _, _ = select.select([fd], [], [], max(0.0, deadline - time.monotonic()))
            if not ready:
                raise _UnexplainedError(f"The node was not ready within {timeout:g} s.")
            piece = os.read(fd, 1 << 16)
            if not piece:
                break
            data += piece
    finally:
        os.close(fd)
    if not data:
        code = process.wait()
        raise _UnexplainedError(f"The node ended while it started (exit code {code}).")
    answer: dict[str, Any] = json.loads(data)
    return answer
