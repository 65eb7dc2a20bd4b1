"""The stacks that a process shows when its controller asks."""

from __future__ import annotations

import asyncio
import threading

from miniray.train.stacks import StackBoard, main_stack, show_when_asked, stacks_of_this_process
from miniray.train.worker import TrainLoop


def test_the_main_thread_comes_first_and_the_asked_one_is_left_out():
    def hold_the_line():
        held.set()
        let_go.wait()

    held, let_go = threading.Event(), threading.Event()
    other = threading.Thread(target=hold_the_line, name="holder")
    shown = []
    other.start()
    held.wait()
    came = threading.Event()
    show_when_asked(lambda: True, lambda text: (shown.append(text), came.set()))
    assert came.wait(30)
    let_go.set()
    other.join()
    assert shown[0].startswith("Thread MainThread:\n")
    assert "Thread holder:" in shown[0]
    assert "hold_the_line" in shown[0]
    assert "Thread train-stacks" not in shown[0]
    assert "hold_the_line" not in main_stack(shown[0])


def test_of_a_train_loop_its_own_frames_are_shown():
    def hangs():
        # The thread that asks is left out.
        asks = threading.Thread(target=lambda: stacks.append(stacks_of_this_process()))
        asks.start()
        asks.join()

    stacks = []
    TrainLoop(hangs, ())()
    first, second, *_ = stacks[0].splitlines()
    assert first == "Thread MainThread:"
    assert second.endswith("in hangs")


def test_who_is_not_asked_shows_nothing():
    asked, shown = threading.Event(), []

    def question():
        asked.set()
        return False

    show_when_asked(question, shown.append)
    assert asked.wait(30)
    assert not shown


def test_ranks_wait_until_the_board_is_closed():
    async def scenario():
        board = StackBoard()
        waiting = asyncio.ensure_future(board.question())
        await asyncio.sleep(0)
        assert not waiting.done()
        board.close()
        assert await waiting is False
        assert await board.question() is False

    asyncio.run(scenario())


def test_answers_are_collected_until_all_have_come():
    async def scenario():
        board = StackBoard()

        async def rank(number):
            if await board.question():
                board.answer(number, stacks_of_this_process())

        ranks = [asyncio.ensure_future(rank(number)) for number in range(3)]
        await asyncio.sleep(0)
        found = await board.collect([0, 1, 2])
        assert sorted(found) == [0, 1, 2]
        await asyncio.gather(*ranks)

    asyncio.run(scenario())
