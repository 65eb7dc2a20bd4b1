"""The calls of a rank to its attempt.

The calls are the same wherever the controller runs: in an actor, in a thread of this process, or in
the process of rank 0. What they do is in ``controller/attempt.py``.
"""

from __future__ import annotations

import dataclasses
import functools
import threading
from concurrent.futures import CancelledError, Future
from typing import TYPE_CHECKING, Any, Protocol, TypeAlias, TypeVar, cast

from miniray import api
from miniray.train.base.exceptions import ControllerLostError

if TYPE_CHECKING:
    from collections.abc import Callable

    from miniray.common.object_ref import ObjectRef
    from miniray.train.base.exceptions import CollectiveError, WorkerFailure
    from miniray.train.base.reports import Report
    from miniray.train.storage.storage import CheckpointRecord

    T = TypeVar("T")
    #: Waits for the result of a call; raises if the controller is gone.
    Result: TypeAlias = Callable[[], T]
    #: Begins a call of ``TrainController.call``: ``remote`` of that method, or what does the same
    #: for a controller that is no actor. Calls of one rank begin in order, from any thread. Raises
    #: MinirayError if it is known already that the controller is gone.
    Carrier: TypeAlias = Callable[..., ObjectRef[Any] | Future[Any]]


@dataclasses.dataclass(frozen=True)
class CollectiveOutcome:
    """What a rank gets from a collective: the pickled value of rank 0, or why it failed."""

    value: bytes = b""
    error: CollectiveError | None = None


class RankCalls(Protocol):
    """The methods of ``Attempt`` that ranks call, without the rank; it says what they do.

    Each begins its call at once, in the order called.
    """

    def report(self, index: int, report: Report) -> Result[None]: ...

    def announce_upload(self, index: int) -> Result[None]: ...

    def begin_upload(self, index: int, name: str, in_place: bool) -> Result[str]: ...

    def upload_failed(self, index: int, failure: WorkerFailure | None) -> Result[None]: ...

    def reported_checkpoints(
        self, count: int, timeout: float | None
    ) -> Result[tuple[list[CheckpointRecord], list[int]]]: ...

    def join(self, number: int, call: str, value: bytes) -> Result[CollectiveOutcome]: ...

    def use_keys(self, operation: str, *arguments: Any) -> Result[Any]: ...


def rank_calls(carrier: Carrier, attempt: int, rank: int) -> RankCalls:
    return cast("RankCalls", _RankCalls(carrier, attempt, rank))


@dataclasses.dataclass(frozen=True)
class _RankCalls:
    """Passes each call on by its name, to ``TrainController.call``."""

    carrier: Carrier
    attempt: int
    rank: int

    def __getattr__(self, name: str) -> Callable[..., Result[Any]]:
        if name.startswith("_"):  # looked up by pickle
            raise AttributeError(name)
        return functools.partial(self._begin, name)

    def _begin(self, method: str, *arguments: Any) -> Result[Any]:
        return functools.partial(_wait, self.carrier(method, self.attempt, self.rank, *arguments))


def _wait(begun: ObjectRef[Any] | Future[Any]) -> Any:
    """Wait for the result of a call."""
    if isinstance(begun, Future):
        try:
            return begun.result()
        except CancelledError:
            raise run_has_ended() from None
    if threading.current_thread() is threading.main_thread():
        return api.get(begun)
    # get() would read this process's messages while it waits, to answer sooner: that is for the
    # train loop to do.
    return begun.future().result()


def run_has_ended() -> ControllerLostError:
    return ControllerLostError(
        "The run has ended, and its controller takes no more calls. The outcome follows when the "
        "train loop returns."
    )
