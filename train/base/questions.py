"""What the controller asks of the ranks of an attempt while their train loops run.

Each rank has a thread that waits for a question, since its main thread may be what hangs.
"""

from __future__ import annotations

import asyncio
import enum


class Question(enum.Enum):
    """What a rank can be asked."""

    STACKS = "where it is"
    STALL = "whether its train loop waits for other ranks, from now on"


class QuestionBoard:
    """The questions of one attempt, in order; in the controller's event loop."""

    def __init__(self) -> None:
        self._asked: list[Question] = []
        self._over = False
        self._news = asyncio.Event()

    def ask(self, question: Question) -> None:
        """Ask all ranks; once is enough."""
        if question not in self._asked:
            self._asked.append(question)
            self._news.set()

    def close(self) -> None:
        """Let the ranks wait no longer."""
        self._over = True
        self._news.set()

    async def next(self, heard: int) -> Question | None:
        """Wait, on behalf of a rank, for the question after so many; None if none will come."""
        while len(self._asked) <= heard and not self._over:
            self._news.clear()
            await self._news.wait()
        return None if self._over else self._asked[heard]
