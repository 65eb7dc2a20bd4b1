"""One at a time, in order, and nobody waits for the dead."""

from __future__ import annotations

import asyncio

from miniray.node.turns import Turns

A, B, C = b"process1", b"process2", b"process3"


async def settled() -> None:
    for _ in range(3):
        await asyncio.sleep(0)


def test_turns_are_taken_in_order() -> None:
    async def steps() -> None:
        turns = Turns()
        await turns.take(A, 1)
        waiting = [asyncio.ensure_future(turns.take(who, 1)) for who in (B, C)]
        waiting.append(asyncio.ensure_future(turns.take(A, 2)))  # another thread of the first
        for who, ticket, done in ((A, 1, 1), (B, 1, 2), (C, 1, 3)):
            await settled()
            assert sum(task.done() for task in waiting) == done - 1
            turns.end(who, ticket)
            await settled()
            assert [task.done() for task in waiting] == [True] * done + [False] * (3 - done)
        turns.end(A, 2)
        assert not len(turns)

    asyncio.run(steps())


def test_who_dies_or_gives_up_is_passed_over() -> None:
    async def steps() -> None:
        turns = Turns()
        await turns.take(A, 1)
        gone = [asyncio.ensure_future(turns.take(B, ticket)) for ticket in (1, 2)]
        last = asyncio.ensure_future(turns.take(C, 1))
        await settled()
        turns.end(B, 1)
        turns.process_died(B)
        turns.process_died(A)
        await last
        await settled()
        assert all(task.cancelled() for task in gone)
        turns.end(A, 1)  # comes late
        turns.end(C, 1)
        assert not len(turns)

    asyncio.run(steps())
