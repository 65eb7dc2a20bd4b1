"""Errors that ``fit()`` raises, and failures of workers on their way to it.

Each names the rank it comes from and keeps the remote traceback. The exception of a worker may be
of a class that only the worker and the driver can load, so the controller passes it on as bytes.
Mistakes in configurations are ``ValueError`` and ``TypeError``, raised where they are made.
"""

from __future__ import annotations

import dataclasses
import itertools
import sys
import traceback
from types import MappingProxyType
from typing import TYPE_CHECKING

from miniray.common.exception_transport import pack, unpack
from miniray.exceptions import ActorError, MinirayError
from miniray.train.base.ranks import listed

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping, Sequence

    from miniray.exceptions import TaskError


class TrainingFailedError(MinirayError):
    """A training run failed: a :class:`WorkerGroupError` or a :class:`ControllerError`."""


class WorkerGroupError(TrainingFailedError):
    """One or more workers of a run failed.

    Attributes:
        error_message: What happened on each rank, with the remote tracebacks.
        worker_failures: The exception of each rank that failed, by world rank.
    """

    def __init__(self, error_message: str, worker_failures: dict[int, BaseException]) -> None:
        super().__init__(error_message, worker_failures)
        self.error_message = error_message
        self.worker_failures = worker_failures

    def __str__(self) -> str:
        return f"Training failed due to worker errors:\n{self.error_message}"


class ControllerError(TrainingFailedError):
    """The controller of a run failed: storage, a callback, or the runtime.

    Attributes:
        controller_failure: The exception that ended the run.
        details: Its remote traceback as text; empty if there is none.
    """

    def __init__(self, controller_failure: BaseException, details: str = "") -> None:
        super().__init__(controller_failure, details)
        self.controller_failure = controller_failure
        self.details = details

    def __str__(self) -> str:
        cause = self.details or self.controller_failure
        return f"Training failed due to a controller error:\n{cause}"


class PlacementTimeoutError(TrainingFailedError):
    """Workers did not get their resources in ``ScalingConfig(placement_timeout_s)``."""


class CollectiveError(TrainingFailedError):
    """A ``barrier()`` or ``broadcast_from_rank_zero()`` can't come to its end.

    A rank has gone, ranks called different things, or it took too long. Every further
    collective call of the same workers raises it too.
    """


class CollectiveTimeoutError(CollectiveError, TimeoutError):
    """Not all ranks came to a collective call in time."""


class TrainLoopLoadError(TrainingFailedError):
    """A worker could not load the train loop; its cause is the exception of loading."""


class StorageNotSharedError(TrainingFailedError, ValueError):
    """The storage path names different places on different machines of a run."""


class StorageUnusableError(TrainingFailedError):
    """The storage path can't be read or written, at all or on some machines of a run."""


class RunTakenOverError(TrainingFailedError):
    """Another driver has started a run of the same name in the same storage meanwhile."""


class WorkerHungError(TrainingFailedError):
    """The workers made no progress for too long, or waited for a rank that had returned.

    See ``FailureConfig(hang_timeout_s)``.
    """


class AttemptOverError(TrainingFailedError):
    """The worker belongs to a group that the run has given up; another one runs in its place."""


class ControllerLostError(TrainingFailedError, ConnectionError):
    """In local mode: the run has ended, or rank 0 is gone, so that calls of ranks fail."""


class CallbackError(MinirayError):
    """A hook of a callback failed; the ``controller_failure`` of a :class:`ControllerError`.

    Attributes:
        cause: The exception that the hook raised.
    """

    def __init__(self, callback: str, hook: str, cause: BaseException) -> None:
        super().__init__(callback, hook, cause)
        self.callback = callback
        self.hook = hook
        self.cause = cause

    def __str__(self) -> str:
        cause = f"{type(self.cause).__name__}: {self.cause}"
        return f"The callback {self.callback} failed in {self.hook}(): {cause}"


#: An error shows for at most this many ranks what they were doing, or why they failed at one place.
MOST_SHOWN = 16
#: An exception keeps this many causes on its way, itself included.
MOST_CAUSES = 8


@dataclasses.dataclass(frozen=True)
class WorkerFailure:
    """Why a worker failed.

    Attributes:
        summary: Type and message of the exception, or how the process ended.
        traceback: The traceback as text; empty when the process ended.
        pickled: The exception and its causes, each pickled; none when it can't be pickled.
    """

    summary: str
    traceback: str = ""
    pickled: tuple[bytes, ...] = ()

    @classmethod
    def of(cls, error: BaseException, *, skip_frames: int = 0) -> WorkerFailure:
        """Describe an exception; ``skip_frames`` leaves out the outermost frames."""
        trace = error.__traceback__
        for _ in range(skip_frames):
            trace = trace.tb_next if trace is not None else None
        text = "".join(traceback.format_exception(type(error), error, trace)) if trace else ""
        summary = "".join(traceback.format_exception_only(error)).strip()
        return cls(_noted(summary, error), text and _noted(text, error), _pickled(error))

    @classmethod
    def to_load(cls, error: TaskError) -> WorkerFailure:
        """Describe that a worker could not load the train loop, which therefore did not begin."""
        failure = TrainLoopLoadError(
            f"The worker could not load the train loop: {type(error.cause).__name__}: "
            f"{error.cause}. What train_loop_per_worker, train_loop_config and datasets refer to "
            f"has to be there, too: install it on every node, or give it with "
            f"RunConfig(worker_runtime_env=...)."
        )
        failure.__cause__ = error.cause
        return cls.of(failure)

    @property
    def kind(self) -> str:
        """The name of the exception's class."""
        return self.summary.partition(":")[0].rpartition(".")[2].strip()

    @property
    def frames(self) -> str:
        """The traceback without its last line, which is the summary."""
        return self.traceback.rstrip().removesuffix(self.summary).rstrip()

    def exception(self) -> BaseException:
        """Return the exception, or a RuntimeError with its text where it can't be loaded."""
        errors = _unpickled(self.pickled)
        for error, cause in itertools.pairwise(errors):
            error.__cause__ = cause
        if errors:
            return errors[0]
        return RuntimeError(self.traceback or self.summary)


def _noted(text: str, error: BaseException) -> str:
    """Return the text of an exception with its notes.

    Python adds them by itself from version 3.11 on, as does the package exceptiongroup before.
    """
    if sys.version_info >= (3, 11):
        return text
    notes = "\n".join(getattr(error, "__notes__", ()))
    return text if text.rstrip().endswith(notes) else f"{text.rstrip()}\n{notes}"


def _pickled(error: BaseException) -> tuple[bytes, ...]:
    """Pickle an exception, then its causes, which pickle leaves out, up to one that can't be."""
    each: BaseException | None = error
    pickled: list[bytes] = []
    while each is not None and len(pickled) < MOST_CAUSES:
        blob, _ = pack(each)
        if blob is None:  # user exceptions may hold anything; the text remains
            break
        pickled.append(blob)
        each = each.__cause__
    return tuple(pickled)


def _unpickled(pickled: Sequence[bytes]) -> list[BaseException]:
    """Return the exceptions, up to the first that can't be loaded here."""
    errors: list[BaseException] = []
    for data in pickled:
        try:
            errors.append(unpack(data))
        except Exception:  # noqa: BLE001, PERF203 - whatever is raised when a class is missing
            break
    return errors


class GroupStartError(Exception):
    """Some workers could not be started or connected.

    Attributes:
        failures: Why, by rank; by position in the group where ranks were not yet given out.
    """

    def __init__(self, failures: dict[int, WorkerFailure]) -> None:
        super().__init__(f"{len(failures)} workers could not be started")
        self.failures = failures

    @property
    def lost(self) -> bool:
        """Whether processes or nodes were lost, rather than their code having failed."""
        errors = [failure.exception() for failure in self.failures.values()]
        return any(isinstance(e, ActorError) and not e.actor_init_failed for e in errors)


def describe(
    failures: Mapping[int, WorkerFailure],
    returned: Collection[int],
    activities: Mapping[int, str] = MappingProxyType({}),
) -> str:
    """Return what happened as text; ranks that failed alike share one paragraph."""
    parts = _by_place(failures)
    if returned:
        parts.append(f"The train loop had already returned on: {listed(returned)}.")
    if activities:
        lines = [f"  rank {rank} {doing}" for rank, doing in sorted(activities.items())]
        if len(lines) > MOST_SHOWN:
            lines[MOST_SHOWN:] = [f"  and {len(lines) - MOST_SHOWN} other ranks"]
        parts.append("Meanwhile:\n" + "\n".join(lines))
    return "\n\n".join(parts)


def _by_place(failures: Mapping[int, WorkerFailure]) -> list[str]:
    """Return one text for all ranks that failed at the same place, in order of their first."""
    places: dict[str, dict[str, list[int]]] = {}
    for rank, failure in sorted(failures.items()):
        place = failure.frames or failure.summary
        places.setdefault(place, {}).setdefault(failure.summary, []).append(rank)
    texts = []
    for reasons in places.values():
        lines = [
            f"[{listed(ranks).capitalize()}] {summary}"
            for summary, ranks in list(reasons.items())[:MOST_SHOWN]
        ]
        if len(reasons) > MOST_SHOWN:
            lines.append(f"and {len(reasons) - MOST_SHOWN} more of these, at the same place:")
        elif len(reasons) > 1:
            lines.append("All of these at the same place:")
        first = failures[min(rank for ranks in reasons.values() for rank in ranks)]
        lines.append(first.frames if len(reasons) > 1 else first.traceback)
        texts.append("\n".join(lines).rstrip())
    return texts
