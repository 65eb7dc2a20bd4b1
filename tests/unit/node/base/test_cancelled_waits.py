"""Waiting that heeds a cancellation at whatever moment it comes."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

import pytest

from miniray.node.base.tasks import Question, ended, set_within, within

if TYPE_CHECKING:
    from collections.abc import Callable


@pytest.mark.parametrize("turns", range(4))
@pytest.mark.parametrize(
    "wait", [lambda event: within(event.wait(), 10), lambda event: set_within(event, 10)]
)
async def test_a_cancellation_that_comes_just_when_the_wait_is_over_is_heeded(
    wait: Callable[[asyncio.Event], Any], turns: int
) -> None:
    event = asyncio.Event()
    waiting = asyncio.ensure_future(wait(event))
    for _ in range(3):
        await asyncio.sleep(0)
    event.set()
    for _ in range(turns):
        await asyncio.sleep(0)
    if waiting.cancel():
        with pytest.raises(asyncio.CancelledError):
            await waiting


async def test_work_that_takes_too_long_has_ended_when_that_is_told() -> None:
    ended: list[bool] = []

    async def work() -> None:
        try:
            await asyncio.Event().wait()
        finally:
            await asyncio.sleep(0)
            ended.append(True)

    with pytest.raises(asyncio.TimeoutError):
        await within(work(), 0.01)
    assert ended


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


def test_what_the_work_raises_is_raised() -> None:
    async def work() -> int:
        raise ValueError("boom")

    with pytest.raises(ValueError, match="boom"):
        asyncio.run(within(work(), 10))


@pytest.mark.parametrize("later", range(4))
async def test_a_question_whose_answer_comes_just_when_it_is_cancelled_is_cancelled(
    later: int,
) -> None:
    question = Question([b"n1"])
    asking = asyncio.ensure_future(question.wait(60))
    for _ in range(5):
        await asyncio.sleep(0)
    question.answered(b"n1", 1)
    for _ in range(later):
        await asyncio.sleep(0)
    if asking.cancel():
        with pytest.raises(asyncio.CancelledError):
            await asking
