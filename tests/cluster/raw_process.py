"""A process of the cluster that says whatever a test wants: frames as they are, to a daemon."""

from __future__ import annotations

import contextlib
import marshal
import os
import socket
import struct
import time
from typing import TYPE_CHECKING, Any

from miniray.messages import protocol as p
from miniray.security.challenge import answer_blocking
from miniray.security.token import read_token_file
from miniray.system.session import find_clusters

if TYPE_CHECKING:
    from miniray.system.session import ClusterRecord


def record_of(node_id: str) -> ClusterRecord:
    """Where a node of this user runs."""
    return next(record for record in find_clusters() if record.node_id == node_id)


class RawProcess:
    """A driver that is attached to a daemon's socket."""

    def __init__(self, record: ClusterRecord) -> None:
        key = read_token_file(record.session.token_file).socket_key
        self.id = os.urandom(8)
        self._sock = socket.socket(socket.AF_UNIX)
        self._sock.connect(record.socket_path)
        answer_blocking(self._sock, key, time.monotonic() + 30)
        self._sock.settimeout(30)
        self._numbers = 0
        self._frames: list[Any] = []
        job = {"namespace": "raw", "entrypoint": "raw", "sys_path": [], "cwd": "/"}
        self.send((p.NODE_HELLO, self.id, "driver", os.getpid(), self.id, job))
        assert self.read()[0] == p.NODE_WELCOME

    def send(self, message: Any) -> None:
        """Send any plain data."""
        self.send_body(marshal.dumps(message, 2))

    def send_body(self, body: bytes) -> None:
        """Send a frame of any content."""
        self._sock.sendall(struct.pack("<I", len(body)) + body)

    def send_bytes(self, data: bytes) -> None:
        """Send what need not be a frame."""
        self._sock.sendall(data)

    def read(self) -> Any:
        """The next frame."""
        (size,) = struct.unpack("<I", self._exactly(4))
        return marshal.loads(self._exactly(size))

    def _exactly(self, size: int) -> bytes:
        data = b""
        while len(data) < size:
            piece = self._sock.recv(size - len(data))
            if not piece:
                raise ConnectionError("the daemon hung up")
            data += piece
        return data

    def ask(self, kind: int, method: Any, arguments: Any) -> Any:
        """Send a request, read up to its answer: (error or None, result)."""
        self._numbers += 1
        self.send((kind, self._numbers, method, arguments))
        while True:
            reply = self.read()
            if reply[0] in (p.NODE_REPLY, p.HEAD_REPLY) and reply[1] == self._numbers:
                return reply[2], reply[3]

    def ask_head(self, method: Any, *arguments: Any) -> Any:
        """Ask the head something: (error or None, body)."""
        return self.ask(p.HEAD_REQUEST, method, marshal.dumps(arguments, 2))

    def drop_answers(self) -> None:
        """Throw away what has come, without waiting for more."""
        self._sock.settimeout(0)
        try:
            with contextlib.suppress(BlockingIOError):
                if not self._sock.recv(1 << 20):
                    raise ConnectionError("the daemon hung up")
        finally:
            self._sock.settimeout(30)

    def close(self) -> None:
        """Hang up."""
        self._sock.close()
