"""The daemon's side of its template: requests for workers, reports of their ends."""

from __future__ import annotations

import asyncio
import dataclasses
import functools
import itertools
import logging
import signal
from typing import TYPE_CHECKING, Any, NamedTuple

from miniray.node.base.control_socket import Control, close_all, control_pair

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


@dataclasses.dataclass(eq=False, repr=False)
class TemplateClient:
    """One template process.

    Args:
        control: The daemon's end of its socket.
        pid: Of the template; 0: it will report it.
        on_exited: Gets pid and wait status of a worker that is gone with all its children.
        on_gone: Called when the template is gone.
        on_lingers: Gets the pid of a worker that has ended and those of its children that were
            killed and are not gone; repeated now and then.
    """

    control: socket.socket
    pid: int
    on_exited: Callable[[int, int], None]
    on_gone: Callable[[], None]
    on_lingers: Callable[[int, list[int]], None]

    def __post_init__(self) -> None:
        self._socket = Control(self.control, self._received, self._lose)
        #: Whether it has imported its modules and serves.
        self.ready = False
        self._numbers = itertools.count(1).__next__
        #: Open requests, by number.
        self._open: dict[int, asyncio.Future[int]] = {}
        self._gone = False
        self._loop = asyncio.get_running_loop()

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
        self._socket.send(("fork", number), [stdout, stderr, file], refuse)
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
        return Helper(control, functools.partial(self._notify, "kill_helper", number))

    def _start(self, *message: Any) -> socket.socket:
        if self._gone:
            raise TemplateGoneError("the template process is gone")
        ours, theirs = control_pair()
        self._socket.send(message, [theirs.detach()])
        return ours

    def _notify(self, *message: Any) -> None:
        if not self._gone:
            self._socket.send(message)

    def kill(self, pid: int, number: int = signal.SIGKILL) -> None:
        """Send a signal to a worker, if it still runs."""
        self._notify("kill", pid, int(number))

    def ask(self, pid: int) -> None:
        """Send SIGTERM to a worker and its process group; what it leaves is killed by ``kill``."""
        self._notify("ask", pid, int(signal.SIGTERM))

    def _received(self, message: Any) -> None:
        match message:
            case ("exited", pid, status):
                self.on_exited(pid, status)
            case ("lingers", pid, left):
                self.on_lingers(pid, left)
            case ("forked", number, pid):
                future = self._open.pop(number)
                if not future.done():
                    future.set_result(pid)  # its caller has it before the next message names it
            case ("ready", pid):
                self.pid, self.ready = pid, True
            case ("refused", number, reason):
                self._refuse(number, OSError(f"cannot start a process: {reason}"))

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
        self._socket.close(
            ("end",)
        )  # one that does not get that is gone, or cleans up all the same
        for number in list(self._open):
            self._refuse(number, TemplateGoneError("the template process is gone"))
