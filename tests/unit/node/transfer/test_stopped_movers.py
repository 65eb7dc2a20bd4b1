"""Movers that answer nothing are ended, and nothing waits for them for ever."""

from __future__ import annotations

import asyncio
import errno
import marshal
import os
import socket
from typing import TYPE_CHECKING

import pytest
from mover_ends import (
    MIB,
    content,
    with_ends,
    written,
)
from node_ends import End, mover_in_thread, until

from miniray.common.config import config
from miniray.node.base.control_socket import control_pair
from miniray.node.base.node_config import MoverConfig
from miniray.node.base.template_client import Helper
from miniray.node.transfer.mover_client import Move, MoverClient, Opened
from miniray.node.transfer.moving import HELLO

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path


@pytest.fixture(autouse=True)
def _stalls_are_short(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Wait for a mover of a thread, which keeps its connections when it is ended, for 0.2 s."""
    monkeypatch.setenv("MINIRAY_TRANSFER_STALL", "0.2")
    config.cache_clear()
    yield
    config.cache_clear()


class StoppedMovers:
    """Starts movers, of which the first one does nothing."""

    def __init__(self) -> None:
        self.started = 0
        self.killed = 0

    def start(self) -> Helper:
        self.started += 1
        if self.started > 1:
            return mover_in_thread()
        ours, theirs = control_pair()

        def kill() -> None:
            self.killed += 1
            theirs.close()

        return Helper(ours, kill)


@pytest.mark.parametrize("what", ["sends", "receives"])
def test_a_mover_that_is_stopped_is_ended_and_the_value_comes(tmp_path: Path, what: str) -> None:
    data = os.urandom(3 * MIB)
    movers = StoppedMovers()

    async def test(a: End, b: End) -> None:
        number = written(a, data)
        copy = await b.transfers.copy(a.key(number), len(data))
        b.transfers.copied(a.key(number), len(data))
        assert content(copy) == data
        await until(lambda: movers.killed == 1)
        a.store.free(number)
        await until(lambda: not a.store.used)
        assert not any({**a.mover.table_sizes(), **b.mover.table_sizes()}.values())

    starts = (movers.start, mover_in_thread)
    with_ends(tmp_path, test, starts=starts if what == "sends" else starts[::-1])


def test_who_stops_waiting_for_a_mover_that_is_stopped_waits_until_it_is_ended(
    tmp_path: Path,
) -> None:
    movers = StoppedMovers()

    async def test(a: End, b: End) -> None:
        number = written(a, bytes(3 * MIB))
        copying = asyncio.ensure_future(b.transfers.copy(a.key(number), 3 * MIB))
        await until(lambda: b.mover.table_sizes()["moving here"])
        copying.cancel()
        with pytest.raises(asyncio.CancelledError):
            await copying
        assert movers.killed == 1
        assert not b.store.used

    with_ends(tmp_path, test, starts=(mover_in_thread, movers.start))


def test_a_mover_that_is_stopped_after_an_answer_is_ended_for_what_it_was_told_before_that(
    tmp_path: Path,
) -> None:
    ours, theirs = control_pair()

    left_open: list[bool] = []

    async def main() -> None:
        helper = Helper(ours, lambda: theirs.shutdown(socket.SHUT_RDWR))
        with open(os.devnull, "rb") as file:
            opened = Opened(file.fileno(), 1, 0, left_open.append)
            settings = MoverConfig("here", str(tmp_path))
            client = MoverClient(lambda: helper, settings, lambda _key, _node: opened)
            for number in (1, 2):
                client.address()
                theirs.send(marshal.dumps(("open", number, bytes(HELLO.size))))
            theirs.send(marshal.dumps(("there",)))  # to the first look at it
            await until(lambda: left_open)
        assert left_open == [True, True]  # it may have been sent already

    try:
        asyncio.run(asyncio.wait_for(main(), 5))
    finally:
        config.cache_clear()
        theirs.close()


def test_nothing_goes_on_for_who_stops_waiting_while_a_mover_that_is_stopped_is_ended(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    movers = StoppedMovers()

    async def test(a: End, b: End) -> None:
        stopping = asyncio.Event()
        stop = Move.stop

        async def stop_and_tell(move: Move) -> None:
            stopping.set()
            await stop(move)

        monkeypatch.setattr(Move, "stop", stop_and_tell)
        number = written(a, bytes(3 * MIB))
        copying = asyncio.ensure_future(b.transfers.copy(a.key(number), 3 * MIB))
        await stopping.wait()  # nothing came, so that it is to be begun anew
        copying.cancel()
        with pytest.raises(asyncio.CancelledError):
            await copying
        assert movers.killed == movers.started == 1
        assert not b.store.used

    with_ends(tmp_path, test, starts=(mover_in_thread, movers.start))


@pytest.mark.parametrize("message", ["opened", "fetch"])
def test_nobody_waits_for_the_answer_to_what_a_mover_could_not_be_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, message: str
) -> None:
    """The kernel may refuse to pass another descriptor."""
    data = os.urandom(3 * MIB)
    refused: list[str] = []
    send = socket.send_fds

    def send_or_refuse(control: socket.socket, buffers: list[bytes], fds: list[int]) -> int:
        is_control = control.type == socket.SOCK_SEQPACKET
        if is_control and marshal.loads(buffers[0])[0] == message and not refused:
            refused.append(message)
            raise OSError(errno.ETOOMANYREFS, os.strerror(errno.ETOOMANYREFS))
        return send(control, buffers, fds)

    monkeypatch.setattr(socket, "send_fds", send_or_refuse)

    async def test(a: End, b: End) -> None:
        copy = await b.transfers.copy(a.key(written(a, data)), len(data))
        assert content(copy) == data
        assert refused

    with_ends(tmp_path, test)
