"""Finds out that all ranks that run wait in vain for one that has returned.

A rank whose train loop has returned takes part in no collective call any more, but its connections
may stay open: DistributedDataParallel keeps them. Its peers would wait until their timeout. So when
a rank has returned, each of the others watches its own train loop, and tells the controller that it
stays where it is, in a function of PyTorch that waits for others or with a collective call that has
not ended. What follows is the controller's decision.
"""

from __future__ import annotations

import asyncio
import sys
import time
from pathlib import PurePath
from typing import TYPE_CHECKING, NamedTuple

from miniray.train.base.open_collectives import open_collective
from miniray.train.base.questions import Question
from miniray.train.base.ranks import listed
from miniray.train.base.stacks import stacks_of_this_process
from miniray.train.controller.hangs import fail_hung

if TYPE_CHECKING:
    import threading
    import types
    from collections.abc import Callable, Collection

    from miniray.train.controller.attempt import Attempt

#: Seconds that the other ranks get to return too before they are asked.
GRACE = 2.0
#: Seconds between two looks of a rank at its train loop.
INTERVAL = 0.5
#: The share of a processor that a process may use that only waits. A transfer to a rank that has
#: not returned, in a group of their own, takes more.
IDLE_SHARE = 0.1

#: Folders of PyTorch whose functions wait for other ranks, and the file from which
#: DistributedDataParallel does, in the backward pass.
_COLLECTIVES = (("torch", "distributed"), ("torch", "nn", "parallel"))
_BACKWARD = ("torch", "autograd", "graph.py")
#: Writes files, and has the others wait in calls of their own.
_CHECKPOINTS = ("torch", "distributed", "checkpoint")
#: Collective calls may be made through a few small functions of other folders.
_INNERMOST = 3
#: PyTorch waits in the group's store for keys of other ranks, below so many frames of miniray.
_STORE = "/train/torch/group_store.py"
_WITHIN_STORE = 20


class Sample(NamedTuple):
    """Where a train loop was at one look.

    Attributes:
        place: The instruction, if the train loop may wait for other ranks there; None if not.
        processor_time: Seconds that the process had used by then, but for a wait for a device,
            which keeps a processor busy.
    """

    place: tuple[int, int] | None
    processor_time: float


class StallMeter:
    """Judges samples of one train loop. Pure: the caller says the time."""

    def __init__(self, patience: float) -> None:
        self._patience = patience
        self._first: Sample | None = None
        self._since = 0.0

    def add(self, sample: Sample, now: float) -> bool:
        """Take a sample; whether the train loop has only waited for long enough."""
        first = self._first
        if (
            first is None
            or sample.place is None
            or sample.place != first.place
            or sample.processor_time - first.processor_time
            > IDLE_SHARE * max(now - self._since, INTERVAL)
        ):
            self._first, self._since = sample, now
            return False
        return now - self._since >= self._patience


# --- in a rank ---------------------------------------------------------------------------


def waits_for_others(frame: types.FrameType | None) -> bool:
    """Whether code is in one of PyTorch's functions that wait for other ranks."""
    innermost = True
    for _ in range(_INNERMOST):
        if frame is None:
            return False
        parts = PurePath(frame.f_code.co_filename).parts
        collective = any(_within(parts, folder) for folder in _COLLECTIVES)
        if collective and not _within(parts, _CHECKPOINTS):
            return True
        if innermost and parts[-3:] == _BACKWARD:
            return True
        innermost = False
        frame = frame.f_back
    return False


def caller_of_store(frame: types.FrameType | None) -> types.FrameType | None:
    """The code that waits for a key of another rank in the group's store; None if none does."""
    outer = frame
    for _ in range(_WITHIN_STORE):
        if outer is None:
            return None
        if outer.f_code.co_filename.endswith(_STORE):
            return outer.f_back
        outer = outer.f_back
    return None


def _within(parts: tuple[str, ...], folder: tuple[str, ...]) -> bool:
    return any(parts[at : at + len(folder)] == folder for at in range(len(parts) - len(folder)))


def sample_of(thread: int) -> Sample:
    """Where a thread of this process is."""
    innermost = sys._current_frames().get(thread)
    frame = caller_of_store(innermost) or innermost
    name = open_collective()
    if frame is None or (name is None and not waits_for_others(frame)):
        return Sample(None, 0.0)
    on_device = name is not None and name.startswith("nccl:")
    return Sample((id(frame), frame.f_lasti), 0.0 if on_device else time.process_time())


def watch_for_stall(
    thread: int, ended: threading.Event, tell: Callable[[str], None], patience: float
) -> None:
    """Tell when a train loop stalls, with its stacks, and when it goes on, with an empty text.

    Args:
        thread: The thread in which the train loop runs.
        ended: Set when it has ended.
        tell: Tells the controller.
        patience: Seconds after which a train loop that has only waited counts as stalled.
    """
    meter, told = StallMeter(patience), False
    while not ended.wait(INTERVAL):
        stalled = meter.add(sample_of(thread), time.monotonic())
        if stalled is not told:
            told = stalled
            tell(stacks_of_this_process() if stalled else "")


# --- in the controller -------------------------------------------------------------------


class StallBoard:
    """Which ranks of an attempt are stalled; in the controller's event loop."""

    def __init__(self) -> None:
        self._stacks: dict[int, str] = {}
        self._news = asyncio.Event()

    def enter(self, rank: int, stacks: str) -> None:
        """Enter that a rank is stalled, and its stacks; with an empty text, that it goes on."""
        if stacks:
            self._stacks[rank] = stacks
        else:
            self._stacks.pop(rank, None)
        self._news.set()

    def look(self) -> None:
        """A rank has ended: the others may all be stalled."""
        self._news.set()

    async def all_of(self, running: Callable[[], Collection[int]]) -> dict[int, str]:
        """Wait until each rank that runs is stalled; the stacks of each."""
        while not (ranks := running()) or not self._stacks.keys() >= set(ranks):
            self._news.clear()
            await self._news.wait()
        return {rank: self._stacks[rank] for rank in ranks}


async def fail_stalled(attempt: Attempt, patience: float) -> None:
    """Wait until an attempt is stalled, and enter so; forever if it never is.

    Args:
        attempt: The attempt.
        patience: Seconds that each rank has only waited by then.
    """
    await attempt.first_return.wait()
    await asyncio.sleep(min(GRACE, patience))
    attempt.questions.ask(Question.STALL)
    stacks = await attempt.stalls.all_of(lambda: attempt.running)
    gone = attempt.returned
    fail_hung(
        attempt,
        stacks,
        f"{listed(gone).capitalize()} {_have(gone)} returned from the train loop, and "
        f"{listed(stacks)} {_have(stacks)} waited in a collective call for {patience:g} s since "
        f"then, in vain. All ranks have to make the same collective calls: give each of them the "
        f"same number of steps.",
    )


def _have(ranks: Collection[int]) -> str:
    return "has" if len(ranks) == 1 else "have"
