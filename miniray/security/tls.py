"""Python's own TLS: how movers meet, and how the head is met for the first time.

gRPC has a TLS library of its own, which says neither what the other end shows nor why it refused.
"""

from __future__ import annotations

import hashlib
import hmac
import os
import socket
import ssl
import time
from typing import TYPE_CHECKING

from miniray.exceptions import AuthenticationError
from miniray.security.certificates import HEAD_NAME

if TYPE_CHECKING:
    from miniray.security.certificates import Credentials


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
    """Return a TLS context for a server of which nothing is known yet."""
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
