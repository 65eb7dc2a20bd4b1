"""Errors that ``fit()`` raises.

Each names the rank it comes from and keeps the remote traceback. Mistakes in
configurations are ``ValueError`` and ``TypeError``, raised where they are made.
"""

from __future__ import annotations

from miniray.exceptions import MinirayError


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
    """A worker could not load the train loop; its cause is what loading has raised."""


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
