"""The head's process on the node that started it: its first start, and later ones.

The first head is forked from the node, before any thread runs there, so that it shares the imports.
After it ended, a new interpreter follows on the same port, with the same secret and the same
folder, where it finds what was stored.
"""

from __future__ import annotations

import asyncio
import collections
import contextlib
import json
import logging
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from miniray.common.config import config
from miniray.common.host_port import parse_address
from miniray.common.process_state import python_command
from miniray.node.process_setup import reap, when_exits
from miniray.system.boot_options import BootError

if TYPE_CHECKING:
    from collections.abc import Callable

logger = logging.getLogger(__name__)

#: Heads that may end within ``head_grace`` after they served, before the node gives up.
_MAX_ENDS = 5


class HeadProcess:
    """The head of this node's cluster; ``options`` lack ``ready`` and ``parent_pidfd``."""

    def __init__(self, options: dict[str, Any], logs: Path) -> None:
        self._options = options
        self._logs = logs
        self._answer = -1
        self._ends: collections.deque[float] = collections.deque(maxlen=_MAX_ENDS)
        self._process: subprocess.Popen[bytes] | None = None
        #: 0 once it is reaped.
        self.pid = 0

    # --- the first start ---------------------------------------------------------
    def fork(self, close_in_child: Callable[[], None]) -> None:
        """Fork the head; ``ready`` waits until it serves."""
        read, write = os.pipe2(os.O_CLOEXEC)
        parent = os.pidfd_open(os.getpid())
        pid = os.fork()
        if pid == 0:
            close_in_child()
            os.close(read)
            _run(self._options, write, parent)
        os.close(write)
        os.close(parent)
        self.pid, self._answer = pid, read

    async def ready(self) -> dict[str, Any]:
        """Wait until the head serves; return its ``address`` and ``fingerprint``.

        Raises BootError if it cannot start, or has ended.
        """
        fd, self._answer = self._answer, -1
        try:
            data = await asyncio.get_running_loop().run_in_executor(None, os.read, fd, 1 << 16)
        finally:
            os.close(fd)
        if not data:
            raise BootError(f"The head ended while it started; see {self._logs}/head.log.")
        facts: dict[str, Any] = json.loads(data)
        if "error" in facts:
            raise BootError(facts["error"])
        if self._options["tcp_host"] is not None:
            _, self._options["tcp_port"] = parse_address(facts["address"])
        return facts

    # --- later starts ------------------------------------------------------------
    async def restart(self) -> None:
        """Start a head in the place of one that ended, and others if it cannot serve.

        What they lack, such as disk space, may come: their starts are ever further apart. Raises
        BootError if none serves within ``head_grace``, or if those that do end again and again.
        """
        now, grace = time.monotonic(), config().head_grace
        if len(self._ends) == _MAX_ENDS and now - self._ends[0] < grace:
            raise BootError(f"{_MAX_ENDS} heads have ended within {grace:g} s.")
        self._ends.append(now)
        deadline, pause = now + grace, grace / 60
        while True:
            # If it lives, and has only given up this node, it must not notify the other nodes on
            # its way out that the cluster ends: the next head takes them over.
            await asyncio.to_thread(self.end, 0)
            try:
                self._spawn()
                await self.ready()
                break
            except BootError as error:
                if time.monotonic() + pause > deadline:
                    raise
                logger.warning("%s Another head is started in %g s.", error, pause)
            await asyncio.sleep(pause)
            pause *= 3
        logger.warning("a new head serves the cluster; its process is %d", self.pid)

    def _spawn(self) -> None:
        read, write = os.pipe2(os.O_CLOEXEC)
        parent = os.pidfd_open(os.getpid())
        request = {
            **self._options,
            "port_patience": config().head_grace,
            "secret": self._options["secret"].hex(),
            "session_dir": str(self._options["session_dir"]),
        }
        try:
            process = subprocess.Popen(
                [sys.executable, "-c", python_command("miniray.node.head_process")],
                stdin=subprocess.PIPE,
                pass_fds=(write, parent),
            )
        except OSError as error:
            os.close(read)
            raise BootError(f"The head's process cannot be started: {error.strerror}.") from None
        finally:
            os.close(write)
            os.close(parent)
        assert process.stdin is not None
        # If it has ended already, its missing answer shows it.
        with contextlib.suppress(BrokenPipeError), process.stdin as stdin:
            stdin.write(json.dumps([request, write, parent]).encode())
        self._process, self.pid, self._answer = process, process.pid, read

    # --- the end -----------------------------------------------------------------
    async def ended(self) -> None:
        over = asyncio.Event()
        stop_waiting = when_exits(self.pid, over.set)
        try:
            await over.wait()
        finally:
            stop_waiting()

    def end(self, grace: float) -> None:
        """End the process if it runs, by SIGTERM if it exits within ``grace`` seconds then."""
        pid, self.pid = self.pid, 0
        if not pid:
            return  # it was reaped, and its number may be another process's by now
        with contextlib.suppress(ProcessLookupError):
            if grace > 0:
                os.kill(pid, signal.SIGTERM)
            if not reap(pid, grace):
                os.kill(pid, signal.SIGKILL)
                reap(pid, None)
        if self._process is not None:
            self._process.wait()  # it is reaped already; now its object knows


def _run(options: dict[str, Any], answer: int, parent: int) -> NoReturn:
    from miniray.head.main import HeadOptions, run_head
    from miniray.node.process_setup import return_freed_buffers

    return_freed_buffers()

    def ready(facts: dict[str, Any]) -> None:
        os.write(answer, json.dumps(facts).encode())
        os.close(answer)

    run_head(HeadOptions(**options, ready=ready, parent_pidfd=parent))
    os._exit(0)


def main() -> NoReturn:
    options, answer, parent = json.loads(sys.stdin.buffer.read())
    options["secret"] = bytes.fromhex(options["secret"])
    options["session_dir"] = Path(options["session_dir"])
    _run(options, answer, parent)
