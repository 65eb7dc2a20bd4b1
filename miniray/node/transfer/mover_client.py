"""The daemon's side of its mover, which starts when large values move, and again if it dies."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import itertools
import logging
import os
import secrets
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

from miniray.common.config import config
from miniray.common.host_port import DaemonAddress
from miniray.node.base.control_socket import Control
from miniray.node.base.tasks import ended
from miniray.node.base.template_client import TemplateGoneError

if TYPE_CHECKING:
    from collections.abc import Callable

    from miniray.node.base.node_config import MoverConfig
    from miniray.node.base.template_client import Helper

logger = logging.getLogger(__name__)


class MoveError(Exception):
    """A value did not come, or only a part of it."""


class MoverDiedError(MoveError):
    """The mover of this node has died; the next value has a new one."""


class Released(Protocol):
    """Callback for the end of an offer."""

    def __call__(self, *, clean: bool) -> object:
        """Handle that nothing more of it is sent.

        Args:
            clean: Whether nobody reads its memory any more. A process that was sent it may
                not have looked at it yet.
        """


class Offer(NamedTuple):
    """What a node needs to get a value from the mover of another one."""

    #: Of that mover.
    address: str
    #: Of the value; good for one time.
    ticket: bytes


@dataclasses.dataclass(eq=False)
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
        """Finish: nothing more is written."""
        if error is None:
            self.ended.set_result(None)
        else:
            self.ended.set_exception(error)
            self.ended.exception()  # it may be that nobody asks

    async def stop(self) -> None:
        """End the transfer; returns when nothing more is written, even if it is cancelled."""
        if not self.ended.done():
            self.send("stop", self.number)
        await ended(self.ended)


class _Process:
    """One mover, for as long as it lives."""

    def __init__(self, helper: Helper, settings: MoverConfig, path: str) -> None:
        self._settings = settings
        self._path = path
        self._control = Control(helper.control, self._received, self.close)
        self._kill = helper.kill
        self._loop = asyncio.get_running_loop()
        self.gone = False
        #: Its address for others; "" if it cannot be reached.
        self.address: asyncio.Future[str] = self._loop.create_future()
        self.moves: dict[int, Move] = {}
        #: What is offered, by ticket.
        self.offers: dict[bytes, Released] = {}
        #: What the mover has not confirmed yet.
        self.unconfirmed: dict[bytes, asyncio.Future[bool]] = {}
        #: How often it was asked whether it is there, and has not answered; runs meanwhile.
        self._asked = 0
        self._patience: asyncio.TimerHandle | None = None
        shown = settings.credentials
        known = shown and (shown.identity.certificate, shown.identity.key, shown.authority)
        self.ask("listen", path, settings.host, known)

    def send(self, *message: Any, fd: int | None = None) -> None:
        """Send the mover a message; closes the descriptor."""
        self._control.send(message, () if fd is None else (fd,), self._cannot_send)

    def _cannot_send(self, error: OSError) -> None:
        if isinstance(error, BrokenPipeError | ConnectionResetError):
            return  # it is gone, which reading says too
        logger.warning("the process that moves large values is out of reach: %s", error)
        self._kill()  # nobody is to wait for an answer to that

    def ask(self, *message: Any, fd: int | None = None) -> None:
        """Send a message that the mover has to answer; kill it if it stops answering.

        Once it is killed nothing writes to the memory of its transfers; their waiters can go on.
        """
        self.send(*message, fd=fd)
        self.send("there?")
        self._asked += 1
        if self._patience is None:
            self._wait()

    def _wait(self) -> None:
        """Wait anew for an answer, if there is one to come."""
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

    def offer(
        self, ticket: bytes, fd: int, size: int, job: int, released: Released
    ) -> asyncio.Future[bool]:
        """Have it offer a value; closes the descriptor. The future says whether it is offered."""
        self.offers[ticket] = released
        confirmed = self.unconfirmed[ticket] = self._loop.create_future()
        self.ask("offer", ticket, size, job, fd=fd)
        return confirmed

    def _received(self, message: Any) -> None:
        kind, *arguments = message
        if kind == "came":
            number, size = arguments
            self.moves[number].came(size)
        elif kind == "ended":
            number, reason = arguments
            self.send("forget", number)
            self.moves.pop(number).end(MoveError(reason) if reason else None)
        elif kind == "offered":
            self._confirm(*arguments, offered=True)
        elif kind == "released":
            ticket, clean = arguments
            self._confirm(ticket, offered=False)
            self.offers.pop(ticket)(clean=clean)
        elif kind == "there":
            self._asked -= 1
            self._wait()
        else:
            self._listens(kind, *arguments)

    def _listens(self, kind: str, what: object) -> None:
        if kind == "failed":
            logger.warning("large values move through the daemon: %s", what)
            self.address.set_result("")
            return
        host = self._settings.advertised_host
        network = f"{f'[{host}]' if ':' in host else host}:{what}" if what else ""
        self.address.set_result(str(DaemonAddress(self._settings.machine, self._path, network)))

    def _confirm(self, ticket: bytes, *, offered: bool) -> None:
        confirmed = self.unconfirmed.pop(ticket, None)
        if confirmed is not None and not confirmed.done():
            confirmed.set_result(offered)

    def close(self) -> None:
        """End the mover, and all transfers and offers."""
        if self.gone:
            return
        self.gone = True
        self._control.close()
        self._wait()
        with contextlib.suppress(FileNotFoundError):
            os.unlink(self._path)
        if not self.address.done():
            self.address.set_result("")
        for move in self.moves.values():
            move.end(MoverDiedError("the mover of this node has died"))
        self.moves.clear()
        for ticket in list(self.unconfirmed):
            self._confirm(ticket, offered=False)
        for released in self.offers.values():
            released(clean=False)
        self.offers.clear()


class MoverClient:
    """Start a mover and use it."""

    def __init__(self, start: Callable[[], Helper], settings: MoverConfig) -> None:
        self._start = start
        self._settings = settings
        self._process: _Process | None = None
        self._starts = itertools.count(1).__next__
        self._numbers = itertools.count(1).__next__

    def table_sizes(self) -> dict[str, int]:
        """Return the size of each table; all are empty when nothing moves."""
        process = self._process
        return {
            "moving here": len(process.moves) if process is not None else 0,
            "offered": len(process.offers) if process is not None else 0,
        }

    def is_busy(self) -> bool:
        """Return whether large values are on their way to or from this node."""
        process = self._process
        return process is not None and bool(process.moves or process.offers)

    def _running(self) -> _Process:
        if self._process is None or self._process.gone:
            path = os.path.join(self._settings.folder, f"mover-{self._starts()}.sock")
            self._process = _Process(self._start(), self._settings, path)
        return self._process

    async def offer(self, fd: int, size: int, job: int, released: Released) -> Offer | None:
        """Let the mover of another node read a value.

        Args:
            fd: Of its memory; stays the caller's.
            size: Of the value.
            job: The number of the transfer that fills it, 0 if it is whole.
            released: Called when it is offered no more, and if it cannot be.

        Returns:
            What the other node needs; None if it has to come through the daemon.
        """
        ticket = secrets.token_bytes(16)
        confirmed: asyncio.Future[bool] | None = None
        try:
            process = self._running()
            address = await asyncio.shield(process.address)
            if address and not process.gone and (not job or job in process.moves):
                confirmed = process.offer(ticket, os.dup(fd), size, job, released)
        except (OSError, TemplateGoneError) as error:
            logger.warning("a large value goes through the daemon: %s", error)
        finally:
            if confirmed is None:
                released(clean=True)
        try:
            # The other node may be there before this node's mover has read what is offered.
            if confirmed is not None and await confirmed:
                return Offer(address, ticket)
        except asyncio.CancelledError:
            self.withdraw(ticket)
            raise
        return None

    def withdraw(self, ticket: bytes) -> None:
        """End an offer; it is released as soon as possible."""
        process = self._process
        if process is not None and ticket in process.offers:
            process.ask("withdraw", ticket)

    def fetch(
        self,
        address: str,
        ticket: bytes,
        fd: int,
        offset: int,
        size: int,
        came: Callable[[int], object],
    ) -> Move:
        """Begin to fill memory with a value that another node offers.

        What comes can be offered to others from here on. Who begins it has to see to its end.

        Args:
            address: Of the other node's mover.
            ticket: Of the value.
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
        process.send("fetch", number, target, ticket, offset, size, fd=copy)
        return move

    def close(self) -> None:
        if self._process is not None:
            self._process.close()
