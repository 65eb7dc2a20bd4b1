"""Errors that ``fit()`` raises.

Each names the rank it comes from and keeps the remote traceback. Mistakes in
configurations are ``ValueError`` and ``TypeError``, raised where they are made.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from miniray.exceptions import MinirayError

if TYPE_CHECKING:
    from collections.abc import Callable


class TrainingFailedError(MinirayError):
    """A training run failed: a :class:`WorkerGroupError` or a :class:`ControllerError`."""


class WorkerGroupError(TrainingFailedError):
    """One or more workers of a run failed.

    Attributes:
        error_message: What happened on each rank, with the remote tracebacks.
        worker_failures: The exception of each rank that failed, by world rank.
    """

    def __init__(self, error_message: str, worker_failures: dict[int, BaseException]) -> None:
        super().__init__(f"Training failed due to worker errors:\n{error_message}")
        self.error_message = error_message
        self.worker_failures = worker_failures

    def __reduce__(
        self,
    ) -> tuple[Callable[..., WorkerGroupError], tuple[str, dict[int, BaseException]]]:
        return type(self), (self.error_message, self.worker_failures)


class ControllerError(TrainingFailedError):
    """The controller of a run failed: storage, a callback, or the runtime.

    Attributes:
        controller_failure: The exception that ended the run.
        details: Its remote traceback as text; empty if there is none.
    """

    def __init__(self, controller_failure: BaseException, details: str = "") -> None:
        super().__init__(
            f"Training failed due to a controller error:\n{details or controller_failure}"
        )
        self.controller_failure = controller_failure
        self.details = details

    def __reduce__(self) -> tuple[Callable[..., ControllerError], tuple[BaseException, str]]:
        return type(self), (self.controller_failure, self.details)


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
        callback: Name of the callback's class.
        hook: Name of the hook.
        cause: The exception that the hook raised.
    """

    def __init__(self, callback: str, hook: str, cause: BaseException) -> None:
        super().__init__(
            f"The callback {callback} failed in {hook}(): {type(cause).__name__}: {cause}"
        )
        self.callback = callback
        self.hook = hook
        self.cause = cause

    def __reduce__(self) -> tuple[Callable[..., CallbackError], tuple[str, str, BaseException]]:
        return type(self), (self.callback, self.hook, self.cause)
