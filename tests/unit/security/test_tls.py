from __future__ import annotations

import asyncio
import contextlib
import socket
import ssl
import threading
import time
from typing import TYPE_CHECKING

import pytest
from ports import refused_address

from miniray.exceptions import AuthenticationError
from miniray.security import channels
from miniray.security.certificates import (
    Identity,
    make_credentials,
    make_head_identity,
    meet_head,
    members_authority,
)
from miniray.security.token import JoinToken

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

TOKEN = JoinToken(bytes(32), b"s" * 32)
WRONG = JoinToken(bytes(32), b"o" * 32)
MEMBER = make_credentials(TOKEN.members_key)


@pytest.fixture(scope="module")
def head_port(head: Identity) -> Iterator[int]:
    """A port that is served as the head's is."""
    serving: list[int] = []
    ready, done = threading.Event(), threading.Event()

    async def serve() -> None:
        server = channels.server(TOKEN.grpc_secret)
        members = members_authority(TOKEN.members_key)
        serving.append(channels.listen_tcp(server, "127.0.0.1", 0, head, members))
        await server.start()
        ready.set()
        await asyncio.to_thread(done.wait)
        await server.stop(None)

    thread = threading.Thread(target=asyncio.run, args=(serve(),))
    thread.start()
    ready.wait(10)
    yield serving[0]
    done.set()
    thread.join(10)


def test_a_member_is_let_in_and_gets_the_heads_certificate(head: Identity, head_port: int) -> None:
    got = meet_head("127.0.0.1", head_port, head.fingerprint, MEMBER, 5)
    assert ssl.PEM_cert_to_DER_cert(got.decode()) == ssl.PEM_cert_to_DER_cert(
        head.certificate.decode()
    )


def test_a_wrong_secret_is_told_as_such_at_once(head: Identity, head_port: int) -> None:
    wrong = make_credentials(WRONG.members_key)
    started = time.monotonic()
    with pytest.raises(AuthenticationError, match=f"127.0.0.1:{head_port}.*secret is not this"):
        meet_head("127.0.0.1", head_port, head.fingerprint, wrong, 10)
    assert time.monotonic() - started < 5


@pytest.fixture
def serve(tmp_path: Path) -> Iterator[Callable[[Identity | None], int]]:
    """Starts servers that take one connection each: TLS, or silence without an identity."""
    threads: list[threading.Thread] = []
    done = threading.Event()

    def start(identity: Identity | None) -> int:
        listener = socket.create_server(("127.0.0.1", 0))

        def run() -> None:
            with listener:
                sock, _ = listener.accept()
                with sock:
                    if identity is None:
                        done.wait(10)
                        return
                    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
                    (tmp_path / "c").write_bytes(identity.certificate)
                    (tmp_path / "k").write_bytes(identity.key)
                    context.load_cert_chain(tmp_path / "c", tmp_path / "k")
                    tls = context.wrap_socket(sock, server_side=True)
                    with tls, contextlib.suppress(OSError):  # the client hangs up
                        tls.recv(1)

        thread = threading.Thread(target=run)
        threads.append(thread)
        thread.start()
        return int(listener.getsockname()[1])

    yield start
    done.set()
    for thread in threads:
        thread.join(10)


def test_another_certificate_is_refused(
    head: Identity, serve: Callable[[Identity | None], int]
) -> None:
    port = serve(make_head_identity())
    with pytest.raises(AuthenticationError, match=f"127.0.0.1:{port}.*another certificate"):
        meet_head("127.0.0.1", port, head.fingerprint, MEMBER, 5)


def test_a_silent_server_ends_the_wait(
    head: Identity, serve: Callable[[Identity | None], int]
) -> None:
    port = serve(None)
    started = time.monotonic()
    with pytest.raises(TimeoutError, match=rf"127.0.0.1:{port} within 0.2 s"):
        meet_head("127.0.0.1", port, head.fingerprint, MEMBER, 0.2)
    assert time.monotonic() - started < 5


def test_a_plain_text_server_is_no_head(head: Identity) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]

        def greet() -> None:
            sock, _ = listener.accept()
            with sock:
                sock.sendall(b"SSH-2.0-OpenSSH_9.2\r\n")
                sock.recv(4096)

        thread = threading.Thread(target=greet)
        thread.start()
        with pytest.raises(AuthenticationError, match="does not speak TLS"):
            meet_head("127.0.0.1", port, head.fingerprint, MEMBER, 5)
        thread.join()


def test_a_port_where_nothing_listens_is_named(head: Identity) -> None:
    with refused_address() as address:
        port = int(address.rpartition(":")[2])
        with pytest.raises(ConnectionRefusedError, match=f"Nothing listens at {address}"):
            meet_head("127.0.0.1", port, head.fingerprint, MEMBER, 5)
