"""Local mode: the train loop runs in the driver's process, and no cluster is started.

The controller is the one of every run, in a thread beside the loop; the worker
group is this process, or the processes that torchrun has started, of which rank 0
has the controller. How these find each other is the backend's part.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
from concurrent.futures import CancelledError
from typing import TYPE_CHECKING, Any

from miniray.train.base.exceptions import (
    ControllerLostError,
    StorageNotSharedError,
    WorkerFailure,
    describe,
)
from miniray.train.base.states import RunState, ScalingDecision
from miniray.train.config.run import FailureConfig
from miniray.train.controller.run_spec import RunOutcome
from miniray.train.run.controller_thread import ControllerThread
from miniray.train.storage.filesystem import refuse_memory
from miniray.train.worker import context
from miniray.train.worker.local_link import LinkClient, LinkServer
from miniray.train.worker.worker import TrainWorker, WorkerOutcome

if TYPE_CHECKING:
    from collections.abc import Callable
    from concurrent.futures import Future

    from miniray.train.controller.run_spec import RunSpec
    from miniray.train.storage.storage import RunStorage
    from miniray.train.worker.backend import LocalPlace
    from miniray.train.worker.session import RankSession, SessionSetup
    from miniray.train.worker.worker import TrainLoop


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
    """A rank that is no actor, and keeps what its train loop raised."""

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
    # The processes are those that there are, and run once; torchrun has --max-restarts.
    group = ScalingDecision(size, spec.scaling_config.worker_resources)
    never = FailureConfig(controller_failure_limit=0)
    spec = dataclasses.replace(spec, failures=never, group=group)
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
