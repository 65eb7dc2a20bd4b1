"""Who is served at once, who waits, and what is passed on while it still arrives."""

from __future__ import annotations

import asyncio
import os
from typing import TYPE_CHECKING, Any

import pytest
from node_ends import End, until

from miniray._proto import node_pb2
from miniray.exceptions import ObjectLostError
from miniray.node.relay import relayed as r
from miniray.node.relay.relayed import Relayed
from miniray.node.transfer import serving as serving_module
from miniray.node.transfer.copies import Owner
from miniray.node.transfer.transfers import Arriving

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Callable, Coroutine
    from pathlib import Path

    from miniray.node.store.segments import Segment

SIZE = 3_000_000
OWNER = b"owner000"
ORIGIN = b"origin"
FAR_OWNER = Owner(b"owner", b"its node")


def run(folder: Path, test: Callable[[End], Coroutine[Any, Any, None]]) -> None:
    """Call the test with a node that never meets another."""

    async def main() -> None:
        end = End(folder, "a")
        try:
            await asyncio.wait_for(test(end), 30)
        finally:
            await end.hub.close()
            end.store.close()

    asyncio.run(main())


def written(end: End, data: bytes) -> Segment:
    segment = end.store.create(len(data), 0, OWNER, OWNER)
    os.pwrite(segment.fd, data, 0)
    end.store.seal(segment.number)
    return segment


async def first_of(pieces: AsyncGenerator[bytes, None]) -> node_pb2.ObjectHead:
    return node_pb2.ObjectHead.FromString(await anext(pieces))


async def two_served(end: End, number: int) -> list[AsyncGenerator[bytes, None]]:
    """Two nodes that others cannot reach copy a segment and stand still."""
    served = [end.serving.serve(end.id, number, 0, node) for node in (b"one", b"two")]
    for pieces in served:
        assert (await first_of(pieces)).size == SIZE
    return served


def third(end: End, number: int) -> tuple[AsyncGenerator[bytes, None], asyncio.Task[Any]]:
    pieces = end.serving.serve(end.id, number, 0, b"three")
    return pieces, asyncio.ensure_future(first_of(pieces))


def test_a_third_waits_until_one_of_two_is_done(tmp_path: Path) -> None:
    async def test(end: End) -> None:
        number = written(end, bytes(SIZE)).number
        served = await two_served(end, number)
        _, waiting = third(end, number)
        await asyncio.sleep(0)
        assert not waiting.done()
        await served[0].aclose()
        assert (await waiting).size == SIZE

    run(tmp_path, test)


def test_a_third_takes_the_place_of_one_whose_node_died(tmp_path: Path) -> None:
    async def test(end: End) -> None:
        number = written(end, bytes(SIZE)).number
        served = await two_served(end, number)
        _, waiting = third(end, number)
        await asyncio.sleep(0)
        end.serving.node_died(b"two")
        assert (await waiting).size == SIZE
        for pieces in served:
            await pieces.aclose()

    run(tmp_path, test)


def test_who_waits_for_its_turn_hears_that_the_value_was_freed(tmp_path: Path) -> None:
    async def test(end: End) -> None:
        number = written(end, bytes(SIZE)).number
        served = await two_served(end, number)
        _, waiting = third(end, number)
        await asyncio.sleep(0)
        end.store.free(number)
        assert end.serving.forget(number) == {b"one", b"two", b"three"}
        with pytest.raises(ObjectLostError, match="freed"):
            await waiting
        for pieces in served:
            await pieces.aclose()
        assert not end.store.used

    run(tmp_path, test)


def test_a_freed_value_that_somebody_still_reads_is_served_to_nobody_else(tmp_path: Path) -> None:
    async def test(end: End) -> None:
        number = written(end, bytes(SIZE)).number
        end.store.map(number, b"reader")
        end.store.free(number)
        with pytest.raises(ObjectLostError, match="freed"):
            await first_of(end.serving.serve(end.id, number, 0, b"one"))
        assert not end.serving._spreads

    run(tmp_path, test)


def test_a_node_that_comes_back_with_a_copy_is_told_when_it_is_freed(tmp_path: Path) -> None:
    async def test(end: End) -> None:
        kept, freed = (written(end, bytes(SIZE)).number for _ in range(2))
        for number in (kept, freed):
            pieces = end.serving.serve(end.id, number, 0, b"one")
            await first_of(pieces)
            await pieces.aclose()
        end.serving.node_died(b"one")
        end.store.free(freed)
        assert not end.serving.forget(freed)
        sent: list[tuple[bytes, Relayed]] = []

        def send(node: bytes, message: Relayed) -> bool:
            sent.append((node, message))
            return True

        end.hub.send = send  # type: ignore[method-assign]
        end.serving._copied(b"one", Relayed(notice=r.COPIED, items=(kept, freed)))
        assert sent == [(b"one", Relayed(notice=r.FREED_COPIES, items=(freed,)))]
        assert end.serving.forget(kept) == {b"one"}

    run(tmp_path, test)


def test_when_the_source_is_busy_others_are_sent_to_who_is_still_getting_a_copy(
    tmp_path: Path,
) -> None:
    async def test(end: End) -> None:
        for node in (b"one", b"two", b"three"):
            end.hub.joined(node, f"unix:{tmp_path}/{node.decode()}")
        number = written(end, bytes(SIZE)).number
        served = await two_served(end, number)
        pieces, asked = third(end, number)
        assert (await asked).ask == b"one"
        more = asyncio.ensure_future(anext(pieces))  # nothing follows: the call stays open
        await asyncio.sleep(0)
        assert not more.done()
        more.cancel()
        for other in served:
            await other.aclose()

    run(tmp_path, test)


# --- passing on --------------------------------------------------------------------------
def test_what_has_arrived_is_passed_on_before_the_rest_is_here(tmp_path: Path) -> None:
    data = os.urandom(SIZE)

    async def test(end: End) -> None:
        arriving = end.transfers.arriving[ORIGIN, 7] = Arriving(ORIGIN)
        got = bytearray()

        async def read() -> None:
            pieces = end.serving.serve(ORIGIN, 7, 0, b"one")
            assert (await first_of(pieces)).size == SIZE
            async for piece in pieces:
                got.extend(piece)

        segment = arriving.segment = end.store.create(SIZE, 0, ORIGIN, end.id)
        reading = asyncio.ensure_future(read())
        await asyncio.sleep(0)
        arriving.begin(FAR_OWNER)
        for start in range(0, SIZE, 1_000_000):
            os.pwrite(segment.fd, data[start : start + 1_000_000], start)
            arriving.came(1_000_000)
            await until(lambda: len(got) == arriving.offset)
        end.store.seal(segment.number)
        end.store.free(segment.number)
        arriving.end()
        await reading
        assert got == data
        assert not end.store.used

    run(tmp_path, test)


@pytest.mark.parametrize("begun", [True, False])
def test_what_ends_on_its_way_here_ends_where_it_is_passed_on_to(
    tmp_path: Path, begun: bool
) -> None:
    async def test(end: End) -> None:
        arriving = end.transfers.arriving[ORIGIN, 7] = Arriving(ORIGIN)

        async def read() -> None:
            async for _ in end.serving.serve(ORIGIN, 7, 0, b"one"):
                pass

        segment = arriving.segment = end.store.create(SIZE, 0, ORIGIN, end.id)
        reading = asyncio.ensure_future(read())
        await asyncio.sleep(0)
        if begun:
            arriving.begin(FAR_OWNER)
            arriving.came(1000)
            await asyncio.sleep(0)
        end.store.seal(segment.number)
        end.store.free(segment.number)
        arriving.end()
        with pytest.raises(ObjectLostError):
            await reading
        assert not end.store.used

    run(tmp_path, test)


def test_who_is_sent_to_a_node_that_waits_for_room_goes_elsewhere_at_once(tmp_path: Path) -> None:
    async def test(end: End) -> None:
        end.transfers.arriving[ORIGIN, 7] = Arriving(ORIGIN)
        with pytest.raises(ObjectLostError, match="no copy"):
            await first_of(end.serving.serve(ORIGIN, 7, 0, b"one"))

    run(tmp_path, test)


def test_a_copy_is_passed_on_from_where_it_is_wanted_and_cannot_go_meanwhile(
    tmp_path: Path,
) -> None:
    data = os.urandom(SIZE)

    async def test(end: End) -> None:
        copy = written(end, data)
        end.serving.copies.add((ORIGIN, 7), copy.number, FAR_OWNER)
        pieces = end.serving.serve(ORIGIN, 7, 1_000_000, b"one")
        assert (await first_of(pieces)).size == SIZE
        end.serving.copies.remove(copy.number)
        end.store.free(copy.number)
        assert b"".join([piece async for piece in pieces]) == data[1_000_000:]
        assert not end.store.used
        with pytest.raises(ObjectLostError, match="no copy"):
            await first_of(end.serving.serve(ORIGIN, 7, 0, b"two"))

    run(tmp_path, test)


def test_what_a_node_does_not_take_is_not_read_ahead_and_keeps_no_other_node_waiting(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def test(end: End) -> None:
        numbers = [written(end, bytes(SIZE)).number for _ in range(20)]
        reads = 0
        read = end.serving._read

        async def counted(*args: Any) -> bytes:
            nonlocal reads
            reads += 1
            return await read(*args)

        monkeypatch.setattr(end.serving, "_read", counted)
        slow = [end.serving.serve(end.id, number, 0, b"slow") for number in numbers]
        for pieces in slow:
            await anext(pieces)
        taken = [asyncio.ensure_future(anext(pieces)) for pieces in slow]
        await until(lambda: reads == serving_module._PIECES)
        quick = [piece async for piece in end.serving.serve(end.id, numbers[0], 0, b"quick")]
        assert sum(map(len, quick[1:])) == SIZE
        assert sum(piece.done() for piece in taken) == serving_module._PIECES
        left = [pieces for pieces, piece in zip(slow, taken, strict=True) if piece.done()]
        for pieces in left:
            await pieces.aclose()
        await until(lambda: sum(piece.done() for piece in taken) == 2 * serving_module._PIECES)
        for piece, pieces in zip(taken, slow, strict=True):
            piece.cancel()
            await asyncio.gather(piece, return_exceptions=True)
            await pieces.aclose()

    run(tmp_path, test)
