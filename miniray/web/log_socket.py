"""The log of a job over a WebSocket, as Ray's client follows it.

Only as much of RFC 6455 as that takes: the server sends texts, and any data of the client end the
connection. So no library is needed.
"""

from __future__ import annotations

import asyncio
import base64
import codecs
import contextlib
import hashlib
import re
import urllib.parse
from typing import TYPE_CHECKING, Any

from miniray.exceptions import MinirayError

if TYPE_CHECKING:
    from collections.abc import Callable

    from miniray.wire.node_link import NodeLink

    #: Returns status and reason of a refusal: of a method, a path and headers.
    Refusal = Callable[[str, str, dict[str, str]], tuple[int, str] | None]
    #: Counts the connection as a client.
    Count = Callable[[], contextlib.AbstractContextManager[None]]

_PATH = re.compile(r"/api/jobs/([^/]+)/logs/tail")
_GUID = b"258EAFA5-E914-47DA-95CA-C5AB0DC85B11"
_TEXT, _CLOSE = 0x1, 0x8
_NORMAL, _FAILED = 1000, 1011
#: Seconds for which the head may have nothing new of a log before the next request.
_PATIENCE = 600.0
#: Seconds for which a client may not read what fills the kernel's buffers: a slow one goes on.
_SLOW = 600.0


class LogSocket(asyncio.Protocol):
    """One connection, from its request for an upgrade on."""

    def __init__(
        self,
        link: NodeLink,
        refusal: Refusal,
        count: Count,
        full: Callable[[], str],
        **_settings: Any,
    ) -> None:
        self._link = link
        self._refusal = refusal
        self._count = count
        #: Returns why no more logs may be followed; empty if some may.
        self._full = full
        self._task: asyncio.Task[None] | None = None
        #: Set while the client reads.
        self._writable = asyncio.Event()
        self._writable.set()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Keep the connection."""
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport

    def data_received(self, data: bytes) -> None:
        """Take the request, whole; later the client's goodbye."""
        if self._task is not None:
            if data[0] & 0xF == _CLOSE:
                self._transport.close()
            return
        head = data.decode("latin-1").split("\r\n\r\n")[0].split("\r\n")
        method, target, _ = head[0].split(" ", 2)
        path = urllib.parse.unquote(target.partition("?")[0])
        pairs = (line.partition(":") for line in head[1:])
        headers = {name.lower(): value.strip() for name, _, value in pairs}
        found, key = _PATH.fullmatch(path), headers.get("sec-websocket-key", "")
        refused = self._refusal(method, path, headers)
        if refused is None and (found is None or not key):
            refused = 404, "There is no such socket."
        if refused is None and (full := self._full()):
            refused = 503, full
        if refused is not None:
            self._write_head(f"{refused[0]} Refused", "Content-Length: 0")
            self._transport.close()
            return
        assert found is not None
        accepted = base64.b64encode(hashlib.sha1(key.encode() + _GUID).digest()).decode()  # noqa: S324
        self._write_head(
            "101 Switching Protocols",
            "Upgrade: websocket",
            "Connection: Upgrade",
            f"Sec-WebSocket-Accept: {accepted}",
        )
        self._task = asyncio.ensure_future(self._follow(found[1]))

    def _write_head(self, *lines: str) -> None:
        self._transport.write(("HTTP/1.1 " + "\r\n".join(lines) + "\r\n\r\n").encode())

    async def _follow(self, job: str) -> None:
        """Send what a job prints, until it has ended."""
        decode = codecs.getincrementaldecoder("utf-8")(errors="replace").decode
        offset, over = 0, False
        with self._count():
            try:
                while not over:
                    data = b""
                    with contextlib.suppress(asyncio.TimeoutError):
                        # The head answers once there is something new.
                        new = self._link.head_request_later("read_job_log", job, offset, True)
                        data, offset, over = await asyncio.wait_for(new, _PATIENCE)
                    if text := decode(data):
                        self._frame(_TEXT, text.encode())
                        await asyncio.wait_for(self._writable.wait(), _SLOW)
            except asyncio.TimeoutError:
                self._transport.abort()
            except (MinirayError, ValueError, OSError) as error:
                self._frame(_CLOSE, _FAILED.to_bytes(2, "big") + str(error).encode()[:120])
            else:
                self._frame(_CLOSE, _NORMAL.to_bytes(2, "big"))

    def _frame(self, kind: int, data: bytes) -> None:
        size = len(data)
        if size < 126:
            length = bytes([size])
        elif size < 1 << 16:
            length = b"\x7e" + size.to_bytes(2, "big")
        else:
            length = b"\x7f" + size.to_bytes(8, "big")
        self._transport.write(bytes([0x80 | kind]) + length + data)

    def pause_writing(self) -> None:
        """Wait with more, as the client does not read."""
        self._writable.clear()

    def resume_writing(self) -> None:
        """Go on."""
        self._writable.set()

    def connection_lost(self, _error: Exception | None) -> None:
        """Stop following."""
        if self._task is not None:
            self._task.cancel()
