"""The asking end of streams of fetches: one stream to each node from which objects come.

What is asked for, and what becomes of the pieces, is ``transfers.py``.
"""

from __future__ import annotations

import asyncio
import collections
import itertools
import logging
from typing import TYPE_CHECKING

import grpc

from miniray.exceptions import ObjectLostError
from miniray.node.base.tasks import first_of
from miniray.node.transfer import fetch_batches as b
from miniray.node.transfer.arriving import BrokenTransferError
from miniray.node.transfer.services import fetch_many

if TYPE_CHECKING:
    from collections.abc import Callable

    from miniray._proto import node_pb2

logger = logging.getLogger(__name__)


class Fetch:
    """The pieces of one fetch, in order: an async iterator that has to be closed.

    What is there is taken without a turn of the event loop for each piece, so that it does not
    pile up: nothing tells the other node to wait for one of those who read from its stream.

    Args:
        close: Called when nobody wants more of it.
    """

    def __init__(self, close: Callable[[], object]) -> None:
        self._close = close
        #: What has come and was not taken. What ends it stays.
        self._answers: collections.deque[tuple[int, bytes | str]] = collections.deque()
        self._came: asyncio.Future[None] | None = None
        #: Seconds within which the next piece has to come; None: there is no hurry.
        self.limit: float | None = None

    def put(self, kind: int, what: bytes | str) -> None:
        """Something came."""
        self._answers.append((kind, what))
        if self._came is not None and not self._came.done():
            self._came.set_result(None)

    def __aiter__(self) -> Fetch:
        return self

    async def __anext__(self) -> bytes:
        """The next piece.

        Raises:
            ObjectLostError: It is not there.
            BrokenTransferError: The stream broke, or nothing came within the limit.
        """
        while not self._answers:
            self._came = came = asyncio.get_running_loop().create_future()
            if self.limit is None:
                await came
                continue
            done, _ = await asyncio.wait({came}, timeout=self.limit)
            if not done:
                raise BrokenTransferError(f"nothing came for {self.limit} s")
        kind, what = self._answers[0]
        if isinstance(what, bytes):
            if kind == b.END:
                raise StopAsyncIteration
            self._answers.popleft()
            return what
        if kind == b.LOST:
            raise ObjectLostError("segment", what)
        raise BrokenTransferError(what)

    async def aclose(self) -> None:
        """Nobody wants more of it."""
        self._close()


class _Stream:
    """All fetches from one node."""

    def __init__(self, channel: grpc.aio.Channel, *, waits: bool) -> None:
        #: Where it goes; another channel means that the node was gone and came back.
        self.channel = channel
        self.over = False
        self._number = itertools.count(1).__next__
        self._fetches: dict[int, Fetch] = {}
        self._asks: list[b.Ask] = []
        self._asked = asyncio.Event()
        self._why_over = "the connection broke"
        self.task = asyncio.get_running_loop().create_task(self._run(waits=waits))
        # Also if it is cancelled before it has begun: then nothing of it runs.
        self.task.add_done_callback(self._end)

    def __len__(self) -> int:
        return len(self._fetches)

    def fetch(self, request: bytes) -> Fetch:
        """The pieces that a request asks for."""
        number = self._number()

        def close() -> None:
            if self._fetches.pop(number, None) is not None:
                self._ask(number, None)

        fetch = self._fetches[number] = Fetch(close)
        self._ask(number, request)
        return fetch

    def _ask(self, number: int, request: bytes | None) -> None:
        self._asks.append((number, request))
        self._asked.set()

    def _end(self, _task: asyncio.Task[None]) -> None:
        """Nothing more comes, nor can anything be asked."""
        self.over = True
        fetches, self._fetches = self._fetches, {}
        for fetch in fetches.values():
            fetch.put(b.BROKEN, self._why_over)

    async def _run(self, *, waits: bool) -> None:
        call = fetch_many(self.channel, waits=waits)
        try:
            await first_of(self._write(call), self._read(call))
        except grpc.aio.AioRpcError as error:
            self._why_over = str(error.details())
        except (grpc.aio.UsageError, asyncio.InvalidStateError) as error:
            self._why_over = str(error) or self._why_over
        except Exception as error:
            logger.exception("a stream of objects broke in an unknown way")
            self._why_over = repr(error)
        finally:
            call.cancel()

    async def _write(self, call: grpc.aio.StreamStreamCall[bytes, bytes]) -> None:
        while True:
            await self._asked.wait()
            self._asked.clear()
            asks, self._asks = self._asks, []
            await call.write(b.pack(asks))

    async def _read(self, call: grpc.aio.StreamStreamCall[bytes, bytes]) -> None:
        async for message in call:
            for number, kind, what in b.unpack(message):
                # What was ended meanwhile may have been on its way.
                if kind == b.PIECE:
                    fetch = self._fetches.get(number)
                else:
                    fetch = self._fetches.pop(number, None)
                if fetch is not None:
                    fetch.put(kind, what)


class FetchStreams:
    """The streams to all nodes.

    Args:
        waits: Whether to wait while a node cannot be reached, as for the only one that has an
            object, or to fail at once.
    """

    def __init__(self, *, waits: bool = True) -> None:
        self._waits = waits
        self._streams: dict[bytes, _Stream] = {}

    def __len__(self) -> int:
        return sum(map(len, self._streams.values()))

    def fetch(
        self, node_id: bytes, channel: grpc.aio.Channel, request: node_pb2.FetchRequest
    ) -> Fetch:
        """Ask a node for an object.

        Args:
            node_id: The node.
            channel: To it.
            request: What is asked for.

        Returns:
            An ``ObjectHead`` as bytes, then bytes of the object.
        """
        stream = self._streams.get(node_id)
        if stream is None or stream.over or stream.channel is not channel:
            if stream is not None:
                stream.task.cancel()
            stream = self._streams[node_id] = _Stream(channel, waits=self._waits)
        return stream.fetch(request.SerializeToString())

    def node_died(self, node_id: bytes) -> None:
        """A node is gone: nothing more comes from it."""
        stream = self._streams.pop(node_id, None)
        if stream is not None:
            stream.task.cancel()

    async def close(self) -> None:
        """End all streams."""
        tasks = [stream.task for stream in self._streams.values()]
        self._streams.clear()
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
