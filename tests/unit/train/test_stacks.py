"""The stacks that a process shows when its controller asks."""

from __future__ import annotations

import asyncio
import queue
import threading

from miniray.train.base.questions import Question, QuestionBoard
from miniray.train.base.stacks import StackBoard, main_stack, stacks_of_this_process
from miniray.train.controller import stalls
from miniray.train.worker.rank_watch import RankWatch
from miniray.train.worker.worker import TrainLoop


class Client:
    """A controller that asks these questions, and then waits until it is closed."""

    def __init__(self, *questions):
        self._questions = questions
        self._closed = threading.Event()
        self.stacks = queue.SimpleQueue()
        self.stalls = queue.SimpleQueue()
        self.over = threading.Event()

    def await_question(self, heard):
        if heard < len(self._questions):
            return self._questions[heard]
        self._closed.wait()
        self.over.set()
        return None

    def show_stacks(self, stacks):
        self.stacks.put(stacks)

    def tell_stall(self, stacks):
        self.stalls.put(stacks)

    def close(self):
        self._closed.set()


def test_the_main_thread_comes_first_and_the_asked_one_is_left_out():
    def hold_the_line():
        held.set()
        let_go.wait()

    held, let_go = threading.Event(), threading.Event()
    other = threading.Thread(target=hold_the_line, name="holder")
    other.start()
    held.wait()
    client = Client(Question.STACKS)
    watch = RankWatch(client, 0.1)
    shown = client.stacks.get(timeout=30)
    let_go.set()
    other.join()
    watch.close()
    client.close()
    assert shown.startswith("Thread MainThread:\n")
    assert "Thread holder:" in shown
    assert "hold_the_line" in shown
    assert "Thread train-watch" not in shown
    assert "hold_the_line" not in main_stack(shown)


def test_a_rank_that_is_asked_tells_that_its_train_loop_waits_for_others_until_it_goes_on(
    monkeypatch, tmp_path
):
    # A function that waits, in a file where those of PyTorch are.
    folder = tmp_path / "torch" / "distributed"
    folder.mkdir(parents=True)
    folder.joinpath("waits.py").write_text("def all_reduce(over):\n    over.wait(60)\n")
    space = {}
    exec(compile((folder / "waits.py").read_text(), folder / "waits.py", "exec"), space)
    monkeypatch.setattr(stalls, "INTERVAL", 0.01)
    monkeypatch.setattr(stalls, "IDLE_SHARE", 100)  # whatever else this process does
    over = threading.Event()
    client = Client(Question.STALL, Question.STACKS)
    told = []

    def answer():
        told.append(client.stalls.get(timeout=30))
        over.set()

    answering = threading.Thread(target=answer)
    answering.start()
    watch = RankWatch(client, 0.1)
    space["all_reduce"](over)
    answering.join()
    assert "in all_reduce" in told[0]
    assert client.stalls.get(timeout=30) == ""
    assert client.stacks.get(timeout=30)
    watch.close()
    client.close()


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
    client = Client()
    watch = RankWatch(client, 0.1)
    client.close()
    assert client.over.wait(30)
    watch.close()
    assert client.stacks.empty()
    assert client.stalls.empty()


def test_ranks_wait_until_the_board_is_closed():
    async def scenario():
        board = QuestionBoard()
        waiting = asyncio.ensure_future(board.next(0))
        await asyncio.sleep(0)
        assert not waiting.done()
        board.close()
        assert await waiting is None
        assert await board.next(0) is None

    asyncio.run(scenario())


def test_each_rank_hears_each_question_once():
    async def scenario():
        board = QuestionBoard()
        first = [asyncio.ensure_future(board.next(0)) for _ in range(2)]
        await asyncio.sleep(0)
        board.ask(Question.STALL)
        board.ask(Question.STALL)
        assert await asyncio.gather(*first) == [Question.STALL] * 2
        second = asyncio.ensure_future(board.next(1))
        await asyncio.sleep(0)
        assert not second.done()
        board.ask(Question.STACKS)
        assert await second is Question.STACKS
        assert await board.next(0) is Question.STALL

    asyncio.run(scenario())


def test_answers_are_collected_until_all_have_come():
    async def scenario():
        questions = QuestionBoard()
        board = StackBoard(questions)

        async def rank(number):
            if await questions.next(0) is Question.STACKS:
                board.answer(number, stacks_of_this_process())

        ranks = [asyncio.ensure_future(rank(number)) for number in range(3)]
        await asyncio.sleep(0)
        found = await board.collect([0, 1, 2])
        assert sorted(found) == [0, 1, 2]
        await asyncio.gather(*ranks)

    asyncio.run(scenario())
