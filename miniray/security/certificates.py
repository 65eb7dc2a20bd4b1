"""The cluster's TLS authority: its making, its pinning, and the certificates it signs.

The authority's own certificate is also what the head shows on its port, so the fingerprint
in the join token is all that a joining machine needs to recognise both. Cryptography is
loaded only where keys are made.
"""

from __future__ import annotations

import dataclasses
import datetime
import hashlib
import hmac
import socket
import ssl
import time
from typing import TYPE_CHECKING

from miniray.security.errors import AuthenticationError
from miniray.security.token import write_private

if TYPE_CHECKING:
    from pathlib import Path

    from cryptography import x509
    from cryptography.hazmat.primitives.asymmetric import ec

#: Names in the certificates; a client checks the one of the role that it means to reach.
HEAD_NAME = "miniray-head"
NODE_NAME = "miniray-node"

_VALIDITY = datetime.timedelta(days=3650)
_CLOCK_SKEW = datetime.timedelta(days=1)
_CERTIFICATE_FILE = "authority.pem"
_KEY_FILE = "authority.key"


@dataclasses.dataclass(frozen=True)
class Identity:
    """What a server shows on its port: a certificate and the key to it, both PEM."""

    certificate: bytes
    key: bytes = dataclasses.field(repr=False)


@dataclasses.dataclass(frozen=True)
class Authority:
    """The head's authority. Its key never leaves the head's machine."""

    identity: Identity

    @property
    def certificate(self) -> bytes:
        """The authority's certificate, PEM; every channel of the cluster trusts only it."""
        return self.identity.certificate

    @property
    def fingerprint(self) -> bytes:
        """SHA-256 of the certificate's DER form, 32 bytes."""
        return fingerprint(self.identity.certificate)

    @classmethod
    def create(cls) -> Authority:
        """Make a new authority."""
        key = _new_key()
        name = _name(HEAD_NAME)
        builder = _builder(name, name, HEAD_NAME, key.public_key(), authority=True)
        return cls(Identity(_certificate_pem(builder, key), _key_pem(key)))

    @classmethod
    def load(cls, folder: Path) -> Authority:
        """Read an authority kept by `save`; OSError if there is none."""
        certificate = (folder / _CERTIFICATE_FILE).read_bytes()
        return cls(Identity(certificate, (folder / _KEY_FILE).read_bytes()))

    def save(self, folder: Path) -> None:
        """Keep the authority in 0600 files, so that a restarted head is the same head."""
        write_private(folder / _KEY_FILE, self.identity.key)
        write_private(folder / _CERTIFICATE_FILE, self.identity.certificate)

    def sign_node(self, public_key: bytes, node_id: str) -> bytes:
        """Return a certificate (PEM) for a node's server.

        Args:
            public_key: The node's public key, PEM; its private key stays where it is.
            node_id: Hex id of the node, the subject's common name.

        Raises:
            ValueError: ``public_key`` is no P-256 public key.
        """
        from cryptography import x509
        from cryptography.hazmat.primitives import serialization
        from cryptography.hazmat.primitives.asymmetric import ec

        node_key = serialization.load_pem_public_key(public_key)
        if not isinstance(node_key, ec.EllipticCurvePublicKey) or node_key.key_size != 256:
            raise ValueError("A node's public key must be of the curve P-256.")
        own_key = serialization.load_pem_private_key(self.identity.key, password=None)
        assert isinstance(own_key, ec.EllipticCurvePrivateKey)
        issuer = x509.load_pem_x509_certificate(self.identity.certificate).subject
        builder = _builder(_name(node_id), issuer, NODE_NAME, node_key, authority=False)
        return _certificate_pem(builder, own_key)


def make_node_key() -> tuple[bytes, bytes]:
    """Return a new key of a node as (private key, public key), both PEM."""
    from cryptography.hazmat.primitives import serialization

    key = _new_key()
    public = key.public_key().public_bytes(
        serialization.Encoding.PEM, serialization.PublicFormat.SubjectPublicKeyInfo
    )
    return _key_pem(key), public


def fingerprint(certificate: bytes) -> bytes:
    """SHA-256 of a PEM certificate's DER form, 32 bytes."""
    return hashlib.sha256(ssl.PEM_cert_to_DER_cert(certificate.decode("ascii"))).digest()


def fetch_and_pin(host: str, port: int, expected: bytes, timeout: float) -> bytes:
    """Fetch the certificate of the head at an address and accept only the expected one.

    Nothing secret is sent. Blocks; a coroutine calls it in a thread.

    Args:
        host: Name or address of the head's machine.
        port: The head's port.
        expected: Fingerprint from the join token.
        timeout: Seconds for all of it.

    Returns:
        The authority's certificate, PEM.

    Raises:
        AuthenticationError: Another server answers there, or one without TLS.
        ConnectionError: Nothing listens there.
        TimeoutError: No answer in time.
        OSError: The host is unknown or cannot be reached.
    """
    where = f"{host}:{port}"
    der = _fetch_der(host, port, timeout)
    if not hmac.compare_digest(hashlib.sha256(der).digest(), expected):
        raise AuthenticationError(
            f"The server at {where} is not the head that this join token is for: it shows another "
            "certificate. Check the address, and take the token that this head printed."
        )
    return ssl.DER_cert_to_PEM_cert(der).encode("ascii")


def _fetch_der(host: str, port: int, timeout: float) -> bytes:
    where = f"{host}:{port}"
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE  # the caller compares the fingerprint instead
    context.set_alpn_protocols(["h2"])
    deadline = time.monotonic() + timeout
    try:
        with socket.create_connection((host, port), timeout=timeout) as sock:
            # Never 0, which would mean: do not wait.
            sock.settimeout(max(0.001, deadline - time.monotonic()))
            with context.wrap_socket(sock, server_hostname=HEAD_NAME) as tls:
                der = tls.getpeercert(binary_form=True)
    except TimeoutError:
        raise TimeoutError(f"No answer from {where} within {timeout:g} s.") from None
    except ConnectionRefusedError:
        raise ConnectionRefusedError(
            f"Nothing listens at {where}. Check the address, and whether the head is running."
        ) from None
    except socket.gaierror:
        raise OSError(f"The host {host!r} is unknown.") from None
    except (ssl.SSLError, ConnectionResetError):
        raise AuthenticationError(
            f"The server at {where} is no miniray head: it does not speak TLS."
        ) from None
    except OSError as error:
        raise OSError(f"{where} cannot be reached: {error.strerror or error}.") from None
    if der is None:
        raise AuthenticationError(f"The server at {where} shows no certificate.")
    return der


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
    dns_name: str,
    public_key: ec.EllipticCurvePublicKey,
    *,
    authority: bool,
) -> x509.CertificateBuilder:
    from cryptography import x509
    from cryptography.x509.oid import ExtendedKeyUsageOID

    now = datetime.datetime.now(datetime.timezone.utc)
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
    return (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(issuer)
        .public_key(public_key)
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - _CLOCK_SKEW)
        .not_valid_after(now + _VALIDITY)
        .add_extension(
            x509.BasicConstraints(ca=authority, path_length=0 if authority else None),
            critical=True,
        )
        .add_extension(usage, critical=True)
        .add_extension(x509.ExtendedKeyUsage([ExtendedKeyUsageOID.SERVER_AUTH]), critical=False)
        .add_extension(x509.SubjectAlternativeName([x509.DNSName(dns_name)]), critical=False)
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(public_key), critical=False)
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
