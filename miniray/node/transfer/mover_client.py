"""The daemon's side of its mover, which starts when large values move, and again if it dies."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import itertools
import logging
import os
import socket
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple

from miniray.common.config import config
from miniray.common.host_port import DaemonAddress, join_host_port
from miniray.node.base.clients import ended
from miniray.node.base.control_socket import Control
from miniray.node.base.template_client import TemplateGoneError
from miniray.node.store.segments import Key
from miniray.node.transfer.moving import HELLO

if TYPE_CHECKING:
    from collections.abc import Sequence

    from miniray.node.base.node_config import MoverConfig
    from miniray.node.base.template_client import Helper

logger = logging.getLogger(__name__)


class MoveError(Exception):
    """A value did not come, or only a part of it."""


class MoverDiedError(MoveError):
    """The mover of this node has died; the next value has a new one."""


class RefusedError(MoveError):
    """The other node does not have the value in memory."""


class Opened(NamedTuple):
    """A value that the mover may send."""

    #: Of its memory; stays the giver's.
    fd: int
    size: int
    #: The number of the transfer that fills it, 0 if it is whole.
    job: int
    #: Called at the end, with whether a process may still read the memory.
    released: Callable[[bool], object]


#: Opens a value for a node, at the request of its mover; None if it is not in memory here.
Open = Callable[[Key, bytes], Opened | None]


@dataclasses.dataclass(eq=False, repr=False)
class Move:
    """A transfer to this node."""

    #: The mover's number for it.
    number: int
    #: Bytes that are here.
    offset: int
    #: Called with the number of bytes that have come since the last call.
    on_bytes: Callable[[int], object]
    #: Sends the mover a message that it has to answer.
    send: Callable[[str, int], object]

    def __post_init__(self) -> None:
        #: Done when it is whole; with a MoveError if not all of it came.
        self.ended: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def came(self, offset: int) -> None:
        """Record up to which offset the value is here."""
        count, self.offset = offset - self.offset, offset
        if count:
            self.on_bytes(count)

    def end(self, error: MoveError | None) -> None:
        """Finish: the memory is no longer written."""
        if error is None:
            self.ended.set_result(None)
        else:
            self.ended.set_exception(error)
            self.ended.exception()  # it may never be awaited

    async def whole(self) -> None:
        """Wait until all of it is here.

        Raises:
            MoveError: Only a part came, or no bytes for ``transfer_stall`` seconds.
        """
        stall = config().transfer_stall
        while not self.ended.done():
            seen = self.offset
            done, _ = await asyncio.wait({self.ended}, timeout=stall)
            if not done and self.offset == seen:
                raise MoveError(f"nothing came for {stall} s")
        self.ended.result()

    async def stop(self) -> None:
        """End the transfer; return when the memory is no longer written, even if cancelled."""
        if not self.ended.done():
            self.send("stop", self.number)
        await ended(self.ended)


class _Process:
    """One mover, for as long as it lives."""

    def __init__(self, helper: Helper, settings: MoverConfig, path: str, open_value: Open) -> None:
        self._open_value = open_value
        self._path = path
        #: Its address for others.
        self.address, listeners = _listen(settings, path)
        self._control = Control(helper.control, self._received, self.close)
        self._kill = helper.kill
        self._loop = asyncio.get_running_loop()
        self.gone = False
        self.moves: dict[int, Move] = {}
        #: What it sends, and what to call at the end.
        self.sends: dict[int, Callable[[bool], object]] = {}
        #: How many probes it has not answered; runs meanwhile.
        self._asked = 0
        self._patience: asyncio.TimerHandle | None = None
        shown = settings.credentials
        known = shown and (shown.identity.certificate, shown.identity.key, shown.authority)
        self.send("listen", known, fds=[listener.detach() for listener in listeners])

    def send(self, *message: Any, fds: Sequence[int] = ()) -> None:
        """Send the mover a message; closes the descriptors."""
        self._control.send(message, fds, self._cannot_send)

    def _cannot_send(self, error: OSError) -> None:
        logger.warning("the process that moves large values is out of reach: %s", error)
        self._kill()  # its requesters must not wait for an answer

    def ask(self, *message: Any) -> None:
        """Send a message that the mover has to answer; kill it if it stops answering.

        After the kill the memory of its transfers is no longer written; their waiters can go on.
        """
        self.send(*message)
        self.look_alive()

    def look_alive(self) -> None:
        """Kill the mover if it does not answer within ``transfer_stall`` seconds."""
        self.send("there?")
        self._asked += 1
        if self._patience is None:
            self._wait()

    def _wait(self) -> None:
        """Restart the wait for an answer, if one is due."""
        if self._patience is not None:
            self._patience.cancel()
            self._patience = None
        if self._asked and not self.gone:
            limit = config().transfer_stall
            self._patience = self._loop.call_later(limit, self._lose_patience)

    def _lose_patience(self) -> None:
        logger.warning(
            "the process that moves large values has answered nothing for %g s, and is ended",
            config().transfer_stall,
        )
        self._kill()  # then its socket ends

    def _open(self, number: int, hello: bytes) -> None:
        """Answer the mover when another node wants a value of it."""
        writer, segment, home, offset, node_id = HELLO.unpack(hello)
        opened = self._open_value((writer, segment, home), node_id)
        if opened is None:
            self.send("refused", number)
            return
        try:
            fd = os.dup(opened.fd)
        except OSError as error:
            logger.warning("a large value goes through the daemon: %s", error)
            opened.released(False)
            self.send("refused", number)
            return
        self.sends[number] = opened.released
        self.send("opened", number, offset, opened.size, opened.job, fds=[fd])

    def _received(self, message: Any) -> None:
        kind, *arguments = message
        if kind == "came":
            number, size = arguments
            self.moves[number].came(size)
        elif kind == "ended":
            number, reason, refused = arguments
            self.send("forget", number)
            error = RefusedError(reason) if refused else MoveError(reason)
            self.moves.pop(number).end(error if reason else None)
        elif kind == "open":
            self._open(*arguments)
        elif kind == "closed":
            number, clean = arguments
            self.sends.pop(number)(not clean)
        elif kind == "there":
            self._asked -= 1
            self._wait()

    def close(self) -> None:
        """End the mover, and all transfers."""
        if self.gone:
            return
        self.gone = True
        self._control.close()
        self._wait()
        with contextlib.suppress(FileNotFoundError):
            os.unlink(self._path)
        for move in self.moves.values():
            move.end(MoverDiedError("the mover of this node has died"))
        self.moves.clear()
        for released in self.sends.values():
            released(True)
        self.sends.clear()


def _listen(settings: MoverConfig, path: str) -> tuple[str, list[socket.socket]]:
    """Open the sockets for movers of other nodes: of this machine, and of others if there are."""
    plain = socket.socket(socket.AF_UNIX)
    plain.bind(path)
    plain.listen(socket.SOMAXCONN)
    if not (settings.host and settings.credentials):
        return str(DaemonAddress(settings.machine, path)), [plain]
    family = socket.AF_INET6 if ":" in settings.host else socket.AF_INET
    network = socket.create_server((settings.host, 0), family=family)
    _, port, *_ = network.getsockname()
    address = DaemonAddress(settings.machine, path, join_host_port(settings.advertised_host, port))
    return str(address), [plain, network]


class MoverClient:
    """Start a mover and use it."""

    def __init__(
        self, start: Callable[[], Helper], settings: MoverConfig, open_value: Open
    ) -> None:
        self._start = start
        self._settings = settings
        self._open_value = open_value
        self._process: _Process | None = None
        self._starts = itertools.count(1).__next__
        self._numbers = itertools.count(1).__next__

    def table_sizes(self) -> dict[str, int]:
        """Return the size of each table; all are empty without transfers."""
        process = self._process
        return {
            "moving here": len(process.moves) if process is not None else 0,
            "moving away": len(process.sends) if process is not None else 0,
        }

    def is_busy(self) -> bool:
        """Return whether large values are in flight to or from this node."""
        process = self._process
        return process is not None and bool(process.moves or process.sends)

    def _running(self) -> _Process:
        if self._process is None or self._process.gone:
            path = os.path.join(self._settings.folder, f"mover-{self._starts()}.sock")
            helper = self._start()
            try:
                self._process = _Process(helper, self._settings, path, self._open_value)
            except OSError:
                helper.control.close()  # which ends it
                raise
        return self._process

    def address(self) -> str:
        """Return where the movers of other nodes get values; empty if they cannot."""
        try:
            process = self._running()
        except (OSError, TemplateGoneError) as error:
            logger.warning("a large value goes through the daemon: %s", error)
            return ""
        process.look_alive()
        return process.address

    def fetch(
        self,
        address: str,
        hello: bytes,
        fd: int,
        offset: int,
        size: int,
        came: Callable[[int], object],
    ) -> Move:
        """Begin to fill memory with a value that another node has, or is getting.

        What comes can be given to others from here on. The caller has to end the transfer.

        Args:
            address: Of the other node's mover.
            hello: Names the value there, and where to begin.
            fd: Of the memory; stays the caller's.
            offset: What is there already.
            size: Of the value.
            came: Called with the number of bytes that have come since the last call.

        Raises:
            MoveError: it cannot begin.
        """
        target = DaemonAddress.parse(address).target_from(self._settings.machine)
        if not target:
            raise MoveError("its mover cannot be dialled from here")
        try:
            process = self._running()
            copy = os.dup(fd)
        except (OSError, TemplateGoneError) as error:
            raise MoveError(str(error)) from None
        number = self._numbers()
        move = process.moves[number] = Move(number, offset, came, process.ask)
        process.send("fetch", number, target, hello, offset, size, fds=[copy])
        return move

    def close(self) -> None:
        if self._process is not None:
            self._process.close()
