"""The daemon's side of its template: ask for workers, hear how they ended."""

from __future__ import annotations

import asyncio
import itertools
import logging
import marshal
import os
import signal
import socket
from typing import TYPE_CHECKING, Any

from miniray.node.template import control_pair

if TYPE_CHECKING:
    from collections.abc import Callable

logger = logging.getLogger(__name__)

_MESSAGE_LIMIT = 1 << 20


class TemplateGoneError(RuntimeError):
    """The template process ended; its workers did too."""


class TemplateClient:
    """One template process."""

    def __init__(
        self,
        control: socket.socket,
        pid: int,
        on_exited: Callable[[int, int], None],
        on_gone: Callable[[], None],
    ) -> None:
        control.setblocking(False)
        self._control = control
        self.pid = pid
        self._on_exited = on_exited
        self._on_gone = on_gone
        self._numbers = itertools.count(1).__next__
        self._forks: dict[int, asyncio.Future[int]] = {}
        self._queue: list[tuple[bytes, list[int]]] = []
        self._gone = False
        self._loop = asyncio.get_running_loop()
        self._loop.add_reader(control.fileno(), self._on_readable)

    async def fork(self, spec: dict[str, Any], stdout: int, stderr: int) -> int:
        """Start a worker; returns its pid. The descriptors are closed here in any case.

        Raises:
            TemplateGoneError: the template is gone.
            OSError: the machine has no room for another process.
        """
        if self._gone:
            os.close(stdout)
            os.close(stderr)
            raise TemplateGoneError("the template process is gone")
        number = self._numbers()
        future: asyncio.Future[int] = self._loop.create_future()
        self._forks[number] = future
        self._send(marshal.dumps(("fork", number, spec)), [stdout, stderr])
        return await future

    def fork_template(self, preload: list[str]) -> socket.socket:
        """Start a template with more modules; returns the control socket of it."""
        ours, theirs = control_pair()
        self._send(marshal.dumps(("template", preload)), [theirs.detach()])
        return ours

    def kill(self, pid: int, number: int = signal.SIGKILL) -> None:
        """Send a signal to a worker, if it still runs."""
        if not self._gone:
            self._send(marshal.dumps(("kill", pid, int(number))), [])

    def _send(self, data: bytes, fds: list[int]) -> None:
        self._queue.append((data, fds))
        if len(self._queue) == 1:
            self._flush()

    def _flush(self) -> None:
        fd = self._control.fileno()
        while self._queue:
            data, fds = self._queue[0]
            try:
                socket.send_fds(self._control, [data], fds)
            except BlockingIOError:
                self._loop.add_writer(fd, self._flush)
                return
            except OSError:
                pass  # reading reports that it is gone
            for descriptor in fds:
                os.close(descriptor)
            self._queue.pop(0)
        self._loop.remove_writer(fd)

    def _on_readable(self) -> None:
        while True:
            try:
                data = self._control.recv(_MESSAGE_LIMIT)
            except BlockingIOError:
                return
            except OSError:
                data = b""
            if not data:
                self._lose()
                return
            message = marshal.loads(data)
            if message[0] == "exited":
                self._on_exited(message[1], message[2])
            elif message[0] == "forked":
                future = self._forks.pop(message[1])
                if not future.done():
                    future.set_result(message[2])
            elif message[0] == "ready":
                self.pid = message[1]
            elif message[0] == "refused":
                future = self._forks.pop(message[1])
                if not future.done():
                    future.set_exception(OSError(f"cannot start a process: {message[2]}"))

    def _lose(self) -> None:
        if self._gone:
            return
        self._gone = True
        self._loop.remove_reader(self._control.fileno())
        self._loop.remove_writer(self._control.fileno())
        self._control.close()
        for future in self._forks.values():
            if not future.done():
                future.set_exception(TemplateGoneError("the template process is gone"))
        self._forks.clear()
        self._on_gone()

    def close(self) -> None:
        """Hang up: the template ends all its workers and itself."""
        self._gone = True
        self._loop.remove_reader(self._control.fileno())
        self._loop.remove_writer(self._control.fileno())
        self._control.close()
