"""The controller of a run in local mode, in a thread, and the worker group that it has there.

The thread has an event loop of its own; other threads reach the controller by calls that return
futures, as they would reach an actor. The group is this process, and those that torchrun has
started; the controller sees it as any worker group.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import functools
import logging
import threading
from typing import TYPE_CHECKING, Any, cast

from miniray.train.base.exceptions import ControllerLostError
from miniray.train.base.failures import GroupStartError, WorkerFailure
from miniray.train.base.policies import RunState
from miniray.train.controller.controller import TrainController
from miniray.train.controller.outcome import STOPPING
from miniray.train.progress.display import PAUSE, make_display
from miniray.train.progress.feed import Seen
from miniray.train.worker.controller_client import run_has_ended
from miniray.train.worker.worker import WorkerOutcome

if TYPE_CHECKING:
    from collections.abc import Callable

    from miniray.train.controller.outcome import RunOutcome
    from miniray.train.controller.run_spec import RunSpec
    from miniray.train.controller.worker_group import WorkerGroup
    from miniray.train.storage.storage import RunStorage
    from miniray.train.worker.controller_client import Carrier
    from miniray.train.worker.local_link import LinkServer
    from miniray.train.worker.session import SessionSetup

    RunOnce = Callable[[SessionSetup, Carrier], WorkerOutcome]
    #: What the main thread of rank 0 does in an attempt.
    Turn = Callable[[RunOnce], None]

logger = logging.getLogger(__name__)

#: Seconds that a run gets to end after Ctrl-C, when no upload runs any more.
ABORT_TIMEOUT = 10.0

#: Seconds after which the user is told what a run that is to stop waits for.
TELL_AFTER = 0.5


#: Seconds that rank 0 waits at the end for other ranks to have read how the run ended. After a
#: failure they may wait for rank 0 in a collective of the framework, and read nothing more.
END_TIMEOUT = 10.0
FAILURE_TIMEOUT = 1.0


class ControllerThread:
    """A controller and the thread that it runs in.

    Args:
        spec: The run.
        group: The processes of all its attempts.
    """

    def __init__(self, spec: RunSpec, group: LocalGroup) -> None:
        self._name = spec.name
        self._user_callbacks = spec.run_config.callbacks or ()
        self._controller = TrainController(spec, lambda *_: cast("WorkerGroup", group))
        self._group = group
        self._machine = asyncio.new_event_loop()
        self._outcome: concurrent.futures.Future[RunOutcome] = concurrent.futures.Future()
        self._lock = threading.Lock()
        self._over = False

    def start(self, loop: Any, when_over: Callable[[], None]) -> None:
        """Start the run."""

        def serve() -> None:
            try:
                self._outcome.set_result(self._machine.run_until_complete(self._run(loop)))
            except BaseException as error:  # noqa: BLE001 - raised by outcome()
                self._outcome.set_exception(error)
            finally:
                self._close()
                when_over()

        threading.Thread(target=serve, name="train-controller", daemon=True).start()

    def outcome(self) -> RunOutcome:
        return self._outcome.result()

    def call(self, method: str, *arguments: Any) -> concurrent.futures.Future[Any]:
        """Call a method of the controller; from any thread.

        Returns:
            What becomes of it: it is cancelled if the run ends meanwhile.

        Raises:
            ControllerLostError: The run has ended.
        """
        with self._lock:
            if self._over:
                raise run_has_ended()
            coroutine = getattr(self._controller, method)(*arguments)
            return asyncio.run_coroutine_threadsafe(coroutine, self._machine)

    def abort(self, *, at_once: bool = False) -> None:
        """Stop the run once the uploads that ranks have begun have ended; wait for its end.

        Raises:
            KeyboardInterrupt: The user did not want to wait for them any more, and the run has
                ended without.
        """
        try:
            self._stop(at_once=at_once)
        except KeyboardInterrupt:
            self._stop(at_once=True)
            raise

    def _stop(self, *, at_once: bool) -> None:
        with contextlib.suppress(ControllerLostError):  # it has ended already
            stopping = self.call("abort", at_once)
            _, waits = concurrent.futures.wait([stopping], TELL_AFTER)
            if waits:
                logger.warning(STOPPING)
                concurrent.futures.wait([stopping])
        _, runs = concurrent.futures.wait([self._outcome], ABORT_TIMEOUT)
        if runs:
            logger.warning("Run %s did not end within %s s.", self._name, ABORT_TIMEOUT)

    async def _run(self, loop: Any) -> RunOutcome:
        shown = asyncio.ensure_future(self._show())
        self._group.serve(self._controller)
        try:
            carrier = functools.partial(self.call, "call")
            outcome = await self._controller.run(carrier, [loop])
        finally:
            await asyncio.wait({shown}, timeout=1)
            shown.cancel()
        # The main thread may wait where no other rank will come to. A rank that is told of a
        # failure ends its process, and torchrun ends this one.
        await self._group.part(outcome)
        return outcome

    async def _show(self) -> None:
        # Lines, also on a terminal: a debugger in the train loop needs the screen.
        display = make_display(self._name, self._user_callbacks, live=False)
        seen, over = Seen(), False
        while not over:
            progress = await self._controller.progress(seen)
            display.show(progress)
            seen, over = progress.seen, progress.state.terminal
            if not over:
                await asyncio.sleep(PAUSE)
        display.close()

    def _close(self) -> None:
        """Take no more calls, and end those that are under way: someone may wait for them."""
        with self._lock:
            self._over = True
        self._machine.run_until_complete(_end_all())
        self._machine.close()


async def _end_all() -> None:
    await asyncio.sleep(0)  # calls that were handed over become tasks
    left = asyncio.all_tasks() - {asyncio.current_task()}
    for task in left:
        task.cancel()
    await asyncio.gather(*left, return_exceptions=True)


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
