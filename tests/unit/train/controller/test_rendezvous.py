from __future__ import annotations

import asyncio
import pickle

from passing_time import time_passes

from miniray.train import CollectiveError, CollectiveTimeoutError
from miniray.train.controller.rendezvous import Rendezvous


def meet(scenario, world_size=3, timeout=0, tell=print):
    """Run a coroutine function with a rendezvous; its value."""

    async def run():
        return await asyncio.wait_for(scenario(Rendezvous(world_size, timeout, tell)), 30)

    return asyncio.run(run())


async def waiting(rendezvous, *ranks, number=0, call="barrier()"):
    """Tasks of ranks that wait in a call."""
    tasks = [
        asyncio.ensure_future(rendezvous.join(rank, number, call, str(rank).encode()))
        for rank in ranks
    ]
    await asyncio.sleep(0)
    return tasks


def test_all_ranks_get_the_value_of_rank_0_when_the_last_has_come():
    async def scenario(rendezvous):
        first = await waiting(rendezvous, 2, 0)
        assert not any(task.done() for task in first)
        last = await waiting(rendezvous, 1)
        return [(await task).value for task in first + last]

    assert meet(scenario) == [b"0"] * 3


def test_calls_of_one_rank_follow_each_other():
    async def scenario(rendezvous):
        values = []
        for number in range(3):
            tasks = await waiting(rendezvous, 0, 1, 2, number=number)
            values += [(await task).error for task in tasks]
        return values

    assert meet(scenario) == [None] * 9


def test_a_rank_that_has_gone_ends_the_wait_of_the_others_and_later_calls():
    async def scenario(rendezvous):
        tasks = await waiting(rendezvous, 0, 2)
        rendezvous.leave(1, "returned from its train loop")
        later = await waiting(rendezvous, 0, number=1)
        return [(await task).error for task in tasks + later]

    errors = meet(scenario)
    assert all(isinstance(error, CollectiveError) for error in errors)
    assert (
        "Rank 1 returned from its train loop, while ranks 0 and 2 waited for it in barrier()"
        in (str(errors[0]))
    )


def test_a_rank_that_had_gone_before_is_not_waited_for():
    async def scenario(rendezvous):
        rendezvous.leave(1, "failed (ValueError: x)")
        (task,) = await waiting(rendezvous, 0)
        return (await task).error

    assert "Rank 1 failed (ValueError: x), while rank 0 waited" in str(meet(scenario))


def test_a_rank_that_has_gone_after_its_call_does_not_end_the_call():
    async def scenario(rendezvous):
        tasks = await waiting(rendezvous, 1)
        rendezvous.leave(1, "failed")
        tasks += await waiting(rendezvous, 0, 2)
        return [(await task).error for task in tasks]

    assert meet(scenario) == [None] * 3


def test_different_calls_at_the_same_place_are_named():
    async def scenario(rendezvous):
        tasks = await waiting(rendezvous, 0)
        tasks += await waiting(rendezvous, 2, call="broadcast_from_rank_zero()")
        return [str((await task).error) for task in tasks]

    for text in meet(scenario):
        assert "Rank 2 called broadcast_from_rank_zero() while rank 0 called barrier()" in text


def test_ranks_that_do_not_come_in_time_are_named():
    async def scenario(rendezvous):
        tasks = await waiting(rendezvous, 0)
        return (await tasks[0]).error

    error = meet(scenario, timeout=0.01)
    assert isinstance(error, CollectiveTimeoutError)
    assert isinstance(error, TimeoutError)
    assert "rank 0 still waited for ranks 1 and 2, which did not call it" in str(error)


def test_a_caller_that_goes_away_does_not_take_the_others_with_it():
    async def scenario(rendezvous):
        gone, *tasks = await waiting(rendezvous, 0, 1)
        gone.cancel()
        await asyncio.sleep(0)
        tasks += await waiting(rendezvous, 2)
        return [(await task).value for task in tasks]

    assert meet(scenario) == [b"0", b"0"]


def test_who_waits_for_whom_is_known():
    async def scenario(rendezvous):
        (task,) = await waiting(rendezvous, 1)
        known = rendezvous.waiting(1), rendezvous.waiting(0)
        task.cancel()
        return known

    (call, seconds, missing), nothing = meet(scenario)
    assert (call, missing, nothing) == ("barrier()", [0, 2], None)
    assert seconds >= 0


def test_of_ranks_that_were_replaced_nobody_is_told_that_they_wait(monkeypatch):
    async def scenario(rendezvous):
        tasks = await waiting(rendezvous, 0)
        rendezvous.close("Others run in their place.")
        await time_passes(monkeypatch, 20)  # less than `meet` lasts at most
        tasks += await waiting(rendezvous, 1)
        return [str((await task).error) for task in tasks]

    told = []
    monkeypatch.setattr("miniray.train.controller.rendezvous.NOTE_AFTER", 10)
    assert meet(scenario, tell=told.append) == ["Others run in their place."] * 2
    assert told == []


def test_the_user_is_told_for_whom_ranks_wait(monkeypatch):
    async def scenario(rendezvous):
        tasks = await waiting(rendezvous, 0, 2)
        while not told:
            await asyncio.sleep(0.001)
        tasks += await waiting(rendezvous, 1)
        return [(await task).error for task in tasks]

    told = []
    monkeypatch.setattr("miniray.train.controller.rendezvous.NOTE_AFTER", 0.01)
    assert meet(scenario, tell=told.append) == [None] * 3
    assert told == ["For 0.01 s, ranks 0 and 2 waited in barrier() for rank 1."]


def test_errors_of_collectives_can_travel():
    error = pickle.loads(pickle.dumps(CollectiveTimeoutError("late")))
    assert (type(error), str(error)) == (CollectiveTimeoutError, "late")
