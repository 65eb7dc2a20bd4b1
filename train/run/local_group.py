"""The worker group of a run in local mode: this process, and those that torchrun has started.

The controller sees it as any worker group. All of it runs in the controller's thread but
``OtherRanks.answer`` and ``OtherRanks.lost``, which hand over what the other ranks say.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import dataclasses
import functools
import os
import socket
from typing import TYPE_CHECKING, Any

from miniray.train.base.failures import GroupStartError, WorkerFailure
from miniray.train.base.ranks import WorkerInfo
from miniray.train.worker.worker import WorkerOutcome

if TYPE_CHECKING:
    from collections.abc import Callable

    from miniray.train.controller.outcome import RunOutcome
    from miniray.train.run.controller_thread import ControllerThread
    from miniray.train.storage.storage import RunStorage
    from miniray.train.worker.controller_client import Carrier
    from miniray.train.worker.session import SessionSetup


def info_of_this_process() -> WorkerInfo:
    """Where a rank runs in local mode: on no node, and its output is the program's own."""
    host = socket.gethostname()
    return WorkerInfo(node_id=host, address=host, port=0, pid=os.getpid(), accelerator_ids={})


@dataclasses.dataclass(frozen=True)
class Probe:
    """By what a rank finds out whether it shares the storage of rank 0."""

    storage: RunStorage
    token: str


@dataclasses.dataclass(frozen=True)
class Arrival:
    """What a rank tells before the train loop begins: also what is wrong with the storage."""

    info: WorkerInfo
    problem: str


@dataclasses.dataclass(frozen=True)
class Work:
    """What the main thread of rank 0 does in an attempt: run the train loop once.

    Attributes:
        setup: What the controller gives the rank.
        carrier: Its way to the controller.
        finish: Gets the outcome; called in the main thread.
    """

    setup: SessionSetup
    carrier: Carrier
    finish: Callable[[WorkerOutcome], None]


class OtherRanks:
    """What the ranks beside 0 are told, and what they say.

    Each asks for the probe, then for its setup, saying what it has found, then sends its calls of
    the controller and how its train loop ended, and asks last for the outcome of the run. None in
    place of probe and setup means that the run ends without an attempt.

    Args:
        size: Number of ranks with rank 0.
        thread: The controller's thread.
    """

    def __init__(self, size: int, thread: ControllerThread) -> None:
        self._thread = thread
        self._probe: concurrent.futures.Future[Probe | None] = concurrent.futures.Future()
        self._setup: concurrent.futures.Future[SessionSetup | None] = concurrent.futures.Future()
        self._outcome: concurrent.futures.Future[RunOutcome] = concurrent.futures.Future()
        # In the controller's thread only.
        self._ranks = range(1, size)
        self._arrivals: dict[int, Arrival] = {}
        self._lost: set[int] = set()
        self._news = asyncio.Event()
        self._finish: Callable[[int, WorkerOutcome], None] | None = None

    # --- in the threads that read what they say -------------------------------------------

    def answer(
        self, rank: int, kind: str, arguments: tuple[Any, ...]
    ) -> concurrent.futures.Future[Any]:
        """What a rank gets for a request; see ``LinkServer.serve``."""
        if kind == "call":
            return self._thread.call(*arguments)
        if kind == "probe":
            return self._probe
        if kind == "outcome":
            return self._outcome
        if kind == "setup":
            self._thread.post(self._enter_arrival, rank, *arguments)
            return self._setup
        assert kind == "end", kind
        taken: concurrent.futures.Future[None] = concurrent.futures.Future()
        self._thread.post(self._enter_end, rank, *arguments)
        taken.set_result(None)
        return taken

    def lost(self, rank: int) -> None:
        """Take note that a rank will say nothing more."""
        self._thread.post(self._enter_loss, rank)

    # --- in the controller's thread -------------------------------------------------------

    async def arrive(self, probe: Probe) -> dict[int, Arrival]:
        """Show the ranks a probe; what each has found.

        Raises:
            GroupStartError: Some are gone.
        """
        self._probe.set_result(probe)
        while not self._lost and len(self._arrivals) < len(self._ranks):
            self._news.clear()
            await self._news.wait()
        if self._lost:
            raise GroupStartError({rank: _loss(rank) for rank in self._lost})
        return self._arrivals

    def begin(self, setup: SessionSetup, finish: Callable[[int, WorkerOutcome], None]) -> None:
        """Let the ranks begin their train loops.

        Args:
            setup: What they are given.
            finish: Called with each rank and how its train loop ended.
        """
        self._finish = finish
        self._setup.set_result(setup)
        for rank in self._lost:
            finish(rank, WorkerOutcome(failure=_loss(rank)))

    def _enter_arrival(self, rank: int, arrival: Arrival) -> None:
        self._arrivals[rank] = arrival
        self._news.set()

    def _enter_end(self, rank: int, outcome: WorkerOutcome) -> None:
        if self._finish is not None:
            self._finish(rank, outcome)

    def _enter_loss(self, rank: int) -> None:
        self._lost.add(rank)
        self._news.set()
        if self._finish is not None:  # it counts only for a rank whose end is not known
            self._finish(rank, WorkerOutcome(failure=_loss(rank)))

    # --- when the controller runs no more ---------------------------------------------------

    def end(self, outcome: RunOutcome) -> None:
        """Tell the ranks how the run has ended, once."""
        if self._outcome.done():
            return
        for unasked in (self._probe, self._setup):
            if not unasked.done():
                unasked.set_result(None)
        self._outcome.set_result(outcome)


class LocalGroup:
    """The processes of a run as the controller sees them.

    Args:
        size: Number of ranks.
        others: Those beside rank 0; None if there are none.
        run_here: Has the main thread do the work of rank 0.
        thread: The controller's thread.

    Attributes:
        infos: Where each rank runs, in order of rank.
    """

    def __init__(
        self,
        size: int,
        others: OtherRanks | None,
        run_here: Callable[[Work], None],
        thread: ControllerThread,
    ) -> None:
        self.size = size
        self.infos = [info_of_this_process()]
        self._others = others
        self._run_here = run_here
        self._thread = thread

    async def place(self) -> None:
        """Nothing has to be reserved."""

    async def start(self, carrier: Carrier, attempt: int) -> None:
        """The processes run, and are connected."""
        del carrier, attempt

    async def storage_problems(self, storage: RunStorage, token: str) -> dict[int, str]:
        """What keeps ranks from using the storage in which this probe is, by rank."""
        if self._others is None:
            return {}
        arrivals = await self._others.arrive(Probe(storage, token))
        self.infos += [arrivals[rank].info for rank in sorted(arrivals)]
        return {rank: arrival.problem for rank, arrival in arrivals.items() if arrival.problem}

    def run(
        self, loop: Any, setup: SessionSetup, carrier: Carrier
    ) -> list[asyncio.Future[WorkerOutcome]]:
        """Let every process run the train loop; the outcomes, in order of rank."""
        del loop  # each has its own
        machine = asyncio.get_running_loop()
        outcomes = [machine.create_future() for _ in range(self.size)]

        def finish(rank: int, outcome: WorkerOutcome) -> None:
            if not outcomes[rank].done():
                outcomes[rank].set_result(outcome)

        if self._others is not None:
            self._others.begin(setup, finish)
        tell = functools.partial(self._thread.post, finish, 0)
        self._run_here(Work(setup, carrier, tell))
        return outcomes

    async def stop(self, *, graceful: bool) -> None:
        """The processes end when their programs do."""


def _loss(rank: int) -> WorkerFailure:
    return WorkerFailure(
        f"Rank {rank} is gone: its process has ended before its train loop, or its machine can't "
        f"be reached."
    )
