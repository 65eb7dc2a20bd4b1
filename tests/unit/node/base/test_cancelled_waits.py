"""Waiting that heeds a cancellation at whatever moment it comes."""

from __future__ import annotations

import asyncio

import pytest

from miniray.node.base.clients import ended, first_of


async def test_who_waits_for_the_end_of_work_is_cancelled_when_that_has_come() -> None:
    work = asyncio.get_running_loop().create_future()
    waiting = asyncio.ensure_future(ended(work))
    for _ in range(3):
        await asyncio.sleep(0)
        waiting.cancel()
    assert not waiting.done()
    work.set_result(None)
    with pytest.raises(asyncio.CancelledError):
        await waiting


@pytest.mark.parametrize("order", [1, -1])
async def test_the_error_that_ended_a_stream_is_told_and_not_that_its_other_part_was_cancelled(
    order: int,
) -> None:
    async def fails() -> None:
        raise OSError("why")

    async def is_cancelled() -> None:
        raise asyncio.CancelledError

    with pytest.raises(OSError, match="why"):
        await first_of(*[part() for part in (fails, is_cancelled)[::order]])
    with pytest.raises(asyncio.InvalidStateError, match="cancelled"):
        await first_of(is_cancelled(), asyncio.sleep(60))
