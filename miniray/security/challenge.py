"""The handshake on Unix sockets: both ends prove that they hold the cluster's socket key.

The state machines here do no I/O, so that the one I/O thread of a process can run any
number of them; `answer_blocking` and `demand_blocking` are the same thing for a thread that
waits. Other deadlines, and closing the socket, are the caller's.

The messages, each of a fixed size::

    server -> client   server_nonce (32)
    client -> server   HMAC(key, "client" + server_nonce + client_nonce) (32), client_nonce (32)
    server -> client   HMAC(key, "server" + server_nonce + client_nonce) (32)

HMAC is HMAC-SHA256. Both nonces are in both answers and the labels differ, so that an
answer cannot be replayed or reflected.
"""

from __future__ import annotations

import hmac
import os
import socket
import struct
import time

from miniray.exceptions import AuthenticationError

NONCE_SIZE = 32
DIGEST_SIZE = 32
_CLIENT_ANSWER_SIZE = DIGEST_SIZE + NONCE_SIZE
_UCRED = struct.Struct("3i")  # pid, uid, gid; see unix(7)


def _digest(key: bytes, label: bytes, server_nonce: bytes, client_nonce: bytes) -> bytes:
    return hmac.digest(key, label + server_nonce + client_nonce, "sha256")


class ServerChallenge:
    """The accepting end of one handshake.

    Send `greeting` first, then feed what arrives until it is done.
    """

    __slots__ = ("_buffer", "_done", "_key", "greeting")

    def __init__(self, key: bytes) -> None:
        self._key = key
        self._buffer = b""
        self._done = False
        #: What to send as soon as the connection is accepted.
        self.greeting = os.urandom(NONCE_SIZE)

    def feed(self, data: bytes) -> tuple[bytes, bool]:
        """Take bytes from the client; return (what to send, whether the client is proven).

        Raises:
            AuthenticationError: The answer is wrong. Close the connection; read no more from it.
        """
        self._buffer += data
        if self._done or len(self._buffer) < _CLIENT_ANSWER_SIZE:
            return b"", self._done
        proof = self._buffer[:DIGEST_SIZE]
        client_nonce = self._buffer[DIGEST_SIZE:_CLIENT_ANSWER_SIZE]
        self._buffer = self._buffer[_CLIENT_ANSWER_SIZE:]
        if not hmac.compare_digest(
            proof, _digest(self._key, b"client", self.greeting, client_nonce)
        ):
            raise AuthenticationError("A process connected without this cluster's key.")
        self._done = True
        return _digest(self._key, b"server", self.greeting, client_nonce), True

    @property
    def surplus(self) -> bytes:
        """Bytes fed after the handshake's end; they belong to the protocol that follows."""
        return self._buffer if self._done else b""


class ClientChallenge:
    """The connecting end of one handshake: feed what arrives until it is done."""

    __slots__ = ("_buffer", "_done", "_expected", "_key")

    def __init__(self, key: bytes) -> None:
        self._key = key
        self._buffer = b""
        self._expected: bytes | None = None
        self._done = False

    @property
    def answered(self) -> bool:
        """Whether the greeting has come, so that the next word is the server's verdict."""
        return self._expected is not None

    @property
    def surplus(self) -> bytes:
        """Bytes fed after the handshake's end; they belong to the protocol that follows."""
        return self._buffer if self._done else b""

    @property
    def missing(self) -> int:
        """How many bytes the handshake still needs before it can go on."""
        return 0 if self._done else DIGEST_SIZE - len(self._buffer)

    def feed(self, data: bytes) -> tuple[bytes, bool]:
        """Take bytes from the server; return (what to send, whether the server is proven).

        Raises:
            AuthenticationError: The server does not hold the key. Close the connection.
        """
        self._buffer += data
        to_send = b""
        if self._expected is None and len(self._buffer) >= NONCE_SIZE:
            server_nonce, self._buffer = self._buffer[:NONCE_SIZE], self._buffer[NONCE_SIZE:]
            client_nonce = os.urandom(NONCE_SIZE)
            self._expected = _digest(self._key, b"server", server_nonce, client_nonce)
            to_send = _digest(self._key, b"client", server_nonce, client_nonce) + client_nonce
        elif self._expected is not None and not self._done and len(self._buffer) >= DIGEST_SIZE:
            proof, self._buffer = self._buffer[:DIGEST_SIZE], self._buffer[DIGEST_SIZE:]
            if not hmac.compare_digest(proof, self._expected):
                raise AuthenticationError("The process at this socket lacks this cluster's key.")
            self._done = True
        return to_send, self._done


def answer_blocking(sock: socket.socket, key: bytes, deadline: float) -> None:
    """Run the client's end of the handshake on a connected socket.

    Reads not one byte beyond the handshake. The socket's timeout is as before afterwards.

    Args:
        sock: A connected stream socket.
        key: The cluster's socket key.
        deadline: When to give up, on the clock of ``time.monotonic()``.

    Raises:
        AuthenticationError: The peer refused the key or does not hold it.
        TimeoutError: The deadline passed.
        ConnectionError: The peer went away before it said anything.
    """
    challenge = ClientChallenge(key)
    timeout_before = sock.gettimeout()
    done = False
    try:
        while not done:
            _set_timeout(sock, deadline)
            data = sock.recv(challenge.missing)
            if not data:
                raise _closed(challenge)
            to_send, done = challenge.feed(data)
            if to_send:
                sock.sendall(to_send)
    except TimeoutError:
        raise TimeoutError(
            "The process at this socket did not finish the handshake in time."
        ) from None
    except (BrokenPipeError, ConnectionResetError):
        raise _closed(challenge) from None
    finally:
        sock.settimeout(timeout_before)


def demand_blocking(sock: socket.socket, key: bytes, deadline: float) -> None:
    """Run the server's end of the handshake on an accepted socket.

    The socket's timeout is as before afterwards.

    Args:
        sock: A connected stream socket.
        key: The cluster's socket key.
        deadline: When to give up, on the clock of ``time.monotonic()``.

    Raises:
        AuthenticationError: The peer does not hold the key, or said more than its answer.
        TimeoutError: The deadline passed.
        ConnectionError: The peer went away.
    """
    challenge = ServerChallenge(key)
    timeout_before = sock.gettimeout()
    done = False
    try:
        _set_timeout(sock, deadline)
        sock.sendall(challenge.greeting)
        while not done:
            _set_timeout(sock, deadline)
            data = sock.recv(_CLIENT_ANSWER_SIZE)
            if not data:
                raise ConnectionResetError("The peer went away during the handshake.")
            to_send, done = challenge.feed(data)
        if challenge.surplus:
            raise AuthenticationError("A process sent data before the handshake was over.")
        sock.sendall(to_send)
    finally:
        sock.settimeout(timeout_before)


def _set_timeout(sock: socket.socket, deadline: float) -> None:
    remaining = deadline - time.monotonic()
    if remaining <= 0:
        raise TimeoutError
    sock.settimeout(remaining)


def _closed(challenge: ClientChallenge) -> ConnectionError:
    if challenge.answered:
        return AuthenticationError(
            "The process at this socket closed the connection when it saw this process's proof: "
            "the two belong to different clusters, or it has just ended."
        )
    return ConnectionResetError("The process at this socket closed the connection at once.")


def require_own_uid(sock: socket.socket) -> None:
    """Refuse a peer of another user before any byte of it is read.

    Whose process is at the other end the kernel recorded when the connection was made.

    Raises:
        AuthenticationError: The peer runs as another uid; the text names both.
    """
    _pid, uid, _gid = _UCRED.unpack(
        sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _UCRED.size)
    )
    if uid != os.geteuid():
        raise AuthenticationError(
            f"A process of uid {uid} connected to a socket of uid {os.geteuid()}. "
            "A cluster's sockets are for the user who started it only."
        )
