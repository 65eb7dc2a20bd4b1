"""The certificates of a cluster, and Python's TLS with them.

The head makes a certificate for itself; its fingerprint in the join token is all that a joining
machine needs to recognise it. The certificates of all other members are signed by an authority
whose key is derived from the cluster's secret: each holder of the secret can make it, and anyone
else is refused in the TLS handshake. Cryptography is loaded only where keys are made.

Movers, and processes that meet the head for the first time, use Python's TLS: gRPC's own library
exposes neither the other end's certificate nor why it refused.
"""

from __future__ import annotations

import dataclasses
import datetime
import hashlib
import hmac
import os
import socket
import ssl
import time
from typing import TYPE_CHECKING, NamedTuple

from miniray.exceptions import AuthenticationError
from miniray.security.token import (
    JoinToken,
    TokenError,
    make_secret,
    read_token_file,
    write_private,
    write_token_file,
)

if TYPE_CHECKING:
    from pathlib import Path

    from cryptography import x509
    from cryptography.hazmat.primitives.asymmetric import ec

#: Names in the certificates; a client checks the one of the role that it means to reach.
HEAD_NAME = "miniray-head"
NODE_NAME = "miniray-node"
_MEMBERS_NAME = "miniray-members"

#: A certificate is worth what the secret is, for as long as the cluster lives, and the clocks of
#: its machines may differ. RFC 5280 (4.1.2.5) has this end for certificates without one.
_FROM = datetime.datetime(1970, 1, 1, tzinfo=datetime.timezone.utc)
_UNTIL = datetime.datetime(9999, 12, 31, 23, 59, 59, tzinfo=datetime.timezone.utc)
#: Order of the group of P-256 (FIPS 186-4, D.1.2.3).
_P256_ORDER = 0xFFFFFFFF00000000FFFFFFFFFFFFFFFFBCE6FAADA7179E84F3B9CAC2FC632551
_CERTIFICATE_FILE = "head.pem"
_KEY_FILE = "head.key"
_TOKEN_FILE = "token"  # noqa: S105 - a name, not a token


@dataclasses.dataclass
class Identity:
    """What one end of a connection shows to the other: a certificate and the key to it, PEM."""

    certificate: bytes
    key: bytes = dataclasses.field(repr=False)

    @property
    def fingerprint(self) -> bytes:
        """SHA-256 of the certificate's DER form, 32 bytes."""
        der = ssl.PEM_cert_to_DER_cert(self.certificate.decode("ascii"))
        return hashlib.sha256(der).digest()


class Credentials(NamedTuple):
    """The certificate that a member of the cluster presents, and the one that verifies others."""

    #: Signed by the members' authority; good for a server and for a client.
    identity: Identity
    #: Certificate of the members' authority, PEM.
    authority: bytes


def make_head_identity() -> Identity:
    """Make the certificate of a new cluster's head, which is its own authority."""
    key = _new_key()
    name = _name(HEAD_NAME)
    builder = _builder(name, name, key.public_key(), dns_name=HEAD_NAME, authority=True)
    return Identity(_certificate_pem(builder, key), _key_pem(key))


def load_head_identity(folder: Path) -> Identity:
    """Read what `save_head_identity` kept; OSError if there is none."""
    certificate = (folder / _CERTIFICATE_FILE).read_bytes()
    return Identity(certificate, (folder / _KEY_FILE).read_bytes())


def identity_files(folder: Path) -> tuple[Path, Path]:
    """Return where `save_head_identity` keeps the certificate and the key."""
    return folder / _CERTIFICATE_FILE, folder / _KEY_FILE


def save_head_identity(identity: Identity, folder: Path) -> None:
    """Keep the head's identity in 0600 files, so that a restarted head is the same head."""
    write_private(folder / _KEY_FILE, identity.key)
    write_private(folder / _CERTIFICATE_FILE, identity.certificate)


def make_authority(folder: Path) -> JoinToken:
    """Make what a cluster is known by before it starts: three 0600 files, in a 0700 folder.

    ``token`` is for every machine that joins, ``head.pem`` and ``head.key`` for its head.

    Raises:
        FileExistsError: The folder holds one already, which is not replaced.
        OSError: The files cannot be made.
    """
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    if token_in(folder).exists():
        raise FileExistsError(f"{folder} has a token already. Give another folder, or remove it.")
    identity = make_head_identity()
    token = JoinToken(identity.fingerprint, make_secret())
    save_head_identity(identity, folder)
    write_token_file(token_in(folder), token)
    return token


def load_authority(folder: Path) -> tuple[Identity, JoinToken]:
    """Read what `make_authority` wrote.

    Raises:
        TokenError: A file is missing or cannot be read, or they do not belong together.
    """
    token = read_token_file(token_in(folder))
    try:
        identity = load_head_identity(folder)
    except OSError as error:
        raise TokenError(f"The file {error.filename} cannot be read: {error.strerror}.") from None
    if identity.fingerprint != token.fingerprint:
        raise TokenError(
            f"The token in {folder} is for another certificate than the one in {_CERTIFICATE_FILE}."
        )
    return identity, token


def token_in(folder: Path) -> Path:
    """Return where `make_authority` keeps the token."""
    return folder / _TOKEN_FILE


def members_authority(key: bytes) -> bytes:
    """Return the certificate (PEM) of the authority that signs what members show.

    Two calls give certificates of different bytes and the same name and key, so what one process
    signed is valid for all.

    Args:
        key: ``JoinToken.members_key``.
    """
    private = _members_key(key)
    name = _name(_MEMBERS_NAME)
    builder = _builder(name, name, private.public_key(), dns_name=None, authority=True)
    return _certificate_pem(builder, private)


def make_credentials(key: bytes) -> Credentials:
    """Make what a member of the cluster shows, with a new key that stays in this process.

    Args:
        key: ``JoinToken.members_key``.
    """
    from cryptography.x509 import AuthorityKeyIdentifier

    own, signer = _new_key(), _members_key(key)
    issuer = _name(_MEMBERS_NAME)
    builder = _builder(
        _name(NODE_NAME), issuer, own.public_key(), dns_name=NODE_NAME, authority=False
    )
    # RFC 5280 (4.2.1.1) wants it, and so does a strict verifier.
    signed_by = AuthorityKeyIdentifier.from_issuer_public_key(signer.public_key())
    certificate = _certificate_pem(builder.add_extension(signed_by, critical=False), signer)
    return Credentials(Identity(certificate, _key_pem(own)), members_authority(key))


def _members_key(key: bytes) -> ec.EllipticCurvePrivateKey:
    """Return the private key of the members' authority; the remainder's bias is below 2**-31."""
    from cryptography.hazmat.primitives.asymmetric import ec

    scalar = int.from_bytes(key, "big") % (_P256_ORDER - 1) + 1
    return ec.derive_private_key(scalar, ec.SECP256R1())


def _new_key() -> ec.EllipticCurvePrivateKey:
    from cryptography.hazmat.primitives.asymmetric import ec

    return ec.generate_private_key(ec.SECP256R1())


def _name(common_name: str) -> x509.Name:
    from cryptography import x509
    from cryptography.x509.oid import NameOID

    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, common_name)])


def _builder(
    subject: x509.Name,
    issuer: x509.Name,
    public_key: ec.EllipticCurvePublicKey,
    *,
    dns_name: str | None,
    authority: bool,
) -> x509.CertificateBuilder:
    from cryptography import x509
    from cryptography.x509.oid import ExtendedKeyUsageOID

    usage = x509.KeyUsage(
        digital_signature=True,
        content_commitment=False,
        key_encipherment=False,
        data_encipherment=False,
        key_agreement=False,
        key_cert_sign=authority,
        crl_sign=False,
        encipher_only=False,
        decipher_only=False,
    )
    builder = (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(issuer)
        .public_key(public_key)
        .serial_number(x509.random_serial_number())
        .not_valid_before(_FROM)
        .not_valid_after(_UNTIL)
        .add_extension(
            x509.BasicConstraints(ca=authority, path_length=0 if authority else None),
            critical=True,
        )
        .add_extension(usage, critical=True)
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(public_key), critical=False)
    )
    if dns_name is None:
        return builder
    both = [ExtendedKeyUsageOID.SERVER_AUTH, ExtendedKeyUsageOID.CLIENT_AUTH]
    return builder.add_extension(x509.ExtendedKeyUsage(both), critical=False).add_extension(
        x509.SubjectAlternativeName([x509.DNSName(dns_name)]), critical=False
    )


def _certificate_pem(builder: x509.CertificateBuilder, key: ec.EllipticCurvePrivateKey) -> bytes:
    from cryptography.hazmat.primitives import hashes, serialization

    return builder.sign(key, hashes.SHA256()).public_bytes(serialization.Encoding.PEM)


def _key_pem(key: ec.EllipticCurvePrivateKey) -> bytes:
    from cryptography.hazmat.primitives import serialization

    return key.private_bytes(
        serialization.Encoding.PEM,
        serialization.PrivateFormat.PKCS8,
        serialization.NoEncryption(),
    )


def server_context(credentials: Credentials) -> ssl.SSLContext:
    """Return a server that shows a member's certificate, and takes clients that show one."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.verify_mode = ssl.CERT_REQUIRED
    return _of_member(context, credentials)


def client_context(credentials: Credentials) -> ssl.SSLContext:
    """Return a client that shows a member's certificate, and goes to servers that show one."""
    return _of_member(ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT), credentials)


def _of_member(context: ssl.SSLContext, credentials: Credentials) -> ssl.SSLContext:
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    context.load_verify_locations(cadata=credentials.authority.decode("ascii"))
    # OpenSSL reads keys from files only; this one has no name.
    fd = os.memfd_create("miniray-identity", os.MFD_CLOEXEC)
    try:
        os.write(fd, credentials.identity.certificate + credentials.identity.key)
        context.load_cert_chain(f"/proc/self/fd/{fd}")
    finally:
        os.close(fd)
    return context


def meet_head(
    host: str, port: int, expected: bytes, credentials: Credentials, timeout: float
) -> bytes:
    """Fetch the certificate of the head at an address, and see that the head takes this member.

    The secret is not sent. Blocks; a coroutine calls it in a thread.

    Args:
        host: Name or address of the head's machine.
        port: The head's port.
        expected: Fingerprint from the join token.
        credentials: What this process shows, made from the token's secret.
        timeout: Seconds for all of it.

    Returns:
        The head's certificate, PEM.

    Raises:
        AuthenticationError: Another server answers there, or one without TLS, or the head refuses
            these credentials.
        ConnectionError: Nothing listens there.
        TimeoutError: No answer in time.
        OSError: The host is unknown or cannot be reached.
    """
    where = f"{host}:{port}"
    deadline = time.monotonic() + timeout
    try:
        with socket.create_connection((host, port), timeout=timeout) as sock:
            # Never 0, which would mean: do not wait.
            sock.settimeout(max(0.001, deadline - time.monotonic()))
            with _unverified(sock, credentials, where) as tls:
                der = _pinned(tls, expected, where)
                _wait_until_let_in(tls, where)
    except TimeoutError:
        raise TimeoutError(f"No answer from {where} within {timeout:g} s.") from None
    except ConnectionRefusedError:
        raise ConnectionRefusedError(
            f"Nothing listens at {where}. Check the address, and whether the head is running."
        ) from None
    except socket.gaierror:
        raise OSError(f"The host {host!r} is unknown.") from None
    except AuthenticationError:
        raise
    except OSError as error:
        raise OSError(f"{where} cannot be reached: {error.strerror or error}.") from None
    return ssl.DER_cert_to_PEM_cert(der).encode("ascii")


def _unverified(sock: socket.socket, credentials: Credentials, where: str) -> ssl.SSLSocket:
    """Return a TLS context for a server that is not known yet."""
    context = client_context(credentials)
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE  # its fingerprint is compared instead
    context.set_alpn_protocols(["h2"])
    try:
        return context.wrap_socket(sock, server_hostname=HEAD_NAME)
    except (ssl.SSLError, ConnectionResetError):
        raise AuthenticationError(
            f"The server at {where} is no miniray head: it does not speak TLS 1.3."
        ) from None


def _pinned(tls: ssl.SSLSocket, expected: bytes, where: str) -> bytes:
    """Return the server's certificate, DER, if it is the expected one."""
    der = tls.getpeercert(binary_form=True) or b""
    if not hmac.compare_digest(hashlib.sha256(der).digest(), expected):
        raise AuthenticationError(
            f"The server at {where} is not the head that this join token is for: it shows another "
            "certificate. Check the address, and take the token that this head printed."
        )
    return der


def _wait_until_let_in(tls: ssl.SSLSocket, where: str) -> None:
    """Wait for the head's first word: in TLS 1.3 it judges a client after that is done."""
    try:
        if tls.recv(1):
            return
    except TimeoutError:
        raise
    except OSError:  # an alert of TLS, or a connection that was cut instead
        pass
    raise AuthenticationError(
        f"The head at {where} refused the join token: its secret is not this cluster's. Take the "
        "token that this head printed."
    )
