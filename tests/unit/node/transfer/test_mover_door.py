"""Connections to a mover that do not say what they come for."""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
import ssl
import threading
import time
from typing import TYPE_CHECKING

import pytest
from mover_ends import SIZE, Movers, fetch

from miniray.common.host_port import DaemonAddress
from miniray.node.transfer import moving
from miniray.security.certificates import client_context, make_credentials

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

MEMBER = make_credentials(b"k" * 32)
NETWORK = {"host": "127.0.0.1", "advertised_host": "127.0.0.1", "credentials": MEMBER}


@pytest.fixture
def movers(tmp_path: Path) -> Iterator[Movers]:
    made = Movers(tmp_path)
    yield made
    made.close()


def dial(address: str) -> socket.socket:
    host, _, port = DaemonAddress.parse(address).host_port.rpartition(":")
    return socket.create_connection((host, int(port)), timeout=10)


def hung_up(sock: socket.socket) -> bool:
    with contextlib.suppress(ConnectionError):
        return sock.recv(1) == b""
    return True


def test_strangers_cost_no_threads_and_keep_nobody_out(
    movers: Movers, caplog: pytest.LogCaptureFixture
) -> None:
    async def test() -> None:
        a = movers.add("one", **NETWORK)
        b = movers.add("two", **NETWORK)
        offer = movers.offered(a, movers.memory(os.urandom(SIZE)), SIZE, [])
        before = threading.active_count()
        strangers = [await asyncio.to_thread(dial, offer.address) for _ in range(200)]
        # The first ones have made room for those that came later.
        for stranger in strangers[: 200 - moving.MOST]:
            assert await asyncio.to_thread(hung_up, stranger)
        assert threading.active_count() < before + 20  # asyncio.to_thread has some
        assert await fetch(b, offer, movers.memory(), SIZE) == SIZE
        for stranger in strangers:
            stranger.close()

    movers.run(test())
    told = [line for line in caplog.messages if "127.0.0.1 was refused" in line]
    assert len(told) == 1


@pytest.mark.parametrize("member", [False, True], ids=["a stranger", "a member"])
def test_one_deadline_is_for_the_handshake_and_the_first_words_together(
    movers: Movers, monkeypatch: pytest.MonkeyPatch, member: bool
) -> None:
    monkeypatch.setattr(moving, "HELLO_WITHIN", 0.5)

    def drip(address: str) -> float:
        """Send a byte now and then; returns how long the other end bore it."""
        sock = dial(address)
        if member:
            sock = client_context(MEMBER).wrap_socket(sock, server_hostname="miniray-node")
        begin = time.monotonic()
        sock.settimeout(0.1)
        for _ in range(23):
            with contextlib.suppress(TimeoutError):
                sock.send(b"\x16")
                if hung_up(sock):
                    break
        sock.close()
        return time.monotonic() - begin

    async def test() -> None:
        a = movers.add("one", **NETWORK)
        offer = movers.offered(a, movers.memory(), SIZE, [])
        assert await asyncio.to_thread(drip, offer.address) < 2

    movers.run(test())


def test_one_without_a_certificate_is_refused_and_told_of(
    movers: Movers, caplog: pytest.LogCaptureFixture
) -> None:
    async def test() -> None:
        a = movers.add("one", **NETWORK)
        offer = movers.offered(a, movers.memory(), SIZE, [])

        def knock() -> bool:
            context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
            context.check_hostname = False
            context.verify_mode = ssl.CERT_NONE
            with context.wrap_socket(dial(offer.address)) as sock:
                try:
                    return sock.recv(1) == b""
                except OSError:
                    return True

        assert await asyncio.to_thread(knock)
        while "refused" not in caplog.text:  # the door tells of it after it has hung up
            await asyncio.sleep(0.01)

    movers.run(test())
    assert "127.0.0.1 was refused at the port for large values" in caplog.text
    assert "CERTIFICATE" in caplog.text.upper()
