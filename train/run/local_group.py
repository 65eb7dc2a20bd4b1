"""The worker group of a run in local mode: this process, and those that torchrun has started.

The controller sees it as any worker group. All of it runs in the event loop of the controller's
thread.
"""

from __future__ import annotations

import asyncio
import contextlib
from typing import TYPE_CHECKING, Any

from miniray.train.base.failures import GroupStartError, WorkerFailure
from miniray.train.base.policies import RunState
from miniray.train.worker.worker import WorkerOutcome

if TYPE_CHECKING:
    from collections.abc import Callable

    from miniray.train.controller.controller import TrainController
    from miniray.train.controller.outcome import RunOutcome
    from miniray.train.storage.storage import RunStorage
    from miniray.train.worker.controller_client import Carrier
    from miniray.train.worker.local_link import LinkServer
    from miniray.train.worker.session import SessionSetup

    RunOnce = Callable[[SessionSetup, Carrier], WorkerOutcome]
    #: What the main thread of rank 0 does in an attempt.
    Turn = Callable[[RunOnce], None]

#: Seconds that rank 0 waits at the end for other ranks to have read how the run ended. After a
#: failure they may wait for rank 0 in a collective of the framework, and read nothing more.
END_TIMEOUT = 10.0
FAILURE_TIMEOUT = 1.0


class LocalGroup:
    """The processes of a run as the controller sees them; one for all attempts.

    A rank beside 0 asks for its setup, then sends its calls of the controller and how its train
    loop ended, and asks last for the outcome of the run. None in place of the setup means that the
    run ends without an attempt.

    Args:
        link: To the ranks beside 0, if there are any. They have a single attempt.
        run_here: Has the main thread call this, with what runs the train loop of rank 0 once.
    """

    infos = ()  # what ranks print is the program's own output

    def __init__(
        self, size: int, link: LinkServer | None, run_here: Callable[[Turn], None]
    ) -> None:
        self.size = size
        self._link = link
        self._run_here = run_here
        self._lost: set[int] = set()
        self._finish: Callable[[int, WorkerOutcome], None] | None = None

    def serve(self, controller: TrainController) -> None:
        """Answer the other ranks from now on."""
        loop = asyncio.get_running_loop()
        self._setup: asyncio.Future[SessionSetup | None] = loop.create_future()
        self._outcome: asyncio.Future[RunOutcome] = loop.create_future()
        self._controller = controller
        if self._link is not None:
            self._link.serve(self._answer, self._lose)

    async def _answer(self, rank: int, kind: str, arguments: tuple[Any, ...]) -> Any:
        if kind == "call":
            return await self._controller.call(*arguments)
        if kind == "end":
            if self._finish is not None:
                self._finish(rank, *arguments)
            return None
        # Shielded: one that goes away leaves the others waiting.
        told: asyncio.Future[Any] = self._setup if kind == "setup" else self._outcome
        return await asyncio.shield(told)

    def _lose(self, rank: int) -> None:
        self._lost.add(rank)
        if self._finish is not None:  # it counts only for a rank whose end is not known
            self._finish(rank, WorkerOutcome(failure=_loss(rank)))

    async def part(self, outcome: RunOutcome) -> None:
        """Tell the ranks how the run has ended, stay until they have read it, and hang up."""
        if self._link is not None:
            if not self._setup.done():
                self._setup.set_result(None)
            self._outcome.set_result(outcome)
            finished = outcome.state is RunState.FINISHED
            await self._link.end(END_TIMEOUT if finished else FAILURE_TIMEOUT)

    # --- what the controller does with a worker group ------------------------------------------

    async def place(self) -> None:
        """Nothing has to be reserved."""

    async def start(self, carrier: Carrier, attempt: int) -> None:
        """The processes run, and are connected."""
        del carrier, attempt

    async def storage_problems(self, storage: RunStorage, token: str) -> dict[int, str]:
        """Wait for the other ranks; each looks by itself whether it shares the storage.

        Raises:
            GroupStartError: Some are gone.
            TimeoutError: Some did not connect in time.
        """
        del storage, token
        if self._link is not None:
            await self._link.wait_connected()
        if self._lost:
            raise GroupStartError({rank: _loss(rank) for rank in self._lost})
        return {}

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

        def turn(run_once: RunOnce) -> None:
            outcome = run_once(setup, carrier)
            with contextlib.suppress(RuntimeError):  # the run has ended, and its loop is closed
                machine.call_soon_threadsafe(finish, 0, outcome)

        self._finish = finish
        if not self._setup.done():
            self._setup.set_result(setup)
        for rank in self._lost:
            finish(rank, WorkerOutcome(failure=_loss(rank)))
        self._run_here(turn)
        return outcomes

    async def end_rank(self, rank: int) -> None:
        """The processes end when their programs do."""

    async def stop(self, *, graceful: bool) -> None:
        """The processes end when their programs do."""


def _loss(rank: int) -> WorkerFailure:
    return WorkerFailure(
        f"Rank {rank} is gone: its process has ended before its train loop, or its machine can't "
        f"be reached."
    )
