from __future__ import annotations

import contextlib
import socket
import ssl
import threading
import time
from typing import TYPE_CHECKING

import pytest

from miniray.security.certificates import (
    HEAD_NAME,
    NODE_NAME,
    Authority,
    Identity,
    fetch_and_pin,
    make_node_key,
)
from miniray.security.errors import AuthenticationError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path


@pytest.fixture(scope="module")
def authority() -> Authority:
    return Authority.create()


def node_identity(authority: Authority) -> Identity:
    key, public = make_node_key()
    return Identity(authority.sign_node(public, "ab" * 14), key)


def handshake(identity: Identity, trusted: bytes, name: str, tmp_path: Path) -> None:
    """A TLS handshake over a socket pair, verified as a gRPC client verifies."""
    (tmp_path / "cert").write_bytes(identity.certificate)
    (tmp_path / "key").write_bytes(identity.key)
    server_context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    server_context.load_cert_chain(tmp_path / "cert", tmp_path / "key")
    client_context = ssl.create_default_context(cadata=trusted.decode())
    to_server, to_client = ssl.MemoryBIO(), ssl.MemoryBIO()
    server = server_context.wrap_bio(to_server, to_client, server_side=True)
    client = client_context.wrap_bio(to_client, to_server, server_hostname=name)
    for _ in range(4):
        for end in (client, server):
            with contextlib.suppress(ssl.SSLWantReadError):
                end.do_handshake()
    assert client.getpeercert() is not None


def test_the_heads_own_certificate_verifies_against_itself(
    authority: Authority, tmp_path: Path
) -> None:
    handshake(authority.identity, authority.certificate, HEAD_NAME, tmp_path)


def test_a_signed_node_verifies_under_its_role_only(authority: Authority, tmp_path: Path) -> None:
    identity = node_identity(authority)
    handshake(identity, authority.certificate, NODE_NAME, tmp_path)
    with pytest.raises(ssl.SSLCertVerificationError):
        handshake(identity, authority.certificate, HEAD_NAME, tmp_path)


def test_another_authority_does_not_verify(authority: Authority, tmp_path: Path) -> None:
    other = Authority.create()
    with pytest.raises(ssl.SSLCertVerificationError):
        handshake(other.identity, authority.certificate, HEAD_NAME, tmp_path)
    with pytest.raises(ssl.SSLCertVerificationError):
        handshake(node_identity(other), authority.certificate, NODE_NAME, tmp_path)


def test_a_node_cannot_sign_for_others(authority: Authority, tmp_path: Path) -> None:
    from cryptography import x509

    certificate = x509.load_pem_x509_certificate(node_identity(authority).certificate)
    constraints = certificate.extensions.get_extension_for_class(x509.BasicConstraints)
    assert constraints.critical
    assert not constraints.value.ca


def test_a_key_of_another_kind_is_not_signed(authority: Authority) -> None:
    from cryptography.hazmat.primitives import serialization
    from cryptography.hazmat.primitives.asymmetric import ed25519

    public = ed25519.Ed25519PrivateKey.generate().public_key()
    pem = public.public_bytes(
        serialization.Encoding.PEM, serialization.PublicFormat.SubjectPublicKeyInfo
    )
    with pytest.raises(ValueError, match="P-256"):
        authority.sign_node(pem, "00")


def test_a_saved_authority_is_the_same_after_a_restart(
    authority: Authority, tmp_path: Path
) -> None:
    authority.save(tmp_path)
    assert Authority.load(tmp_path) == authority
    assert {path.stat().st_mode & 0o777 for path in tmp_path.iterdir()} == {0o600}
    assert "PRIVATE" not in repr(authority)


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
                    with context.wrap_socket(sock, server_side=True) as tls:
                        tls.recv(1)

        thread = threading.Thread(target=run)
        threads.append(thread)
        thread.start()
        return int(listener.getsockname()[1])

    yield start
    done.set()
    for thread in threads:
        thread.join(10)


def test_the_expected_certificate_is_fetched(
    authority: Authority, serve: Callable[[Identity | None], int]
) -> None:
    port = serve(authority.identity)
    fetched = fetch_and_pin("127.0.0.1", port, authority.fingerprint, 5)
    assert ssl.PEM_cert_to_DER_cert(fetched.decode()) == ssl.PEM_cert_to_DER_cert(
        authority.certificate.decode()
    )


def test_another_certificate_is_refused(
    authority: Authority, serve: Callable[[Identity | None], int]
) -> None:
    port = serve(Authority.create().identity)
    with pytest.raises(AuthenticationError, match=f"127.0.0.1:{port}.*another certificate"):
        fetch_and_pin("127.0.0.1", port, authority.fingerprint, 5)


def test_a_silent_server_ends_the_wait(
    authority: Authority, serve: Callable[[Identity | None], int]
) -> None:
    port = serve(None)
    started = time.monotonic()
    with pytest.raises(TimeoutError, match=rf"127.0.0.1:{port} within 0.2 s"):
        fetch_and_pin("127.0.0.1", port, authority.fingerprint, 0.2)
    assert time.monotonic() - started < 5


def test_a_plain_text_server_is_no_head(authority: Authority) -> None:
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
            fetch_and_pin("127.0.0.1", port, authority.fingerprint, 5)
        thread.join()


def test_a_port_where_nothing_listens_is_named(authority: Authority) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
    with pytest.raises(ConnectionRefusedError, match=f"Nothing listens at 127.0.0.1:{port}"):
        fetch_and_pin("127.0.0.1", port, authority.fingerprint, 5)
