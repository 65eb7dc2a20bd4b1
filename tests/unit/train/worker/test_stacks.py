"""The stacks that a process shows when its controller asks."""

from __future__ import annotations

import queue
import threading

from miniray.train.worker.stacks import (
    main_stack,
    show_if_asked,
    stacks_of_this_process,
)
from miniray.train.worker.worker import TrainLoop


class Calls:
    """A controller that wants stacks, or never does."""

    def __init__(self, wanted):
        self._wanted = wanted
        self.asked = threading.Event()
        self.stacks = queue.SimpleQueue()

    def stacks_wanted(self):
        def wait():
            self.asked.set()
            return self._wanted

        return wait

    def show_stacks(self, stacks):
        self.stacks.put(stacks)


def test_the_main_thread_comes_first_and_the_asked_one_is_left_out():
    def hold_the_line():
        held.set()
        let_go.wait()

    held, let_go = threading.Event(), threading.Event()
    other = threading.Thread(target=hold_the_line, name="holder")
    other.start()
    held.wait()
    calls = Calls(wanted=True)
    show_if_asked(calls)
    shown = calls.stacks.get(timeout=30)
    let_go.set()
    other.join()
    assert shown.startswith("MainThread:\n")
    assert "holder:" in shown
    assert "hold_the_line" in shown
    assert "train-stacks" not in shown
    assert "hold_the_line" not in main_stack(shown)


def test_what_a_train_loop_does_comes_last():
    def hangs():
        # The thread that asks is left out.
        asks = threading.Thread(target=lambda: stacks.append(stacks_of_this_process()))
        asks.start()
        asks.join()

    stacks = []
    TrainLoop(hangs, ())()
    frames = main_stack(stacks[0]).splitlines()
    assert [frame.split()[0].rpartition(".")[2] for frame in frames[-3:-1]] == ["__call__", "hangs"]


def test_who_is_not_asked_shows_nothing():
    calls = Calls(wanted=False)
    show_if_asked(calls)
    assert calls.asked.wait(30)
    for thread in threading.enumerate():
        if thread.name == "train-stacks":
            thread.join(30)
    assert calls.stacks.empty()
