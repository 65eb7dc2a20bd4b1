"""The stacks of all ranks of an attempt that hangs: who asks for them, and what they show.

What follows from a hang is the controller's decision.
"""

from __future__ import annotations

import asyncio
import sys
import threading
import traceback
from pathlib import Path
from typing import TYPE_CHECKING

from miniray.train.base.questions import Question

if TYPE_CHECKING:
    from collections.abc import Collection

    from miniray.train.base.questions import QuestionBoard

#: Seconds that ranks get to show their stacks.
ANSWER_TIMEOUT = 5.0

#: What stands for the stacks of a rank that has not answered.
NO_ANSWER = (
    f"It did not show its stacks within {ANSWER_TIMEOUT:g} s: native code holds Python's lock (the "
    f"GIL), or the process is stopped or cut off.\n"
)


#: Where train loops are called, by ``TrainLoop.__call__``.
_CALLER = str(Path(__file__).parents[1] / "worker" / "worker.py")


class StackBoard:
    """Asks the ranks of one attempt for their stacks; in the controller's event loop."""

    def __init__(self, questions: QuestionBoard) -> None:
        self._questions = questions
        self._stacks: dict[int, str] = {}
        self._came = asyncio.Event()

    def answer(self, rank: int, stacks: str) -> None:
        """Enter the stacks of a rank."""
        self._stacks[rank] = stacks
        self._came.set()

    async def collect(self, ranks: Collection[int]) -> dict[int, str]:
        """The stacks of these ranks, with a sentence for each that does not answer in time."""
        self._questions.ask(Question.STACKS)
        answers = asyncio.ensure_future(self._all_of(ranks))
        await asyncio.wait({answers}, timeout=ANSWER_TIMEOUT)
        answers.cancel()
        return {rank: self._stacks.get(rank, NO_ANSWER) for rank in ranks}

    async def _all_of(self, ranks: Collection[int]) -> None:
        while not self._stacks.keys() >= set(ranks):
            self._came.clear()
            await self._came.wait()


def stacks_of_this_process() -> str:
    """The stack of each thread, the main thread first; of it what the train loop does."""
    frames = sys._current_frames()
    main = threading.main_thread().ident
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    own = threading.get_ident()
    parts = []
    for ident, frame in sorted(frames.items(), key=lambda item: item[0] != main):
        if ident != own:
            lines = "".join(traceback.format_list(_in_train_loop(traceback.extract_stack(frame))))
            parts.append(f"Thread {names.get(ident, ident)}:\n{lines}")
    return "\n".join(parts)


def _in_train_loop(stack: list[traceback.FrameSummary]) -> list[traceback.FrameSummary]:
    """Without the frames in which the train loop is called; all of a stack that is not in it."""
    calls = (
        index
        for index, frame in enumerate(stack)
        if frame.filename == _CALLER and frame.name == "__call__"
    )
    return stack[next(calls, -1) + 1 :]


def main_stack(stacks: str) -> str:
    """Of the stacks of a process, that of its main thread."""
    return stacks.partition("\nThread ")[0]
