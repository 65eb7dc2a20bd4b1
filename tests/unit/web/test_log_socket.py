"""The log of a job over a WebSocket: what the head is asked, and when."""

from __future__ import annotations

import asyncio
import contextlib
from typing import TYPE_CHECKING, Any

from passing_time import time_passes

from miniray.web import log_socket
from miniray.web.log_socket import LogSocket

if TYPE_CHECKING:
    import pytest

REQUEST = b"GET /api/jobs/a/logs/tail HTTP/1.1\r\nHost: h\r\nSec-WebSocket-Key: x\r\n\r\n"


class Head:
    """Stands for the link to a head, which answers once a job has printed."""

    def __init__(self) -> None:
        self.asked: list[tuple[Any, ...]] = []
        self.printed: asyncio.Queue[tuple[bytes, int, bool]] = asyncio.Queue()

    async def head_request_later(self, *asked: Any) -> tuple[bytes, int, bool]:
        self.asked.append(asked)
        return await self.printed.get()

    def head_request(self, *asked: Any, timeout: float) -> tuple[bytes, int, bool]:
        del timeout
        self.asked.append(asked)
        return b"", 0, False


class Client(asyncio.Transport):
    """Keeps what is written to it."""

    def __init__(self) -> None:
        super().__init__()
        self.got = b""
        self.is_gone = False

    def write(self, data: Any) -> None:
        self.got += data

    def abort(self) -> None:
        self.is_gone = True


def followed_log(head: Any, client: Client) -> LogSocket:
    followed = LogSocket(head, lambda *_: None, contextlib.nullcontext, str)
    followed.connection_made(client)
    followed.data_received(REQUEST)
    return followed


async def soon() -> None:
    for _ in range(10):
        await asyncio.sleep(0)


def test_the_head_is_asked_again_only_when_it_has_told_something_new(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def follow() -> None:
        head, client = Head(), Client()
        followed = followed_log(head, client)
        await soon()
        await time_passes(monkeypatch, log_socket._PATIENCE - 60)
        assert head.asked == [("read_job_log", "a", 0, True)]
        head.printed.put_nowait(("ä".encode()[:1], 1, False))
        head.printed.put_nowait(("ä".encode()[1:], 2, False))
        await soon()
        assert client.got.endswith(b"\x81\x02" + "ä".encode())
        assert [asked[2] for asked in head.asked] == [0, 1, 2]
        followed.connection_lost(None)
        await soon()
        assert followed._task is not None
        assert followed._task.cancelled()

    asyncio.run(follow())


def test_a_client_that_reads_nothing_is_left_after_a_while(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(log_socket, "_SLOW", 0.01)

    async def follow() -> None:
        head, client = Head(), Client()
        followed = followed_log(head, client)
        followed.pause_writing()
        head.printed.put_nowait((b"x", 1, False))
        assert followed._task is not None
        await asyncio.wait_for(followed._task, 5)
        assert client.is_gone

    asyncio.run(follow())
