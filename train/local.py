"""Local mode: the train loop runs in the driver's process, and no cluster is started.

The controller is the one of every run, in a thread beside the loop; the worker
group is this process, or the processes that torchrun has started, of which rank 0
has the controller. How these reach each other is the backend's part.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import dataclasses
import os
import queue
import threading
from typing import TYPE_CHECKING, Any, cast

from miniray.config import parse
from miniray.train.controller import RunOutcome
from miniray.train.controller_thread import ControllerThread
from miniray.train.failures import describe
from miniray.train.policies import FailureDecision, FailurePolicy, ScalingDecision, ScalingPolicy
from miniray.train.session import Session
from miniray.train.state import RunState
from miniray.train.worker import TrainLoop, TrainWorker, WorkerOutcome

if TYPE_CHECKING:
    from collections.abc import Callable

    from miniray.train.backend import LocalLink, LocalPlace
    from miniray.train.config import ScalingConfig
    from miniray.train.controller import RunSpec
    from miniray.train.failures import WorkerFailure
    from miniray.train.policies import GroupFailure
    from miniray.train.session import SessionSetup
    from miniray.train.storage import RunStorage
    from miniray.train.worker_group import WorkerGroup

#: Variable that makes every run of a program a local one.
LOCAL_VARIABLE = "MINIRAY_TRAIN_LOCAL"

#: Seconds that rank 0 waits at the end for other ranks to have read how the run ended. After a
#: failure they may wait for rank 0 in a collective, and read nothing more.
END_TIMEOUT = 10.0
FAILURE_TIMEOUT = 1.0


def is_local(config: ScalingConfig) -> bool:
    """Whether a run with this configuration happens in the driver's process.

    Raises:
        ValueError: ``MINIRAY_TRAIN_LOCAL`` is neither 0 nor 1.
    """
    text = os.environ.get(LOCAL_VARIABLE) or "0"
    return bool(parse("train_local", bool, text)) or config.num_workers == 0


@dataclasses.dataclass(frozen=True)
class LocalEnd:
    """How a run in local mode ended.

    Attributes:
        outcome: What the controller says.
        storage: The run's folder.
        error: What the train loop raised in this process, if it did.
    """

    outcome: RunOutcome
    storage: RunStorage
    error: BaseException | None


def run_locally(spec: RunSpec, loop: TrainLoop) -> LocalEnd:
    """Run the train loop in this process to its end.

    Raises:
        KeyboardInterrupt: The user stopped the run.
    """
    try:
        place = spec.backend.join_local(spec.scaling_config)
        if place.ranks.world_rank == 0:
            return _Leader(spec, loop, place).run()
        return _follow(spec, loop, place)
    finally:
        spec.backend.leave_local()


class _LocalSession(Session):
    """A session whose controller is a thread of this process, or of rank 0's."""

    @staticmethod
    def _confirm(ref: Any) -> None:
        ref.result()


class _LocalWorker(TrainWorker):
    """A rank that is no actor, and keeps what its train loop raised."""

    session_class = _LocalSession

    def __init__(self, spec: RunSpec, place: LocalPlace) -> None:
        super().__init__(spec.backend)
        self._ranks = place.ranks
        self.error: BaseException | None = None

    def run_once(self, loop: TrainLoop, setup: SessionSetup) -> WorkerOutcome:
        """Run the train loop; an interrupt by the user is raised."""
        self.error = None
        outcome = self.run(TrainLoop(self._remembering, (loop,)), setup)
        if isinstance(self.error, KeyboardInterrupt):
            raise self.error
        return outcome

    def _remembering(self, loop: TrainLoop) -> Any:
        try:
            return loop()
        except BaseException as error:
            self.error = error
            raise


class _Method:
    """A function in the form of an actor's method."""

    def __init__(self, function: Callable[..., Any]) -> None:
        self.remote = function


# --- other ranks than 0 --------------------------------------------------------------------


def _follow(spec: RunSpec, loop: TrainLoop, place: LocalPlace) -> LocalEnd:
    """Run the train loop as a rank that has no controller."""
    assert place.link is not None
    rank = place.ranks.world_rank
    setup: SessionSetup | None = place.link.wait_for("setup")
    storage, error = spec.storage, None
    if setup is not None:
        storage = setup.storage
        worker = _LocalWorker(spec, place)
        handle = _FollowersHandle(place.link, rank)
        outcome = worker.run_once(loop, dataclasses.replace(setup, controller=handle))
        place.link.send(("end", rank, outcome))
        if outcome.failure is not None:
            # Rank 0 may be waiting for this one in a collective, so this one does not wait for it:
            # when its process ends, torchrun ends the others.
            return LocalEnd(_failed(rank, outcome.failure), storage, worker.error)
    ended: RunOutcome = place.link.wait_for("outcome")
    place.link.send(("left", rank, None))
    return LocalEnd(ended, storage, error)


class _FollowersHandle:
    """The controller as other ranks than 0 reach it."""

    def __init__(self, link: LocalLink, rank: int) -> None:
        self.report = _Method(self._report)
        self._link = link
        self._rank = rank

    def _report(self, *arguments: Any) -> concurrent.futures.Future[None]:
        self._link.send(("report", self._rank, arguments))
        sent: concurrent.futures.Future[None] = concurrent.futures.Future()
        sent.set_result(None)
        return sent


def _failed(rank: int, failure: WorkerFailure) -> RunOutcome:
    return RunOutcome(
        state=RunState.ERRORED,
        metrics=None,
        checkpoints=[],
        return_value=b"",
        message=describe({rank: failure}, ()),
        worker_failures={rank: failure},
        controller_failure=None,
    )


# --- rank 0 ------------------------------------------------------------------------------


class _Leader:
    """Rank 0: the controller in a thread, the train loop in the thread that called ``fit``."""

    def __init__(self, spec: RunSpec, loop: TrainLoop, place: LocalPlace) -> None:
        self._loop = loop
        self._place = place
        self._size = place.ranks.world_size
        scaling = _Fixed(ScalingDecision(self._size, spec.scaling_config.worker_resources))
        policy = spec.failure_policy if place.link is None else _Never()
        self._spec = dataclasses.replace(spec, failure_policy=policy, scaling_policy=scaling)
        self._thread = ControllerThread(self._spec, self._make_group)
        #: What the main thread is to do: run an attempt, or take note of the end.
        self._next: queue.SimpleQueue[_Attempt | None] = queue.SimpleQueue()
        self._reader: threading.Thread | None = None

    def run(self) -> LocalEnd:
        """Run attempts until the controller ends the run."""
        worker = _LocalWorker(self._spec, self._place)
        self._thread.start(self._loop, lambda: self._next.put(None))
        try:
            while (attempt := self._next.get()) is not None:
                attempt.finish(worker.run_once(self._loop, attempt.setup))
        except KeyboardInterrupt:
            self._thread.abort()
            raise
        outcome = self._thread.outcome()
        self._tell_others(outcome)
        # What a loop raises because its controller has failed is not the cause of anything.
        error = worker.error if outcome.worker_failures else None
        return LocalEnd(outcome, self._spec.storage, error)

    def _make_group(self, spec: RunSpec, decision: ScalingDecision) -> WorkerGroup:
        del spec
        return cast("WorkerGroup", _LocalGroup(decision.num_workers, self._begin))

    def _begin(self, attempt: _Attempt) -> None:
        """Start an attempt; called in the controller's thread."""
        link = self._place.link
        if link is not None:
            self._start_reader(link, attempt)
            link.publish("setup", dataclasses.replace(attempt.setup, controller=None))
        self._next.put(attempt)

    def _start_reader(self, link: LocalLink, attempt: _Attempt | None) -> threading.Thread:
        self._reader = threading.Thread(
            target=self._read, args=[link, attempt], name="train-ranks", daemon=True
        )
        self._reader.start()
        return self._reader

    def _read(self, link: LocalLink, attempt: _Attempt | None) -> None:
        """Pass on what the other ranks say, until each has said its last word."""
        missing = set(range(1, self._size))
        while missing:
            kind, rank, content = link.receive()
            if kind == "report":
                with contextlib.suppress(RuntimeError):  # the run is over
                    self._thread.call("report", *content)
            elif kind == "end" and attempt is not None:
                attempt.finish(content, rank)
            if kind == "left" or (kind == "end" and content.failure is not None):
                missing.discard(rank)

    def _tell_others(self, outcome: RunOutcome) -> None:
        """Tell the other ranks how the run ended, and stay until they have read it."""
        link = self._place.link
        if link is None:
            return
        reader = self._reader
        if reader is None:  # the run ended before it came to an attempt
            reader = self._start_reader(link, None)
            link.publish("setup", None)
        link.publish("outcome", outcome)
        reader.join(END_TIMEOUT if outcome.state is RunState.FINISHED else FAILURE_TIMEOUT)


class _Attempt:
    """One attempt of the group: what its ranks are given, and where their outcomes go."""

    def __init__(self, setup: SessionSetup, size: int) -> None:
        self.setup = setup
        self.machine = asyncio.get_running_loop()
        self.outcomes = [self.machine.create_future() for _ in range(size)]

    def finish(self, outcome: WorkerOutcome, rank: int = 0) -> None:
        """Tell how the train loop of a rank ended; from any thread."""
        with contextlib.suppress(RuntimeError):  # the run is over
            self.machine.call_soon_threadsafe(self._set, self.outcomes[rank], outcome)

    @staticmethod
    def _set(future: asyncio.Future[WorkerOutcome], outcome: WorkerOutcome) -> None:
        if not future.done():
            future.set_result(outcome)


class _LocalGroup:
    """The worker group as the controller sees it: processes that run already."""

    def __init__(self, size: int, begin: Callable[[_Attempt], None]) -> None:
        self.size = size
        self._begin = begin

    async def place(self) -> None:
        """Nothing has to be reserved."""

    async def start(self) -> None:
        """The processes run, and are connected."""

    def run(self, loop: Any, setup: SessionSetup) -> list[asyncio.Future[WorkerOutcome]]:
        """Let the main thread run the train loop; the outcomes, in order of rank."""
        del loop
        attempt = _Attempt(setup, self.size)
        self._begin(attempt)
        return attempt.outcomes

    async def stop(self, *, graceful: bool) -> None:
        """The processes end when their programs do."""


class _Fixed(ScalingPolicy):
    """The processes that there are."""

    def __init__(self, decision: ScalingDecision) -> None:
        self._decision = decision

    def next_group(self) -> ScalingDecision:
        """All of them."""
        return self._decision


class _Never(FailurePolicy):
    """What starts processes again is torchrun, with --max-restarts."""

    def decide(self, failure: GroupFailure) -> FailureDecision:
        """End the run."""
        del failure
        return FailureDecision.RAISE
