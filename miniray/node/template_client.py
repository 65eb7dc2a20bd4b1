"""The daemon's side of its template: ask for workers, hear how they ended."""

from __future__ import annotations

import asyncio
import collections
import contextlib
import itertools
import logging
import marshal
import os
import signal
import socket
from typing import TYPE_CHECKING, Any

from miniray.node.template import control_pair

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

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
        on_lingers: Callable[[int, list[int]], None],
    ) -> None:
        """Talk to a template.

        Args:
            control: the daemon's end of its socket.
            pid: of the template; 0: it will tell.
            on_exited: called with the pid and wait status of a worker that is gone, with all
                that it had started.
            on_gone: called when the template is gone.
            on_lingers: called with the pid of a worker that has ended, and those of what it
                had started that were killed and are not gone; again whenever these change.
        """
        control.setblocking(False)
        self._control = control
        self.pid = pid
        self._on_exited = on_exited
        self._on_gone = on_gone
        self._on_lingers = on_lingers
        self._numbers = itertools.count(1).__next__
        #: Requests that were not answered, by number.
        self._open: dict[int, asyncio.Future[int]] = {}
        #: What the socket has not taken: number of the fork or 0, message, descriptors.
        self._queue: collections.deque[tuple[int, bytes, list[int]]] = collections.deque()
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
            _close_all((stdout, stderr))
            raise TemplateGoneError("the template process is gone")
        try:
            file = _spec_file(spec)
        except OSError:
            _close_all((stdout, stderr))
            raise
        number = self._numbers()
        future: asyncio.Future[int] = self._loop.create_future()
        self._open[number] = future
        self._send(marshal.dumps(("fork", number)), [stdout, stderr, file], number)
        return await future

    def fork_template(self, preload: list[str]) -> socket.socket:
        """Start a template with more modules; returns the control socket of it.

        Raises:
            TemplateGoneError: this template is gone.
        """
        if self._gone:
            raise TemplateGoneError("the template process is gone")
        ours, theirs = control_pair()
        self._send(marshal.dumps(("template", preload)), [theirs.detach()])
        return ours

    def kill(self, pid: int, number: int = signal.SIGKILL) -> None:
        """Send a signal to a worker, if it still runs."""
        if not self._gone:
            self._send(marshal.dumps(("kill", pid, int(number))), [])

    async def settled(self, template: int) -> None:
        """Wait until nothing is left of a template that was forked from this one and has hung up.

        Its workers fall to this one, which kills them with all that they had started.

        Args:
            template: its pid.

        Raises:
            TemplateGoneError: this template is gone.
        """
        if self._gone:
            raise TemplateGoneError("the template process is gone")
        number = self._numbers()
        future: asyncio.Future[int] = self._loop.create_future()
        self._open[number] = future
        self._send(marshal.dumps(("fence", number, template)), [], number)
        await future

    def _send(self, data: bytes, fds: list[int], number: int = 0) -> None:
        self._queue.append((number, data, fds))
        if len(self._queue) == 1:
            self._flush()

    def _flush(self) -> None:
        fd = self._control.fileno()
        while self._queue:
            number, data, fds = self._queue[0]
            try:
                socket.send_fds(self._control, [data], fds)
            except BlockingIOError:
                self._loop.add_writer(fd, self._flush)
                return
            except OSError as error:
                # If the template is gone, reading reports it, to all others too.
                self._refuse(number, error)
            _close_all(fds)
            self._queue.popleft()
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
            elif message[0] == "lingers":
                self._on_lingers(message[1], message[2])
            elif message[0] == "forked":
                future = self._open.pop(message[1])
                if not future.done():
                    future.set_result(message[2])
            elif message[0] == "settled":
                settled = self._open.pop(message[1])
                if not settled.done():
                    settled.set_result(0)
            elif message[0] == "ready":
                self.pid = message[1]
            elif message[0] == "refused":
                self._refuse(message[1], OSError(f"cannot start a process: {message[2]}"))

    def _refuse(self, number: int, error: Exception) -> None:
        future = self._open.pop(number, None)
        if future is not None and not future.done():
            future.set_exception(error)

    def _lose(self) -> None:
        self.close()
        self._on_gone()

    def close(self) -> None:
        """Hang up: the template ends all its workers and itself."""
        if self._gone:
            return
        self._gone = True
        with contextlib.suppress(OSError):  # it is gone already, or so busy that it cleans up too
            self._control.send(marshal.dumps(("end",)))
        self._loop.remove_reader(self._control.fileno())
        self._loop.remove_writer(self._control.fileno())
        self._control.close()
        for _, _, fds in self._queue:
            _close_all(fds)
        self._queue.clear()
        for number in list(self._open):
            self._refuse(number, TemplateGoneError("the template process is gone"))


def _spec_file(spec: dict[str, Any]) -> int:
    """An open file, without a name, that holds what a worker is told: it fits no message."""
    fd = os.memfd_create("miniray-worker", os.MFD_CLOEXEC)
    with open(fd, "wb", closefd=False) as file:
        file.write(marshal.dumps(spec))
    os.lseek(fd, 0, os.SEEK_SET)
    return fd


def _close_all(fds: Iterable[int]) -> None:
    for fd in fds:
        os.close(fd)
