"""The answering end of a stream of fetches: pieces of objects, several objects at a time.

Where the pieces come from is ``serving.py``.
"""

from __future__ import annotations

import asyncio
import collections
import contextlib
import functools
import logging
from typing import TYPE_CHECKING

from miniray._proto import node_pb2
from miniray.exceptions import ObjectLostError
from miniray.node.base.tasks import first_of
from miniray.node.transfer import fetch_batches as b

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable

logger = logging.getLogger(__name__)

#: Bytes that may wait to be written to one stream; what sends more waits its turn.
_WAITING = 4 << 20
#: Bytes that are put into one message, and the last piece beyond them.
_MESSAGE = 512 << 10
#: What an answer costs beside its bytes.
_OVERHEAD = 64


class FetchAnswers:
    """All fetches of one stream.

    Args:
        serve: Gives the pieces that a request asks for.
    """

    def __init__(
        self, serve: Callable[[node_pb2.FetchRequest], AsyncGenerator[bytes, None]]
    ) -> None:
        self._serve = serve
        self._fetches: dict[int, asyncio.Task[None]] = {}
        self._waiting: collections.deque[b.Answer] = collections.deque()
        self._size = 0
        self._filled = asyncio.Event()
        #: Answers for which there is no room yet, in the order in which they came.
        self._turns: collections.deque[tuple[asyncio.Future[None], b.Answer]] = collections.deque()

    async def run(
        self, incoming: AsyncIterator[bytes], write: Callable[[bytes], Awaitable[None]]
    ) -> None:
        """Answer until the stream ends."""
        try:
            await first_of(self._read(incoming), self._write(write))
        finally:
            fetches = list(self._fetches.values())
            for fetch in fetches:
                fetch.cancel()
            await asyncio.gather(*fetches, return_exceptions=True)

    async def _read(self, incoming: AsyncIterator[bytes]) -> None:
        async for message in incoming:
            for number, request in b.unpack(message):
                if request is not None:
                    fetch = asyncio.ensure_future(self._answer(number, request))
                    self._fetches[number] = fetch
                    # However it ends: one that is cancelled before it has begun runs nothing.
                    fetch.add_done_callback(functools.partial(self._forget, number))
                elif number in self._fetches:
                    self._fetches[number].cancel()

    def _forget(self, number: int, _fetch: asyncio.Task[None]) -> None:
        del self._fetches[number]

    async def _answer(self, number: int, request: bytes) -> None:
        last: b.Answer = (number, b.END, b"")
        try:
            asked = node_pb2.FetchRequest.FromString(request)
            async with contextlib.aclosing(self._serve(asked)) as pieces:
                async for piece in pieces:
                    await self._put((number, b.PIECE, piece))
        except ObjectLostError as error:
            last = (number, b.LOST, error.reason)
        except Exception as error:
            logger.exception("an object could not be sent to another node")
            last = (number, b.LOST, repr(error))
        await self._put(last)

    async def _put(self, answer: b.Answer) -> None:
        """Have it written; returns when there is room for it, in turn."""
        if self._size < _WAITING and not self._turns:
            self._add(answer)
            return
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._turns.append((turn, answer))
        await turn

    def _add(self, answer: b.Answer) -> None:
        self._size += _cost(answer)
        self._waiting.append(answer)
        self._filled.set()

    async def _write(self, write: Callable[[bytes], Awaitable[None]]) -> None:
        while True:
            await self._filled.wait()
            await write(b.pack(self._take()))

    def _take(self) -> list[b.Answer]:
        """As much of what waits as goes into one message."""
        batch = []
        size = 0
        while self._waiting and size < _MESSAGE:
            answer = self._waiting.popleft()
            size += _cost(answer)
            batch.append(answer)
        self._size -= size
        while self._turns and self._size < _WAITING:
            turn, answer = self._turns.popleft()
            if not turn.done():  # who gave it may have been told to go
                turn.set_result(None)
                self._add(answer)
        if not self._waiting:
            self._filled.clear()
        return batch


def _cost(answer: b.Answer) -> int:
    return len(answer[2]) + _OVERHEAD
