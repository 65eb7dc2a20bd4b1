"""Many objects that come from one node over one stream, each for itself."""

from __future__ import annotations

import asyncio
import contextlib
from typing import TYPE_CHECKING

import grpc
import pytest
from node_ends import until

from miniray._proto import node_pb2
from miniray.exceptions import ObjectLostError
from miniray.node.transfer import fetch_answers
from miniray.node.transfer.arriving import BrokenTransferError
from miniray.node.transfer.fetch_answers import FetchAnswers
from miniray.node.transfer.fetch_streams import FetchStreams

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, AsyncIterator
    from pathlib import Path

NODE = b"node"
PIECE = b"x" * 100_000


class Origin:
    """Answers requests; what becomes of each segment is said by its number."""

    def __init__(self) -> None:
        self.sent = 0
        self.open: set[int] = set()
        self.let_go = asyncio.Event()

    async def serve(self, request: node_pb2.FetchRequest) -> AsyncGenerator[bytes, None]:
        number = request.segment
        self.open.add(number)
        try:
            yield b"first of %d" % number
            if number == 0:
                raise ObjectLostError("segment 0", "its owner has freed it")
            if number == 1:
                raise RuntimeError("unheard of")
            if number == 2:
                await self.let_go.wait()
            if number == 3:
                while True:
                    self.sent += 1
                    yield PIECE
            yield b"last of %d" % number
        finally:
            self.open.discard(number)


@contextlib.asynccontextmanager
async def origin_and_streams(
    folder: Path,
) -> AsyncIterator[tuple[Origin, FetchStreams, grpc.aio.Channel, grpc.aio.Server]]:
    origin = Origin()

    async def fetch_many(
        requests: AsyncIterator[bytes], context: grpc.aio.ServicerContext[bytes, bytes]
    ) -> None:
        await FetchAnswers(origin.serve).run(requests, context.write)

    server = grpc.aio.server()
    handlers = {"FetchMany": grpc.stream_stream_rpc_method_handler(fetch_many)}
    service = grpc.method_handlers_generic_handler("miniray.v1.Objects", handlers)
    server.add_generic_rpc_handlers((service,))
    address = f"unix:{folder / 'origin.sock'}"
    server.add_insecure_port(address)
    await server.start()
    streams = FetchStreams()
    async with grpc.aio.insecure_channel(address) as channel:
        try:
            yield origin, streams, channel, server
        finally:
            await streams.close()
            await server.stop(None)


def asked(number: int) -> node_pb2.FetchRequest:
    return node_pb2.FetchRequest(segment=number)


def test_each_fetch_gets_its_own_pieces_and_its_own_error(tmp_path: Path) -> None:
    async def test() -> None:
        async with origin_and_streams(tmp_path) as (origin, streams, channel, _):

            async def collect(number: int) -> list[bytes] | str:
                pieces = []
                try:
                    async for piece in streams.fetch(NODE, channel, asked(number)):
                        pieces.append(piece)
                except ObjectLostError as error:
                    return error.reason
                return pieces

            found = await asyncio.gather(*map(collect, [0, 1, *range(10, 210)]))
            assert found[0] == "its owner has freed it"
            assert "unheard of" in found[1]
            assert found[2:] == [[b"first of %d" % n, b"last of %d" % n] for n in range(10, 210)]
            assert not origin.open
            assert not len(streams)

    asyncio.run(asyncio.wait_for(test(), 30))


def test_one_that_waits_holds_back_no_other(tmp_path: Path) -> None:
    async def test() -> None:
        async with origin_and_streams(tmp_path) as (origin, streams, channel, _):
            waiting = streams.fetch(NODE, channel, asked(2))
            assert await anext(waiting) == b"first of 2"
            assert [piece async for piece in streams.fetch(NODE, channel, asked(10))]
            origin.let_go.set()
            assert [piece async for piece in waiting] == [b"last of 2"]

    asyncio.run(asyncio.wait_for(test(), 30))


def test_who_stops_fetching_ends_that_at_the_other_node_and_nothing_else(tmp_path: Path) -> None:
    async def test() -> None:
        async with origin_and_streams(tmp_path) as (origin, streams, channel, _):
            ended = streams.fetch(NODE, channel, asked(3))
            kept = streams.fetch(NODE, channel, asked(2))
            await anext(ended)
            await anext(kept)
            await ended.aclose()
            await until(lambda: origin.open == {2})
            origin.let_go.set()
            assert [piece async for piece in kept] == [b"last of 2"]
            assert not len(streams)

    asyncio.run(asyncio.wait_for(test(), 30))


def test_what_is_not_written_yet_is_not_piled_up(tmp_path: Path) -> None:
    async def test() -> None:
        origin = Origin()
        stuck = asyncio.Event()

        async def requests() -> AsyncIterator[bytes]:
            yield fetch_answers.b.pack([(1, asked(3).SerializeToString())])
            await asyncio.Event().wait()

        async def write(_message: bytes) -> None:
            stuck.set()
            await asyncio.Event().wait()

        running = asyncio.ensure_future(FetchAnswers(origin.serve).run(requests(), write))
        await stuck.wait()
        before = -1
        while origin.sent != before:  # as long as it goes on
            before = origin.sent
            for _ in range(100):
                await asyncio.sleep(0)
        assert 0 < origin.sent * len(PIECE) < 2 * fetch_answers._WAITING
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)
        assert not origin.open

    asyncio.run(asyncio.wait_for(test(), 30))


def test_a_fetch_that_is_ended_with_the_word_that_begins_it_leaves_nothing() -> None:
    """Both come in one message if who asks leaves before it is written."""

    async def test() -> None:
        origin = Origin()
        heard: asyncio.Queue[bytes] = asyncio.Queue()
        written: list[fetch_answers.b.Answer] = []

        async def requests() -> AsyncIterator[bytes]:
            while True:
                yield await heard.get()

        async def write(message: bytes) -> None:
            written.extend(fetch_answers.b.unpack(message))

        answers = FetchAnswers(origin.serve)
        running = asyncio.ensure_future(answers.run(requests(), write))
        begins = asked(2).SerializeToString()
        for number in range(1, 100):
            heard.put_nowait(fetch_answers.b.pack([(number, begins), (number, None)]))
        heard.put_nowait(fetch_answers.b.pack([(100, asked(10).SerializeToString())]))
        await until(lambda: len(written) == 3)
        assert {number for number, *_ in written} == {100}
        await until(lambda: not answers._fetches)
        assert not origin.open
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)

    asyncio.run(asyncio.wait_for(test(), 30))


def test_a_stream_that_breaks_tells_all_who_wait_and_the_next_fetch_has_a_new_one(
    tmp_path: Path,
) -> None:
    async def test() -> None:
        async with origin_and_streams(tmp_path) as (_, streams, channel, server):
            waiting = [streams.fetch(NODE, channel, asked(2)) for _ in range(3)]
            for fetch in waiting:
                await anext(fetch)
            await server.stop(None)
            for fetch in waiting:
                with pytest.raises(BrokenTransferError):
                    await anext(fetch)
            assert not len(streams)
        async with origin_and_streams(tmp_path) as (_, _, channel, _):
            assert [piece async for piece in streams.fetch(NODE, channel, asked(10))]
            await streams.close()

    asyncio.run(asyncio.wait_for(test(), 30))


def test_a_node_that_died_is_waited_for_no_longer(tmp_path: Path) -> None:
    async def test() -> None:
        async with grpc.aio.insecure_channel(f"unix:{tmp_path / 'nobody.sock'}") as channel:
            streams = FetchStreams()
            fetch = asyncio.ensure_future(anext(streams.fetch(NODE, channel, asked(10))))
            await until(lambda: len(streams))
            streams.node_died(NODE)
            with pytest.raises(BrokenTransferError):
                await fetch

    asyncio.run(asyncio.wait_for(test(), 30))


@pytest.mark.parametrize("waits_already", [True, False])
def test_a_stream_that_ends_before_it_has_begun_keeps_nobody_waiting(
    tmp_path: Path, waits_already: bool
) -> None:
    """A node may be given up in the very moment in which the first object is asked of it."""

    async def test() -> None:
        async with grpc.aio.insecure_channel(f"unix:{tmp_path / 'nobody.sock'}") as channel:
            streams = FetchStreams()

            async def fetch() -> bytes:
                pieces = streams.fetch(NODE, channel, asked(10))
                if not waits_already:
                    while streams._streams:
                        await asyncio.sleep(0)
                return await anext(pieces)

            fetching = asyncio.ensure_future(fetch())
            asyncio.get_running_loop().call_soon(streams.node_died, NODE)
            with pytest.raises(BrokenTransferError):
                await fetching
            assert not len(streams)

    asyncio.run(asyncio.wait_for(test(), 5))


def test_a_node_that_cannot_be_reached_is_left_at_once_if_there_are_others(tmp_path: Path) -> None:
    async def test() -> None:
        async with origin_and_streams(tmp_path) as (_, _, channel, server):
            streams = FetchStreams(waits=False)
            assert [piece async for piece in streams.fetch(NODE, channel, asked(10))]
            await server.stop(None)
            with pytest.raises(BrokenTransferError):
                await anext(streams.fetch(NODE, channel, asked(10)))
            await streams.close()

    asyncio.run(asyncio.wait_for(test(), 30))


def test_a_node_that_cannot_be_reached_is_waited_for_if_there_is_no_other(tmp_path: Path) -> None:
    async def test() -> None:
        async with grpc.aio.insecure_channel(f"unix:{tmp_path / 'origin.sock'}") as early:
            streams = FetchStreams()
            fetch = asyncio.ensure_future(anext(streams.fetch(NODE, early, asked(10))))
            with pytest.raises(asyncio.TimeoutError):
                await asyncio.wait_for(asyncio.shield(fetch), 0.3)
            async with origin_and_streams(tmp_path):
                assert await fetch == b"first of 10"
                await streams.close()

    asyncio.run(asyncio.wait_for(test(), 30))
