"""Local mode: the train loop runs in the driver's process, and no cluster is started.

The controller is the one of every run, in a thread beside the loop; the worker
group is this process, or the processes that torchrun has started, of which rank 0
has the controller. How these find each other is the backend's part.
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import dataclasses
import functools
import logging
import queue
import signal
import threading
from typing import TYPE_CHECKING, Any

from miniray.train.base.exceptions import ControllerLostError, StorageNotSharedError
from miniray.train.base.failures import WorkerFailure, describe
from miniray.train.base.policies import RunState, ScalingDecision
from miniray.train.config.rules import FailureConfig, FixedScaling, LimitedRetries
from miniray.train.controller.outcome import STOPPING, RunOutcome
from miniray.train.run.controller_thread import FAILURE_TIMEOUT, ControllerThread, LocalGroup
from miniray.train.storage.filesystem import refuse_memory
from miniray.train.worker import context
from miniray.train.worker.local_link import LinkClient, LinkServer
from miniray.train.worker.session import RankSession
from miniray.train.worker.worker import TrainWorker, WorkerOutcome

if TYPE_CHECKING:
    from collections.abc import Iterator

    from miniray.train.base.ranks import Ranks
    from miniray.train.controller.run_spec import RunSpec
    from miniray.train.run.controller_thread import Turn
    from miniray.train.storage.storage import RunStorage
    from miniray.train.worker.backend import LocalPlace
    from miniray.train.worker.controller_client import Carrier
    from miniray.train.worker.session import SessionSetup
    from miniray.train.worker.worker import TrainLoop


logger = logging.getLogger(__name__)


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


class DeferredInterrupts:
    """Ctrl-C where the train loop is in the thread that signals interrupt.

    On workers the first Ctrl-C reaches the driver, and cuts no upload off. Here an upload is made
    to end first, if it runs in that thread. What runs in other threads goes on by itself.

    Attributes:
        at_once: Whether nothing is to be waited for any more.
    """

    def __init__(self) -> None:
        self.at_once = False

    @contextlib.contextmanager
    def deferred(self) -> Iterator[None]:
        """Raise KeyboardInterrupt at the end of the block; at once where it comes twice.

        Only where it would be raised: elsewhere a program has its own way with the signal.
        """
        ours = threading.current_thread() is threading.main_thread()
        if not ours or signal.getsignal(signal.SIGINT) is not signal.default_int_handler:
            yield
            return
        asked = False

        def handle(*_: Any) -> None:
            nonlocal asked
            if asked:
                self.at_once = True
                raise KeyboardInterrupt
            asked = True
            logger.warning(STOPPING)

        signal.signal(signal.SIGINT, handle)
        try:
            yield
        finally:
            signal.signal(signal.SIGINT, signal.default_int_handler)
        if asked:
            raise KeyboardInterrupt


class _LocalWorker(TrainWorker):
    """A rank that is no actor, and keeps what its train loop raised."""

    def __init__(self, spec: RunSpec, place: LocalPlace) -> None:
        super().__init__(spec.backend, spec.run_config.logging_config)
        self._ranks = place.ranks
        self._session: RankSession | None = None
        self.interrupts = DeferredInterrupts()
        self.error: BaseException | None = None

    def run_once(self, loop: TrainLoop, setup: SessionSetup, carrier: Carrier) -> WorkerOutcome:
        """Run the train loop; an interrupt by the user is raised."""
        self.error = None
        outcome = self.run(loop, setup, carrier)
        if isinstance(self.error, KeyboardInterrupt):
            raise self.error
        return outcome

    def finish_uploads(self) -> None:
        """After an interrupt, wait until the upload that runs in the background has ended."""
        if self._session is not None and not self.interrupts.at_once:
            self._session.close(wait=True)
            self._session.confirm_reports()

    def _make_session(self, setup: SessionSetup, ranks: Ranks, carrier: Carrier) -> RankSession:
        self._session = RankSession(setup, ranks, carrier, self.interrupts.deferred)
        return self._session

    def _give_up(self, session: RankSession, error: BaseException) -> WorkerOutcome:
        self.error = error
        if isinstance(error, KeyboardInterrupt):
            # The upload that runs goes on, and one of the user asks the session for the storage.
            session.close()
        else:
            # The process goes on, and a later attempt may use the name that is being uploaded.
            session.close(wait=True)
            context.set_session(None)
        return super()._give_up(session, error)


# --- other ranks than 0 --------------------------------------------------------------------


def _follow(spec: RunSpec, loop: TrainLoop, place: LocalPlace, link: LinkClient) -> LocalEnd:
    """Run the train loop as a rank that has no controller."""
    worker = _LocalWorker(spec, place)
    storage = spec.storage
    try:
        setup: SessionSetup | None = link.ask("setup").result()
        if setup is not None:
            storage = setup.storage
            if storage.run_facts().get("token") == setup.token:
                outcome = worker.run_once(loop, setup, functools.partial(link.ask, "call"))
            else:
                worker.error = _not_shared(storage)
                outcome = WorkerOutcome(failure=WorkerFailure.of(worker.error))
            if isinstance(worker.error, ControllerLostError):
                raise worker.error  # the train loop was only the first to notice
            if outcome.failure is None:
                link.ask("end", outcome)
            else:
                # Rank 0 may be waiting for this one in a collective of the framework, so this one
                # does not wait for the run: when its process ends, torchrun ends the others.
                with contextlib.suppress(ControllerLostError):
                    concurrent.futures.wait([link.ask("end", outcome)], FAILURE_TIMEOUT)
                failures = {place.ranks.world_rank: outcome.failure}
                ended = RunOutcome(
                    RunState.ERRORED, message=describe(failures, ()), worker_failures=failures
                )
                return LocalEnd(ended, storage, worker.error)
        ended = link.ask("outcome").result()
    except ControllerLostError as error:
        lost = WorkerFailure.of(error)
        ended = RunOutcome(RunState.ERRORED, message=str(error), controller_failure=lost)
        return LocalEnd(ended, storage, error)
    except KeyboardInterrupt:
        worker.finish_uploads()
        raise
    return LocalEnd(ended, storage, None)


def _not_shared(storage: RunStorage) -> StorageNotSharedError:
    return StorageNotSharedError(
        f"The storage path {storage.storage_fs_path} is not shared by the machines of this run: a "
        f"rank did not find there what rank 0 had written. Set RunConfig(storage_path=...) to a "
        f"network folder or a URL that all machines reach."
    )


# --- rank 0 ------------------------------------------------------------------------------


def _lead(spec: RunSpec, loop: TrainLoop, place: LocalPlace, link: LinkServer | None) -> LocalEnd:
    """Run attempts, with the controller in a thread, until that ends the run."""
    size = place.ranks.world_size
    # The processes are those that there are; torchrun starts them again, with --max-restarts.
    scaling = FixedScaling(ScalingDecision(size, spec.scaling_config.worker_resources))
    never = LimitedRetries(FailureConfig(controller_failure_limit=0))
    policy = spec.failure_policy if link is None else never
    spec = dataclasses.replace(spec, failure_policy=policy, scaling_policy=scaling)
    #: What this thread is to do; None at the end of the run.
    following: queue.SimpleQueue[Turn | None] = queue.SimpleQueue()
    controller = ControllerThread(spec, LocalGroup(size, link, following.put))
    worker = _LocalWorker(spec, place)
    controller.start(loop, lambda: following.put(None))
    try:
        while (turn := following.get()) is not None:
            turn(functools.partial(worker.run_once, loop))
    except KeyboardInterrupt:
        controller.abort(at_once=worker.interrupts.at_once)
        raise
    outcome = controller.outcome()
    # What a loop raises because its controller or another rank has failed is no cause.
    error = worker.error if 0 in outcome.worker_failures else None
    return LocalEnd(outcome, spec.storage, error)
