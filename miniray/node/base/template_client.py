"""The daemon's side of its template: requests for workers, reports of their ends."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import functools
import itertools
import logging
import marshal
import signal
from typing import TYPE_CHECKING, Any, NamedTuple

from miniray.node.base.control_socket import MESSAGE_LIMIT, ControlSender, close_all, control_pair

if TYPE_CHECKING:
    import socket
    from collections.abc import Callable

logger = logging.getLogger(__name__)


class TemplateGoneError(RuntimeError):
    """The template process ended; its workers did too."""


class Helper(NamedTuple):
    """A process of the node's own."""

    #: The daemon's end of its control socket, which ends with the process.
    control: socket.socket
    #: Kills it, if it still runs.
    kill: Callable[[], None]


@dataclasses.dataclass(eq=False)
class TemplateClient:
    """One template process.

    Args:
        control: The daemon's end of its socket.
        pid: Of the template; 0: it will report it.
        on_exited: Gets pid and wait status of a worker that is gone with all its children.
        on_gone: Called when the template is gone.
        on_lingers: Gets the pid of a worker that has ended and those of its children that were
            killed and are not gone; again whenever these change.
    """

    control: socket.socket
    pid: int
    on_exited: Callable[[int, int], None]
    on_gone: Callable[[], None]
    on_lingers: Callable[[int, list[int]], None]

    def __post_init__(self) -> None:
        self._sender = ControlSender(self.control)
        #: Whether it has imported its modules and serves.
        self.ready = False
        self._numbers = itertools.count(1).__next__
        #: Requests without an answer, by number.
        self._open: dict[int, asyncio.Future[int]] = {}
        self._gone = False
        self._loop = asyncio.get_running_loop()
        self._loop.add_reader(self.control.fileno(), self._on_readable)

    async def fork(self, file: int, stdout: int, stderr: int) -> int:
        """Start a worker; return its pid. The descriptors are closed here in any case.

        Raises:
            TemplateGoneError: The template is gone.
            OSError: The machine cannot run another process.
        """
        if self._gone:
            close_all((stdout, stderr, file))
            raise TemplateGoneError("the template process is gone")
        number = self._numbers()
        future: asyncio.Future[int] = self._loop.create_future()
        self._open[number] = future
        refuse = functools.partial(self._refuse, number)
        self._sender.send(marshal.dumps(("fork", number)), [stdout, stderr, file], refuse)
        return await future

    def fork_template(self, preload: list[str], *, beside: bool = False) -> socket.socket:
        """Start a template with more modules, imported at a lower priority if ``beside``.

        Returns its control socket; TemplateGoneError if this template is gone.
        """
        return self._start("template", (preload, beside), self._numbers())

    def fork_helper(self, module: str) -> Helper:
        """Run ``serve(control)`` of a module in a new process of the node's own."""
        number = self._numbers()
        control = self._start("helper", module, number)
        return Helper(control, functools.partial(self._kill_helper, number))

    def _start(self, *message: Any) -> socket.socket:
        if self._gone:
            raise TemplateGoneError("the template process is gone")
        ours, theirs = control_pair()
        self._sender.send(marshal.dumps(message), [theirs.detach()])
        return ours

    def _kill_helper(self, number: int) -> None:
        if not self._gone:
            self._sender.send(marshal.dumps(("kill_helper", number)))

    def kill(self, pid: int, number: int = signal.SIGKILL) -> None:
        """Send a signal to a worker, if it still runs."""
        if not self._gone:
            self._sender.send(marshal.dumps(("kill", pid, int(number))))

    def ask(self, pid: int) -> None:
        """Send SIGTERM to a worker and its process group; what it leaves is killed by ``kill``."""
        if not self._gone:
            self._sender.send(marshal.dumps(("ask", pid, int(signal.SIGTERM))))

    async def settled(self, template: int) -> None:
        """Wait until no process is left of a dead template that was forked from this one.

        Its workers fall to this one, which kills them with all their children. Raises
        TemplateGoneError if this template is gone too.
        """
        if self._gone:
            raise TemplateGoneError("the template process is gone")
        number = self._numbers()
        future: asyncio.Future[int] = self._loop.create_future()
        self._open[number] = future
        gone = TemplateGoneError("the template process is gone")
        question = marshal.dumps(("fence", number, template))
        self._sender.send(question, (), lambda _error: self._refuse(number, gone))
        await future

    def _on_readable(self) -> None:
        while True:
            try:
                data = self.control.recv(MESSAGE_LIMIT)
            except BlockingIOError:
                return
            except OSError:
                data = b""
            if not data:
                self._lose()
                return
            match marshal.loads(data):
                case ("exited", pid, status):
                    self.on_exited(pid, status)
                case ("lingers", pid, left):
                    self.on_lingers(pid, left)
                case ("forked", number, pid):
                    self._answer(number, pid)
                    return  # its caller must know the pid before the next message may name it
                case ("settled", number):
                    self._answer(number, 0)
                case ("ready", pid):
                    self.pid, self.ready = pid, True
                case ("refused", number, reason):
                    self._refuse(number, OSError(f"cannot start a process: {reason}"))

    def _answer(self, number: int, result: int) -> None:
        future = self._open.pop(number)
        if not future.done():
            future.set_result(result)

    def _refuse(self, number: int, error: Exception) -> None:
        future = self._open.pop(number, None)
        if future is not None and not future.done():
            future.set_exception(error)

    def _lose(self) -> None:
        self.close()
        self.on_gone()

    def close(self) -> None:
        """Hang up: the template ends all its workers and itself."""
        if self._gone:
            return
        self._gone, self.ready = True, False
        with contextlib.suppress(OSError):  # it is gone, or its socket full: then it cleans up too
            self.control.send(marshal.dumps(("end",)))
        self._loop.remove_reader(self.control.fileno())
        self._sender.close()
        self.control.close()
        for number in list(self._open):
            self._refuse(number, TemplateGoneError("the template process is gone"))
