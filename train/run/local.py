"""Local mode: the train loop runs in the driver's process, and no cluster is started.

The controller is the one of every run, in a thread beside the loop; the worker group is this
process, or those that torchrun has started, of which rank 0 has the controller. Each rank, this one
too, requests its setup from that thread, then calls the controller, reports the end of its train
loop, and requests the outcome of the run. There is a single attempt. The backend connects the
ranks.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import functools
import logging
import threading
from concurrent.futures import CancelledError, Future, wait
from typing import TYPE_CHECKING, Any, cast

from miniray.train.base.exceptions import (
    ControllerLostError,
    GroupStartError,
    StorageNotSharedError,
    WorkerFailure,
    describe,
)
from miniray.train.base.ranks import listed
from miniray.train.base.states import RunState, ScalingDecision
from miniray.train.controller.controller import TrainController
from miniray.train.controller.feed import Seen
from miniray.train.controller.run_spec import STOPPING, RunOutcome
from miniray.train.controller.waits import within
from miniray.train.run.display import PAUSE, make_display
from miniray.train.storage.filesystem import refuse_memory
from miniray.train.worker import context
from miniray.train.worker.controller_client import run_has_ended
from miniray.train.worker.local_link import LinkClient, LinkServer
from miniray.train.worker.worker import TrainWorker, WorkerOutcome

if TYPE_CHECKING:
    from collections.abc import Callable

    from miniray.train.controller.run_spec import RunSpec
    from miniray.train.controller.worker_group import WorkerGroup
    from miniray.train.storage.storage import RunStorage
    from miniray.train.worker.backend import LocalPlace
    from miniray.train.worker.controller_client import Carrier
    from miniray.train.worker.session import RankSession, SessionSetup
    from miniray.train.worker.worker import TrainLoop

logger = logging.getLogger(__name__)


#: Seconds that a run gets to end after Ctrl-C, when no upload runs any more.
ABORT_TIMEOUT = 10.0

#: Seconds after which the user sees what a stopping run waits for.
TELL_AFTER = 0.5

#: Seconds that rank 0 waits at the end for other ranks to have read how the run ended. After a
#: failure they may wait for rank 0 in a collective of the framework, and not read it.
END_TIMEOUT = 10.0
FAILURE_TIMEOUT = 1.0


class ControllerThread:
    """A controller, the thread that it runs in, and its worker group.

    Args:
        spec: The run.
        size: Number of ranks.
        link: To the ranks beside 0, if there are any.
    """

    infos = ()  # what ranks print is the program's own output

    def __init__(self, spec: RunSpec, size: int, link: LinkServer | None) -> None:
        self.size = size
        self._name = spec.name
        self._user_callbacks = spec.run_config.callbacks or ()
        self._controller = TrainController(spec, lambda *_: cast("WorkerGroup", self))
        self._link = link
        self._machine = asyncio.new_event_loop()
        self._outcome: Future[RunOutcome] = Future()
        self._lock = threading.Lock()
        self._over = False
        #: Answers for ranks: the setup is None if the run ends without an attempt.
        self._setup: asyncio.Future[SessionSetup | None] = self._machine.create_future()
        self._final: asyncio.Future[RunOutcome] = self._machine.create_future()
        #: How the train loop of each rank ended.
        self._outcomes: list[asyncio.Future[WorkerOutcome]] = [
            self._machine.create_future() for _ in range(size)
        ]
        self._missing = set(range(size))
        self._all_here, self._all_gone = asyncio.Event(), asyncio.Event()
        self._left = set(range(1, size))  # ranks that have not hung up

    # --- for other threads --------------------------------------------------------------------

    def begin(self, loop: Any) -> None:
        """Start the run."""

        def serve() -> None:
            try:
                self._outcome.set_result(self._machine.run_until_complete(self._run(loop)))
            except BaseException as error:  # noqa: BLE001 - raised by outcome()
                self._outcome.set_exception(error)
            finally:
                self._close()

        self._thread = threading.Thread(target=serve, name="train-controller", daemon=True)
        self._thread.start()

    def outcome(self) -> RunOutcome:
        self._thread.join()
        return self._outcome.result()

    def ask(self, rank: int, kind: str, *arguments: Any) -> Future[Any]:
        """Request ``setup`` or ``outcome``, report the ``end``, or call the controller.

        Returns:
            The answer: it is cancelled if the run ends meanwhile.

        Raises:
            ControllerLostError: The run has ended.
        """
        with self._lock:
            if self._over:
                raise run_has_ended()
            answer = self._answer(rank, kind, arguments)
            return asyncio.run_coroutine_threadsafe(answer, self._machine)

    def abort(self) -> None:
        """Stop the run once the uploads that ranks have begun have ended; wait for its end.

        Raises:
            KeyboardInterrupt: The user interrupted this wait, and the run has ended without the
                uploads.
        """
        try:
            self._stop(at_once=False)
        except KeyboardInterrupt:
            self._stop(at_once=True)
            raise

    def _stop(self, *, at_once: bool) -> None:
        with contextlib.suppress(ControllerLostError):  # it has ended already
            stopping = self.ask(0, "abort", at_once)
            _, waits = wait([stopping], TELL_AFTER)
            if waits:
                logger.warning(STOPPING)
                wait([stopping])
        self._thread.join(ABORT_TIMEOUT)
        if self._thread.is_alive():
            logger.warning("Run %s did not end within %s s.", self._name, ABORT_TIMEOUT)

    # --- in the thread ------------------------------------------------------------------------

    async def _run(self, loop: Any) -> RunOutcome:
        shown = asyncio.ensure_future(self._show())
        if self._link is not None:
            self._link.serve(self.ask, self._lose)
        try:
            carrier = functools.partial(self.ask, 0, "call")
            outcome = await self._controller.run(carrier, [loop])
        finally:
            await asyncio.wait({shown}, timeout=1)
            shown.cancel()
        if not self._setup.done():
            self._setup.set_result(None)
        self._final.set_result(outcome)
        if self._link is not None:
            # The main thread may wait where no other rank will come to. A rank that receives a
            # failure ends its process, and torchrun ends this one.
            finished = outcome.state is RunState.FINISHED
            await within(END_TIMEOUT if finished else FAILURE_TIMEOUT, self._all_gone.wait())
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

    async def _answer(self, rank: int, kind: str, arguments: tuple[Any, ...]) -> Any:
        if kind == "setup":
            self._come(rank)
            return await asyncio.shield(self._setup)  # one that goes away leaves the others waiting
        if kind == "outcome":
            return await asyncio.shield(self._final)
        if kind == "end":
            return self._end(rank, *arguments)
        return await getattr(self._controller, kind)(*arguments)

    def _come(self, rank: int) -> None:
        self._missing.discard(rank)
        if not self._missing:
            self._all_here.set()

    def _end(self, rank: int, outcome: WorkerOutcome) -> None:
        if not self._outcomes[rank].done():
            self._outcomes[rank].set_result(outcome)

    def _lose(self, rank: int) -> None:
        """Enter that the connection of a rank has ended; from any thread."""
        with self._lock:
            if not self._over:
                self._machine.call_soon_threadsafe(self._hung_up, rank)

    def _hung_up(self, rank: int) -> None:
        self._come(rank)  # it is not waited for
        self._left.discard(rank)
        if not self._left:
            self._all_gone.set()
        lost = WorkerFailure(
            f"Rank {rank} is gone: its process has ended before its train loop, or its machine "
            f"can't be reached."
        )
        self._end(rank, WorkerOutcome(failure=lost))  # counts only if its end is not known

    def _close(self) -> None:
        """Take no more calls, and end those that are under way: someone may wait for them."""
        with self._lock:
            self._over = True
        self._machine.run_until_complete(_end_all())
        self._machine.close()
        if self._link is not None:
            self._link.close()

    # --- what the controller does with a worker group ------------------------------------------

    async def place(self) -> None:
        """Do nothing: these processes need no resources of a cluster."""

    async def start(self, carrier: Carrier, attempt: int) -> None:
        """Do nothing: the processes run, and are connected."""
        del carrier, attempt

    async def storage_problems(self, storage: RunStorage, token: str) -> dict[int, str]:
        """Wait for the other ranks; each looks by itself whether it shares the storage.

        Raises:
            GroupStartError: Some are gone.
            TimeoutError: Some did not connect in time.
        """
        del storage, token
        if self._link is not None and not await within(self._link.timeout, self._all_here.wait()):
            raise TimeoutError(
                f"{listed(self._missing).capitalize()} did not connect with rank 0 in "
                f"{self._link.timeout:g} s."
            )
        ended = {rank: each.result() for rank, each in enumerate(self._outcomes) if each.done()}
        lost = {rank: each.failure for rank, each in ended.items() if each.failure is not None}
        if lost:
            raise GroupStartError(lost)
        return {}

    def run(
        self, loop: Any, setup: SessionSetup, carrier: Carrier
    ) -> list[asyncio.Future[WorkerOutcome]]:
        """Let every process run the train loop; return the outcomes in order of rank."""
        del loop, carrier  # each has its own
        self._setup.set_result(setup)
        return self._outcomes

    async def end_rank(self, rank: int) -> None:
        """Do nothing: the processes end when their programs do."""

    async def stop(self, *, graceful: bool) -> None:
        """Do nothing: the processes end when their programs do."""


async def _end_all() -> None:
    await asyncio.sleep(0)  # calls that were handed over become tasks
    left = asyncio.all_tasks() - {asyncio.current_task()}
    for task in left:
        task.cancel()
    await asyncio.gather(*left, return_exceptions=True)


@dataclasses.dataclass(frozen=True)
class LocalEnd:
    """How a run in local mode ended.

    Attributes:
        error: What the train loop raised in this process, if it did.
    """

    outcome: RunOutcome
    storage: RunStorage
    error: BaseException | None


def run_locally(spec: RunSpec, loop: TrainLoop) -> LocalEnd:
    """Run the train loop in this process to its end.

    Raises:
        KeyboardInterrupt: The user stopped the run.
        RuntimeError: Another thread of this process runs a train loop.
        ValueError: The storage is in the memory of this process, and there are others.
    """
    with contextlib.ExitStack() as leave:
        leave.enter_context(context.process_of_a_run(spec.name))
        leave.callback(spec.backend.leave_local)
        place = spec.backend.join_local(spec.scaling_config)
        if place.link is not None:
            leave.callback(place.link.close)
            refuse_memory(spec.storage.filesystem, spec.run_config.storage_url)
        if isinstance(place.link, LinkClient):
            return _follow(spec, loop, place, place.link)
        return _lead(spec, loop, place, place.link)


class _LocalWorker(TrainWorker):
    """A rank that is not an actor, and keeps what its train loop raised."""

    def __init__(self, spec: RunSpec, place: LocalPlace) -> None:
        super().__init__(spec.backend, spec.run_config.logging_config)
        self._ranks = place.ranks
        self.storage = spec.storage
        self.error: BaseException | None = None

    def take_part(self, loop: TrainLoop, ask: Callable[..., Future[Any]]) -> WorkerOutcome | None:
        """Run the train loop once all ranks are there; return how it ended; None if it did not run.

        Args:
            ask: ``ControllerThread.ask`` for this rank, wherever that is.

        Raises:
            ControllerLostError: The run is over; the train loop may be the first to notice.
            KeyboardInterrupt: The user stopped the run.
        """
        setup: SessionSetup | None = ask("setup").result()
        if setup is None:
            return None
        self.storage = setup.storage
        if self.storage.run_facts().get("token") != setup.token:
            self.error = _not_shared(self.storage)
            return WorkerOutcome(failure=WorkerFailure.of(self.error))
        outcome = self.run(loop, setup, functools.partial(ask, "call"))
        if isinstance(self.error, KeyboardInterrupt | ControllerLostError):
            raise self.error
        return outcome

    def finish_uploads(self) -> None:
        """Wait until the upload that runs in the background has ended; others are not begun."""
        if self._session is not None:
            self._session.close(wait=True)

    def _give_up(self, session: RankSession, error: BaseException) -> WorkerOutcome:
        self.error = error
        if isinstance(error, KeyboardInterrupt):
            session.close()  # the upload that runs goes on
        return super()._give_up(session, error)


def _not_shared(storage: RunStorage) -> StorageNotSharedError:
    return StorageNotSharedError(
        f"The storage path {storage.storage_fs_path} is not shared by the machines of this run: a "
        f"rank did not find there what rank 0 had written. Set RunConfig(storage_path=...) to a "
        f"network folder or a URL that all machines reach."
    )


def _follow(spec: RunSpec, loop: TrainLoop, place: LocalPlace, link: LinkClient) -> LocalEnd:
    """Run the train loop as a rank that has no controller."""
    worker = _LocalWorker(spec, place)
    try:
        outcome = worker.take_part(loop, link.ask)
        if outcome is not None and outcome.failure is not None:
            # Rank 0 may be waiting for this one in a collective of the framework, so this one does
            # not wait for the run: when its process ends, torchrun ends the others.
            with contextlib.suppress(ControllerLostError):
                link.ask("end", outcome)
            failures = {place.ranks.world_rank: outcome.failure}
            told = describe(failures, ())
            ended = RunOutcome(RunState.ERRORED, message=told, worker_failures=failures)
            return LocalEnd(ended, worker.storage, worker.error)
        if outcome is not None:
            link.ask("end", outcome)
        ended = link.ask("outcome").result()
    except ControllerLostError as error:
        lost = WorkerFailure.of(error)
        ended = RunOutcome(RunState.ERRORED, message=str(error), controller_failure=lost)
        return LocalEnd(ended, worker.storage, error)
    finally:
        worker.finish_uploads()  # this process may end now
    return LocalEnd(ended, worker.storage, None)


def _lead(spec: RunSpec, loop: TrainLoop, place: LocalPlace, link: LinkServer | None) -> LocalEnd:
    """Run the train loop as rank 0, with the controller in a thread beside it."""
    size = place.ranks.world_size
    # The processes are those that there are.
    group = ScalingDecision(size, spec.scaling_config.worker_resources)
    spec = dataclasses.replace(spec, group=group)
    controller = ControllerThread(spec, size, link)
    worker = _LocalWorker(spec, place)
    ask = functools.partial(controller.ask, place.ranks.world_rank)
    controller.begin(loop)
    try:
        with contextlib.suppress(CancelledError, ControllerLostError):  # it is over: see below
            if (ended := worker.take_part(loop, ask)) is not None:
                ask("end", ended)
        outcome = controller.outcome()
        worker.finish_uploads()
    except BaseException:  # Ctrl-C, or a storage that this thread can't read
        controller.abort()
        raise
    # What a loop raises because its controller or another rank has failed is no cause.
    error = worker.error if 0 in outcome.worker_failures else None
    return LocalEnd(outcome, spec.storage, error)
