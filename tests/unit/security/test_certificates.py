from __future__ import annotations

import contextlib
import ssl
from typing import TYPE_CHECKING

import pytest

from miniray.security.certificates import (
    HEAD_NAME,
    NODE_NAME,
    Identity,
    load_head_identity,
    make_credentials,
    make_head_identity,
    save_head_identity,
)
from miniray.security.token import JoinToken

if TYPE_CHECKING:
    from pathlib import Path

KEY = JoinToken(bytes(32), b"s" * 32).members_key
OTHER_KEY = JoinToken(bytes(32), b"o" * 32).members_key


def handshake(identity: Identity, trusted: bytes, name: str, tmp_path: Path) -> None:
    """A TLS handshake over a socket pair, verified as a gRPC client verifies."""
    (tmp_path / "cert").write_bytes(identity.certificate)
    (tmp_path / "key").write_bytes(identity.key)
    server_context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    server_context.load_cert_chain(tmp_path / "cert", tmp_path / "key")
    client_context = ssl.create_default_context(cadata=trusted.decode())
    client_context.verify_flags |= ssl.VERIFY_X509_STRICT  # the default since Python 3.13
    to_server, to_client = ssl.MemoryBIO(), ssl.MemoryBIO()
    server = server_context.wrap_bio(to_server, to_client, server_side=True)
    client = client_context.wrap_bio(to_client, to_server, server_hostname=name)
    for _ in range(4):
        for end in (client, server):
            with contextlib.suppress(ssl.SSLWantReadError):
                end.do_handshake()
    assert client.getpeercert() is not None


def test_the_heads_own_certificate_verifies_against_itself(head: Identity, tmp_path: Path) -> None:
    handshake(head, head.certificate, HEAD_NAME, tmp_path)
    with pytest.raises(ssl.SSLCertVerificationError):
        handshake(make_head_identity(), head.certificate, HEAD_NAME, tmp_path)


def test_two_machines_with_the_secret_know_each_other(tmp_path: Path) -> None:
    here, there = make_credentials(KEY), make_credentials(KEY)
    handshake(here.identity, there.authority, NODE_NAME, tmp_path)


def test_a_member_is_known_under_its_role_only(head: Identity, tmp_path: Path) -> None:
    member = make_credentials(KEY)
    with pytest.raises(ssl.SSLCertVerificationError):
        handshake(member.identity, member.authority, HEAD_NAME, tmp_path)
    with pytest.raises(ssl.SSLCertVerificationError):
        handshake(member.identity, head.certificate, HEAD_NAME, tmp_path)


def test_another_clusters_member_is_not_known(tmp_path: Path) -> None:
    ours, other = make_credentials(KEY), make_credentials(OTHER_KEY)
    with pytest.raises(ssl.SSLCertVerificationError):
        handshake(other.identity, ours.authority, NODE_NAME, tmp_path)


def test_a_members_certificate_signs_for_nobody() -> None:
    from cryptography import x509

    certificate = x509.load_pem_x509_certificate(make_credentials(KEY).identity.certificate)
    constraints = certificate.extensions.get_extension_for_class(x509.BasicConstraints)
    assert constraints.critical
    assert not constraints.value.ca


def test_certificates_are_valid_whatever_a_machines_clock_says(head: Identity) -> None:
    from cryptography import x509

    member = make_credentials(KEY)
    for pem in (head.certificate, member.identity.certificate, member.authority):
        certificate = x509.load_pem_x509_certificate(pem)
        assert certificate.not_valid_before_utc.year == 1970
        assert certificate.not_valid_after_utc.year == 9999


def test_the_heads_identity_is_the_same_after_a_restart(head: Identity, tmp_path: Path) -> None:
    save_head_identity(head, tmp_path)
    assert load_head_identity(tmp_path) == head
    assert {path.stat().st_mode & 0o777 for path in tmp_path.iterdir()} == {0o600}
    assert "PRIVATE" not in repr(head)
